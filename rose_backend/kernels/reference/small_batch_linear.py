"""A product with LayerNorm in front and GELU or a residual behind, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def small_batch_linear(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [O, E]
    bias: torch.Tensor,  # [O] float32
    residual: torch.Tensor | None,  # [T, O]
    out: torch.Tensor,  # [T, O]  written
    *,
    has_norm: bool,
    eps: float,
    gelu: bool,
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.small_batch_linear``: float32 throughout, rounded once at the end."""
    wide = x.float()
    if has_norm:
        wide = F.layer_norm(wide, x.shape[-1:], eps=eps)
    result = F.linear(wide, weight.float(), bias)
    if gelu:
        result = F.gelu(result, approximate="tanh")
    if residual is not None:
        result = result + residual.float()
    return out.copy_(result)
