"""Decode attention in one launch: every row's context is split over programs, and the last to arrive combines them.

A program attends a few query heads of a row's new tokens, which share a KV head. Where each has its own, that is
done lane by lane, not on the matrix units. The program of a row's last split also stores the new tokens' keys and
values, which it takes from the projection.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import (
    AttentionOptions,
    HeadRotation,
    NewTokens,
    PagedKV,
    attention_strides,
)
from rose_backend.kernels.attention.shared import (
    HIDDEN,
    LOG2_E,
    NO_LOGIT,
    CombineSizes,
    SplitSizes,
    cached_offsets,
    combine_splits,
    find_split,
    logit_factors,
    longest_first,
    padded_head_size,
    query_offsets,
    record_size,
    split_scratch,
    store_output,
    store_record,
    to_logits,
)
from rose_backend.kernels.kv.cache_writes import load_scale, scale_to_half, to_cache, to_half
from rose_backend.kernels.pointwise.elementwise import (
    inside_another_kernel,
    load_angles,
    load_head_norm,
    rotated,
)
from rose_backend.kernels.tuning.choices import (
    DecodeTuning,
    begins_in_turns,
    decode_tuning,
    heads_per_program,
    num_processors,
    rows_tile,
)


class PageSizes(NamedTuple):
    """How tiles of a row's tokens lie in the blocks of a cache."""

    BLOCK_SIZE: int
    IN_BLOCK: bool
    """No tile has tokens of two blocks."""
    SAME_STRIDES: bool
    """Keys and values are equally far apart."""


class DecodeLoops(NamedTuple):
    """How a program reads and attends its cached tokens."""

    STAGES: int
    USE_DOT: bool
    BY_ASSEMBLER: bool
    OVERLAP: bool
    EARLY_DEPENDENTS: bool
    EARLY_TILES: int


class DecodeLogits(NamedTuple):
    """What becomes of products."""

    HAS_WINDOW: bool
    MASK_WINDOW: bool
    """Queries of a row see different parts of its cached tokens."""
    HAS_CAP: bool
    HAS_ALIBI: bool


@triton.jit
def _visible_logits(
    products,
    positions,
    is_token,
    queries,
    factors,
    CAUSAL: tl.constexpr,
    LOGITS: tl.constexpr,  # DecodeLogits
):
    """Return base-2 logits, ``HIDDEN`` where a query may not look. ``queries`` are (position, ALiBi slope, window)."""
    distance = positions - queries[0]
    logits = to_logits(
        products, distance.to(tl.float32), queries[1], factors, LOGITS.HAS_CAP, LOGITS.HAS_ALIBI
    )
    is_visible = is_token
    if CAUSAL:
        is_visible &= distance <= 0
    if LOGITS.MASK_WINDOW:
        is_visible &= distance > -queries[2]
    return tl.where(is_visible, logits, HIDDEN)


@triton.jit
def head_columns(
    key_head_stride, value_head_stride, HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, HEAD_SIZE: tl.constexpr
):
    """Return where the elements of ``HEADS`` heads are in a token's keys and values, and which of them there are."""
    dims = tl.arange(0, HEADS * HEAD_TILE) % HEAD_TILE
    heads = (tl.arange(0, HEADS * HEAD_TILE) // HEAD_TILE).to(tl.int64)
    if HEADS == 1:
        key_columns, value_columns = dims, dims
    else:
        key_columns, value_columns = heads * key_head_stride + dims, heads * value_head_stride + dims
    return key_columns, value_columns, dims < HEAD_SIZE


@triton.jit
def tile_places(start, tokens, IN_BLOCK: tl.constexpr):
    """Return the positions ``start + tokens``, or where no tile has tokens of two blocks, the first of them."""
    return tl.cast(start, tl.int32) if IN_BLOCK else start + tokens


@triton.jit
def load_block_ids(table_ptr, places, end, BLOCK_SIZE: tl.constexpr):
    """Return the blocks of ``places`` before ``end``, of a row whose block table is given."""
    return tl.load(table_ptr + places.to(tl.uint32) // BLOCK_SIZE, mask=places < end, other=0)


@triton.jit
def load_tiles_block_ids(
    table_ptr, places, end, COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Return the blocks of ``COUNT`` tiles before ``end``, the first of which is at ``places``."""
    block_ids = ()
    for nth in tl.static_range(COUNT):
        block_ids += (load_block_ids(table_ptr, places + nth * TILE, end, BLOCK_SIZE),)  # type: ignore[assignment]
    return block_ids


@triton.jit
def load_tile(cache, columns, block_ids, places, tokens, end, PAGES: tl.constexpr):
    """Return the keys and values of a tile, [tokens, columns], zero from ``end`` on.

    ``cache`` is (keys, values, the row's block table, strides of key blocks and tokens, of value blocks and tokens),
    ``columns`` as ``head_columns`` returns them, ``places`` as ``tile_places`` does.
    """
    positions = places + tokens if PAGES.IN_BLOCK else places
    mask = (positions < end)[:, None] & columns[2][None, :]
    key_offsets = cached_offsets(block_ids, places, cache[3], cache[4], PAGES.BLOCK_SIZE)
    if PAGES.SAME_STRIDES:
        value_offsets = key_offsets
    else:
        value_offsets = cached_offsets(block_ids, places, cache[5], cache[6], PAGES.BLOCK_SIZE)
    if PAGES.IN_BLOCK:
        # Only scalars change from one tile to the next.
        key_offsets += tokens.to(tl.int64) * cache[4]
        value_offsets += tokens.to(tl.int64) * cache[6]
    key_rows, value_rows = cache[0] + key_offsets, cache[1] + value_offsets
    # Read once in a step: what the layer's other kernels share stays in the L2 cache.
    key = tl.load(
        key_rows[:, None] + columns[0][None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )
    value = tl.load(
        value_rows[:, None] + columns[1][None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )
    return key, value


@triton.jit
def load_new_tokens(key_ptr, value_ptr, strides, tokens, heads, mask):
    """Return the new keys and values of ``tokens``, of each the head ``heads``."""
    dims = tl.arange(0, mask.shape[1])[None, :]
    key_rows = key_ptr + tokens * strides.new_key[0] + heads * strides.new_key[1]
    value_rows = value_ptr + tokens * strides.new_value[0] + heads * strides.new_value[1]
    key = tl.load(key_rows[:, None] + dims, mask=mask, other=0.0)
    value = tl.load(value_rows[:, None] + dims, mask=mask, other=0.0)
    return key, value


@triton.jit
def store_tokens(cache, key, value, block_ids, positions, strides, heads, mask, BLOCK_SIZE: tl.constexpr):
    """Store a key and a value at each of ``positions``, of the head ``heads`` further, where ``mask`` is set."""
    dims = tl.arange(0, key.shape[1])[None, :]
    key_rows = cache[0] + cached_offsets(block_ids, positions, cache[3], cache[4], BLOCK_SIZE)
    value_rows = cache[1] + cached_offsets(block_ids, positions, cache[5], cache[6], BLOCK_SIZE)
    tl.store((key_rows + heads * strides.key[2])[:, None] + dims, key, mask=mask)
    tl.store((value_rows + heads * strides.value[2])[:, None] + dims, value, mask=mask)


@triton.jit
def empty_state(QUERY_TILE: tl.constexpr, HEAD_TILE: tl.constexpr, TILE: tl.constexpr, USE_DOT: tl.constexpr):
    """Return the state of ``attend_tile`` before anything was attended."""
    if USE_DOT:
        top = tl.full([QUERY_TILE], NO_LOGIT, tl.float32)
        attended = tl.zeros([QUERY_TILE, HEAD_TILE], tl.float32)
    else:
        top = tl.full([TILE, QUERY_TILE], NO_LOGIT, tl.float32)
        attended = tl.zeros([TILE, QUERY_TILE * HEAD_TILE], tl.float32)
    return top, tl.zeros_like(top), attended


@triton.jit
def attend_tile(
    state,
    query,
    key,
    value,
    positions,
    is_token,
    queries,
    factors,
    CAUSAL: tl.constexpr,
    LOGITS: tl.constexpr,  # DecodeLogits
    LOOPS: tl.constexpr,  # DecodeLoops
):
    """Add one tile of keys and values to ``state``: maximum, sum of weights, weighted values.

    With ``LOOPS.USE_DOT`` these are of each query. Lane by lane each query has its own KV head, whose elements are side
    by side in ``key`` and ``value``, and they are of each token of a tile: nothing is reduced over tokens here.
    """
    top, total, attended = state
    if LOOPS.USE_DOT:
        if tl.float8e4nv == value.dtype:
            value = to_half(value, LOOPS.BY_ASSEMBLER)
        products = tl.dot(query, tl.trans(key.to(query.dtype)))
        logits = _visible_logits(
            products, positions[None, :], is_token[None, :], queries, factors, CAUSAL, LOGITS
        )
        new_top = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        attended = tl.dot(weights.to(query.dtype), value, attended * shrink[:, None])
    else:
        HEADS: tl.constexpr = query.shape[0]
        HEAD_TILE: tl.constexpr = query.shape[1]
        elements = tl.reshape(query.to(tl.float32), [HEADS * HEAD_TILE])[None, :] * key.to(tl.float32)
        products = tl.sum(tl.reshape(elements, [key.shape[0], HEADS, HEAD_TILE]), 2)
        logits = _visible_logits(
            products, positions[:, None], is_token[:, None], queries, factors, CAUSAL, LOGITS
        )
        new_top = tl.maximum(top, logits)
        weights = tl.exp2(logits - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + weights
        attended = attended * per_element(shrink, HEAD_TILE) + per_element(weights, HEAD_TILE) * value.to(
            tl.float32
        )
    return new_top, total, attended


@triton.jit
def attend_cached(
    state,
    query,
    early,
    cache,
    columns,
    block_ids,
    begin,
    end,
    queries,
    factors,
    TILE: tl.constexpr,
    PAGES: tl.constexpr,  # PageSizes
    CAUSAL: tl.constexpr,
    LOGITS: tl.constexpr,  # DecodeLogits
    LOOPS: tl.constexpr,  # DecodeLoops
):
    """Add the cached tokens ``begin .. end - 1`` to ``state``.

    Lane by lane, ``early`` are the keys and values of the first ``LOOPS.STAGES`` tiles and ``block_ids`` those of the
    next one: while a tile is attended, that many are being loaded into registers. With ``LOOPS.USE_DOT`` ``early`` is
    the first tile or nothing, and ``block_ids`` are those of the next: further tiles pass through shared memory,
    ``LOOPS.STAGES`` at once.
    """
    STAGES: tl.constexpr = LOOPS.STAGES
    top, total, attended = state
    tokens = tl.arange(0, TILE)
    if LOOPS.USE_DOT:
        if len(early) > 0:
            positions = begin + tokens
            top, total, attended = attend_tile(
                (top, total, attended), query, early[0], early[1], positions, positions < end, queries, factors,
                CAUSAL, LOGITS, LOOPS,
            )  # fmt: skip
            begin += TILE
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            positions = start + tokens
            places = tile_places(start, tokens, PAGES.IN_BLOCK)
            key, value = load_tile(cache, columns, block_ids, places, tokens, end, PAGES)
            block_ids = load_block_ids(cache[2], places + TILE, end, PAGES.BLOCK_SIZE)
            top, total, attended = attend_tile(
                (top, total, attended), query, key, value, positions, positions < end, queries, factors,
                CAUSAL, LOGITS, LOOPS,
            )  # fmt: skip
    else:
        for start in tl.range(begin, end, TILE, num_stages=1):
            positions = start + tokens
            places = tile_places(start, tokens, PAGES.IN_BLOCK) + STAGES * TILE
            last = load_tile(cache, columns, block_ids, places, tokens, end, PAGES)
            block_ids = load_block_ids(cache[2], places + TILE, end, PAGES.BLOCK_SIZE)
            top, total, attended = attend_tile(
                (top, total, attended), query, early[0], early[1], positions, positions < end, queries, factors,
                CAUSAL, LOGITS, LOOPS,
            )  # fmt: skip
            early = early[2:] + last
    return top, total, attended


@triton.jit
def per_element(weights, HEAD_TILE: tl.constexpr):
    """Return ``weights`` [tokens, heads] for each element of a head, [tokens, heads * HEAD_TILE]."""
    TOKENS: tl.constexpr = weights.shape[0]
    HEADS: tl.constexpr = weights.shape[1]
    wide = tl.broadcast_to(weights[:, :, None], [TOKENS, HEADS, HEAD_TILE])
    return tl.reshape(wide, [TOKENS, HEADS * HEAD_TILE])


@triton.jit
def _merge(top_a, total_a, top_b, total_b):
    top = tl.maximum(top_a, top_b)
    return top, total_a * tl.exp2(top_a - top) + total_b * tl.exp2(top_b - top)


@triton.jit
def sum_lanes(state, HEAD_TILE: tl.constexpr):
    """Return the ``state`` of each query, of a state that was added up lane by lane."""
    HEADS: tl.constexpr = state[0].shape[1]
    top, total = tl.reduce((state[0], state[1]), 0, _merge)
    weights = tl.exp2(state[0] - top[None, :])
    attended = tl.sum(state[2] * per_element(weights, HEAD_TILE), 0)
    return top, total, tl.reshape(attended, [HEADS, HEAD_TILE])


@triton.jit
def add_logit(state, logits):
    """Add one logit of each query to ``state``; return that and the logits' weights, whose values are left to add."""
    top, total, attended = state
    new_top = tl.maximum(top, logits)
    weights = tl.exp2(logits - new_top)
    shrink = tl.exp2(top - new_top)
    return new_top, total * shrink + weights, attended * shrink[:, None], weights


@triton.jit
def add_new_token(state, query, key, value, slopes, factors, is_last, LOGITS: tl.constexpr):
    """Add a row's one new token to the state of its last split."""
    products = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)
    logits = to_logits(products, 0.0, slopes, factors, LOGITS.HAS_CAP, LOGITS.HAS_ALIBI)
    top, total, attended, weights = add_logit(state, tl.where(is_last, logits, HIDDEN))
    return top, total, attended + weights[:, None] * value.to(tl.float32)


@triton.jit
def add_sinks(state, sinks_ptr, heads, is_query, is_last_split):
    """Add the sinks of ``heads`` to the state of a row's last split."""
    logits = tl.load(sinks_ptr + heads, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
    top, total, attended, _ = add_logit(state, tl.where(is_last_split, logits, HIDDEN))
    return top, total, attended


_COMBINE_TILE = 8
"""Partial results that are loaded at once."""
_COMBINE_ELEMENTS = 1024
"""Numbers that a warp loads at once, unless one query's are more."""


class DecodeWork(NamedTuple):
    """Which heads and tokens of a row a program attends."""

    SHARES: int
    """Programs of a row's split, over all heads."""
    SHARERS: int
    """Programs that read the same KV head."""
    KV_HEADS: int
    GROUP: int
    """Query heads of a program."""
    TOKENS: int
    """New tokens of a program."""
    MAX_QUERY_LEN: int
    QUERY_TILE: int
    NEW_TILE: int
    HEAD_SIZE: int
    HEAD_TILE: int


@triton.jit
def _own_share(WORK: tl.constexpr):
    """Return which share of a row's work is the program's, its first KV head, query head and new token.

    Neighbouring programs read neighbouring heads of the same tokens. ``SHARERS`` programs read the same KV head: each
    has ``GROUP`` of its query heads and ``TOKENS`` of the row's new tokens. Or a program has ``KV_HEADS`` heads of the
    cache and the one query head of each.
    """
    share = tl.program_id(0) % WORK.SHARES
    kv_head = (share // WORK.SHARERS * WORK.KV_HEADS).to(tl.int64)
    first_head = share // (WORK.MAX_QUERY_LEN // WORK.TOKENS) * WORK.GROUP
    own_token = share % (WORK.MAX_QUERY_LEN // WORK.TOKENS)
    return share, kv_head, first_head, own_token


@triton.jit
def _load_query(
    query_ptr,
    queries,
    query_mask,
    strides,
    rotation,
    angles,
    norm,
    WORK: tl.constexpr,
    ROTATION: tl.constexpr,
):
    """Return the program's queries, rotated where that is asked for; ``query_ptr`` is that of the first."""
    dims = tl.arange(0, WORK.HEAD_TILE)
    query_rows = query_ptr + query_offsets(queries, strides.query, WORK.GROUP, WORK.TOKENS)
    query = tl.load(query_rows[:, None] + dims[None, :], mask=query_mask, other=0.0)
    if ROTATION is not None:
        query = rotated(
            query, query_rows, query_mask, angles, norm, rotation.eps, WORK.HEAD_SIZE, ROTATION.NORM
        )
    return query


@triton.jit
def _load_new(
    new_key_ptr,
    new_value_ptr,
    strides,
    tokens,
    heads,
    mask,
    rotation,
    angles,
    norm,
    WORK: tl.constexpr,
    ROTATION: tl.constexpr,
):
    """Return new keys, rotated where that is asked for, and values.

    ``tokens`` are (the row's first, places counted from it).
    """
    new_key, new_value = load_new_tokens(
        new_key_ptr, new_value_ptr, strides, tokens[0] + tokens[1], heads, mask
    )
    if ROTATION is not None:
        key_rows = new_key_ptr + tokens[0] * strides.new_key[0] + heads * strides.new_key[1]
        new_key = rotated(new_key, key_rows, mask, angles, norm, rotation.eps, WORK.HEAD_SIZE, ROTATION.NORM)
    return new_key, new_value


@triton.jit(
    do_not_specialize=["num_rows", "extra", "window", "table_stride", "table_width"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "num_computed_ptr",
        "query_start_ptr",
        "order_ptr",
        "slopes_ptr",
        "sinks_ptr",
        "key_scale_ptr",
        "value_scale_ptr",
    ],
)
def _paged_decode_kernel(
    out_ptr,
    query_ptr,
    new_key_ptr,  # None where the tokens were stored before
    new_value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    num_computed_ptr,
    query_start_ptr,  # None with one token per row
    order_ptr,  # None where rows begin in their own order
    slopes_ptr,  # each None where the option is off
    sinks_ptr,
    key_scale_ptr,
    value_scale_ptr,
    rotation,  # RotationTensors, None where the heads are not rotated here
    scratch,  # records [slots, RECORD] float32, counters [slots] int32
    num_rows,
    extra,  # pieces of work per head beyond one per row
    window,
    factors,
    strides,  # AttentionStrides
    table_stride,
    table_width,
    WORK: tl.constexpr,  # DecodeWork
    SPLITS: tl.constexpr,  # SplitSizes
    COMBINE: tl.constexpr,  # CombineSizes
    LOOPS: tl.constexpr,  # DecodeLoops
    ROTATION: tl.constexpr,  # RotationSizes, None as above
    PAGES: tl.constexpr,  # PageSizes
    LOGITS: tl.constexpr,  # DecodeLogits
):
    HAS_NEW: tl.constexpr = new_key_ptr is not None
    HEAD_SIZE: tl.constexpr = WORK.HEAD_SIZE
    HEAD_TILE: tl.constexpr = WORK.HEAD_TILE
    GROUP: tl.constexpr = WORK.GROUP
    TOKENS: tl.constexpr = WORK.TOKENS
    MAX_QUERY_LEN: tl.constexpr = WORK.MAX_QUERY_LEN
    QUERY_TILE: tl.constexpr = WORK.QUERY_TILE
    TILE: tl.constexpr = SPLITS.TILE
    USE_DOT: tl.constexpr = LOOPS.USE_DOT
    OVERLAP: tl.constexpr = LOOPS.OVERLAP
    # Tiles loaded before anything waits for the query; the block ids of one more are loaded, too.
    EARLY: tl.constexpr = LOOPS.EARLY_TILES
    if OVERLAP and LOOPS.EARLY_DEPENDENTS:
        tl.extra.cuda.gdc_launch_dependents()
    share, kv_head, first_head, own_token = _own_share(WORK)
    work = tl.program_id(0) // WORK.SHARES
    tokens = tl.arange(0, TILE)
    own_row = work
    if order_ptr is not None:
        own_row = tl.load(order_ptr + work, mask=work < num_rows, other=0)
    # Most rows begin at their first token: that is read before the length is known, up to the table's end.
    table_ptr = block_table_ptr + own_row.to(tl.int64) * table_stride
    table_end = tl.where(work < num_rows, table_width * PAGES.BLOCK_SIZE, 0)
    first = tile_places(work * 0, tokens, PAGES.IN_BLOCK)
    block_ids = load_tiles_block_ids(table_ptr, first, table_end, EARLY + 1, TILE, PAGES.BLOCK_SIZE)
    row, length, first_token, query_len, split, num_splits, slot, begin, end = find_split(
        num_computed_ptr, query_start_ptr, num_rows, window, work, own_row, extra, SPLITS,
        MAX_QUERY_LEN, HAS_NEW, LOGITS.HAS_WINDOW,
    )  # fmt: skip
    if (row >= num_rows) | (length < 0) | (own_token >= query_len):
        # What waits for this kernel also waits for the previous ones, even if no row has anything to do.
        if OVERLAP and tl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()
        return
    first_token = first_token.to(tl.int64)
    table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
    is_last_split = split == num_splits - 1
    key_scale, value_scale = load_scale(key_scale_ptr), load_scale(value_scale_ptr)

    dims = tl.arange(0, HEAD_TILE)
    is_dim = dims < HEAD_SIZE
    columns = head_columns(strides.key[2], strides.value[2], WORK.KV_HEADS, HEAD_TILE, HEAD_SIZE)
    # Queries: ``GROUP`` heads of the first token, then of the next.
    queries = tl.arange(0, QUERY_TILE)
    num_queries = GROUP if TOKENS == 1 else GROUP * query_len
    is_query = queries < num_queries
    heads = first_head + (queries if TOKENS == 1 else queries % GROUP)
    query_mask = is_query[:, None] & is_dim[None, :]
    cache = (
        key_cache_ptr + kv_head * strides.key[2], value_cache_ptr + kv_head * strides.value[2], table_ptr,
        strides.key[0], strides.key[1], strides.value[0], strides.value[1],
    )  # fmt: skip
    places = tile_places(begin, tokens, PAGES.IN_BLOCK)
    if begin > 0:
        block_ids = load_tiles_block_ids(table_ptr, places, end, EARLY + 1, TILE, PAGES.BLOCK_SIZE)
    early = ()
    for nth in tl.static_range(EARLY):
        early += load_tile(cache, columns, block_ids[nth], places + nth * TILE, tokens, end, PAGES)
    if HAS_NEW:
        new_tokens = tl.arange(0, WORK.NEW_TILE)
        new_heads = (new_tokens * 0).to(tl.int64)
        if WORK.KV_HEADS > 1:
            new_heads, new_tokens = new_tokens.to(tl.int64), new_tokens * 0
        is_new = new_tokens < query_len
        new_block_ids = load_block_ids(table_ptr, length + new_tokens, length + query_len, PAGES.BLOCK_SIZE)
    angles, query_norm, key_norm = None, None, None
    if ROTATION is not None:
        tl.static_assert(HAS_NEW and MAX_QUERY_LEN == 1, "all heads have the new token's position")
        angles = load_angles(rotation, length, first_token, HEAD_TILE, ROTATION)
        query_norm = load_head_norm(rotation.query_norm, angles, HEAD_SIZE, ROTATION.NORM)
        key_norm = load_head_norm(rotation.key_norm, angles, HEAD_SIZE, ROTATION.NORM)
    if OVERLAP:
        # Until here nothing was read that the previous kernel makes, and nothing was written.
        tl.extra.cuda.gdc_wait()
    query_ptr += (first_token + own_token) * strides.query[0] + first_head * strides.query[1]
    query = _load_query(query_ptr, queries, query_mask, strides, rotation, angles, query_norm, WORK, ROTATION)
    slopes = tl.zeros([QUERY_TILE], tl.float32)
    if LOGITS.HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads, mask=is_query, other=0.0).to(tl.float32)
    query_positions = length + own_token if TOKENS == 1 else (length + queries // GROUP)[:, None]
    query_limits = (query_positions, slopes[:, None] if USE_DOT else slopes[None, :], window)
    product_factor = factors[0] * key_scale
    logit_factor = factors[1]
    factors = (product_factor, logit_factor)
    tile_factors = factors
    if USE_DOT and tl.float8e4nv == key_cache_ptr.dtype.element_ty and query.dtype == tl.bfloat16:
        # Float8 becomes float16 in one instruction, bfloat16 in several.
        query, query_factors = scale_to_half(query)
        factors = (product_factor * query_factors, logit_factor)
        tile_factors = ((product_factor * query_factors)[:, None], logit_factor)
    if HAS_NEW:
        new_mask = is_new[:, None] & is_dim[None, :]
        new_key, new_value = _load_new(
            new_key_ptr, new_value_ptr, strides, (first_token, new_tokens), kv_head + new_heads, new_mask,
            rotation, angles, key_norm, WORK, ROTATION,
        )  # fmt: skip
        new_key = to_cache(new_key, key_scale, key_cache_ptr.dtype.element_ty)
        new_value = to_cache(new_value, value_scale, value_cache_ptr.dtype.element_ty)

    state = empty_state(QUERY_TILE, HEAD_TILE, TILE, USE_DOT)
    if HAS_NEW and MAX_QUERY_LEN > 1:
        state = attend_tile(
            state, query, new_key, new_value, length + new_tokens, is_new & is_last_split, query_limits, tile_factors,
            True, LOGITS, LOOPS,
        )  # fmt: skip
    # A row's own new tokens are among the cached ones when they were stored before.
    state = attend_cached(
        state, query, early, cache, columns, block_ids[EARLY], begin, end, query_limits, tile_factors,
        TILE, PAGES, MAX_QUERY_LEN > 1 and not HAS_NEW, LOGITS, LOOPS,
    )  # fmt: skip
    if OVERLAP and not LOOPS.EARLY_DEPENDENTS:
        tl.extra.cuda.gdc_launch_dependents()
    # Only now: nothing before had to wait for the new tokens.
    if HAS_NEW and is_last_split & (share % WORK.SHARERS == 0):
        store_tokens(
            cache, new_key, new_value, new_block_ids, length + new_tokens, strides, new_heads, new_mask,
            PAGES.BLOCK_SIZE,
        )  # fmt: skip
    if not USE_DOT:
        state = sum_lanes(state, HEAD_TILE)
    if HAS_NEW and MAX_QUERY_LEN == 1:
        state = add_new_token(state, query, new_key, new_value, slopes, factors, is_last_split, LOGITS)
    if sinks_ptr is not None:
        state = add_sinks(state, sinks_ptr, heads, is_query, is_last_split)

    out_ptr += (first_token + own_token) * strides.out[0] + first_head * strides.out[1]
    if num_splits == 1:
        store_output(
            out_ptr, strides.out, state[1], state[2], value_scale, queries, query_mask, GROUP, TOKENS
        )
        return
    slot += share * (2 * extra)
    records_ptr = scratch[0] + slot.to(tl.int64) * COMBINE.RECORD
    record_ptr = records_ptr + split * COMBINE.RECORD
    store_record(record_ptr, state, queries, (is_query, query_mask), GROUP * TOKENS, HEAD_SIZE)
    combine_splits(
        out_ptr, strides.out, records_ptr, scratch[1] + slot, split, num_splits, num_queries, value_scale,
        GROUP, TOKENS, HEAD_SIZE, HEAD_TILE, COMBINE,
    )  # fmt: skip


class _LaunchShape(NamedTuple):
    """How one launch is divided among programs."""

    work: DecodeWork
    splits: SplitSizes
    combine: CombineSizes
    extra: int
    """Pieces of work per head beyond one per row."""
    num_slots: int
    """Records of scratch memory."""


@lru_cache(maxsize=4096)
def _launch_shape(
    num_rows: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_query_len: int,
    tuning: DecodeTuning,
) -> _LaunchShape:
    """Divide a launch among programs."""
    tokens = max_query_len
    group = heads_per_program(num_query_heads // num_kv_heads, tokens, padded_head_size(head_size))
    if not tuning.use_dot:
        # Each query has its own programs; those that share a KV head find it in the L2 cache.
        tokens = group = 1
        if max_query_len == 1 and num_query_heads == num_kv_heads:
            group = math.gcd(num_kv_heads, tuning.kv_heads)
    kv_heads = 1 if tuning.use_dot else group
    shares = num_query_heads // group * (max_query_len // tokens)
    # Where there is room for more programs than rows, none has to wait for another.
    places = max(tuning.num_programs // shares, 1)
    query_tile = triton.next_power_of_2(group * tokens)
    combined_queries = _COMBINE_ELEMENTS * tuning.num_warps // (_COMBINE_TILE * padded_head_size(head_size))
    return _LaunchShape(
        DecodeWork(
            shares,
            max(shares // num_kv_heads, 1),
            kv_heads,
            group,
            tokens,
            max_query_len,
            max(query_tile, 16) if tuning.use_dot else query_tile,
            kv_heads if max_query_len == 1 else 16 if tuning.use_dot else tuning.tile,
            head_size,
            padded_head_size(head_size),
        ),
        SplitSizes(
            1 if num_rows == 1 else rows_tile(num_rows), tuning.max_whole, tuning.min_split, tuning.tile
        ),
        CombineSizes(
            record_size(group * tokens, head_size),
            tuning.fan_in,
            max(min(query_tile, combined_queries), 1),
            _COMBINE_TILE,
        ),
        max(places - triton.next_power_of_2(num_rows), places // 2, 1),
        shares * 2 * places,
    )


def order_of_rows(kv: PagedKV, sliding_window: int | None) -> torch.Tensor | None:
    """Return in which order rows begin, ``[R]`` int32; None where all begin at once, or none reads past a window."""
    num_heads = len(kv.num_computed_tokens) * kv.key_cache.shape[2]
    if sliding_window is not None or not begins_in_turns(num_heads, num_processors(kv.key_cache.device)):
        return None
    return longest_first(kv.num_computed_tokens)


def paged_decode(
    query: torch.Tensor,  # [T, HQ, D]
    new: NewTokens | None,
    kv: PagedKV,  # the caches are written
    *,
    options: AttentionOptions,
    out: torch.Tensor,  # [T, HQ, D]  written
    order: torch.Tensor | None = None,  # [R] int32, each row once
    overlap: bool = False,
    rotation: HeadRotation | None = None,
) -> torch.Tensor:
    """As ``rose_backend.kernels.paged_decode``; with ``overlap`` the device has to be able to."""
    num_query_heads, head_size = query.shape[1:]
    num_kv_heads, num_rows = kv.key_cache.shape[2], kv.num_computed_tokens.shape[0]
    if num_rows == 0 or query.shape[0] == 0:
        return out
    group = heads_per_program(num_query_heads // num_kv_heads, kv.max_query_len, padded_head_size(head_size))
    tuning = decode_tuning(
        head_size,
        query.dtype,
        num_processors(query.device),
        cache_dtype=kv.key_cache.dtype,
        num_rows=num_rows,
        num_queries=group * kv.max_query_len,
        num_kv_heads=num_kv_heads,
        norms_heads=rotation is not None and rotation.query_norm is not None,
    )
    work, splits, combine, extra, num_slots = _launch_shape(
        num_rows, num_query_heads, num_kv_heads, head_size, kv.max_query_len, tuning
    )
    rotation_tensors, rotation_sizes = (None, None) if rotation is None else inside_another_kernel(rotation)
    _paged_decode_kernel[(work.SHARES * (num_rows + extra),)](
        out,
        query,
        *((None, None) if new is None else new),
        *kv[:5],  # all its tensors
        order,
        options.alibi_slopes,
        options.sinks,
        options.key_scale,
        options.value_scale,
        rotation_tensors,
        split_scratch(query.device, num_slots, combine.RECORD),
        num_rows,
        extra,
        options.sliding_window or 0,
        logit_factors(options.scale, options.logits_soft_cap),
        attention_strides(out, query, new, kv),
        kv.block_table.stride(0),
        kv.block_table.shape[1],
        WORK=work,
        SPLITS=splits,
        COMBINE=combine,
        LOOPS=_loops(tuning, overlap),
        ROTATION=rotation_sizes,
        PAGES=_pages(kv, options, tuning.tile),
        LOGITS=_logits_of(options, kv.max_query_len),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        launch_pdl=overlap,
    )
    return out


def _loops(tuning: DecodeTuning, overlap: bool) -> DecodeLoops:
    return DecodeLoops(
        tuning.num_stages,
        tuning.use_dot,
        not triton.knobs.runtime.interpret,
        overlap,
        tuning.early_dependents,
        tuning.early_tiles if tuning.use_dot else tuning.num_stages,
    )


def _pages(kv: PagedKV, options: AttentionOptions, tile: int) -> PageSizes:
    block_size = kv.key_cache.shape[1]
    # Without a window rows begin with their first token, and their splits with a tile.
    in_block = options.sliding_window is None and block_size % tile == 0
    return PageSizes(block_size, in_block, in_block and kv.key_cache.stride() == kv.value_cache.stride())


def _logits_of(options: AttentionOptions, max_query_len: int) -> DecodeLogits:
    has_window = options.sliding_window is not None
    return DecodeLogits(
        has_window,
        has_window and max_query_len > 1,
        options.logits_soft_cap is not None,
        options.alibi_slopes is not None,
    )
