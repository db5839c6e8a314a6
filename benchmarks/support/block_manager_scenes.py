"""Scenes of the block manager: steady decode, copy-on-write, growth with pool and length, lookups."""

from __future__ import annotations

import functools
import gc
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from benchmarks.support.block_manager_loops import (
    LOOPS,
    VOCAB_SIZE,
    DecodeLoop,
    Setting,
    admit,
    make_equal_request,
    make_manager,
    make_request,
    run_steps,
)
from benchmarks.support.timing import Samples, alternate, spread, spreads, timed_us
from benchmarks.support.variants import computed_row

SIDES = tuple(LOOPS)
# Of one block: array bytes of Rose, twice; vLLM's block object. Generous, to be refused before memory runs out.
_BYTES_PER_BLOCK = {"rose_core": 150, "rose_in_vllm": 150, "stock": 400}


def decode(
    loops: dict[str, DecodeLoop], setting: Setting, repeats: int, num_cycles: int
) -> dict[str, Samples]:
    """Let loops take turns; microseconds per step for all rows by side and phase."""
    sizes = (setting.prompt_len, setting.block_size, num_cycles)
    runs = {side: functools.partial(run_steps, loop, *sizes) for side, loop in loops.items()}
    return alternate(runs, repeats)


def steady_decode(options: Namespace) -> dict[str, Any]:
    """Decode rows that cross block boundaries together; microseconds for all rows."""
    size, num_cycles = options.block_size, 1 if options.quick else 12
    # So many blocks that no cached one has to go.
    num_blocks = options.rows * (num_cycles + 6) * options.repeats + 8
    setting = Setting(num_blocks, size, 4 * size, options.rows, (num_cycles + 6) * size)
    loops = {side: LOOPS[side](side, setting) for side in SIDES}
    samples = decode(loops, setting, options.repeats, num_cycles)
    for loop in loops.values():
        if loop.core is not None:
            # A fast wrong answer fails.
            loop.core.check_integrity()
            assert not loop.core.stats.evictions
    return spreads(samples)


def copy_on_write(options: Namespace) -> dict[str, Any]:
    """Reserve the next token of forks of one part-filled tail and take the clone plan; microseconds."""
    rows, size = options.rows, options.block_size
    setting = Setting(2 * rows + 8, size, size + size // 2, rows, 1024)
    times = []
    for _ in range(options.repeats * (4 if options.quick else 40)):
        manager = make_manager("rose_core", setting)
        children = manager.fork(computed_row(manager, np.arange(setting.prompt_len, dtype=np.int32)), rows)
        assert children is not None
        times.append(timed_us(lambda m=manager, c=children: (m.reserve(c, 1), m.take_clone_plan())))
        assert manager.stats.clones == rows
        manager.check_integrity()
    return spread(times)


def pool_size(options: Namespace) -> list[dict[str, Any]]:
    """Decode cost per row for pools of different sizes, their free blocks in random order; one entry per point."""
    size = options.block_size
    points = []
    for num_blocks in (10**power for power in range(3, 5 if options.quick else 8)):
        # Four blocks per row at the end of a repeat; a small pool serves fewer rows.
        rows = min(options.rows, (num_blocks - 1) // 4)
        setting = Setting(num_blocks, size, size + 1, rows, 8 * size, scattered=True)
        points += _measure_point({"num_blocks": num_blocks}, setting, options.repeats)
    return points


def sequence_length(options: Namespace) -> list[dict[str, Any]]:
    """Decode cost per row for sequences of different lengths; the rows share one cached prompt of that length."""
    rows, size = options.rows, options.block_size
    points = []
    for length in (16, 1024) if options.quick else (16, 128, 1024, 8192, 32_768, 131_072):
        num_blocks, longest = length // size + 8 * rows, length + 8 * size
        setting = Setting(num_blocks, size, length + 1, rows, longest, shared=True)
        points += _measure_point({"num_tokens": length}, setting, options.repeats)
    return points


def _measure_point(axis: dict[str, int], setting: Setting, repeats: int) -> list[dict[str, Any]]:
    loops, figures = {}, {}
    for side in SIDES:
        needed, free = setting.num_blocks * _BYTES_PER_BLOCK[side], psutil.virtual_memory().available
        if needed > free // 2:
            figures[side] = {"skipped": f"needs about {needed >> 20} MiB, {free >> 20} MiB are free"}
        else:
            loops[side] = LOOPS[side](side, setting)
    for side, samples in decode(loops, setting, repeats, 1).items():
        per_row = [us / setting.num_rows for us in samples["whole_block"]]
        figures[side] = {"whole_block_us_per_row": spread(per_row)}
    # Blocks refer to each other: millions of them would stay, as nothing is collected by itself.
    loops.clear()
    gc.collect()
    return [{**axis, "side": side, "rows": setting.num_rows, **figures[side]} for side in SIDES]


def long_prompt(options: Namespace) -> dict[str, Any]:
    """Look up a prompt whose 4,096 tokens before the last are cached in full blocks; microseconds.

    Returns: spreads by side and figure; the hit length of each side under ``hit_tokens``.
    """
    size, num_tokens = options.block_size, 4096
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, num_tokens + 1).astype(np.int32)
    setting = Setting(num_tokens // size + 16, size, len(prompt), 3, num_tokens + 2 * size)
    core, *managers = (make_manager(side, setting) for side in SIDES)
    computed_row(core, prompt)
    hashes = core.hash_blocks(prompt)
    hits = {"rose_core": core.match(prompt).num_tokens}
    sides: dict[str, Callable[[], Samples]] = {
        "rose_core": lambda: {
            "match": [timed_us(lambda: core.match(prompt, block_hashes=hashes))],
            "hash_blocks": [timed_us(lambda: core.hash_blocks(prompt))],
        }
    }
    for side, manager in zip(SIDES[1:], managers, strict=True):
        admit(manager, make_request("first", prompt, size))
        manager.new_step_starts()
        request = make_request("asks", prompt, size)
        hits[side] = manager.get_computed_blocks(request)[1]
        sides[side] = functools.partial(_vllm_lookups, manager, request)
    assert set(hits.values()) == {num_tokens}, hits
    return {**spreads(alternate(sides, _num_lookups(options))), "hit_tokens": hits}


def _num_lookups(options: Namespace) -> int:
    return options.repeats * (10 if options.quick else 100)


def _vllm_lookups(manager: Any, request: Any) -> Samples:
    # A request that was never looked up before: Rose hashes it then, vLLM did when it was built.
    new = make_equal_request("new", request)

    def hash_again() -> None:
        new.block_hashes = []
        new.update_block_hashes()

    manager.new_step_starts()
    samples = {
        "get_computed_blocks.first": [timed_us(lambda: manager.get_computed_blocks(new))],
        "get_computed_blocks.again": [timed_us(lambda: manager.get_computed_blocks(new))],
        "hash_request": [timed_us(hash_again)],
    }
    manager.free(new)
    return samples


def among_many(options: Namespace) -> list[dict[str, Any]]:
    """Look a prompt up among cached prompts that share four and a half blocks with it; one entry per count and side.

    All of them continue the same full blocks and share the first half of the next one, where Rose compares tokens to
    find the longest run; vLLM looks at full blocks only, and finds half a block less.
    """
    rng, block_size = np.random.default_rng(0), options.block_size
    counts = [10**power for power in range(1, 3 if options.quick else 6)]
    stem = rng.integers(0, VOCAB_SIZE, 4 * block_size + block_size // 2).astype(np.int32)

    def new_prompt() -> np.ndarray:
        return np.append(stem, rng.integers(0, VOCAB_SIZE, 5 * block_size - len(stem)).astype(np.int32))

    setting = Setting(max(counts) + 64, block_size, 5 * block_size, 3, 8 * block_size)
    core, stock = make_manager("rose_core", setting), make_manager("stock", setting)
    points: list[dict[str, Any]] = []
    num_cached = 0
    for count in counts:
        for _ in range(count - num_cached):
            prompt = new_prompt()
            core.free(np.array([computed_row(core, prompt, max_tokens=4 * block_size)]))
            request = make_request("cached", prompt, block_size)
            admit(stock, request)
            stock.free(request)
        num_cached = count
        # One token behind the full blocks, which is not computed before the prompt is looked up.
        prompt = np.append(new_prompt(), np.int32(1))
        hashes, request = core.hash_blocks(prompt), make_request("asks", prompt, block_size)
        sides: dict[str, Callable[[], Samples]] = {
            "rose_core": lambda p=prompt, h=hashes: {"us": [timed_us(lambda: core.match(p, block_hashes=h))]},
            "stock": lambda r=request: {"us": [timed_us(lambda: stock.get_computed_blocks(r))]},
        }
        samples = alternate(sides, _num_lookups(options))
        hits = {"rose_core": core.match(prompt).num_tokens, "stock": stock.get_computed_blocks(request)[1]}
        assert hits["rose_core"] >= len(stem) and hits["stock"] == 4 * block_size, hits
        points += [
            {"num_prompts": count, "side": side, "lookup_us": spread(figures["us"]), "hit_tokens": hits[side]}
            for side, figures in samples.items()
        ]
    return points


SCENES = (steady_decode, copy_on_write, pool_size, sequence_length, long_prompt, among_many)
