"""Products of a few rows with a weight matrix, fused with the norm before and GELU or residual add after them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels.tensor_checks import check_same_dtype, check_tensors

MAX_ROWS = 256
"""More rows are better served by a library's matrix product."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A linear layer, with the LayerNorm in front of it folded in where there is one. Made by ``pack_linear``."""

    weight: torch.Tensor  # [O, E]
    bias: torch.Tensor  # [O] float32
    column_sums: torch.Tensor | None  # [O] float32, with a norm: sums of the rows of weight
    eps: float


def pack_linear(
    weight: torch.Tensor,  # [O, E]
    bias: torch.Tensor,  # [O]
    *,
    norm_weight: torch.Tensor | None = None,  # [E]
    norm_bias: torch.Tensor | None = None,  # [E]
    eps: float = 0.0,
) -> PackedLinear:
    """Prepare a layer once, at load time.

    ``norm(x) * g + h`` in front of ``@ W.T + b`` equals ``norm(x) @ (W * g).T + (b + W @ h)``.

    Raises:
        ShapeError: shapes or dtypes disagree, or only one of the norm's tensors is given.
    """
    check_tensors(weight=(weight, "O E"), bias=(bias, "O"))
    check_same_dtype(weight=weight, bias=bias)
    if norm_weight is None or norm_bias is None:
        if norm_weight is not norm_bias:
            raise ShapeError("norm_weight and norm_bias: expected both or neither, got one")
        return PackedLinear(weight.contiguous(), bias.float(), None, eps)
    check_tensors(weight=(weight, "O E"), norm_weight=(norm_weight, "E"), norm_bias=(norm_bias, "E"))
    folded = (weight.float() * norm_weight.float()).to(weight.dtype).contiguous()
    folded_bias = bias.float() + weight.float() @ norm_bias.float()
    return PackedLinear(folded, folded_bias, folded.float().sum(1), eps)


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

    Args:
        x: at most ``MAX_ROWS`` rows, innermost stride 1.
        gelu: GELU in its tanh form.
        out: may be ``residual`` itself, not ``x``; None allocates.
        x_moments: of ``x``, from ``small_batch_linear_and_moments``, ``P`` a power of two; None has the norm sum up
            ``x`` itself.

    Raises:
        ShapeError: shapes or dtypes disagree, or there are too many rows.
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
    """As ``small_batch_linear``, and the moments of the result for the norm behind it, float32 ``[T, 2, P]``.

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
        out = x.new_empty((x.shape[0], layer.weight.shape[0]))
    check_tensors(x=(x, "T E"), weight=(layer.weight, "O E"), out=(out, "T O"))
    check_same_dtype(x=x, weight=layer.weight, out=out)
    if residual is not None:
        check_tensors(out=(out, "T O"), residual=(residual, "T O"))
        check_same_dtype(x=x, residual=residual)
    if x_moments is not None:
        check_tensors(x=(x, "T E"), x_moments=(x_moments, "T 2 P", torch.float32))
        _, kinds, parts = x_moments.shape
        if kinds != 2 or parts & (parts - 1) or not x_moments.is_contiguous():
            raise ShapeError(
                f"x_moments: expected contiguous [T, 2, P], P a power of two, got {list(x_moments.shape)}"
            )
    if x.shape[0] > MAX_ROWS:
        raise ShapeError(f"x: expected at most {MAX_ROWS} rows, got {x.shape[0]}")
    if x.is_cuda:
        from rose_backend.kernels.gpu import small_batch_linear as gpu

        moments = gpu.small_batch_linear(
            x,
            layer.weight,
            layer.bias,
            layer.column_sums,
            residual,
            out,
            eps=layer.eps,
            gelu=gelu,
            x_moments=x_moments,
            with_moments=with_moments,
        )
        return out, moments
    wide = x.float()
    if layer.column_sums is not None:
        wide = F.layer_norm(wide, x.shape[-1:], eps=layer.eps)
    result = F.linear(wide, layer.weight.float(), layer.bias)
    if gelu:
        result = F.gelu(result, approximate="tanh")
    if residual is not None:
        result = result + residual.float()
    wide = out.copy_(result).float()
    moments = torch.stack([wide.sum(1), wide.square().sum(1)], 1).unsqueeze(2) if with_moments else None
    return out, moments
