"""How a product of a few rows is cut into programs, as measured by ``benchmarks.tune_decode_layer``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import triton

MAX_SPLIT_COLUMNS = 4096
MAX_SPLIT_FLOATS = MAX_SPLIT_COLUMNS * 768
"""Scratch memory for the parts of a product whose depth is split over programs."""


# Not every cut that compiles is right: Triton 3.6 miscompiles 64 rows x 64 columns x 128 depth with 3 stages and 4
# warps, where tiles are copied without the tensor memory accelerator and the norm behind wants moments. So a new cut is
# first compared with cuBLAS, as the benchmark does.
@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How one product is cut into programs."""

    block_m: int
    """Rows of a program."""
    block_n: int
    """Columns of a program."""
    block_k: int
    """Depth that is loaded at once. If it covers a program's whole depth, weights are loaded before ``x`` is there."""
    split_k: int = 1
    """Programs that share one tile's depth."""
    warp_split: int = 1
    """Warps that share a program's depth, with ``use_dot`` and ``block_k`` covering it: 1 or ``num_warps``."""
    num_warps: int = 4
    num_stages: int = 3
    use_dot: bool = True
    """Tensor cores; else float32 products of up to two rows."""
    weights_left: bool = False
    """Weights are the left factor, for which tensor cores have taller tiles: for fewer rows than columns."""
    use_tma: bool = False
    """Tiles are copied by the tensor memory accelerator, which fills up with zeros what lies beyond the depth."""
    is_early: bool = True
    """The next kernel may start at once, not when ``x`` is loaded: its weights come earlier, but its programs take
    up processors for longer."""


_NARROW = 768
"""Up to this width products are cut as GPT-2 124M's, wider ones as Qwen3 0.6B's and 30B-A3B's,
Llama 3.2 1B's and Llama 3.1 8B's."""
_WIDE = 1024
_LONG = 1024
_LONGEST = 4096
"""Up to this depth, weights of ``_LONG`` at least wait for ``x`` in a program."""


_TENSOR_MEMORY_DEPTH = 512


@lru_cache(maxsize=256)
def choose_config(
    num_rows: int,
    num_columns: int,
    depth: int,
    *,
    exact: bool,
    can_use_tma: bool,
    has_tensor_memory: bool = False,
) -> LinearConfig:
    """Return the measured cut of a product.

    Args:
        exact: float32 inputs, which are multiplied without tensor cores.
        can_use_tma: the GPU has a tensor memory accelerator, and ``x`` and the weight lie as it needs them.
        has_tensor_memory: see ``GpuProperties``.
    """
    config = _measured(num_rows, num_columns, depth, exact=exact, can_use_tma=can_use_tma)
    if has_tensor_memory and config.use_tma and config.block_k > _TENSOR_MEMORY_DEPTH:
        # As much shared memory, a part at a time; in two parts a kernel spilled registers.
        return replace(config, block_k=256, num_stages=config.block_k // 256)
    return config


def _measured(num_rows: int, num_columns: int, depth: int, *, exact: bool, can_use_tma: bool) -> LinearConfig:
    whole = max(triton.next_power_of_2(depth), 128)
    block_m = triton.next_power_of_2(num_rows)
    is_long = depth > _LONG
    if exact:
        block_m = min(block_m, 64)
        return LinearConfig(block_m, 2, min(whole, 4096 // block_m), num_warps=8, num_stages=2, use_dot=False)
    if can_use_tma and min(num_columns, depth) > _NARROW:
        wide = _wide(num_rows, num_columns, depth)
        if wide is not None:
            return wide
    if block_m <= 32 and not is_long:
        return _whole_depth(block_m, num_columns, whole, can_use_tma=can_use_tma)
    is_split = is_long and depth <= _LONGEST and num_columns <= MAX_SPLIT_COLUMNS
    if is_split and block_m <= 64:
        config = _split_depth(block_m, num_columns, depth, can_use_tma=can_use_tma)
        if config is not None:
            return config
    if block_m <= 2:
        return LinearConfig(block_m, 2 * block_m, min(whole, 4096), num_warps=8, use_dot=False)
    if block_m <= 32 or not can_use_tma:
        return _without_tma(block_m, num_columns, depth)
    return _by_tma(block_m, num_columns, is_split=is_long and num_columns <= MAX_SPLIT_COLUMNS)


def _whole_depth(block_m: int, num_columns: int, whole: int, *, can_use_tma: bool) -> LinearConfig:
    """Weights of the whole depth wait for ``x``, a part of the depth in each warp."""
    is_early = block_m <= 16
    if num_columns <= _WIDE:
        if block_m >= 16:
            return LinearConfig(
                16, 32, whole, warp_split=8, num_warps=8, weights_left=True, is_early=is_early
            )
        return LinearConfig(max(block_m, 8), 16, whole, warp_split=4, weights_left=True)
    if block_m == 32 and can_use_tma:
        return LinearConfig(32, 32, 256, weights_left=True, use_tma=True)
    num_warps = 8 if block_m == 32 else 4
    return LinearConfig(
        block_m=max(block_m, 8),
        block_n=32,
        block_k=whole,
        warp_split=num_warps,
        num_warps=num_warps,
        weights_left=True,
        is_early=is_early,
    )


def _split_depth(block_m: int, num_columns: int, depth: int, *, can_use_tma: bool) -> LinearConfig | None:
    parts = triton.cdiv(depth, 1024)
    if block_m <= 8 and num_columns <= _WIDE and can_use_tma:
        # Takes more shared memory than GPUs before those with TMA have.
        return LinearConfig(
            8, 16, triton.next_power_of_2(depth), warp_split=16, num_warps=16, weights_left=True
        )
    if block_m <= 16:
        return LinearConfig(max(block_m, 8), 32, 1024, parts, warp_split=16, num_warps=16, weights_left=True)
    if block_m == 32 and can_use_tma:
        return LinearConfig(32, 64, 1024, parts, weights_left=True, use_tma=True, is_early=False)
    if block_m == 64 and can_use_tma:
        return LinearConfig(64, 32, 1024, parts, use_tma=True)
    return None


def _by_tma(block_m: int, num_columns: int, *, is_split: bool) -> LinearConfig:
    """Tiles of ``x`` and the weights are copied some steps ahead of the tensor cores."""
    is_early = block_m <= 64
    if is_split:
        split_k = 6 if is_early else 1 if block_m <= 128 else 2
        return LinearConfig(64, 32, 128, split_k, num_stages=4, use_tma=True, is_early=is_early)
    if num_columns <= _WIDE:
        return LinearConfig(64, 32, 128, num_stages=4, use_tma=True, is_early=is_early)
    if num_columns <= 2560:
        return LinearConfig(64, 64, 128, num_stages=4 if is_early else 3, use_tma=True, is_early=is_early)
    if block_m <= 64:
        return LinearConfig(64, 32, 256, num_stages=3, use_tma=True)
    if block_m <= 128:
        return LinearConfig(64, 32, 128, num_stages=4, use_tma=True, is_early=False)
    return LinearConfig(64, 64, 128, num_stages=3, use_tma=True, is_early=False)


def _without_tma(block_m: int, num_columns: int, depth: int) -> LinearConfig:
    whole = triton.next_power_of_2(depth)
    many_rows = block_m > 64
    block_m = min(max(block_m, 16), 64)
    if num_columns > MAX_SPLIT_COLUMNS:
        # So many columns fill the GPU without a split.
        return LinearConfig(block_m, 32, min(whole, 256 if block_m < 64 else 128))
    if depth > _LONG:
        if block_m == 64:
            return LinearConfig(64, 32, 256, 2 if many_rows else 4)
        # Where there are several, two tiles of 32 rows have to fit the 99 KiB of most GPUs of this kind.
        block_k = 256 if block_m == 32 and whole > 8 * 512 else min(whole // 8, 512)
        return LinearConfig(block_m, 32, block_k, 8)
    return LinearConfig(block_m, 16, min(whole, 256))


_MIN_PROGRAMS, _MAX_PROGRAMS = 96, 128
"""Of a product at least, where that is possible; and at most, where each takes a multiprocessor's shared memory. An
H100 and an H200 have 132."""


def _wide(num_rows: int, num_columns: int, depth: int) -> LinearConfig | None:
    """Cut a product that is wide and deep; None leaves it to the rules above."""
    block_m = max(triton.next_power_of_2(num_rows), 8)
    if block_m <= 32 and depth <= _LONG:
        if block_m <= 16 or num_columns <= _WIDE:
            return None
        if _MIN_PROGRAMS <= triton.cdiv(num_columns, 64) <= _MAX_PROGRAMS:
            # All of a program's weights are in its shared memory when ``x`` comes.
            return LinearConfig(32, 64, _LONG, weights_left=True, use_tma=True)
        return LinearConfig(32, 64, 256, num_stages=4, weights_left=True, use_tma=True, is_early=False)
    if num_columns <= _WIDE:
        return _wide_to_narrow(block_m, depth)
    if block_m <= 32:
        return _wide_few_rows(block_m, num_columns, depth)
    if block_m == 64:
        return _wide_64_rows(num_columns, depth)
    return _wide_many_rows(num_rows, num_columns, depth)


def _parts(tiles: int, depth: int, min_depth: int) -> int:
    """Return how many programs share a tile's depth, of ``min_depth`` each at least."""
    parts = 1
    while tiles * parts < _MIN_PROGRAMS and depth >= 2 * parts * min_depth:
        parts *= 2
    return parts


def _wide_to_narrow(block_m: int, depth: int) -> LinearConfig | None:
    if block_m <= 16 and depth <= 2048:
        return LinearConfig(block_m, 16, 2048, warp_split=8, num_warps=8, weights_left=True)
    if block_m == 8 and depth <= _LONGEST:
        return LinearConfig(
            8, 16, 1024, triton.cdiv(depth, 1024), warp_split=8, num_warps=8, weights_left=True
        )
    if block_m == 32 and depth <= 2048:
        return LinearConfig(32, 32, 256, 2, num_stages=6, weights_left=True, use_tma=True)
    if block_m <= 32:
        return None
    if block_m == 64:
        return LinearConfig(64, 32, 128, 4 if depth > 2048 else 1, num_stages=8, use_tma=True)
    if block_m == 256 and depth <= 2048:
        return LinearConfig(64, 64, 128, num_stages=6, use_tma=True)
    return LinearConfig(64, 32, 256, num_stages=4, use_tma=True, is_early=depth <= 2048)


def _wide_few_rows(block_m: int, num_columns: int, depth: int) -> LinearConfig:
    """A processor's shared memory is full of weights that are on their way."""
    if block_m == 8 and depth <= 2048 and MAX_SPLIT_COLUMNS < num_columns <= 2 * MAX_SPLIT_COLUMNS:
        return LinearConfig(8, 16, 2048, warp_split=8, num_warps=8, weights_left=True)
    if block_m == 8 and 2048 < depth <= _LONGEST and num_columns <= 2048:
        parts = triton.cdiv(depth, 1024)
        return LinearConfig(8, 32, 1024, parts, warp_split=16, num_warps=16, weights_left=True)
    if block_m <= 16 and depth <= 2048 and num_columns <= MAX_SPLIT_COLUMNS:
        return LinearConfig(block_m, 32, 1024, 2, warp_split=8, num_warps=8, weights_left=True)
    if block_m == 8 and triton.cdiv(num_columns, 128) >= _MIN_PROGRAMS:
        return LinearConfig(8, 128, 256, num_stages=3, weights_left=True, use_tma=True)
    if block_m == 32 and triton.cdiv(num_columns, 64) >= 2 * _MIN_PROGRAMS:
        return LinearConfig(32, 64, 128, num_stages=4, weights_left=True, use_tma=True)
    parts = _parts(triton.cdiv(num_columns, 64), depth, 2048)
    stages = 4 if block_m == 32 else 5
    return LinearConfig(block_m, 64, 256, parts, num_stages=stages, weights_left=True, use_tma=True)


def _wide_64_rows(num_columns: int, depth: int) -> LinearConfig:
    if triton.cdiv(num_columns, 128) >= _MIN_PROGRAMS:
        return LinearConfig(64, 128, 128, num_stages=4, use_tma=True)
    block_n, block_k, stages = (32, 256, 4) if num_columns <= 2048 else (64, 128, 6)
    parts = _parts(triton.cdiv(num_columns, block_n), depth, _LONGEST)
    return LinearConfig(64, block_n, block_k, parts, num_stages=stages, use_tma=True)


def _wide_many_rows(num_rows: int, num_columns: int, depth: int) -> LinearConfig:
    """Take the largest tiles of which there are enough, and share the depth of deep ones to have more."""
    row_tiles = triton.cdiv(num_rows, 128)
    for block_n, num_warps, num_stages, min_depth in (
        (256, 8, 4, 0),
        (128, 8, 6, _LONGEST),
        (64, 4, 8, 2048),
    ):
        tiles = row_tiles * triton.cdiv(num_columns, block_n)
        parts = _parts(tiles, depth, min_depth) if min_depth and depth > _LONGEST else 1
        fits = parts == 1 or parts * tiles * 128 * block_n <= MAX_SPLIT_FLOATS
        if tiles * parts >= _MIN_PROGRAMS and fits:
            is_early = block_n != 128
            return LinearConfig(
                128,
                block_n,
                64,
                parts,
                num_warps=num_warps,
                num_stages=num_stages,
                use_tma=True,
                is_early=is_early,
            )
    return LinearConfig(64, 64, 128, num_stages=6, use_tma=True)
