"""How many threads torch's operations on a CPU are split over, and only during an engine's own steps.

Threads of one operation wait for each other, and OpenMP's do so by spinning. Where another program has a core, that
wait ends when the system takes the core from it: milliseconds, many times a step. A small model's operations take
microseconds and win nothing by a second thread, so a step became 10 to 50 times slower as soon as the machine was
busy. Measuring at start-up which number is best would tell how busy the machine was then, so it is a rule.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rose_backend.config import EngineConfig
from rose_backend.errors import ConfigError

SMALL_MODEL = 64 << 20
"""Weights below which one thread computes everything. On two cores that others used as well, decode steps of 1 M
weights took 15 times as long with two threads as with one, of 14 M twice and now and then 15 times, and of 124 M no
longer; that model's prompts took less. The border between them is a guess on the safe side.
"""
WEIGHTS_PER_THREAD = 16 << 20
"""One thread for each time as many weights of larger models: 7 for 124 M on 16 cores. Decode steps of those took a
third of the time with 8 threads on 16 idle cores, and a quarter with 16.
"""
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class CpuThreads:
    """A number of threads, and who has chosen it."""

    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} ({self.reason})"

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Make torch use them in this thread, and restore what was before: the process may have other uses for torch.

        Twice half a microsecond where there is something to change. The number is a thread's own once that thread has
        used torch, which is why it is not set once and for all: steps may be run by any thread. Another thread that
        uses torch for the first time during a step takes this number over.
        """
        before = torch.get_num_threads()
        if before == self.count:
            yield
            return
        torch.set_num_threads(self.count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def choose_cpu_threads(config: EngineConfig, device: torch.device, num_weights: int) -> CpuThreads | None:
    """Return the threads of a step on a CPU; None on any other device, which leaves torch alone.

    ``num_threads`` comes first, then OMP_NUM_THREADS, which torch has read. Otherwise it is one thread below
    ``SMALL_MODEL``, and for others one for every ``WEIGHTS_PER_THREAD``, at most one for every two cores that the
    process has and torch would use. The other half is for whoever else runs: on two cores beside two endless loops and
    a test run, 124 M weights took 5 s with one thread and 18 s with two.

    Args:
        num_weights: of the model, shared ones counted once.
    """
    if device.type != "cpu":
        return None
    if config.num_threads is not None:
        return CpuThreads(config.num_threads, "num_threads")
    if os.environ.get("OMP_NUM_THREADS"):
        return CpuThreads(torch.get_num_threads(), "OMP_NUM_THREADS")
    # Torch's own number is lower where cores are threads of one another, or where somebody has said so.
    num_cores = min(num_usable_cores(), torch.get_num_threads())
    count = 1
    if num_weights >= SMALL_MODEL:
        count = max(min(num_weights // WEIGHTS_PER_THREAD, num_cores // 2), 1)
    return CpuThreads(count, f"for {num_weights / 1e6:,.0f} M weights on {num_cores} cores")


def check_num_threads(config: EngineConfig, device: torch.device) -> None:
    """Refuse a number of threads where nothing would use it.

    Raises:
        ConfigError: ``num_threads`` is given and the device is no CPU.
    """
    if config.num_threads is not None and device.type != "cpu":
        raise ConfigError(
            f"num_threads: got {config.num_threads} while device is {device.type}, allowed is a number with device cpu"
        )


def num_usable_cores() -> int:
    """Return the cores that this process may use: its affinity, and the CPU quota of its container, rounded down."""
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return max(min(num_cores, _cpu_quota() or num_cores), 1)


def _cpu_quota() -> int | None:
    """Return the whole cores of the control group's quota (version 2); None without one."""
    try:
        quota, period = _CPU_MAX.read_text().split()
        return max(int(quota) // int(period), 1)
    except (OSError, ValueError, ZeroDivisionError):  # "max 100000" is no limit
        return None
