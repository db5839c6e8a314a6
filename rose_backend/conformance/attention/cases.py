"""What a layer can be asked to be: head shapes, types, masks. Batches come on top."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention layer and its cache. Written out only where it differs from the defaults."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    dtype: torch.dtype = torch.float16
    block_size: int | None = None
    """Tokens per block; None takes what the backend prefers to 16."""
    cache_dtype: str = "auto"
    key_scale: float = 1.0
    """Of a float8 cache: a stored number times its scale is the key."""
    value_scale: float = 1.0
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    num_speculative_tokens: int = 0

    @property
    def has_float8_cache(self) -> bool:
        """Whether the cache holds float8 numbers."""
        return self.cache_dtype.startswith("fp8")

    @property
    def float8(self) -> torch.dtype:
        """The type of these numbers."""
        return torch.float8_e5m2 if self.cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name}={_short(value)}" for name, value in changed.items()) or "plain"


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")


# Every way in which decodes, prefills and chunks can be mixed, small enough for a CPU.
BATCHES = {
    "one token": "q1",
    "first tokens": "q1s1,q1s2,q1s3",
    "decodes": "4q1s40",
    "decodes around block borders": "q1s15,q1s16,q1s17,q1s31,q1s32,q1s33,q1s64,q1s65",
    "prefill": "q37",
    "prefills around block borders": "q15,q16,q17,q32,q33",
    "prefills of two tokens": "q2,q2s18,q2s17",
    "chunks after context": "q16s32,q17s33,q20s50",
    "chunks that start inside a block": "q7s20,q9s25,q30s47",
    "decodes and prefills": "3q1s37,q5s25,q33",
    "a decode and a prefill that fill whole blocks": "q1s32,q32",
}
DRAFTED_BATCHES = {
    "uniform": "4q5s40",
    "first": "2q5",
    "around block borders": "q5s16,q5s17,q5s20,q5s32,q5s35",
    "of several lengths": "q1s20,q2s17,q3s21,q4s64,q5s70",
    "and prefills": "2q5s40,q1s33,q33,q20s50",
}
# What takes long on a CPU: contexts that are split over many programs, full waves of rows, long prompts.
LONG_BATCHES = {
    "8 decodes of 1k": "8q1s1k",
    "one decode of 16k": "q1s16k",
    "256 decodes": "256q1s300",
    "decodes of very different lengths": "q1s8k,3q1s1k,60q1s17",
    "prefills of 2k": "2q2k",
    "a chunk after 3k": "q1ks4k",
    "decodes and chunks": "8q1s1k,2q256s512",
    "decodes and prompts": "64q1s512,4q128s1k,q777",
}
LONG_DRAFTED_BATCHES = {"drafts after 1k": "4q5s1k", "64 rows of drafts": "64q5s300"}

MIXED = "2q1s37,q1s16,q7s25,q33"
"""For cases whose subject is not the batch."""

HEAD_SHAPES = (
    Case(heads=12, kv_heads=12, head_size=64),
    Case(heads=32, kv_heads=8, head_size=128),
    Case(heads=8, kv_heads=1, head_size=80),
    Case(heads=10, kv_heads=2, head_size=64),
    Case(heads=6, kv_heads=2, head_size=128),
    Case(heads=1, kv_heads=1, head_size=64),
    Case(heads=2, kv_heads=1, head_size=256),
    Case(heads=4, kv_heads=2, head_size=512),
    Case(heads=2, kv_heads=2, head_size=96),
)
TYPES = tuple(Case(dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
BLOCK_SIZES = tuple(Case(block_size=size) for size in (16, 32, 48, 64, 128))
MASKS = (
    Case(sliding_window=1),
    Case(sliding_window=9),
    Case(sliding_window=16),
    Case(sliding_window=1000),
    Case(soft_cap=2.0),
    Case(soft_cap=2.0, sliding_window=9),
    Case(alibi=True),
    Case(alibi=True, sliding_window=9),
    Case(sinks=True),
    Case(sinks=True, sliding_window=9),
    Case(sinks=True, soft_cap=2.0),
    Case(sinks=True, heads=10, kv_heads=2, dtype=torch.bfloat16),
)
FLOAT8 = (
    Case(cache_dtype="fp8"),
    Case(cache_dtype="fp8_e4m3", dtype=torch.bfloat16),
    Case(cache_dtype="fp8", key_scale=0.05, value_scale=0.11),
    Case(cache_dtype="fp8", key_scale=0.25, value_scale=0.5, heads=32, kv_heads=8, head_size=128),
    Case(cache_dtype="fp8", sliding_window=9, soft_cap=2.0),
    # Of these keys and values some are larger than the largest number.
    Case(cache_dtype="fp8", key_scale=0.004, value_scale=0.004),
    Case(cache_dtype="fp8_e5m2"),
    Case(cache_dtype="fp8_e5m2", dtype=torch.bfloat16, key_scale=0.25, value_scale=0.5),
)
DRAFTS = Case(num_speculative_tokens=4)
CASES = {str(case): case for case in (*HEAD_SHAPES, *TYPES, *BLOCK_SIZES, *MASKS, *FLOAT8)}
