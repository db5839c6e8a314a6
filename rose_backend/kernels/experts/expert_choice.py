"""The first launch of a mixture of experts: the experts of each token, and the tokens of each expert.

No launch behind it depends on the order in which an expert's tokens are listed, which differs from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.experts.reference import MAX_EXPERTS
from rose_backend.kernels.sampling.gumbel_max import ordered_key, value_of_key

_EXPERT_MASK = tl.constexpr(MAX_EXPERTS - 1)


@triton.jit
def _keys(logits, experts, ARE_WIDE: tl.constexpr):
    """Map logits, as float32, and their experts to integers in the order of logits; of equals the first is larger.

    An integer has the expert in its last bits. Logits of 16 bits leave them free in float32, so that 32 bits are
    enough, of which a warp finds the largest in one instruction.
    """
    keys = ordered_key(logits)
    if ARE_WIDE:
        keys = keys.to(tl.int64) * (_EXPERT_MASK + 1)
    return (keys & (-1 - _EXPERT_MASK)) + (_EXPERT_MASK - experts)


@triton.jit
def _logit(key, ARE_WIDE: tl.constexpr):
    """Return the logit of one of ``_keys``."""
    if ARE_WIDE:
        ordered = ((key - (key & _EXPERT_MASK)) // (_EXPERT_MASK + 1)).to(tl.int32)
    else:
        # Of negative numbers, the bits that were free are ones in ``ordered_key``.
        ordered = tl.where(key < 0, key | _EXPERT_MASK, key & (-1 - _EXPERT_MASK))
    return value_of_key(ordered)


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_experts_kernel(
    logits_ptr,  # [T, X]
    weights_ptr,  # [T, A] float32 contiguous, written
    counts_ptr,  # [X] int32, zero before: tokens of each expert, written
    pairs_ptr,  # [X, T] int32: of each expert its pairs, token * A + place, written
    num_tokens,
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # the next power of two
    TOP_K: tl.constexpr,  # A
    PLACES: tl.constexpr,  # the next power of two
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    experts, places = tl.arange(0, EXPERTS), tl.arange(0, PLACES)
    in_experts, in_places = experts < NUM_EXPERTS, places < TOP_K
    row = logits_ptr + token.to(tl.int64) * logits_stride
    logits = tl.load(row + experts, mask=in_experts, other=float("-inf"))
    # Below all numbers are only experts that are taken or do not exist: no token takes one twice, also with NaN.
    LOWEST: tl.constexpr = -3.4e38
    ARE_WIDE: tl.constexpr = logits.dtype == tl.float32
    TAKEN: tl.constexpr = -(2**50) if ARE_WIDE else -(2**31)
    wide = logits.to(tl.float32)
    keys = _keys(tl.where(wide >= LOWEST, wide, float("-inf")), experts, ARE_WIDE)
    keys = tl.where(in_experts, keys, TAKEN)
    peak = tl.maximum(_logit(tl.max(keys, 0), ARE_WIDE), LOWEST)
    total = tl.sum(tl.exp(wide - peak), 0)
    chosen = tl.zeros([PLACES], tl.int32)
    weights = tl.zeros([PLACES], tl.float32)
    for place in tl.static_range(TOP_K):
        largest = tl.max(keys, 0)
        chosen = tl.where(places == place, _EXPERT_MASK - (largest & _EXPERT_MASK).to(tl.int32), chosen)
        weights = tl.where(
            places == place, tl.exp(tl.maximum(_logit(largest, ARE_WIDE), LOWEST) - peak) / total, weights
        )
        keys = tl.where(keys == largest, TAKEN, keys)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0)
    pairs = token * TOP_K + places
    tl.store(weights_ptr + pairs, weights, mask=in_places)
    before = tl.atomic_add(counts_ptr + chosen, 1, mask=in_places, sem="relaxed")
    tl.store(pairs_ptr + chosen.to(tl.int64) * num_tokens + before, pairs, mask=in_places)


def choose_experts(
    router_logits: torch.Tensor,  # [T, X]
    weights: torch.Tensor,  # [T * A] float32  written
    counts: torch.Tensor,  # int32, X at least, zeros  written
    pairs: torch.Tensor,  # [X, T] int32  written
    *,
    top_k: int,
    renormalize: bool,
    use_pdl: bool,
) -> None:
    """Launch the choice; arguments as the kernel's, with ``A = top_k``."""
    num_tokens, num_experts = router_logits.shape
    _choose_experts_kernel[(num_tokens,)](
        router_logits,
        weights,
        counts,
        pairs,
        num_tokens,
        router_logits.stride(0),
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        RENORMALIZE=renormalize,
        PDL=use_pdl,
        num_warps=1 if num_experts <= 256 else 4,
        launch_pdl=use_pdl,
    )
