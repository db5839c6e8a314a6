"""Attention over a paged cache, the store of the new keys and values included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.kernel_cases.timing import KernelCase
from rose_backend.kernels import paged_decode, paged_prefill

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    """A model's attention shape."""

    name: str
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    def new_rows(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value as views of one projection's output."""
        widths = [self.num_query_heads, self.num_kv_heads, self.num_kv_heads]
        shape = (num_tokens, sum(widths), self.head_size)
        projected = torch.randn(shape, dtype=self.dtype, device="cuda")
        query, key, value = projected.split(widths, dim=1)
        return query, key, value


GPT2 = Heads("GPT-2", 12, 12, 64, torch.float16)
LLAMA_8B = Heads("Llama-8B", 32, 8, 128, torch.bfloat16)


def make_caches(heads: Heads, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a key and a value cache full of random numbers."""
    shape = (num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_size)
    return torch.randn(shape, dtype=heads.dtype, device="cuda"), torch.randn(
        shape, dtype=heads.dtype, device="cuda"
    )


def decode_case(heads: Heads, num_rows: int, context: int) -> KernelCase:
    """One new token per row; ``context`` counts it."""
    token_bytes = 2 * heads.num_kv_heads * heads.head_size * heads.dtype.itemsize
    row_bytes = (
        context + 1
    ) * token_bytes + 2 * heads.num_query_heads * heads.head_size * heads.dtype.itemsize

    def make_launches(num_sets: int) -> Sequence[Callable[[], object]]:
        width = -(-context // BLOCK_SIZE)
        num_blocks = num_sets * num_rows * width
        key_cache, value_cache = make_caches(heads, num_blocks)
        tables = torch.randperm(num_blocks, device="cuda").to(torch.int32).view(num_sets, num_rows, width)
        lengths = torch.full((num_rows,), context - 1, dtype=torch.int32, device="cuda")

        def launch(table: torch.Tensor) -> Callable[[], object]:
            query, key, value = heads.new_rows(num_rows)
            out = torch.empty(query.shape, dtype=query.dtype, device="cuda")
            scale = heads.head_size**-0.5
            return lambda: paged_decode(
                query, key, value, key_cache, value_cache, table, lengths, scale=scale, out=out
            )

        return [launch(table) for table in tables]

    return KernelCase(
        f"decode {heads.name} B={num_rows} context {context}", num_rows * row_bytes, make_launches
    )


def prefill_case(heads: Heads, num_rows: int, prompt_len: int, *, dense: bool = False) -> KernelCase:
    """Whole prompts without earlier context. ``dense`` times torch's flash attention instead, which stores nothing."""
    num_tokens = num_rows * prompt_len
    head_bytes = heads.head_size * heads.dtype.itemsize
    num_bytes = (
        num_tokens * head_bytes * (2 * heads.num_query_heads + (2 if dense else 4) * heads.num_kv_heads)
    )
    flops = 2 * num_rows * heads.num_query_heads * prompt_len * (prompt_len + 1) * heads.head_size
    name = f"{'torch flash' if dense else 'prefill'} {heads.name} B={num_rows} prompts of {prompt_len}"

    def make_dense(num_sets: int) -> Sequence[Callable[[], object]]:
        def launch() -> Callable[[], object]:
            query, key, value = (
                rows.reshape(num_rows, prompt_len, -1, heads.head_size).transpose(1, 2).contiguous()
                for rows in heads.new_rows(num_tokens)
            )
            enable_gqa = heads.num_query_heads != heads.num_kv_heads
            return lambda: F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=enable_gqa
            )

        return [launch() for _ in range(num_sets)]

    def make_launches(num_sets: int) -> Sequence[Callable[[], object]]:
        width = -(-prompt_len // BLOCK_SIZE)
        key_cache, value_cache = make_caches(heads, num_sets * num_rows * width)
        tables = (
            torch.randperm(key_cache.shape[0], device="cuda").to(torch.int32).view(num_sets, num_rows, width)
        )
        starts = torch.arange(0, num_tokens + 1, prompt_len, dtype=torch.int32, device="cuda")
        lengths = torch.zeros(num_rows, dtype=torch.int32, device="cuda")

        def launch(table: torch.Tensor) -> Callable[[], object]:
            query, key, value = heads.new_rows(num_tokens)
            out = torch.empty(query.shape, dtype=query.dtype, device="cuda")
            scale = heads.head_size**-0.5
            return lambda: paged_prefill(
                query, key, value, key_cache, value_cache, table, starts, lengths, scale=scale, out=out
            )

        return [launch(table) for table in tables]

    return KernelCase(name, num_bytes, make_dense if dense else make_launches, flops=flops)


def cases() -> Iterator[KernelCase]:
    """Yield the cases that the table shows."""
    for num_rows in (1, 8, 32, 128, 256):
        for context in (512, 1024):
            yield decode_case(GPT2, num_rows, context)
    for num_rows, context in ((1, 1024), (1, 32768), (8, 4096), (64, 4096)):
        yield decode_case(LLAMA_8B, num_rows, context)
    for heads, num_rows, prompt_len in ((GPT2, 32, 512), (GPT2, 8, 1024), (LLAMA_8B, 4, 4096)):
        yield prefill_case(heads, num_rows, prompt_len)
        yield prefill_case(heads, num_rows, prompt_len, dense=True)
