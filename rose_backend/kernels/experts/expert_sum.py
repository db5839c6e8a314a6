"""The last launch of a mixture of experts: each token's sum over its experts, plus the residual, and its moments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SUM_TILE = 512


@triton.jit
def _add_experts_kernel(
    outputs_ptr,  # [T, A, E] contiguous
    residual_ptr,  # [T, E], with RESIDUAL
    out_ptr,  # [T, E], written
    moments_ptr,  # [T, 2, PARTS] float32 contiguous, written
    counts_ptr,  # [NUM_COUNTS] int32, zero afterwards, written
    residual_stride,
    out_stride,
    NUM_COUNTS: tl.constexpr,  # a power of two
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (token, ``TILE`` columns)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * TILE + tl.arange(0, TILE)
    mask = columns < WIDTH
    total = tl.zeros([TILE], tl.float32)
    for place in tl.static_range(TOP_K):
        output = outputs_ptr + (token * TOP_K + place) * WIDTH + columns
        total += tl.load(output, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + token * residual_stride + columns, mask=mask, other=0.0).to(
            tl.float32
        )
    result = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride + columns, result, mask=mask)
    wide = result.to(tl.float32)
    tl.store(moments_ptr + token * (2 * PARTS) + part, tl.sum(wide, 0))
    tl.store(moments_ptr + token * (2 * PARTS) + PARTS + part, tl.sum(wide * wide, 0))
    # Nobody reads them any more: both products have ended.
    if (token == 0) & (part == 0):
        tl.store(counts_ptr + tl.arange(0, NUM_COUNTS), tl.zeros([NUM_COUNTS], tl.int32))


def num_parts(width: int) -> int:
    """Return how many parts the moments of rows of ``width`` columns have."""
    return triton.next_power_of_2(triton.cdiv(width, SUM_TILE))


def add_experts(
    outputs: torch.Tensor,  # [T * A, E] contiguous
    residual: torch.Tensor | None,  # [T, E]
    out: torch.Tensor,  # [T, E]  written
    moments: torch.Tensor,  # [T, 2, P] float32  written
    counts: torch.Tensor,  # int32  written, zeros
    *,
    top_k: int,
    use_pdl: bool,
) -> None:
    """Launch the sum of what all experts have made of each token, and set the counters back."""
    num_tokens, width = out.shape
    _add_experts_kernel[(num_tokens, moments.shape[2])](
        outputs,
        outputs if residual is None else residual,
        out,
        moments,
        counts,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        NUM_COUNTS=counts.numel(),
        TOP_K=top_k,
        WIDTH=width,
        TILE=SUM_TILE,
        PARTS=moments.shape[2],
        RESIDUAL=residual is not None,
        PDL=use_pdl,
        num_warps=4,
        launch_pdl=use_pdl,
    )
