"""Scenes of the block manager: steady decode, copy-on-write, growth with pool and length, lookups."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.block_manager_loops import (
    DecodeLoop,
    RoseCore,
    Setting,
    VllmManager,
    admit,
    compute,
    hash_request,
    make_equal_request,
    make_manager,
    make_request,
    run_steps,
)
from benchmarks.support.timing import Samples, alternate, spread, spreads, timed_us
from rose_backend.block_manager import BlockManager

SIDES = ("rose_core", "rose_in_vllm", "stock")
# Of one block: array bytes of Rose, twice; vLLM's block object. Generous, to be refused before memory runs out.
_SETUP_BYTES_PER_BLOCK = {"rose_core": 150, "rose_in_vllm": 150, "stock": 400}


def steady_decode(num_rows: int, block_size: int, repeats: int, *, num_cycles: int) -> dict[str, Any]:
    """Decode rows that cross block boundaries together; microseconds per step for all rows.

    Args:
        num_cycles: blocks each row fills per repeat.
    """
    prompt_len = 4 * block_size
    blocks_per_run = num_rows * (prompt_len // block_size + num_cycles + 2)
    longest = prompt_len + (num_cycles + 2) * block_size
    # So many that no cached block has to go.
    setting = Setting(blocks_per_run * repeats + 8, block_size, [prompt_len] * num_rows, longest)
    loops = {side: make_loop(side, setting) for side in SIDES}
    samples = alternate(_runs(loops, setting, num_cycles), repeats)
    for loop in loops.values():
        if loop.core is not None:
            # A fast wrong answer fails.
            loop.core.check_integrity()
            assert not loop.core.stats.evictions
    return spreads(samples)


def make_loop(side: str, setting: Setting) -> DecodeLoop:
    """Return the decode loop of one of ``SIDES``."""
    return RoseCore(setting) if side == "rose_core" else VllmManager(side, setting)


def _runs(
    loops: dict[str, DecodeLoop], setting: Setting, num_cycles: int
) -> dict[str, Callable[[], Samples]]:
    sizes = (setting.prompt_lens[0], setting.block_size, num_cycles)
    return {side: functools.partial(run_steps, loop, *sizes) for side, loop in loops.items()}


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
        setting = Setting(num_blocks, block_size, [prompt_len] * rows, 8 * block_size, scattered=True)
        points += _measure_point("num_blocks", num_blocks, setting, repeats)
    return points


def cost_over_length(
    lengths: Sequence[int], num_rows: int, block_size: int, repeats: int
) -> list[dict[str, Any]]:
    """Decode cost per row for sequences of different lengths; the rows share one cached prompt of that length."""
    points = []
    for length in lengths:
        num_blocks, longest = length // block_size + 8 * num_rows, length + 8 * block_size
        setting = Setting(num_blocks, block_size, [length + 1] * num_rows, longest, shared=True)
        points += _measure_point("num_tokens", length, setting, repeats)
    return points


def _measure_point(axis: str, value: int, setting: Setting, repeats: int) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    loops: dict[str, DecodeLoop] = {}
    for side in SIDES:
        point: dict[str, Any] = {axis: value, "side": side, "rows": len(setting.prompt_lens)}
        points.append(point)
        needed = setting.num_blocks * _SETUP_BYTES_PER_BLOCK[side]
        free = _available_bytes()
        if needed > free // 2:
            point["skipped"] = f"needs about {needed >> 20} MiB, {free >> 20} MiB are free"
            continue
        start = time.perf_counter()
        loops[side] = make_loop(side, setting)
        point["set_up_s"] = time.perf_counter() - start
    samples = alternate(_runs(loops, setting, 1), repeats)
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


def long_prompt(num_tokens: int, block_size: int, repeats: int) -> dict[str, Any]:
    """Look up a prompt whose ``num_tokens`` tokens before the last are cached in full blocks; microseconds.

    Returns: spreads by side and figure; the hit length of each side under ``hit_tokens``.
    """
    prompt = np.random.default_rng(0).integers(0, 50_257, num_tokens + 1).astype(np.int32)
    num_blocks = num_tokens // block_size + 16
    limits = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_model_len": num_tokens + 2 * block_size,
    }
    core = BlockManager(**limits, max_num_seqs=4)
    compute(core, prompt)
    hashes = core.hash_blocks(prompt)
    managers = {side: make_manager(side, **limits, max_num_seqs=4) for side in ("rose_in_vllm", "stock")}
    requests = {side: make_request("asks", prompt.tolist(), block_size) for side in managers}
    for manager in managers.values():
        admit(manager, make_request("first", prompt.tolist(), block_size))

    def core_lookups() -> dict[str, list[float]]:
        return {
            "match": [timed_us(lambda: core.match(prompt, block_hashes=hashes))],
            "hash_blocks": [timed_us(lambda: core.hash_blocks(prompt))],
            "match_and_hash": [timed_us(lambda: core.match(prompt))],
        }

    sides: dict[str, Callable[[], Samples]] = {"rose_core": core_lookups}
    for side, manager in managers.items():
        sides[side] = _vllm_lookups(manager, requests[side])
    samples = alternate(sides, repeats)
    hits = {side: manager.get_computed_blocks(requests[side])[1] for side, manager in managers.items()}
    hits["rose_core"] = core.match(prompt).num_tokens
    assert set(hits.values()) == {num_tokens}, hits
    return {**spreads(samples), "hit_tokens": hits}


def _vllm_lookups(manager: Any, request: Any) -> Callable[[], Samples]:
    def run() -> Samples:
        # A request that was never looked up before: Rose hashes it then, vLLM did when it was built.
        new = make_equal_request("new", request)
        manager.new_step_starts()
        samples = {
            "get_computed_blocks.first": [timed_us(lambda: manager.get_computed_blocks(new))],
            "get_computed_blocks.again": [timed_us(lambda: manager.get_computed_blocks(new))],
            "hash_request": [timed_us(lambda: hash_request(new))],
        }
        manager.free(new)
        return samples

    return run


def among_many(counts: Sequence[int], block_size: int, repeats: int) -> list[dict[str, Any]]:
    """Look a prompt up among cached prompts that share four and a half blocks with it; one entry per count and side.

    All of them continue the same full blocks and share the first half of the next one, where Rose compares tokens to
    find the longest run; vLLM looks at full blocks only, and finds half a block less.
    """
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 50_257, 4 * block_size + block_size // 2).astype(np.int32)
    half = block_size - block_size // 2

    def new_prompt() -> np.ndarray:
        # Full blocks, and one token behind them that is not computed before the prompt is looked up.
        return np.concatenate((stem, rng.integers(0, 50_257, half))).astype(np.int32)

    points = []
    limits = {"num_blocks": max(counts) + 64, "block_size": block_size, "max_model_len": 8 * block_size}
    core = BlockManager(**limits, max_num_seqs=4)
    stock = make_manager("stock", **limits, max_num_seqs=4)
    num_cached = 0
    for count in counts:
        for _ in range(count - num_cached):
            prompt = new_prompt()
            core.free(np.array([compute(core, prompt, max_hit=4 * block_size)]))
            request = make_request("cached", prompt.tolist(), block_size)
            admit(stock, request)
            stock.free(request)
        num_cached = count
        prompt = np.append(new_prompt(), np.int32(1))
        hashes = core.hash_blocks(prompt)
        request = make_request("asks", prompt.tolist(), block_size)
        sides: dict[str, Callable[[], dict[str, list[float]]]] = {
            "rose_core": lambda p=prompt, h=hashes: {"us": [timed_us(lambda: core.match(p, block_hashes=h))]},
            "stock": lambda r=request: {"us": [timed_us(lambda: stock.get_computed_blocks(r))]},
        }
        samples = alternate(sides, repeats)
        hits = {"rose_core": core.match(prompt).num_tokens, "stock": stock.get_computed_blocks(request)[1]}
        assert hits["rose_core"] >= len(stem) and hits["stock"] == 4 * block_size, hits
        points += [
            {"num_prompts": count, "side": side, "lookup_us": spread(figures["us"]), "hit_tokens": hits[side]}
            for side, figures in samples.items()
        ]
    return points
