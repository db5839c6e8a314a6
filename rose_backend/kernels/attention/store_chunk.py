"""Store a prefill chunk in caches of another dtype, before it is attended: what attention reads must be rounded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.attention.prefill_tile import find_tile, store_tile
from rose_backend.kernels.kv.float8 import load_scale
from rose_backend.kernels.tuning.attention_decode import rows_tile

_TOKEN_TILE = 64


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "query_start_ptr",
        "num_computed_ptr",
        "key_scale_ptr",
        "value_scale_ptr",
    ],
)
def _store_chunk_kernel(
    new_key_ptr,
    new_value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    query_start_ptr,
    num_computed_ptr,
    key_scale_ptr,
    value_scale_ptr,
    num_rows,
    new_key_token_stride,
    new_key_head_stride,
    new_value_token_stride,
    new_value_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
):
    """Store a chunk in caches of another dtype: a program stores one tile of a row's tokens for one KV head."""
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    work = tl.program_id(0) // NUM_HEADS
    row, tile = find_tile(query_start_ptr, num_computed_ptr, num_rows, work, ROWS_TILE, TOKEN_TILE)
    if row >= num_rows:
        return
    first_token = tl.load(query_start_ptr + row).to(tl.int64)
    num_tokens = tl.load(query_start_ptr + row + 1) - first_token.to(tl.int32)
    computed = tl.load(num_computed_ptr + row)
    table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
    tokens = tile * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
    new_key_ptr += first_token * new_key_token_stride + head * new_key_head_stride
    new_value_ptr += first_token * new_value_token_stride + head * new_value_head_stride
    key_cache = (key_cache_ptr + head * key_head_stride, key_block_stride, key_token_stride)
    value_cache = (value_cache_ptr + head * value_head_stride, value_block_stride, value_token_stride)
    store_tile(
        new_key_ptr, new_key_token_stride, key_cache, load_scale(key_scale_ptr),
        table_ptr, tokens, num_tokens, computed, BLOCK_SIZE, HEAD_SIZE, HEAD_TILE,
    )  # fmt: skip
    store_tile(
        new_value_ptr, new_value_token_stride, value_cache, load_scale(value_scale_ptr),
        table_ptr, tokens, num_tokens, computed, BLOCK_SIZE, HEAD_SIZE, HEAD_TILE,
    )  # fmt: skip


def store_chunk(
    new_key: torch.Tensor,  # [T, HKV, D]
    new_value: torch.Tensor,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    block_table: torch.Tensor,  # [R, MB] int32
    query_start_loc: torch.Tensor,  # [R + 1] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    """Store each request's new tokens in float8 caches, as ``rose_backend.kernels.paged_prefill`` says."""
    num_tokens, num_kv_heads, head_size = new_key.shape
    num_rows = num_computed_tokens.shape[0]
    _store_chunk_kernel[((num_tokens // _TOKEN_TILE + num_rows) * num_kv_heads,)](
        new_key,
        new_value,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        num_computed_tokens,
        key_scale,
        value_scale,
        num_rows,
        *new_key.stride()[:2],
        *new_value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        NUM_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_TILE=triton.next_power_of_2(head_size),
        BLOCK_SIZE=key_cache.shape[1],
        ROWS_TILE=rows_tile(num_rows),
        TOKEN_TILE=_TOKEN_TILE,
    )
