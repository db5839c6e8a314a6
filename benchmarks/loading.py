"""Time how a checkpoint's weights reach the device, beside reading its files and nothing else.

    python -m benchmarks.loading [--shape llama-8b] [--repeats 3] [--json FILE] [--quick]

Both sides read the same files, in turns: first dropped from the page cache, as far as the system does that, then from
it. Reading uses as many threads as the loader, into one buffer each. The growth of this process's own host memory is
watched while weights load; on a CPU the weights themselves are part of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports.engines import loading_bars, loading_table
from benchmarks.reports.text import publish
from benchmarks.support.checkpoint import LLAMA_8B, SHAPES, checkpoint
from benchmarks.support.cli import (
    DEFAULT,
    QUICK_MODEL,
    add_device_options,
    at_least,
    new_parser,
    set_device_defaults,
)
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.timing import spread
from rose_backend.models.base import load_model
from rose_backend.models.streaming import BUFFER_BYTES, usual_num_readers

_WATCH_S = 0.01


def read_files(paths: Sequence[Path]) -> None:
    """Read all bytes of files, with the threads and pieces of the loader."""
    pieces = [(path, offset) for path in paths for offset in range(0, path.stat().st_size, BUFFER_BYTES)]
    shares = [pieces[start :: usual_num_readers()] for start in range(usual_num_readers())]

    def read(share: Sequence[tuple[Path, int]]) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        for path, offset in share:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                file.readinto(buffer)

    with ThreadPoolExecutor(usual_num_readers()) as pool:
        list(pool.map(read, shares))


def forget_files(paths: Sequence[Path]) -> None:
    """Ask the system to drop files from its page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def own_memory_bytes() -> int:
    """Return the host memory that belongs to this process alone; files that it maps do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class MemoryWatch:
    """How far this process's own memory grows inside a block."""

    def __enter__(self) -> MemoryWatch:
        self._start = self._peak = own_memory_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(_WATCH_S):
            self._peak = max(self._peak, own_memory_bytes())

    @property
    def growth_bytes(self) -> int:
        """The largest that was seen."""
        return self._peak - self._start


def measure(model: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rates of reading and of loading for each state of the page cache, and how memory grows."""
    paths = sorted(Path(model).glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in paths)
    memory: list[float] = []

    def load() -> None:
        with MemoryWatch() as watch:
            loaded = load_model(model, dtype=options.dtype, device=options.device)
            if options.device == "cuda":
                torch.cuda.synchronize()
        memory.append(float(watch.growth_bytes))
        del loaded

    def rate(run: Callable[[], None], *, forget: bool) -> float:
        if forget:
            forget_files(paths)
        start = time.perf_counter()
        run()
        return num_bytes / (time.perf_counter() - start)

    load()  # imports, the device's context and its allocator
    memory.clear()
    for caches in ("cold", "warm"):
        rates: dict[str, list[float]] = {"read": [], "load": []}
        for _ in range(options.repeats):
            for side, run in (("read", lambda: read_files(paths)), ("load", load)):
                rates[side].append(rate(run, forget=caches == "cold"))
        yield {
            "caches": caches,
            "num_bytes": num_bytes,
            **{f"{side}_bytes_per_s": spread(values) for side, values in rates.items()},
            "memory_growth_bytes": spread(memory),
            "memory_growth_max_bytes": max(memory),
        }


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=at_least(1), default=3, help=f"of each side {DEFAULT}")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--model", metavar="PATH", help="local directory; default: random weights")
    weights.add_argument("--shape", choices=SHAPES, default=LLAMA_8B, help=f"of random weights {DEFAULT}")
    add_device_options(parser)
    options = parser.parse_args(arguments)
    set_device_defaults(options)
    options.model = options.model or (QUICK_MODEL if options.quick else None)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Read and load, print, write."""
    options = parse_options(arguments)
    with checkpoint(options.model, options.shape) as model:
        rows = list(measure(model, options))
    name = options.model or f"random weights, {SHAPES[options.shape]}'s shapes"
    report = {
        "benchmark": "loading",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": name,
            "dtype": options.dtype,
            "repeats": options.repeats,
            "readers": usual_num_readers(),
        },
        "rows": rows,
        "bars": loading_bars(rows) if options.device == "cuda" else [],
    }
    publish(report, loading_table(report), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
