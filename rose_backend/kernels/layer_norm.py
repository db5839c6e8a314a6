"""LayerNorm, alone and with the residual add in front of it. Runs in plain torch on every device."""

from __future__ import annotations

import torch

from rose_backend.kernels.reference import layer_norm as reference
from rose_backend.kernels.tensor_checks import check_same_dtype, check_tensors


def layer_norm(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    bias: torch.Tensor,  # [E]
    eps: float,
) -> torch.Tensor:
    """Return ``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension, [T, E].

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    check_tensors(x=(x, "T E"), weight=(weight, "E"), bias=(bias, "E"))
    check_same_dtype(x=x, weight=weight, bias=bias)
    return reference.layer_norm(x, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor,  # [T, E]
    residual: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    bias: torch.Tensor,  # [E]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(layer_norm(x + residual), x + residual)``, both [T, E] and new; the inputs stay as they are.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    check_tensors(x=(x, "T E"), residual=(residual, "T E"), weight=(weight, "E"), bias=(bias, "E"))
    check_same_dtype(x=x, residual=residual, weight=weight, bias=bias)
    return reference.add_layer_norm(x, residual, weight, bias, eps)
