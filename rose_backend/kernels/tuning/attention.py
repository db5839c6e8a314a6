"""What decides the speed of attention on a GPU, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch

from rose_backend.kernels.gpu_properties import gpu_properties
from rose_backend.kernels.tuning.measured import Facts, Table, constants, next_power_of_2

MAX_QUERY_ELEMENTS = 8192
"""Numbers that one program attends, unless one head's tokens are more: they stay in registers."""


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How decode attention's work is divided and scheduled."""

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
    """Tiles in flight at once: through shared memory, or lane by lane into registers, besides the one attended."""
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
    with many rows it and the kernels after it would compete with these for memory."""


@lru_cache(maxsize=4096)
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
        norms_heads: query and key heads are normed.
    """
    num_heads = num_rows * num_kv_heads
    return _DECODE.choose(
        {
            "bits": 8 * dtype.itemsize,
            "cache_bits": 8 * (cache_dtype or dtype).itemsize,
            "head_size": head_size,
            "rows": num_rows,
            "queries": num_queries,
            "even_heads": num_kv_heads % 2 == 0,
            "norms": norms_heads,
            "heads_per_processor": num_heads / num_processors,
            "processors": num_processors,
        }
    )


def _query_warps(least: int, facts: Facts, values: object) -> int:
    """Return the warps of a program, each of which has registers for about 1,024 attended numbers."""
    head_tile = max(next_power_of_2(int(facts["head_size"])), 16)
    numbers: int = next_power_of_2(int(facts["queries"])) * head_tile
    return min(max(numbers // 1024, least), 8)


_DECODE = Table(
    "decode attention",
    DecodeTuning,
    (
        "bits",
        "cache_bits",
        "head_size",
        "rows",
        "queries",
        "even_heads",
        "norms",
        "heads_per_processor",
    ),
    rules={
        "processors": lambda number, facts, values: number * int(facts["processors"]),
        "query_warps": _query_warps,
    },
)


_MOST_AT_ONCE = constants("decode attention in turns")["heads_per_processor"]


def begins_in_turns(num_heads: int, num_processors: int) -> bool:
    """Return whether programs of decode attention, one per KV head and row, are too many to run all at once."""
    return num_heads > _MOST_AT_ONCE * num_processors


def heads_per_program(group: int, num_tokens: int, head_tile: int) -> int:
    """Return how many of the ``group`` query heads of a KV head one program attends; a divisor of ``group``."""
    for heads in range(group, 1, -1):
        query_tile = next_power_of_2(heads * num_tokens)
        if group % heads == 0 and query_tile * head_tile <= MAX_QUERY_ELEMENTS:
            return heads
    return 1


def num_processors(device: torch.device) -> int:
    """Return a CUDA device's multiprocessors, 1 elsewhere."""
    return 1 if device.type == "cpu" else gpu_properties(device).num_processors


def rows_tile(num_rows: int) -> int:
    """Return how many rows a program of decode or prefill attention looks through to find its own.

    Each size is a separate kernel, compiled when it is first needed, and an engine has graphs of dozens of numbers of
    rows. A warp looks at 32 at once.
    """
    return next((size for size in (32, 256, 1024) if size >= num_rows), next_power_of_2(num_rows))


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
    """Return what decode attention over ``num_rows`` rows is compiled for; equal where the kernels are the same.

    Args:
        num_processors: multiprocessors of the GPU.
        cache_dtype: None is ``dtype``.
    """
    group = heads_per_program(num_heads // num_kv_heads, max_query_len, max(next_power_of_2(head_size), 16))
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


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Of prefill attention. Tiles are powers of two of at least 16."""

    query_tile: int
    tile: int
    """Keys per iteration."""
    num_warps: int
    num_stages: int
    by_descriptor: bool
    """Load the chunk's keys and values through tensor descriptors, by the copy engine of compute capability 9.0. Only
    for 16-bit types and heads of a power of two."""
    split: bool
    """Attend the chunk's tiles before the queries' own in a separate loop, without a causal mask."""


@lru_cache(maxsize=1024)
def prefill_tuning(
    mean_query_len: float,
    head_size: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    is_describable: bool,
) -> PrefillTuning:
    """Return what was fastest on an H200 for this shape; elsewhere what fits the registers.

    Args:
        is_describable: whether tensor descriptors of the chunk's keys and values are possible.
    """
    major, minor = capability
    return _PREFILL.choose(
        {
            "bits": 8 * dtype.itemsize,
            "query_len": mean_query_len,
            "head_size": head_size,
            "capability": 10 * major + minor,
            "describable": is_describable,
        }
    )


_PREFILL = Table(
    "prefill attention", PrefillTuning, ("bits", "query_len", "head_size", "capability", "describable")
)
TUNED_QUERY_LENS = (1, *_PREFILL.steps("query_len"))
"""Mean query lengths from which on the choice changes, for one shape or another."""
