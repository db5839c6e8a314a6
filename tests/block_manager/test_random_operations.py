"""Seeded random operations on the block manager over a simulated K/V memory.

The K/V of a token depends on all tokens before it, so the simulated value of a slot is a hash of the whole prefix. Each
row's values, read through its block table, must equal what was computed for it: that one check covers hits, clones,
forks, evictions and take-overs. Two symbols only, so that prefixes collide all the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose_backend.block_manager import BlockManager


def lcp(left: list[int], right: list[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


class DrawnChoices:
    """Stands in for NumPy's generator with choices that hypothesis draws, and can make smaller after a failure."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def integers(self, low: int, high: int, size: int | None = None) -> Any:
        number = st.integers(low, high - 1)
        if size is None:
            return self.data.draw(number)
        return np.array(self.data.draw(st.lists(number, min_size=size, max_size=size)), np.int64)

    def random(self) -> float:
        return self.data.draw(st.integers(0, 99)) / 100

    def choice(self, options: Any, p: object = None) -> Any:
        if isinstance(options, int):
            return self.integers(0, options)
        return options[self.integers(0, len(options))]


class Simulation:
    """Rows with their true token lists, and a K/V memory that the block manager's answers are applied to."""

    def __init__(
        self, seed: int | DrawnChoices, num_blocks: int, block_size: int, *, prefix_cache: bool = True
    ) -> None:
        self.rng: Any = np.random.default_rng(seed) if isinstance(seed, int) else seed
        self.block_size = block_size
        self.max_model_len = min(block_size * (num_blocks - 1), block_size * 3 + 5)
        self.manager = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=6,
            max_model_len=self.max_model_len,
            prefix_cache=prefix_cache,
        )
        self.memory = np.zeros((num_blocks, block_size), np.int64)
        self.rows: dict[
            int, tuple[bytes, list[int]]
        ] = {}  # row -> (namespace, tokens that are or will be computed)
        self.history: list[tuple[bytes, list[int]]] = []
        self.plans: list = []

    def symbols(self, count: int) -> list[int]:
        return self.rng.integers(0, 2, count).tolist()

    def computed(self, row: int) -> int:
        return int(self.manager.num_computed_tokens[row])

    @staticmethod
    def value(namespace: bytes, tokens: list[int]) -> int:
        return hash((namespace, *tokens))

    def add(self) -> None:
        prompt = self.symbols(int(self.rng.integers(1, self.max_model_len + 1)))
        namespace = b"tenant" if self.rng.random() < 0.3 else b""
        stats = self.manager.stats
        nothing_lost = self.manager.cache is not None and stats.evictions == 0 and stats.overwrites == 0
        admission = self.manager.add(np.array(prompt, np.int32), namespace=namespace)
        if admission is None:
            assert len(self.rows) == 6
            return
        known = [lcp(prompt[:-1], tokens) for space, tokens in self.history if space == namespace]
        assert admission.num_cached_tokens <= max(known, default=0)
        if nothing_lost:
            assert admission.num_cached_tokens == max(known, default=0)
        self.rows[admission.row] = (namespace, prompt)

    def fork(self) -> None:
        row = self.pick()
        if row is None:
            return
        count = int(self.rng.integers(1, 4))
        children = self.manager.fork(row, count)
        if children is None:
            assert len(self.rows) + count > 6
            return
        namespace, tokens = self.rows[row]
        for child in children.tolist():
            self.rows[child] = (namespace, tokens[: self.computed(row)])

    def free(self) -> None:
        rows = [row for row in self.rows if self.rng.random() < 0.4]
        self.manager.free(np.array(rows, np.int64))
        for row in rows:
            del self.rows[row]

    def pick(self) -> int | None:
        return int(self.rng.choice(list(self.rows))) if self.rows else None

    def step(self) -> None:
        """Reserve for some rows, let other things happen, perhaps reserve again, copy, write, commit."""
        reserved: dict[int, int] = {}
        for _ in range(int(self.rng.integers(1, 4))):
            reserved.update(self.reserve_some())
            if self.rng.random() < 0.5:
                self.rng.choice([self.add, self.free, self.fork, self.fork])()
                reserved = {row: count for row, count in reserved.items() if row in self.rows}
        self.copy()
        written = [(row, int(self.rng.integers(0, count + 1))) for row, count in reserved.items()]
        self.write_and_commit(written)
        if self.rng.random() < 0.5:
            self.manager.roll_back(np.array(list(reserved), np.int64))

    def reserve_some(self) -> dict[int, int]:
        chosen = [row for row in self.rows if self.rng.random() < 0.6]
        counts = []
        for row in chosen:
            namespace, tokens = self.rows[row]
            room = self.max_model_len - self.computed(row)
            count = int(self.rng.integers(0, min(room, 2 * self.block_size) + 1))
            missing = self.computed(row) + count - len(tokens)
            self.rows[row] = (namespace, tokens + self.symbols(max(missing, 0)))
            counts.append(count)
        before = self.manager.num_free_blocks
        reservation = self.manager.reserve(np.array(chosen, np.int64), np.array(counts, np.int64))
        if not reservation.ok:
            assert self.manager.num_free_blocks == before
            served = np.flatnonzero(reservation.servable)
            chosen = [chosen[i] for i in served]
            counts = [counts[i] for i in served]
            assert self.manager.reserve(np.array(chosen, np.int64), np.array(counts, np.int64)).ok
        self.manager.check_integrity()
        return dict(zip(chosen, counts, strict=True))

    def copy(self) -> None:
        plan = self.manager.take_clone_plan()
        if plan is not None:
            self.memory[plan.dst_block_ids] = self.memory[plan.src_block_ids]
            self.plans.append(plan)
        while self.plans and self.rng.random() < 0.6:
            self.manager.finish_clone_plan(self.plans.pop(0))

    def write_and_commit(self, written: list[tuple[int, int]]) -> None:
        token_ids: list[int] = []
        for row, count in written:
            namespace, tokens = self.rows[row]
            start = self.computed(row)
            for position in range(start, start + count):
                block = self.manager.block_table[row, position // self.block_size]
                assert block != 0
                self.memory[block, position % self.block_size] = self.value(namespace, tokens[: position + 1])
            token_ids += tokens[start : start + count]
            self.history.append((namespace, tokens[: start + count]))
        rows = np.array([row for row, _ in written], np.int64)
        self.manager.commit(
            rows, np.array([count for _, count in written], np.int64), np.array(token_ids, np.int32)
        )

    def check(self) -> None:
        self.manager.check_integrity()
        for row, (namespace, tokens) in self.rows.items():
            for position in range(self.computed(row)):
                block = self.manager.block_table[row, position // self.block_size]
                expected = self.value(namespace, tokens[: position + 1])
                assert self.memory[block, position % self.block_size] == expected, (row, position, block)

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            operation = self.rng.choice(4, p=[0.3, 0.1, 0.15, 0.45])
            (self.add, self.fork, self.free, self.step)[operation]()
            self.check()

    def finish(self) -> None:
        self.manager.free(np.array(list(self.rows), np.int64))
        self.rows.clear()
        self.copy()
        for plan in self.plans:
            self.manager.finish_clone_plan(plan)
        self.plans.clear()
        self.check()
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks
        assert self.manager.reset_prefix_cache()
        self.check()
        assert self.manager.pool.num_cached_blocks == 0


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("num_blocks", [2, 5, 9, 30, 400])
def test_random_operations_keep_every_row_right(num_blocks: int, block_size: int) -> None:
    for seed in range(3):
        simulation = Simulation(seed, num_blocks, block_size)
        simulation.run(250)
        simulation.finish()


def test_random_operations_without_prefix_cache() -> None:
    for seed in range(3):
        simulation = Simulation(seed, 12, 4, prefix_cache=False)
        simulation.run(250)
        simulation.finish()
        assert simulation.manager.stats.hit_tokens == 0
        assert simulation.manager.stats.clones > 0


def test_random_run_exercises_all_paths() -> None:
    simulation = Simulation(0, 14, 4)
    simulation.run(1500)
    stats = simulation.manager.stats
    assert (
        min(stats.clones, stats.claims, stats.overwrites, stats.evictions, stats.partial_hits, stats.forks)
        > 10
    ), stats


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data(), num_blocks=st.integers(2, 12), block_size=st.sampled_from([1, 2, 4]))
def test_any_sequence_of_operations(data: st.DataObject, num_blocks: int, block_size: int) -> None:
    simulation = Simulation(DrawnChoices(data), num_blocks, block_size)
    simulation.run(25)
    simulation.finish()
