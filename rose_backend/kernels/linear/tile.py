"""Parts of the small-batch products: tiles and reductions, in registers, warps and programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    tensor_ptr, rows, in_rows, stride, start, K: tl.constexpr, BLOCK_K: tl.constexpr, WARP_SPLIT: tl.constexpr
):
    """Load ``BLOCK_K`` columns of some rows: [rows, BLOCK_K], or for each warp its own, [WARP_SPLIT, rows, ...]."""
    if WARP_SPLIT > 1:
        SHARE: tl.constexpr = BLOCK_K // WARP_SPLIT
        ks = start + tl.arange(0, WARP_SPLIT)[:, None, None] * SHARE + tl.arange(0, SHARE)[None, None, :]
        offsets = rows.to(tl.int64)[None, :, None] * stride + ks
        mask = in_rows[None, :, None] & (ks < K)
    else:
        ks = start + tl.arange(0, BLOCK_K)[None, :]
        offsets = rows.to(tl.int64)[:, None] * stride + ks
        mask = in_rows[:, None] & (ks < K)
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
def store_moments(result, moments_ptr, rows, in_rows, tile, num_tiles, PARTS: tl.constexpr):
    """Write this tile's part of the moments of ``result``, and zeros to parts that no tile has."""
    wide = result.to(tl.float32)  # 0 in columns that there are not
    moment_ptrs = moments_ptr + rows * (2 * PARTS) + tile
    tl.store(moment_ptrs, tl.sum(wide, 1), mask=in_rows)
    tl.store(moment_ptrs + PARTS, tl.sum(wide * wide, 1), mask=in_rows)
    # PARTS is less than twice the number of tiles.
    if tile + num_tiles < PARTS:
        zeros = tl.zeros_like(rows).to(tl.float32)
        tl.store(moment_ptrs + num_tiles, zeros, mask=in_rows)
        tl.store(moment_ptrs + num_tiles + PARTS, zeros, mask=in_rows)


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
