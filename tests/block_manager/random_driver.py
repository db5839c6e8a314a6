"""Drives a simulation with seeded random calls: two symbols only, so that prefixes collide all the time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import ClassVar

from tests.block_manager.mistakes import possible_mistakes
from tests.block_manager.simulation import Simulation

NAMESPACES = (b"", b"", b"tenant-a", b"tenant-b")
_WEIGHTS = {
    "match": 7,
    "add": 12,
    "add_from_lookup": 7,
    "admit_exactly": 6,
    "branch_off_a_match": 2,
    "fork": 2,
    "branch": 7,
    "reserve": 16,
    "step": 18,
    "write": 4,
    "commit": 4,
    "free": 11,
    "take_clone_plan": 4,
    "finish_clone_plan": 7,
    "preempt": 3,
    "take_changed_rows": 3,
    "reset": 1,
    "make_a_mistake": 5,
}


class RandomDriver:
    """Each method of ``weights`` makes one or a few calls. Equal seeds make equal calls."""

    weights: ClassVar[dict[str, int]] = _WEIGHTS

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self.simulation = simulation
        self.rng = random.Random(seed)
        self.history: list[tuple[bytes, list[int]]] = []
        self.log: list[str] = []
        self._names = list(self.weights)
        self._weights = list(itertools.accumulate(self.weights.values()))

    def run(self, num_calls: int) -> None:
        """Make at least ``num_calls`` calls, then let go of everything and evict block after block."""
        try:
            while self.simulation.calls.total() < num_calls:
                name = self.rng.choices(self._names, cum_weights=self._weights)[0]
                self.log.append(name)
                getattr(self, name)()
            self.log.append("finish")
            self.finish()
        except BaseException as error:
            error.add_note(
                f"after {self.simulation.calls.total()} calls; the last steps were {self.log[-12:]}"
            )
            raise

    def symbols(self) -> Iterator[int]:
        while True:
            yield from map(int, f"{self.rng.getrandbits(64):064b}")

    def prompt(self) -> tuple[bytes, list[int]]:
        """Draw a prompt: often an earlier sequence, cut somewhere, and something behind it."""
        longest = self.simulation.manager.max_model_len
        namespace, tokens = self.rng.choice(NAMESPACES), list[int]()
        if self.history and self.rng.random() < 0.7:
            earlier_namespace, earlier = self.rng.choice(self.history)
            tokens = (
                earlier[: self.rng.randint(0, len(earlier))] if self.rng.random() < 0.7 else list(earlier)
            )
            namespace = earlier_namespace if self.rng.random() < 0.9 else namespace
        few = self.simulation.manager.block_size + 1
        num_more = self.rng.randint(
            0, self.rng.choice((few, few, 6 * few, longest if self.rng.random() < 0.3 else 1))
        )
        num_more = min(num_more, longest - len(tokens))
        tokens += itertools.islice(self.symbols(), num_more)
        return namespace, tokens or [self.rng.randint(0, 1)]

    def rows(self, share: float) -> list[int]:
        rows = [row for row in self.simulation.sequences if self.rng.random() < share]
        self.rng.shuffle(rows)
        return rows

    # ----------------------------------------------------------------- lookups

    def match(self) -> None:
        namespace, prompt = self.prompt()
        limit = self.rng.randint(0, len(prompt)) if self.rng.random() < 0.2 else None
        num_hashed_before = self.rng.randint(0, len(prompt)) if self.rng.random() < 0.5 else None
        self.simulation.match(prompt, namespace, limit, num_hashed_before)

    def add(self) -> None:
        if not self.simulation.manager.num_free_rows and self.rng.random() < 0.8:
            self.free()
        namespace, prompt = self.prompt()
        self.simulation.add(prompt, namespace)

    def add_from_lookup(self) -> None:
        """Add with a match of just now, or of some time ago."""
        if not self.simulation.lookups or self.rng.random() < 0.3:
            self.match()
        lookup = self.simulation.lookups[self.rng.choice((0, 0, -1))]
        self.simulation.add(lookup.prompt, lookup.namespace, lookup.match)

    def admit_exactly(self) -> None:
        """``blocks_needed`` says exactly whether a prompt and some tokens behind it fit."""
        namespace, prompt = self.prompt()
        match = self.simulation.match(prompt, namespace).match
        num_tokens = self.rng.randint(
            len(prompt), min(len(prompt) + 3, self.simulation.manager.max_model_len)
        )
        before = self.simulation.manager.num_free_blocks
        needed = self.simulation.blocks_needed(match, num_tokens)
        row = self.simulation.add(prompt, namespace, match)
        if row is None:
            return
        fits = bool(self.simulation.reserve([row], [num_tokens - match.num_tokens]))
        assert fits == (needed <= before), (needed, before)
        assert not fits or before - self.simulation.manager.num_free_blocks >= needed

    def branch_off_a_match(self) -> None:
        """Look a sequence up that another is about to overwrite, for lack of blocks, and add it afterwards."""
        if not self.history or self.simulation.manager.num_free_blocks > 20:
            return
        namespace, tokens = self.rng.choice(self.history)
        branch = [*tokens[: self.rng.randint(0, len(tokens) - 1)], self.rng.randint(0, 1)]
        row = self.simulation.add(branch, namespace)
        for other in self.rows(1.0):
            num_left = self.simulation.manager.num_free_blocks * self.simulation.manager.block_size
            self.simulation.reserve(
                [other], [min(self.simulation.room(other), num_left) if other != row else 0]
            )
        lookup = self.simulation.match(tokens, namespace)
        if row is not None:
            self.simulation.reserve([row], [len(branch) - self.simulation.num_computed(row)])
        self.simulation.add(tokens, namespace, lookup.match)

    # -------------------------------------------------------------------- steps

    def fork(self) -> None:
        for row in self.rows(0.3)[:1]:
            self.simulation.fork(row, self.rng.randint(0, 3))

    def branch(self) -> None:
        """Fork a row, often one whose tail waits for a copy, and let parent and children go on at once."""
        rows = self.rows(1.0)
        rows.sort(
            key=lambda row: self.simulation.oracle.books.pending.keys().isdisjoint(self.simulation.table(row))
        )
        for row in rows[:1]:
            family = [row, *self.simulation.fork(row, self.rng.randint(1, 3))]
            if self.rng.random() < 0.4:
                self.simulation.free([family.pop(0)])
            self.rng.shuffle(family)
            self.reserve_or_fewer(family, self.counts(family))

    def reserve(self) -> None:
        rows = self.rows(0.6)
        self.reserve_or_fewer(rows, self.counts(rows))

    def counts(self, rows: list[int]) -> list[int]:
        """Draw how much each row reserves: one token, a few, or up to all that it can hold."""
        most = self.rng.choice(
            (1, 1, 3, self.simulation.manager.block_size, self.simulation.manager.max_model_len)
        )
        least = self.rng.randint(0, 1)
        return [min(self.simulation.room(row), self.rng.randint(least, most)) for row in rows]

    def reserve_or_fewer(self, rows: list[int], counts: list[int]) -> None:
        """Reserve; if blocks are short, again for the rows that fit, and sometimes without the others for good."""
        servable = self.simulation.reserve(rows, counts)
        if len(servable) < len(rows):
            retried = [(row, count) for row, count in zip(rows, counts, strict=True) if row in servable]
            left = self.simulation.reserve([row for row, _ in retried], [count for _, count in retried])
            assert len(left) == len(servable), "servable rows were not served"
            if self.rng.random() < 0.5:
                self.simulation.free([row for row in rows if row not in servable])

    def step(self) -> None:
        self.write()
        self.commit()

    def write(self) -> None:
        rows = self.rows(0.8)
        counts = [self.rng.randint(0, self.simulation.num_writable(row)) for row in rows]
        if self.rng.random() < 0.3:
            rows = [row for row in rows if self.simulation.num_writable(row)]
            counts = [1] * len(rows)
        self.simulation.write(rows, counts, self.symbols())

    def commit(self) -> None:
        sequences = self.simulation.sequences
        rows = [row for row in self.rows(0.9) if sequences[row].num_written]
        few = self.rng.random() < 0.3
        counts = [self.rng.randint(0, n) if few else n for n in (sequences[row].num_written for row in rows)]
        self.simulation.commit(rows, counts)
        for row in rows[:2]:
            sequence = sequences[row]
            tokens = sequence.tokens[: self.simulation.num_computed(row)]
            self.history += [(sequence.namespace, tokens)] if tokens else []
        del self.history[:-40]

    def free(self) -> None:
        self.simulation.free(self.rows(self.rng.choice((0.2, 0.3, 0.5, 1.0))))

    def take_clone_plan(self) -> None:
        self.simulation.take_clone_plan()

    def finish_clone_plan(self) -> None:
        if self.simulation.plans:
            self.simulation.finish_clone_plan(self.rng.randrange(len(self.simulation.plans)))

    def preempt(self) -> None:
        """Free a row and add it again with what it has generated as part of its prompt."""
        for row in self.rows(0.5)[:1]:
            sequence = self.simulation.sequences[row]
            self.simulation.free([row])
            self.simulation.add(sequence.tokens or [0], sequence.namespace)
            self.simulation.oracle.books.paths["preemption"] += 1

    def take_changed_rows(self) -> None:
        self.simulation.take_changed_rows()

    def reset(self) -> None:
        if self.rng.random() < 0.3:
            self.let_go_of_everything()
        self.simulation.reset_prefix_cache()

    def let_go_of_everything(self) -> None:
        self.simulation.free(list(self.simulation.sequences))
        while self.simulation.plans:
            self.simulation.finish_clone_plan(self.rng.randrange(len(self.simulation.plans)))

    def finish(self) -> None:
        """Nothing is lost; then fill the pool with something else, so that all that is cached goes in order."""
        self.let_go_of_everything()
        assert self.simulation.manager.num_free_blocks == self.simulation.manager.num_usable_blocks
        longest = self.simulation.manager.max_model_len
        step = self.simulation.manager.block_size * (1 + self.simulation.manager.num_usable_blocks // 100)
        while True:
            row = self.simulation.add([2] * longest, b"another")
            if row is None:
                break
            for num_tokens in range(1, longest, step):
                if not self.simulation.reserve([row], [num_tokens]):
                    break
        self.let_go_of_everything()
        self.simulation.reset_prefix_cache()
        assert self.simulation.manager.num_free_blocks == self.simulation.manager.num_usable_blocks

    def make_a_mistake(self) -> None:
        """One call that has to be refused."""
        name, call = self.rng.choice(possible_mistakes(self.simulation, self.rng))
        self.simulation.mistake(name, call)
