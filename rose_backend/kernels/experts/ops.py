"""The MLP of a mixture of experts: a router chooses some of many gated MLPs for each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import (
    MAX_EXPERTS,
    Experts,
    Float8Experts,
    NormInput,
    PackedNorm,
    check_norm,
    check_norm_input,
    check_same_dtype,
    check_tensors,
    empty_rows,
    norm_input_of,
    normed_of,
)


def expert_mlp(
    x: torch.Tensor | NormInput,  # [T, E]
    router_logits: torch.Tensor,  # [T, X]
    experts: Experts,
    *,
    residual: torch.Tensor | None = None,  # [T, E]
    out: torch.Tensor | None = None,  # [T, E]  written
    next_norm: PackedNorm | None = None,
) -> tuple[torch.Tensor, NormInput | None]:
    """Return ``residual`` plus the weighted sum of the outputs of each token's experts, and the sum's ``NormInput``.

    Of expert ``e``, with ``A = top_k`` experts for each token::

        w[e] * (silu(x @ gate[e].T) * (x @ up[e].T)) @ down[e].T

    ``w`` is the softmax over the logits of all experts, or of the chosen ones with ``renormalize``. Activations between
    the two products, and each expert's weighted result, are rounded to the type of ``x``.

    Args:
        x: innermost stride 1; for an RMSNorm before it, see ``small_batch_linear``.
        out: may be ``residual`` or ``x`` itself; None allocates.

    Returns:
        [T, E], and its ``NormInput`` for ``next_norm``; None without one.

    Raises:
        ShapeError: shapes or dtypes disagree, a weight is not contiguous, or ``top_k`` is not between 1 and the number
            of experts, ``MAX_EXPERTS`` at most.
    """
    hidden = x.scaled if isinstance(x, NormInput) else x
    _check(hidden, router_logits, experts, residual)
    if isinstance(x, NormInput):
        check_norm_input(x)
        if x.norm.weight is None:
            raise ShapeError("x: expected an RMSNorm before experts, got a LayerNorm")
    if out is None:
        out = empty_rows(hidden, *hidden.shape)
    check_tensors(x=(hidden, "T E"), out=(out, "T E"))
    check_same_dtype(x=hidden, out=out)
    if next_norm is not None:
        check_norm(out, next_norm)
    if hidden.is_cuda:
        from rose_backend.kernels.experts.expert_mlp import expert_mlp as launch

        return out, launch(x, router_logits, experts, residual=residual, out=out, next_norm=next_norm)
    total = _add_up_experts(hidden, normed_of(x), router_logits, experts)
    out.copy_(total if residual is None else residual.float() + total)
    return out, None if next_norm is None else norm_input_of(out, next_norm)


def _check(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    experts: Experts,
    residual: torch.Tensor | None,
) -> None:
    weights = {"gate_up": experts.gate_up, "down": experts.down}
    for name, weight in weights.items():
        if isinstance(weight, Float8Experts):
            weight.check(name)
    gate_up, down = (
        each.values.flatten(1, 2) if isinstance(each, Float8Experts) else each for each in weights.values()
    )
    sizes = check_tensors(
        x=(x, "T E"), router_logits=(router_logits, "T X"), gate_up=(gate_up, "X 2I E"), down=(down, "X E I")
    )
    if sizes["2I"] != 2 * sizes["I"]:
        raise ShapeError(f"gate_up: expected {2 * sizes['I']} rows of each expert, got {sizes['2I']}")
    if sizes["X"] > MAX_EXPERTS:
        raise ShapeError(f"router_logits: expected at most {MAX_EXPERTS} experts, got {sizes['X']}")
    if not 1 <= experts.top_k <= sizes["X"]:
        raise ShapeError(f"top_k: expected 1 to {sizes['X']}, got {experts.top_k}")
    check_same_dtype(x=x, router_logits=router_logits)
    for name, weight in weights.items():
        if isinstance(weight, Float8Experts):
            continue
        check_same_dtype(x=x, **{name: weight})
        if not weight.is_contiguous():
            raise ShapeError(f"{name}: expected a contiguous tensor, got strides {weight.stride()}")
    if residual is not None:
        check_tensors(x=(x, "T E"), residual=(residual, "T E"))
        check_same_dtype(x=x, residual=residual)


def _choose_experts(
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


def _add_up_experts(
    x: torch.Tensor,  # [T, E]
    normed: torch.Tensor,  # [T, E] float32
    router_logits: torch.Tensor,  # [T, X]
    experts: Experts,
) -> torch.Tensor:
    """Return the weighted sum of the experts' outputs, float32 [T, E], one expert after the other."""
    expert_ids, weights = _choose_experts(router_logits, experts.top_k, renormalize=experts.renormalize)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in expert_ids.unique().tolist():
        tokens, places = torch.where(expert_ids == expert)
        gate_up, down = experts.matrices(expert, torch.float32)
        gate, up = F.linear(normed[tokens], gate_up).chunk(2, dim=-1)
        # Rounded where a GPU stores it.
        activated = (F.silu(gate) * up).to(x.dtype)
        output = F.linear(activated.float(), down) * weights[tokens, places, None]
        total.index_add_(0, tokens, output.to(x.dtype).float())
    return total
