"""The MLP of a mixture of experts in plain torch, one expert after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

MAX_EXPERTS = 1024
"""Of a layer. On a GPU one program looks at all logits of a token at once."""


def choose_experts(
    router_logits: torch.Tensor,  # [T, X]
    top_k: int,
    *,
    renormalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of the largest logits, int64 [T, A], and their weights, float32 [T, A].

    Weights are probabilities among all experts; with ``renormalize`` among those that are chosen. Of equal logits the
    first expert's counts as larger.
    """
    # Sorted before they are probabilities, of which small ones may be rounded to the same number.
    expert_ids = router_logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.softmax(router_logits.float(), dim=-1).gather(1, expert_ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return expert_ids, weights


def expert_mlp(
    x: torch.Tensor,  # [T, E]
    router_logits: torch.Tensor,  # [T, X]
    widen: torch.Tensor,  # [X, 2 * I, E]
    narrow: torch.Tensor,  # [X, E, I]
    *,
    top_k: int,
    renormalize: bool,
    rms_eps: float | None,
) -> torch.Tensor:
    """Return the weighted sum of the experts' outputs, float32 [T, E]; see ``rose_backend.kernels.experts.ops``."""
    expert_ids, weights = choose_experts(router_logits, top_k, renormalize=renormalize)
    normed = x.float()
    if rms_eps is not None:
        normed = F.rms_norm(normed, x.shape[-1:], eps=rms_eps)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in expert_ids.unique().tolist():
        tokens, places = torch.where(expert_ids == expert)
        gate, factor = F.linear(normed[tokens], widen[expert].float()).chunk(2, dim=-1)
        # Rounded where a GPU stores it.
        activated = (F.silu(gate) * factor).to(x.dtype)
        output = F.linear(activated.float(), narrow[expert].float()) * weights[tokens, places, None]
        total.index_add_(0, tokens, output.to(x.dtype).float())
    return total
