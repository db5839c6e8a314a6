"""LayerNorm and RMSNorm, alone and with the residual add in front: one launch, one program per token.

Statistics and products are float32; each output is rounded once. With the add in front, the sum is normalised as it is
stored, so that both forms of a layer give the same numbers. What is added may come in parts, of a product that was cut
along its inner dimension: this saves the launch that would sum them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu_properties import has_dependent_launch


@triton.jit
def _norm_kernel(
    x_ptr,  # [PARTS, T, E]
    residual_ptr,  # [T, E]
    weight_ptr,  # [E]
    bias_ptr,  # [E]
    normed_ptr,  # [T, E] contiguous, written
    new_residual_ptr,  # [T, E] contiguous, written
    eps,
    x_stride_p,
    x_stride_t,
    x_stride_e,
    residual_stride_t,
    residual_stride_e,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Args: ADD: x + residual first. CENTRE: LayerNorm with its bias, else RMSNorm."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    mask = columns < WIDTH
    # What is constant is loaded before the wait.
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_ptr += token * x_stride_t + columns * x_stride_e
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        x_ptr += x_stride_p
        x += tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual = residual_ptr + token * residual_stride_t + columns * residual_stride_e
        x += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        total = x.to(new_residual_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + token * WIDTH + columns, total, mask=mask)
        x = total.to(tl.float32)
    if CENTRE:
        x = tl.where(mask, x - tl.sum(x, axis=0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    normed = x * scale * weight
    if CENTRE:
        normed += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + token * WIDTH + columns, normed.to(normed_ptr.dtype.element_ty), mask=mask)


def layer_norm(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    bias: torch.Tensor,  # [E]
    eps: float,
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.layer_norm``."""
    return _launch(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: torch.Tensor,  # [T, E] or [P, T, E]
    residual: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    bias: torch.Tensor,  # [E]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``rose_backend.kernels.add_layer_norm``."""
    return _launch(x, residual, weight, bias, eps)


def rms_norm(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.rms_norm``."""
    return _launch(x, None, weight, None, eps)[0]


def add_rms_norm(
    x: torch.Tensor,  # [T, E] or [P, T, E]
    residual: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``rose_backend.kernels.add_rms_norm``."""
    return _launch(x, residual, weight, None, eps)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised tensor and the sum; without a residual the sum is ``x`` itself."""
    parts = x if x.ndim == 3 else x[None]
    num_parts, num_tokens, width = parts.shape
    normed = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    new_residual = x if residual is None else torch.empty_like(normed)
    if normed.numel():
        tile = triton.next_power_of_2(width)
        _norm_kernel[(num_tokens,)](
            parts,
            x if residual is None else residual,
            weight.contiguous(),
            weight if bias is None else bias.contiguous(),
            normed,
            new_residual,
            eps,
            # Of a single part it says nothing, and Triton compiles apart for what divides it.
            0 if num_parts == 1 else parts.stride(0),
            *parts.stride()[1:],
            *(x if residual is None else residual).stride(),
            WIDTH=width,
            TILE=tile,
            PARTS=num_parts,
            ADD=residual is not None,
            CENTRE=bias is not None,
            PDL=has_dependent_launch(x.device),
            launch_pdl=has_dependent_launch(x.device),
            num_warps=min(max(tile // 256, 1), 16),
        )
    return normed, new_residual
