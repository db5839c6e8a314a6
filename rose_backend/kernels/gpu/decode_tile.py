"""Softmax attention of a few queries over one tile of keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

from rose_backend.kernels.gpu.float8 import to_half
from rose_backend.kernels.gpu.softmax import HIDDEN, to_logits


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

    With ``USE_DOT`` these are of each query. Lane by lane there is one query only, and they are of each token of a
    tile: nothing is reduced over tokens here.
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
        products = tl.sum(tl.sum(query.to(tl.float32), 0)[None, :] * key.to(tl.float32), 1)
        logits = _visible_logits(
            products, positions, is_token, queries, factors, CAUSAL, HAS_WINDOW, HAS_CAP, HAS_ALIBI
        )
        new_top = tl.maximum(top, logits)
        weights = tl.exp2(logits - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + weights
        attended = attended * shrink[:, None] + weights[:, None] * value.to(tl.float32)
    return new_top, total, attended


@triton.jit
def add_logit(state, logits):
    """Add one logit of each query to ``state``; return that and the logits' weights, whose values are left to add."""
    top, total, attended = state
    new_top = tl.maximum(top, logits)
    weights = tl.exp2(logits - new_top)
    shrink = tl.exp2(top - new_top)
    return new_top, total * shrink + weights, attended * shrink[:, None], weights
