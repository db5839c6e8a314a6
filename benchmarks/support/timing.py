"""Timing on one core: alternated sides, medians with spread, no garbage collection inside a measurement."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Samples = dict[str, list[float]]


def pin_to_one_core() -> int | None:
    """Bind this process to the highest core it may use; return it, or None where the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return None
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
    """Set aside what is there and collect nothing until the end.

    A collection over millions of block objects would hit one side at random, and would empty the processor's caches.
    vLLM freezes its start-up objects for the same reason.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def alternate(
    sides: Mapping[str, Callable[[], Mapping[str, list[float]]]], repeats: int
) -> dict[str, Samples]:
    """Run every side ``repeats`` times in turns, so that a slow spell of the machine meets all of them.

    Args:
        sides: name -> function that returns samples by figure.

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
    p10, median, p90 = (float(np.percentile(values, share)) for share in (10, 50, 90))
    return {"median": median, "p10": p10, "p90": p90, "min": float(min(values)), "samples": len(values)}


def spreads(samples: Mapping[str, Samples]) -> dict[str, dict[str, Any]]:
    """Return ``spread`` of each side's figures."""
    return {
        side: {name: spread(values) for name, values in figures.items()} for side, figures in samples.items()
    }
