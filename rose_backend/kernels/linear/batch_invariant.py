"""Products of any number of rows with a matrix, each row bit for bit what it is alone.

What a number of the result is rounded to depends on the order in which its products are added up, and on what adds
them. Here that order follows from the matrix alone:

- ``DEPTH`` columns of ``x`` at a time are one part; how many there are follows from the matrix's shape. Within a part,
  one instruction of the tensor cores after the other adds 16 products to a number, in the order of the columns. The
  parts are added up in float32 in their order, from 0.
- Tiles have 64 or 128 rows of ``x``, filled up with zeros where there are fewer. So it is always the same instruction
  that multiplies: on Hopper ``wgmma``, which takes 64 rows and any number of columns that a multiple of 8 is, elsewhere
  the one that Triton takes for such tiles. Each number of its result is made of one row and one column only.

So a tile may be as wide as is fastest for a number of rows, and a part may be another program's: the last of them to
arrive adds the parts up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu_properties import current_workspace, has_dependent_launch
from rose_backend.kernels.linear.small_batch_linear import add_parts
from rose_backend.kernels.tuning.choices import num_processors

_BLOCK_K = 64
_MAX_PARTS = 4
_MIN_DEPTH = 512
"""Of a part, in columns of ``x``."""
_FEW_ROWS = 64
"""That a tile has at least."""
_WIDTHS = (128, 64, 32)
"""Columns of a tile, the fastest for many rows first."""
_PARTED_PROGRAMS = 128
"""With a matrix that has fewer tiles of the smallest width, a product of few rows would leave processors idle."""
_GROUPED_TILES = 8
"""Of rows, that follow one another with the same columns: they find those in the L2 cache."""


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
def _add_part(x_ptrs, weight_ptrs, in_rows, in_columns, part, weight_stride, TILES: tl.constexpr):
    """Return the products of one part, [BLOCK_M, BLOCK_N] float32."""
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    ks = tl.arange(0, TILES.BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    begin = part * TILES.DEPTH
    for start in range(begin, tl.minimum(begin + TILES.DEPTH, TILES.E), TILES.BLOCK_K):
        columns = start + ks
        x_mask, weight_mask = in_rows[:, None], in_columns[None, :]
        if TILES.E % TILES.BLOCK_K != 0:
            x_mask &= (columns < TILES.E)[None, :]
            weight_mask &= (columns < TILES.E)[:, None]
        x = tl.load(x_ptrs + columns[None, :], mask=x_mask, other=0.0)
        weight = tl.load(
            weight_ptrs + columns.to(tl.int64)[:, None] * weight_stride, mask=weight_mask, other=0.0
        )
        acc = tl.dot(x, weight, acc)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _batch_invariant_linear_kernel(
    x_ptr,  # [T, E], innermost stride 1
    weight_ptr,  # [E, O]
    bias_ptr,  # [O] or None
    out_ptr,  # [T, O] contiguous, written
    partial_ptr,  # [tiles, PARTS, BLOCK_M, BLOCK_N] float32, where parts are apart
    arrivals_ptr,  # [tiles] int32, zeros, likewise
    num_rows,
    num_columns,
    x_stride,
    weight_stride_e,
    weight_stride_o,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    row_tile, column_tile, part, tile = _own_tile(num_rows, num_columns, TILES)
    rows = row_tile * TILES.BLOCK_M + tl.arange(0, TILES.BLOCK_M)
    columns = column_tile * TILES.BLOCK_N + tl.arange(0, TILES.BLOCK_N)
    in_rows, in_columns = rows < num_rows, columns < num_columns
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    weight_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * weight_stride_o
    if PDL:
        tl.extra.cuda.gdc_wait()
    is_last = True
    if TILES.APART:
        acc = _add_part(x_ptrs, weight_ptrs, in_rows, in_columns, part, weight_stride_e, TILES)
        is_last, acc = add_parts(acc, partial_ptr, arrivals_ptr, tile, part, TILES.PARTS)
    elif TILES.PARTS == 1:
        acc = _add_part(x_ptrs, weight_ptrs, in_rows, in_columns, 0, weight_stride_e, TILES)
    else:
        BLOCK_M: tl.constexpr = TILES.BLOCK_M
        BLOCK_N: tl.constexpr = TILES.BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for each in range(TILES.PARTS):
            acc += _add_part(x_ptrs, weight_ptrs, in_rows, in_columns, each, weight_stride_e, TILES)
    if is_last:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        places = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(
            out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :]
        )


def _parts(num_inputs: int, num_outputs: int) -> int:
    """Return the parts that a product's depth is added up in, of a matrix [E, O] and of no number of rows."""
    parts, tiles = 1, triton.cdiv(num_outputs, min(_WIDTHS))
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
    rows = _FEW_ROWS if num_rows <= _FEW_ROWS else 2 * _FEW_ROWS
    return _divide(rows, triton.cdiv(num_rows, rows), num_inputs, num_outputs, processors)


@lru_cache(maxsize=4096)
def _divide(rows: int, row_tiles: int, num_inputs: int, num_outputs: int, processors: int) -> _Launch:
    parts = _parts(num_inputs, num_outputs)
    depth = triton.cdiv(triton.cdiv(num_inputs, parts), _BLOCK_K) * _BLOCK_K
    for width in _WIDTHS:
        num_tiles = row_tiles * triton.cdiv(num_outputs, width)
        is_apart = parts > 1 and num_tiles < processors
        tiles = Tiles(num_inputs, depth, parts, is_apart, rows, width, _BLOCK_K, _GROUPED_TILES)
        launch = _Launch(tiles, num_tiles)
        if launch.num_programs >= processors:
            break
    return launch


def differing_row_counts(shapes: Sequence[tuple[int, int]], most: int, processors: int) -> list[int]:
    """Return numbers of rows up to ``most``: products with these matrices [E, O] compile nothing else for others."""
    counts: dict[Tiles, int] = {}
    for shape in shapes:
        for count in (1, *range(_FEW_ROWS + 1, most + 1, 2 * _FEW_ROWS)):
            counts.setdefault(_launch_of(count, *shape, processors).tiles, count)
    return sorted(set(counts.values()))


def batch_invariant_linear(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E, O]
    bias: torch.Tensor | None,  # [O]
    out: torch.Tensor,  # [T, O] contiguous, written
) -> None:
    """Launch the kernel; arguments as checked by ``rose_backend.kernels.linear.ops``."""
    num_rows, num_outputs = x.shape[0], weight.shape[1]
    if not num_rows:
        return
    launch = _launch_of(num_rows, weight.shape[0], num_outputs, num_processors(x.device))
    tiles = launch.tiles
    partial, arrivals = _scratch(x.device) if tiles.APART else (None, None)
    use_pdl = has_dependent_launch(x.device)
    _batch_invariant_linear_kernel[(launch.num_programs,)](
        x,
        weight,
        bias,
        out,
        partial,
        arrivals,
        num_rows,
        num_outputs,
        x.stride(0),
        *weight.stride(),
        TILES=tiles,
        PDL=use_pdl,
        launch_pdl=use_pdl,
        num_warps=8 if tiles.BLOCK_M * tiles.BLOCK_N > 64 * 128 else 4,
        num_stages=4 if tiles.BLOCK_M == _FEW_ROWS else 3,
        # All that there are: the assembler spills to make room for another program.
        maxnreg=255,
    )


def _scratch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for the parts of as many tiles as may have theirs apart, and counters that every launch leaves at 0.

    Raises:
        RuntimeError: asked for first while a graph is being captured.
    """
    most = num_processors(device)

    def make() -> tuple[torch.Tensor, ...]:
        size = most * _MAX_PARTS * 2 * _FEW_ROWS * max(_WIDTHS)
        parts = torch.empty(size, dtype=torch.float32, device=device)
        return parts, torch.zeros(most, dtype=torch.int32, device=device)

    partial, arrivals = current_workspace().tensors("batch_invariant_linear", device, most, make)
    return partial, arrivals
