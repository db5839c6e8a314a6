"""Prefill attention over a paged cache, the store of the chunk's keys and values included."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.kernel_cases.attention_peers import FLASH, attention_peers, flash_attention
from benchmarks.kernel_cases.case import ROSE, Contest, KernelCase
from benchmarks.kernel_cases.decode import TOLERANCE
from benchmarks.kernel_cases.paged_step import GPT2, LLAMA_8B, Heads, PagedStep, make_steps
from rose_backend.kernels import paged_prefill

FLASH_BLOCK_SIZE = 128
"""FlashAttention 3 loads such blocks with the tensor memory accelerator."""


def prefill_case(heads: Heads, num_rows: int, query_len: int, num_computed: int = 0) -> KernelCase:
    """``query_len`` new tokens per row after ``num_computed`` cached ones."""

    def launch(step: PagedStep) -> Callable[[], torch.Tensor]:
        key_cache, value_cache = step.key_cache, step.value_cache
        starts, lengths = step.query_start_loc(), step.per_row(num_computed)
        out = torch.empty(step.query.shape, dtype=heads.dtype, device="cuda")
        return lambda: paged_prefill(
            step.query,
            step.key,
            step.value,
            key_cache,
            value_cache,
            step.block_table,
            starts,
            lengths,
            scale=heads.scale,
            out=out,
        )

    def make(num_sets: int) -> Contest:
        steps = make_steps(heads, num_rows, num_computed, query_len, num_sets)
        sides = {ROSE: [launch(step) for step in steps], **attention_peers(steps)}
        large = [step.with_block_size(FLASH_BLOCK_SIZE) for step in steps]
        large_name = f"{FLASH}, blocks of {FLASH_BLOCK_SIZE}"
        launches = flash_attention(large_name, large)
        if launches is not None:
            sides[large_name] = launches

        def reset() -> None:
            steps[0].forget()
            large[0].forget()

        return Contest(
            sides,
            reset=reset,
            observe=lambda side, out: (out, (large if side == large_name else steps)[0].stored()),
            tolerance=TOLERANCE[heads.dtype],
        )

    row_bytes = (num_computed + 2 * query_len) * heads.token_bytes + 2 * query_len * heads.query_bytes
    pairs = query_len * num_computed + query_len * (query_len + 1) // 2
    flops = 4 * num_rows * heads.num_query_heads * pairs * heads.head_size
    after = f" after {num_computed:,}" if num_computed else ""
    name = f"prefill {heads.name} {num_rows} x {query_len:,}{after}"
    return KernelCase(name, num_rows * row_bytes, make, flops=flops)


def cases() -> Iterator[KernelCase]:
    """Yield the cases that the table shows."""
    yield prefill_case(GPT2, 32, 512)
    for heads in (GPT2, LLAMA_8B):
        yield prefill_case(heads, 4, 8192)
        yield prefill_case(heads, 2, 2048, 6144)
