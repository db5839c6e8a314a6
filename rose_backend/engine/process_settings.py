"""Settings of the whole process while an engine serves: garbage collection, interpreter lock, memory, torch's threads.

Also how long the process has been running, for reports of start-up times.

torch is imported inside functions: the process that only serves HTTP uses this module, too, and never loads torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rose_backend.config import EngineConfig, num_usable_cores
from rose_backend.errors import ConfigError

if TYPE_CHECKING:
    import torch

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Of the lines that commands and the engine process write."""
_SWITCH_INTERVAL_S = 200e-6
"""``sys.setswitchinterval``. At Python's default of 5 ms the step loop, which releases the interpreter lock several
times in a step, would wait for the output thread and for stream consumers longer than a step takes."""

_imports: dict[str, float] = {}
_lock = threading.Lock()
_num_servers = 0
_num_short_intervals = 0
_interval_before = 0.0


def process_age_s() -> float:
    """Return for how many seconds this process has run, the start of the interpreter included; to 0.01 s."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def note_imports() -> None:
    """Let the report of the next engine's start begin with this process: all until now counts as imports.

    For commands, whose user waits for these, too.
    """
    _imports["imports"] = process_age_s()


def take_imports() -> dict[str, float]:
    """Return what ``note_imports`` has noted, as a part of the start-up report; once."""
    noted = dict(_imports)
    _imports.clear()
    return noted


def begin_serving() -> None:
    """Exclude all existing objects from garbage collection, and shorten the interpreter's switch interval.

    A full collection over the half a million objects of PyTorch and a model stops all threads for 60 to 90 ms. Garbage
    of later requests is still collected. Both settings hold for the whole process, until ``end_serving``.
    """
    global _num_servers
    gc.collect()
    with _lock:
        gc.freeze()
        _num_servers += 1
    _shorten_switch_interval()


def end_serving() -> None:
    """Undo ``begin_serving`` when the last server has ended."""
    global _num_servers
    _restore_switch_interval()
    with _lock:
        _num_servers -= 1
        if not _num_servers:
            gc.unfreeze()


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Shorten the interpreter's switch interval in the whole process."""
    _shorten_switch_interval()
    try:
        yield
    finally:
        _restore_switch_interval()


def _shorten_switch_interval() -> None:
    global _num_short_intervals, _interval_before
    with _lock:
        if not _num_short_intervals:
            _interval_before = sys.getswitchinterval()
            sys.setswitchinterval(min(_interval_before, _SWITCH_INTERVAL_S))
        _num_short_intervals += 1


def _restore_switch_interval() -> None:
    global _num_short_intervals
    with _lock:
        _num_short_intervals -= 1
        if not _num_short_intervals:
            sys.setswitchinterval(_interval_before)


def return_free_memory() -> None:
    """Give memory that native code has freed back to the system, without holding the interpreter lock.

    The C library keeps what a thread has freed for that thread: after a text of 16 MiB, 300 MiB in each that tokenized
    one. Does nothing where the C library is not glibc.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


SMALL_MODEL = 64 << 20
"""Weights below which one thread computes everything: small operations win nothing by a second thread, and OpenMP
threads spin until the system gives each a core. On two busy cores, decode steps of 1 M weights took 15 times as long
with two threads, of 14 M twice, of 124 M no longer. A rule, because a measurement at start-up depends on other load.
"""
WEIGHTS_PER_THREAD = 16 << 20
"""Weights of larger models per thread: 7 threads for 124 M on 16 cores; 8 take a third of one thread's time."""


@dataclass(frozen=True, slots=True)
class CpuThreads:
    """A number of threads, and why it was chosen."""

    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} ({self.reason})"

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Make torch use them in this thread, and restore what was before: the process may have other uses for torch.

        Set in each step, which takes a microsecond: torch keeps the number per thread, and any thread may run steps.
        """
        import torch

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
    ``SMALL_MODEL``, and one for every ``WEIGHTS_PER_THREAD`` above, at most half as many as usable cores: the other
    half is for other programs.

    Args:
        num_weights: of the model, shared ones counted once.
    """
    import torch

    if device.type != "cpu":
        return None
    if config.num_threads is not None:
        return CpuThreads(config.num_threads, "num_threads")
    if os.environ.get("OMP_NUM_THREADS"):
        return CpuThreads(torch.get_num_threads(), "OMP_NUM_THREADS")
    # Torch's own number is lower where cores are threads of one another, or where the environment says so.
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
