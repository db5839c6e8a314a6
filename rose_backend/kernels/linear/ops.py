"""Products of a few rows with a weight matrix, fused with norm, activation and residual add around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import (
    MAX_ROWS,
    PackedLinear,
    check_moments,
    check_same_dtype,
    check_tensors,
    empty_rows,
    row_moments,
)

_FOLDED_ROWS = 1024
"""Of a weight, that a norm is folded into at once: they are in memory in float32 meanwhile."""


def pack_linear(
    weight: torch.Tensor,  # [O, E]
    bias: torch.Tensor | None = None,  # [O]
    *,
    norm_weight: torch.Tensor | None = None,  # [E]
    norm_bias: torch.Tensor | None = None,  # [E]
    eps: float = 0.0,
    gated: bool = False,
    out: torch.Tensor | None = None,  # [O, E]  written
) -> PackedLinear:
    """Prepare a layer once, at load time.

    ``norm(x) * g + h`` before ``@ W.T + b`` equals ``norm(x) @ (W * g).T + (b + W @ h)``.

    Args:
        norm_weight, norm_bias: of LayerNorm; the weight alone is RMSNorm's.
        gated: the first half of ``weight``'s rows is the gate of a gated MLP, the second half its factor.
        out: where the packed weight goes, contiguous; may be ``weight`` itself. None: ``weight`` stays as it is, and is
            the packed weight where nothing of it changes.

    Raises:
        ShapeError: shapes or dtypes disagree, a norm has only a bias, or ``gated`` has an odd number of rows.
    """
    check_tensors(weight=(weight, "O E"))
    if bias is not None:
        check_tensors(weight=(weight, "O E"), bias=(bias, "O"))
        check_same_dtype(weight=weight, bias=bias)
    if out is not None:
        check_tensors(weight=(weight, "O E"), out=(out, "O E"))
        check_same_dtype(weight=weight, out=out)
        if not out.is_contiguous():
            raise ShapeError(f"out: expected a contiguous tensor, got strides {out.stride()}")
    if gated:
        if weight.shape[0] % 2:
            raise ShapeError(f"weight: expected an even number of rows with a gate, got {weight.shape[0]}")
        weight = _alternate(weight)
        bias = None if bias is None else _alternate(bias)
    wide_bias = None if bias is None else bias.float()
    if norm_weight is None:
        if norm_bias is not None:
            raise ShapeError("norm_bias: expected norm_weight too")
        packed = weight.contiguous() if out is None else out.copy_(weight)
        return PackedLinear(packed, wide_bias, None, eps, is_gated=gated)
    check_tensors(weight=(weight, "O E"), norm_weight=(norm_weight, "E"))
    if norm_bias is None:
        folded = fold_norm(weight, norm_weight, out)
        return PackedLinear(folded, wide_bias, None, eps, has_rms_norm=True, is_gated=gated)
    check_tensors(weight=(weight, "O E"), norm_bias=(norm_bias, "E"))
    shift = weight.float() @ norm_bias.float()
    folded = fold_norm(weight, norm_weight, out)
    folded_bias = shift if wide_bias is None else wide_bias + shift
    return PackedLinear(folded, folded_bias, folded.float().sum(1), eps, is_gated=gated)


def fold_norm(
    weight: torch.Tensor,  # [O, E]
    norm_weight: torch.Tensor,  # [E]
    out: torch.Tensor | None = None,  # [O, E]  written
) -> torch.Tensor:
    """Return ``weight * norm_weight``, rounded once from float32, in ``out``, which may be ``weight``, or new."""
    folded = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if out is None else out
    wide_norm = norm_weight.float()
    for rows, target in zip(weight.split(_FOLDED_ROWS), folded.split(_FOLDED_ROWS), strict=True):
        target.copy_(rows.float() * wide_norm)
    return folded


def _alternate(rows: torch.Tensor) -> torch.Tensor:
    """Return the first row of the first half, the first of the second half, the second of the first half ..."""
    return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def small_batch_linear(
    x: torch.Tensor,  # [T, E]
    layer: PackedLinear,
    *,
    gelu: bool = False,
    residual: torch.Tensor | None = None,  # [T, O]
    out: torch.Tensor | None = None,  # [T, O]  written
    x_moments: torch.Tensor | None = None,  # [T, 2, P] float32
) -> torch.Tensor:
    """Return ``residual + gelu(norm(x) @ W.T + b)``, each part only where it was asked for. Rounded once, from float32.

    A gated layer's result is ``residual + silu(gate) * factor``, ``O / 2`` wide; ``O`` below is that width, too.

    Args:
        x: at most ``MAX_ROWS`` rows, innermost stride 1.
        gelu: GELU in its tanh form; not of a gated layer.
        out: may be ``residual`` itself, not ``x``; None allocates.
        x_moments: of ``x``, from ``small_batch_linear_and_moments`` or ``embed_tokens``, ``P`` a power of two; of a
            layer with a norm None has them summed up first.

    Raises:
        ShapeError: shapes or dtypes disagree, there are too many rows, or a gated layer is asked for GELU.
    """
    return _compute(x, layer, gelu, residual, out, x_moments, with_moments=False)[0]


def small_batch_linear_and_moments(
    x: torch.Tensor,  # [T, E]
    layer: PackedLinear,
    *,
    gelu: bool = False,
    residual: torch.Tensor | None = None,  # [T, O]
    out: torch.Tensor | None = None,  # [T, O]  written
    x_moments: torch.Tensor | None = None,  # [T, 2, P] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``small_batch_linear``, and the moments of the result for the norm after it, float32 ``[T, 2, P]``.

    They are the sums of each row and of its squares, each in ``P`` parts that have to be added.
    """
    out, moments = _compute(x, layer, gelu, residual, out, x_moments, with_moments=True)
    assert moments is not None, "they were asked for"
    return out, moments


def _compute(
    x: torch.Tensor,
    layer: PackedLinear,
    gelu: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    x_moments: torch.Tensor | None,
    *,
    with_moments: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if out is None:
        out = empty_rows(x, x.shape[0], layer.num_outputs)
    check_tensors(x=(x, "T E"), weight=(layer.weight, "N E"), out=(out, "T O"))
    if out.shape[1] != layer.num_outputs:
        raise ShapeError(f"out: expected O={layer.num_outputs}, got {out.shape[1]}")
    if gelu and layer.is_gated:
        raise ShapeError("gelu: expected False with a gated layer, got True")
    check_same_dtype(x=x, weight=layer.weight, out=out)
    if residual is not None:
        check_tensors(out=(out, "T O"), residual=(residual, "T O"))
        check_same_dtype(x=x, residual=residual)
    if x_moments is not None:
        check_moments(x, x_moments)
    if x.shape[0] > MAX_ROWS:
        raise ShapeError(f"x: expected at most {MAX_ROWS} rows, got {x.shape[0]}")
    if x.is_cuda:
        from rose_backend.kernels.linear.small_batch_linear import small_batch_linear as launch

        if x_moments is None and (layer.has_rms_norm or layer.column_sums is not None):
            x_moments = row_moments(x)
        moments = launch(
            x, layer, gelu=gelu, residual=residual, out=out, x_moments=x_moments, with_moments=with_moments
        )
        return out, moments
    wide = x.float()
    if layer.column_sums is not None:
        wide = F.layer_norm(wide, x.shape[-1:], eps=layer.eps)
    elif layer.has_rms_norm:
        wide = F.rms_norm(wide, x.shape[-1:], eps=layer.eps)
    result = F.linear(wide, layer.weight.float(), layer.bias)
    if layer.is_gated:
        gate, factor = result.unflatten(1, (-1, 2)).unbind(2)
        result = F.silu(gate) * factor
    if gelu:
        result = F.gelu(result, approximate="tanh")
    if residual is not None:
        result = result + residual.float()
    out.copy_(result)
    return out, row_moments(out) if with_moments else None
