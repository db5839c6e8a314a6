"""Triton products of a few rows with a weight matrix: norm before, activation or residual after, in one launch.

At few rows such a product is as long as its weights take to arrive, so everything else is arranged around them:

- A program owns ``BLOCK_M`` rows and ``BLOCK_N`` columns of the result. It asks for its weights before it waits for the
  kernel that makes ``x`` (programmatic dependent launch), so they travel while that kernel still runs; not where ``x``
  is split, see below.
- A norm costs no separate pass. The kernel that writes hidden states leaves the sums of each row and of its squares to
  the product after it, of a product one part per tile of columns. For RMSNorm it also writes hidden states times the
  norm's weight ``g``, so that matrices stay as they were loaded::

      norm(h) @ W.T + b = (h * g) @ W.T / rms(h) + b

  In float16 ``g`` is divided by a power of two meanwhile (``PackedNorm``). LayerNorm has a bias, too. With the norm's
  weight folded into ``W`` and its bias into ``b``::

      norm(h) @ W.T + b = (h @ W.T - mean(h) * sum(W, 1)) / std(h) + b
- Columns of a gated MLP's gate and of its other factor alternate, so that a program has both of a pair.
- Weights in 8 bits become the type of ``x`` in registers, which is exact. Scales of rows multiply the products; with
  scales of blocks a tile lies in one block, or, of a gated layer, in one of the gate and one of its factor, and its
  products are multiplied before they are added up. Those conversions take as long as the weights to arrive. So where
  tensor cores multiply float8 numbers, weights stay as they are and ``x`` becomes a sum of two such numbers, which have
  all bits of bfloat16 (``split_rows``): twice the products, which cost nothing at few rows, and no conversion.
- Of weights in 4 bits a tile of words becomes four tiles of numbers in the type of ``x``, which is exact
  (``from_int4``). They are multiplied one after the other, and sums over columns that share a scale by that.
- Where programs would have long dot products to do, their depth is split over warps, or over programs: the last of them
  to arrive adds the parts in their order, so that the result does not depend on which was last.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import (
    SCALED_BLOCK,
    Int4Weight,
    NormInput,
    PackedLinear,
    PackedNorm,
    empty_rows,
)
from rose_backend.kernels.gpu_properties import (
    can_use_tma,
    current_workspace,
    gpu_properties,
    has_dependent_launch,
    has_float8_tensor_cores,
)
from rose_backend.kernels.linear.float8 import from_float8, split_rows
from rose_backend.kernels.linear.int4 import from_int4, of_codes
from rose_backend.kernels.tuning.choices import (
    INT4_PREFETCH,
    INT4_ZEROS,
    LINEAR_PREFETCH,
    MAX_SPLIT_FLOATS,
    LinearConfig,
    choose_float8_config,
    choose_int4_config,
    choose_linear_config,
)

_SCALED_BLOCK = tl.constexpr(SCALED_BLOCK)


class WeightFormat(NamedTuple):
    """How a weight is stored, as the kernel is compiled for it."""

    SCALE_ROWS: int = 0
    """Rows of a scale: 0 without scales, 1, or ``SCALED_BLOCK`` with blocks of as many columns."""
    HALVES: bool = False
    """Of a gated layer the gate's rows come first; otherwise rows of gate and factor alternate."""
    BY_ASSEMBLER: bool = False
    """See ``from_float8``."""
    SPLIT: bool = False
    """``x`` is a sum of two float8 numbers (``split_rows``), and they are multiplied as they are."""
    STEP: int = 0
    """Columns between those of a word of an ``Int4Weight``; 0: of another weight."""
    GROUP: int = 0
    """Columns of such a weight that share a scale, ``STEP`` or twice as many; 0: see ``SCALE_ROWS``."""


class Tiles(NamedTuple):
    """The part of a product that a program computes, and how, as the kernel is compiled for it."""

    K: int
    """Columns of ``x``."""
    WIDTH: int
    """Of a row of the weight as it is stored."""
    DEPTH: int
    """Of them those that a program takes: ``K / SPLIT_K``, rounded up to ``BLOCK_K``."""
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    WARP_SPLIT: int
    USE_DOT: bool
    WEIGHTS_LEFT: bool
    TMA: bool
    EXACT: bool
    """Inputs are float32."""


@triton.jit
def load_tile(
    tensor_ptr, rows, in_rows, stride, start, K: tl.constexpr, BLOCK_K: tl.constexpr, WARP_SPLIT: tl.constexpr
):
    """Load ``BLOCK_K`` columns of some rows: [rows, BLOCK_K], or for each warp its own, [WARP_SPLIT, rows, ...].

    There are ``K`` columns; None: all of the tile's are there.
    """
    if WARP_SPLIT > 1:
        SHARE: tl.constexpr = BLOCK_K // WARP_SPLIT
        ks = start + tl.arange(0, WARP_SPLIT)[:, None, None] * SHARE + tl.arange(0, SHARE)[None, None, :]
        offsets = rows.to(tl.int64)[None, :, None] * stride + ks
        mask = in_rows[None, :, None] if K is None else in_rows[None, :, None] & (ks < K)
    else:
        ks = start + tl.arange(0, BLOCK_K)[None, :]
        offsets = rows.to(tl.int64)[:, None] * stride + ks
        mask = in_rows[:, None] if K is None else in_rows[:, None] & (ks < K)
    return tl.load(tensor_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def add_tile(x, weight, acc, USE_DOT: tl.constexpr, WEIGHTS_LEFT: tl.constexpr, EXACT: tl.constexpr):
    """Return ``acc`` and a tile's products."""
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    if not USE_DOT:
        acc += x[:, None, :].to(tl.float32) * weight[None, :, :].to(tl.float32)
    elif WEIGHTS_LEFT:
        acc = tl.dot(weight, _transpose(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, _transpose(weight), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _transpose(tile):
    return tl.permute(tile, (0, 2, 1)) if len(tile.shape) == 3 else tl.trans(tile)


@triton.jit
def sum_warps(acc):
    """Return the sum over the first axis, of which each warp has one: a tree of exchanges between pairs."""
    WARPS: tl.constexpr = acc.shape[0]
    if WARPS == 16:
        acc = _fold(acc)
    if WARPS >= 8:
        acc = _fold(acc)
    if WARPS >= 4:
        acc = _fold(acc)
    acc = _fold(acc)
    return tl.reshape(acc, [acc.shape[1], acc.shape[2]])


@triton.jit
def _fold(acc):
    halves = tl.reshape(acc, [2, acc.shape[0] // 2, acc.shape[1], acc.shape[2]])
    first, second = tl.split(tl.permute(halves, (1, 2, 3, 0)))
    return first + second


@triton.jit
def load_moments(moments_ptr, rows, num_rows, PARTS: tl.constexpr):
    """Return the sums of rows of ``x`` and of their squares, in parts: two of [rows, PARTS] or fewer."""
    known_rows = tl.minimum(rows, num_rows - 1)
    # What registers cannot hold is added up on the way.
    CHUNK: tl.constexpr = PARTS if rows.shape[0] * PARTS <= 32768 else 8192 // rows.shape[0]
    moment_ptrs = moments_ptr + known_rows[:, None] * (2 * PARTS) + tl.arange(0, CHUNK)[None, :]
    sums, sums_of_squares = tl.load(moment_ptrs), tl.load(moment_ptrs + PARTS)
    if CHUNK < PARTS:
        for start in tl.range(CHUNK, PARTS, CHUNK, num_stages=1):
            sums += tl.load(moment_ptrs + start)
            sums_of_squares += tl.load(moment_ptrs + start + PARTS)
    return sums, sums_of_squares


@triton.jit
def store_moments(result, moments_ptr, rows, in_rows, tile, width, PARTS: tl.constexpr):
    """Write this tile's part of the moments of ``result``, one of ``width``, and zeros to parts that no tile has."""
    num_tiles = tl.cdiv(width, result.shape[1])
    wide = result.to(tl.float32)  # 0 in columns that there are not
    moment_ptrs = moments_ptr + rows * (2 * PARTS) + tile
    tl.store(moment_ptrs, tl.sum(wide, 1), mask=in_rows)
    tl.store(moment_ptrs + PARTS, tl.sum(wide * wide, 1), mask=in_rows)
    # PARTS is less than twice the number of tiles.
    if tile + num_tiles < PARTS:
        zeros = tl.zeros_like(rows).to(tl.float32)
        tl.store(moment_ptrs + num_tiles, zeros, mask=in_rows)
        tl.store(moment_ptrs + num_tiles + PARTS, zeros, mask=in_rows)


class NormAfter(NamedTuple):
    """What a kernel that writes hidden states takes for the norm after them; all None: there is none."""

    moments: torch.Tensor | None  # [T, 2, PARTS] float32, written
    weight: torch.Tensor | None  # [E], of RMSNorm
    scale: torch.Tensor | None  # [1] float32, of a weight in float16
    scaled: torch.Tensor | None  # [T, E] contiguous, with a weight, written

    def result(self, norm: PackedNorm | None, out: torch.Tensor) -> NormInput | None:
        """Return what was left to ``norm`` once the kernel has run and written ``out``."""
        if norm is None or self.moments is None:
            return None
        return NormInput(out if self.scaled is None else self.scaled, self.moments, norm)


def norm_after(
    norm: PackedNorm | None,
    out: torch.Tensor,  # [T, E]
    num_parts: int,
) -> NormAfter:
    """Return what a kernel takes that writes ``out`` and sums up each of its rows in ``num_parts`` parts."""
    if norm is None:
        return NormAfter(None, None, None, None)
    moments = out.new_empty((out.shape[0], 2, num_parts), dtype=torch.float32)
    scaled = None if norm.weight is None else empty_rows(out, *out.shape)
    return NormAfter(moments, norm.weight, norm.scale, scaled)


@triton.jit
def load_norm_weight(after, columns, in_columns):
    """Return the weights that hidden states are multiplied by for the norm after them, float32."""
    weight = tl.load(after.weight + columns, mask=in_columns, other=0.0).to(tl.float32)
    if after.scale is not None:
        weight = tl.div_rn(weight, tl.load(after.scale))
    return weight


@triton.jit
def _leave_to_norm(
    result, norm_weight, after, rows, in_rows, columns, inside, tile, width, OUT_PARTS: tl.constexpr
):
    """Write what the norm after a product reads, if there is one; see ``NormAfter``."""
    if OUT_PARTS > 0:
        store_moments(result, after.moments, rows, in_rows, tile, width, OUT_PARTS)
    if after.weight is not None:
        scaled = (result.to(tl.float32) * norm_weight[None, :]).to(result.dtype)
        scaled_ptrs = after.scaled + rows.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(scaled_ptrs, scaled, mask=inside)


@triton.jit
def add_parts(acc, partial_ptr, arrivals_ptr, program, part, SPLIT_K: tl.constexpr):
    """Return whether this program came last of those that share a tile and, if so, the sum of all parts."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    slots = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    parts = partial_ptr + program.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N) + slots
    tl.store(parts + part * (BLOCK_M * BLOCK_N), acc)
    # All of the program's stores come before its arrival counts.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals_ptr + program, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1
    if is_last:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for index in tl.static_range(SPLIT_K):
            acc += tl.load(parts + index * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
        tl.store(arrivals_ptr + program, 0)
    return is_last, acc


_LINE_BYTES = 128


@triton.jit
def _ask_for_lines(tensor_ptr, rows, num_rows, begin, FORMAT: tl.constexpr, TILES: tl.constexpr):
    """Ask for elements of some columns of a tensor [N, O] of scales or zeros."""
    NUM: tl.constexpr = (TILES.DEPTH + FORMAT.GROUP - 1) // FORMAT.GROUP
    LINES: tl.constexpr = triton.next_power_of_2(NUM)
    groups = tl.minimum(begin // FORMAT.GROUP + tl.arange(0, LINES), (TILES.K - 1) // FORMAT.GROUP)
    known = tl.minimum(rows, num_rows - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [tensor_ptr + groups[:, None] * num_rows + known[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _stored_rows(columns, num_columns, FORMAT: tl.constexpr):
    """Return the rows of the weight that columns of the product have."""
    rows = columns
    if FORMAT.HALVES:
        rows = columns % 2 * (num_columns // 2) + columns // 2
    return rows


@triton.jit
def _ask_ahead(
    weight_ptr,
    rows,
    num_rows,
    begin,
    scales,
    tile,
    FORMAT: tl.constexpr,  # WeightFormat
    TILES: tl.constexpr,  # Tiles
    PREFETCH: tl.constexpr,
):
    """Ask for the first ``PREFETCH`` lines of 128 bytes of some rows of the weight.

    Of an int4 weight with groups, and with enough rows of x, also for their scales and zeros: a line for each half of
    the columns.
    """
    LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    first = begin // 4 if FORMAT.STEP > 0 else begin
    lines = tl.minimum(first + tl.arange(0, PREFETCH) * LINE, TILES.WIDTH - 1)
    known = tl.minimum(rows, num_rows - 1).to(tl.int64)
    # One request per line; the asm's result only gives the operation a value to hang on.
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [weight_ptr + known[:, None] * TILES.WIDTH + lines[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    if FORMAT.STEP > 0 and FORMAT.GROUP > 0 and TILES.BLOCK_M >= _MIN_ASKING_ROWS:
        firsts = _stored_rows(tile * TILES.BLOCK_N + tl.arange(0, 2), num_rows, FORMAT)
        _ask_for_lines(scales[0], firsts, num_rows, begin, FORMAT, TILES)
        if scales[3] is not None:
            _ask_for_lines(scales[3], firsts, num_rows, begin, FORMAT, TILES)


@triton.jit
def _gelu_tanh(x):
    # 0.5 x (1 + tanh(u)) is x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * u)


@triton.jit
def block_scale(scales, row, column, K: tl.constexpr):
    """Return the scale of the block that holds a row and a column; past the last column, that of the last block."""
    across = tl.minimum(column, K - 1) // _SCALED_BLOCK
    return tl.load(scales[0] + row // _SCALED_BLOCK * scales[1] + across * scales[2])


@triton.jit
def _tile_scales(
    scales,
    tile,
    num_columns,
    column,
    FORMAT: tl.constexpr,  # WeightFormat
    TILES: tl.constexpr,  # Tiles
):
    """Return the two scales of a tile's weights from a column on: of the gate and its factor, else the same one."""
    if FORMAT.HALVES:
        row = tile * (TILES.BLOCK_N // 2)
        first = block_scale(scales, row, column, TILES.K)
        second = block_scale(scales, num_columns // 2 + row, column, TILES.K)
    else:
        first = block_scale(scales, tile * TILES.BLOCK_N, column, TILES.K)
        second = first
    return first, second


@triton.jit
def _add_stored_tile(
    x,
    weight,
    acc,
    scales,
    rows,  # of the weight
    in_rows,
    start,
    FORMAT: tl.constexpr,  # WeightFormat
    TILES: tl.constexpr,  # Tiles
):
    """Return ``acc`` and a tile's products, of a weight as it is stored; scales of rows are left to ``_finish``.

    ``scales`` are those of blocks: with ``USE_DOT`` as ``_tile_scales`` returns them, else where they are.
    """
    if FORMAT.SCALE_ROWS > 0:
        weight = from_float8(weight, x.dtype, FORMAT.BY_ASSEMBLER)
    if FORMAT.SCALE_ROWS > 1 and TILES.USE_DOT:
        scale = scales[0]
        if FORMAT.HALVES:
            scale = tl.where(tl.arange(0, rows.shape[0]) % 2 == 0, scales[0], scales[1])
            scale = tl.expand_dims(scale, -1 if TILES.WEIGHTS_LEFT else -2)
        acc += scale * add_tile(x, weight, tl.zeros_like(acc), TILES.USE_DOT, TILES.WEIGHTS_LEFT, TILES.EXACT)
    elif FORMAT.SCALE_ROWS > 1:
        blocks = (start + tl.arange(0, TILES.BLOCK_K)) // _SCALED_BLOCK
        mask = in_rows[:, None] & (blocks <= (TILES.K - 1) // _SCALED_BLOCK)[None, :]
        places = (rows // _SCALED_BLOCK * scales[1])[:, None] + (blocks * scales[2])[None, :]
        scale = tl.load(scales[0] + places, mask=mask, other=0.0)
        acc = add_tile(x, weight.to(tl.float32) * scale, acc, TILES.USE_DOT, TILES.WEIGHTS_LEFT, TILES.EXACT)
    else:
        acc = add_tile(x, weight, acc, TILES.USE_DOT, TILES.WEIGHTS_LEFT, TILES.EXACT)
    return acc


@triton.jit
def _multiply(
    x,  # where one tile covers the depth, as are weights
    weight,
    descriptors,  # of x and weight, with TMA
    pointers,  # of x and weight
    scales,  # of blocks: pointer, and strides of rows and columns of blocks
    tile_scales,  # of the first blocks, see ``_tile_scales``; with blocks and USE_DOT
    x_rows,  # rows, which of them there are, their tile
    weight_rows,  # of the result's columns, likewise; how many of these there are
    x_stride,
    begin,
    FORMAT: tl.constexpr,  # WeightFormat
    TILES: tl.constexpr,  # Tiles
):
    """Return the products of a tile over columns ``begin .. begin + DEPTH - 1`` of ``x``, [BLOCK_M, BLOCK_N]."""
    rows, in_rows, row_tile = x_rows
    columns, in_columns, tile, num_columns = weight_rows
    SCALARS: tl.constexpr = FORMAT.SCALE_ROWS > 1 and TILES.USE_DOT
    ROWS: tl.constexpr = TILES.BLOCK_N if TILES.WEIGHTS_LEFT else TILES.BLOCK_M
    COLUMNS: tl.constexpr = TILES.BLOCK_M if TILES.WEIGHTS_LEFT else TILES.BLOCK_N
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    WARP_SPLIT: tl.constexpr = TILES.WARP_SPLIT
    if WARP_SPLIT > 1:
        acc = tl.zeros([WARP_SPLIT, ROWS, COLUMNS], tl.float32)
    elif TILES.USE_DOT:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    else:
        acc = tl.zeros([ROWS, COLUMNS, BLOCK_K], tl.float32)
    if TILES.DEPTH == BLOCK_K:
        acc = _add_stored_tile(
            x, weight, acc, tile_scales if SCALARS else scales, columns, in_columns, begin, FORMAT, TILES
        )
    else:
        end = begin + TILES.DEPTH
        if FORMAT.SCALE_ROWS > 0 and TILES.DEPTH != TILES.K:
            end = tl.minimum(end, TILES.K)
        KNOWN: tl.constexpr = None if FORMAT.SCALE_ROWS > 0 and TILES.K % BLOCK_K == 0 else TILES.K
        for start in range(begin, end, BLOCK_K):
            if TILES.TMA:
                x_part = descriptors[0].load([row_tile * TILES.BLOCK_M, start])
                weight_part = descriptors[1].load([tile * TILES.BLOCK_N, start])
            else:
                x_part = load_tile(pointers[0], rows, in_rows, x_stride, start, KNOWN, BLOCK_K, WARP_SPLIT)
                weight_part = load_tile(
                    pointers[1], columns, in_columns, TILES.K, start, KNOWN, BLOCK_K, WARP_SPLIT
                )
            acc = _add_stored_tile(
                x_part, weight_part, acc, tile_scales if SCALARS else scales, columns, in_columns, start,
                FORMAT, TILES,
            )  # fmt: skip
            if SCALARS:
                # A turn before they are used.
                tile_scales = _tile_scales(scales, tile, num_columns, start + BLOCK_K, FORMAT, TILES)
    if WARP_SPLIT > 1:
        acc = sum_warps(acc)
    elif not TILES.USE_DOT:
        acc = tl.sum(acc, 2)
    if TILES.WEIGHTS_LEFT:
        acc = tl.trans(acc)
    return acc


@triton.jit
def _scales_of_turn(
    x_scales,  # pointer to [E / 128, T], rows of a tile, which of them there are; how many there are
    scales,  # of the weight's blocks: pointer, and strides of rows and columns of blocks
    across,  # tile of the result's columns, and how many columns there are
    start,
    FORMAT: tl.constexpr,  # WeightFormat
    TILES: tl.constexpr,  # Tiles
):
    """Return what products of columns of ``x`` from ``start`` on are scaled by: [BLOCK_M], and see ``_tile_scales``."""
    scale_ptr, rows, in_rows, num_rows = x_scales
    # A part of the depth beyond the last column has no turns.
    group = tl.minimum(start, TILES.K - 1) // _SCALED_BLOCK
    scale = tl.load(scale_ptr + group * num_rows + rows, mask=in_rows, other=0.0)
    first, second = 1.0, 1.0
    if FORMAT.SCALE_ROWS > 1:
        first, second = _tile_scales(scales, across[0], across[1], start, FORMAT, TILES)
    return scale, first, second


@triton.jit
def _multiply_split(
    x,  # pointers to [T, 2, E] float8 and to its scales, [E / 128, T]
    weight_ptr,
    scales,  # of blocks: pointer, and strides of rows and columns of blocks
    x_rows,  # tile of rows, and how many rows there are
    weight_rows,  # of the result's columns, which of these there are, their tile; how many there are
    begin,
    FORMAT: tl.constexpr,  # WeightFormat
    TILES: tl.constexpr,  # Tiles
):
    """Return the products of a tile over columns ``begin .. begin + DEPTH - 1`` of ``x``, [BLOCK_M, BLOCK_N].

    Tensor cores add float8 products up with fewer bits than float32 has, so those of a block's depth at most.
    """
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    row_tile, num_rows = x_rows
    columns, in_columns, tile, num_columns = weight_rows
    parts = row_tile * (2 * BLOCK_M) + tl.arange(0, 2 * BLOCK_M)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    # What is not there is not loaded, whatever comes instead: a row of the result has only its own numbers.
    in_parts, in_rows = (parts < 2 * num_rows)[:, None], rows < num_rows
    x_offsets = parts.to(tl.int64)[:, None] * TILES.K
    weight_offsets = tl.minimum(columns, num_columns - 1).to(tl.int64)[:, None] * TILES.K
    ks = tl.arange(0, TILES.BLOCK_K)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    num_turns = tl.cdiv(tl.minimum(begin + TILES.DEPTH, TILES.K) - begin, TILES.BLOCK_K)
    # All programs read ``x``. Each begins elsewhere, so that they do not ask for the same lines at once.
    first_turn = tile % tl.maximum(num_turns, 1)
    x_scales = (x[1], rows, in_rows, num_rows)
    across = (tile, num_columns)
    start = begin + first_turn * TILES.BLOCK_K
    scale, first, second = _scales_of_turn(x_scales, scales, across, start, FORMAT, TILES)
    for index in range(0, num_turns):
        turn = first_turn + index
        start = begin + tl.where(turn < num_turns, turn, turn - num_turns) * TILES.BLOCK_K
        x_part = tl.load(x[0] + x_offsets + (start + ks), mask=in_parts)
        weight_part = tl.load(weight_ptr + weight_offsets + (start + ks))
        products = tl.dot(weight_part, tl.trans(x_part))
        high, low = tl.split(tl.reshape(products, [BLOCK_N, BLOCK_M, 2]))
        factors = scale[None, :]
        if FORMAT.SCALE_ROWS > 1 and FORMAT.HALVES:
            factors = tl.where(tl.arange(0, BLOCK_N) % 2 == 0, first, second)[:, None] * factors
        elif FORMAT.SCALE_ROWS > 1:
            factors *= first
        acc += (high + low * 0.0625) * factors
        # A turn before they are used.
        after = begin + tl.where(turn + 1 < num_turns, turn + 1, turn + 1 - num_turns) * TILES.BLOCK_K
        scale, first, second = _scales_of_turn(x_scales, scales, across, after, FORMAT, TILES)
    return tl.trans(tl.where(in_columns[:, None], acc, 0.0))


_MIN_ASKING_ROWS = tl.constexpr(INT4_PREFETCH["min_asking_rows"])
_MAX_SUMMED_ROWS = tl.constexpr(INT4_ZEROS["max_summed_rows"])


@triton.jit
def _less_than_middle(zeros):
    """Return how much less than 8 the zeros of four codes are, in float32."""
    return (
        8.0 - zeros[0].to(tl.float32),
        8.0 - zeros[1].to(tl.float32),
        8.0 - zeros[2].to(tl.float32),
        8.0 - zeros[3].to(tl.float32),
    )


@triton.jit
def _multiply_int4(
    x_ptr,
    weight_ptr,
    scales,  # see ``small_batch_linear_kernel``
    x_rows,  # rows, which of them there are, their stride
    weight_rows,  # of the result's columns, which of these there are; how many there are
    begin,
    FORMAT: tl.constexpr,  # WeightFormat
    TILES: tl.constexpr,  # Tiles
):
    """Return the products of a tile over columns ``begin .. begin + DEPTH - 1`` of ``x``, [BLOCK_M, BLOCK_N].

    With few rows, ``x`` is multiplied by each code less 8, and its sum over a group by 8 less the group's zero.
    """
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    STEP: tl.constexpr = FORMAT.STEP
    SUMS: tl.constexpr = scales[3] is not None and TILES.USE_DOT and BLOCK_M <= _MAX_SUMMED_ROWS
    GROUP: tl.constexpr = FORMAT.GROUP
    PRECISION: tl.constexpr = "ieee" if TILES.EXACT else "tf32"
    rows, in_rows, x_stride = x_rows
    columns, in_columns, num_columns = weight_rows
    # What is not there is not loaded, whatever comes instead: a row of the result has only its own numbers.
    known, in_x = tl.minimum(columns, num_columns - 1), in_rows[:, None]
    steps = tl.arange(0, STEP)[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + steps
    word_ptrs = weight_ptr + known.to(tl.int64)[:, None] * TILES.WIDTH + steps
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    products = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    scale = of_codes(scales[0], known, num_columns, begin, TILES.K, STEP, GROUP)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ones = tl.full([BLOCK_N, STEP], 1.0, x_ptr.dtype.element_ty)
    of_sums = scales[3] if SUMS else None
    shifts = _less_than_middle(of_codes(of_sums, known, num_columns, begin, TILES.K, STEP, GROUP))
    for start in range(begin, tl.minimum(begin + TILES.DEPTH, TILES.K), TILES.BLOCK_K):
        # Scales are loaded a turn ahead, zeros are not: where they are carried from one turn to the next, the compiler
        # moves the numbers made from them through shared memory, which doubles a layer's time with 32 to 128 rows.
        zeros = of_codes(None if SUMS else scales[3], known, num_columns, start, TILES.K, STEP, GROUP)
        words = tl.load(word_ptrs + start // 4)
        numbers = from_int4(words, zeros, x_ptr.dtype.element_ty, FORMAT.BY_ASSEMBLER)
        for code in tl.static_range(4):
            first = start + code * STEP
            if TILES.K % TILES.BLOCK_K == 0:
                x = tl.load(x_ptrs + first, mask=in_x)
            else:
                # There are codes past the last column, too.
                x = tl.load(x_ptrs + first, mask=in_x & (first + steps < TILES.K), other=0.0)
            if TILES.USE_DOT:
                products = tl.dot(numbers[code], tl.trans(x), products, input_precision=PRECISION)
            else:
                products += tl.sum(numbers[code][:, None, :].to(tl.float32) * x[None, :, :].to(tl.float32), 2)
            if SUMS:
                sums = tl.dot(ones, tl.trans(x), sums, input_precision=PRECISION)
            if GROUP > 0 and (code + 1) * STEP % GROUP == 0:
                if SUMS:
                    products += sums * shifts[code]
                    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                acc += products * scale[code].to(tl.float32)
                products = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if GROUP > 0:
            # A turn before they are used.
            scale = of_codes(scales[0], known, num_columns, start + TILES.BLOCK_K, TILES.K, STEP, GROUP)
            next_zeros = of_codes(of_sums, known, num_columns, start + TILES.BLOCK_K, TILES.K, STEP, GROUP)
            shifts = _less_than_middle(next_zeros)
    if GROUP == 0:
        acc = products
        if SUMS:
            acc += sums * shifts[0]
    return tl.trans(tl.where(in_columns[:, None], acc, 0.0))


@triton.jit
def _products(
    x,
    weight,
    descriptors,
    pointers,  # of what is given as x, and of weight
    scales,
    tile_scales,
    x_rows,
    weight_rows,
    x_sizes,  # number of rows, and their stride
    begin,
    FORMAT: tl.constexpr,  # WeightFormat
    TILES: tl.constexpr,  # Tiles
):
    """Return the products of a tile, [BLOCK_M, BLOCK_N], in the way that ``FORMAT`` asks for; see ``_multiply``."""
    if FORMAT.SPLIT:
        acc = _multiply_split(
            pointers[0], pointers[1], scales, (x_rows[2], x_sizes[0]), weight_rows, begin, FORMAT, TILES
        )
    elif FORMAT.STEP > 0:
        acc = _multiply_int4(
            pointers[0][0], pointers[1], scales, (x_rows[0], x_rows[1], x_sizes[1]),
            (weight_rows[0], weight_rows[1], weight_rows[3]), begin, FORMAT, TILES,
        )  # fmt: skip
    else:
        acc = _multiply(
            x, weight, descriptors, (pointers[0][0], pointers[1]), scales, tile_scales, x_rows, weight_rows,
            x_sizes[1], begin, FORMAT, TILES,
        )  # fmt: skip
    return acc


@triton.jit
def _finish(
    acc,
    moments,  # sums of x and of its squares, with NORM
    column_sum,  # with CENTRE
    bias,  # with BIAS
    weight_scale,  # of the result's columns, or None
    scale,  # that x was divided by, or None
    residual,  # with RESIDUAL
    eps,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    CENTRE: tl.constexpr,
    GELU: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Return what becomes of a tile's products, in float32."""
    if weight_scale is not None:
        acc *= weight_scale[None, :]
    if NORM:
        row_squares = tl.sum(moments[1], 1)
        if CENTRE:
            mean = tl.sum(moments[0], 1) / K
            variance = row_squares / K - mean * mean
            acc = (acc - mean[:, None] * column_sum[None, :]) * tl.rsqrt(variance + eps)[:, None]
        else:
            inverse = tl.rsqrt(row_squares / K + eps)
            acc *= (inverse if scale is None else inverse * scale)[:, None]
    if BIAS:
        acc += bias[None, :]
    if GELU:
        acc = _gelu_tanh(acc)
    answer = acc
    if GATED:
        gate, factor = tl.split(tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2]))
        answer = gate * tl.sigmoid(gate) * factor
    if RESIDUAL:
        answer += residual.to(tl.float32)
    return answer


@triton.jit(do_not_specialize=["num_rows", "num_row_tiles"])
def small_batch_linear_kernel(
    x_desc,  # of x and weight, with TMA
    weight_desc,
    given,  # x, [T, E], and None; with SPLIT of the format what ``split_rows`` returns
    weight_ptr,  # [O, E], with scales of uint8, with SPLIT of float8; with STEP of the format [O, M] int16
    scales,  # pointer and strides of rows and columns of scales, pointer to zeros of int4 or None; None without
    bias_ptr,  # [O], with BIAS
    column_sum_ptr,  # [O] float32, with CENTRE
    x_moments_ptr,  # [T, 2, X_PARTS] float32, with NORM
    x_scale_ptr,  # [1] float32, of RMSNorm in float16, else None
    residual_ptr,  # [T, O], with RESIDUAL; with GATED O / 2 columns, as out
    out_ptr,  # [T, O]  written
    after,  # NormAfter, with OUT_PARTS parts
    partial_ptr,  # [tiles, SPLIT_K, BLOCK_M, BLOCK_N] float32, scratch
    arrivals_ptr,  # [tiles] int32, zero before and after
    num_rows,
    num_columns,
    num_row_tiles,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    FORMAT: tl.constexpr,  # WeightFormat
    TILES: tl.constexpr,  # Tiles
    SPLIT_K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,  # RMSNorm, with CENTRE LayerNorm
    CENTRE: tl.constexpr,
    X_PARTS: tl.constexpr,
    GELU: tl.constexpr,
    GATED: tl.constexpr,  # silu(first) * second of each pair of columns
    RESIDUAL: tl.constexpr,
    OUT_PARTS: tl.constexpr,
    PREFETCH: tl.constexpr,  # 128-byte lines per column to ask for ahead, a power of two
    PDL: tl.constexpr,
    EARLY: tl.constexpr,  # let the next kernel start at once, else when x is asked for
):
    """One program per (tile of ``BLOCK_M`` rows and ``BLOCK_N`` columns, part of the depth)."""
    # Programs that share weights are neighbours.
    program = tl.program_id(0)
    tile, row_tile = program // num_row_tiles, program % num_row_tiles
    part = tl.program_id(1)
    rows = row_tile * TILES.BLOCK_M + tl.arange(0, TILES.BLOCK_M)
    columns = tile * TILES.BLOCK_N + tl.arange(0, TILES.BLOCK_N)
    in_rows = rows < num_rows
    in_columns = columns < num_columns
    weight_rows = _stored_rows(columns, num_columns, FORMAT)
    wide_rows = rows.to(tl.int64)
    OUT_BLOCK: tl.constexpr = TILES.BLOCK_N // 2 if GATED else TILES.BLOCK_N
    width = num_columns // 2 if GATED else num_columns
    out_columns = tile * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    in_out = out_columns < width
    inside = in_rows[:, None] & in_out[None, :]
    begin = part * TILES.DEPTH
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    x, weight, bias, column_sum, residual, moments = None, None, None, None, None, None
    x_scale, next_weight, weight_scale, tile_scales = None, None, None, None
    # What is constant is loaded before the wait.
    WHOLE: tl.constexpr = TILES.DEPTH == TILES.BLOCK_K and not FORMAT.SPLIT and FORMAT.STEP == 0
    if WHOLE and TILES.TMA:
        weight = weight_desc.load([tile * TILES.BLOCK_N, begin])
    elif WHOLE:
        weight = load_tile(
            weight_ptr, weight_rows, in_columns, TILES.K, begin, TILES.K, TILES.BLOCK_K, TILES.WARP_SPLIT
        )
    elif PREFETCH > 0:
        _ask_ahead(weight_ptr, weight_rows, num_columns, begin, scales, tile, FORMAT, TILES, PREFETCH)
    if BIAS:
        bias = tl.load(bias_ptr + weight_rows, mask=in_columns, other=0.0)
    if FORMAT.SCALE_ROWS == 1:
        weight_scale = tl.load(scales[0] + weight_rows * scales[1], mask=in_columns, other=0.0)
    elif FORMAT.SCALE_ROWS > 1 and TILES.USE_DOT and not FORMAT.SPLIT:
        tile_scales = _tile_scales(scales, tile, num_columns, begin, FORMAT, TILES)
    if CENTRE:
        column_sum = tl.load(column_sum_ptr + columns, mask=in_columns, other=0.0)
    if x_scale_ptr is not None:
        x_scale = tl.load(x_scale_ptr)
    if after.weight is not None:
        next_weight = load_norm_weight(after, out_columns, in_out)
    if PDL:
        # Everything below reads or overwrites what earlier kernels made or read.
        tl.extra.cuda.gdc_wait()
    if RESIDUAL:
        residual = tl.load(
            residual_ptr + wide_rows[:, None] * residual_stride + out_columns[None, :], mask=inside, other=0.0
        )
    if NORM:
        moments = load_moments(x_moments_ptr, rows, num_rows, X_PARTS)
    if WHOLE and TILES.TMA:
        x = x_desc.load([row_tile * TILES.BLOCK_M, begin])
    elif WHOLE:
        x = load_tile(given[0], rows, in_rows, x_stride, begin, TILES.K, TILES.BLOCK_K, TILES.WARP_SPLIT)
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    acc = _products(
        x, weight, (x_desc, weight_desc), (given, weight_ptr), scales, tile_scales, (rows, in_rows, row_tile),
        (weight_rows, in_columns, tile, num_columns), (num_rows, x_stride), begin, FORMAT, TILES,
    )  # fmt: skip
    is_last = True
    if SPLIT_K > 1:
        is_last, acc = add_parts(acc, partial_ptr, arrivals_ptr, program, part, SPLIT_K)
    if is_last:
        result = _finish(
            acc, moments, column_sum, bias, weight_scale, x_scale, residual, eps,
            TILES.K, BIAS, NORM, CENTRE, GELU, GATED, RESIDUAL,
        ).to(out_ptr.dtype.element_ty)  # fmt: skip
        _leave_to_norm(result, next_weight, after, rows, in_rows, out_columns, inside, tile, width, OUT_PARTS)
        tl.store(out_ptr + wide_rows[:, None] * out_stride + out_columns[None, :], result, mask=inside)


def rows_of_tiles(x: torch.Tensor, block_m: int) -> int:
    """Return how many rows from ``x`` on a launch may copy: whole tiles, where its storage has them.

    What comes after ``x`` is read but not used. Rows that a descriptor leaves out take time: a product of 80 rows with
    Llama 3.1 8B's 28672 x 4096 weights took 101 us on an H200 in tiles of 128 rows and 64 columns, with 128 rows 77.
    """
    stored = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    rows_stored = (stored - x.shape[1]) // max(x.stride(0), 1) + 1
    return max(min(triton.cdiv(x.shape[0], block_m) * block_m, rows_stored), x.shape[0])


MAX_REGISTERS = 255
"""All that a thread can have: the assembler's own choice may be a few too few."""
_BYTES_AHEAD = LINEAR_PREFETCH["bytes_ahead"]
_PROGRAMS_AT_ONCE = LINEAR_PREFETCH["programs_at_once"]


def lines_ahead(depth_bytes: int, block_n: int, programs: int) -> int:
    """Return how many 128-byte lines of each column programs ask for before ``x`` is there, a power of two.

    What all programs of a GPU ask for must fit its L2 cache next to what is in use, or it comes from memory twice.
    """
    lines = triton.next_power_of_2(triton.cdiv(depth_bytes, _LINE_BYTES))
    at_once = min(programs, _PROGRAMS_AT_ONCE)
    while lines > 1 and at_once * block_n * lines * _LINE_BYTES > _BYTES_AHEAD:
        lines //= 2
    return lines


_SCRATCH_TILES = 1 << 14


def scratch_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the workspace's buffer for parts, and its arrival counters, which are zero between launches."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.empty(MAX_SPLIT_FLOATS, dtype=torch.float32, device=device),
            torch.zeros(_SCRATCH_TILES, dtype=torch.int32, device=device),
        )

    partial, arrivals = current_workspace().tensors("small_batch_linear", device, None, make)
    return partial, arrivals


class _LaunchShape(NamedTuple):
    """How one product is divided among programs."""

    num_tiles: int
    """Of columns."""
    num_row_tiles: int
    depth: int
    """Of a program."""
    num_lines: int
    """Of 128 bytes in each column that programs ask for before ``x`` is there."""
    num_parts: int
    """Of the result's moments."""


def _column_bytes(weight: torch.Tensor, form: WeightFormat) -> float:
    return weight.element_size() / (4 if form.STEP else 1)


@lru_cache(maxsize=4096)
def _launch_shape(
    num_rows: int, num_columns: int, depth: int, column_bytes: float, config: LinearConfig, form: WeightFormat
) -> _LaunchShape:
    """Divide a product among programs.

    Raises:
        ShapeError: parts of the depth need more scratch memory than there is.
    """
    tiles, row_tiles = triton.cdiv(num_columns, config.block_n), triton.cdiv(num_rows, config.block_m)
    num_floats = tiles * row_tiles * config.split_k * config.block_m * config.block_n
    if config.split_k > 1 and (num_floats > MAX_SPLIT_FLOATS or tiles * row_tiles > _SCRATCH_TILES):
        raise ShapeError(
            f"config: {config} needs {num_floats} floats for the parts of {num_rows} x {num_columns} results, "
            f"allowed are {MAX_SPLIT_FLOATS}"
        )
    deep = triton.cdiv(triton.cdiv(depth, config.split_k), config.block_k) * config.block_k
    # On an H200, to ask ahead made a layer with split activations 1 to 3 % slower from 8 rows on, 1 % faster at one.
    lines = 0 if form.SPLIT else lines_ahead(int(deep * column_bytes), config.block_n, tiles * config.split_k)
    return _LaunchShape(tiles, row_tiles, deep, lines, triton.next_power_of_2(tiles))


def small_batch_linear(
    x: torch.Tensor | NormInput,  # [T, E]
    layer: PackedLinear,
    *,
    gelu: bool,
    residual: torch.Tensor | None,  # [T, O]
    out: torch.Tensor,  # [T, O]  written
    next_norm: PackedNorm | None = None,
    config: LinearConfig | None = None,
) -> NormInput | None:
    """Launch the kernel; arguments as checked by ``rose_backend.kernels.linear.ops``.

    Where the device can, it starts while the previous kernel still runs, and allows the same to the next one: the
    previous kernel must not write the tensors of the layer and the norms.

    Args:
        config: None takes the measured choice.

    Returns:
        What ``out`` leaves to the norm after it, if there is one.
    """
    x, x_moments, norm = x if isinstance(x, NormInput) else (x, None, None)
    num_rows, depth = x.shape
    weight, scales, form = _stored(layer, x)
    bias, num_columns, width = layer.bias, *weight.shape
    config = _checked(config or _choose_config(x, weight, form), form)
    shape = _launch_shape(num_rows, num_columns, depth, _column_bytes(weight, form), config, form)
    after = norm_after(next_norm, out, shape.num_parts)
    if num_rows == 0:
        return after.result(next_norm, out)
    use_pdl = has_dependent_launch(x.device)
    unused = x if bias is None else bias
    small_batch_linear_kernel[(shape.num_tiles * shape.num_row_tiles, config.split_k)](
        *(_describe(x, weight, config) if config.use_tma else (None, None)),
        split_rows(x) if form.SPLIT else (x, None),
        weight,
        scales,
        unused,
        unused if layer.column_sums is None else layer.column_sums,
        unused if x_moments is None else x_moments,
        None if norm is None else norm.scale,
        x if residual is None else residual,
        out,
        after,
        *scratch_on(x.device),
        num_rows,
        num_columns,
        shape.num_row_tiles,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        0.0 if norm is None else norm.eps,
        FORMAT=form,
        BIAS=bias is not None,
        NORM=norm is not None,
        CENTRE=layer.column_sums is not None,
        X_PARTS=0 if x_moments is None else x_moments.shape[2],
        GELU=gelu,
        GATED=layer.is_gated,
        RESIDUAL=residual is not None,
        OUT_PARTS=0 if next_norm is None else shape.num_parts,
        PREFETCH=shape.num_lines if use_pdl else 0,
        PDL=use_pdl,
        launch_pdl=use_pdl,
        **_options_of(config, form, (depth, width, shape.depth), is_exact=x.dtype == torch.float32),
    )
    return after.result(next_norm, out)


def _stored(
    layer: PackedLinear, x: torch.Tensor
) -> tuple[torch.Tensor, tuple[Any, ...] | None, WeightFormat]:
    """Return a layer's weight as the kernel reads it, its scales with their strides, and how it is stored."""
    weight = layer.weight
    if isinstance(weight, torch.Tensor):
        return weight, None, WeightFormat()
    form = WeightFormat(
        HALVES=layer.is_gated and not layer.alternates, BY_ASSEMBLER=not triton.knobs.runtime.interpret
    )
    if isinstance(weight, Int4Weight):
        is_whole = weight.scales.shape[0] == 1
        form = form._replace(
            SCALE_ROWS=int(is_whole), STEP=weight.step, GROUP=0 if is_whole else weight.group_size
        )
        return weight.words, (weight.scales, 1, weight.shape[0], weight.zeros), form
    form = form._replace(SCALE_ROWS=SCALED_BLOCK if weight.has_blocks else 1, SPLIT=can_split(x))
    values = weight.values if form.SPLIT else weight.values.view(torch.uint8)
    return values, (weight.scales, *weight.scales.stride(), None), form


def can_split(x: torch.Tensor) -> bool:
    """Whether ``x`` is multiplied by float8 weights as sums of two float8 numbers, which have all bits of bfloat16."""
    is_whole = x.dtype == torch.bfloat16 and x.shape[1] % SCALED_BLOCK == 0
    return is_whole and has_float8_tensor_cores(x.device)


def _checked(config: LinearConfig, form: WeightFormat) -> LinearConfig:
    """Return ``config`` if what is multiplied at once has one scale, of a gated layer one for each half.

    Raises:
        ShapeError: a tile's rows or its depth do not divide those of a block, or the way that float8 numbers are
            multiplied is another one.
    """
    is_plain = config.weights_left and config.warp_split == 1 and not config.use_tma
    if form.SCALE_ROWS > 1 and config.use_dot:
        rows = config.block_n // 2 if form.HALVES else config.block_n
        if SCALED_BLOCK % rows or SCALED_BLOCK % config.block_k:
            raise ShapeError(
                f"config: expected rows and a depth of the weight that divide {SCALED_BLOCK} with blocks, "
                f"got {config}"
            )
    if form.STEP and not (is_plain and config.block_k == 4 * form.STEP):
        raise ShapeError(
            f"config: expected weights_left without use_tma and warp_split, and a depth of {4 * form.STEP}, with an "
            f"int4 weight, got {config}"
        )
    if form.SPLIT and not (is_plain and config.use_dot and SCALED_BLOCK % config.block_k == 0):
        raise ShapeError(
            f"config: expected weights_left without use_tma and warp_split, and a depth that divides "
            f"{SCALED_BLOCK}, where x is split, got {config}"
        )
    return config


def _choose_config(x: torch.Tensor, weight: torch.Tensor, form: WeightFormat) -> LinearConfig:
    """Return the measured choice."""
    exact = x.dtype == torch.float32
    if form.STEP:
        return choose_int4_config(
            x.shape[0],
            weight.shape[0],
            x.shape[1],
            step=form.STEP,
            exact=exact,
            has_wgmma=has_float8_tensor_cores(x.device),
        )
    if form.SCALE_ROWS and not exact:
        return choose_float8_config(x.shape[0], weight.shape[0], x.shape[1], split=form.SPLIT)
    return choose_linear_config(
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        exact=exact,
        can_use_tma=can_use_tma(x, weight),
        has_tensor_memory=x.device.type != "cpu" and gpu_properties(x.device).has_tensor_memory,
    )


def _describe(
    x: torch.Tensor, weight: torch.Tensor, config: LinearConfig
) -> tuple[TensorDescriptor, TensorDescriptor]:
    rows = [rows_of_tiles(x, config.block_m), x.shape[1]]
    return (
        TensorDescriptor(x, rows, list(x.stride()), [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
    )


@lru_cache(maxsize=4096)
def _options_of(
    config: LinearConfig, form: WeightFormat, sizes: tuple[int, int, int], *, is_exact: bool
) -> dict[str, Any]:
    """Return the kernel's arguments that follow from these alone: ``sizes`` are the first ones of ``Tiles``."""
    return {
        "TILES": Tiles(
            *sizes,
            config.block_m,
            config.block_n,
            config.block_k,
            config.warp_split,
            config.use_dot,
            config.weights_left,
            config.use_tma,
            is_exact,
        ),
        "SPLIT_K": config.split_k,
        "EARLY": config.is_early,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": MAX_REGISTERS if (form.SCALE_ROWS or form.STEP) and not form.SPLIT else None,
    }
