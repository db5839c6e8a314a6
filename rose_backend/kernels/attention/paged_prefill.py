"""Prefill attention in one launch: a program attends one tile of a row's queries for one query head.

Earlier context comes from the cache, the chunk itself from the projections. Of the query heads that share a KV head the
first one's program stores the tile's keys and values. Only float8 caches take a launch before, which stores the chunk;
it is then attended from the cache like the rest, converted once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rose_backend.kernels.arguments import AttentionOptions, NewTokens, PagedKV, attention_strides
from rose_backend.kernels.attention.shared import (
    LOG2_E,
    NO_LOGIT,
    cached_offsets,
    logit_factors,
    padded_head_size,
    to_logits,
)
from rose_backend.kernels.gpu_properties import gpu_properties
from rose_backend.kernels.kv.cache_writes import StoreStrides, load_scale, to_cache
from rose_backend.kernels.tuning.choices import PrefillTuning, prefill_tuning, rows_tile

_UNSEEN = tl.constexpr(float("-inf"))


class PrefillSizes(NamedTuple):
    """What a program attends."""

    NUM_HEADS: int
    """Query heads."""
    GROUP: int
    """Query heads of a KV head."""
    HEAD_SIZE: int
    HEAD_TILE: int
    BLOCK_SIZE: int
    SAME_STRIDES: bool
    """Keys and values of the cache are equally far apart."""


class PrefillTiles(NamedTuple):
    """How a program reads it."""

    QUERY_TILE: int
    TILE: int
    """Keys per iteration."""
    REST_TILE: int
    """The same at the ends of context and chunk."""
    SLICE: int
    """Of a head: float32 is multiplied in slices; 0 is all at once."""
    SPLIT: bool
    """Attend the chunk's tiles before the queries' own in their own loop."""
    STAGES: int
    REST_STAGES: int


class Logits(NamedTuple):
    """What becomes of products."""

    PLAIN: bool
    """Logits are products times a positive factor. Then maxima are found before multiplying, and the factor becomes
    part of the weights' subtraction."""
    HAS_WINDOW: bool
    HAS_CAP: bool
    HAS_ALIBI: bool


class Range(NamedTuple):
    """A range of positions that is attended in one loop."""

    FROM_CACHE: bool
    """Else from the chunk."""
    DESCRIBED: bool
    """Through tensor descriptors."""
    RAGGED: bool
    """The last tile may be part of one. Else there are only whole tiles."""
    CAUSAL: bool
    """Queries may lie among the positions, the last one at the range's end or after it."""


@triton.jit
def find_tile(
    query_start_ptr, num_computed_ptr, num_rows, nth, ROWS_TILE: tl.constexpr, QUERY_TILE: tl.constexpr
):
    """Return row and tile within the row of the ``nth`` tile from the last one on; row ``num_rows`` if there is none.

    From the last one on, because a row's later tiles take longer. Programs that find none come last, delaying no other.
    """
    rows = tl.arange(0, ROWS_TILE)
    is_row = rows < num_rows
    starts = tl.load(query_start_ptr + rows, mask=is_row, other=0)
    stops = tl.load(query_start_ptr + rows + 1, mask=is_row, other=0)
    computed = tl.load(num_computed_ptr + rows, mask=is_row, other=-1)
    tiles = tl.where(computed >= 0, tl.cdiv(tl.maximum(stops - starts, 0), QUERY_TILE), 0)
    work = tl.sum(tiles) - 1 - nth
    row = tl.sum((tl.cumsum(tiles, 0) <= work).to(tl.int32))
    return tl.where(work < 0, num_rows, row), work - tl.sum(tl.where(rows < row, tiles, 0))


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
    queries,
    key_rows,
    dims,
    HEAD_SIZE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Return query-key products of float32, added up over slices of the head; ``queries`` as of ``attend_range``."""
    products = tl.zeros([queries[1].shape[0], key_rows[0].shape[0]], tl.float32)
    for first in tl.static_range(0, dims.shape[1], SLICE):
        slice_dims = (first + tl.arange(0, SLICE))[None, :]
        query = load_rows(queries[1], queries[2], slice_dims, HEAD_SIZE, True)
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
    queries,
    source,
    begin,
    end,
    factors,
    how,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SLICE: tl.constexpr,
    SIZES: tl.constexpr,  # PrefillSizes
    LOGITS: tl.constexpr,  # Logits
):
    """Attend over positions ``begin .. end - 1`` and return the new state: maximum, sum of weights, attended values.

    Args:
        queries: (queries [Q, D], pointers [Q, 1], which of them are tokens, their positions).
        source: (keys, values, block table of the row). Keys and values are (pointer, block stride, token stride); out
            of the cache the pointer is that of position 0 and there are no blocks. With ``how.DESCRIBED`` they are
            (tensor descriptor, row of position 0, column).
        factors: (slope, window, factors of ``to_logits``).
        how: ``Range``.
    """
    key_source, value_source, table_ptr = source
    BLOCK_SIZE: tl.constexpr = SIZES.BLOCK_SIZE
    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, queries[0].shape[1])[None, :]
    # Where tiles are whole blocks, and begin with one, a token's place within its block never changes.
    WHOLE_BLOCKS: tl.constexpr = TILE % BLOCK_SIZE == 0 and not LOGITS.HAS_WINDOW
    if how.FROM_CACHE:
        block_ids = _load_block_ids(table_ptr, begin, tokens, end, BLOCK_SIZE, WHOLE_BLOCKS)
    elif not how.DESCRIBED:
        key_offsets = tokens.to(tl.int64) * key_source[2]
        value_offsets = tokens.to(tl.int64) * value_source[2]
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        positions = start + tokens
        is_token = positions < end
        if how.DESCRIBED:
            key = key_source[0].load([key_source[1] + start, key_source[2]])
            value = value_source[0].load([value_source[1] + start, value_source[2]])
        else:
            key_ptr, value_ptr = key_source[0], value_source[0]
            if how.FROM_CACHE:
                places = tokens if WHOLE_BLOCKS else positions
                key_offsets = cached_offsets(block_ids, places, key_source[1], key_source[2], BLOCK_SIZE)
                value_offsets = key_offsets
                if not SIZES.SAME_STRIDES:
                    value_offsets = cached_offsets(
                        block_ids, places, value_source[1], value_source[2], BLOCK_SIZE
                    )
                block_ids = _load_block_ids(table_ptr, start + TILE, tokens, end, BLOCK_SIZE, WHOLE_BLOCKS)
            else:
                # Only these scalars change from one iteration to the next.
                key_ptr += tl.cast(start, tl.int64) * key_source[2]
                value_ptr += tl.cast(start, tl.int64) * value_source[2]
            key_rows = key_ptr + key_offsets[:, None]
            value = load_rows(value_ptr + value_offsets[:, None], is_token, dims, SIZES.HEAD_SIZE, how.RAGGED)
            if not SLICE:
                key = load_rows(key_rows, is_token, dims, SIZES.HEAD_SIZE, how.RAGGED)
        if SLICE:
            products = _float32_products(queries, (key_rows, is_token), dims, SIZES.HEAD_SIZE, SLICE)
        else:
            products = tl.dot(queries[0], tl.trans(key.to(queries[0].dtype)))
        state = _add_products(
            state, products, value, (positions, is_token), queries, factors, how, SLICE, LOGITS
        )
    return state


@triton.jit
def _add_products(
    state,
    products,
    value,
    keys,
    queries,
    factors,
    how,
    SLICE: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """Add values to ``state`` by their keys' products with the queries; ``keys`` are (positions, which are tokens)."""
    top, total, attended = state
    positions, is_token = keys
    slope, window, logit_factors = factors
    distance = positions[None, :] - queries[3][:, None]
    if not LOGITS.PLAIN:
        products = to_logits(
            products, distance.to(tl.float32), slope, logit_factors, LOGITS.HAS_CAP, LOGITS.HAS_ALIBI
        )
    if how.CAUSAL:
        # What lies past the end lies past every query, too.
        products = tl.where(positions[None, :] <= queries[3][:, None], products, _UNSEEN)
    elif how.RAGGED:
        products = tl.where(is_token[None, :], products, _UNSEEN)
    if LOGITS.HAS_WINDOW:
        products = tl.where(distance > -window, products, _UNSEEN)
    if LOGITS.PLAIN:
        new_top = tl.maximum(top, tl.max(products, 1) * logit_factors[0])
        weights = tl.exp2(products * logit_factors[0] - new_top[:, None])
    else:
        new_top = tl.maximum(top, tl.max(products, 1))
        weights = tl.exp2(products - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    value = value.to(queries[0].dtype)
    if SLICE:
        attended = attended * shrink[:, None] + _float32_dot(weights, value)
    else:
        attended = tl.dot(weights.to(queries[0].dtype), value, attended * shrink[:, None])
    return new_top, total, attended


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
    strides,  # StoreStrides without those of elements
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
    nth = tl.program_id(0) // NUM_HEADS
    row, tile = find_tile(query_start_ptr, num_computed_ptr, num_rows, nth, ROWS_TILE, TOKEN_TILE)
    if row >= num_rows:
        return
    first_token = tl.load(query_start_ptr + row).to(tl.int64)
    num_tokens = tl.load(query_start_ptr + row + 1) - first_token.to(tl.int32)
    computed = tl.load(num_computed_ptr + row)
    table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
    tokens = tile * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
    new_key_ptr += first_token * strides.new_key[0] + head * strides.new_key[1]
    new_value_ptr += first_token * strides.new_value[0] + head * strides.new_value[1]
    key_cache = (key_cache_ptr + head * strides.key[2], strides.key[0], strides.key[1])
    value_cache = (value_cache_ptr + head * strides.value[2], strides.value[0], strides.value[1])
    store_tile(
        new_key_ptr, strides.new_key[0], key_cache, load_scale(key_scale_ptr),
        table_ptr, tokens, num_tokens, computed, BLOCK_SIZE, HEAD_SIZE, HEAD_TILE,
    )  # fmt: skip
    store_tile(
        new_value_ptr, strides.new_value[0], value_cache, load_scale(value_scale_ptr),
        table_ptr, tokens, num_tokens, computed, BLOCK_SIZE, HEAD_SIZE, HEAD_TILE,
    )  # fmt: skip


def store_chunk(new: NewTokens, kv: PagedKV, options: AttentionOptions) -> None:
    """Store each request's new tokens in float8 caches, as ``rose_backend.kernels.paged_prefill`` says."""
    num_tokens, num_kv_heads, head_size = new.key.shape
    num_rows = kv.num_computed_tokens.shape[0]
    _store_chunk_kernel[((num_tokens // _TOKEN_TILE + num_rows) * num_kv_heads,)](
        *new,
        kv.key_cache,
        kv.value_cache,
        kv.block_table,
        kv.query_start_loc,
        kv.num_computed_tokens,
        options.key_scale,
        options.value_scale,
        num_rows,
        StoreStrides(
            new.key.stride()[:2],
            new.value.stride()[:2],
            kv.key_cache.stride()[:3],
            kv.value_cache.stride()[:3],
        ),
        kv.block_table.stride(0),
        NUM_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_TILE=triton.next_power_of_2(head_size),
        BLOCK_SIZE=kv.key_cache.shape[1],
        ROWS_TILE=rows_tile(num_rows),
        TOKEN_TILE=_TOKEN_TILE,
    )


_FLOAT32_SLICE = 32
_REST_TILE = 32
"""Keys per iteration at the ends of context and chunk, at most: fewer registers where little is to be done."""


@triton.jit
def _attend_context(
    state,
    queries,
    source,
    begin,
    middle,
    end,
    factors,
    HAS_NEW: tl.constexpr,
    TILES: tl.constexpr,
    SIZES: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """Attend to positions ``begin .. end - 1`` of the cache: whole tiles up to ``middle``, then the rest."""
    whole = begin + tl.maximum(middle - begin, 0) // TILES.TILE * TILES.TILE
    if begin < whole:
        state = attend_range(
            state, queries, source, begin, whole, factors,
            Range(FROM_CACHE=True, DESCRIBED=False, RAGGED=False, CAUSAL=False),
            TILES.TILE, TILES.STAGES, TILES.SLICE, SIZES, LOGITS,
        )  # fmt: skip
    if whole < end:
        state = attend_range(
            state, queries, source, whole, end, factors,
            Range(FROM_CACHE=True, DESCRIBED=False, RAGGED=True, CAUSAL=not HAS_NEW),
            TILES.REST_TILE, TILES.REST_STAGES, TILES.SLICE, SIZES, LOGITS,
        )  # fmt: skip
    return state


@triton.jit
def _attend_chunk(
    state,
    queries,
    source,
    described,
    begin,
    diagonal,
    end,
    factors,
    TILES: tl.constexpr,
    SIZES: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """Attend to positions ``begin .. end - 1`` of the chunk; the queries' own begin at ``diagonal``.

    Whole tiles before the queries, whole tiles among them, then the rest. The rest is always loaded by pointers: rows
    after the end belong to another request. ``described`` is the source as tensor descriptors, or None.
    """
    if TILES.SPLIT:
        whole = begin + tl.maximum(diagonal - begin, 0) // TILES.TILE * TILES.TILE
        if begin < whole:
            state = attend_range(
                state, queries, source if described is None else described, begin, whole, factors,
                Range(FROM_CACHE=False, DESCRIBED=described is not None, RAGGED=False, CAUSAL=False),
                TILES.TILE, TILES.STAGES, TILES.SLICE, SIZES, LOGITS,
            )  # fmt: skip
        begin = whole
        if described is not None:
            whole += tl.maximum(end - whole, 0) // TILES.TILE * TILES.TILE
            if begin < whole:
                state = attend_range(
                    state, queries, described, begin, whole, factors,
                    Range(FROM_CACHE=False, DESCRIBED=True, RAGGED=False, CAUSAL=True),
                    TILES.TILE, TILES.STAGES, TILES.SLICE, SIZES, LOGITS,
                )  # fmt: skip
            begin = whole
    if begin < end:
        state = attend_range(
            state, queries, source, begin, end, factors,
            Range(FROM_CACHE=False, DESCRIBED=False, RAGGED=True, CAUSAL=True),
            TILES.REST_TILE, TILES.REST_STAGES, TILES.SLICE, SIZES, LOGITS,
        )  # fmt: skip
    return state


@triton.jit
def _start_state(sinks_ptr, head, SIZES: tl.constexpr, TILES: tl.constexpr):
    """Return the state before anything was attended but the head's sink."""
    top = tl.full([TILES.QUERY_TILE], NO_LOGIT, tl.float32)
    total = tl.full([TILES.QUERY_TILE], 0.0, tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    return top, total, tl.full([TILES.QUERY_TILE, SIZES.HEAD_TILE], 0.0, tl.float32)


@triton.jit(
    do_not_specialize=["num_rows", "window", "table_stride"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "query_start_ptr",
        "num_computed_ptr",
        "slopes_ptr",
        "sinks_ptr",
        "key_scale_ptr",
        "value_scale_ptr",
    ],
)
def _paged_prefill_kernel(
    out_ptr,
    query_ptr,
    new_key_ptr,  # None where the chunk was stored before
    new_value_ptr,
    new_key_rows,  # tensor descriptors of new keys and values, or None
    new_value_rows,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    query_start_ptr,
    num_computed_ptr,
    slopes_ptr,  # each None where the option is off
    sinks_ptr,
    key_scale_ptr,
    value_scale_ptr,
    num_rows,
    window,
    factors,
    strides,  # AttentionStrides
    table_stride,
    ROWS_TILE: tl.constexpr,
    SIZES: tl.constexpr,  # PrefillSizes
    TILES: tl.constexpr,  # PrefillTiles
    LOGITS: tl.constexpr,  # Logits
):
    HAS_NEW: tl.constexpr = new_key_ptr is not None
    head = tl.program_id(0) % SIZES.NUM_HEADS
    nth = tl.program_id(0) // SIZES.NUM_HEADS
    row, tile = find_tile(query_start_ptr, num_computed_ptr, num_rows, nth, ROWS_TILE, TILES.QUERY_TILE)
    if row >= num_rows:
        return
    first_token = tl.load(query_start_ptr + row).to(tl.int64)
    num_tokens = tl.load(query_start_ptr + row + 1) - first_token.to(tl.int32)
    computed = tl.load(num_computed_ptr + row)
    kv_head = (head // SIZES.GROUP).to(tl.int64)
    table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
    key_cache = (key_cache_ptr + kv_head * strides.key[2], strides.key[0], strides.key[1])
    value_cache = (value_cache_ptr + kv_head * strides.value[2], strides.value[0], strides.value[1])

    first_query = tile * TILES.QUERY_TILE
    tokens = first_query + tl.arange(0, TILES.QUERY_TILE)
    if HAS_NEW:
        new_key_ptr += first_token * strides.new_key[0] + kv_head * strides.new_key[1]
        new_value_ptr += first_token * strides.new_value[0] + kv_head * strides.new_value[1]

    dims = tl.arange(0, SIZES.HEAD_TILE)[None, :]
    is_query = tokens < num_tokens
    head64 = head.to(tl.int64)
    rows = tl.arange(0, TILES.QUERY_TILE).to(tl.int64)[:, None]
    query_ptr += (first_token + first_query) * strides.query[0] + head64 * strides.query[1]
    query_rows = query_ptr + rows * strides.query[0]
    query = load_rows(query_rows, is_query, dims, SIZES.HEAD_SIZE, True)
    queries = (query, query_rows, is_query, computed + tokens)
    slope = 0.0
    if LOGITS.HAS_ALIBI:
        slope = tl.load(slopes_ptr + head).to(tl.float32)
    factors = (slope, window, (factors[0] * load_scale(key_scale_ptr), factors[1]))
    state = _start_state(sinks_ptr, head, SIZES, TILES)

    diagonal = computed + first_query
    end = tl.minimum(diagonal + TILES.QUERY_TILE, computed + num_tokens)
    begin = tl.maximum(diagonal + 1 - window, 0) if LOGITS.HAS_WINDOW else 0
    # From the cache: whole tiles before the chunk or the queries, then the rest.
    state = _attend_context(
        state, queries, (key_cache, value_cache, table_ptr), begin,
        computed if HAS_NEW else diagonal, computed if HAS_NEW else end, factors,
        HAS_NEW, TILES, SIZES, LOGITS,
    )  # fmt: skip
    if HAS_NEW:
        past = computed.to(tl.int64)
        chunk_key = (new_key_ptr - past * strides.new_key[0], 0, strides.new_key[0])
        chunk_value = (new_value_ptr - past * strides.new_value[0], 0, strides.new_value[0])
        described = None
        if new_key_rows is not None:
            first_row = first_token.to(tl.int32) - computed
            described = (
                (new_key_rows, first_row, (kv_head * strides.new_key[1]).to(tl.int32)),
                (new_value_rows, first_row, (kv_head * strides.new_value[1]).to(tl.int32)),
                table_ptr,
            )
        state = _attend_chunk(
            state, queries, (chunk_key, chunk_value, table_ptr), described, tl.maximum(begin, computed),
            diagonal, end, factors, TILES, SIZES, LOGITS,
        )  # fmt: skip
        if head % SIZES.GROUP == 0:
            store_tile(
                new_key_ptr, strides.new_key[0], key_cache, 1.0, table_ptr, tokens, num_tokens, computed,
                SIZES.BLOCK_SIZE, SIZES.HEAD_SIZE, SIZES.HEAD_TILE,
            )  # fmt: skip
            store_tile(
                new_value_ptr, strides.new_value[0], value_cache, 1.0, table_ptr, tokens, num_tokens, computed,
                SIZES.BLOCK_SIZE, SIZES.HEAD_SIZE, SIZES.HEAD_TILE,
            )  # fmt: skip
    _, total, attended = state
    attended *= (load_scale(value_scale_ptr) / total)[:, None]
    out_ptr += (first_token + first_query) * strides.out[0] + head64 * strides.out[1]
    tl.store(
        out_ptr + rows * strides.out[0] + dims,
        attended.to(out_ptr.dtype.element_ty),
        mask=is_query[:, None] & (dims < SIZES.HEAD_SIZE),
    )


def paged_prefill(
    query: torch.Tensor,  # [T, HQ, D]
    new: NewTokens | None,
    kv: PagedKV,  # with query_start_loc; the caches are written
    *,
    options: AttentionOptions,
    out: torch.Tensor,  # [T, HQ, D]  written
    mean_query_len: float | None = None,
    tuning: PrefillTuning | None = None,
) -> torch.Tensor:
    """As ``rose_backend.kernels.paged_prefill``."""
    num_tokens, num_query_heads, head_size = query.shape
    block_size, num_kv_heads = kv.key_cache.shape[1:3]
    num_rows = kv.num_computed_tokens.shape[0]
    if num_rows == 0 or num_tokens == 0:
        return out
    if new is not None and new.key.dtype != kv.key_cache.dtype:
        store_chunk(new, kv, options)
        new = None
    if tuning is None:
        tuning = prefill_tuning(
            num_tokens / num_rows if mean_query_len is None else mean_query_len,
            head_size,
            query.dtype,
            gpu_properties(query.device).capability,
            is_describable=new is not None and _is_describable(new.key) and _is_describable(new.value),
        )
    # Each row wastes at most part of one tile.
    num_pieces = num_tokens // tuning.query_tile + num_rows
    _paged_prefill_kernel[(num_pieces * num_query_heads,)](
        out,
        query,
        *((None, None) if new is None else new),
        *_describe(new, tuning),
        kv.key_cache,
        kv.value_cache,
        kv.block_table,
        kv.query_start_loc,
        kv.num_computed_tokens,
        options.alibi_slopes,
        options.sinks,
        options.key_scale,
        options.value_scale,
        num_rows,
        options.sliding_window or 0,
        logit_factors(options.scale, options.logits_soft_cap),
        attention_strides(out, query, new, kv),
        kv.block_table.stride(0),
        ROWS_TILE=rows_tile(num_rows),
        SIZES=PrefillSizes(
            num_query_heads,
            num_query_heads // num_kv_heads,
            head_size,
            padded_head_size(head_size),
            block_size,
            kv.key_cache.stride() == kv.value_cache.stride(),
        ),
        TILES=_tiles_of(tuning, padded_head_size(head_size), is_float32=query.dtype == torch.float32),
        LOGITS=_logits_of(options),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return out


@lru_cache(maxsize=1024)
def _tiles_of(tuning: PrefillTuning, head_tile: int, *, is_float32: bool) -> PrefillTiles:
    return PrefillTiles(
        tuning.query_tile,
        tuning.tile,
        min(tuning.tile, _REST_TILE) if tuning.by_descriptor else tuning.tile,
        min(_FLOAT32_SLICE, head_tile) if is_float32 else 0,
        tuning.split,
        tuning.num_stages,
        1 if tuning.by_descriptor else tuning.num_stages,
    )


def _logits_of(options: AttentionOptions) -> Logits:
    has_alibi, has_cap = options.alibi_slopes is not None, options.logits_soft_cap is not None
    is_plain = options.scale > 0 and options.key_scale is None and not has_alibi and not has_cap
    return Logits(is_plain, options.sliding_window is not None, has_cap, has_alibi)


def _is_describable(rows: torch.Tensor) -> bool:
    """Return whether the copy engine can load tiles of ``rows`` [T, HKV, D].

    It takes steps of 16 bytes and 32-bit columns, and a tile must not be padded: that would read the next head.
    """
    return (
        rows.shape[-1] & (rows.shape[-1] - 1) == 0
        and rows.stride(0) * rows.dtype.itemsize % 16 == 0
        and rows.stride(1) * rows.shape[1] < 2**31
        and rows.data_ptr() % 16 == 0
    )


def _describe(
    new: NewTokens | None, tuning: PrefillTuning
) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    """Describe new keys and values as matrices of ``T`` rows, of which a tile is one head's part of some tokens."""
    if new is None or not tuning.by_descriptor:
        return None, None
    return _describe_rows(new.key, tuning.tile), _describe_rows(new.value, tuning.tile)


def _describe_rows(rows: torch.Tensor, tile: int) -> TensorDescriptor:
    num_tokens, num_heads, head_size = rows.shape
    width = (num_heads - 1) * rows.stride(1) + head_size
    return TensorDescriptor(rows, [num_tokens, width], [rows.stride(0), 1], [tile, head_size])
