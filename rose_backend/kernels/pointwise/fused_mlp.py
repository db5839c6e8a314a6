"""The element-wise parts of MLPs: one launch each, float32 inside, rounded once. Those of GPT-2's work in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu_properties import has_dependent_launch

_TILE = 1024


@triton.jit
def _bias_kernel(
    x_ptr,  # [T, E]  written
    bias_ptr,  # [E]
    residual_ptr,  # [T, E]
    width,
    x_stride_t,
    x_stride_e,
    residual_stride_t,
    residual_stride_e,
    GELU: tl.constexpr,
    TILE: tl.constexpr,
):
    """Args: GELU: apply it to x + bias; else add the residual."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < width
    x_ptrs = x_ptr + token * x_stride_t + columns * x_stride_e
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # Its tanh form is x * (1 + tanh(z)) / 2 with z = sqrt(2 / pi) * (x + 0.044715 * x**3), or x * sigmoid(2 * z).
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        residual = residual_ptr + token * residual_stride_t + columns * residual_stride_e
        x += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptrs, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [T, 2 * I]
    out_ptr,  # [T, I] contiguous, written
    width,
    stride_t,
    stride_e,
    ALTERNATING: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Args: ALTERNATING: gate and up are in turns, not side by side."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < width
    row = gate_up_ptr + token * stride_t
    if ALTERNATING:
        both = tl.program_id(1) * (2 * TILE) + tl.arange(0, 2 * TILE)
        pairs = tl.load(row + both.to(tl.int64) * stride_e, mask=both < 2 * width, other=0.0)
        gate, up = tl.split(tl.reshape(pairs, [TILE, 2]))
    else:
        gate = tl.load(row + columns.to(tl.int64) * stride_e, mask=mask, other=0.0)
        up = tl.load(row + (columns + width).to(tl.int64) * stride_e, mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    product = gate * tl.sigmoid(gate) * up.to(tl.float32)
    tl.store(out_ptr + token * width + columns, product.to(out_ptr.dtype.element_ty), mask=mask)


def bias_gelu(
    x: torch.Tensor,  # [T, I]  written
    bias: torch.Tensor,  # [I]
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.bias_gelu``."""
    return _launch(x, bias, None)


def bias_residual(
    x: torch.Tensor,  # [T, E]  written
    bias: torch.Tensor,  # [E]
    residual: torch.Tensor,  # [T, E]
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.bias_residual``."""
    return _launch(x, bias, residual)


def _launch(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    if x.numel():
        num_tokens, width = x.shape
        _bias_kernel[(num_tokens, triton.cdiv(width, _TILE))](
            x,
            bias.contiguous(),
            x if residual is None else residual,
            width,
            *x.stride(),
            *(x if residual is None else residual).stride(),
            GELU=residual is None,
            TILE=_TILE,
            num_warps=4,
        )
    return x


def silu_mul(
    gate_up: torch.Tensor,  # [T, 2 * I]
    *,
    alternating: bool = False,
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.silu_mul``."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, width))
    if out.numel():
        use_pdl = has_dependent_launch(out.device)
        _silu_mul_kernel[(num_tokens, triton.cdiv(width, _TILE))](
            gate_up,
            out,
            width,
            *gate_up.stride(),
            ALTERNATING=alternating,
            TILE=_TILE,
            PDL=use_pdl,
            launch_pdl=use_pdl,
            num_warps=4,
        )
    return out
