"""How the products of a mixture of experts are cut into programs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """How one product is cut into programs."""

    block_m: int
    """Pairs of token and expert of a program."""
    block_n: int
    """Columns of the result of a program; of a gated product as many of the gate and of its factor."""
    block_k: int
    """Depth that is loaded at once."""
    num_warps: int = 4
    num_stages: int = 4
    weights_left: bool = False
    """Weights are the left factor, for which tensor cores have taller tiles: for fewer rows than columns."""
    use_tma: bool = False
    """Tiles of the weights are copied by the tensor memory accelerator."""


@lru_cache(maxsize=256)
def choose_config(
    num_pairs: int, num_experts: int, *, gated: bool, exact: bool, can_use_tma: bool
) -> ExpertConfig:
    """Return the cut of a product of pairs of token and expert.

    Args:
        num_pairs: tokens of the step times the experts of each.
        exact: float32 inputs, which are multiplied without tensor cores.
        can_use_tma: the GPU has a tensor memory accelerator, and the weights lie as it needs them.
    """
    # Of a gated product there are two tiles of weights.
    halves = 2 if gated else 1
    if exact:
        return ExpertConfig(8, 16, 32, num_stages=2)
    pairs_per_expert = num_pairs / num_experts
    if can_use_tma:
        return _with_tma(pairs_per_expert, gated=gated)
    if pairs_per_expert <= 24:
        return ExpertConfig(16 if pairs_per_expert <= 8 else 32, 128 // halves, 64, weights_left=True)
    if pairs_per_expert <= 64:
        return ExpertConfig(64, 128 // halves, 64)
    return ExpertConfig(128, 128 // halves, 64, num_warps=8, num_stages=3)


def _with_tma(pairs_per_expert: float, *, gated: bool) -> ExpertConfig:
    """Measured on an H200 with Qwen3 30B-A3B's shapes: 2,048 columns, 128 experts of 768, of which a token takes 8.

    Small programs leave less of the GPU idle where one product takes over from the other: with 8 tokens a layer took
    139 us by those below, of which three or four find room on a processor, and 145 by programs of 80 KiB and more, of
    which two do.
    """
    if pairs_per_expert > 64:
        return ExpertConfig(128, 128 if gated else 256, 64, num_warps=8, use_tma=True)
    if pairs_per_expert > 16:
        return ExpertConfig(64, 64 if gated else 128, 64, num_stages=3, use_tma=True)
    if gated:
        return ExpertConfig(16, 32, 128, num_warps=2, num_stages=3, weights_left=True, use_tma=True)
    block_m = 16 if pairs_per_expert <= 8 else 32
    return ExpertConfig(block_m, 64, 64, num_stages=5, weights_left=True, use_tma=True)


TUNED_PAIRS_PER_EXPERT = (8, 16, 24, 64)
"""Pairs of token and expert, on average over the experts, above which cuts change, on one GPU or another."""
