"""Rotary positions of queries and keys, and the norms of their heads in front: in one launch, or inside another kernel.

In the launch a program has one token and some heads of it, the first programs of a token its keys as well. Norm and
rotation are float32, so that the result is rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import HeadRotation
from rose_backend.kernels.gpu_properties import has_dependent_launch

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


class RotationTensors(NamedTuple):
    """Tensors and numbers of a rotation inside another kernel."""

    cos_sin: torch.Tensor  # [P, DR]
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
    return tensors, RotationSizes(table.shape[1] // 2, query_norm is not None)


@triton.jit
def load_angles(rotation, position, HEAD_TILE: tl.constexpr, SIZES: tl.constexpr):
    """Return a position's angles: cosines, signed sines, and the number that each number of a head turns with."""
    HALF: tl.constexpr = SIZES.HALF
    dims = tl.arange(0, HEAD_TILE)
    is_rotated = dims < 2 * HALF
    angles = rotation.cos_sin + position.to(tl.int64) * (2 * HALF) + tl.where(dims < HALF, dims, dims - HALF)
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
