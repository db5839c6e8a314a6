"""A product with LayerNorm in front and GELU or a residual behind, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def small_batch_linear(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [O, E]
    bias: torch.Tensor,  # [O] float32
    column_sums: torch.Tensor | None,  # [O] float32
    residual: torch.Tensor | None,  # [T, O]
    out: torch.Tensor,  # [T, O]  written
    *,
    eps: float,
    gelu: bool,
    x_moments: torch.Tensor | None = None,  # [T, 2, P] float32, not used
    with_moments: bool = False,
) -> torch.Tensor | None:
    """Twin of ``rose_backend.kernels.small_batch_linear``: float32 throughout, rounded once at the end.

    Returns:
        The moments of ``out`` if they were asked for, float32 [T, 2, 1].
    """
    wide = x.float()
    if column_sums is not None:
        wide = F.layer_norm(wide, x.shape[-1:], eps=eps)
    result = F.linear(wide, weight.float(), bias)
    if gelu:
        result = F.gelu(result, approximate="tanh")
    if residual is not None:
        result = result + residual.float()
    wide = out.copy_(result).float()
    return torch.stack([wide.sum(1), wide.square().sum(1)], 1).unsqueeze(2) if with_moments else None
