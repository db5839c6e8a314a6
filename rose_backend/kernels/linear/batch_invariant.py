"""Products of any number of rows with a matrix, each row bit for bit what it is alone, and what is around them.

What a number of the result is rounded to depends on the order in which its products are added up, and on what adds
them. Here that order follows from the matrix alone:

- The matrix is the left factor. On Hopper ``wgmma`` takes 64 of its rows, and as many rows of ``x`` as there are, in
  multiples of 8; elsewhere it is the instruction that Triton takes for such tiles. So it is the same for one row and
  for thousands, and no tile is much larger than what is in it. Each number of its result is made of one row of each.
- ``DEPTH`` columns of ``x`` are one part; how many there are follows from the matrix's shape. Within a part, one
  instruction after the other adds 16 products to a number, in the order of the columns. The parts are added up in
  float32 in their order, from 0.

So a tile may have as many rows, columns and columns of ``x`` as is fastest, and a part may be another program's: the
last of them to arrive adds the parts up.

Norm, activation and residual add are parts of the product, as in ``small_batch_linear``. They work number by number,
but for sums of hidden states and of their squares. Those are added in float64, where sums of so few short numbers are
exact unless one is 2**29 times another: their order, which follows from how a tile lies in registers, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import NormInput, PackedLinear, PackedNorm
from rose_backend.kernels.gpu_properties import current_workspace, has_dependent_launch
from rose_backend.kernels.linear.small_batch_linear import (
    MAX_REGISTERS,
    add_parts,
    gelu_tanh,
    lines_ahead,
    load_norm_weight,
    norm_after,
    prefetch,
)
from rose_backend.kernels.tuning.choices import num_processors

_DEPTH_MULTIPLE = 128
"""Of a part. Tiles are so deep, or half."""
_MAX_PARTS = 8
_MIN_DEPTH = 256
"""Of a part, in columns of ``x``."""
_LEAST_ROWS, _MOST_ROWS = 16, 128
"""That a tile has."""
_COLUMNS = 64
"""Of a tile; twice as many where there are more tiles than processors anyway."""
_PARTED_PROGRAMS = 128
"""With a matrix that has fewer tiles, a product of few rows would leave processors idle."""
_GROUPED_TILES = 8
"""Of rows, that follow one another with the same columns: they find those in the L2 cache."""
_PART_COLUMNS = tl.constexpr(64)
"""That have a sum of their own among the moments of a row."""


class Tiles(NamedTuple):
    """How a product is divided, as the kernel is compiled for it."""

    E: int
    DEPTH: int
    """Columns of ``x`` in a part, a multiple of ``BLOCK_K``."""
    PARTS: int
    APART: bool
    """Each part has a program of its own, and the last of them to arrive adds them up."""
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUPED: int
    EARLY: bool
    """The next kernel may start at once: it asks for its matrix while this one runs."""
    PREFETCH: int
    """Lines of 128 bytes of each row of the matrix to ask for before ``x`` is there, a power of two, or 0."""


class Around(NamedTuple):
    """What is computed with a product, as the kernel is compiled for it."""

    X_PARTS: int = 0
    """Of the moments of ``x``; 0: there is no norm in front."""
    CENTRE: bool = False
    """That norm is LayerNorm."""
    GELU: bool = False
    GATED: bool = False
    """``silu(first) * second`` of each pair of columns."""
    OUT_PARTS: int = 0
    """Of the moments of the result; 0: there is no norm after it."""


class _Norm(NamedTuple):
    """Of the norm in front; None where there is none."""

    moments: torch.Tensor | None  # [T, 2, X_PARTS] float32
    scale: torch.Tensor | None  # [1] float32, of RMSNorm in float16
    column_sums: torch.Tensor | None  # [O] float32, of LayerNorm
    eps: float


@triton.jit
def _own_tile(num_rows, num_columns, TILES: tl.constexpr):
    """Return the program's tile of rows, its tile of columns, its part, and its tile's number."""
    part = tl.program_id(0) % TILES.PARTS if TILES.APART else 0
    tile = tl.program_id(0) // TILES.PARTS if TILES.APART else tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(num_rows, TILES.BLOCK_M), tl.cdiv(num_columns, TILES.BLOCK_N)
    group = tile // (TILES.GROUPED * column_tiles)
    in_group = tile % (TILES.GROUPED * column_tiles)
    first = group * TILES.GROUPED
    size = tl.minimum(row_tiles - first, TILES.GROUPED)
    return first + in_group % size, in_group // size, part, tile


@triton.jit
def _add_part(x_ptrs, weight_ptrs, part, weight_stride, TILES: tl.constexpr):
    """Return the products of one part, [BLOCK_N, BLOCK_M] float32."""
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    ks = tl.arange(0, TILES.BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    begin = part * TILES.DEPTH
    for start in range(begin, tl.minimum(begin + TILES.DEPTH, TILES.E), TILES.BLOCK_K):
        columns = start + ks
        weight_columns = columns.to(tl.int64)[None, :] * weight_stride
        if TILES.E % TILES.BLOCK_K != 0:
            is_column = (columns < TILES.E)[None, :]
            weight = tl.load(weight_ptrs + weight_columns, mask=is_column, other=0.0)
            x = tl.load(x_ptrs + columns[None, :], mask=is_column, other=0.0)
        else:
            weight = tl.load(weight_ptrs + weight_columns)
            x = tl.load(x_ptrs + columns[None, :])
        acc = tl.dot(weight, tl.trans(x), acc)
    return acc


@triton.jit
def _products(x_ptrs, weight_ptrs, weight_stride, part, tile, scratch, TILES: tl.constexpr):
    """Return whether the program has a tile's products, which are all parts added up, and those, [BLOCK_N, BLOCK_M]."""
    is_last = True
    if TILES.APART:
        acc = _add_part(x_ptrs, weight_ptrs, part, weight_stride, TILES)
        is_last, acc = add_parts(acc, scratch[0], scratch[1], tile, part, TILES.PARTS)
    elif TILES.PARTS == 1:
        acc = _add_part(x_ptrs, weight_ptrs, 0, weight_stride, TILES)
    else:
        BLOCK_M: tl.constexpr = TILES.BLOCK_M
        BLOCK_N: tl.constexpr = TILES.BLOCK_N
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for each in range(TILES.PARTS):
            acc += _add_part(x_ptrs, weight_ptrs, each, weight_stride, TILES)
    return is_last, acc


@triton.jit
def _sum_of_parts(moments_ptr, rows, which, PARTS: tl.constexpr):
    """Return the sums of rows (``which`` 0) or of their squares (1) from their parts, float32."""
    CHUNK: tl.constexpr = min(PARTS, 16)
    total = tl.zeros([rows.shape[0]], tl.float64)
    ptrs = moments_ptr + (rows.to(tl.int64) * 2 + which)[:, None] * PARTS + tl.arange(0, CHUNK)[None, :]
    for start in tl.range(0, PARTS, CHUNK, num_stages=1):
        total += tl.sum(tl.load(ptrs + start).to(tl.float64), 1)
    return total.to(tl.float32)


@triton.jit
def _leave_moments(result, moments_ptr, rows, in_rows, tile, width, PARTS: tl.constexpr):
    """Write this tile's parts of the moments of ``result``, which has 0 in columns that there are not."""
    BLOCK_M: tl.constexpr = result.shape[0]
    GROUPS: tl.constexpr = result.shape[1] // _PART_COLUMNS
    groups = tl.reshape(result.to(tl.float32), [BLOCK_M, GROUPS, _PART_COLUMNS])
    parts = tile * GROUPS + tl.arange(0, GROUPS)
    ptrs = moments_ptr + rows.to(tl.int64)[:, None] * (2 * PARTS) + parts[None, :]
    mask = in_rows[:, None] & (parts < PARTS)[None, :]
    # Squares of numbers in 16 bits are exact in float32.
    tl.store(ptrs, tl.sum(groups.to(tl.float64), 2).to(tl.float32), mask=mask)
    tl.store(ptrs + PARTS, tl.sum((groups * groups).to(tl.float64), 2).to(tl.float32), mask=mask)
    # Parts that no tile has, of which there are fewer than tiles.
    num_groups = tl.cdiv(width, result.shape[1]) * GROUPS
    empty_mask = in_rows[:, None] & (parts + num_groups < PARTS)[None, :]
    zeros = tl.zeros([BLOCK_M, GROUPS], tl.float32)
    tl.store(ptrs + num_groups, zeros, mask=empty_mask)
    tl.store(ptrs + num_groups + PARTS, zeros, mask=empty_mask)


@triton.jit
def _finish(acc, norm, bias_ptr, rows, columns, in_columns, E: tl.constexpr, AROUND: tl.constexpr):
    """Return products [BLOCK_M, BLOCK_N] after norm, bias and activation, in float32."""
    if AROUND.X_PARTS > 0:
        squares = _sum_of_parts(norm.moments, rows, 1, AROUND.X_PARTS) / E
        if AROUND.CENTRE:
            mean = _sum_of_parts(norm.moments, rows, 0, AROUND.X_PARTS) / E
            of_columns = tl.load(norm.column_sums + columns, mask=in_columns, other=0.0)
            acc -= mean[:, None] * of_columns[None, :]
            squares -= mean * mean
        inverse = tl.rsqrt(squares + norm.eps)
        if norm.scale is not None:
            inverse *= tl.load(norm.scale)
        acc *= inverse[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if AROUND.GELU:
        acc = gelu_tanh(acc)
    answer = acc
    if AROUND.GATED:
        gate, factor = tl.split(tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2]))
        answer = gate * tl.sigmoid(gate) * factor
    return answer


@triton.jit(do_not_specialize=["num_rows"])
def _batch_invariant_linear_kernel(
    x_ptr,  # [T, E], innermost stride 1
    weight_ptr,  # [O, E]
    bias_ptr,  # [O] or None
    norm,  # _Norm
    residual_ptr,  # [T, O] or None; with GATED O / 2 columns, as out
    out_ptr,  # [T, O]  written
    after,  # NormAfter, of OUT_PARTS parts
    partial_ptr,  # [tiles, PARTS, BLOCK_N, BLOCK_M] float32, where parts are apart
    arrivals_ptr,  # [tiles] int32, zeros, likewise
    num_rows,
    num_columns,
    x_stride,
    weight_stride_o,
    weight_stride_e,
    residual_stride,
    out_stride,
    TILES: tl.constexpr,
    AROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and TILES.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row_tile, column_tile, part, tile = _own_tile(num_rows, num_columns, TILES)
    rows = row_tile * TILES.BLOCK_M + tl.arange(0, TILES.BLOCK_M)
    columns = column_tile * TILES.BLOCK_N + tl.arange(0, TILES.BLOCK_N)
    in_rows, in_columns = rows < num_rows, columns < num_columns
    # What is not there is read as the last one, and not stored.
    known_rows = tl.minimum(rows, num_rows - 1)
    known_columns = tl.minimum(columns, num_columns - 1).to(tl.int64)
    x_ptrs = x_ptr + known_rows.to(tl.int64)[:, None] * x_stride
    weight_ptrs = weight_ptr + known_columns[:, None] * weight_stride_o
    if TILES.PREFETCH > 0:
        LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        lines = tl.minimum(part * TILES.DEPTH + tl.arange(0, TILES.PREFETCH) * LINE, TILES.E - 1)
        prefetch(weight_ptrs + lines[None, :])
    if PDL:
        # Everything below reads or overwrites what earlier kernels made or read.
        tl.extra.cuda.gdc_wait()
    is_last, acc = _products(
        x_ptrs, weight_ptrs, weight_stride_e, part, tile, (partial_ptr, arrivals_ptr), TILES
    )
    if PDL and not TILES.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if is_last:
        answer = _finish(tl.trans(acc), norm, bias_ptr, known_rows, columns, in_columns, TILES.E, AROUND)
        width = num_columns // 2 if AROUND.GATED else num_columns
        OUT_BLOCK: tl.constexpr = TILES.BLOCK_N // 2 if AROUND.GATED else TILES.BLOCK_N
        out_columns = column_tile * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
        in_out = out_columns < width
        inside = in_rows[:, None] & in_out[None, :]
        wide_rows = rows.to(tl.int64)[:, None]
        if residual_ptr is not None:
            residual_ptrs = residual_ptr + wide_rows * residual_stride + out_columns[None, :]
            answer += tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
        result = answer.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + wide_rows * out_stride + out_columns[None, :], result, mask=inside)
        if after.weight is not None:
            weights = load_norm_weight(after, out_columns, in_out)[None, :]
            scaled = (result.to(tl.float32) * weights).to(result.dtype)
            tl.store(after.scaled + wide_rows * width + out_columns[None, :], scaled, mask=inside)
        if AROUND.OUT_PARTS > 0:
            known = tl.where(in_out[None, :], result, 0.0)
            _leave_moments(known, after.moments, rows, in_rows, column_tile, width, AROUND.OUT_PARTS)


def _parts(num_inputs: int, num_outputs: int) -> int:
    """Return the parts that a product's depth is added up in, of a matrix [O, E] and of no number of rows."""
    parts, tiles = 1, triton.cdiv(num_outputs, _COLUMNS)
    while parts < _MAX_PARTS and tiles * parts < _PARTED_PROGRAMS and num_inputs >= 2 * parts * _MIN_DEPTH:
        parts *= 2
    return parts


class _Launch(NamedTuple):
    """How the launches over some numbers of rows are divided."""

    tiles: Tiles
    num_tiles: int

    @property
    def num_programs(self) -> int:
        """Of tiles and, where they are apart, their parts."""
        return self.num_tiles * (self.tiles.PARTS if self.tiles.APART else 1)


def _launch_of(num_rows: int, num_inputs: int, num_outputs: int, processors: int) -> _Launch:
    """Return how a product is divided: all but the parts decides speed only."""
    rows = min(max(triton.next_power_of_2(num_rows), _LEAST_ROWS), _MOST_ROWS)
    return _divide(rows, triton.cdiv(num_rows, rows), num_inputs, num_outputs, processors)


@lru_cache(maxsize=4096)
def _divide(rows: int, row_tiles: int, num_inputs: int, num_outputs: int, processors: int) -> _Launch:
    parts = _parts(num_inputs, num_outputs)
    depth = triton.cdiv(triton.cdiv(num_inputs, parts), _DEPTH_MULTIPLE) * _DEPTH_MULTIPLE
    columns = _COLUMNS
    if rows == _MOST_ROWS and row_tiles * triton.cdiv(num_outputs, 2 * columns) >= 2 * processors:
        columns *= 2
    num_tiles = row_tiles * triton.cdiv(num_outputs, columns)
    is_apart = parts > 1 and num_tiles < processors
    is_small = rows <= _COLUMNS // 2
    lines = 0
    if rows <= _COLUMNS:
        programs = num_tiles * (parts if is_apart else 1)
        lines = lines_ahead(2 * (depth if is_apart else num_inputs), columns, programs)
    block_k = _DEPTH_MULTIPLE if is_small else _DEPTH_MULTIPLE // 2
    return _Launch(
        Tiles(
            num_inputs,
            depth,
            parts,
            is_apart,
            rows,
            columns,
            block_k,
            _GROUPED_TILES,
            rows <= _COLUMNS,
            lines,
        ),
        num_tiles,
    )


def differing_row_counts(shapes: Sequence[tuple[int, int]], most: int, processors: int) -> list[int]:
    """Return numbers of rows up to ``most``: products with these matrices [E, O] compile nothing else for others."""
    counts: dict[Tiles, int] = {}
    few = [count + 1 for count in (0, 16, 32, 64, 128) if count < most]
    for shape in shapes:
        for count in (*few, *range(2 * _MOST_ROWS + 1, most + 1, _MOST_ROWS)):
            counts.setdefault(_launch_of(count, *shape, processors).tiles, count)
    return sorted(set(counts.values()))


def batch_invariant_linear(
    x: torch.Tensor | NormInput,  # [T, E]
    layer: PackedLinear,  # its weight may have any strides
    out: torch.Tensor,  # [T, O]  written
    *,
    gelu: bool = False,
    residual: torch.Tensor | None = None,  # [T, O]
    next_norm: PackedNorm | None = None,
) -> NormInput | None:
    """Launch the kernel; arguments as checked by ``rose_backend.kernels.linear.ops``.

    Returns:
        What ``out`` leaves to the norm after it, if there is one.
    """
    hidden, moments, norm = x if isinstance(x, NormInput) else (x, None, None)
    weight = layer.weight
    assert isinstance(weight, torch.Tensor), "quantized layers have no such product"
    num_rows, num_outputs = hidden.shape[0], weight.shape[0]
    out_parts = triton.next_power_of_2(triton.cdiv(out.shape[1], _PART_COLUMNS.value))
    after = norm_after(next_norm, out, out_parts)
    if not num_rows:
        return after.result(next_norm, out)
    launch = _launch_of(num_rows, hidden.shape[1], num_outputs, num_processors(hidden.device))
    tiles = launch.tiles
    partial, arrivals = _scratch(hidden.device) if tiles.APART else (None, None)
    use_pdl = has_dependent_launch(hidden.device)
    if not use_pdl or weight.stride(1) != 1:
        tiles = tiles._replace(PREFETCH=0)
    _batch_invariant_linear_kernel[(launch.num_programs,)](
        hidden,
        weight,
        layer.bias,
        _Norm(
            moments,
            None if norm is None else norm.scale,
            layer.column_sums,
            0.0 if norm is None else norm.eps,
        ),
        residual,
        out,
        after,
        partial,
        arrivals,
        num_rows,
        num_outputs,
        hidden.stride(0),
        *weight.stride(),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        TILES=tiles,
        AROUND=Around(
            0 if moments is None else moments.shape[2],
            layer.column_sums is not None,
            gelu,
            layer.is_gated,
            0 if next_norm is None else out_parts,
        ),
        PDL=use_pdl,
        launch_pdl=use_pdl,
        # Products that are fused with sums round differently from one compiled variant to the next.
        enable_fp_fusion=False,
        num_warps=8 if tiles.BLOCK_M == _MOST_ROWS else 4,
        num_stages=3 if tiles.BLOCK_N > _COLUMNS else 4,
        # All that there are: the assembler spills to make room for another program.
        maxnreg=MAX_REGISTERS,
    )
    return after.result(next_norm, out)


def _scratch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for the parts of as many tiles as may have theirs apart, and counters that every launch leaves at 0.

    Raises:
        RuntimeError: asked for first while a graph is being captured.
    """
    most = num_processors(device)

    def make() -> tuple[torch.Tensor, ...]:
        size = most * _MAX_PARTS * _MOST_ROWS * _COLUMNS
        parts = torch.empty(size, dtype=torch.float32, device=device)
        return parts, torch.zeros(most, dtype=torch.int32, device=device)

    partial, arrivals = current_workspace().tensors("batch_invariant_linear", device, most, make)
    return partial, arrivals
