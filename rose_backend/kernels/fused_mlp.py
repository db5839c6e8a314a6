"""The element-wise parts of GPT-2's MLP: one launch each on a GPU, plain torch elsewhere."""

from __future__ import annotations

from types import ModuleType

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
    return _implementation(x).bias_gelu(x, bias)


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
    return _implementation(x).bias_residual(x, bias, residual)


def _implementation(x: torch.Tensor) -> ModuleType:
    if not x.is_cuda:
        return reference
    from rose_backend.kernels.gpu import fused_mlp as gpu

    return gpu
