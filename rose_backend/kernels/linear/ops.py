"""Products of a few rows with a weight matrix, fused with norm, activation and residual add around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import (
    FLOAT8_CAPABILITY,
    MAX_ROWS,
    SCALED_BLOCK,
    AdapterRows,
    Adapters,
    Float8Weight,
    InputQuantization,
    NormInput,
    PackedLinear,
    PackedNorm,
    QuantizedActivations,
    QuantizedWeight,
    Weight,
    check_norm,
    check_norm_input,
    check_same_dtype,
    check_tensors,
    empty_rows,
    norm_input_of,
    normed_of,
)
from rose_backend.kernels.gpu_properties import gpu_properties, is_recording

_FOLDED_ROWS = 1024
"""Of a weight, that a LayerNorm is folded into at once: they are in memory in float32 meanwhile."""


def pack_linear(
    weight: Weight,  # [O, E]
    bias: torch.Tensor | None = None,  # [O]
    *,
    norm_weight: torch.Tensor | None = None,  # [E]
    norm_bias: torch.Tensor | None = None,  # [E]
    gated: bool = False,
) -> PackedLinear:
    """Prepare a layer once, at load time.

    ``norm(x) * g + h`` before ``@ W.T + b`` equals ``norm(x) @ (W * g).T + (b + W @ h)``.

    Args:
        norm_weight, norm_bias: of the LayerNorm before it, if any, to be folded in; not for a quantized weight. RMSNorm
            is not folded in, see ``PackedNorm``.
        gated: the first half of ``weight``'s rows is the gate of a gated MLP, the second half is up.

    Returns:
        The layer, whose weight is ``weight`` itself if it need not change.

    Raises:
        ShapeError: shapes or dtypes disagree, only one of ``norm_weight`` and ``norm_bias`` is given, or ``gated`` has
            an odd number of rows, or a gate that ends within a block of scales.
    """
    if gated and weight.shape[0] % 2:
        raise ShapeError(f"weight: expected an even number of rows with a gate, got {weight.shape[0]}")
    if not isinstance(weight, torch.Tensor):
        weight.check()
        if (
            gated
            and isinstance(weight, Float8Weight)
            and weight.has_blocks
            and weight.shape[0] // 2 % SCALED_BLOCK
        ):
            raise ShapeError(
                f"weight: expected whole blocks of {SCALED_BLOCK} rows of a gate, got {weight.shape[0] // 2} rows"
            )
        if norm_weight is not None or norm_bias is not None:
            raise ShapeError("norm_weight and norm_bias: expected neither with a quantized weight")
        if bias is not None:
            check_tensors(weight=(weight, "O E"), bias=(bias, "O"))
        return PackedLinear(weight, bias, None, is_gated=gated)
    check_tensors(weight=(weight, "O E"))
    if bias is not None:
        check_tensors(weight=(weight, "O E"), bias=(bias, "O"))
        check_same_dtype(weight=weight, bias=bias)
    if gated:
        weight = _alternate(weight)
        bias = None if bias is None else _alternate(bias)
    if norm_weight is None or norm_bias is None:
        if norm_weight is not norm_bias:
            raise ShapeError("norm_weight and norm_bias: expected both or neither, got one")
        return PackedLinear(weight.contiguous(), bias, None, is_gated=gated)
    check_tensors(weight=(weight, "O E"), norm_weight=(norm_weight, "E"), norm_bias=(norm_bias, "E"))
    shift = weight.float() @ norm_bias.float()
    # Rounded once, from float32.
    folded = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    wide_norm = norm_weight.float()
    for rows, target in zip(weight.split(_FOLDED_ROWS), folded.split(_FOLDED_ROWS), strict=True):
        target.copy_(rows.float() * wide_norm)
    folded_bias = shift if bias is None else bias.float() + shift
    return PackedLinear(folded, folded_bias, folded.float().sum(1), is_gated=gated)


def pack_norm(
    weight: torch.Tensor,  # [E]
    eps: float,
) -> PackedNorm:
    """Prepare an RMSNorm for the kernels that write what it norms. It keeps ``weight`` itself."""
    scale = weight.new_empty(1, dtype=torch.float32) if weight.dtype is torch.float16 else None
    norm = PackedNorm(weight, eps, scale)
    norm.update_scale()
    return norm


def _alternate(rows: torch.Tensor) -> torch.Tensor:
    """Return the first row of the first half, the first of the second half, the second of the first half ..."""
    return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def small_batch_linear(
    x: torch.Tensor | NormInput,  # [T, E]
    layer: PackedLinear,
    *,
    gelu: bool = False,
    residual: torch.Tensor | None = None,  # [T, O]
    out: torch.Tensor | None = None,  # [T, O]  written
) -> torch.Tensor:
    """Return ``residual + gelu(norm(x) @ W.T + b)``, each part only if asked for. Rounded once, from float32.

    A gated layer's result is ``residual + silu(gate) * up``, ``O / 2`` wide; ``residual`` and ``out`` are as wide.

    Args:
        x: at most ``MAX_ROWS`` rows, innermost stride 1. With a norm before the layer, the ``NormInput`` that
            ``small_batch_linear_before_norm``, ``embed_tokens`` or ``expert_mlp`` has returned.
        gelu: apply GELU in its tanh form; not for a gated layer.
        out: may be ``residual`` itself, not ``x``; None allocates.

    Raises:
        ShapeError: shapes or dtypes disagree, there are too many rows, a gated layer is asked for GELU, or only one of
            ``x`` and ``layer`` comes with a LayerNorm.
    """
    return _compute(x, layer, gelu, residual, out, None)[0]


def small_batch_linear_before_norm(
    x: torch.Tensor | NormInput,  # [T, E]
    layer: PackedLinear,
    next_norm: PackedNorm,  # of [T, O]
    *,
    gelu: bool = False,
    residual: torch.Tensor | None = None,  # [T, O]
    out: torch.Tensor | None = None,  # [T, O]  written
) -> tuple[torch.Tensor, NormInput]:
    """As ``small_batch_linear``, and what the result leaves to the norm and the packed layer after it."""
    out, after = _compute(x, layer, gelu, residual, out, next_norm)
    assert after is not None, "there is a norm"
    return out, after


def _compute(
    x: torch.Tensor | NormInput,
    layer: PackedLinear,
    gelu: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    next_norm: PackedNorm | None,
) -> tuple[torch.Tensor, NormInput | None]:
    hidden, norm = (x.scaled, x.norm) if isinstance(x, NormInput) else (x, None)
    if out is None:
        out = empty_rows(hidden, hidden.shape[0], layer.num_outputs)
    weight = layer.weight
    check_tensors(x=(hidden, "T E"), weight=(weight, "N E"), out=(out, "T O"))
    if out.shape[1] != layer.num_outputs:
        raise ShapeError(f"out: expected O={layer.num_outputs}, got {out.shape[1]}")
    if gelu and layer.is_gated:
        raise ShapeError("gelu: expected False with a gated layer, got True")
    check_same_dtype(x=hidden, out=out)
    if isinstance(weight, torch.Tensor):
        check_same_dtype(x=hidden, weight=weight)
    if residual is not None:
        check_tensors(out=(out, "T O"), residual=(residual, "T O"))
        check_same_dtype(x=hidden, residual=residual)
    if isinstance(x, NormInput):
        check_norm_input(x)
    if (norm is not None and norm.weight is None) != (layer.column_sums is not None):
        raise ShapeError(
            "x: expected what is left to a LayerNorm where one is folded into the layer, and only there"
        )
    if next_norm is not None:
        check_norm(out, next_norm)
    if hidden.shape[0] > MAX_ROWS:
        raise ShapeError(f"x: expected at most {MAX_ROWS} rows, got {hidden.shape[0]}")
    if hidden.is_cuda:
        from rose_backend.kernels.linear.small_batch_linear import small_batch_linear as launch

        return out, launch(x, layer, gelu=gelu, residual=residual, out=out, next_norm=next_norm)
    wide = weight.float() if isinstance(weight, torch.Tensor) else weight.dequantized(torch.float32)
    result = F.linear(normed_of(x), wide, None if layer.bias is None else layer.bias.float())
    if layer.is_gated:
        gate, up = result.unflatten(1, (-1, 2)).unbind(2) if layer.alternates else result.chunk(2, 1)
        result = F.silu(gate) * up
    if gelu:
        result = F.gelu(result, approximate="tanh")
    if residual is not None:
        result = result + residual.float()
    out.copy_(result)
    return out, None if next_norm is None else norm_input_of(out, next_norm)


def library_quantization(weight: Float8Weight, dtype: torch.dtype) -> InputQuantization | None:
    """Return how a library's product takes the input of a weight in 8 bits; None: it has none for it.

    Args:
        dtype: of the product.
    """
    if not weight.values.is_cuda or dtype not in (torch.float16, torch.bfloat16):
        return None
    num_rows, depth = weight.shape
    capability = gpu_properties(weight.device).capability
    if weight.has_blocks:
        # On Hopper alone, and of a multiple of four blocks: see torch.nn.functional.scaled_mm.
        is_taken = capability[0] == 9 and depth % (4 * SCALED_BLOCK) == 0
    else:
        is_taken = capability >= FLOAT8_CAPABILITY and depth % _MULTIPLE == 0
    if not is_taken or num_rows % _MULTIPLE:
        return None
    return InputQuantization(by_group=weight.has_blocks, aligned_scales=weight.has_blocks)


_MULTIPLE = 16
"""That the library's sizes in 8 bits are."""


def quantized_linear(
    x: torch.Tensor | QuantizedActivations,  # [T, E]
    weight: QuantizedWeight,  # [O, E]
    bias: torch.Tensor | None = None,  # [O]
) -> torch.Tensor:
    """Return ``x @ W.T + b``, [T, O], of any number of rows.

    Args:
        x: innermost stride 1; the weight is rounded to its type. Or in 8 bits, as ``library_quantization`` says.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    weight.check()
    values = x.values if isinstance(x, QuantizedActivations) else x
    check_tensors(x=(values, "T E"), weight=(weight, "O E"))
    if bias is not None:
        check_tensors(weight=(weight, "O E"), bias=(bias, "O", x.dtype))
    if isinstance(x, QuantizedActivations):
        assert isinstance(weight, Float8Weight), "see library_quantization"
        return _scaled_product(x, weight, bias)
    if x.is_cuda:
        from rose_backend.kernels.linear.many_rows import quantized_linear as launch

        return launch(x, weight, bias)
    return F.linear(x, weight.dequantized(x.dtype), bias)


def _scaled_product(x: QuantizedActivations, weight: Float8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    values, by_group = x.values, x.quantization.by_group
    num_rows, depth = values.shape
    if not values.is_cuda:
        groups = values.float().unflatten(1, (x.scales.shape[1], -1)) * x.scales[:, :, None]
        product = F.linear(groups.flatten(1), weight.dequantized(torch.float32))
        return (product if bias is None else product + bias).to(x.dtype)
    if is_recording():
        return values.new_empty((num_rows, len(weight.values)), dtype=x.dtype)
    scales = x.scales
    if by_group:
        # The library takes a multiple of 4 rows. Those past the last one hold anything; their products are dropped.
        rows = scales.stride(1)
        values = values.as_strided((rows, depth), (depth, 1))
        scales = scales.as_strided((rows, scales.shape[1]), (1, rows))
    product = F.scaled_mm(
        values,
        weight.values.t(),
        scales,
        F.ScalingType.BlockWise1x128 if by_group else F.ScalingType.RowWise,
        weight.scales.contiguous().t(),
        F.ScalingType.BlockWise128x128 if by_group else F.ScalingType.RowWise,
        bias=bias,
        output_dtype=x.dtype,
        # As vLLM's CUTLASS product does; by groups, sums are exact after each of them.
        use_fast_accum=not by_group,
    )
    return product[:num_rows]


_MAX_SLICES = 3
"""Of a layer with adapters: query, key and value."""


def adapter_rows(
    slots: torch.Tensor,  # [T] int64
) -> AdapterRows:
    """Return a step's rows in the order of their LoRA slots.

    A row without an adapter has a number that is no slot, such as -1.
    """
    check_tensors(slots=(slots, "T", torch.int64))
    rising, rows = torch.sort(slots, stable=True)
    return AdapterRows(rows, rising)


def add_adapters(
    x: torch.Tensor | NormInput,  # [T, E]
    adapters: Adapters,
    rows: AdapterRows,
    out: torch.Tensor,  # [T, O]  written
    *,
    alternating: bool = False,
) -> None:
    """Add to a layer's product what each row's adapter makes of ``norm(x)``: ``norm(x) @ A.T @ B.T`` of each slice.

    The result of the first product is rounded to the adapters' dtype, the sum is rounded once.

    Args:
        x: innermost stride 1, as of ``out``; with a norm in front what is left to it, of RMSNorm.
        rows: those without an adapter stay as they are.
        out: its columns are those of the slices side by side.
        alternating: columns of two slices are in turns instead, as those of a packed gated layer.

    Raises:
        ShapeError: shapes, dtypes or strides disagree, or there are more than three slices.
    """
    given, lora_a, lora_b = x, adapters.lora_a, adapters.lora_b
    if isinstance(given, NormInput):
        check_norm_input(given)
        if given.norm.weight is None:
            raise ShapeError("x: expected what is left to an RMSNorm, got a LayerNorm's")
        x = given.scaled
    assert isinstance(x, torch.Tensor)
    if not 0 < len(lora_a) == len(lora_b) <= _MAX_SLICES:
        raise ShapeError(f"adapters: expected 1 to {_MAX_SLICES} slices, got {len(lora_a)} and {len(lora_b)}")
    for a, b in zip(lora_a, lora_b, strict=True):
        check_tensors(x=(x, "T E"), lora_a=(a, "U Z E"), slots=(rows.slots, "T", torch.int64))
        check_tensors(first=(lora_a[0], "U Z E"), lora_a=(a, "U Z E"), lora_b=(b, "U O Z"))
        check_same_dtype(x=x, lora_a=a, lora_b=b, out=out)
        if not a.is_contiguous() or not b.is_contiguous():
            raise ShapeError("adapters: expected contiguous tensors, got others")
    num_outputs = sum(b.shape[1] for b in lora_b)
    check_tensors(x=(x, "T E"), out=(out, "T O"))
    if out.shape[1] != num_outputs:
        raise ShapeError(f"out: expected O={num_outputs}, got {out.shape[1]}")
    if alternating and (len(lora_b) != 2 or lora_b[0].shape != lora_b[1].shape):
        raise ShapeError("alternating: expected False but for two slices of one width, got True")
    for name, tensor in (("x", x), ("out", out)):
        if tensor.numel() and tensor.stride(1) != 1:
            raise ShapeError(f"{name}: expected innermost stride 1, got {tensor.stride()}")
    if not x.shape[0]:
        return
    if x.is_cuda:
        from rose_backend.kernels.linear.adapters import add_adapters as launch

        launch(given, adapters, rows, out, alternating=alternating)
        return
    for slot in range(lora_a[0].shape[0]):
        own = rows.rows[rows.slots == slot]
        if not len(own):
            continue
        wide = normed_of(given)[own]
        slices = [
            (wide @ a[slot].float().t()).to(x.dtype).float() @ b[slot].float().t()
            for a, b in zip(lora_a, lora_b, strict=True)
        ]
        added = torch.stack(slices, 2).flatten(1) if alternating else torch.cat(slices, 1)
        out[own] = (out[own].float() + added).to(out.dtype)
