"""Triton products of a step's rows with the LoRA adapters that their requests have, added to another product.

Two launches: down to the adapters' rank, and up again. A program owns a tile of rows, in the order of their adapters,
and goes through the adapters that these rows have, one or two of them mostly. Tiles without one stay as they are. Where
few rows leave most of the GPU idle, the depth of the first product is divided over programs; the second one adds
the parts in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import AdapterRows, Adapters, NormInput
from rose_backend.kernels.linear.small_batch_linear import load_moments

_FEW_ROWS = 256
_DEPTH = 512
"""Of the first product, for each program where there are few rows."""
_BLOCK_K, _BLOCK_N = 128, 64


@triton.jit
def _load_rows(rows_ptr, places_ptr, numbers, num_tokens, num_places):
    """Return the rows of a tile, the adapter of each, -1 where there is none, and the first and the last adapter."""
    in_step = numbers < num_tokens
    rows = tl.load(rows_ptr + numbers, mask=in_step, other=0)
    places = tl.load(places_ptr + numbers, mask=in_step, other=-1)
    places = tl.where((places >= 0) & (places < num_places), places, -1).to(tl.int32)
    first = tl.min(tl.where(places < 0, num_places, places), 0)
    return rows, places, first, tl.max(places, 0)


@triton.jit
def _part_of(values, part, PARTS: tl.constexpr):
    SECOND: tl.constexpr = 1 if PARTS > 1 else 0
    THIRD: tl.constexpr = 2 if PARTS > 2 else 0
    value = values[0]
    if part == 1:
        value = values[SECOND]
    if part == 2:
        value = values[THIRD]
    return value


@triton.jit(do_not_specialize=["num_tokens", "num_places"])
def _adapters_down_kernel(
    x_ptr,  # [T, E], rows apart by x_stride
    downs,  # of each part: [U, Z, E] contiguous
    moments_ptr,  # [T, 2, X_PARTS] float32, of what is left to RMSNorm, else None
    x_scale_ptr,  # [1] float32, of RMSNorm in float16, else None
    rows_ptr,  # [T], as of AdapterRows
    places_ptr,  # [T]
    narrow_ptr,  # [parts, splits, T, BLOCK_R] float32, in the order of rows; written where a tile has an adapter
    num_tokens,
    num_places,
    x_stride,
    eps,
    X_PARTS: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program per tile of rows, part, and ``DEPTH`` columns of ``x``."""
    numbers = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, places, first, last = _load_rows(rows_ptr, places_ptr, numbers, num_tokens, num_places)
    if last >= 0:
        part, split = tl.program_id(1), tl.program_id(2)
        down_ptr = _part_of(downs, part, PARTS)
        ranks = tl.arange(0, BLOCK_R)
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for place in range(first, last + 1):
            own = places == place
            if tl.max(own.to(tl.int32), 0) > 0:
                weights = down_ptr + tl.cast(place, tl.int64) * (RANK * K)
                for start in range(split * DEPTH, split * DEPTH + DEPTH, BLOCK_K):
                    ks = start + tl.arange(0, BLOCK_K)
                    x = tl.load(
                        x_ptr + rows[:, None] * x_stride + ks[None, :],
                        mask=own[:, None] & (ks < K)[None, :],
                        other=0.0,
                    )
                    down = tl.load(
                        weights + ranks[:, None] * K + ks[None, :],
                        mask=(ranks < RANK)[:, None] & (ks < K)[None, :],
                        other=0.0,
                    )
                    acc = tl.dot(x, tl.trans(down), acc, input_precision="ieee" if EXACT else "tf32")
        if moments_ptr is not None:
            _, squares = load_moments(moments_ptr, rows, num_tokens, X_PARTS)
            inverse = tl.rsqrt(tl.sum(squares, 1) / K + eps)
            if x_scale_ptr is not None:
                inverse *= tl.load(x_scale_ptr)
            acc *= inverse[:, None]
        slab = (part * tl.num_programs(2) + split).to(tl.int64) * num_tokens
        narrow = narrow_ptr + (slab + numbers)[:, None] * BLOCK_R + ranks[None, :]
        tl.store(narrow, acc, mask=(numbers < num_tokens)[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_places"])
def _adapters_up_kernel(
    narrow_ptr,  # [parts, splits, T, BLOCK_R] float32
    ups,  # of each part: [U, O, Z] contiguous
    widths,  # of each part: O
    rows_ptr,  # [T], as of AdapterRows
    places_ptr,  # [T]
    out_ptr,  # [T, sum of O], written
    num_tokens,
    num_places,
    out_stride,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ALTERNATING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program per tile of rows, part, and ``BLOCK_N`` of its columns.

    Args:
        ALTERNATING: a column of the first part, one of the second, and so on; else one part is behind the other.
    """
    numbers = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(1)
    width = _part_of(widths, part, PARTS)
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns = columns < width
    rows, places, first, last = _load_rows(rows_ptr, places_ptr, numbers, num_tokens, num_places)
    if (last >= 0) & (tl.program_id(2) * BLOCK_N < width):
        ranks = tl.arange(0, BLOCK_R)
        narrow = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in tl.static_range(SPLITS):
            slab = (part * SPLITS + split).to(tl.int64) * num_tokens
            offsets = (slab + numbers)[:, None] * BLOCK_R + ranks[None, :]
            narrow += tl.load(narrow_ptr + offsets, mask=(places >= 0)[:, None], other=0.0)
        up_ptr = _part_of(ups, part, PARTS)
        rounded = narrow.to(up_ptr.dtype.element_ty)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for place in range(first, last + 1):
            own = places == place
            if tl.max(own.to(tl.int32), 0) > 0:
                weight_rows = tl.cast(place, tl.int64) * width + columns
                up = tl.load(
                    up_ptr + weight_rows[:, None] * RANK + ranks[None, :],
                    mask=in_columns[:, None] & (ranks < RANK)[None, :],
                    other=0.0,
                )
                x = tl.where(own[:, None], rounded, 0.0)
                acc = tl.dot(x, tl.trans(up), acc, input_precision="ieee" if EXACT else "tf32")
        if ALTERNATING:
            out_columns = columns * PARTS + part
        else:
            out_columns = columns
            if PARTS > 1:
                out_columns += tl.where(part > 0, widths[0], 0)
            if PARTS > 2:
                out_columns += tl.where(part > 1, widths[1], 0)
        out = out_ptr + rows[:, None] * out_stride + out_columns[None, :]
        mask = (places >= 0)[:, None] & in_columns[None, :]
        total = tl.load(out, mask=mask, other=0.0).to(tl.float32) + acc
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_adapters(
    x: torch.Tensor | NormInput,  # [T, E]
    adapters: Adapters,
    rows: AdapterRows,
    out: torch.Tensor,  # [T, O]  written
    *,
    alternating: bool = False,
) -> None:
    """``rose_backend.kernels.add_adapters`` on a GPU."""
    x, moments, norm = x if isinstance(x, NormInput) else (x, None, None)
    num_tokens, depth = x.shape
    num_places, rank, _ = adapters.downs[0].shape
    widths = tuple(up.shape[1] for up in adapters.ups)
    has_few_rows = num_tokens <= _FEW_ROWS
    block_m = 16 if has_few_rows else 32
    depth_of_program = _DEPTH if has_few_rows else triton.cdiv(depth, _BLOCK_K) * _BLOCK_K
    num_parts, num_splits = len(widths), triton.cdiv(depth, depth_of_program)
    block_r = max(triton.next_power_of_2(rank), 16)
    narrow = x.new_empty((num_parts, num_splits, num_tokens, block_r), dtype=torch.float32)
    sizes = {"RANK": rank, "PARTS": num_parts, "BLOCK_M": block_m, "BLOCK_R": block_r}
    exact = {"EXACT": x.dtype is torch.float32, "num_warps": 4}
    tiles = triton.cdiv(num_tokens, block_m)
    _adapters_down_kernel[(tiles, num_parts, num_splits)](
        x,
        adapters.downs,
        moments,
        None if norm is None else norm.scale,
        rows.rows,
        rows.places,
        narrow,
        num_tokens,
        num_places,
        x.stride(0),
        0.0 if norm is None else norm.eps,
        X_PARTS=1 if moments is None else moments.shape[2],
        K=depth,
        DEPTH=depth_of_program,
        BLOCK_K=_BLOCK_K,
        **sizes,
        **exact,
    )
    _adapters_up_kernel[(tiles, num_parts, triton.cdiv(max(widths), _BLOCK_N))](
        narrow,
        adapters.ups,
        widths,
        rows.rows,
        rows.places,
        out,
        num_tokens,
        num_places,
        out.stride(0),
        SPLITS=num_splits,
        ALTERNATING=alternating,
        BLOCK_N=_BLOCK_N,
        **sizes,
        **exact,
    )
