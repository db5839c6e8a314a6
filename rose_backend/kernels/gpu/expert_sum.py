"""The last launch of a mixture of experts: each token's sum over its experts, plus the residual, and its moments.

Behind products that were grouped by expert, what is summed up has been written (``_add_experts_kernel``). With few
tokens the second product is part of it (``_combine_experts_kernel``): a program has some columns of one token and reads
the rows of all of its experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu.expert_tuning import CombineConfig
from rose_backend.kernels.gpu.linear_tile import store_moments

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


@triton.jit
def _prefetch(
    weight_ptr,
    expert_ids,
    places,
    rows,
    in_rows,
    TOP_K: tl.constexpr,
    OF_EXPERT: tl.constexpr,
    K: tl.constexpr,
):
    """Have rows of the experts' weights brought into the L2 cache, a line of 128 bytes at a time."""
    PER_LINE: tl.constexpr = 128 * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((K + PER_LINE - 1) // PER_LINE)
    starts = tl.minimum(tl.arange(0, LINES) * PER_LINE, K - 1)
    lines = weight_ptr + (tl.where(in_rows, rows, 0) * K)[:, None] + starts[None, :]
    for place in tl.static_range(TOP_K):
        expert = tl.sum(tl.where(places == place, expert_ids, 0), 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(lines + expert.to(tl.int64) * OF_EXPERT).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _combine_experts_kernel(
    activated_ptr,  # [T, A, I] contiguous
    weight_ptr,  # [X, E, I] contiguous
    expert_ids_ptr,  # [T, A] int32
    scale_ptr,  # [T, A] float32
    residual_ptr,  # [T, E], with RESIDUAL
    out_ptr,  # [T, E], written
    moments_ptr,  # [T, 2, PARTS] float32 contiguous, written
    residual_stride,
    out_stride,
    TOP_K: tl.constexpr,  # A
    PLACES: tl.constexpr,  # the next power of two
    WIDTH: tl.constexpr,  # E
    K: tl.constexpr,  # I
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (token, ``BLOCK_N`` columns)."""
    tile, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns = columns < WIDTH
    places = tl.arange(0, PLACES)
    in_places = places < TOP_K
    expert_ids = tl.load(expert_ids_ptr + token * TOP_K + places, mask=in_places, other=0)
    scales = tl.load(scale_ptr + token * TOP_K + places, mask=in_places, other=0.0)
    if PDL:
        # The product in front lets this one start when the experts have been chosen: see its own comment.
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch(weight_ptr, expert_ids, places, columns, in_columns, TOP_K, WIDTH * K, K)
        tl.extra.cuda.gdc_wait()
    of_experts = weight_ptr + (expert_ids.to(tl.int64) * (WIDTH * K))[:, None, None]
    of_pairs = activated_ptr + ((token * TOP_K + places) * K)[:, None, None]
    in_rows = in_places[:, None, None] & in_columns[None, :, None]
    acc = tl.zeros([PLACES, BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        ks = start + tl.arange(0, BLOCK_K)[None, None, :]
        weight = tl.load(of_experts + columns[None, :, None] * K + ks, mask=in_rows & (ks < K), other=0.0)
        activated = tl.load(of_pairs + ks, mask=in_places[:, None, None] & (ks < K), other=0.0)
        acc += weight.to(tl.float32) * activated.to(tl.float32)
    total = tl.sum(tl.sum(acc, 2) * scales[:, None], 0)
    if RESIDUAL:
        residual = residual_ptr + token * residual_stride + columns
        total += tl.load(residual, mask=in_columns, other=0.0).to(tl.float32)
    result = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride + columns, result, mask=in_columns)
    row = token + tl.zeros([1], tl.int64)
    TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    store_moments(result[None, :], moments_ptr, row, row >= 0, tile, TILES, PARTS)


def num_parts(width: int, config: CombineConfig | None) -> int:
    """Return how many parts the moments of rows of ``width`` columns have."""
    return triton.next_power_of_2(triton.cdiv(width, SUM_TILE if config is None else config.block_n))


def add_experts(
    outputs: torch.Tensor,  # [T * A, E] contiguous
    residual: torch.Tensor | None,  # [T, E]
    out: torch.Tensor,  # [T, E]  written
    moments: torch.Tensor,  # [T, 2, P] float32  written
    counts: torch.Tensor,  # [X] int32  written, zeros
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


def combine_experts(
    activated: torch.Tensor,  # [T * A, I] contiguous
    narrow: torch.Tensor,  # [X, E, I] contiguous
    expert_ids: torch.Tensor,  # [T * A] int32
    scales: torch.Tensor,  # [T * A] float32
    residual: torch.Tensor | None,  # [T, E]
    out: torch.Tensor,  # [T, E]  written
    moments: torch.Tensor,  # [T, 2, P] float32  written
    config: CombineConfig,
    *,
    use_pdl: bool,
) -> None:
    """Launch the second product and the sum over each token's experts.

    With ``use_pdl`` the launch in front must let this one start only when ``expert_ids`` and ``scales`` were written.
    """
    num_tokens, width = out.shape
    top_k, depth = len(activated) // num_tokens, activated.shape[1]
    _combine_experts_kernel[(triton.cdiv(width, config.block_n), num_tokens)](
        activated,
        narrow,
        expert_ids,
        scales,
        out if residual is None else residual,
        out,
        moments,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        WIDTH=width,
        K=depth,
        BLOCK_N=config.block_n,
        BLOCK_K=min(config.block_k, triton.next_power_of_2(depth)),
        STAGES=config.num_stages,
        PARTS=moments.shape[2],
        RESIDUAL=residual is not None,
        PDL=use_pdl,
        num_warps=config.num_warps,
        launch_pdl=use_pdl,
    )
