"""The element-wise parts of GPT-2's MLP. They run in plain torch on every device."""

from __future__ import annotations

import torch

from rose_backend.kernels.reference import fused_mlp as reference
from rose_backend.kernels.tensor_checks import check_same_dtype, check_tensors


def bias_gelu(
    x: torch.Tensor,  # [T, I]  written
    bias: torch.Tensor,  # [I]
) -> torch.Tensor:
    """Replace ``x`` by ``gelu(x + bias)``, GELU in its tanh form, and return it. Rounded once, from float32.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    check_tensors(x=(x, "T I"), bias=(bias, "I"))
    check_same_dtype(x=x, bias=bias)
    return reference.bias_gelu(x, bias)


def bias_residual(
    x: torch.Tensor,  # [T, E]  written
    bias: torch.Tensor,  # [E]
    residual: torch.Tensor,  # [T, E]
) -> torch.Tensor:
    """Replace ``x`` by ``x + bias + residual`` and return it. Rounded once, from float32.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    check_tensors(x=(x, "T E"), bias=(bias, "E"), residual=(residual, "T E"))
    check_same_dtype(x=x, bias=bias, residual=residual)
    return reference.bias_residual(x, bias, residual)
