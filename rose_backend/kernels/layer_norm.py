"""LayerNorm and RMSNorm, alone and with the residual add in front: one launch on a GPU, plain torch elsewhere."""

from __future__ import annotations

from types import ModuleType

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
    return _implementation(x).layer_norm(x, weight, bias, eps)


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
    return _implementation(x).add_layer_norm(x, residual, weight, bias, eps)


def rms_norm(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
) -> torch.Tensor:
    """Return ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension, [T, E]; rounded once, from float32.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    check_tensors(x=(x, "T E"), weight=(weight, "E"))
    check_same_dtype(x=x, weight=weight)
    return _implementation(x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor,  # [T, E]
    residual: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(rms_norm(x + residual), x + residual)``, both [T, E] and new; the inputs stay as they are.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    check_tensors(x=(x, "T E"), residual=(residual, "T E"), weight=(weight, "E"))
    check_same_dtype(x=x, residual=residual, weight=weight)
    return _implementation(x).add_rms_norm(x, residual, weight, eps)


def _implementation(x: torch.Tensor) -> ModuleType:
    if not x.is_cuda:
        return reference
    from rose_backend.kernels.gpu import layer_norm as gpu

    return gpu
