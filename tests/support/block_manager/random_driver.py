"""Drives a simulation with seeded random calls: few symbols only, so that prefixes collide all the time."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rose_backend.block_manager import BlockManager
from tests.support.block_manager.simulation import Simulation

NAMESPACES = (b"", b"", b"tenant-a", b"tenant-b")
WEIGHTS = {
    "match": 7,
    "add": 12,
    "add_from_lookup": 7,
    "admit_exactly": 6,
    "branch_off_a_match": 2,
    "fork": 2,
    "branch": 7,
    "reserve": 16,
    "reserve_next_blocks": 2,
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
    "checkpoint": 12,
}
"""``checkpoint`` with states only, and forks without them."""
Mistake = tuple[str, str, Callable[[BlockManager], object]]
"""Name, what the error says, and the call."""


class RandomDriver:
    """Each method of ``WEIGHTS`` makes one or a few calls. Equal seeds make equal calls.

    Args:
        simulation: what is driven.
        seed: of all choices.
        symbols: the tokens of prompts.
    """

    def __init__(self, simulation: Simulation, seed: int, symbols: Sequence[int] = (0, 1)) -> None:
        self.simulation = simulation
        self.rng = random.Random(seed)
        self.alphabet = symbols
        self.has_states = simulation.num_state_groups > 0
        self.weights = {
            name: weight
            for name, weight in WEIGHTS.items()
            if name not in (("fork", "branch") if self.has_states else ("checkpoint",))
        }
        self.history: list[tuple[bytes, list[int]]] = []
        self.steps: Counter[str] = Counter()

    def run(self, num_calls: int) -> None:
        """Make at least ``num_calls`` calls, then let go of everything and evict block after block."""
        names, weights = list(self.weights), list(itertools.accumulate(self.weights.values()))
        while self.simulation.calls.total() < num_calls:
            name = self.rng.choices(names, cum_weights=weights)[0]
            self.steps[f"step: {name}"] += 1
            getattr(self, name)()
        self.finish()

    def symbols(self) -> Iterator[int]:
        while True:
            yield from self.rng.choices(self.alphabet, k=32)

    def prompt(self) -> tuple[bytes, list[int]]:
        """Draw a prompt: often an earlier sequence, cut somewhere, and something after it."""
        longest = self.simulation.manager.max_model_len
        namespace, tokens = self.rng.choice(NAMESPACES), list[int]()
        if self.history and self.rng.random() < 0.7:
            earlier_namespace, earlier = self.rng.choice(self.history)
            tokens = (
                earlier[: self.rng.randint(0, len(earlier))] if self.rng.random() < 0.7 else list(earlier)
            )
            namespace = earlier_namespace if self.rng.random() < 0.9 else namespace
        few = self.simulation.block_size + 1
        num_more = self.rng.randint(
            0, self.rng.choice((few, few, 6 * few, longest if self.rng.random() < 0.3 else 1))
        )
        num_more = min(num_more, longest - len(tokens))
        tokens += itertools.islice(self.symbols(), num_more)
        return namespace, tokens or [self.rng.choice(self.alphabet)]

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
        """``blocks_needed`` says exactly whether a prompt and some tokens after it fit."""
        simulation = self.simulation
        namespace, prompt = self.prompt()
        match = simulation.match(prompt, namespace).match
        num_tokens = self.rng.randint(len(prompt), min(len(prompt) + 3, simulation.manager.max_model_len))
        before = simulation.manager.num_free_blocks
        needed = simulation.blocks_needed(match, num_tokens)
        row = simulation.add(prompt, namespace, match)
        if row is None:
            return
        fits = bool(simulation.reserve([row], [num_tokens - match.num_tokens]))
        assert fits == (needed <= before), (needed, before)
        assert not fits or before - simulation.manager.num_free_blocks >= needed

    def branch_off_a_match(self) -> None:
        """Look a sequence up that another is about to overwrite, for lack of blocks, and add it afterwards."""
        simulation = self.simulation
        if not self.history or simulation.manager.num_free_blocks > 20:
            return
        namespace, tokens = self.rng.choice(self.history)
        branch = [*tokens[: self.rng.randint(0, len(tokens) - 1)], self.rng.choice(self.alphabet)]
        row = simulation.add(branch, namespace)
        for other in self.rows(1.0):
            num_left = simulation.manager.num_free_blocks * simulation.block_size
            simulation.reserve([other], [min(simulation.room(other), num_left) if other != row else 0])
        lookup = simulation.match(tokens, namespace)
        if row is not None:
            simulation.reserve([row], [len(branch) - simulation.sequences[row].num_computed])
        simulation.add(tokens, namespace, lookup.match)

    # -------------------------------------------------------------------- steps

    def fork(self) -> None:
        for row in self.rows(0.3)[:1]:
            self.simulation.fork(row, self.rng.randint(0, 3))

    def branch(self) -> None:
        """Fork a row, often one whose tail waits for a copy, and let parent and children go on at once."""
        rows, pending = self.rows(1.0), self.simulation.pending.keys()
        rows.sort(key=lambda row: all(map(pending.isdisjoint, self.simulation.blocks_by_group_type(row))))
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
        most = self.rng.choice((1, 1, 3, self.simulation.block_size, self.simulation.manager.max_model_len))
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

    def reserve_next_blocks(self) -> None:
        """Of rows that have begun, which with states is when they have one."""
        simulation = self.simulation
        rows = [row for row in self.rows(0.7) if may_take_next_block(simulation, row)]
        has_begun = simulation.running if self.has_states else simulation.manager.num_row_blocks.__getitem__
        simulation.reserve_next_blocks([row for row in rows if has_begun(row)])

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
            if tokens := sequences[row].computed:
                self.history.append((sequences[row].namespace, tokens))
        del self.history[:-40]

    def checkpoint(self) -> None:
        """Commit what steps have written, and keep the states of some rows."""
        rows = self.rows(0.5)
        self.simulation.commit(rows, [0] * len(rows))
        self.simulation.checkpoint(rows)

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

    def take_changed_rows(self) -> None:
        self.simulation.take_changed_rows()

    def reset(self) -> None:
        if self.rng.random() < 0.3:
            self.let_go_of_everything()
        self.simulation.reset_prefix_cache()

    def let_go_of_everything(self) -> None:
        if self.has_states:  # checkpoints are held until their copies are planned
            self.simulation.take_clone_plan()
        self.simulation.free(list(self.simulation.sequences))
        while self.simulation.plans:
            self.simulation.finish_clone_plan(self.rng.randrange(len(self.simulation.plans)))

    def finish(self) -> None:
        """Nothing is lost; then fill the pool with something else, so that all that is cached goes in order."""
        manager = self.simulation.manager
        self.let_go_of_everything()
        assert manager.num_free_blocks == manager.num_usable_blocks
        step = manager.block_size * (1 + manager.num_usable_blocks // 100)
        while (row := self.simulation.add([2] * manager.max_model_len, b"another")) is not None:
            for num_tokens in range(1, manager.max_model_len, step):
                if not self.simulation.reserve([row], [num_tokens]):
                    break
        self.let_go_of_everything()
        self.simulation.reset_prefix_cache()
        assert manager.num_free_blocks == manager.num_usable_blocks

    def make_a_mistake(self) -> None:
        """One call that has to be refused."""
        self.simulation.mistake(*self.rng.choice(possible_mistakes(self.simulation, self.rng)))


def may_take_next_block(simulation: Simulation, row: int) -> bool:
    """Whether a row has reserved all its blocks by itself, and may be longer."""
    num_blocks = int(simulation.manager.num_row_blocks[row])
    writable = simulation.sequences[row].num_computed + simulation.num_writable(row)
    return writable == num_blocks * simulation.block_size and num_blocks < simulation.manager.table.width


def possible_mistakes(simulation: Simulation, rng: random.Random) -> list[Mistake]:
    """Return every mistake that no right caller makes and that can be made now."""
    longest, one, empty = simulation.manager.max_model_len, np.array([1], np.int32), np.zeros(0, np.int32)
    num_rows = len(simulation.manager.num_row_blocks)
    idle = sorted(set(range(num_rows)) - set(simulation.sequences))
    bad = rng.choice([*idle, -1, -num_rows - 1, num_rows, num_rows + 100])
    wrong = "not in use" if 0 <= bad < num_rows else "allowed are 0 to"
    mistakes: list[Mistake] = [
        ("add an empty prompt", "got 0 tokens", lambda m: m.add(empty)),
        ("add too long a prompt", f"got {longest + 1} tok", lambda m: m.add(np.zeros(longest + 1, np.int32))),
        ("reserve for a row not in use", wrong, lambda m: m.reserve(np.array([bad]), 1)),
        ("reserve a block for a row not in use", "row", lambda m: m.reserve_next_blocks(np.array([bad]))),
        ("commit a row not in use", "not in use|allowed", lambda m: m.commit(np.array([bad]), 1, one)),
        ("free a row not in use", wrong, lambda m: m.free(np.array([bad]))),
        (
            "release what a row not in use has passed",
            wrong,
            lambda m: m.release_passed_blocks(np.array([bad])),
        ),
        ("checkpoint a row not in use", wrong, lambda m: m.checkpoint(np.array([bad]))),
        ("fork a row not in use", "states cannot be forked|" + wrong, lambda m: m.fork(bad, 1)),
    ]
    if not simulation.manager.table.windowed:
        del mistakes[6]
    if not simulation.num_state_groups:
        mistakes = [one for one in mistakes if not one[0].startswith("checkpoint")]
    if simulation.manager.cache is not None:
        message, prompt = f"block_hashes: got 0 for {longest} tokens", np.zeros(longest, np.int32)
        mistakes.append(("match with too few hashes", message, lambda m: m.match(prompt, block_hashes=[])))
    if simulation.finished_plan is not None:
        plan = simulation.finished_plan
        mistakes.append(("finish a plan twice", "finished before", lambda m: m.finish_clone_plan(plan)))
    if simulation.sequences:
        mistakes += _mistakes_with_a_row(simulation, rng.choice(list(simulation.sequences)))
    return mistakes


def _mistakes_with_a_row(simulation: Simulation, row: int) -> list[Mistake]:
    writable, room = simulation.num_writable(row), simulation.room(row)
    one, twice, ids = np.array([row]), np.array([row, row]), np.zeros(writable + 1, np.int32)
    nothing, negative = np.array([0, 0]), "-1 tokens, allowed are 0 to"
    over = "has not reserved|allowed are 0 to max_model_len"
    mistakes: list[Mistake] = [
        ("reserve for a row twice", "duplicate row", lambda m: m.reserve(twice, min(room, 1))),
        ("reserve nothing for a row twice", "duplicate row", lambda m: m.reserve(twice, nothing)),
        ("reserve a block for a row twice", "duplicate row", lambda m: m.reserve_next_blocks(twice)),
        ("reserve a negative number", negative, lambda m: m.reserve(one, -1)),
        ("reserve beyond max_model_len", "max_model_len", lambda m: m.reserve(one, room + 1)),
        ("reserve beyond 32 bits", "max_model_len", lambda m: m.reserve(one, np.array([1 << 40]))),
        ("commit more than was reserved", over, lambda m: m.commit(one, writable + 1, ids)),
        ("commit with too many ids", r"\d+ token ids for", lambda m: m.commit(one, writable, ids)),
        ("commit a row twice", "duplicate row", lambda m: m.commit(twice, 0, ids[:0])),
        ("commit a negative number", negative, lambda m: m.commit(one, np.array([-1]), ids[:0])),
        ("free a row twice", "duplicate row", lambda m: m.free(twice)),
        ("fork a negative number", "states cannot be|num_children: got -1", lambda m: m.fork(row, -1)),
    ]
    if writable:
        few = ids[: writable - 1]
        mistakes.append(("commit with too few ids", "token ids for", lambda m: m.commit(one, writable, few)))
    if not may_take_next_block(simulation, row):
        message = "cannot get a block after its own"
        mistakes.append(("reserve a block after a shared one", message, lambda m: m.reserve_next_blocks(one)))
    return mistakes
