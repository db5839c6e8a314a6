"""A block manager with several kinds of KV cache groups beside what its answers must be, worked out by trying.

Each method is one call of the manager. Afterwards every invariant was recounted, and all K/V that a row's next token
attends to, read through the row's table for every group, is what was written for these tokens, bit by bit; so is the
K/V of every block that a lookup could find. Blocks that are handed out are spoiled first. What lookups may find is
taken from the manager's own indexes, after that was checked to have lost nothing but what was evicted or overwritten.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager, ClonePlan, GroupKind, PrefixMatch
from rose_backend.errors import RowError
from tests.block_manager.deep_state import state_of
from tests.block_manager.kv_memory import NumberMemory, kv_values
from tests.block_manager.oracle import MANY_BLOCKS, length_in_common
from tests.block_manager.oracle_books import agree
from tests.block_manager.simulation import Lookup
from tests.block_manager.simulation import Sequence as Tokens

Content = tuple[int, bytes, tuple[int, ...]]
"""Kind, namespace, and all tokens up to the end of a findable block."""


class KindsSimulation:
    """Arguments as for ``BlockManager``."""

    def __init__(
        self,
        *,
        kinds: Sequence[GroupKind],
        num_blocks: int,
        block_size: int,
        max_num_seqs: int = 6,
        max_model_len: int = 100,
        **options: Any,
    ) -> None:
        self.kinds = tuple(kind for kind in kinds if not kind.is_state)
        self.num_groups_of_kinds = [kind.num_groups for kind in kinds]
        self.block_size = block_size
        self.full_blocks_only = bool(options.get("full_blocks_only"))
        self.manager = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            kinds=kinds,
            bytes_per_block=96,
            **options,
        )
        self.memory = NumberMemory(num_blocks, block_size)
        self.sequences: dict[int, Tokens] = {}
        self.computed: dict[int, list[int]] = {}
        self.lookups: deque[Lookup] = deque(maxlen=4)
        self.plans: list[ClonePlan] = []
        self.finished_plan: ClonePlan | None = None
        self.calls: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.content: dict[int, Content] = {}
        """Of each block that was written since it was handed out."""
        self.pending: dict[int, int] = {}
        """Destination -> source of the copies that the next plan will name, of every group."""
        books = SimpleNamespace(pending=self.pending, paths=self.paths, max_num_seqs=max_num_seqs)
        self.oracle = SimpleNamespace(books=books, prefix_cache=options.get("prefix_cache", True))

    def num_computed(self, row: int) -> int:
        return len(self.computed[row])

    def room(self, row: int) -> int:
        """Tokens that the row could still be given."""
        return self.manager.max_model_len - self.num_computed(row)

    def num_writable(self, row: int) -> int:
        """Tokens behind the computed ones that the row may write now."""
        return int(self.manager.table.capacity[row]) - self.num_computed(row)

    def table(self, row: int) -> list[int]:
        """Blocks of all kinds, without those that windows have passed."""
        kinds = self.manager.table.kinds
        return [block for kind in kinds for block in kind.block_table[row].tolist() if block]

    def values(self, kind: int, group: int, values: Sequence[int]) -> np.ndarray:
        """K/V of a group: no two groups have the same."""
        return np.array(values, np.int64) ^ ((kind * 16 + group + 1) << 40)

    # ------------------------------------------------------------------ what can be found

    def findable(self, kind: int) -> dict[tuple[bytes, tuple[int, ...]], list[tuple[int, list[int]]]]:
        """Blocks and their tokens, behind namespace and tokens before."""
        found: dict[tuple[bytes, tuple[int, ...]], list[tuple[int, list[int]]]] = {}
        cache = self.manager.cache
        for block in cache.indexes[kind].block_ids().tolist() if cache is not None else ():
            own_kind, namespace, tokens = self.content[block]
            assert own_kind == kind
            start = (len(tokens) - 1) // self.block_size * self.block_size
            # Fewer than were written, if a row has begun to overwrite them.
            kept = cache.tokens_of(block).tolist()
            agree(f"tokens of block {block}", kept, list(tokens[start : start + len(kept)]))
            found.setdefault((namespace, tokens[:start]), []).append((block, kept))
        return found

    def longest_full(self, prompt: list[int], namespace: bytes, limit: int) -> int:
        """Return how many leading tokens the kind that keeps everything has."""
        found, index, size = 0, self.findable(0), self.block_size
        while found < limit:
            wanted = prompt[found : min(found + size, limit)]
            blocks = index.get((namespace, tuple(prompt[:found])), [])
            run = max((length_in_common(wanted, tokens) for _, tokens in blocks), default=0)
            found += run
            if run < size:
                return found - found % size if self.full_blocks_only else found
        return found

    def has_window(self, index: Any, prompt: list[int], namespace: bytes, start: int, end: int) -> bool:
        """Whether ``prompt[start:end]`` is there, block by block from the beginning of the first."""
        size = self.block_size
        for column in range(start // size, -(-end // size)):
            wanted = prompt[column * size : min((column + 1) * size, end)]
            blocks = index.get((namespace, tuple(prompt[: column * size])), [])
            if not any(tokens[: len(wanted)] == wanted for _, tokens in blocks):
                return False
        return True

    def usable(self, prompt: list[int], namespace: bytes, limit: int) -> tuple[int, bool]:
        """Return the longest usable prefix, and whether the manager may have looked at some candidates only."""
        windowed = [(kind.window, self.findable(index)) for index, kind in enumerate(self.kinds) if index]
        is_large = any(len(blocks) > MANY_BLOCKS for _, index in windowed for blocks in index.values())
        for end in range(self.longest_full(prompt, namespace, limit), -1, -1):
            if self.full_blocks_only and end % self.block_size:
                continue
            if self.has_state(prompt[:end], namespace) and all(
                self.has_window(index, prompt, namespace, max(end - window + 1, 0), end)
                for window, index in windowed
            ):
                return end, is_large
        raise AssertionError("no token at all is always usable")

    def has_state(self, tokens: list[int], namespace: bytes) -> bool:
        """Whether a row may start behind these tokens as far as states go."""
        return True

    # ------------------------------------------------------------------ calls

    def match(
        self,
        prompt: list[int],
        namespace: bytes,
        max_tokens: int | None = None,
        num_hashed_before: int | None = None,
    ) -> Lookup:
        tokens, hashes = np.array(prompt, np.int32), None
        if num_hashed_before is not None:
            known = self.manager.hash_blocks(tokens[:num_hashed_before], namespace=namespace)
            hashes = self.manager.hash_blocks(tokens, namespace=namespace, known=known)
        answer = self.manager.match(tokens, namespace=namespace, max_tokens=max_tokens, block_hashes=hashes)
        limit = len(prompt) - 1 if max_tokens is None else min(len(prompt) - 1, max_tokens)
        wanted, is_large = self.usable(prompt, namespace, limit)
        if answer.num_tokens != wanted:
            assert is_large and wanted - self.block_size < answer.num_tokens < wanted, (answer, wanted)
        is_cut = answer.num_tokens < self.longest_full(prompt, namespace, limit)
        self.paths["hit cut by a window"] += is_cut and answer.num_tokens > 0
        self.paths["no hit because of a window"] += is_cut and not answer.num_tokens
        self.paths["partial hit"] += answer.num_tokens % self.block_size != 0
        self.check_match(answer, prompt, namespace)
        self.lookups.append(Lookup(prompt, namespace, answer))
        self.check("match")
        return self.lookups[-1]

    def check_match(self, match: PrefixMatch, prompt: list[int], namespace: bytes) -> None:
        """The K/V of each kind is the prompt's, as far back as the window of the next token reaches."""
        if not match.num_tokens:
            return
        values = kv_values(namespace, prompt[: match.num_tokens], [])
        num_columns = -(-match.num_tokens // self.block_size)
        tails = set()
        for kind, block_ids in enumerate((match.block_ids, *match.window_block_ids)):
            window = self.kinds[kind].window
            start = 0 if window is None else max(match.num_tokens - window + 1, 0)
            agree("first column", num_columns - len(block_ids), start // self.block_size)
            self.check_blocks(kind, block_ids, values, num_columns - len(block_ids))
            tails.add(self.content[int(block_ids[-1])][1:])
        self.paths["tails of different blocks"] += len(tails) > 1

    def check_blocks(self, kind: int, block_ids: np.ndarray, values: list[int], first_column: int) -> None:
        wanted = values[first_column * self.block_size :]
        groups = self.manager.pool.blocks_of_groups(block_ids, self.kinds[kind].num_groups)
        for group, blocks in enumerate(groups):
            read = np.array([self.pending.get(block, block) for block in blocks.tolist()], np.int64)
            assert self.memory.holds(read, self.values(kind, group, wanted)), (
                f"K/V of group {group} of kind {kind} is not what was written"
            )

    def blocks_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        answer = self.manager.blocks_needed(match, num_tokens)
        # Fewer at once can only take fewer.
        assert self.manager.blocks_needed(match, num_tokens, 1) <= answer
        self.check("blocks_needed")
        return answer

    def add(self, prompt: list[int], namespace: bytes, match: PrefixMatch | None = None) -> int | None:
        limit = len(prompt) - 1
        lengths = {self.usable(prompt, namespace, limit)[0]} | ({match.num_tokens} if match else set())
        is_large = self.usable(prompt, namespace, limit)[1]
        answer = self.manager.add(np.array(prompt, np.int32), namespace=namespace, match=match)
        if answer is None:
            agree("free rows", self.manager.num_free_rows, 0)
            self.check("add")
            return None
        assert answer.num_cached_tokens in lengths or is_large, (answer, lengths)
        self.sequences[answer.row] = Tokens(namespace, list(prompt))
        self.computed[answer.row] = prompt[: answer.num_cached_tokens]
        self.check("add")
        return answer.row

    def fork(self, row: int, num_children: int) -> list[int]:
        answer = self.manager.fork(row, num_children)
        assert (answer is None) == (num_children > self.manager.num_free_rows) or answer is not None
        children = [] if answer is None else answer.tolist()
        for child in children:
            tokens = self.computed[row]
            self.sequences[child] = Tokens(self.sequences[row].namespace, list(tokens))
            self.computed[child] = list(tokens)
        self.check("fork")
        return children

    def reserve(self, rows: list[int], counts: list[int]) -> list[int]:
        """Return the rows that the manager says it can serve together."""
        manager, size = self.manager, self.block_size
        before = {row: self.blocks_by_kind(row) for row in rows}
        evict_next = manager.pool.cached_blocks().tolist()
        spared = {block for block in evict_next if self.is_spared(block)}
        least = self.least_blocks(rows, counts)
        is_idle = all(count <= self.num_writable(row) for row, count in zip(rows, counts, strict=True))
        held_before = {row: manager.table.num_row_blocks[row] for row in rows}
        answer = manager.reserve(np.array(rows, np.int64), np.array(counts, np.int64))
        # What windows have passed is free before anything is taken, whatever the answer is.
        for row in rows if not is_idle else ():
            for kind, spec in zip(manager.table.windowed, self.kinds[1:], strict=True):
                first = max(self.num_computed(row) - spec.window + 1, 0) // size
                agree("first block", int(kind.first_block[row]), max(first, int(kind.first_block[row])))
                self.paths["block passed"] += not kind.block_table[row, :first].any() and first > 0
        taken = self.read_tables(rows, before)
        agree("reserve: num_new_blocks", answer.num_new_blocks, len(taken))
        if answer.ok:
            for row, count in zip(rows, counts, strict=True):
                assert self.num_writable(row) >= count
                columns = max(int(held_before[row]), -(-(self.num_computed(row) + count) // size))
                agree(f"columns of row {row}", int(manager.table.num_row_blocks[row]), columns)
        else:
            self.paths["shortage"] += 1
            agree("blocks taken", taken, [])
            assert least > manager.num_free_blocks, "there were enough blocks"
        self.check_evicted(evict_next, spared, taken)
        self.check("reserve")
        return [row for row, fits in zip(rows, answer.servable.tolist(), strict=True) if fits]

    def check_evicted(self, evict_next: list[int], spared: set[int], taken: list[int]) -> None:
        """What was evicted is what was released least recently, and no more than was taken."""
        manager = self.manager
        lost = [block for block in evict_next if block in taken or not manager.pool.is_cached[block]]
        plain = [block for block in evict_next if block not in spared]
        lost_plain = [block for block in lost if block not in spared]
        agree("evicted are the least recently released", lost_plain, plain[: len(lost_plain)])
        # In whatever order: they have been put behind all others before.
        assert lost_plain == plain or len(lost) == len(lost_plain), "a spared block was evicted before others"
        self.paths["window of a hit spared"] += bool(lost) and any(
            self.is_spared(block) for block in manager.pool.cached_blocks().tolist()
        )
        if lost:
            num_left = len(manager.pool.free_blocks())
            assert num_left < max(self.num_groups_of_kinds), "more was evicted than needed"

    def is_spared(self, block: int) -> bool:
        """Whether a block is in a window at the end of a hit whose prefix a row or a copy holds."""
        pool, (kind, namespace, tokens) = self.manager.pool, self.content[block]
        if not pool.has_groups or not pool.ends_hit[block] or not kind:
            return False
        if pool.num_written_tokens[block] < self.block_size:
            return False
        cache = self.manager.cache
        assert cache is not None
        return any(
            pool.ref_counts[other] > 0
            for other in cache.indexes[0].block_ids().tolist()
            if self.content[other][1:] == (namespace, tokens)
            and pool.num_written_tokens[other] == self.block_size
        )

    def least_blocks(self, rows: list[int], counts: list[int]) -> int:
        """Return how many blocks a reservation takes at least: tails that nobody else reads are overwritten."""
        pool, size, least = self.manager.pool, self.block_size, 0
        wanted: Counter[tuple[int, int, int]] = Counter()
        for row, count in zip(rows, counts, strict=True):
            num_columns = -(-(self.num_computed(row) + count) // size)
            least += max(num_columns - int(self.manager.table.num_row_blocks[row]), 0) * sum(
                kind.num_groups for kind in self.kinds
            )
            column, offset = divmod(self.num_computed(row), size)
            for kind, blocks in enumerate(self.blocks_by_kind(row) if offset and count else ()):
                if pool.writers[blocks[column]] != row:
                    wanted[kind, blocks[column], offset] += 1
        for (kind, tail, offset), num_rows in wanted.items():
            has_writer = pool.writers[tail] != -1
            is_claim = not has_writer and pool.num_written_tokens[tail] <= offset
            is_alone = not has_writer and pool.ref_counts[tail] == 1
            least += (num_rows - (is_claim or is_alone)) * self.kinds[kind].num_groups
        return least

    def blocks_by_kind(self, row: int) -> list[list[int]]:
        return [kind.block_table[row].tolist() for kind in self.manager.table.kinds]

    def read_tables(self, rows: list[int], before: dict[int, list[list[int]]]) -> list[int]:
        """Note copies that were asked for; spoil what was handed out, and return it, of all groups."""
        pool, taken = self.manager.pool, list[int]()
        for row in rows:
            for kind, (old, new) in enumerate(zip(before[row], self.blocks_by_kind(row), strict=True)):
                for was, now in zip(old, new, strict=True):
                    if now in (was, 0):
                        continue
                    num_groups = self.kinds[kind].num_groups
                    blocks = pool.blocks_of_groups(np.array([now]), num_groups)[:, 0].tolist()
                    taken += blocks
                    self.content.pop(now, None)
                    if was:
                        self.note_copy(kind, was, now, len(self.computed[row]))
        self.memory.spoil(np.array(taken, np.int64))
        assert len(set(taken)) == len(taken), "a block was handed out twice"
        return taken

    def note_copy(self, kind: int, source: int, copy: int, num_computed: int) -> None:
        num_groups = self.kinds[kind].num_groups
        self.paths["clones"] += 1
        groups = (
            self.manager.pool.blocks_of_groups(np.array([block]), num_groups)[:, 0].tolist()
            for block in (source, copy)
        )
        for one, other in zip(*groups, strict=True):
            self.paths["chain of clones"] += one in self.pending
            self.pending[other] = self.pending.get(one, one)

    def write(self, rows: list[int], counts: list[int], symbols: Iterator[int]) -> None:
        """A step: pending copies run, then each row writes K/V. The manager hears of it at ``commit``."""
        if self.pending:
            self.take_clone_plan()
        manager, size = self.manager, self.block_size
        for row, count in zip(rows, counts, strict=True):
            sequence, start = self.sequences[row], self.num_computed(row)
            sequence.grow(start + count, symbols)
            sequence.num_written = count
            columns, offsets = np.divmod(np.arange(start, start + count), size)
            values = sequence.values[start : start + count]
            for kind, groups in enumerate(manager.group_block_ids(row, columns)):
                for group, blocks in enumerate(groups):
                    assert blocks.all(), "a position to be written has no block"
                    self.memory.write(blocks, offsets, self.values(kind, group, values))

    def commit(self, rows: list[int], counts: list[int]) -> None:
        """Commit the first tokens that the last step wrote; the others are rejected."""
        token_ids: list[int] = []
        starts = {row: self.num_computed(row) for row in rows}
        for row, count in zip(rows, counts, strict=True):
            sequence, start = self.sequences[row], self.num_computed(row)
            token_ids += sequence.tokens[start : start + count]
            self.computed[row] = sequence.tokens[: start + count]
            sequence.reject_behind(start + count)
            self.note_content(row, start)
        num_tokens = counts[0] if counts and len(set(counts)) == 1 else np.array(counts, np.int64)
        self.manager.commit(np.array(rows, np.int64), num_tokens, np.array(token_ids, np.int32))
        self.check("commit")
        if self.manager.cache is not None:
            self.check_published(starts)

    def note_content(self, row: int, start: int) -> None:
        tokens, size = self.computed[row], self.block_size
        for column in range(start // size, -(-len(tokens) // size)):
            for kind, blocks in enumerate(self.blocks_by_kind(row)):
                part = tuple(tokens[: (column + 1) * size])
                if len(part) > start:
                    self.content[blocks[column]] = (kind, self.sequences[row].namespace, part)

    def check_published(self, starts: dict[int, int]) -> None:
        """What has just been computed can be found, in each kind."""
        for row, start in starts.items():
            tokens, namespace = self.computed[row], self.sequences[row].namespace
            end = len(tokens) - (len(tokens) % self.block_size if self.full_blocks_only else 0)
            for kind in range(len(self.kinds) if start < end else 0):
                assert self.has_window(self.findable(kind), tokens, namespace, start, end)

    def uncache(self, block_ids: list[int]) -> None:
        """Blocks that nobody holds are held for it."""
        self.manager.pool.share(np.array(block_ids, np.int64))
        self.manager.uncache(np.array(block_ids, np.int64))
        assert not self.manager.pool.is_cached[block_ids].any()
        self.manager.clones.release_blocks(np.array(block_ids, np.int64))
        self.check("uncache")

    def free(self, rows: list[int]) -> None:
        self.manager.free(np.array(rows, np.int64))
        self.drop_called_off()
        for row in rows:
            del self.sequences[row], self.computed[row]
        self.check("free")

    def drop_called_off(self) -> None:
        """Copies into blocks that nobody holds any more are not made."""
        pool = self.manager.pool
        leaders = {
            int(follower): leader
            for leader in range(pool.num_blocks)
            for follower in (pool.followers[:, leader] if pool.has_groups else ())
            if follower
        }
        for block in list(self.pending):
            if pool.ref_counts[leaders.get(block, block)] == 0:
                del self.pending[block]
                self.paths["clone called off"] += 1

    def take_clone_plan(self) -> None:
        """Take the plan, and run its copies."""
        plan = self.manager.take_clone_plan()
        got = (
            {}
            if plan is None
            else dict(zip(plan.dst_block_ids.tolist(), plan.src_block_ids.tolist(), strict=True))
        )
        agree("take_clone_plan", got, self.pending)
        if plan is not None:
            agree("different destinations", len(got), len(plan))
            self.memory.copy(plan.src_block_ids, plan.dst_block_ids)
            self.plans.append(plan)
        self.pending.clear()
        self.check("take_clone_plan")

    def finish_clone_plan(self, index: int) -> None:
        plan = self.plans.pop(index)
        self.manager.finish_clone_plan(plan)
        self.finished_plan = plan
        self.check("finish_clone_plan")

    def take_changed_rows(self) -> None:
        self.manager.take_changed_rows()
        self.check("take_changed_rows")

    def reset_prefix_cache(self) -> None:
        is_in_use = bool(self.sequences or self.plans or self.pending)
        agree("reset_prefix_cache", self.manager.reset_prefix_cache(), not is_in_use)
        if not is_in_use:
            agree("free blocks", len(self.manager.pool.free_blocks()), self.manager.num_usable_blocks)
        self.check("reset_prefix_cache")

    def mistake(self, name: str, call: Callable[[BlockManager], object]) -> None:
        """A call that must be refused by a typed error and change nothing at all."""
        before = state_of(self.manager)
        with pytest.raises(RowError):
            call(self.manager)
        agree(f"state after the mistake {name!r}", state_of(self.manager), before)
        self.check("mistake")

    # ------------------------------------------------------------------ checks

    def check(self, name: str) -> None:
        self.calls[name] += 1
        manager, size = self.manager, self.block_size
        manager.check_integrity()
        for row, sequence in self.sequences.items():
            num_computed = self.num_computed(row)
            agree("num_computed_tokens", int(manager.num_computed_tokens[row]), num_computed)
            values, num_columns = sequence.values[:num_computed], -(-num_computed // size)
            for kind in manager.table.kinds:
                first = int(kind.first_block[row])
                self.check_blocks(kind.index, kind.block_table[row, first:num_columns], values, first)
        if self.calls.total() % 16 == 0:
            for kind in range(len(self.kinds)):
                self.check_findable(kind)

    def check_findable(self, kind: int) -> None:
        """K/V that a lookup could find, whether a row holds it or not, is what its tokens ask for."""
        for (namespace, earlier), blocks in list(self.findable(kind).items())[:8]:
            for block, tokens in blocks:
                values = kv_values(namespace, [*earlier, *tokens], [])
                self.check_blocks(kind, np.array([block]), values, len(earlier) // self.block_size)
