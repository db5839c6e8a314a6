"""LayerNorm and RMSNorm, alone and with the residual add in front of it, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer_norm(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    bias: torch.Tensor,  # [E]
    eps: float,
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.layer_norm``."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor,  # [T, E]
    residual: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    bias: torch.Tensor,  # [E]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``rose_backend.kernels.add_layer_norm``."""
    new_residual = x + residual
    return F.layer_norm(new_residual, weight.shape, weight, bias, eps), new_residual


def rms_norm(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.rms_norm``."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,  # [T, E]
    residual: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``rose_backend.kernels.add_rms_norm``."""
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual
