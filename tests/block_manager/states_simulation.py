"""A block manager with states beside an independent book of the checkpoints that lookups must find.

As ``KindsSimulation``, and: the running state of each row, read through every group, is that of the tokens which its
steps have computed, each checkpoint is that of its tokens, bit by bit, and the manager has exactly the checkpoints of
the book. A state cannot be cut, so what a step has written is committed whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from rose_backend.block_manager import GroupKind, PrefixMatch
from tests.block_manager.kinds_simulation import KindsSimulation
from tests.block_manager.kv_memory import kv_values
from tests.block_manager.oracle_books import agree
from tests.block_manager.random_driver import RandomDriver

STATE_KIND = 15
"""Sets the contents of states apart from K/V."""


class StatesSimulation(KindsSimulation):
    """Arguments as for ``BlockManager``; the last kind has states."""

    def __init__(self, *, kinds: Sequence[GroupKind], **options: Any) -> None:
        super().__init__(kinds=kinds, **options)
        self.num_groups = kinds[-1].num_groups
        self.book: dict[tuple[bytes, tuple[int, ...]], int] = {}
        """The checkpoint of each prefix."""
        self.state_len: dict[int, int] = {}
        """Tokens that the running state of each row is of."""
        self.last: dict[int, tuple[bytes, tuple[int, ...]] | None] = {}
        """The prefix of the last checkpoint of each row."""
        self.running_before: dict[int, int] = {}
        self.found_before: list[int] = []
        self.is_ambiguous = False

    @property
    def running(self) -> list[int]:
        states = self.manager.states
        assert states is not None
        return states.running.tolist()

    def groups(self, block: int) -> list[int]:
        """Return a state's block of each group."""
        return self.manager.pool.blocks_of_groups(np.array([block]), self.num_groups)[:, 0].tolist()

    def has_state(self, tokens: list[int], namespace: bytes) -> bool:
        return not tokens or (namespace, tuple(tokens)) in self.book

    def check_state(self, block: int, namespace: bytes, tokens: Sequence[int]) -> None:
        value = kv_values(namespace, list(tokens), [])[-1:]
        for group, one in enumerate(self.groups(block)):
            source = self.pending.get(one, one)
            assert self.memory.holds(np.array([source]), self.values(STATE_KIND, group, value)), (
                f"group {group} of state {block} is not that of its {len(tokens)} tokens"
            )

    def check_match(self, match: PrefixMatch, prompt: list[int], namespace: bytes) -> None:
        super().check_match(match, prompt, namespace)
        agree("has a checkpoint", match.checkpoint != 0, match.num_tokens > 0)
        if match.num_tokens:
            self.check_state(match.checkpoint, namespace, prompt[: match.num_tokens])
            self.paths["hit at a checkpoint"] += 1
            self.paths["checkpoint inside a block"] += match.num_tokens % self.block_size > 0
        elif match.num_known_tokens:
            self.paths["no hit because of a state"] += 1

    def add(self, prompt: list[int], namespace: bytes, match: PrefixMatch | None = None) -> int | None:
        ends_hit = self.manager.pool.ends_hit.copy()
        row = super().add(prompt, namespace, match)
        if row is not None:
            self.state_len[row] = self.num_computed(row)
            if (found := int(self.manager.states.found[row])) and ends_hit[found]:
                self.last[row] = self.place_of(found)
        return row

    def fork(self, row: int, num_children: int) -> list[int]:
        return []

    # ------------------------------------------------------------------ taking blocks

    def reserve(self, rows: list[int], counts: list[int]) -> list[int]:
        self.running_before = dict(enumerate(self.running))
        self.found_before = self.manager.states.found.tolist()
        self.note_ambiguity()
        return super().reserve(rows, counts)

    def least_blocks(self, rows: list[int], counts: list[int]) -> int:
        starts = sum(
            not self.running_before[row] and count > self.num_writable(row)
            for row, count in zip(rows, counts, strict=True)
        )
        return super().least_blocks(rows, counts) + starts * self.num_groups

    def read_tables(self, rows: list[int], before: dict[int, list[list[int]]]) -> list[int]:
        taken = super().read_tables(rows, before)
        for row in rows:
            block = self.running[row]
            if block != self.running_before[row]:
                agree("running state before", self.running_before[row], 0)
                taken += self.take_state(block, self.found_before[row])
        self.lose(taken)
        return taken

    def take_state(self, block: int, source: int) -> list[int]:
        """Spoil what was handed out for a state, and note the copy into it if it has a source."""
        blocks = self.groups(block)
        self.memory.spoil(np.array(blocks))
        for one, other in zip(self.groups(source), blocks, strict=True) if source else ():
            self.paths["copy of a copy"] += one in self.pending
            self.pending[other] = self.pending.get(one, one)
        return blocks

    def lose(self, taken: list[int]) -> None:
        """Take what was handed out for something else out of the book."""
        for place, block in list(self.book.items()):
            if block in taken or not self.manager.pool.is_cached[block]:
                del self.book[place]
                self.paths["checkpoint evicted"] += 1

    def is_spared(self, block: int) -> bool:
        place = self.place_of(block)
        if place is None:
            return super().is_spared(block)
        is_wanted = self.manager.pool.ends_hit[block] or place in self.last.values()
        return bool(is_wanted) and any(self.last_blocks_held(*place))

    def place_of(self, block: int) -> tuple[bytes, tuple[int, ...]] | None:
        return next((place for place, other in self.book.items() if other == block), None)

    def last_blocks_held(self, namespace: bytes, tokens: tuple[int, ...]) -> list[bool]:
        """Of the blocks that hold the last tokens of a prefix behind the others: whether somebody holds each."""
        first = (len(tokens) - 1) // self.block_size * self.block_size
        blocks = self.findable(0).get((namespace, tokens[:first]), [])
        wanted = list(tokens[first:])
        return [
            bool(self.manager.pool.ref_counts[block])
            for block, kept in blocks
            if kept[: len(wanted)] == wanted
        ]

    def check_evicted(self, evict_next: list[int], spared: set[int], taken: list[int]) -> None:
        if not self.is_ambiguous:
            super().check_evicted(evict_next, spared, taken)

    def note_ambiguity(self) -> None:
        """Note whether some blocks with a prefix's last tokens are held and others are not: one of them decides."""
        self.is_ambiguous = any(len(set(self.last_blocks_held(*place))) > 1 for place in self.book)

    def checkpoint(self, rows: list[int]) -> None:
        """Rows whose state is that of their computed tokens."""
        pool, table = self.manager.pool, self.manager.table
        rows = [row for row in rows if self.state_len[row] == self.num_computed(row)]
        self.note_ambiguity()
        evict_next = pool.cached_blocks().tolist()
        spared = {block for block in evict_next if self.is_spared(block)}
        columns = len(self.sequences) * sum(kind.num_groups for kind in table.kinds)
        num_spare = self.manager.num_free_blocks - columns
        expected = []
        known = set(self.book)
        for row in rows:
            place = self.sequences[row].namespace, tuple(self.computed[row])
            is_usable = place[1] and not (self.full_blocks_only and len(place[1]) % self.block_size)
            if not (self.running[row] and is_usable and self.manager.cache):
                continue
            self.last[row] = place
            if place in known:
                continue
            self.paths["no checkpoint for lack of blocks"] += num_spare < self.num_groups
            if num_spare >= self.num_groups:
                num_spare -= self.num_groups
                expected.append((row, place))
                known.add(place)
        # Rows change what is spared one after the other, as they take blocks.
        self.is_ambiguous |= spared != {block for block in evict_next if self.is_spared(block)}
        self.manager.checkpoint(np.array(rows, np.int64))
        taken: list[int] = []
        for row, place in expected:
            # Read from the index: which block it took is the manager's choice.
            block = self.manager_book()[place]
            taken += self.take_state(block, self.running[row])
        self.lose(taken)
        for _, place in expected:
            self.book[place] = self.manager_book()[place]
        self.paths["checkpoints"] += len(expected)
        self.check_evicted(evict_next, spared, taken)
        self.check("checkpoint")

    def manager_book(self) -> dict[tuple[bytes, tuple[int, ...]], int]:
        """What the manager's index has, by the tokens that the digests stand for."""
        cache = self.manager.cache
        assert cache is not None and cache.states is not None
        tokens_behind: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        for namespace in {sequence.namespace for sequence in self.sequences.values()} | {
            namespace for namespace, _ in self.book
        }:
            tokens_behind[cache.hasher.root_digest(namespace)] = namespace, ()
        for namespace, tokens in {
            (self.sequences[row].namespace, tuple(self.computed[row])) for row in self.sequences
        } | set(self.book):
            digests = cache.hasher.hash_blocks(np.array(tokens, np.int32), namespace, ())
            for column, digest in enumerate(digests):
                tokens_behind[digest] = namespace, tokens[: column * self.block_size]
        found = {}
        for block in cache.states.block_ids().tolist():
            digest, tail = cache.states.place_of(block)
            namespace, tokens = tokens_behind[digest]
            found[namespace, tokens + tuple(np.frombuffer(tail, np.int32).tolist())] = block
        return found

    # ------------------------------------------------------------------ steps

    def write(self, rows: list[int], counts: list[int], symbols: Iterator[int]) -> None:
        pairs = [
            (row, count)
            for row, count in zip(rows, counts, strict=True)
            if self.state_len[row] == self.num_computed(row)
        ]
        rows, counts = [row for row, _ in pairs], [count for _, count in pairs]
        super().write(rows, counts, symbols)
        for row, count in pairs:
            if count:
                block, end = self.running[row], self.num_computed(row) + count
                assert block, "a step has no state to write"
                self.state_len[row] = end
                for group, one in enumerate(self.groups(block)):
                    value = self.values(STATE_KIND, group, [self.sequences[row].values[end - 1]])
                    self.memory.write(np.array([one]), np.array([0]), value)

    def commit(self, rows: list[int], counts: list[int]) -> None:
        super().commit(rows, [self.sequences[row].num_written for row in rows])

    def free(self, rows: list[int]) -> None:
        are_known = [self.state_len[row] == self.num_computed(row) for row in rows]
        for row, is_known in zip(rows, are_known, strict=True):
            tokens, block = tuple(self.computed[row]), self.running[row]
            is_usable = tokens and not (self.full_blocks_only and len(tokens) % self.block_size)
            if is_known and is_usable and block and block not in self.pending and self.manager.cache:
                place = self.sequences[row].namespace, tokens
                self.paths["state handed over"] += place not in self.book
                self.book.setdefault(place, block)
        for row in rows:
            del self.state_len[row]
            self.last.pop(row, None)
        self.manager.free(np.array(rows, np.int64), states_are_known=np.array(are_known, np.bool_))
        self.drop_called_off()
        for row in rows:
            del self.sequences[row], self.computed[row]
        self.check("free")

    def reset_prefix_cache(self) -> None:
        if not (self.sequences or self.plans or self.pending):
            self.book.clear()
        super().reset_prefix_cache()

    def check(self, name: str) -> None:
        super().check(name)
        for row, length in self.state_len.items():
            if self.running[row] and length:
                sequence = self.sequences[row]
                self.check_state(self.running[row], sequence.namespace, sequence.tokens[:length])
        if self.manager.cache is None:
            assert not self.book
            return
        agree("checkpoints", self.manager_book(), self.book)
        for (namespace, tokens), block in list(self.book.items())[:: max(len(self.book) // 8, 1)]:
            self.check_state(block, namespace, tokens)


class StatesDriver(RandomDriver):
    """Makes checkpoints, too."""

    weights: ClassVar[dict[str, int]] = {**RandomDriver.weights, "checkpoint": 12}
    simulation: StatesSimulation

    def checkpoint(self) -> None:
        """Commit what steps have written, and keep the states of some rows."""
        rows = self.rows(0.5)
        self.simulation.commit(rows, [0] * len(rows))
        self.simulation.checkpoint(rows)

    def let_go_of_everything(self) -> None:
        """Checkpoints are held until their copies are planned."""
        self.simulation.take_clone_plan()
        super().let_go_of_everything()
