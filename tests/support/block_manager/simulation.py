"""A block manager beside what its answers must be, for any KV cache group types: with windows, with states.

Each method is one call of the manager. Afterwards every invariant was recounted, and all K/V that a row's next token
attends to, read through the row's table for every group, is what was written for these tokens, bit by bit; so is the
K/V of blocks that a lookup could find. Blocks that are handed out are spoiled first. With one group that keeps
everything the oracle has agreed to the answer and to all that can be read. With others, what lookups may find is taken
from the manager's own indexes, after that was checked to have lost nothing but what was evicted or overwritten.

With states, the running state of each row is that of the tokens which its steps have computed, each checkpoint is that
of its tokens, and there are exactly the checkpoints of an independent book. A state cannot be cut, so what a step has
written is committed whole.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest

from rose_backend.block_manager import (
    BlockManager,
    BlockRemoved,
    BlockStored,
    CacheCleared,
    ClonePlan,
    GroupType,
    PrefixMatch,
    Reservation,
)
from rose_backend.errors import RowError
from tests.support.block_manager.kv_memory import NumberMemory, TensorMemory, kv_values
from tests.support.block_manager.oracle import MANY_BLOCKS, Oracle, Prefix, agree, longest_match

STATE_KIND = 15
"""Sets the contents of states apart from K/V."""
BYTES_PER_BLOCK = 96
Findable = dict[Prefix, list[tuple[int, list[int]]]]
"""Blocks and their tokens, by namespace and the tokens before them."""
Method = TypeVar("Method", bound=Callable[..., Any])


class Sequence:
    """What a row is meant to hold."""

    def __init__(self, namespace: bytes, tokens: list[int], num_computed: int) -> None:
        self.namespace = namespace
        self.tokens = list(tokens)
        """Prompt and generated tokens; those that are not yet computed may still change after the prompt."""
        self.values = kv_values(namespace, tokens, [])
        """K/V of ``tokens``."""
        self.num_prompt_tokens = len(tokens)
        self.num_computed = num_computed
        self.num_written = 0
        """Tokens after the computed ones whose K/V a step has written and that are not committed yet."""
        self.state_len = num_computed
        """With states: tokens that the running state is of."""
        self.last_checkpoint: Prefix | None = None

    @property
    def computed(self) -> list[int]:
        return self.tokens[: self.num_computed]

    @property
    def place(self) -> Prefix:
        return self.namespace, tuple(self.computed)

    @property
    def knows_state(self) -> bool:
        """Whether the running state is that of the computed tokens."""
        return self.state_len == self.num_computed

    def grow(self, num_tokens: int, source: Iterator[int]) -> None:
        new = [next(source) for _ in range(num_tokens - len(self.tokens))]
        self.values += kv_values(self.namespace, new, self.values)
        self.tokens += new

    def commit(self, count: int) -> list[int]:
        """Return the tokens; others may be generated after them, but the prompt stays."""
        start, end = self.num_computed, self.num_computed + count
        num_kept = max(end, self.num_prompt_tokens)
        del self.tokens[num_kept:], self.values[num_kept:]
        self.num_computed, self.num_written = end, 0
        return self.tokens[start:end]


@dataclass(frozen=True)
class Lookup:
    """A match that was asked for, perhaps some time ago."""

    prompt: list[int]
    namespace: bytes
    match: PrefixMatch


def call(method: Method) -> Method:
    """Count a call of the manager, and check everything after it; if something is wrong, say what came before."""

    @functools.wraps(method)
    def checked(self: Simulation, *args: Any, **options: Any) -> Any:
        self.last_calls.append((method.__name__, args))
        try:
            answer = method(self, *args, **options)
            self.calls[method.__name__] += 1
            self.check()
        except BaseException as error:
            if not hasattr(error, "__notes__"):
                calls = "\n".join(f"{name}{args}" for name, args in self.last_calls)
                error.add_note(f"after {self.calls.total()} calls; the last were\n{calls}")
            raise
        return answer

    return checked  # type: ignore[return-value]


class Simulation:
    """Arguments as for ``BlockManager``; ``memory``: where K/V is kept."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        group_types: Items[GroupType] = (GroupType(),),
        max_num_seqs: int = 6,
        max_model_len: int = 100,
        record_events: bool = False,
        memory: type[NumberMemory | TensorMemory] = NumberMemory,
        **options: Any,
    ) -> None:
        sizes = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
        }
        self.manager = BlockManager(
            **sizes,
            group_types=group_types,
            bytes_per_block=BYTES_PER_BLOCK,
            record_events=record_events,
            **options,
        )
        self.group_types = tuple(group_type for group_type in group_types if not group_type.is_state)
        self.num_state_groups = group_types[-1].num_groups if group_types[-1].is_state else 0
        self.most_groups = max(group_type.num_groups for group_type in group_types)
        self.block_size = block_size
        self.full_blocks_only = bool(options.get("full_blocks_only"))
        self.oracle = Oracle(**sizes, **options) if list(group_types) == [GroupType()] else None
        self.memory = memory(num_blocks, block_size)
        self.sequences: dict[int, Sequence] = {}
        self.lookups: deque[Lookup] = deque(maxlen=4)
        self.plans: list[ClonePlan] = []
        self.finished_plan: ClonePlan | None = None
        self.pending: dict[int, int] = {}
        """Destination -> source of the copies that the next plan will name, of every group."""
        self.content: dict[int, tuple[int, bytes, tuple[int, ...]]] = {}
        """Without oracle: type, namespace and all tokens up to the end of each block written since it was taken."""
        self.checkpoints: dict[Prefix, int] = {}
        """The book: the checkpoint of each prefix."""
        self.prefix_of: dict[bytes, Prefix] | None = {} if record_events else None
        """By digest, as the events say: all tokens up to the end of a block."""
        self.announced: dict[bytes, int] = {}
        """The index of full blocks, built from events alone, as a router outside would."""
        self.calls: Counter[str] = Counter()
        self.last_calls: deque[tuple[str, Any]] = deque(maxlen=12)
        self._paths: Counter[str] = Counter()

    @property
    def paths(self) -> Counter[str]:
        """How often each path was taken, so that a run can show what it has tried."""
        stats = Counter(self.manager.stats.as_dict())
        return self._paths + stats + (self.oracle.paths if self.oracle else Counter())

    def room(self, row: int) -> int:
        """Tokens that the row could still be given."""
        return self.manager.max_model_len - self.sequences[row].num_computed

    def num_writable(self, row: int) -> int:
        """Tokens after the computed ones that the row may write now."""
        if self.oracle is not None:
            return self.oracle.num_writable(row)
        return int(self.manager.table.capacity[row]) - self.sequences[row].num_computed

    def running(self, row: int) -> int:
        """Return the block of a row's running state; 0 for none."""
        return 0 if self.manager.states is None else int(self.manager.states.running[row])

    def blocks_by_group_type(self, row: int) -> list[list[int]]:
        num_blocks = self.manager.num_row_blocks[row]
        return [
            group_type.block_table[row, :num_blocks].tolist() for group_type in self.manager.table.group_types
        ]

    def groups(self, block_ids: Any, num_groups: int) -> np.ndarray:
        """Return blocks and their followers, ``[num_groups, N]``."""
        return self.manager.pool.blocks_of_groups(np.atleast_1d(block_ids), num_groups)

    def values(self, group_type: int, group: int, values: Items[int]) -> np.ndarray:
        """K/V of a group: no two groups have the same."""
        return np.array(values, np.int64) ^ ((group_type * 16 + group + 1) << 40)

    # ------------------------------------------------------------------ what can be found

    def findable(self, group_type: int) -> Findable:
        found: Findable = {}
        if self.oracle is not None:
            blocks = self.oracle.blocks
            return {
                prefix: [(one, blocks[one].tokens) for one in ids]
                for prefix, ids in self.oracle.findable.items()
            }
        cache = self.manager.cache
        for block in cache.indexes[group_type].block_ids().tolist() if cache is not None else ():
            own_group_type, namespace, tokens = self.content[block]
            assert own_group_type == group_type
            start = (len(tokens) - 1) // self.block_size * self.block_size
            # Fewer than were written, if a row has begun to overwrite them.
            kept = cache.tokens_of(block).tolist()
            agree(f"tokens of block {block}", kept, list(tokens[start : start + len(kept)]))
            found.setdefault((namespace, tokens[:start]), []).append((block, kept))
        return found

    def longest_known(self, prompt: list[int], namespace: bytes, limit: int) -> int:
        """Return how many leading tokens the group type that keeps everything has."""
        index, wanted = self.findable(0), (namespace, prompt[:limit])
        return longest_match(
            lambda prefix: [kept for _, kept in index.get(prefix, ())],
            wanted,
            self.block_size,
            self.full_blocks_only,
        )

    def has_window(self, index: Findable, prompt: list[int], namespace: bytes, start: int, end: int) -> bool:
        """Whether ``prompt[start:end]`` is there, block by block from the beginning of the first."""
        size = self.block_size
        for column in range(start // size, -(-end // size)):
            wanted = prompt[column * size : min((column + 1) * size, end)]
            blocks = index.get((namespace, tuple(prompt[: column * size])), [])
            if not any(tokens[: len(wanted)] == wanted for _, tokens in blocks):
                return False
        return True

    def usable(self, prompt: list[int], namespace: bytes, known: int) -> tuple[int, bool]:
        """Return the longest usable prefix, and whether the manager may have looked at some candidates only."""
        windowed = [
            (group_type.window, self.findable(index))
            for index, group_type in enumerate(self.group_types)
            if index
        ]
        is_large = any(len(blocks) > MANY_BLOCKS for _, index in windowed for blocks in index.values())
        for end in range(known, -1, -1):
            if self.full_blocks_only and end % self.block_size:
                continue
            if self.num_state_groups and end and (namespace, tuple(prompt[:end])) not in self.checkpoints:
                continue
            if all(
                self.has_window(index, prompt, namespace, max(end - window + 1, 0), end)
                for window, index in windowed
            ):
                return end, is_large
        raise AssertionError("no token at all is always usable")

    # ------------------------------------------------------------------ lookups and rows

    @call
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
            agree("has hashes", len(hashes) > 0, self.manager.cache is not None)
        answer = self.manager.match(tokens, namespace=namespace, max_tokens=max_tokens, block_hashes=hashes)
        limit = len(prompt) - 1 if max_tokens is None else min(len(prompt) - 1, max_tokens)
        if self.oracle is not None:
            self.oracle.match(prompt, namespace, limit, answer)
        else:
            known_tokens = self.longest_known(prompt, namespace, limit)
            wanted, is_large = self.usable(prompt, namespace, known_tokens)
            if answer.num_tokens != wanted:
                assert is_large and wanted - self.block_size < answer.num_tokens < wanted, (answer, wanted)
            is_cut = answer.num_tokens < known_tokens
            what = "a state" if self.num_state_groups else "a window"
            self._paths[f"hit cut by {what}"] += is_cut and answer.num_tokens > 0
            self._paths[f"no hit because of {what}"] += is_cut and not answer.num_tokens
            if len(self.group_types) > 1 or self.num_state_groups:
                agree("num_known_tokens", answer.num_known_tokens, known_tokens)
        self._paths["partial hit"] += answer.num_tokens % self.block_size != 0
        self._check_match(answer, prompt, namespace)
        self.lookups.append(Lookup(prompt, namespace, answer))
        return self.lookups[-1]

    def _check_match(self, match: PrefixMatch, prompt: list[int], namespace: bytes) -> None:
        """The K/V of each group type is the prompt's, as far back as the window of the next token reaches."""
        agree("has a checkpoint", match.checkpoint != 0, bool(self.num_state_groups and match.num_tokens))
        if match.checkpoint:
            self._check_state(match.checkpoint, namespace, prompt[: match.num_tokens])
            self._paths["hit at a checkpoint"] += 1
            self._paths["checkpoint inside a block"] += match.num_tokens % self.block_size > 0
        if not match.num_tokens:
            return
        values = kv_values(namespace, prompt[: match.num_tokens], [])
        num_columns = -(-match.num_tokens // self.block_size)
        tails = set()
        for group_type, block_ids in enumerate((match.block_ids, *match.window_block_ids)):
            window = self.group_types[group_type].window
            start = 0 if window is None else max(match.num_tokens - window + 1, 0)
            agree("first column", num_columns - len(block_ids), start // self.block_size)
            self._check_blocks(group_type, block_ids, values, num_columns - len(block_ids))
            tails.add(self.content.get(int(block_ids[-1]), (0, b"", ()))[1:])
        self._paths["tails of different blocks"] += len(tails) > 1

    @call
    def blocks_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        answer = self.manager.blocks_needed(match, num_tokens)
        # Fewer at once can only take fewer.
        assert self.manager.blocks_needed(match, num_tokens, 1) <= answer
        if self.oracle is not None:
            self.oracle.blocks_needed(match, num_tokens, answer)
        return answer

    @call
    def add(self, prompt: list[int], namespace: bytes, match: PrefixMatch | None = None) -> int | None:
        allowed, is_large = set[int](), False
        if self.oracle is None:
            longest, is_large = self.usable(
                prompt, namespace, self.longest_known(prompt, namespace, len(prompt) - 1)
            )
            allowed = {longest, match.num_tokens if match else longest}
        ends_hit = self.manager.pool.ends_hit.copy()
        answer = self.manager.add(np.array(prompt, np.int32), namespace=namespace, match=match)
        if self.oracle is not None:
            table = [] if answer is None else self.blocks_by_group_type(answer.row)[0]
            self.oracle.add(prompt, namespace, match, answer, table)
        if answer is None:
            agree("free rows", self.manager.num_free_rows, 0)
            return None
        num_cached = answer.num_cached_tokens
        assert self.oracle is not None or num_cached in allowed or is_large, (answer, allowed)
        sequence = self.sequences[answer.row] = Sequence(namespace, prompt, num_cached)
        if self.manager.states is not None:
            found = int(self.manager.states.found[answer.row])
            sequence.last_checkpoint = self._place_of(found) if found and ends_hit[found] else None
        return answer.row

    @call
    def fork(self, row: int, num_children: int) -> list[int]:
        answer = self.manager.fork(row, num_children)
        children = None if answer is None else answer.tolist()
        if self.oracle is not None:
            self.oracle.fork(row, num_children, children)
        assert children is not None or num_children > self.manager.num_free_rows
        parent = self.sequences[row]
        for child in children or []:
            self.sequences[child] = Sequence(parent.namespace, parent.computed, parent.num_computed)
        return children or []

    @call
    def free(self, rows: list[int]) -> None:
        are_known = None
        if self.num_state_groups:
            are_known = np.array([self.sequences[row].knows_state for row in rows], np.bool_)
            for row in rows:
                self._hand_over_state(row)
        with self._freeing(rows):
            self.manager.free(np.array(rows, np.int64), states_are_known=are_known)
        if self.oracle is not None:
            self.oracle.free(rows)
        self._drop_called_off()
        for row in rows:
            del self.sequences[row]

    @contextmanager
    def _freeing(self, rows: list[int]) -> Iterator[None]:
        """Check what the manager says in advance about blocks that rows give back."""
        manager, kept = self.manager, self.manager.block_table[rows, 0]
        num_free, row_array = manager.num_free_blocks, np.array(rows, np.int64)
        num_freed = manager.blocks_freed_with(row_array)
        num_others, has_copies = manager.blocks_freed_with(row_array, kept), bool(self.pending)
        yield
        if self.oracle is None:
            return
        assert num_freed <= manager.num_free_blocks - num_free
        if not has_copies:  # One that is called off frees what it was to read.
            is_free = manager.pool.ref_counts[np.unique(kept[kept > 0])] == 0
            agree("blocks freed beside those kept", num_others, num_freed - int(np.count_nonzero(is_free)))

    def _drop_called_off(self) -> None:
        """Copies into blocks that nobody holds any more are not made."""
        pool = self.manager.pool
        for block in list(self.pending):
            leaders = np.flatnonzero((pool.followers == block).any(axis=0)) if pool.has_groups else ()
            if pool.ref_counts[leaders[0] if len(leaders) else block] == 0:
                del self.pending[block]
                self._paths["clone called off"] += 1

    # ------------------------------------------------------------------ reserve

    @call
    def reserve(self, rows: list[int], counts: list[int]) -> list[int]:
        """Return the rows that the manager says it can serve together."""
        row_array, count_array = np.array(rows, np.int64), np.array(counts, np.int64)
        most = self.manager.blocks_to_reserve(row_array, count_array)
        answer = self._reserve(rows, counts, lambda: self.manager.reserve(row_array, count_array))
        if self.oracle is not None:
            assert answer.num_new_blocks <= most and (answer.ok or most > self.manager.num_free_blocks)
        return [row for row, fits in zip(rows, answer.servable.tolist(), strict=True) if fits]

    @call
    def reserve_next_blocks(self, rows: list[int]) -> None:
        """One more block for each row, all of whose blocks are reserved by it alone."""
        counts = [min(self.num_writable(row) + 1, self.room(row)) for row in rows]

        def reserve() -> Reservation:
            is_ok = self.manager.reserve_next_blocks(np.array(rows, np.int64))
            num_new = len(rows) * self.manager.blocks_per_column if is_ok else 0
            return Reservation(is_ok, np.ones(len(rows) if is_ok else 0, np.bool_), num_new)

        self._reserve(rows, counts, reserve)

    def _reserve(self, rows: list[int], counts: list[int], reserve: Callable[[], Reservation]) -> Reservation:
        manager, size = self.manager, self.block_size
        before = {row: (self.blocks_by_group_type(row), self.running(row), self._found(row)) for row in rows}
        evict_next, spared, is_ambiguous = self._look_at_queue()
        least = self._least_blocks(rows, counts) if self.oracle is None else 0
        is_idle = all(count <= self.num_writable(row) for row, count in zip(rows, counts, strict=True))
        answer = reserve()
        # What windows have passed is free before anything is taken, whatever the answer is.
        for row in rows if not is_idle else ():
            for group_type, spec in zip(manager.table.windowed, self.group_types[1:], strict=True):
                first = max(self.sequences[row].num_computed - spec.window + 1, 0) // size
                agree(
                    "first block",
                    int(group_type.first_block[row]),
                    max(first, int(group_type.first_block[row])),
                )
                self._paths["block passed"] += not group_type.block_table[row, :first].any() and first > 0
        taken = self._read_tables(rows, before)
        agree("reserve: num_new_blocks", answer.num_new_blocks, len(taken))
        for row, count in zip(rows, counts, strict=True):
            columns = -(-(self.sequences[row].num_computed + count) // size) if answer.ok else 0
            columns = max(len(before[row][0][0]), columns)
            agree(f"columns of row {row}", int(manager.table.num_row_blocks[row]), columns)
        if self.oracle is not None:
            tables = [self.blocks_by_group_type(row)[0] for row in rows]
            agree("blocks taken", sorted(self.oracle.reserve(rows, counts, answer, tables)), sorted(taken))
        else:
            self._paths["shortage"] += not answer.ok
            assert answer.ok or least > manager.num_free_blocks, "there were enough blocks"
            if not is_ambiguous:
                self._check_evicted(evict_next, spared, taken)
        for row, count in zip(rows, counts, strict=True):
            assert not answer.ok or self.num_writable(row) >= count
        return answer

    def _found(self, row: int) -> int:
        """Return the checkpoint that a row starts from; 0 for none."""
        return 0 if self.manager.states is None else int(self.manager.states.found[row])

    def _least_blocks(self, rows: list[int], counts: list[int]) -> int:
        """Return how many blocks a reservation takes at least: tails that nobody else reads are overwritten."""
        pool, size, least = self.manager.pool, self.block_size, 0
        wanted: Counter[tuple[int, int, int]] = Counter()
        for row, count in zip(rows, counts, strict=True):
            tables, num_computed = self.blocks_by_group_type(row), self.sequences[row].num_computed
            num_new = max(-(-(num_computed + count) // size) - len(tables[0]), 0)
            least += num_new * self.manager.blocks_per_column
            least += (not self.running(row) and count > self.num_writable(row)) * self.num_state_groups
            column, offset = divmod(num_computed, size)
            for group_type, blocks in enumerate(tables if offset and count else ()):
                if pool.writers[blocks[column]] != row:
                    wanted[group_type, blocks[column], offset] += 1
        for (group_type, tail, offset), num_rows in wanted.items():
            has_writer = pool.writers[tail] != -1
            is_claim = not has_writer and pool.num_written_tokens[tail] <= offset
            is_alone = not has_writer and pool.ref_counts[tail] == 1
            least += (num_rows - (is_claim or is_alone)) * self.group_types[group_type].num_groups
        return least

    def _read_tables(self, rows: list[int], before: dict[int, tuple[list[list[int]], int, int]]) -> list[int]:
        """Note copies that were asked for; spoil what was handed out, and return it, of all groups."""
        taken = list[int]()
        for row in rows:
            tables, running, found = before[row]
            for group_type, (old, new) in enumerate(zip(tables, self.blocks_by_group_type(row), strict=True)):
                num_groups = self.group_types[group_type].num_groups
                for column, now in enumerate(new):
                    was = old[column] if column < len(old) else 0
                    if now not in (was, 0):
                        taken += self._take(now, was, num_groups)
            if self.running(row) != running:
                agree("running state before", running, 0)
                taken += self._take(self.running(row), found, self.num_state_groups)
        assert len(set(taken)) == len(taken), "a block was handed out twice"
        self._lose_checkpoints(taken)
        return taken

    def _take(self, block: int, source: int, num_groups: int) -> list[int]:
        """Spoil what was handed out, and note the copy into it if it has a source; return it, of all groups."""
        blocks = self.groups(block, num_groups)[:, 0].tolist()
        self.memory.spoil(np.array(blocks))
        self.content.pop(block, None)
        sources = self.groups(source, num_groups)[:, 0].tolist() if source else ()
        for one, other in zip(sources, blocks, strict=bool(source)):
            self._paths["chain of clones"] += one in self.pending
            self.pending[other] = self.pending.get(one, one)
        return blocks

    def _look_at_queue(self) -> tuple[list[int], set[int], bool]:
        """Return the blocks to be evicted next, those that are spared, and whether that depends on a choice.

        Spared is what ends a hit or is a running row's last checkpoint while a row or a copy holds its prefix.
        """
        if self.oracle is not None or not self.manager.pool.has_groups:
            return [], set(), False
        pool, first_group_type = self.manager.pool, self.findable(0)

        def are_held(namespace: bytes, tokens: tuple[int, ...]) -> set[bool]:
            """Of the blocks that hold the last tokens of a prefix after the others: whether somebody holds each."""
            start = (len(tokens) - 1) // self.block_size * self.block_size
            wanted = list(tokens[start:])
            blocks = first_group_type.get((namespace, tokens[:start]), [])
            return {pool.ref_counts[block] > 0 for block, kept in blocks if kept[: len(wanted)] == wanted}

        last = {sequence.last_checkpoint for sequence in self.sequences.values()}
        evict_next, spared = pool.cached_blocks().tolist(), set()
        places = {block: place for place, block in self.checkpoints.items()}
        for block in evict_next:
            if block in places:
                is_wanted, place = pool.ends_hit[block] or places[block] in last, places[block]
            else:
                group_type, *rest = self.content[block]
                place = rest[0], rest[1]
                is_full = pool.num_written_tokens[block] == self.block_size
                is_wanted = group_type and pool.ends_hit[block] and is_full
            if is_wanted and True in are_held(*place):
                spared.add(block)
        # Where some of the blocks with a prefix's last tokens are held and others are not, one of them decides.
        return evict_next, spared, any(len(are_held(*place)) > 1 for place in self.checkpoints)

    def _check_evicted(self, evict_next: list[int], spared: set[int], taken: list[int]) -> None:
        """What was evicted is what was released least recently, and no more than was taken."""
        pool = self.manager.pool
        lost = [block for block in evict_next if block in taken or not pool.is_cached[block]]
        plain = [block for block in evict_next if block not in spared]
        lost_plain = [block for block in lost if block not in spared]
        agree("evicted are the least recently released", lost_plain, plain[: len(lost_plain)])
        # In whatever order: they have been put after all others before.
        assert lost_plain == plain or len(lost) == len(lost_plain), "a spared block was evicted before others"
        self._paths["window of a hit spared"] += bool(lost and self._look_at_queue()[1])
        if lost:
            assert len(pool.free_blocks()) < self.most_groups, "more was evicted than needed"

    # ------------------------------------------------------------------ steps

    def write(self, rows: list[int], counts: list[int], symbols: Iterator[int]) -> None:
        """A step: pending copies run, then each row writes K/V. The manager hears of it at ``commit``."""
        if self.pending:
            self.take_clone_plan()
        for row, count in zip(rows, counts, strict=True):
            sequence = self.sequences[row]
            if self.num_state_groups and not (count and sequence.knows_state):
                continue
            start, end = sequence.num_computed, sequence.num_computed + count
            sequence.grow(end, symbols)
            sequence.num_written = count
            columns, offsets = np.divmod(np.arange(start, end), self.block_size)
            values = sequence.values[start:end]
            for group_type, groups in enumerate(self.manager.group_block_ids(row, columns)):
                for group, blocks in enumerate(groups):
                    assert blocks.all(), "a position to be written has no block"
                    self.memory.write(blocks, offsets, self.values(group_type, group, values))
            if self.num_state_groups:
                sequence.state_len = end
                assert self.running(row), "a step has no state to write"
                for group, one in enumerate(self.groups(self.running(row), self.num_state_groups)):
                    self.memory.write(one, np.array([0]), self.values(STATE_KIND, group, values[-1:]))

    @call
    def commit(self, rows: list[int], counts: list[int]) -> None:
        """Commit the first tokens that the last step wrote; the others are rejected."""
        if self.num_state_groups:
            counts = [self.sequences[row].num_written for row in rows]
        token_ids: list[int] = []
        starts = [self.sequences[row].num_computed for row in rows]
        for row, count, start in zip(rows, counts, starts, strict=True):
            self._paths["commit of fewer than written"] += 0 < count < self.sequences[row].num_written
            token_ids += self.sequences[row].commit(count)
            if self.oracle is None:
                self._note_content(row, start)
        # One number for all rows is another path in the manager.
        num_tokens = counts[0] if counts and len(set(counts)) == 1 else np.array(counts, np.int64)
        self.manager.commit(np.array(rows, np.int64), num_tokens, np.array(token_ids, np.int32))
        if self.oracle is not None:
            self.oracle.commit(rows, counts, token_ids)
        elif self.manager.cache is not None:
            self._check_published(rows, starts)

    def _note_content(self, row: int, start: int) -> None:
        namespace, tokens = self.sequences[row].place
        for column in range(start // self.block_size, -(-len(tokens) // self.block_size)):
            for group_type, blocks in enumerate(self.blocks_by_group_type(row)):
                part = tokens[: (column + 1) * self.block_size]
                if len(part) > start:
                    self.content[blocks[column]] = (group_type, namespace, part)

    def _check_published(self, rows: list[int], starts: list[int]) -> None:
        """What has just been computed can be found, in each group type."""
        found = [self.findable(group_type) for group_type in range(len(self.group_types))]
        for row, start in zip(rows, starts, strict=True):
            tokens, namespace = self.sequences[row].computed, self.sequences[row].namespace
            end = len(tokens) - (len(tokens) % self.block_size if self.full_blocks_only else 0)
            for index in found if start < end else ():
                assert self.has_window(index, tokens, namespace, start, end)

    @call
    def take_clone_plan(self) -> None:
        """Take the plan, and run its copies."""
        plan = self.manager.take_clone_plan()
        if self.oracle is not None:
            self.oracle.take_clone_plan(plan)
        got: dict[int, int] = {}
        if plan is not None:
            assert len(plan), "expected None instead of an empty plan"
            # They travel to a device as they are.
            arrays = (plan.src_block_ids, plan.dst_block_ids, plan.num_tokens)
            agree("contiguous", all(array.flags.c_contiguous for array in arrays), True)
            got = dict(zip(plan.dst_block_ids.tolist(), plan.src_block_ids.tolist(), strict=True))
            agree("different destinations", len(got), len(plan))
            self.memory.copy(plan.src_block_ids, plan.dst_block_ids)
            self.plans.append(plan)
        agree("take_clone_plan", got, self.pending)
        self.pending.clear()

    @call
    def finish_clone_plan(self, index: int) -> None:
        plan = self.plans.pop(index)
        self.manager.finish_clone_plan(plan)
        if self.oracle is not None:
            self.oracle.finish_clone_plan(plan)
        self.finished_plan = plan

    # ------------------------------------------------------------------ states

    @call
    def checkpoint(self, rows: list[int]) -> None:
        """Rows whose state is that of their computed tokens."""
        manager = self.manager
        rows = [row for row in rows if self.sequences[row].knows_state]
        evict_next, spared, is_ambiguous = self._look_at_queue()
        num_spare = manager.num_free_blocks - len(self.sequences) * manager.blocks_per_column
        expected: list[tuple[int, Prefix]] = []
        known = set(self.checkpoints)
        for row in rows:
            if not (self.running(row) and self._has_usable_end(row)):
                continue
            place = self.sequences[row].last_checkpoint = self.sequences[row].place
            if place in known:
                continue
            self._paths["no checkpoint for lack of blocks"] += num_spare < self.num_state_groups
            if num_spare >= self.num_state_groups:
                num_spare -= self.num_state_groups
                expected.append((row, place))
                known.add(place)
        # Rows change what is spared one after the other, as they take blocks.
        is_ambiguous |= spared != self._look_at_queue()[1]
        manager.checkpoint(np.array(rows, np.int64))
        # Read from the index: which block it took is the manager's choice.
        copies = {place: self._checkpoint_at(*place) for _, place in expected}
        taken: list[int] = []
        for row, place in expected:
            taken += self._take(copies[place], self.running(row), self.num_state_groups)
        self._lose_checkpoints(taken)
        self.checkpoints.update(copies)
        if not is_ambiguous:
            self._check_evicted(evict_next, spared, taken)

    def _has_usable_end(self, row: int) -> bool:
        """Whether a lookup could use a checkpoint of a row's computed tokens."""
        length = self.sequences[row].num_computed
        is_reachable = not (self.full_blocks_only and length % self.block_size)
        return length > 0 and is_reachable and self.manager.cache is not None

    def _hand_over_state(self, row: int) -> None:
        """The running state of a row that ends becomes a checkpoint, if there is none."""
        sequence, block = self.sequences[row], self.running(row)
        if sequence.knows_state and block and block not in self.pending and self._has_usable_end(row):
            self._paths["state handed over"] += sequence.place not in self.checkpoints
            self.checkpoints.setdefault(sequence.place, block)

    def _lose_checkpoints(self, taken: list[int]) -> None:
        """Take what was handed out for something else out of the book."""
        for place, block in list(self.checkpoints.items()):
            if block in taken or not self.manager.pool.is_cached[block]:
                del self.checkpoints[place]
                self._paths["checkpoint evicted"] += 1

    def _place_of(self, block: int) -> Prefix | None:
        return next((place for place, other in self.checkpoints.items() if other == block), None)

    def _checkpoint_at(self, namespace: bytes, tokens: tuple[int, ...]) -> int:
        """Return the checkpoint that the manager has of exactly these tokens."""
        cache = self.manager.cache
        assert cache is not None and cache.states is not None
        ids = np.array(tokens, np.int32)
        num_full = len(ids) // self.block_size
        digest = cache.hasher.hash_blocks(ids, namespace, ())[num_full]
        return cache.states.get((digest, ids[num_full * self.block_size :].tobytes()))

    def _check_state(self, block: int, namespace: bytes, tokens: Items[int]) -> None:
        value = kv_values(namespace, list(tokens), [])[-1:]
        for group, (one,) in enumerate(self.groups(block, self.num_state_groups).tolist()):
            assert self.memory.holds(
                np.array([self.pending.get(one, one)]), self.values(STATE_KIND, group, value)
            ), f"group {group} of state {block} is not that of its {len(tokens)} tokens"

    def _check_states(self) -> None:
        for row, sequence in self.sequences.items():
            if self.running(row) and sequence.state_len:
                tokens = sequence.tokens[: sequence.state_len]
                self._check_state(self.running(row), sequence.namespace, tokens)
        if self.manager.cache is None:
            assert not self.checkpoints
            return
        agree(
            "checkpoints",
            {place: self._checkpoint_at(*place) for place in self.checkpoints},
            self.checkpoints,
        )
        assert self.manager.cache.states is not None
        agree("number of checkpoints", len(self.manager.cache.states.block_ids()), len(self.checkpoints))
        for place, block in list(self.checkpoints.items())[:: max(len(self.checkpoints) // 8, 1)]:
            self._check_state(block, *place)

    # ------------------------------------------------------------------ other calls

    @call
    def take_changed_rows(self) -> None:
        answer = self.manager.take_changed_rows().tolist()
        if self.oracle is not None:
            self.oracle.take_changed_rows(answer)

    @call
    def uncache(self, block_ids: list[int]) -> None:
        """Blocks that nobody holds are held for it."""
        blocks = np.array(block_ids, np.int64)
        self.manager.pool.share(blocks)
        self.manager.uncache(blocks)
        assert not self.manager.pool.is_cached[block_ids].any()
        self.manager.clones.release_blocks(blocks)

    @call
    def reset_prefix_cache(self) -> None:
        is_in_use = bool(self.sequences or self.plans or self.pending)
        agree("reset_prefix_cache", self.manager.reset_prefix_cache(), not is_in_use)
        self._paths["reset refused" if is_in_use else "reset"] += 1
        if not is_in_use:
            self.checkpoints.clear()
            agree("free blocks", len(self.manager.pool.free_blocks()), self.manager.num_usable_blocks)
            if self.oracle is not None:
                self.oracle.reset_prefix_cache()

    @call
    def mistake(self, name: str, message: str, wrong_call: Callable[[BlockManager], object]) -> None:
        """A call that must be refused by a typed error and change nothing at all."""
        before = state_of(self.manager)
        with pytest.raises(RowError, match=message):
            wrong_call(self.manager)
        agree(f"state after the mistake {name!r}", state_of(self.manager), before)
        self._paths[f"mistake: {name}"] += 1

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        manager, size = self.manager, self.block_size
        manager.check_integrity()
        self._follow_events()
        for row, sequence in self.sequences.items():
            num_computed = sequence.num_computed
            agree("num_computed_tokens", int(manager.num_computed_tokens[row]), num_computed)
            values, num_columns = sequence.values[:num_computed], -(-num_computed // size)
            for group_type in manager.table.group_types:
                first = int(group_type.first_block[row])
                self._check_blocks(
                    group_type.index, group_type.block_table[row, first:num_columns], values, first
                )
        if self.calls.total() % 16 == 0:
            for index in range(len(self.group_types)):
                self._check_findable(index)
        if self.oracle is not None:
            self.oracle.check(manager)
        if self.num_state_groups:
            self._check_states()

    def _check_blocks(
        self, group_type: int, block_ids: np.ndarray, values: list[int], first_column: int
    ) -> None:
        wanted = values[first_column * self.block_size :]
        for group, blocks in enumerate(self.groups(block_ids, self.group_types[group_type].num_groups)):
            # What a pending copy is still to fill is, so far, where it is copied from.
            read = np.array([self.pending.get(block, block) for block in blocks.tolist()], np.int64)
            assert self.memory.holds(read, self.values(group_type, group, wanted)), (
                f"K/V of group {group} of group type {group_type} is not what was written"
            )

    def _check_findable(self, group_type: int) -> None:
        """K/V that a lookup could find, whether a row holds it or not, is what its tokens ask for."""
        found = list(self.findable(group_type).items())
        start = self.calls.total() % max(len(found), 1)
        for (namespace, earlier), blocks in found[start : start + 8]:
            for block, tokens in blocks:
                values = kv_values(namespace, [*earlier, *tokens], [])
                self._check_blocks(group_type, np.array([block]), values, len(earlier) // self.block_size)

    def _follow_events(self) -> None:
        """The new events lead to the full blocks that can be found, of the first group type."""
        events = self.manager.take_events()
        if self.prefix_of is None:
            agree("events that nobody asked for", events, [])
            return
        for event in events:
            if isinstance(event, BlockStored):
                root: Prefix = event.namespace, ()
                parent = root if event.parent_hash is None else self.prefix_of[event.parent_hash]
                agree("namespace of an event's parent", parent[0], event.namespace)
                prefix = self.prefix_of[event.block_hash] = parent[0], parent[1] + event.token_ids
                tokens = np.array(prefix[1], np.int32)
                digest = self.manager.hash_blocks(tokens, namespace=event.namespace)[-1]
                agree("hash of a stored block", event.block_hash, digest)
                # With several group types, what is computed again takes the place of the older block.
                assert self.oracle is None or event.block_hash not in self.announced, "stored twice"
                self.announced[event.block_hash] = event.block_id
            elif isinstance(event, BlockRemoved):
                del self.announced[event.block_hash]
            else:
                agree("events of a reset", events, [CacheCleared()])
                self.announced.clear()
        expected = {
            block: (namespace, (*earlier, *tokens))
            for (namespace, earlier), blocks in self.findable(0).items()
            for block, tokens in blocks
            if len(tokens) == self.block_size
        }
        got = {block_id: self.prefix_of[digest] for digest, block_id in self.announced.items()}
        agree("full blocks by events", got, expected)


def state_of(thing: Any, seen: set[int] | None = None) -> Any:
    """Return all that can be reached from ``thing``, each object once, to be compared; scratch memory is left out."""
    seen = set() if seen is None else seen
    if isinstance(thing, np.ndarray):
        return (thing.dtype.str, thing.shape, thing.tobytes())
    if isinstance(thing, dict):
        return [(key, state_of(value, seen)) for key, value in thing.items()]
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return [state_of(item, seen) for item in thing]
    names = getattr(thing, "__dict__", None) or getattr(type(thing), "__slots__", ())
    if not names:
        return thing
    if id(thing) in seen:
        return None
    seen.add(id(thing))
    return {name: state_of(getattr(thing, name), seen) for name in names if "scratch" not in name}
