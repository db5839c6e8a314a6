"""One row of the kernel benchmark: the same work done by Rose and by its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROSE = "Rose"
COLD_BYTES = 256 << 20
"""Bytes that all input sets of a case move together at least: several times the L2 cache of any current GPU."""
MAX_SETS = 512

Launches = Sequence[Callable[[], Any]]


@dataclass(frozen=True)
class Contest:
    """Who does the work on the same inputs, and how their results are compared."""

    sides: dict[str, Launches]
    """Name -> one call per input set. Rose comes first."""
    reset: Callable[[], None] = lambda: None
    """Makes the first input set as good as new, and destroys what every side has to write."""
    observe: Callable[[str, Any], Sequence[torch.Tensor]] = lambda side, result: (result,)
    """Given a side's name and what its first call returned: all that it wrote."""
    complaint: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], str | None] | None = None
    """Given Rose's and a peer's tensors: what is wrong with them. None compares numbers within ``tolerance``."""
    tolerance: float = 0.0
    """Largest accepted ``|theirs - ours| / |ours|``."""

    def disagreement(self, peer: str) -> str | None:
        """Run Rose and ``peer`` on the first input set and say in what they differ, or None."""
        seen = []
        for side in (ROSE, peer):
            self.reset()
            result = self.sides[side][0]()
            seen.append([tensor.clone() for tensor in self.observe(side, result)])
        if self.complaint is not None:
            return self.complaint(*seen)
        for ours, theirs in zip(*seen, strict=True):
            error = relative_error(theirs, ours)
            if not error <= self.tolerance:
                return f"differs from Rose by {error:.1e}, at most {self.tolerance:.1e} expected"
        return None


@dataclass(frozen=True)
class KernelCase:
    """What is done, how much it moves, and who does it."""

    name: str
    num_bytes: int
    """Moved by one launch, each input read once and each output written once."""
    make: Callable[[int], Contest]
    """Given a number of input sets."""
    flops: int = 0

    @property
    def num_sets(self) -> int:
        """Input sets to rotate among, so that none is still in the L2 cache when its turn comes again."""
        return max(2, min(-(-COLD_BYTES // self.num_bytes), MAX_SETS))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``|actual - expected| / |expected|``; not a number where either is not finite."""
    actual, expected = actual.double(), expected.double()
    scale = expected.norm().item()
    return (actual - expected).norm().item() / scale if scale else actual.norm().item()
