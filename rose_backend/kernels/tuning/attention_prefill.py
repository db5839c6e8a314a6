"""What decides how fast prefill attention is, for each shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from rose_backend.kernels.tuning.measured import Table


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """What decides speed only. Tiles are powers of two of at least 16."""

    query_tile: int
    tile: int
    """Keys per iteration."""
    num_warps: int
    num_stages: int
    by_descriptor: bool
    """Load the chunk's keys and values through tensor descriptors, by the copy engine of compute capability 9.0. Only
    for 16-bit types and heads of a power of two."""
    split: bool
    """Attend the chunk's tiles before the queries' own in a loop of their own, without a causal mask."""


@lru_cache(maxsize=1024)
def prefill_tuning(
    mean_query_len: float,
    head_size: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    is_describable: bool,
) -> PrefillTuning:
    """Return what was fastest on an H200 for this shape; elsewhere what fits the registers.

    Args:
        is_describable: whether tensor descriptors of the chunk's keys and values are possible.
    """
    major, minor = capability
    return _TABLE.choose(
        {
            "bits": 8 * dtype.itemsize,
            "query_len": mean_query_len,
            "head_size": head_size,
            "capability": 10 * major + minor,
            "describable": is_describable,
        }
    )


_TABLE = Table(
    "prefill attention", PrefillTuning, ("bits", "query_len", "head_size", "capability", "describable")
)
TUNED_QUERY_LENS = (1, *_TABLE.steps("query_len"))
"""Mean query lengths from which on the choice changes, for one shape or another."""
