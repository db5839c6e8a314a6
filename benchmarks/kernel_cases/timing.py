"""Time launches by replaying a captured graph over several input sets, so that no set is still in the L2 cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

COLD_BYTES = 256 << 20
"""Bytes that all input sets of a case move together at least: several times the L2 cache of any current GPU."""


@dataclass(frozen=True)
class KernelCase:
    """One row of the table."""

    name: str
    num_bytes: int
    """Moved by one launch, each input read once and each output written once."""
    make_launches: Callable[[int], Sequence[Callable[[], object]]]
    """Given a number of input sets, returns one launch for each."""
    flops: int = 0
    sets: int | None = None
    """Input sets; None takes as many as ``COLD_BYTES`` asks for."""

    @property
    def num_sets(self) -> int:
        """Input sets to rotate among."""
        return self.sets or max(2, min(-(-COLD_BYTES // max(self.num_bytes, 1)), 512))


def time_case(case: KernelCase, repeats: int) -> list[float]:
    """Return microseconds per launch, one figure per replay of a graph that runs each input set once."""
    launches = case.make_launches(case.num_sets)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        for _ in range(3):
            graph.replay()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, stop in events:
            start.record()
            graph.replay()
            stop.record()
        stream.synchronize()
    return sorted(1000 * start.elapsed_time(stop) / len(launches) for start, stop in events)


def copy_bandwidth() -> float:
    """Return what a large copy on the device reaches, in bytes read and written per second."""
    source = torch.randint(-(2**31), 2**31, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # Not copy_: within a graph that is the copy engines' work, which are slower than the processors.
    copy = functools.partial(torch.bitwise_not, source, out=target)
    case = KernelCase("copy", 2 * source.nbytes, lambda _: [copy], sets=1)
    return case.num_bytes / time_case(case, 10)[5] * 1e6
