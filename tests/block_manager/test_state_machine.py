"""The same calls and the same oracle as the random operations, chosen by hypothesis, which makes failures small.

A failure prints the calls as a few lines of Python. The examples are the same in every run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.block_manager.simulation import Simulation

NUM_EXAMPLES = max(1, int(os.environ.get("ROSE_RANDOM_OPERATIONS", "100000")) // 400)

symbol = st.integers(0, 1)
namespaces = st.sampled_from([b"", b"tenant"])
prompts = st.lists(symbol, min_size=1, max_size=12)
picks = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4)
"""Which rows (counted round the rows in use, none twice) and a number for each."""


class BlockManagerMachine(RuleBasedStateMachine):
    """Each rule is one call of the simulation, which compares and checks everything after it."""

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        options=st.sampled_from([{}, {}, {"full_blocks_only": True}, {"prefix_cache": False}]),
    )
    def start(self, num_blocks: int, block_size: int, max_num_seqs: int, options: dict[str, Any]) -> None:
        self.simulation = Simulation(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=13,
            record_events=True,
            **options,
        )

    def rows(self, chosen: list[tuple[int, int]]) -> dict[int, int]:
        """Return row -> drawn number."""
        rows = list(self.simulation.sequences)
        return {rows[index % len(rows)]: number for index, number in chosen if rows}

    def has_rows(self) -> bool:
        return bool(self.simulation.sequences)

    @rule(prompt=prompts, namespace=namespaces, limit=st.none() | st.integers(0, 12), hashed=st.booleans())
    def match(self, prompt: list[int], namespace: bytes, limit: int | None, hashed: bool) -> None:
        self.simulation.match(prompt, namespace, limit, len(prompt) // 2 if hashed else None)

    @rule(prompt=prompts, namespace=namespaces)
    def add(self, prompt: list[int], namespace: bytes) -> None:
        self.simulation.add(prompt, namespace)

    @precondition(lambda self: self.simulation.lookups)
    @rule(index=st.integers(0, 3))
    def add_with_earlier_match(self, index: int) -> None:
        lookup = self.simulation.lookups[index % len(self.simulation.lookups)]
        self.simulation.add(lookup.prompt, lookup.namespace, lookup.match)

    @precondition(has_rows)
    @rule(pick=st.integers(0, 5), num_children=st.integers(0, 3))
    def fork(self, pick: int, num_children: int) -> None:
        for row in self.rows([(pick, 0)]):
            self.simulation.fork(row, num_children)

    @precondition(has_rows)
    @rule(chosen=picks)
    def reserve(self, chosen: list[tuple[int, int]]) -> None:
        rows = self.rows(chosen)
        counts = [min(number, self.simulation.room(row)) for row, number in rows.items()]
        servable = self.simulation.reserve(list(rows), counts)
        if len(servable) < len(rows):
            retried = [count for row, count in zip(rows, counts, strict=True) if row in servable]
            assert len(self.simulation.reserve(servable, retried)) == len(servable)

    @precondition(has_rows)
    @rule(chosen=picks, symbols=st.lists(symbol, min_size=1, max_size=8))
    def write(self, chosen: list[tuple[int, int]], symbols: list[int]) -> None:
        rows = self.rows(chosen)
        counts = [min(number, self.simulation.num_writable(row)) for row, number in rows.items()]
        source: Iterator[int] = itertools.cycle(symbols)
        self.simulation.write(list(rows), counts, source)

    @precondition(lambda self: any(s.num_written for s in self.simulation.sequences.values()))
    @rule(chosen=picks, all_of_it=st.booleans())
    def commit(self, chosen: list[tuple[int, int]], all_of_it: bool) -> None:
        written = {row: sequence.num_written for row, sequence in self.simulation.sequences.items()}
        rows = list(written) if all_of_it else list(self.rows(chosen))
        numbers = written if all_of_it else self.rows(chosen)
        self.simulation.commit(rows, [min(numbers[row], written[row]) for row in rows])

    @precondition(has_rows)
    @rule(chosen=picks)
    def free(self, chosen: list[tuple[int, int]]) -> None:
        self.simulation.free(list(self.rows(chosen)))

    @precondition(lambda self: self.simulation.oracle.books.pending)
    @rule()
    def take_clone_plan(self) -> None:
        self.simulation.take_clone_plan()

    @precondition(lambda self: self.simulation.plans)
    @rule(index=st.integers(0, 3))
    def finish_clone_plan(self, index: int) -> None:
        self.simulation.finish_clone_plan(index % len(self.simulation.plans))

    @rule()
    def take_changed_rows(self) -> None:
        self.simulation.take_changed_rows()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.simulation.reset_prefix_cache()

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        self.simulation.check_some_findable_blocks()
        self.simulation.free(list(self.simulation.sequences))
        while self.simulation.plans:
            self.simulation.finish_clone_plan(0)
        manager = self.simulation.manager
        assert manager.num_free_blocks == manager.num_usable_blocks


TestStateMachine = BlockManagerMachine.TestCase
TestStateMachine.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
