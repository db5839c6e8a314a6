"""Prefill attention in one launch: a program attends one tile of a row's queries for one query head.

Earlier context comes from the cache, the chunk itself from the projections. Of the query heads that share a KV head the
first one's program stores the tile's keys and values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu.softmax import HIDDEN, NO_LOGIT, cached_offsets, logit_factors, to_logits

_FLOAT32_SLICE = 32


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """What decides speed only. Tiles are powers of two of at least 16."""

    query_tile: int
    tile: int
    """Keys per iteration; divides ``query_tile``."""
    num_warps: int
    num_stages: int
    split: bool
    """Attend the chunk's tiles before the queries' own in a loop of their own, without a causal mask."""


@triton.jit
def _find_tile(
    query_start_ptr, num_computed_ptr, num_rows, work, ROWS_TILE: tl.constexpr, QUERY_TILE: tl.constexpr
):
    """Return row and tile within the row of piece ``work``; ``num_rows`` or more if there is none."""
    rows = tl.arange(0, ROWS_TILE)
    is_row = rows < num_rows
    starts = tl.load(query_start_ptr + rows, mask=is_row, other=0)
    stops = tl.load(query_start_ptr + rows + 1, mask=is_row, other=0)
    computed = tl.load(num_computed_ptr + rows, mask=is_row, other=-1)
    tiles = tl.where(computed >= 0, tl.cdiv(tl.maximum(stops - starts, 0), QUERY_TILE), 0)
    row = tl.sum((tl.cumsum(tiles, 0) <= work).to(tl.int32))
    return row, work - tl.sum(tl.where(rows < row, tiles, 0))


@triton.jit
def _float32_products(
    query_rows, key_rows, HEAD_SIZE: tl.constexpr, HEAD_TILE: tl.constexpr, SLICE: tl.constexpr
):
    """Return query-key products of float32 by short chains of additions, which round less than one long chain."""
    products = tl.zeros([query_rows[0].shape[0], key_rows[0].shape[0]], tl.float32)
    for first in tl.static_range(0, HEAD_TILE, SLICE):
        dims = (first + tl.arange(0, SLICE))[None, :]
        query = tl.load(
            query_rows[0][:, None] + dims, mask=query_rows[1][:, None] & (dims < HEAD_SIZE), other=0.0
        )
        key = tl.load(key_rows[0][:, None] + dims, mask=key_rows[1][:, None] & (dims < HEAD_SIZE), other=0.0)
        products += tl.dot(query, tl.trans(key), input_precision="ieee")
    return products


@triton.jit
def _attend(
    state,
    query,
    query_rows,
    query_positions,
    key_source,
    value_source,
    table_ptr,
    begin,
    end,
    slope,
    window,
    factors,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    FROM_CACHE: tl.constexpr,
    DIAGONAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend over positions ``begin .. end - 1`` and return the new ``state``.

    ``key_source`` and ``value_source`` are (pointer, block stride, token stride). Without ``FROM_CACHE`` the pointer is
    that of position 0 and there are no blocks. With ``DIAGONAL`` queries may lie among the positions; without either,
    there are only whole tiles.
    """
    top, total, attended = state
    HEAD_TILE: tl.constexpr = query.shape[1]
    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_TILE)[None, :]
    if FROM_CACHE:
        block_ids = tl.load(table_ptr + (begin + tokens) // BLOCK_SIZE, mask=begin + tokens < end, other=0)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        positions = start + tokens
        is_token = positions < end
        if FROM_CACHE:
            key_offsets = cached_offsets(block_ids, positions, key_source[1], key_source[2], BLOCK_SIZE)
            value_offsets = cached_offsets(block_ids, positions, value_source[1], value_source[2], BLOCK_SIZE)
            following = positions + TILE
            block_ids = tl.load(table_ptr + following // BLOCK_SIZE, mask=following < end, other=0)
        else:
            key_offsets = positions.to(tl.int64) * key_source[2]
            value_offsets = positions.to(tl.int64) * value_source[2]
        key_rows = key_source[0] + key_offsets
        mask = dims < HEAD_SIZE
        if FROM_CACHE or DIAGONAL:
            mask = is_token[:, None] & mask
        value = tl.load((value_source[0] + value_offsets)[:, None] + dims, mask=mask, other=0.0)
        if SLICE:
            products = _float32_products(query_rows, (key_rows, is_token), HEAD_SIZE, HEAD_TILE, SLICE)
        else:
            key = tl.load(key_rows[:, None] + dims, mask=mask, other=0.0)
            products = tl.dot(query, tl.trans(key))
        distance = positions[None, :] - query_positions[:, None]
        logits = to_logits(products, distance.to(tl.float32), slope, factors, HAS_CAP, HAS_ALIBI)
        if DIAGONAL:
            # What lies past the end lies past every query, too.
            logits = tl.where(distance <= 0, logits, HIDDEN)
        elif FROM_CACHE:
            logits = tl.where(is_token[None, :], logits, HIDDEN)
        if HAS_WINDOW:
            logits = tl.where(distance > -window, logits, HIDDEN)
        new_top = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        attended = tl.dot(weights.to(value.dtype), value, attended * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, total, attended


@triton.jit
def _store_tile(
    new_ptr,
    new_token_stride,
    source,
    table_ptr,
    tokens,
    num_tokens,
    computed,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """Store one KV head's keys or values of ``tokens``. ``source`` is (pointer, block stride, token stride)."""
    dims = tl.arange(0, HEAD_TILE)[None, :]
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (dims < HEAD_SIZE)
    positions = computed + tokens
    block_ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_token, other=0)
    offsets = cached_offsets(block_ids, positions, source[1], source[2], BLOCK_SIZE)
    rows = tl.load(new_ptr + tokens.to(tl.int64)[:, None] * new_token_stride + dims, mask=mask)
    tl.store((source[0] + offsets)[:, None] + dims, rows, mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "num_pieces", "window", "table_stride"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "query_start_ptr",
        "num_computed_ptr",
        "slopes_ptr",
    ],
)
def _paged_prefill_kernel(
    out_ptr,
    query_ptr,
    new_key_ptr,
    new_value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    query_start_ptr,
    num_computed_ptr,
    slopes_ptr,
    num_rows,
    num_pieces,
    window,
    product_factor,
    logit_factor,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
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
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0) % NUM_HEADS
    # From the last tile on: a row's later tiles take longer.
    work = num_pieces - 1 - tl.program_id(0) // NUM_HEADS
    row, tile = _find_tile(query_start_ptr, num_computed_ptr, num_rows, work, ROWS_TILE, QUERY_TILE)
    if row >= num_rows:
        return
    first_token = tl.load(query_start_ptr + row).to(tl.int64)
    num_tokens = tl.load(query_start_ptr + row + 1) - first_token.to(tl.int32)
    computed = tl.load(num_computed_ptr + row)
    kv_head = (head // GROUP).to(tl.int64)
    table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
    key_ptr = key_cache_ptr + kv_head * key_head_stride
    value_ptr = value_cache_ptr + kv_head * value_head_stride
    new_key_ptr += first_token * new_key_token_stride + kv_head * new_key_head_stride
    new_value_ptr += first_token * new_value_token_stride + kv_head * new_value_head_stride

    first_query = tile * QUERY_TILE
    tokens = first_query + tl.arange(0, QUERY_TILE)
    dims = tl.arange(0, HEAD_TILE)[None, :]
    is_query = tokens < num_tokens
    mask = is_query[:, None] & (dims < HEAD_SIZE)
    rows = first_token + tokens
    query_rows = query_ptr + rows * query_token_stride + head * query_head_stride
    query = tl.load(query_rows[:, None] + dims, mask=mask, other=0.0)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + head).to(tl.float32)
    factors = (product_factor, logit_factor)
    key_source = (key_ptr, key_block_stride, key_token_stride)
    value_source = (value_ptr, value_block_stride, value_token_stride)
    state = (
        tl.full([QUERY_TILE], NO_LOGIT, tl.float32),
        tl.zeros([QUERY_TILE], tl.float32),
        tl.zeros([QUERY_TILE, HEAD_TILE], tl.float32),
    )

    diagonal = computed + first_query
    end = tl.minimum(diagonal + QUERY_TILE, computed + num_tokens)
    begin = tl.maximum(diagonal + 1 - window, 0) if HAS_WINDOW else 0
    state = _attend(
        state, query, (query_rows, is_query), computed + tokens, key_source, value_source, table_ptr,
        begin, computed if HAS_NEW else diagonal, slope, window, factors,
        HEAD_SIZE, BLOCK_SIZE, TILE, SLICE, True, False, HAS_WINDOW, HAS_CAP, HAS_ALIBI, STAGES,
    )  # fmt: skip
    if HAS_NEW:
        chunk_key = (new_key_ptr - computed.to(tl.int64) * new_key_token_stride, 0, new_key_token_stride)
        chunk_value = (
            new_value_ptr - computed.to(tl.int64) * new_value_token_stride,
            0,
            new_value_token_stride,
        )
        begin = tl.maximum(begin, computed)
        if SPLIT:
            middle = begin + tl.maximum(diagonal - begin, 0) // TILE * TILE
            state = _attend(
                state, query, (query_rows, is_query), computed + tokens, chunk_key, chunk_value, table_ptr,
                begin, middle, slope, window, factors,
                HEAD_SIZE, BLOCK_SIZE, TILE, SLICE, False, False, HAS_WINDOW, HAS_CAP, HAS_ALIBI, STAGES,
            )  # fmt: skip
            begin = middle
        state = _attend(
            state, query, (query_rows, is_query), computed + tokens, chunk_key, chunk_value, table_ptr,
            begin, end, slope, window, factors,
            HEAD_SIZE, BLOCK_SIZE, TILE, SLICE, False, True, HAS_WINDOW, HAS_CAP, HAS_ALIBI, STAGES,
        )  # fmt: skip
        if head % GROUP == 0:
            _store_tile(
                new_key_ptr, new_key_token_stride, key_source, table_ptr, tokens, num_tokens, computed,
                BLOCK_SIZE, HEAD_SIZE, HEAD_TILE,
            )  # fmt: skip
            _store_tile(
                new_value_ptr, new_value_token_stride, value_source, table_ptr, tokens, num_tokens, computed,
                BLOCK_SIZE, HEAD_SIZE, HEAD_TILE,
            )  # fmt: skip
    else:
        state = _attend(
            state, query, (query_rows, is_query), computed + tokens, key_source, value_source, table_ptr,
            diagonal, end, slope, window, factors,
            HEAD_SIZE, BLOCK_SIZE, TILE, SLICE, True, True, HAS_WINDOW, HAS_CAP, HAS_ALIBI, STAGES,
        )  # fmt: skip
    _, total, attended = state
    out_rows = out_ptr + rows * out_token_stride + head * out_head_stride
    tl.store(out_rows[:, None] + dims, (attended / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def paged_prefill(
    query: torch.Tensor,  # [T, HQ, D]
    new_key: torch.Tensor | None,  # [T, HKV, D]
    new_value: torch.Tensor | None,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    block_table: torch.Tensor,  # [R, MB] int32
    query_start_loc: torch.Tensor,  # [R + 1] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    *,
    scale: float,
    out: torch.Tensor,  # [T, HQ, D]  written
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,  # [HQ]
    logits_soft_cap: float | None = None,
    tuning: PrefillTuning | None = None,
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.paged_prefill``."""
    num_tokens, num_query_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_rows = num_computed_tokens.shape[0]
    if num_rows == 0 or num_tokens == 0:
        return out
    if tuning is None:
        tuning = prefill_tuning(num_tokens / num_rows, head_size, query.dtype, _capability(query.device))
    head_tile = max(triton.next_power_of_2(head_size), 16)
    stored_key = query if new_key is None else new_key
    stored_value = query if new_value is None else new_value
    # Each row wastes at most part of one tile.
    num_pieces = num_tokens // tuning.query_tile + num_rows
    _paged_prefill_kernel[(num_pieces * num_query_heads,)](
        out,
        query,
        stored_key,
        stored_value,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        num_computed_tokens,
        query if alibi_slopes is None else alibi_slopes,
        num_rows,
        num_pieces,
        sliding_window or 0,
        *logit_factors(scale, logits_soft_cap),
        *out.stride()[:2],
        *query.stride()[:2],
        *stored_key.stride()[:2],
        *stored_value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        NUM_HEADS=num_query_heads,
        GROUP=num_query_heads // num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_TILE=head_tile,
        BLOCK_SIZE=block_size,
        ROWS_TILE=triton.next_power_of_2(num_rows),
        QUERY_TILE=tuning.query_tile,
        TILE=tuning.tile,
        SLICE=min(_FLOAT32_SLICE, head_tile) if query.dtype == torch.float32 else 0,
        SPLIT=tuning.split,
        HAS_NEW=new_key is not None,
        HAS_WINDOW=sliding_window is not None,
        HAS_CAP=logits_soft_cap is not None,
        HAS_ALIBI=alibi_slopes is not None,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return out


def prefill_tuning(
    mean_query_len: float, head_size: int, dtype: torch.dtype, capability: tuple[int, int]
) -> PrefillTuning:
    """Return what was fastest on an H200 for this shape; elsewhere what fits the registers."""
    if dtype.itemsize == 4:
        return PrefillTuning(query_tile=16, tile=16, num_warps=4, num_stages=1, split=False)
    if mean_query_len <= 16:
        return PrefillTuning(query_tile=16, tile=16, num_warps=4, num_stages=2, split=False)
    if head_size <= 64 or (head_size <= 128 and capability < (9, 0)):
        return PrefillTuning(query_tile=64, tile=64, num_warps=4, num_stages=3, split=True)
    if head_size <= 128:
        return PrefillTuning(query_tile=128, tile=64, num_warps=8, num_stages=3, split=True)
    return PrefillTuning(query_tile=64, tile=32, num_warps=8, num_stages=2, split=True)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
