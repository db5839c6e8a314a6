"""One row of the kernel benchmark: the same work done by Rose and by its peers, and how it is timed."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROSE = "Rose"
COLD_BYTES = 256 << 20
"""Bytes that all input sets of a case move together at least: several times the L2 cache of any current GPU."""
MAX_SETS = 512

Launches = Sequence[Callable[[], Any]]

MISSING: dict[str, str] = {}
"""Peer -> why it is left out."""


def add_peer(sides: dict[str, Launches], peer: str, make: Callable[[], Launches]) -> None:
    """Add what ``make`` returns to ``sides``; where what it imports is not installed, note why."""
    try:
        sides[peer] = make()
    except ImportError as error:
        MISSING[peer] = str(error)


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


# A millisecond of work per sample, so that the events around it do not count.
_MIN_SAMPLE_US = 1000.0


class LaunchGraph:
    """All input sets of one side in a CUDA graph, one after the other."""

    def __init__(self, launches: Launches) -> None:
        self._num_launches = len(launches)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for launch in launches[:2]:
                launch()
            stream.synchronize()
            with torch.cuda.graph(self._graph, stream=stream):
                for launch in launches:
                    launch()
        self._in_a_row = 1
        self.sample()
        self._in_a_row = max(1, round(_MIN_SAMPLE_US / (self.sample() * self._num_launches)))

    def sample(self) -> float:
        """Return microseconds per launch."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(self._in_a_row):
            self._graph.replay()
        stop.record()
        stop.synchronize()
        return 1000 * start.elapsed_time(stop) / (self._num_launches * self._in_a_row)


def copy_bandwidth() -> float:
    """Return what a large copy on the device reaches, in bytes read and written per second."""
    source = torch.randint(-(2**31), 2**31, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # Not copy_: within a graph that is the copy engines' work, which are slower than the processors.
    graph = LaunchGraph([functools.partial(torch.bitwise_not, source, out=target)])
    return 2 * source.nbytes / statistics.median(graph.sample() for _ in range(11)) * 1e6
