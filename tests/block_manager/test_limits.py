"""Sizes: memory for each block, pools of ten million blocks, offsets beyond 32 bits, cost that does not grow."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager

BYTES_PER_BLOCK = 49
"""As README.md says: all but the tokens."""
BYTES_PER_FINDABLE_BLOCK = 350


def random_tokens(num_rows: int, num_tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, (num_rows, num_tokens)).astype(np.int32)


def fill(manager: BlockManager, num_rows: int, num_tokens: int, seed: int = 0) -> np.ndarray:
    """Admit rows of random tokens and compute them; return the rows."""
    tokens = random_tokens(num_rows, num_tokens, seed)
    rows = np.array([manager.add(prompt).row for prompt in tokens])
    assert manager.reserve(rows, num_tokens).ok
    manager.commit(rows, num_tokens, tokens.ravel())
    return rows


def test_memory_of_a_block_is_what_the_readme_says() -> None:
    num_blocks, block_size = 200_000, 16
    tracemalloc.start()
    try:
        manager = BlockManager(
            num_blocks=num_blocks, block_size=block_size, max_num_seqs=64, max_model_len=16 * 512
        )
        constructed, _ = tracemalloc.get_traced_memory()
        num_row_bytes = manager.block_table.nbytes + 64 * 200
        per_block = (constructed - num_row_bytes) / num_blocks - 4 * block_size
        assert per_block == pytest.approx(BYTES_PER_BLOCK, abs=0.5)
        manager.free(fill(manager, 64, 16 * 512))
        filled, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert manager.pool.num_cached_blocks == 64 * 512
    assert (filled - constructed) / (64 * 512) < BYTES_PER_FINDABLE_BLOCK


def test_ten_million_blocks() -> None:
    block_size, width = 16, 10_000
    manager = BlockManager(
        num_blocks=10_000_001, block_size=block_size, max_num_seqs=1_010, max_model_len=width * block_size
    )
    assert manager.num_free_blocks == 10_000_000 and manager.usage == 0.0
    # All but 1,200 blocks go to rows that reserve and do not write.
    giants = np.array([manager.add(np.zeros(1, np.int32)).row for _ in range(1_000)])
    counts = np.full(1_000, width * block_size)
    counts[-1] -= 1_200 * block_size
    assert manager.reserve(giants, counts).num_new_blocks == 10_000_000 - 1_200
    for seed in range(12):
        manager.free(fill(manager, 8, 64 * block_size, seed))
    assert manager.stats.evictions == 12 * 8 * 64 - 1_200
    prompts = random_tokens(8, 64 * block_size, seed=11)
    rows = np.array([manager.add(prompt).row for prompt in prompts])
    assert manager.stats.hit_tokens == 8 * (64 * block_size - 1)
    assert manager.reserve(rows, 1).num_new_blocks == 8 and manager.num_free_blocks == 1_200 - 8 * 65
    manager.free(rows)
    manager.free(giants)
    assert manager.num_free_blocks == 10_000_000
    assert manager.reset_prefix_cache() and manager.pool.num_cached_blocks == 0


def test_block_offsets_beyond_32_bits() -> None:
    block_size = 65_536
    manager = BlockManager(
        num_blocks=32_900, block_size=block_size, max_num_seqs=2, max_model_len=8 * block_size
    )
    manager.pool.take(32_768)  # ids above have all their slots beyond 2**31
    tokens = np.arange(block_size + 100, dtype=np.int32)
    row = np.array([manager.add(tokens).row])
    assert manager.reserve(row, len(tokens)).ok
    assert int(manager.block_table[row[0], 0]) * block_size >= 2**31
    manager.commit(row, len(tokens), tokens)
    match = manager.match(np.append(tokens[:-3], [-1, -1]).astype(np.int32))
    assert match.num_tokens == len(tokens) - 3
    other = manager.add(np.append(tokens[:-3], [7, 7]).astype(np.int32))
    assert other is not None and manager.reserve(np.array([other.row]), 2).num_new_blocks == 1
    manager.commit(np.array([other.row]), 2, np.array([7, 7], np.int32))
    assert manager.match(np.append(tokens[:-3], [7, 7, 0]).astype(np.int32)).num_tokens == len(tokens) - 1


def fastest(function: Callable[[], object], repeats: int = 60) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def cost_of_a_step(num_blocks: int, max_model_len: int, num_tokens: int) -> dict[str, float]:
    """Return seconds of each call for 32 rows of ``num_tokens``."""
    manager = BlockManager(
        num_blocks=num_blocks, block_size=16, max_num_seqs=64, max_model_len=max_model_len, prefix_cache=False
    )
    rows = np.array([manager.add(np.zeros(1, np.int32)).row for _ in range(32)])
    assert manager.reserve(rows, num_tokens).ok
    manager.commit(rows, num_tokens, np.zeros(32 * num_tokens, np.int32))
    token_ids = np.zeros(32, np.int32)

    def decode() -> None:
        assert manager.reserve(rows, 1).ok
        manager.commit(rows, 1, token_ids)

    def fill_blocks() -> None:
        others = np.array([manager.add(np.zeros(1, np.int32)).row for _ in range(32)])
        assert manager.reserve(others, 40).ok
        manager.free(others)

    def copy_on_write() -> None:
        children = manager.fork(int(rows[0]), 1)
        assert manager.reserve(children, 1).ok
        manager.finish_clone_plan(manager.take_clone_plan())

    costs = {"decode": fastest(decode, 13), "fill blocks": fastest(fill_blocks)}
    costs["changed rows"] = fastest(manager.take_changed_rows)
    costs["usage"] = fastest(lambda: manager.usage)
    costs["copy on write"] = fastest(copy_on_write, 20)
    return costs


def test_cost_grows_neither_with_the_pool_nor_with_the_sequences() -> None:
    small = cost_of_a_step(1_000, 16 * 40, 17)
    large = cost_of_a_step(10_000_000, 1 << 20, 130_001)
    ratios = {name: large[name] / small[name] for name in small if name != "copy on write"}
    assert max(ratios.values()) < 4, ratios
    # A fork lists all blocks of its parent, 8,126 here: it costs as much as to list them a few times, on any machine.
    blocks = np.arange(8_126, dtype=np.int32)
    assert large["copy on write"] - small["copy on write"] < 4 * fastest(lambda: list(blocks))
