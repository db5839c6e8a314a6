"""How the products of a mixture of experts are tiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rose_backend.kernels.tuning.measured import Table


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """How one product is divided among programs."""

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


@lru_cache(maxsize=1024)
def choose_config(
    num_pairs: int, num_experts: int, *, gated: bool, exact: bool, can_use_tma: bool
) -> ExpertConfig:
    """Return the measured configuration of a product of pairs of token and expert.

    Args:
        num_pairs: tokens of the step times the experts of each.
        exact: float32 inputs, which are multiplied without tensor cores.
        can_use_tma: the GPU has a tensor memory accelerator, and the weights lie as it needs them.
    """
    pairs_per_expert = num_pairs / num_experts
    return _TABLE.choose(
        {"exact": exact, "tma": can_use_tma, "gated": gated, "pairs_per_expert": pairs_per_expert}
    )


_TABLE = Table("experts", ExpertConfig, ("exact", "tma", "gated", "pairs_per_expert"))
TUNED_PAIRS_PER_EXPERT = tuple(int(pairs) for pairs in _TABLE.borders("pairs_per_expert"))
"""Pairs of token and expert, on average over the experts, above which the choice changes, on one GPU or another."""
