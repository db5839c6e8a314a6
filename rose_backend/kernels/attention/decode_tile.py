"""Softmax attention of a few queries over a row's cached keys and values, tile by tile."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rose_backend.kernels.attention.softmax import HIDDEN, LOG2_E, NO_LOGIT, cached_offsets, to_logits
from rose_backend.kernels.kv.float8 import to_half


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


@triton.jit
def _visible_logits(
    products,
    positions,
    is_token,
    queries,
    factors,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Return base-2 logits, ``HIDDEN`` where a query may not look. ``queries`` are (position, ALiBi slope, window)."""
    distance = positions - queries[0]
    logits = to_logits(products, distance.to(tl.float32), queries[1], factors, HAS_CAP, HAS_ALIBI)
    is_visible = is_token
    if CAUSAL:
        is_visible &= distance <= 0
    if HAS_WINDOW:
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
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    USE_DOT: tl.constexpr,
    BY_ASSEMBLER: tl.constexpr,
):
    """Add one tile of keys and values to ``state``: maximum, sum of weights, weighted values.

    With ``USE_DOT`` these are of each query. Lane by lane each query has a KV head of its own, whose elements are side
    by side in ``key`` and ``value``, and they are of each token of a tile: nothing is reduced over tokens here.
    """
    top, total, attended = state
    if USE_DOT:
        if tl.float8e4nv == value.dtype:
            value = to_half(value, BY_ASSEMBLER)
        products = tl.dot(query, tl.trans(key.to(query.dtype)))
        logits = _visible_logits(
            products, positions[None, :], is_token[None, :], queries, factors,
            CAUSAL, HAS_WINDOW, HAS_CAP, HAS_ALIBI,
        )  # fmt: skip
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
            products, positions[:, None], is_token[:, None], queries, factors,
            CAUSAL, HAS_WINDOW, HAS_CAP, HAS_ALIBI,
        )  # fmt: skip
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
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    USE_DOT: tl.constexpr,
    BY_ASSEMBLER: tl.constexpr,
):
    """Add the cached tokens ``begin .. end - 1`` to ``state``.

    Lane by lane, ``early`` are the keys and values of the first ``STAGES`` tiles and ``block_ids`` those of the next
    one: while a tile is attended, so many are on their way into registers. With ``USE_DOT`` ``early`` is the first tile
    or nothing, and ``block_ids`` are those of the next: further tiles pass through shared memory, ``STAGES`` at once.
    """
    top, total, attended = state
    tokens = tl.arange(0, TILE)
    if USE_DOT:
        if len(early) > 0:
            positions = begin + tokens
            top, total, attended = attend_tile(
                (top, total, attended), query, early[0], early[1], positions, positions < end, queries, factors,
                CAUSAL, HAS_WINDOW, HAS_CAP, HAS_ALIBI, USE_DOT, BY_ASSEMBLER,
            )  # fmt: skip
            begin += TILE
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            positions = start + tokens
            places = tile_places(start, tokens, PAGES.IN_BLOCK)
            key, value = load_tile(cache, columns, block_ids, places, tokens, end, PAGES)
            block_ids = load_block_ids(cache[2], places + TILE, end, PAGES.BLOCK_SIZE)
            top, total, attended = attend_tile(
                (top, total, attended), query, key, value, positions, positions < end, queries, factors,
                CAUSAL, HAS_WINDOW, HAS_CAP, HAS_ALIBI, USE_DOT, BY_ASSEMBLER,
            )  # fmt: skip
    else:
        for start in tl.range(begin, end, TILE, num_stages=1):
            positions = start + tokens
            places = tile_places(start, tokens, PAGES.IN_BLOCK) + STAGES * TILE
            last = load_tile(cache, columns, block_ids, places, tokens, end, PAGES)
            block_ids = load_block_ids(cache[2], places + TILE, end, PAGES.BLOCK_SIZE)
            top, total, attended = attend_tile(
                (top, total, attended), query, early[0], early[1], positions, positions < end, queries, factors,
                CAUSAL, HAS_WINDOW, HAS_CAP, HAS_ALIBI, USE_DOT, BY_ASSEMBLER,
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
def add_new_token(
    state, query, key, value, slopes, factors, is_last, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr
):
    """Add a row's one new token to the state of its last split."""
    products = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)
    logits = to_logits(products, 0.0, slopes, factors, HAS_CAP, HAS_ALIBI)
    top, total, attended, weights = add_logit(state, tl.where(is_last, logits, HIDDEN))
    return top, total, attended + weights[:, None] * value.to(tl.float32)


@triton.jit
def add_sinks(state, sinks_ptr, heads, is_query, is_last_split):
    """Add the sinks of ``heads`` to the state of a row's last split."""
    logits = tl.load(sinks_ptr + heads, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
    top, total, attended, _ = add_logit(state, tl.where(is_last_split, logits, HIDDEN))
    return top, total, attended
