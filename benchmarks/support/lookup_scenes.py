"""Scenes about prefix lookups: one long prompt, many prompts that start alike, and memory per block."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.support import stock_vllm
from benchmarks.support.timing import Samples, alternate, spread, spreads, timed_us
from rose_backend.block_manager import BlockManager


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
    _compute(core, prompt)
    hashes = core.hash_blocks(prompt)
    managers = {
        side: stock_vllm.make_manager(side, **limits, max_num_seqs=4) for side in ("rose_in_vllm", "stock")
    }
    requests = {side: stock_vllm.make_request("asks", prompt.tolist(), block_size) for side in managers}
    for manager in managers.values():
        stock_vllm.admit(manager, stock_vllm.make_request("first", prompt.tolist(), block_size))

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
        new = stock_vllm.make_equal_request("new", request)
        manager.new_step_starts()
        samples = {
            "get_computed_blocks.first": [timed_us(lambda: manager.get_computed_blocks(new))],
            "get_computed_blocks.again": [timed_us(lambda: manager.get_computed_blocks(new))],
            "hash_request": [timed_us(lambda: stock_vllm.hash_request(new))],
        }
        manager.free(new)
        return samples

    return run


def _compute(manager: BlockManager, prompt: np.ndarray, max_hit: int | None = None) -> int:
    """Compute a prompt; return its row."""
    admission = manager.add(prompt, match=manager.match(prompt, max_tokens=max_hit))
    assert admission is not None
    row, count = np.array([admission.row]), len(prompt) - admission.num_cached_tokens
    assert manager.reserve(row, count).ok
    manager.commit(row, count, prompt[admission.num_cached_tokens :])
    return admission.row


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
    stock = stock_vllm.make_manager("stock", **limits, max_num_seqs=4)
    num_cached = 0
    for count in counts:
        for _ in range(count - num_cached):
            prompt = new_prompt()
            core.free(np.array([_compute(core, prompt, max_hit=4 * block_size)]))
            request = stock_vllm.make_request("cached", prompt.tolist(), block_size)
            stock_vllm.admit(stock, request)
            stock.free(request)
        num_cached = count
        prompt = np.append(new_prompt(), np.int32(1))
        hashes = core.hash_blocks(prompt)
        request = stock_vllm.make_request("asks", prompt.tolist(), block_size)
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


def memory_per_block(num_blocks: int, block_size: int) -> dict[str, dict[str, float]]:
    """Return bytes per block right after construction and with every block cached, request objects not counted."""
    return {side: _traced_bytes(side, num_blocks, block_size) for side in ("rose_core", "stock")}


def _traced_bytes(side: str, num_blocks: int, block_size: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    limits = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": 64 * block_size}
    gc.collect()
    tracemalloc.start()
    manager: Any
    if side == "rose_core":
        manager = BlockManager(**limits, max_num_seqs=4)
    else:
        manager = stock_vllm.make_manager("stock", **limits, max_num_seqs=4)
    built, _ = tracemalloc.get_traced_memory()
    for _ in range((num_blocks - 1) // 64):
        prompt = rng.integers(0, 50_257, 64 * block_size).astype(np.int32)
        if side == "rose_core":
            manager.free(np.array([_compute(manager, prompt)]))
        else:
            request = stock_vllm.make_request("a", prompt.tolist(), block_size)
            stock_vllm.admit(manager, request)
            manager.free(request)
            del request
    gc.collect()
    full, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"empty": built / num_blocks, "all_cached": full / num_blocks}
