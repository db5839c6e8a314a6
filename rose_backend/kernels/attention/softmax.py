"""What decode and prefill attention share on a GPU: logits in base 2, and where tokens lie in a paged cache."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import NewTokens, PagedKV

LOG2_E = tl.constexpr(1.4426950408889634)
NO_LOGIT = tl.constexpr(-1e30)
"""Initial maximum: finite, so that the difference of two of them is not NaN."""
HIDDEN = tl.constexpr(-2e30)
"""Logit of what may not be seen: has weight 0 even where all keys are masked."""


class AttentionStrides(NamedTuple):
    """Strides of rows and heads; of the caches those of blocks, tokens and heads."""

    out: tuple[int, ...]
    query: tuple[int, ...]
    new_key: tuple[int, ...]
    new_value: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]


def attention_strides(
    out: torch.Tensor,  # [T, HQ, D]
    query: torch.Tensor,  # [T, HQ, D]
    new: NewTokens | None,
    kv: PagedKV,
) -> AttentionStrides:
    """Return the strides that kernels need; zeros for what is not there."""
    return AttentionStrides(
        out.stride()[:2],
        query.stride()[:2],
        (0, 0) if new is None else new.key.stride()[:2],
        (0, 0) if new is None else new.value.stride()[:2],
        kv.key_cache.stride()[:3],
        kv.value_cache.stride()[:3],
    )


@cache
def padded_head_size(head_size: int) -> int:
    """Return the width of tiles of keys: a power of two of at least 16."""
    return max(triton.next_power_of_2(head_size), 16)


def logit_factors(scale: float, logits_soft_cap: float | None) -> tuple[float, float]:
    """Fold scale, cap and the change to base 2 into the two factors of ``to_logits``."""
    if logits_soft_cap is None:
        return scale * LOG2_E.value, 1.0
    return scale / logits_soft_cap, logits_soft_cap * LOG2_E.value


@triton.jit
def to_logits(products, distance, slope, factors, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr):
    """Return base-2 logits of query-key products. ``distance`` is key position minus query position."""
    logits = products * factors[0]
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); right at both infinities.
        logits = factors[1] * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2_E)) + 1.0))
    if HAS_ALIBI:
        logits += slope * LOG2_E * distance
    return logits


@triton.jit
def cached_offsets(block_ids, positions, block_stride, token_stride, BLOCK_SIZE: tl.constexpr):
    """Return where tokens at ``positions`` lie in a cache, for the blocks that they are in. 64 bits."""
    # Neither is negative: as unsigned numbers they take half as many instructions.
    places = positions.to(tl.uint32) % BLOCK_SIZE
    return block_ids.to(tl.uint32).to(tl.int64) * block_stride + places.to(tl.int64) * token_stride
