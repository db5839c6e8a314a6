"""Timing on one core: alternated sides, medians with spread, no garbage collection inside a measurement."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

Samples = dict[str, list[float]]


def pin_to_one_core() -> int:
    """Bind this process to the highest core it may use; return it."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def timed_us(function: Callable[[], object]) -> float:
    """Return how long one call takes, in microseconds."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e6


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Set aside what is there and collect nothing until the end, as vLLM does with its start-up objects.

    A collection over millions of block objects would hit one side at random, and would empty the processor's caches.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def alternate(sides: Mapping[str, Callable[[], Samples]], repeats: int) -> dict[str, Samples]:
    """Run every side ``repeats`` times in turns, so that a slow spell of the machine meets all of them.

    Returns: side -> figure -> all samples.
    """
    samples: dict[str, Samples] = {name: {} for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            for figure, values in run().items():
                samples[name].setdefault(figure, []).extend(values)
    return samples


def spread(values: list[float]) -> dict[str, float]:
    """Return median, 10th and 90th percentile, minimum and number of ``values``."""
    p10, median, p90 = np.percentile(values, (10, 50, 90)).tolist()
    return {"median": median, "p10": p10, "p90": p90, "min": float(min(values)), "samples": len(values)}


def spreads(samples: Mapping[str, Samples]) -> dict[str, dict[str, dict[str, float]]]:
    """Return ``spread`` of each side's figures."""
    return {
        side: {name: spread(values) for name, values in figures.items()} for side, figures in samples.items()
    }
