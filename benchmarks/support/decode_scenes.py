"""Scenes about running requests: steady decode, rollovers, copy-on-write, and what grows with pool and length."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.decode_loops import DecodeLoop, RoseCore, VllmManager, run_steps
from benchmarks.support.timing import alternate, spread, spreads, timed_us
from rose_backend.block_manager import BlockManager

SIDES = ("rose_core", "rose_in_vllm", "stock")
# Of one block: array bytes of Rose, twice; vLLM's block object. Generous, to be refused before memory runs out.
_SETUP_BYTES_PER_BLOCK = {"rose_core": 150, "rose_in_vllm": 150, "stock": 400}


def make_loop(side: str, **arguments: Any) -> DecodeLoop:
    """Return the decode loop of one of ``SIDES``."""
    return RoseCore(**arguments) if side == "rose_core" else VllmManager(side, **arguments)


def steady_decode(
    num_rows: int,
    block_size: int,
    repeats: int,
    *,
    num_cycles: int,
    evicting: bool = False,
    lookup: bool = False,
) -> dict[str, Any]:
    """Decode rows that cross block boundaries together; microseconds per step for all rows.

    Args:
        num_cycles: blocks each row fills per repeat.
        evicting: the pool is full of cached blocks, so every new block pushes one out; else none has to go.
        lookup: both managers with vLLM's interface also look a waiting request up in every step.
    """
    prompt_len = 4 * block_size
    blocks_per_run = num_rows * (prompt_len // block_size + num_cycles + 2)
    num_warm_ups = 2 if evicting else 0
    arguments: dict[str, Any] = {
        "num_blocks": blocks_per_run * (1 if evicting else repeats) + 8,
        "block_size": block_size,
        "prompt_lens": [prompt_len] * num_rows,
        "max_model_len": prompt_len + (num_cycles + 2) * block_size,
    }
    if lookup:
        arguments["lookup"] = True
    loops = {side: make_loop(side, **arguments) for side in (SIDES[1:] if lookup else SIDES)}
    runs = {side: _runner(loop, prompt_len, block_size, num_cycles) for side, loop in loops.items()}
    alternate(runs, num_warm_ups)
    samples = alternate(runs, repeats)
    for loop in loops.values():
        _check(loop)
        evictions = _core_of(loop).stats.evictions if _core_of(loop) else None
        assert evictions is None or bool(evictions) == evicting, f"{evictions} evictions"
    return spreads(samples)


def _runner(
    loop: DecodeLoop, prompt_len: int, block_size: int, num_cycles: int
) -> Callable[[], dict[str, list[float]]]:
    return lambda: run_steps(loop, prompt_len, block_size, num_cycles)


def _core_of(loop: DecodeLoop) -> BlockManager | None:
    """Return Rose's block manager inside a loop; None for vLLM's."""
    manager: Any = loop.manager
    core = manager if isinstance(manager, BlockManager) else getattr(manager, "manager", None)
    return core if isinstance(core, BlockManager) else None


def _check(loop: DecodeLoop) -> None:
    """Recount Rose's invariants, so that a fast wrong answer fails."""
    core = _core_of(loop)
    if core is not None:
        core.check_integrity()


def all_copy_on_write(num_rows: int, block_size: int, repeats: int) -> dict[str, Any]:
    """Reserve the next token of ``num_rows`` forks of one part-filled tail and take the clone plan; microseconds."""
    times = []
    for _ in range(repeats):
        manager = BlockManager(
            num_blocks=2 * num_rows + 8, block_size=block_size, max_num_seqs=num_rows + 1, max_model_len=1024
        )
        prompt = np.arange(block_size + block_size // 2, dtype=np.int32)
        admission = manager.add(prompt)
        assert admission is not None
        parent = np.array([admission.row])
        assert manager.reserve(parent, len(prompt)).ok
        manager.commit(parent, len(prompt), prompt)
        children = manager.fork(admission.row, num_rows)
        assert children is not None
        times.append(timed_us(lambda m=manager, c=children: (m.reserve(c, 1), m.take_clone_plan())))
        assert manager.stats.clones == num_rows
        manager.check_integrity()
    return spread(times)


def cost_over_pool_size(
    sizes: Sequence[int], num_rows: int, block_size: int, repeats: int
) -> list[dict[str, Any]]:
    """Decode cost per row for pools of different sizes, their free blocks in random order; one entry per point."""
    prompt_len = block_size + 1
    points = []
    for num_blocks in sizes:
        # Four blocks per row at the end of a repeat; a small pool serves fewer rows.
        rows = min(num_rows, (num_blocks - 1) // 4)
        arguments = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "prompt_lens": [prompt_len] * rows,
            "max_model_len": 8 * block_size,
            "scattered": True,
        }
        points += _measure_point("num_blocks", num_blocks, arguments, block_size, repeats)
    return points


def cost_over_length(
    lengths: Sequence[int], num_rows: int, block_size: int, repeats: int
) -> list[dict[str, Any]]:
    """Decode cost per row for sequences of different lengths; the rows share one cached prompt of that length."""
    points = []
    for length in lengths:
        arguments = {
            "num_blocks": length // block_size + 8 * num_rows,
            "block_size": block_size,
            "prompt_lens": [length + 1] * num_rows,
            "max_model_len": length + 8 * block_size,
            "shared": True,
        }
        points += _measure_point("num_tokens", length, arguments, block_size, repeats)
    return points


def _measure_point(
    axis: str, value: int, arguments: dict[str, Any], block_size: int, repeats: int
) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    loops: dict[str, DecodeLoop] = {}
    for side in SIDES:
        point: dict[str, Any] = {axis: value, "side": side, "rows": len(arguments["prompt_lens"])}
        points.append(point)
        needed = arguments["num_blocks"] * _SETUP_BYTES_PER_BLOCK[side]
        free = _available_bytes()
        if needed > free // 2:
            point["skipped"] = f"needs about {needed >> 20} MiB, {free >> 20} MiB are free"
            continue
        start = time.perf_counter()
        loops[side] = make_loop(side, **arguments)
        point["set_up_s"] = time.perf_counter() - start
    prompt_len = arguments["prompt_lens"][0]
    samples = alternate(
        {side: _runner(loop, prompt_len, block_size, 1) for side, loop in loops.items()}, repeats
    )
    for point in points:
        rows = point["rows"]
        for phase in ("whole_block", "whole_block_and_hashing", "inside", "rolls_over", "fills"):
            if "skipped" not in point:
                per_row = [us / rows for us in samples[point["side"]][phase]]
                point[f"{phase}_us_per_row"] = spread(per_row)
    loops.clear()
    gc.collect()
    return points


def _available_bytes() -> int:
    info = Path("/proc/meminfo")
    if not info.is_file():
        return 1 << 62
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
