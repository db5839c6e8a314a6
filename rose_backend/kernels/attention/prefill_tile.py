"""Prefill attention's steps within a program: find its tile, attend a range of positions, store keys or values."""

from __future__ import annotations

import triton
import triton.language as tl

from rose_backend.kernels.attention.softmax import cached_offsets, to_logits
from rose_backend.kernels.kv.float8 import to_cache

_UNSEEN = tl.constexpr(float("-inf"))


@triton.jit
def find_tile(
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
def load_rows(row_ptrs, is_row, dims, HEAD_SIZE: tl.constexpr, MASK: tl.constexpr):
    """Return elements ``dims`` [1, D] of each row, zero past the head's size and where ``MASK`` finds no row.

    Masks that hide nothing are left out: each costs instructions in the innermost loop.
    """
    pointers = row_ptrs + dims
    if MASK:
        return tl.load(pointers, mask=is_row[:, None] & (dims < HEAD_SIZE), other=0.0)
    elif dims.shape[1] != HEAD_SIZE:
        return tl.load(pointers, mask=dims < HEAD_SIZE, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _float32_dot(left, right):
    """Return the product, not merged into a following addition.

    Without a bound on inexact additions the compiler turns ``total + product`` into one long chain of additions that
    starts from ``total``; short chains round less.
    """
    return tl.dot(left, right, input_precision="ieee", max_num_imprecise_acc=left.shape[1])


@triton.jit
def _float32_products(
    query_rows,
    key_rows,
    dims,
    HEAD_SIZE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Return query-key products of float32, added up over slices of the head."""
    products = tl.zeros([query_rows[0].shape[0], key_rows[0].shape[0]], tl.float32)
    for first in tl.static_range(0, dims.shape[1], SLICE):
        slice_dims = (first + tl.arange(0, SLICE))[None, :]
        query = load_rows(query_rows[0], query_rows[1], slice_dims, HEAD_SIZE, True)
        key = load_rows(key_rows[0], key_rows[1], slice_dims, HEAD_SIZE, True)
        products += _float32_dot(query, tl.trans(key.to(tl.float32)))
    return products


@triton.jit
def _load_block_ids(table_ptr, start, tokens, end, BLOCK_SIZE: tl.constexpr, WHOLE_BLOCKS: tl.constexpr):
    """Return the blocks of positions ``start + tokens`` below ``end``, 0 for others."""
    if WHOLE_BLOCKS:
        ids = table_ptr + start // BLOCK_SIZE + tokens // BLOCK_SIZE
    else:
        ids = table_ptr + (start + tokens) // BLOCK_SIZE
    return tl.load(ids, mask=start + tokens < end, other=0)


@triton.jit
def attend_range(
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
    DESCRIBED: tl.constexpr,
    RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PLAIN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend over positions ``begin .. end - 1`` and return the new state: maximum, sum of weights, attended values.

    Args:
        query_rows: pointers [Q, 1] and whether they are tokens, for ``SLICE`` > 0, which takes float32 in slices.
        key_source, value_source: (pointer, block stride, token stride). Without ``FROM_CACHE`` the pointer is that of
            position 0 and there are no blocks. With ``DESCRIBED`` (tensor descriptor, row of position 0, column).
        factors: of ``to_logits``.
        RAGGED: the last tile may be part of one. Without it there are only whole tiles.
        CAUSAL: queries may lie among the positions, the last one at ``end - 1`` or after it.
        PLAIN: logits are products times a positive ``factors[0]``. Then maxima are found before multiplying, and the
            factor becomes part of the weights' subtraction.
    """
    top, total, attended = state
    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, query.shape[1])[None, :]
    # Where tiles are whole blocks, and begin with one, a token's place within its block never changes.
    WHOLE_BLOCKS: tl.constexpr = TILE % BLOCK_SIZE == 0 and not HAS_WINDOW
    if FROM_CACHE:
        block_ids = _load_block_ids(table_ptr, begin, tokens, end, BLOCK_SIZE, WHOLE_BLOCKS)
    elif not DESCRIBED:
        key_offsets = tokens.to(tl.int64) * key_source[2]
        value_offsets = tokens.to(tl.int64) * value_source[2]
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        positions = start + tokens
        is_token = positions < end
        if DESCRIBED:
            key = key_source[0].load([key_source[1] + start, key_source[2]])
            value = value_source[0].load([value_source[1] + start, value_source[2]])
        else:
            key_ptr, value_ptr = key_source[0], value_source[0]
            if FROM_CACHE:
                places = tokens if WHOLE_BLOCKS else positions
                key_offsets = cached_offsets(block_ids, places, key_source[1], key_source[2], BLOCK_SIZE)
                value_offsets = key_offsets
                if not SAME_STRIDES:
                    value_offsets = cached_offsets(
                        block_ids, places, value_source[1], value_source[2], BLOCK_SIZE
                    )
                block_ids = _load_block_ids(table_ptr, start + TILE, tokens, end, BLOCK_SIZE, WHOLE_BLOCKS)
            else:
                # Only these scalars change from one iteration to the next.
                key_ptr += tl.cast(start, tl.int64) * key_source[2]
                value_ptr += tl.cast(start, tl.int64) * value_source[2]
            key_rows = key_ptr + key_offsets[:, None]
            value = load_rows(value_ptr + value_offsets[:, None], is_token, dims, HEAD_SIZE, RAGGED)
            if not SLICE:
                key = load_rows(key_rows, is_token, dims, HEAD_SIZE, RAGGED)
        if SLICE:
            products = _float32_products(query_rows, (key_rows, is_token), dims, HEAD_SIZE, SLICE)
        else:
            products = tl.dot(query, tl.trans(key.to(query.dtype)))
        distance = positions[None, :] - query_positions[:, None]
        if not PLAIN:
            products = to_logits(products, distance.to(tl.float32), slope, factors, HAS_CAP, HAS_ALIBI)
        if CAUSAL:
            # What lies past the end lies past every query, too.
            products = tl.where(positions[None, :] <= query_positions[:, None], products, _UNSEEN)
        elif RAGGED:
            products = tl.where(is_token[None, :], products, _UNSEEN)
        if HAS_WINDOW:
            products = tl.where(distance > -window, products, _UNSEEN)
        if PLAIN:
            new_top = tl.maximum(top, tl.max(products, 1) * factors[0])
            weights = tl.exp2(products * factors[0] - new_top[:, None])
        else:
            new_top = tl.maximum(top, tl.max(products, 1))
            weights = tl.exp2(products - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        value = value.to(query.dtype)
        if SLICE:
            attended = attended * shrink[:, None] + _float32_dot(weights, value)
        else:
            attended = tl.dot(weights.to(query.dtype), value, attended * shrink[:, None])
        top = new_top
    return top, total, attended


@triton.jit
def store_tile(
    new_ptr,
    new_token_stride,
    cache,
    scale,
    table_ptr,
    tokens,
    num_tokens,
    computed,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """Store one KV head's keys or values of ``tokens``. ``cache`` is (pointer, block stride, token stride)."""
    dims = tl.arange(0, HEAD_TILE)[None, :]
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (dims < HEAD_SIZE)
    positions = computed + tokens
    block_ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_token, other=0)
    offsets = cached_offsets(block_ids, positions, cache[1], cache[2], BLOCK_SIZE)
    rows = tl.load(new_ptr + tokens.to(tl.int64)[:, None] * new_token_stride + dims, mask=mask)
    stored = to_cache(rows, scale, cache[0].dtype.element_ty)
    tl.store((cache[0] + offsets)[:, None] + dims, stored, mask=mask)
