"""The MLP of a mixture of experts: a router chooses some of many gated MLPs for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.experts import reference
from rose_backend.kernels.linear.ops import check_moments, empty_rows, row_moments
from rose_backend.kernels.tensor_checks import check_same_dtype, check_tensors


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Gated MLPs without biases, and how many of them a token takes."""

    widen: torch.Tensor
    """[X, 2 * I, E], contiguous: of each expert the rows of the gate, then those of the other factor."""
    narrow: torch.Tensor  # [X, E, I] contiguous
    top_k: int
    renormalize: bool
    """A token's weights sum up to 1."""


def expert_mlp(
    x: torch.Tensor,  # [T, E]
    router_logits: torch.Tensor,  # [T, X]
    experts: Experts,
    *,
    residual: torch.Tensor | None = None,  # [T, E]
    out: torch.Tensor | None = None,  # [T, E]  written
    rms_eps: float | None = None,
    x_moments: torch.Tensor | None = None,  # [T, 2, P] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``residual`` plus the weighted sum of what each token's experts make of it, and the moments of the result.

    Of expert ``e``, with ``A = top_k`` experts for each token::

        w[e] * (silu(x @ gate[e].T) * (x @ factor[e].T)) @ narrow[e].T

    ``w`` is the softmax over the logits of all experts, or of the chosen ones with ``renormalize``. What is between the
    two products, and each expert's weighted result, is rounded to the type of ``x``.

    Args:
        x: innermost stride 1.
        out: may be ``residual`` or ``x`` itself; None allocates.
        rms_eps: of an RMSNorm of ``x`` in front, whose weight is folded into ``experts.widen``; None: there is none.
        x_moments: see ``small_batch_linear``; used with ``rms_eps`` only, where None has them summed up first.

    Returns:
        [T, E], and as ``small_batch_linear_and_moments`` has them float32 [T, 2, P].

    Raises:
        ShapeError: shapes or dtypes disagree, a weight is not contiguous, or ``top_k`` is not between 1 and the number
            of experts, ``MAX_EXPERTS`` at most.
    """
    _check(x, router_logits, experts, residual, x_moments)
    if out is None:
        out = empty_rows(x, *x.shape)
    check_tensors(x=(x, "T E"), out=(out, "T E"))
    check_same_dtype(x=x, out=out)
    if x.is_cuda:
        from rose_backend.kernels.experts import expert_mlp as gpu

        if rms_eps is not None and x_moments is None:
            x_moments = row_moments(x)
        moments = gpu.expert_mlp(
            x,
            router_logits,
            experts.widen,
            experts.narrow,
            residual,
            out,
            top_k=experts.top_k,
            renormalize=experts.renormalize,
            rms_eps=rms_eps,
            x_moments=x_moments,
        )
        return out, moments
    total = reference.expert_mlp(
        x,
        router_logits,
        experts.widen,
        experts.narrow,
        top_k=experts.top_k,
        renormalize=experts.renormalize,
        rms_eps=rms_eps,
    )
    out.copy_(total if residual is None else residual.float() + total)
    return out, row_moments(out)


def _check(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    experts: Experts,
    residual: torch.Tensor | None,
    x_moments: torch.Tensor | None,
) -> None:
    sizes = check_tensors(
        x=(x, "T E"),
        router_logits=(router_logits, "T X"),
        widen=(experts.widen, "X 2I E"),
        narrow=(experts.narrow, "X E I"),
    )
    if sizes["2I"] != 2 * sizes["I"]:
        raise ShapeError(f"widen: expected {2 * sizes['I']} rows of each expert, got {sizes['2I']}")
    if sizes["X"] > reference.MAX_EXPERTS:
        raise ShapeError(f"router_logits: expected at most {reference.MAX_EXPERTS} experts, got {sizes['X']}")
    if not 1 <= experts.top_k <= sizes["X"]:
        raise ShapeError(f"top_k: expected 1 to {sizes['X']}, got {experts.top_k}")
    check_same_dtype(x=x, router_logits=router_logits, widen=experts.widen, narrow=experts.narrow)
    for name, weight in (("widen", experts.widen), ("narrow", experts.narrow)):
        if not weight.is_contiguous():
            raise ShapeError(f"{name}: expected a contiguous tensor, got strides {weight.stride()}")
    if residual is not None:
        check_tensors(x=(x, "T E"), residual=(residual, "T E"))
        check_same_dtype(x=x, residual=residual)
    if x_moments is not None:
        check_moments(x, x_moments)
