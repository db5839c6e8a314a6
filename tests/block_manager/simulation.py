"""Block manager, oracle and a K/V memory side by side: every call goes to all three, and all must agree after it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager, ClonePlan, PrefixMatch
from rose_backend.errors import RowError
from tests.block_manager.deep_state import state_of
from tests.block_manager.event_mirror import EventMirror
from tests.block_manager.kv_memory import KVMemory, NumberMemory, kv_values
from tests.block_manager.oracle import Oracle
from tests.block_manager.oracle_books import agree


@dataclass
class Sequence:
    """What a row is meant to hold."""

    namespace: bytes
    tokens: list[int]
    """Prompt and generated tokens; those that are not yet computed may still change behind the prompt."""
    values: list[int] = field(default_factory=list)
    """K/V of ``tokens``."""
    num_prompt_tokens: int = 0
    num_written: int = 0
    """Tokens behind the computed ones whose K/V a step has written and that are not committed yet."""

    def __post_init__(self) -> None:
        self.values = kv_values(self.namespace, self.tokens, [])
        self.num_prompt_tokens = len(self.tokens)

    def grow(self, num_tokens: int, source: Iterator[int]) -> None:
        new = [next(source) for _ in range(num_tokens - len(self.tokens))]
        self.values += kv_values(self.namespace, new, self.values)
        self.tokens += new

    def reject_behind(self, num_tokens: int) -> None:
        """Other tokens may be generated behind the first ``num_tokens``; the prompt stays."""
        num_kept = max(num_tokens, self.num_prompt_tokens)
        del self.tokens[num_kept:], self.values[num_kept:]
        self.num_written = 0


@dataclass(frozen=True)
class Lookup:
    """A match that was asked for, perhaps some time ago."""

    prompt: list[int]
    namespace: bytes
    match: PrefixMatch


class Simulation:
    """Arguments as for ``BlockManager``; ``memory``: where K/V is kept.

    Each method is one call of the manager. Afterwards the oracle has agreed to the answer, every invariant was
    recounted, the public arrays equal the oracle's books, and the K/V of each row, read through its table, is right.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int = 6,
        max_model_len: int = 100,
        prefix_cache: bool = True,
        full_blocks_only: bool = False,
        record_events: bool = False,
        memory: Callable[[int, int], KVMemory] = NumberMemory,
    ) -> None:
        options: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "prefix_cache": prefix_cache,
            "full_blocks_only": full_blocks_only,
        }
        self.manager = BlockManager(
            **options, max_model_len=max_model_len, bytes_per_block=96, record_events=record_events
        )
        self.oracle = Oracle(**options)
        self.mirror = EventMirror(self.manager) if record_events else None
        self.memory = memory(num_blocks, block_size)
        self.sequences: dict[int, Sequence] = {}
        self.lookups: deque[Lookup] = deque(maxlen=4)
        self.plans: list[ClonePlan] = []
        self.finished_plan: ClonePlan | None = None
        self.calls: Counter[str] = Counter()

    @property
    def paths(self) -> Counter[str]:
        """How often each path was taken, so that a run can show what it has tried."""
        books = self.oracle.books
        return books.paths + books.stats

    def num_computed(self, row: int) -> int:
        return len(self.oracle.books.rows[row].tokens)

    def room(self, row: int) -> int:
        """Tokens that the row could still be given."""
        return self.manager.max_model_len - self.num_computed(row)

    def num_writable(self, row: int) -> int:
        """Tokens behind the computed ones that the row may write now."""
        books = self.oracle.books
        state = books.rows[row]
        column, offset = divmod(len(state.tokens), books.block_size)
        if offset and books.blocks[state.blocks[column]].writer != row:
            return 0
        return min(len(state.blocks) * books.block_size, self.manager.max_model_len) - len(state.tokens)

    # ------------------------------------------------------------------ calls

    def match(
        self,
        prompt: list[int],
        namespace: bytes,
        max_tokens: int | None = None,
        num_hashed_before: int | None = None,
    ) -> Lookup:
        """``num_hashed_before``: look up by hashes, of which those of that many tokens were made earlier."""
        tokens, hashes = np.array(prompt, np.int32), None
        if num_hashed_before is not None:
            known = self.manager.hash_blocks(tokens[:num_hashed_before], namespace=namespace)
            hashes = self.manager.hash_blocks(tokens, namespace=namespace, known=known)
        answer = self.manager.match(tokens, namespace=namespace, max_tokens=max_tokens, block_hashes=hashes)
        self.oracle.match(prompt, namespace, max_tokens, answer)
        values = kv_values(namespace, prompt[: answer.num_tokens], [])
        assert self.memory.holds(answer.block_ids, np.array(values, np.int64)), (
            "found K/V is not the prompt's"
        )
        self.lookups.append(Lookup(prompt, namespace, answer))
        self.check("match")
        return self.lookups[-1]

    def blocks_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        answer = self.manager.blocks_needed(match, num_tokens)
        self.oracle.blocks_needed(match, num_tokens, answer)
        self.check("blocks_needed")
        return answer

    def add(self, prompt: list[int], namespace: bytes, match: PrefixMatch | None = None) -> int | None:
        answer = self.manager.add(np.array(prompt, np.int32), namespace=namespace, match=match)
        table = [] if answer is None else self.table(answer.row)
        self.oracle.add(prompt, namespace, match, answer, table)
        if answer is not None:
            self.sequences[answer.row] = Sequence(namespace, list(prompt))
        self.check("add")
        return None if answer is None else answer.row

    def fork(self, row: int, num_children: int) -> list[int]:
        answer = self.manager.fork(row, num_children)
        children = None if answer is None else answer.tolist()
        self.oracle.fork(row, num_children, children)
        parent = self.sequences[row]
        for child in children or []:
            self.sequences[child] = Sequence(parent.namespace, parent.tokens[: self.num_computed(row)])
        self.check("fork")
        return children or []

    def reserve(self, rows: list[int], counts: list[int]) -> list[int]:
        """Return the rows that the manager says it can serve together."""
        answer = self.manager.reserve(np.array(rows, np.int64), np.array(counts, np.int64))
        handed_out = self.oracle.reserve(rows, counts, answer, [self.table(row) for row in rows])
        self.memory.spoil(np.array(handed_out, np.int64))
        self.check("reserve")
        return [row for row, fits in zip(rows, answer.servable.tolist(), strict=True) if fits]

    def write(self, rows: list[int], counts: list[int], symbols: Iterator[int]) -> None:
        """A step: pending copies run, then each row writes K/V. The manager hears of it at ``commit``."""
        if self.oracle.books.pending:
            self.take_clone_plan()
        for row, count in zip(rows, counts, strict=True):
            sequence, start = self.sequences[row], self.num_computed(row)
            sequence.grow(start + count, symbols)
            sequence.num_written = count
            columns, offsets = np.divmod(np.arange(start, start + count), self.manager.block_size)
            values = np.array(sequence.values[start : start + count], np.int64)
            self.memory.write(self.manager.block_table[row, columns], offsets, values)

    def commit(self, rows: list[int], counts: list[int]) -> None:
        """Commit the first tokens that the last step wrote; the others are rejected."""
        token_ids: list[int] = []
        for row, count in zip(rows, counts, strict=True):
            sequence, start = self.sequences[row], self.num_computed(row)
            token_ids += sequence.tokens[start : start + count]
            self.oracle.books.paths["commit of fewer than written"] += 0 < count < sequence.num_written
            sequence.reject_behind(start + count)
        # One number for all rows is another path in the manager.
        num_tokens = counts[0] if counts and len(set(counts)) == 1 else np.array(counts, np.int64)
        self.manager.commit(np.array(rows, np.int64), num_tokens, np.array(token_ids, np.int32))
        self.oracle.commit(rows, counts, token_ids)
        self.check("commit")

    def free(self, rows: list[int]) -> None:
        self.manager.free(np.array(rows, np.int64))
        self.oracle.free(rows)
        for row in rows:
            del self.sequences[row]
        self.check("free")

    def take_clone_plan(self) -> None:
        """Take the plan, and run its copies."""
        plan = self.manager.take_clone_plan()
        self.oracle.take_clone_plan(plan)
        if plan is not None:
            self.memory.copy(plan.src_block_ids, plan.dst_block_ids)
            self.plans.append(plan)
        self.check("take_clone_plan")

    def finish_clone_plan(self, index: int) -> None:
        plan = self.plans.pop(index)
        self.manager.finish_clone_plan(plan)
        self.oracle.finish_clone_plan(plan)
        self.finished_plan = plan
        self.check("finish_clone_plan")

    def take_changed_rows(self) -> None:
        self.oracle.take_changed_rows(self.manager.take_changed_rows().tolist())
        self.check("take_changed_rows")

    def reset_prefix_cache(self) -> None:
        self.oracle.reset_prefix_cache(self.manager.reset_prefix_cache())
        self.check("reset_prefix_cache")

    def mistake(self, name: str, call: Callable[[BlockManager], object]) -> None:
        """A call that must be refused by a typed error and change nothing at all."""
        before = state_of(self.manager)
        with pytest.raises(RowError):
            call(self.manager)
        after = state_of(self.manager)
        agree(f"state after the mistake {name!r}", after, before)
        self.oracle.books.paths[f"mistake: {name}"] += 1
        self.check("mistake")

    # ----------------------------------------------------------------- checks

    def table(self, row: int) -> list[int]:
        table: list[int] = self.manager.block_table[row, : self.manager.num_row_blocks[row]].tolist()
        return table

    def check(self, name: str) -> None:
        self.calls[name] += 1
        self.manager.check_integrity()
        if self.mirror is not None:
            self.mirror.follow(self.oracle.books)
        if self.calls.total() % 16 == 0:
            self.check_some_findable_blocks()
        books = self.oracle.books
        agree("num_free_blocks", self.manager.num_free_blocks, books.num_free_blocks)
        agree("num_free_rows", self.manager.num_free_rows, books.num_free_rows)
        stats = self.manager.stats.as_dict()
        agree("bytes_cloned", stats["bytes_cloned"], 96 * books.stats["clones"])
        agree("stats", {name: stats.get(name) for name in books.stats}, dict(books.stats))
        lengths = [0] * books.max_num_seqs
        for row, state in books.rows.items():
            lengths[row] = len(state.tokens)
            table = self.table(row)
            agree(f"blocks of row {row}", table, state.blocks)
            values = np.array(self.sequences[row].values[: len(state.tokens)], np.int64)
            # What a pending copy is still to fill is, so far, where it is copied from.
            read = [books.pending[block][0] if block in books.pending else block for block in table]
            assert self.memory.holds(np.array(read, np.int64), values), (
                f"K/V of row {row} is not what was written"
            )
        agree("num_computed_tokens", self.manager.num_computed_tokens.tolist(), lengths)
        agree("eviction order", self.manager.pool.cached_blocks().tolist(), list(books.evict_next))
        if self.manager.cache is not None:
            findable = [block for block, state in books.blocks.items() if state.prefix is not None]
            agree("findable blocks", sorted(self.manager.cache.cached_blocks().tolist()), sorted(findable))

    def check_some_findable_blocks(self) -> None:
        """K/V that a lookup could find, whether a row holds it or not, is what its tokens ask for."""
        prefixes = list(self.oracle.books.findable)
        start = self.calls.total() % max(len(prefixes), 1)
        for namespace, earlier in prefixes[start : start + 8]:
            values_before = kv_values(namespace, list(earlier), [])
            for block_id in self.oracle.books.findable[namespace, earlier]:
                tokens = self.oracle.books.blocks[block_id].tokens
                values = np.array(kv_values(namespace, tokens, values_before), np.int64)
                assert self.memory.holds(np.array([block_id]), values), (
                    f"K/V of findable block {block_id} is wrong"
                )
