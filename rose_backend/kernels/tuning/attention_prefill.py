"""What decides how fast prefill attention is, for each shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """What decides speed only. Tiles are powers of two of at least 16."""

    query_tile: int
    tile: int
    """Keys per iteration."""
    num_warps: int
    num_stages: int
    by_descriptor: bool
    """Load the chunk's keys and values through tensor descriptors, by the copy engine of compute capability 9.0. Only
    for 16-bit types and heads of a power of two."""
    split: bool
    """Attend the chunk's tiles before the queries' own in a loop of their own, without a causal mask."""


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
    pointers = {"by_descriptor": False, "split": True}
    if dtype.itemsize == 4:
        num_warps = 4 if head_size <= 128 else 8
        return PrefillTuning(16, 16, num_warps, 1, by_descriptor=False, split=False)
    if mean_query_len <= 16 and head_size <= 64:
        return PrefillTuning(16, 32, num_warps=2, num_stages=3, by_descriptor=False, split=False)
    if mean_query_len <= 16:
        return PrefillTuning(16, 16, num_warps=4, num_stages=2, by_descriptor=False, split=False)
    # Descriptors are worth their start at every new tile where chunks are long.
    worth_from = {64: 512, 128: 128}.get(head_size, math.inf)
    if is_describable and capability >= (9, 0) and mean_query_len >= worth_from:
        return PrefillTuning(64, 64, num_warps=4, num_stages=3, by_descriptor=True, split=True)
    if head_size <= 64:
        return PrefillTuning(64, 32, num_warps=4, num_stages=3, **pointers)
    if head_size <= 128 and capability < (9, 0):
        return PrefillTuning(64, 32, num_warps=4, num_stages=2, **pointers)
    if head_size <= 128:
        return PrefillTuning(128, 64, num_warps=8, num_stages=3, **pointers)
    if head_size <= 256:
        return PrefillTuning(64, 32, num_warps=8, num_stages=2, **pointers)
    return PrefillTuning(32, 16, num_warps=8, num_stages=2, **pointers)


TUNED_QUERY_LENS = (1, 17, 128, 512)
"""Mean query lengths from which on tunings change, for one shape or another."""
