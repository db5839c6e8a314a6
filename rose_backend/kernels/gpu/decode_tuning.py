"""What decides the speed of decode attention on a GPU, and nothing else."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton


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
    max_registers: int | None = None
    """Per thread. The assembler's own choice may be a few too few."""


def decode_tuning(
    head_size: int,
    dtype: torch.dtype,
    num_processors: int,
    *,
    cache_dtype: torch.dtype | None = None,
    num_rows: int = 64,
    num_queries: int = 1,
) -> DecodeTuning:
    """Return what was fastest on an H200 for this shape, or for the nearest that was measured.

    Args:
        dtype: of the query.
        cache_dtype: None is ``dtype``.
        num_queries: query heads times new tokens that one program attends.
    """
    head_tile = max(triton.next_power_of_2(head_size), 16)
    if dtype.itemsize == 4:
        return DecodeTuning(
            tile=max(2048 // head_tile, 16),
            min_split=64,
            num_programs=4 * num_processors,
            use_dot=False,
            num_warps=4,
            num_stages=1,
        )
    # A warp has registers for about 1024 attended numbers.
    query_warps = triton.next_power_of_2(num_queries) * head_tile // 1024
    if head_tile <= 64:
        # With a single row, what counts is how soon each program is done.
        return DecodeTuning(
            tile=64,
            min_split=128,
            num_programs=4 * num_processors,
            use_dot=True,
            num_warps=min(max(query_warps, 4 if num_rows == 1 else 2), 8),
            num_stages=3,
        )
    is_large = num_queries > 16 or (cache_dtype is not None and cache_dtype.itemsize == 1)
    tile = 8192 if is_large and head_tile == 128 else 4096
    return DecodeTuning(
        tile=tile // head_tile,
        min_split=128,
        num_programs=2 * num_processors,
        use_dot=True,
        num_warps=min(max(query_warps, 4), 8),
        num_stages=3 if tile == 8192 else 4,
        max_registers=128 if head_tile == 128 and not is_large else None,
    )


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return a CUDA device's multiprocessors, 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
