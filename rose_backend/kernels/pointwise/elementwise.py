"""Embeddings, norms, activations, residual adds and rotary positions: one launch each, float32 inside, rounded once.

With a residual add before a norm, the sum is normalized as it is stored, so that both forms of a layer give the same
numbers. What is added may come in parts, of a product that was split along its inner dimension: this saves the launch
that would sum them. RMSNorm and SiLU times up can also quantize what they would store, for a product of activations in
8 bits. The activations of GPT-2's MLP work in place. Heads are rotated, and normed before that, in a launch whose
programs have one token and some heads of it, the first programs of a token its keys as well; or inside another kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

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
)
from rose_backend.kernels.gpu_properties import has_dependent_launch
from rose_backend.kernels.linear.small_batch_linear import load_norm_weight, norm_after

_PAIRS = 512
"""Of numbers that a program rotates together, about."""


@triton.jit
def _rotate_heads(
    x_ptr,
    norm_ptr,
    heads,
    num_heads,
    head_stride,
    cos,
    sin,
    eps,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Replace some heads of the token at ``x_ptr``."""
    dims, rest_dims = tl.arange(0, HALF_TILE), 2 * HALF + tl.arange(0, REST_TILE)
    is_head = heads < num_heads
    rows = x_ptr + heads.to(tl.int64)[:, None] * head_stride
    mask = is_head[:, None] & (dims < HALF)[None, :]
    rest_mask = is_head[:, None] & (rest_dims < HEAD_SIZE)[None, :]
    HAS_REST: tl.constexpr = NORM and HEAD_SIZE > 2 * HALF
    first = tl.load(rows + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(rows + HALF + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        if HAS_REST:
            rest = tl.load(rows + rest_dims[None, :], mask=rest_mask, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1)
            rest_weight = tl.load(norm_ptr + rest_dims, mask=rest_dims < HEAD_SIZE, other=0.0).to(tl.float32)
        scale = tl.rsqrt(squares / HEAD_SIZE + eps)[:, None]
        first *= scale * tl.load(norm_ptr + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
        second *= scale * tl.load(norm_ptr + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    # Where a tile has fewer numbers than there are threads, several threads read what one of them overwrites.
    tl.debug_barrier()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tl.store(rows + dims[None, :], (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(rows + HALF + dims[None, :], (second * cos + first * sin).to(dtype), mask=mask)
    if HAS_REST:
        tl.store(rows + rest_dims[None, :], (rest * scale * rest_weight[None, :]).to(dtype), mask=rest_mask)


@triton.jit
def _rotate_kernel(
    query_ptr,  # [T, HQ, D]  written
    key_ptr,  # [T, HKV, D]  written
    positions_ptr,  # [T]
    cos_sin_ptr,  # [P, DR]
    query_norm_ptr,  # [D], with NORM
    key_norm_ptr,  # [D], with NORM
    num_heads,
    num_kv_heads,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    position_stride,
    table_stride_p,
    table_stride_d,
    eps,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # DR / 2
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token and ``HEADS`` of its heads."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF_TILE)
    position = tl.load(positions_ptr + token * position_stride).to(tl.int64)
    angles = cos_sin_ptr + position * table_stride_p + dims.to(tl.int64) * table_stride_d
    cos = tl.load(angles, mask=dims < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF * table_stride_d, mask=dims < HALF, other=0.0)[None, :]
    if PDL:
        # Until here nothing was read that the kernel in front makes, and nothing was written.
        tl.extra.cuda.gdc_wait()
    _rotate_heads(
        query_ptr + token * query_stride_t, query_norm_ptr, heads, num_heads, query_stride_h, cos, sin, eps,
        HEAD_SIZE, HALF, HALF_TILE, REST_TILE, NORM,
    )  # fmt: skip
    if tl.program_id(1) * HEADS < num_kv_heads:
        _rotate_heads(
            key_ptr + token * key_stride_t, key_norm_ptr, heads, num_kv_heads, key_stride_h, cos, sin, eps,
            HEAD_SIZE, HALF, HALF_TILE, REST_TILE, NORM,
        )  # fmt: skip


class RotationSizes(NamedTuple):
    """What of a rotation is constant in a kernel that rotates heads among other things."""

    HALF: int  # DR / 2
    NORM: bool
    BY_TOKEN: bool


class RotationTensors(NamedTuple):
    """Tensors and numbers of a rotation inside another kernel."""

    cos_sin: torch.Tensor  # [P, DR], with BY_TOKEN [T, DR]
    query_norm: torch.Tensor  # [D], with NORM
    key_norm: torch.Tensor  # [D], with NORM
    eps: float


def inside_another_kernel(rotation: HeadRotation) -> tuple[RotationTensors, RotationSizes]:
    """Return what a kernel that calls ``rotated`` takes."""
    table, query_norm, key_norm = rotation.cos_sin.contiguous(), rotation.query_norm, rotation.key_norm
    tensors = RotationTensors(
        table,
        table if query_norm is None else query_norm.contiguous(),
        table if key_norm is None else key_norm.contiguous(),
        rotation.eps,
    )
    return tensors, RotationSizes(table.shape[1] // 2, query_norm is not None, rotation.by_token)


@triton.jit
def load_angles(rotation, position, token, HEAD_TILE: tl.constexpr, SIZES: tl.constexpr):
    """Return a token's angles: cosines, signed sines, and the number that each number of a head turns with."""
    HALF: tl.constexpr = SIZES.HALF
    dims = tl.arange(0, HEAD_TILE)
    is_rotated = dims < 2 * HALF
    row = token if SIZES.BY_TOKEN else position
    angles = rotation.cos_sin + row.to(tl.int64) * (2 * HALF) + tl.where(dims < HALF, dims, dims - HALF)
    cos = tl.load(angles, mask=is_rotated, other=1.0)
    sin = tl.load(angles + HALF, mask=is_rotated, other=0.0)
    partners = tl.where(dims < HALF, dims + HALF, tl.where(is_rotated, dims - HALF, dims))
    return cos, tl.where(dims < HALF, -sin, sin), partners


@triton.jit
def load_head_norm(norm_ptr, angles, HEAD_SIZE: tl.constexpr, NORM: tl.constexpr):
    """Return the norm's weights of a head's numbers and of those that they turn with; without NORM nothing."""
    weights = ()
    if NORM:
        dims = tl.arange(0, angles[2].shape[0])
        weights += (tl.load(norm_ptr + dims, mask=dims < HEAD_SIZE, other=0.0).to(tl.float32),)  # type: ignore[assignment]
        weights += (tl.load(norm_ptr + angles[2], mask=dims < HEAD_SIZE, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return weights


@triton.jit
def rotated(x, rows, mask, angles, weights, eps, HEAD_SIZE: tl.constexpr, NORM: tl.constexpr):
    """Return ``x`` [heads, HEAD_TILE] normed and rotated, in its own type; ``rows`` [heads] is where it was read."""
    first = x.to(tl.float32)
    # From memory once more: cheaper than an exchange between threads.
    second = tl.load(rows[:, None] + angles[2][None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first, axis=1) / HEAD_SIZE + eps)[:, None]
        first *= scale * weights[0][None, :]
        second *= scale * weights[1][None, :]
    return (first * angles[0][None, :] + second * angles[1][None, :]).to(x.dtype)


def rotate_query_key(
    query: torch.Tensor,  # [T, HQ, D]  written
    key: torch.Tensor,  # [T, HKV, D]  written
    positions: torch.Tensor,  # [T] int64
    rotation: HeadRotation,
) -> None:
    """``rose_backend.kernels.rotate_query_key`` on a GPU."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    cos_sin, query_norm, key_norm = rotation.cos_sin, rotation.query_norm, rotation.key_norm
    most_heads = max(num_heads, num_kv_heads)
    if num_tokens == 0 or most_heads == 0:
        return
    half = cos_sin.shape[1] // 2
    half_tile = triton.next_power_of_2(max(half, 1))
    heads = min(triton.next_power_of_2(most_heads), max(_PAIRS // half_tile, 1))
    _rotate_kernel[(num_tokens, triton.cdiv(most_heads, heads))](
        query,
        key,
        positions,
        cos_sin,
        query if query_norm is None else query_norm.contiguous(),
        key if key_norm is None else key_norm.contiguous(),
        num_heads,
        num_kv_heads,
        *query.stride()[:2],
        *key.stride()[:2],
        positions.stride(0),
        *cos_sin.stride(),
        rotation.eps,
        HEAD_SIZE=head_size,
        HALF=half,
        HALF_TILE=half_tile,
        REST_TILE=triton.next_power_of_2(max(head_size - 2 * half, 1)),
        HEADS=heads,
        NORM=query_norm is not None,
        PDL=has_dependent_launch(query.device),
        launch_pdl=has_dependent_launch(query.device),
        num_warps=min(max(heads * half_tile // 256, 1), 4),
    )


@triton.jit
def _embed_tokens_kernel(
    input_ids_ptr,  # [T] contiguous
    positions_ptr,  # [T] contiguous
    token_embedding_ptr,  # [V, E]
    position_embedding_ptr,  # [P, E], with ADD
    out_ptr,  # [T, E] contiguous, written
    after,  # NormAfter, of one part
    token_stride,
    position_stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Args: ADD: the position embedding."""
    if PDL:
        # Launched in the ordinary way: all previous kernels have ended. The next one may fetch its weights.
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    mask = columns < WIDTH
    token_id = tl.maximum(tl.load(input_ids_ptr + token), 0).to(tl.int64)
    if ADD:
        position = tl.load(positions_ptr + token)
    of_token = token_embedding_ptr + token_id * token_stride + columns
    embedded = tl.load(of_token, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        positional = position_embedding_ptr + position * position_stride + columns
        embedded += tl.load(positional, mask=mask, other=0.0).to(tl.float32)
    rounded = embedded.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * WIDTH + columns, rounded, mask=mask)
    wide = rounded.to(tl.float32)
    if after.moments is not None:
        tl.store(after.moments + token * 2, tl.sum(wide, 0))
        tl.store(after.moments + token * 2 + 1, tl.sum(wide * wide, 0))
    if after.weight is not None:
        scaled = (wide * load_norm_weight(after, columns, mask)).to(rounded.dtype)
        tl.store(after.scaled + token * WIDTH + columns, scaled, mask=mask)


def embed_tokens(
    input_ids: torch.Tensor,  # [T] int64 or int32
    positions: torch.Tensor,  # [T] int64
    token_embedding: torch.Tensor,  # [V, E], innermost stride 1
    position_embedding: torch.Tensor | None,  # [P, E], innermost stride 1
    out: torch.Tensor,  # [T, E] contiguous, written
    next_norm: PackedNorm | None = None,
) -> NormInput | None:
    """``rose_backend.kernels.embed_tokens`` on a GPU; returns what ``out`` leaves to the norm, if there is one."""
    num_tokens, width = len(input_ids), token_embedding.shape[1]
    after = norm_after(next_norm, out, num_parts=1)
    if num_tokens:
        tile = triton.next_power_of_2(width)
        _embed_tokens_kernel[(num_tokens,)](
            input_ids.contiguous(),
            positions.contiguous(),
            token_embedding,
            token_embedding if position_embedding is None else position_embedding,
            out,
            after,
            token_embedding.stride(0),
            0 if position_embedding is None else position_embedding.stride(0),
            WIDTH=width,
            TILE=tile,
            ADD=position_embedding is not None,
            PDL=has_dependent_launch(out.device),
            num_warps=min(max(tile // 256, 1), 8),
        )
    return after.result(next_norm, out)


class Groups(NamedTuple):
    """Columns of a row that share a scale, as a kernel that quantizes is compiled for them."""

    SIZE: int
    BY_ROW: bool
    """The whole tile, which is the row."""
    POWERS_OF_TWO: bool
    """See ``InputQuantization``."""


def _groups(quantization: InputQuantization, tile: int) -> Groups:
    size = SCALED_BLOCK if quantization.by_group else tile
    return Groups(size, not quantization.by_group, quantization.powers_of_two)


_LARGEST = tl.constexpr(LARGEST_FLOAT8)
_LEAST_ROW_SCALE = tl.constexpr(LEAST_ROW_SCALE)
_LEAST_OF_GROUP = tl.constexpr(LEAST_OF_GROUP)


@triton.jit
def _scales_of(largest, GROUPS: tl.constexpr):
    """Return the scales of groups from their largest magnitudes, of which one may be NaN if all its group is."""
    if GROUPS.BY_ROW:
        scales = tl.maximum(tl.div_rn(largest, _LARGEST), _LEAST_ROW_SCALE)
    else:
        scales = tl.div_rn(tl.maximum(largest, _LEAST_OF_GROUP), _LARGEST)
        if GROUPS.POWERS_OF_TWO:
            # One more in the exponent where there is a mantissa.
            bits = tl.maximum(scales, _LEAST_OF_GROUP).to(tl.int32, bitcast=True)
            scales = ((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    return scales


@triton.jit
def _store_quantized(
    rounded,  # [TILE]: columns of a row from ``start`` on, as they would be stored in 16 bits; 0 from ``width`` on
    token,
    start,
    width,
    values_ptr,
    scales_ptr,
    scale_stride,
    GROUPS: tl.constexpr,
):
    """Store whole groups as ``quantize`` has them, bit for bit."""
    TILE: tl.constexpr = rounded.shape[0]
    NUM_GROUPS: tl.constexpr = TILE // GROUPS.SIZE
    grouped = tl.reshape(rounded.to(tl.float32), [NUM_GROUPS, GROUPS.SIZE])
    # A maximum passes NaN over, here and below, as a GPU's does.
    scales = _scales_of(tl.max(tl.abs(grouped), 1), GROUPS)
    if GROUPS.POWERS_OF_TWO:
        divided = grouped * tl.div_rn(1.0, scales)[:, None]
    else:
        # Rounded as a division is; a plain ``/`` may be off by two units in the last place.
        divided = tl.div_rn(grouped, scales[:, None])
    # The order decides what becomes of NaN.
    if GROUPS.BY_ROW:
        divided = tl.maximum(tl.minimum(divided, _LARGEST), -_LARGEST)
    else:
        divided = tl.minimum(tl.maximum(divided, -_LARGEST), _LARGEST)
    # No more of them side by side in a thread than of 16-bit numbers: sums in front keep their order.
    columns = start + tl.max_contiguous(tl.arange(0, TILE), 8)
    values = tl.reshape(divided, [TILE]).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + token * width + columns, values, mask=columns < width)
    groups = start // GROUPS.SIZE + tl.arange(0, NUM_GROUPS)
    # Of one group, all rows lie side by side.
    scale_ptrs = scales_ptr + groups.to(tl.int64) * scale_stride + token
    tl.store(scale_ptrs, scales, mask=groups * GROUPS.SIZE < width)


_TILE = 1024


@triton.jit
def _bias_kernel(
    x_ptr,  # [T, E]  written
    bias_ptr,  # [E]
    residual_ptr,  # [T, E]
    width,
    x_stride_t,
    x_stride_e,
    residual_stride_t,
    residual_stride_e,
    GELU: tl.constexpr,
    TILE: tl.constexpr,
):
    """Args: GELU: apply it to x + bias; else add the residual."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < width
    x_ptrs = x_ptr + token * x_stride_t + columns * x_stride_e
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # Its tanh form is x * (1 + tanh(z)) / 2 with z = sqrt(2 / pi) * (x + 0.044715 * x**3), or x * sigmoid(2 * z).
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        residual = residual_ptr + token * residual_stride_t + columns * residual_stride_e
        x += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptrs, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["scale_stride"])
def _silu_mul_kernel(
    gate_up_ptr,  # [T, 2 * I]
    out_ptr,  # [T, I] contiguous, written
    scales_ptr,  # [T, groups], with GROUPS, written
    width,
    stride_t,
    stride_e,
    scale_stride,  # of groups; that of rows is 1
    ALTERNATING: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Args: ALTERNATING: gate and up are in turns, not side by side. GROUPS: quantize."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < width
    row = gate_up_ptr + token * stride_t
    if ALTERNATING:
        both = tl.program_id(1) * (2 * TILE) + tl.arange(0, 2 * TILE)
        pairs = tl.load(row + both.to(tl.int64) * stride_e, mask=both < 2 * width, other=0.0)
        gate, up = tl.split(tl.reshape(pairs, [TILE, 2]))
    else:
        gate = tl.load(row + columns.to(tl.int64) * stride_e, mask=mask, other=0.0)
        up = tl.load(row + (columns + width).to(tl.int64) * stride_e, mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    product = (gate * tl.sigmoid(gate) * up.to(tl.float32)).to(gate_up_ptr.dtype.element_ty)
    if GROUPS is None:
        tl.store(out_ptr + token * width + columns, product, mask=mask)
    else:
        start = tl.program_id(1) * TILE
        _store_quantized(product, token, start, width, out_ptr, scales_ptr, scale_stride, GROUPS)


def bias_gelu(
    x: torch.Tensor,  # [T, I]  written
    bias: torch.Tensor,  # [I]
) -> torch.Tensor:
    """``rose_backend.kernels.bias_gelu`` on a GPU."""
    return _launch_bias(x, bias, None)


def bias_residual(
    x: torch.Tensor,  # [T, E]  written
    bias: torch.Tensor,  # [E]
    residual: torch.Tensor,  # [T, E]
) -> torch.Tensor:
    """``rose_backend.kernels.bias_residual`` on a GPU."""
    return _launch_bias(x, bias, residual)


def _launch_bias(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    if x.numel():
        num_tokens, width = x.shape
        _bias_kernel[(num_tokens, triton.cdiv(width, _TILE))](
            x,
            bias.contiguous(),
            x if residual is None else residual,
            width,
            *x.stride(),
            *(x if residual is None else residual).stride(),
            GELU=residual is None,
            TILE=_TILE,
            num_warps=4,
        )
    return x


def silu_mul(
    gate_up: torch.Tensor,  # [T, 2 * I]
    *,
    alternating: bool = False,
) -> torch.Tensor:
    """``rose_backend.kernels.silu_mul`` on a GPU."""
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    _launch_silu_mul(gate_up, out, None, alternating=alternating)
    return out


def silu_mul_quantized(
    gate_up: torch.Tensor,  # [T, 2 * I]
    quantization: InputQuantization,
    *,
    alternating: bool = False,
) -> QuantizedActivations:
    """``rose_backend.kernels.silu_mul_quantized`` on a GPU."""
    out = quantization.empty(gate_up.shape[0], gate_up.shape[1] // 2, gate_up)
    _launch_silu_mul(gate_up, out.values, out, alternating=alternating)
    return out


def _tile_of(quantized: QuantizedActivations) -> int:
    """Return the columns of a program: a row that has one scale, or several groups."""
    by_group = quantized.quantization.by_group
    return _TILE if by_group else triton.next_power_of_2(quantized.values.shape[1])


def _launch_silu_mul(
    gate_up: torch.Tensor, out: torch.Tensor, quantized: QuantizedActivations | None, *, alternating: bool
) -> None:
    if out.numel():
        num_tokens, width = out.shape
        tile = _TILE if quantized is None else _tile_of(quantized)
        use_pdl = has_dependent_launch(out.device)
        _silu_mul_kernel[(num_tokens, triton.cdiv(width, tile))](
            gate_up,
            out,
            None if quantized is None else quantized.scales,
            width,
            *gate_up.stride(),
            0 if quantized is None else quantized.scales.stride(1),
            ALTERNATING=alternating,
            TILE=tile,
            GROUPS=None if quantized is None else _groups(quantized.quantization, tile),
            PDL=use_pdl,
            launch_pdl=use_pdl,
            num_warps=min(max(tile // 512, 4), 32),
        )


@triton.jit(do_not_specialize=["scale_stride"])
def _quantize_kernel(
    x_ptr,  # [T, E]
    values_ptr,  # [T, E] contiguous, written
    scales_ptr,  # [T, groups], written
    width,
    stride_t,
    scale_stride,  # of groups; that of rows is 1
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (row, part of its columns)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * TILE
    columns = start + tl.arange(0, TILE)
    x = tl.load(x_ptr + token * stride_t + columns, mask=columns < width, other=0.0)
    _store_quantized(x, token, start, width, values_ptr, scales_ptr, scale_stride, GROUPS)


def quantize(
    x: torch.Tensor,  # [T, E]
    quantization: InputQuantization,
) -> QuantizedActivations:
    """``rose_backend.kernels.quantize`` on a GPU."""
    out = quantization.empty(x.shape[0], x.shape[1], x)
    if x.numel():
        tile, use_pdl = _tile_of(out), has_dependent_launch(x.device)
        _quantize_kernel[(x.shape[0], triton.cdiv(x.shape[1], tile))](
            x,
            out.values,
            out.scales,
            x.shape[1],
            x.stride(0),
            out.scales.stride(1),
            TILE=tile,
            GROUPS=_groups(quantization, tile),
            PDL=use_pdl,
            launch_pdl=use_pdl,
            num_warps=min(max(tile // 512, 4), 32),
        )
    return out


@triton.jit(do_not_specialize=["scale_stride"])
def _norm_kernel(
    x_ptr,  # [PARTS, T, E]
    residual_ptr,  # [T, E]
    weight_ptr,  # [E]
    bias_ptr,  # [E]
    normed_ptr,  # [T, E] contiguous, written
    new_residual_ptr,  # [T, E] contiguous, written
    scales_ptr,  # [T, groups], with GROUPS, written
    eps,
    x_stride_p,
    x_stride_t,
    x_stride_e,
    residual_stride_t,
    residual_stride_e,
    scale_stride,  # of groups; that of rows is 1
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Args: ADD: x + residual first. CENTRE: LayerNorm with its bias, else RMSNorm. GROUPS: quantize."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    mask = columns < WIDTH
    # What is constant is loaded before the wait.
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_ptr += token * x_stride_t + columns * x_stride_e
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        x_ptr += x_stride_p
        x += tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual = residual_ptr + token * residual_stride_t + columns * residual_stride_e
        x += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        total = x.to(new_residual_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + token * WIDTH + columns, total, mask=mask)
        x = total.to(tl.float32)
    if CENTRE:
        x = tl.where(mask, x - tl.sum(x, axis=0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    normed = x * scale * weight
    if CENTRE:
        normed += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    rounded = normed.to(new_residual_ptr.dtype.element_ty)
    if GROUPS is None:
        tl.store(normed_ptr + token * WIDTH + columns, rounded, mask=mask)
    else:
        _store_quantized(rounded, token, 0, WIDTH, normed_ptr, scales_ptr, scale_stride, GROUPS)


def layer_norm(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    bias: torch.Tensor,  # [E]
    eps: float,
) -> torch.Tensor:
    """``rose_backend.kernels.layer_norm`` on a GPU."""
    return _launch(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: torch.Tensor,  # [T, E] or [P, T, E]
    residual: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    bias: torch.Tensor,  # [E]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rose_backend.kernels.add_layer_norm`` on a GPU."""
    return _launch(x, residual, weight, bias, eps)


def rms_norm(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
) -> torch.Tensor:
    """``rose_backend.kernels.rms_norm`` on a GPU."""
    return _launch(x, None, weight, None, eps)[0]


def add_rms_norm(
    x: torch.Tensor,  # [T, E] or [P, T, E]
    residual: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rose_backend.kernels.add_rms_norm`` on a GPU."""
    return _launch(x, residual, weight, None, eps)


def rms_norm_quantized(
    x: torch.Tensor,  # [T, E] or, with a residual, [P, T, E]
    residual: torch.Tensor | None,  # [T, E]
    weight: torch.Tensor,  # [E]
    eps: float,
    quantization: InputQuantization,
) -> tuple[QuantizedActivations, torch.Tensor]:
    """``rose_backend.kernels.rms_norm_quantized`` on a GPU."""
    quantized = quantization.empty(x.shape[-2], x.shape[-1], x)
    return quantized, _launch(x, residual, weight, None, eps, quantized)[1]


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    quantized: QuantizedActivations | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised tensor, or the values of ``quantized``, and the sum: without a residual ``x`` itself."""
    parts = x if x.ndim == 3 else x[None]
    num_parts, num_tokens, width = parts.shape
    if quantized is None:
        normed = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    else:
        normed = quantized.values
    new_residual = x if residual is None else torch.empty_like(normed, dtype=x.dtype)
    if normed.numel():
        tile = triton.next_power_of_2(width)
        _norm_kernel[(num_tokens,)](
            parts,
            x if residual is None else residual,
            weight.contiguous(),
            weight if bias is None else bias.contiguous(),
            normed,
            new_residual,
            None if quantized is None else quantized.scales,
            eps,
            # Of a single part it says nothing, and Triton compiles apart for what divides it.
            0 if num_parts == 1 else parts.stride(0),
            *parts.stride()[1:],
            *(x if residual is None else residual).stride(),
            0 if quantized is None else quantized.scales.stride(1),
            WIDTH=width,
            TILE=tile,
            PARTS=num_parts,
            ADD=residual is not None,
            CENTRE=bias is not None,
            GROUPS=None if quantized is None else _groups(quantized.quantization, tile),
            PDL=has_dependent_launch(x.device),
            launch_pdl=has_dependent_launch(x.device),
            num_warps=min(max(tile // 256, 1), 16),
        )
    return normed, new_residual
