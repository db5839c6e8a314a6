"""Operations of a few reads and one write per number: embeddings, norms and the element-wise parts of MLPs.

One launch each on a GPU, plain torch elsewhere. All raise a ``ShapeError`` where shapes or dtypes disagree.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import (
    LARGEST_FLOAT8,
    LEAST_OF_GROUP,
    LEAST_ROW_SCALE,
    SCALED_BLOCK,
    HeadRotation,
    InputQuantization,
    NormInput,
    PackedNorm,
    QuantizedActivations,
    check_norm,
    check_same_dtype,
    check_tensors,
    empty_rows,
    norm_input_of,
)


def embed_tokens(
    input_ids: torch.Tensor,  # [T] int64 or int32
    positions: torch.Tensor,  # [T] int64
    token_embedding: torch.Tensor,  # [V, E]
    position_embedding: torch.Tensor | None = None,  # [P, E]
    *,
    next_norm: PackedNorm | None = None,
) -> tuple[torch.Tensor, NormInput | None]:
    """Return ``token_embedding[input_ids] + position_embedding[positions]``, rounded once, and what a norm needs of it.

    The sums are [T, E]; what they leave to ``next_norm``, of the first layer, has moments in one part.

    Args:
        input_ids, positions: inside their tables; a GPU does not check that. But a negative id, of a row for which no
            token could be chosen (``SamplingTensors.invalid_token_id``), counts as 0.
        position_embedding: None adds nothing.
    """
    check_tensors(
        input_ids=(input_ids, "T"),
        positions=(positions, "T", torch.int64),
        token_embedding=(token_embedding, "V E"),
    )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"input_ids: expected dtype torch.int64 or torch.int32, got {input_ids.dtype}")
    if position_embedding is not None:
        check_tensors(
            token_embedding=(token_embedding, "V E"), position_embedding=(position_embedding, "P E")
        )
        check_same_dtype(token_embedding=token_embedding, position_embedding=position_embedding)
    if next_norm is not None:
        check_norm(token_embedding, next_norm)
    if input_ids.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import embed_tokens as launch

        out = empty_rows(token_embedding, input_ids.shape[0], token_embedding.shape[1])
        return out, launch(input_ids, positions, token_embedding, position_embedding, out, next_norm)
    embedded = F.embedding(input_ids.clamp(min=0), token_embedding)
    if position_embedding is not None:
        embedded = embedded + F.embedding(positions, position_embedding)
    return embedded, None if next_norm is None else norm_input_of(embedded, next_norm)


def layer_norm(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    bias: torch.Tensor,  # [E]
    eps: float,
) -> torch.Tensor:
    """Return ``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension, [T, E]."""
    check_tensors(x=(x, "T E"), weight=(weight, "E"), bias=(bias, "E"))
    check_same_dtype(x=x, weight=weight, bias=bias)
    if x.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import layer_norm as launch

        return launch(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor,  # [T, E] or [P, T, E]
    residual: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    bias: torch.Tensor,  # [E]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(layer_norm(x + residual), x + residual)``, both [T, E] and new; the inputs stay as they are.

    Args:
        x: with three dimensions, parts whose sum is meant, added in float32.
    """
    check_tensors(x=(x, _parts_of(x)), residual=(residual, "T E"), weight=(weight, "E"), bias=(bias, "E"))
    check_same_dtype(x=x, residual=residual, weight=weight, bias=bias)
    if x.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import add_layer_norm as launch

        return launch(x, residual, weight, bias, eps)
    new_residual = _sum(x, residual)
    return F.layer_norm(new_residual, weight.shape, weight, bias, eps), new_residual


def rms_norm(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
) -> torch.Tensor:
    """Return ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension, [T, E]; rounded once, from float32."""
    check_tensors(x=(x, "T E"), weight=(weight, "E"))
    check_same_dtype(x=x, weight=weight)
    if x.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import rms_norm as launch

        return launch(x, weight, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,  # [T, E] or [P, T, E]
    residual: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(rms_norm(x + residual), x + residual)``, both [T, E] and new; the inputs stay as they are.

    Args:
        x: with three dimensions, parts whose sum is meant, added in float32.
    """
    check_tensors(x=(x, _parts_of(x)), residual=(residual, "T E"), weight=(weight, "E"))
    check_same_dtype(x=x, residual=residual, weight=weight)
    if x.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import add_rms_norm as launch

        return launch(x, residual, weight, eps)
    new_residual = _sum(x, residual)
    return rms_norm(new_residual, weight, eps), new_residual


def rms_norm_quantized(
    x: torch.Tensor,  # [T, E] or, with a residual, [P, T, E]
    residual: torch.Tensor | None,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
    quantization: InputQuantization,
) -> tuple[QuantizedActivations, torch.Tensor]:
    """Return what ``add_rms_norm`` does, the norm rounded as there and then quantized; None adds nothing to ``x``.

    Args:
        quantization: on a GPU of ``FLOAT8_CAPABILITY``.
    """
    check_tensors(x=(x, "T E" if residual is None else _parts_of(x)), weight=(weight, "E"))
    check_same_dtype(x=x, weight=weight)
    if residual is not None:
        check_tensors(x=(x, _parts_of(x)), residual=(residual, "T E"))
        check_same_dtype(x=x, residual=residual)
    _check_groups(x.shape[-1], quantization)
    if x.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import rms_norm_quantized as launch

        return launch(x, residual, weight, eps, quantization)
    total = x if residual is None else _sum(x, residual)
    return quantize(rms_norm(total, weight, eps), quantization), total


def _check_groups(width: int, quantization: InputQuantization) -> None:
    if quantization.by_group and width % SCALED_BLOCK:
        raise ShapeError(f"quantization: expected a multiple of {SCALED_BLOCK} columns, got {width}")


def quantize(
    x: torch.Tensor,  # [T, E]
    quantization: InputQuantization,
) -> QuantizedActivations:
    """Return activations as vLLM's kernels quantize them, in the order of their operations.

    Their maxima and minima pass NaN over: as a group's largest magnitude it counts for nothing, and it becomes the
    number of the bound that it meets first.

    Args:
        x: innermost stride 1.
        quantization: on a GPU of ``FLOAT8_CAPABILITY``.
    """
    check_tensors(x=(x, "T E"))
    _check_groups(x.shape[1], quantization)
    if x.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import quantize as launch

        return launch(x, quantization)
    out = quantization.empty(x.shape[0], x.shape[1], x)
    groups = x.float().unflatten(1, (-1, x.shape[1] // out.scales.shape[1]))
    largest = torch.where(groups.isnan(), 0.0, groups.abs()).amax(2)
    upper = torch.tensor(LARGEST_FLOAT8, device=x.device)
    if quantization.by_group:
        scales = largest.clamp(min=LEAST_OF_GROUP) / upper
        if quantization.powers_of_two:
            scales = scales.clamp(min=LEAST_OF_GROUP).log2().ceil().exp2()
        bounded = (groups / scales[:, :, None]).fmax(-upper).fmin(upper)
    else:
        scales = (largest / upper).clamp(min=LEAST_ROW_SCALE)
        bounded = (groups / scales[:, :, None]).fmin(upper).fmax(-upper)
    out.scales.copy_(scales)
    out.values.copy_(bounded.view(x.shape))
    return out


def _parts_of(x: torch.Tensor) -> str:
    return "P T E" if x.ndim == 3 else "T E"


def _sum(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    if x.ndim == 2:
        return x + residual
    return (x.sum(0, dtype=torch.float32) + residual).to(residual.dtype)


def bias_gelu(
    x: torch.Tensor,  # [T, I]  written
    bias: torch.Tensor,  # [I]
) -> torch.Tensor:
    """Replace ``x`` by ``gelu(x + bias)``, GELU in its tanh form, and return it. Rounded once, from float32."""
    check_tensors(x=(x, "T I"), bias=(bias, "I"))
    check_same_dtype(x=x, bias=bias)
    if x.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import bias_gelu as launch

        return launch(x, bias)
    if x.dtype == torch.float32:
        return torch.ops.aten.gelu_(x.add_(bias), approximate="tanh")
    return x.copy_(F.gelu(x.float() + bias.float(), approximate="tanh"))


def bias_residual(
    x: torch.Tensor,  # [T, E]  written
    bias: torch.Tensor,  # [E]
    residual: torch.Tensor,  # [T, E]
) -> torch.Tensor:
    """Replace ``x`` by ``x + bias + residual`` and return it. Rounded once, from float32."""
    check_tensors(x=(x, "T E"), bias=(bias, "E"), residual=(residual, "T E"))
    check_same_dtype(x=x, bias=bias, residual=residual)
    if x.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import bias_residual as launch

        return launch(x, bias, residual)
    if x.dtype == torch.float32:
        return x.add_(bias).add_(residual)
    return x.copy_(x.float() + bias.float() + residual.float())


def silu_mul(
    gate_up: torch.Tensor,  # [T, 2 * I]
    *,
    alternating: bool = False,
) -> torch.Tensor:
    """Return ``silu(gate) * up`` of the two halves of each row, [T, I] and new. Rounded once, from float32.

    Args:
        alternating: columns of gate and up alternate, as ``pack_linear`` arranges them; otherwise gate comes first.
    """
    _check_halves(gate_up)
    if gate_up.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import silu_mul as launch

        return launch(gate_up, alternating=alternating)
    gate, up = gate_up.unflatten(1, (-1, 2)).unbind(2) if alternating else gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return F.silu(gate).mul_(up)
    return F.silu(gate.float()).mul_(up.float()).to(gate_up.dtype)


def silu_mul_quantized(
    gate_up: torch.Tensor,  # [T, 2 * I]
    quantization: InputQuantization,
    *,
    alternating: bool = False,
) -> QuantizedActivations:
    """Return what ``silu_mul`` does, rounded as there and then quantized.

    Args:
        quantization: on a GPU of ``FLOAT8_CAPABILITY``.
        alternating: as of ``silu_mul``.
    """
    _check_halves(gate_up)
    _check_groups(gate_up.shape[1] // 2, quantization)
    if gate_up.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import silu_mul_quantized as launch

        return launch(gate_up, quantization, alternating=alternating)
    return quantize(silu_mul(gate_up, alternating=alternating), quantization)


def _check_halves(gate_up: torch.Tensor) -> None:
    check_tensors(gate_up=(gate_up, "T 2I"))
    if gate_up.shape[1] % 2:
        raise ShapeError(f"gate_up: expected an even number of columns, got {gate_up.shape[1]}")


def rotate_query_key(
    query: torch.Tensor,  # [T, HQ, D]  written
    key: torch.Tensor,  # [T, HKV, D]  written
    positions: torch.Tensor,  # [T] int64
    rotation: HeadRotation,
) -> None:
    """Rotate the first ``DR`` numbers of each head, in place: number ``i`` with number ``i + DR / 2``.

    ``(a, b)`` becomes ``(a * cos - b * sin, b * cos + a * sin)``. With norms each head is first normalised as by
    ``rms_norm``. Rounded once, from float32. Decode attention can do the same itself (``paged_decode``).

    Args:
        query, key: two parts of one projection, or separate tensors; innermost stride 1.
        positions: inside the table, of padding rows too; a GPU does not check that. ``0 .. T - 1`` where the table has
            a row for each token (``by_token``).
        rotation: on GPUs of capability 9.0 and later, its table and ``positions`` are read while the kernel in front
            still runs, and must be complete: they are if whatever made them is followed, before this call, by a kernel
            that was launched without programmatic dependence, such as ``embed_tokens``.

    Raises:
        ShapeError: shapes, strides, dtypes or devices disagree, or only one of the norms is given.
    """
    check_tensors(query=(query, "T HQ D"), key=(key, "T HKV D"), positions=(positions, "T", torch.int64))
    check_same_dtype(query=query, key=key)
    check_rotation(query, rotation)
    for name, tensor in (("query", query), ("key", key)):
        if tensor.stride(2) != 1:
            raise ShapeError(f"{name}: expected an innermost stride of 1, got {tensor.stride(2)}")
    if positions.device != query.device:
        raise ShapeError(f"positions: expected device {query.device} as query, got {positions.device}")
    if query.is_cuda:
        from rose_backend.kernels.pointwise.elementwise import rotate_query_key as launch

        return launch(query, key, positions, rotation)
    cos, sin = rotation.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    _rotate(query, cos, sin, rotation.query_norm, rotation.eps)
    _rotate(key, cos, sin, rotation.key_norm, rotation.eps)
    return None


def check_rotation(query: torch.Tensor, rotation: HeadRotation) -> None:
    """Require a rotation that belongs to ``query`` [T, HQ, D].

    Raises:
        ShapeError: shapes, dtypes or devices disagree, or only one of the norms is given.
    """
    sizes = check_tensors(query=(query, "T HQ D"), cos_sin=(rotation.cos_sin, "P DR", torch.float32))
    if sizes["DR"] % 2 or sizes["DR"] > sizes["D"]:
        raise ShapeError(f"cos_sin: expected an even DR of at most D={sizes['D']}, got DR={sizes['DR']}")
    if rotation.cos_sin.device != query.device:
        raise ShapeError(f"cos_sin: expected device {query.device} as query, got {rotation.cos_sin.device}")
    if rotation.query_norm is not None and rotation.key_norm is not None:
        norms = {"query_norm": rotation.query_norm, "key_norm": rotation.key_norm}
        check_tensors(query=(query, "T HQ D"), **{name: (norm, "D") for name, norm in norms.items()})
        check_same_dtype(query=query, **norms)
    elif rotation.query_norm is not rotation.key_norm:
        raise ShapeError("query_norm and key_norm: expected both or neither, got one")


def _rotate(
    x: torch.Tensor,  # [T, H, D]  written
    cos: torch.Tensor,  # [T, 1, DR / 2]
    sin: torch.Tensor,  # [T, 1, DR / 2]
    norm: torch.Tensor | None,  # [D]
    eps: float,
) -> None:
    half, wide = cos.shape[-1], x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * norm.float()
    first, second, rest = wide.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1))
