"""Time the block manager's step: steady decode, every row rolling over, every row copying on write.

    python benchmarks/block_manager.py [--rows 256] [--block-size 16] [--repeats 200] [--json FILE]

One process, one core. Figures are microseconds for all rows together; the median and the 10th and 90th percentile over
the repeats. Integrity is checked after each scene, so a fast wrong answer fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rose_backend.block_manager import BlockManager


def timed_us(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e6


def running_rows(num_rows: int, block_size: int, prompt_len: int) -> tuple[BlockManager, np.ndarray]:
    """Return a manager with ``num_rows`` sequences that have computed ``prompt_len`` tokens each."""
    rng = np.random.default_rng(0)
    manager = BlockManager(
        num_blocks=num_rows * (2048 // block_size) + 1,
        block_size=block_size,
        max_num_seqs=num_rows,
        max_model_len=1024,
    )
    rows = []
    for _ in range(num_rows):
        prompt = rng.integers(0, 50257, prompt_len).astype(np.int32)
        admission = manager.add(prompt)
        assert admission is not None
        row = np.array([admission.row])
        assert manager.reserve(row, prompt_len).ok
        manager.commit(row, prompt_len, prompt)
        rows.append(admission.row)
    return manager, np.array(rows)


def steady_decode(num_rows: int, block_size: int, repeats: int) -> list[float]:
    """Reserve and commit one token per row; rollovers come once per block, as in real decoding."""
    manager, rows = running_rows(num_rows, block_size, 64)
    tokens = np.arange(num_rows, dtype=np.int32)
    times = []
    for _ in range(repeats):
        times.append(timed_us(lambda: (manager.reserve(rows, 1), manager.commit(rows, 1, tokens))))
    manager.check_integrity()
    return times


def all_roll_over(num_rows: int, block_size: int, repeats: int) -> list[float]:
    """Reserve the first token behind a full block for every row."""
    manager, rows = running_rows(num_rows, block_size, 4 * block_size)
    times = []
    for _ in range(repeats):
        times.append(timed_us(lambda: manager.reserve(rows, 1)))
        manager.roll_back(rows)
    manager.check_integrity()
    return times


def all_copy_on_write(num_rows: int, block_size: int, repeats: int) -> list[float]:
    """Reserve the first token of ``num_rows`` forks of one part-filled tail."""
    times = []
    for _ in range(repeats):
        wide = BlockManager(
            num_blocks=2 * num_rows + 8, block_size=block_size, max_num_seqs=num_rows + 1, max_model_len=1024
        )
        prompt = np.arange(block_size + block_size // 2, dtype=np.int32)
        admission = wide.add(prompt)
        assert admission is not None
        parent = np.array([admission.row])
        assert wide.reserve(parent, len(prompt)).ok
        wide.commit(parent, len(prompt), prompt)
        children = wide.fork(int(parent[0]), num_rows)
        assert children is not None
        times.append(
            timed_us(lambda wide=wide, children=children: (wide.reserve(children, 1), wide.take_clone_plan()))
        )
        assert wide.stats.clones == num_rows
        wide.check_integrity()
    return times


SCENES = {
    "steady decode: reserve + commit": steady_decode,
    "every row rolls over: reserve": all_roll_over,
    "every row copies on write: reserve + plan": all_copy_on_write,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args()
    table = Table(
        "scene", "p10 us", "p50 us", "p90 us", title=f"{options.rows} rows, blocks of {options.block_size}"
    )
    results = {}
    for name, scene in SCENES.items():
        times = scene(options.rows, options.block_size, options.repeats)
        p10, p50, p90 = (float(np.percentile(times, share)) for share in (10, 50, 90))
        results[name] = {"p10_us": p10, "p50_us": p50, "p90_us": p90}
        table.add_row(name, f"{p10:.1f}", f"{p50:.1f}", f"{p90:.1f}")
    Console().print(table)
    if options.json:
        report = {
            "command": " ".join(sys.argv),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "processor": platform.machine(),
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
