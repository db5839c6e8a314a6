"""Decode attention over a paged cache, the store of the new keys and values included."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.kernel_cases.attention_peers import attention_peers
from benchmarks.kernel_cases.case import ROSE, Contest, KernelCase
from benchmarks.kernel_cases.paged_step import GPT2, LLAMA_8B, Heads, PagedStep, make_steps
from rose_backend.kernels import paged_decode

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def decode_case(heads: Heads, num_rows: int, context: int) -> KernelCase:
    """One new token per row; ``context`` counts it."""

    def launch(step: PagedStep) -> Callable[[], torch.Tensor]:
        key_cache, value_cache = step.key_cache, step.value_cache
        lengths = step.per_row(step.num_computed)
        out = torch.empty(step.query.shape, dtype=heads.dtype, device="cuda")
        return lambda: paged_decode(
            step.query,
            step.key,
            step.value,
            key_cache,
            value_cache,
            step.block_table,
            lengths,
            scale=heads.scale,
            out=out,
        )

    def make(num_sets: int) -> Contest:
        steps = make_steps(heads, num_rows, context - 1, 1, num_sets)
        return Contest(
            {ROSE: [launch(step) for step in steps], **attention_peers(steps)},
            reset=steps[0].forget,
            observe=lambda side, out: (out, steps[0].stored()),
            tolerance=TOLERANCE[heads.dtype],
        )

    row_bytes = (context + 1) * heads.token_bytes + 2 * heads.query_bytes
    return KernelCase(f"decode {heads.name} B={num_rows} context {context:,}", num_rows * row_bytes, make)


def cases() -> Iterator[KernelCase]:
    """Yield the cases that the table shows."""
    for context in (512, 1024):
        for num_rows in (1, 8, 32, 64, 128, 256):
            yield decode_case(GPT2, num_rows, context)
    for num_rows, context in ((1, 8192), (1, 32_768), (8, 8192), (64, 4096)):
        yield decode_case(LLAMA_8B, num_rows, context)
