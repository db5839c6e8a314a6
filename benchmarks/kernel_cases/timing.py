"""Time launches by replaying captured graphs over several input sets, so that no set is still in the L2 cache."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Protocol

import torch

from benchmarks.kernel_cases.case import Launches

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


class Timed(Protocol):
    """All input sets of one side, ready to be timed."""

    def sample(self) -> float:
        """Return microseconds per launch."""


def time_alternated(graphs: Mapping[str, Timed], repeats: int, samples: int) -> dict[str, list[float]]:
    """Return sorted microseconds per launch of each side, taken in turns: ``repeats`` times ``samples`` of each."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            times[name] += [graph.sample() for _ in range(samples)]
    return {name: sorted(values) for name, values in times.items()}


def percentile(times: list[float], share: float) -> float:
    """Return an entry of the sorted ``times``."""
    return times[round(share * (len(times) - 1))]


def copy_bandwidth() -> float:
    """Return what a large copy on the device reaches, in bytes read and written per second."""
    source = torch.randint(-(2**31), 2**31, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # Not copy_: within a graph that is the copy engines' work, which are slower than the processors.
    graph = LaunchGraph([functools.partial(torch.bitwise_not, source, out=target)])
    times = time_alternated({"copy": graph}, 1, 11)["copy"]
    return 2 * source.nbytes / percentile(times, 0.5) * 1e6
