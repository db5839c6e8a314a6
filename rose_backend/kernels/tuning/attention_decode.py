"""What decides the speed of decode attention on a GPU, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
import triton

from rose_backend.kernels.gpu_properties import gpu_properties

MAX_QUERY_ELEMENTS = 8192
"""Numbers that one program attends, unless one head's tokens are more: they stay in registers."""


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How the work is cut up and scheduled."""

    tile: int
    """Cached tokens per iteration, a power of two."""
    min_split: int
    """Tokens below which a row is not split further."""
    num_programs: int
    """Pieces of work wanted over all heads, beyond one per row and head."""
    use_dot: bool
    """Multiply on the matrix units, which needs a 16-bit type to be exact; otherwise lane by lane."""
    num_warps: int
    num_stages: int
    """Tiles on their way at once: through shared memory, or lane by lane into registers, beside the one attended."""
    max_registers: int | None = None
    """Per thread. The assembler's own choice may be a few too few."""
    max_whole: int = 0
    """Tokens up to which a row is never split: adding up would take longer than it saves."""
    fan_in: int = 8
    """Splits whose partial results the last of them adds up; at least 2."""
    kv_heads: int = 1
    """Lane by lane: heads that one program attends where each has one query; a power of two."""
    early_tiles: int = 0
    """With ``use_dot``, 0 or 1: the first tile waits in registers for the query. Short rows take less time; with many
    programs the registers are worth more."""
    early_dependents: bool = True
    """Where launches overlap: the next kernel may start as soon as all programs have. Else not before their last tiles:
    with many rows it, and those behind it, would take memory's time from these."""


def decode_tuning(
    head_size: int,
    dtype: torch.dtype,
    num_processors: int,
    *,
    cache_dtype: torch.dtype | None = None,
    num_rows: int = 64,
    num_queries: int = 1,
    num_kv_heads: int = 1,
    norms_heads: bool = False,
) -> DecodeTuning:
    """Return what was fastest on an H200 for this shape, or for the nearest that was measured.

    Args:
        dtype: of the query.
        cache_dtype: None is ``dtype``.
        num_queries: query heads times new tokens that one program attends, of those that share a KV head.
        norms_heads: query and key heads pass through norms on their way.
    """
    head_tile = max(triton.next_power_of_2(head_size), 16)
    if dtype.itemsize == 4:
        return DecodeTuning(
            tile=max(2048 // head_tile, 16),
            min_split=64,
            num_programs=4 * num_processors,
            use_dot=False,
            num_warps=4 if head_tile <= 256 else 8,
            num_stages=1,
        )
    # A warp has registers for about 1024 attended numbers.
    query_warps = triton.next_power_of_2(num_queries) * head_tile // 1024
    is_16_bit = cache_dtype is None or cache_dtype.itemsize == 2
    if head_tile <= 64:
        if num_queries == 1 and is_16_bit:
            return _lane_tuning(num_rows, num_kv_heads, num_processors)
        return DecodeTuning(
            tile=64,
            min_split=128,
            num_programs=(6 if num_rows * num_kv_heads > 2 * num_processors else 4) * num_processors,
            use_dot=True,
            num_warps=min(max(query_warps, 4 if num_rows == 1 else 2), 8),
            num_stages=3,
        )
    is_large = num_queries > 16 or not is_16_bit
    if head_tile == 128 and not is_large:
        return _grouped_tuning(num_rows * num_kv_heads, num_processors, norms_heads=norms_heads)
    tile = 8192 if is_large and head_tile == 128 else 4096
    return DecodeTuning(
        tile=max(tile // head_tile, 16),
        min_split=128,
        num_programs=(2 if is_large else 3) * num_processors,
        use_dot=True,
        num_warps=min(max(query_warps, 4 if head_tile <= 256 else 8), 8),
        # Four tiles of heads of 512 would fit the shared memory of some GPUs only.
        num_stages={128: 3, 256: 4}.get(head_tile, 2),
    )


def _grouped_tuning(num_heads: int, num_processors: int, *, norms_heads: bool) -> DecodeTuning:
    """Return the tuning of heads of 128 elements, ``num_heads`` of which are read: KV heads of all rows.

    Measured with rows of 50 to 8,000 tokens, mixed and alike. Long rows gain by programs that share a processor, so
    that none has to wait for the longest row, and short ones by few large programs: with 8 rows of Qwen3 0.6B's heads
    on an H200, 300 to 800 tokens took 17.4 us by programs of 8 warps and 11.9 by those of 4, and 144 tokens 5.8 and
    7.9. With norms, one of 8 warps takes 160 registers a thread and has a processor for itself; without, two share it.
    """
    if num_heads <= num_processors // 4 or (num_heads <= num_processors and not norms_heads):
        # Adding up splits of short rows pays where they are very few.
        has_room = num_heads <= num_processors // 6
        return DecodeTuning(
            tile=64,
            min_split=64 if has_room else 256 if norms_heads else 128,
            num_programs=num_processors if norms_heads else 2 * num_processors,
            use_dot=True,
            num_warps=8,
            num_stages=2 if has_room and not norms_heads else 3,
            early_tiles=1,
        )
    if num_heads <= 2 * num_processors:
        is_alone = num_heads <= num_processors
        return DecodeTuning(
            tile=64,
            min_split=256,
            num_programs=(2 if is_alone else 3) * num_processors,
            use_dot=True,
            num_warps=4,
            num_stages=3,
            max_whole=320,
            early_tiles=1,
            early_dependents=is_alone,
        )
    # Many small programs share the time that memory takes to answer. In whole layers of Qwen3 0.6B on an H100, 80 rows
    # of 830 to 1,750 tokens take 173 us by 18 pieces a processor and 192 by 8, and 80 rows of 144 tokens 47 us where
    # the next kernel begins late and 51 where it begins early. In turns, more pieces cost time: with 200 rows of 400 to
    # 1,320 tokens 280 us instead of 272.
    are_many = norms_heads and not begins_in_turns(num_heads, num_processors)
    return DecodeTuning(
        tile=16,
        min_split=128,
        num_programs=(18 if are_many else 10) * num_processors,
        use_dot=True,
        num_warps=1,
        num_stages=3,
        max_whole=512,
        early_dependents=not are_many,
    )


def _lane_tuning(num_rows: int, num_kv_heads: int, num_processors: int) -> DecodeTuning:
    """Return the tuning of heads of at most 64 elements that share nothing, where a product would be mostly padding.

    The more rows and heads there are, the smaller are their programs: as many as possible shall run at once.
    """
    wanted = num_rows * num_kv_heads / num_processors
    is_single, is_few = num_rows == 1, wanted <= 1
    # Rows of 20 to 1,000 tokens: what splits them finely enough that no long one is attended last.
    programs = 1 if is_few else 4 if wanted <= 4 else 8 if wanted <= 8 else 15
    tile, num_warps, num_stages, kv_heads = 64, 4, 1, 1
    if wanted > 16:
        tile, num_warps, kv_heads = 8, 1, 2
    elif wanted > 8:
        tile, num_warps, kv_heads = 16, 2, 2
    elif wanted > 4:
        tile, num_warps = 32, 2
    elif is_few and not is_single:
        # A program has a processor for itself: all tokens of a short row are on their way from the start.
        tile, num_warps, num_stages = 128, 8, 2
    heads = math.gcd(num_kv_heads, kv_heads)
    return DecodeTuning(
        tile=tile * kv_heads // heads,
        min_split=64 if is_single else 128,
        num_programs=programs * num_processors,
        use_dot=False,
        num_warps=num_warps,
        num_stages=num_stages,
        max_registers=None if num_warps == 8 else 168,
        max_whole=64 if is_single else 320,
        fan_in=16 if is_single else 8,
        kv_heads=heads,
        early_dependents=wanted <= 4,
    )


def begins_in_turns(num_heads: int, num_processors: int) -> bool:
    """Return whether programs of decode attention, one for each KV head of each row, are too many to run all at once.

    Longest first, 200 rows of 100 to 1,100 tokens with Qwen3 0.6B's heads take 122 us on an H200, in their own order
    144; with up to 8 heads a processor, all of which find room, there was nothing to gain.
    """
    return num_heads > 8 * num_processors


def heads_per_program(group: int, num_tokens: int, head_tile: int) -> int:
    """Return how many of the ``group`` query heads of a KV head one program attends; a divisor of ``group``."""
    for heads in range(group, 1, -1):
        query_tile = triton.next_power_of_2(heads * num_tokens)
        if group % heads == 0 and query_tile * head_tile <= MAX_QUERY_ELEMENTS:
            return heads
    return 1


def num_processors(device: torch.device) -> int:
    """Return a CUDA device's multiprocessors, 1 elsewhere."""
    return 1 if device.type == "cpu" else gpu_properties(device).num_processors


def rows_tile(num_rows: int) -> int:
    """Return how many rows a program of decode or prefill attention looks through to find its own.

    Each size is a kernel of its own, compiled when it is first needed, and an engine has graphs of dozens of numbers of
    rows. A warp looks at 32 at once.
    """
    return next((size for size in (32, 256, 1024) if size >= num_rows), triton.next_power_of_2(num_rows))


def decode_kind(
    num_rows: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    num_processors: int,
    cache_dtype: torch.dtype | None = None,
    max_query_len: int = 1,
) -> Hashable:
    """Return what decode attention over so many rows is compiled for; equal where the kernels are the same.

    Args:
        num_processors: multiprocessors of the GPU.
        cache_dtype: None is ``dtype``.
    """
    group = heads_per_program(
        num_heads // num_kv_heads, max_query_len, max(triton.next_power_of_2(head_size), 16)
    )
    tunings = (
        decode_tuning(
            head_size,
            dtype,
            num_processors,
            cache_dtype=cache_dtype,
            num_rows=num_rows,
            num_queries=group * max_query_len,
            num_kv_heads=num_kv_heads,
            norms_heads=norms_heads,
        )
        for norms_heads in (False, True)
    )
    in_turns = begins_in_turns(num_rows * num_kv_heads, num_processors)
    return *tunings, in_turns, num_rows == 1, rows_tile(num_rows)


def row_counts(limit: int, kind: Callable[[int], Hashable] = lambda num_rows: None) -> list[int]:
    """Return numbers of rows up to ``limit``, one for each group that kernels are compiled apart for.

    Groups differ in the power of two that numbers are rounded up to, or in ``kind``. No kernel is specialized for a
    number of rows or tokens itself, nor for what divides it.
    """
    first_of_each: dict[Hashable, int] = {}
    for count in range(1, limit + 1):
        first_of_each.setdefault(((count - 1).bit_length(), kind(count)), count)
    return sorted(first_of_each.values())
