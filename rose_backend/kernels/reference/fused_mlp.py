"""The element-wise parts of GPT-2's MLP, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def bias_gelu(
    x: torch.Tensor,  # [T, I]  written
    bias: torch.Tensor,  # [I]
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.bias_gelu``."""
    if x.dtype == torch.float32:
        return torch.ops.aten.gelu_(x.add_(bias), approximate="tanh")
    return x.copy_(F.gelu(x.float() + bias.float(), approximate="tanh"))


def bias_residual(
    x: torch.Tensor,  # [T, E]  written
    bias: torch.Tensor,  # [E]
    residual: torch.Tensor,  # [T, E]
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.bias_residual``."""
    if x.dtype == torch.float32:
        return x.add_(bias).add_(residual)
    return x.copy_(x.float() + bias.float() + residual.float())
