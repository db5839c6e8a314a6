"""BlockManager: which KV blocks each sequence reads and writes, decided for all sequences of a step in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rose_backend.block_manager.block_pool import (
    NO_BLOCKS,
    NO_WRITER,
    NULL_BLOCK,
    BoolArray,
    ClonePlan,
    Int32Array,
    IntArray,
)
from rose_backend.block_manager.books import Books
from rose_backend.block_manager.integrity import check_all
from rose_backend.block_manager.prefix_cache import CacheEvent, PrefixMatch
from rose_backend.block_manager.reservation import (
    Reservation,
    append_block_to_each,
    commit_rows,
    release_passed,
    reserve_one_row,
    reserve_rows,
    retire_rows,
)
from rose_backend.block_manager.row_states import (
    copy_to_checkpoints,
    end_states,
    renew_last_checkpoints,
    start_from_checkpoint,
)
from rose_backend.block_manager.sequence_table import any_of
from rose_backend.errors import RowError


@dataclass(frozen=True, slots=True)
class AddedSequence:
    """Answer of ``BlockManager.add``."""

    row: int
    num_cached_tokens: int
    """Prompt tokens that need no computation."""


class BlockManager(Books):
    """Block tables, copy-on-write and the prefix cache. One block table per sequence and KV cache group.

    The life of one row's positions (``bs`` = block size)::

        |<-- computed -->|<-- reserved -->|                 |
        0            num_computed    num_row_blocks * bs   max_model_len
        readable, can    writable by this
        be shared        row alone

    ``add`` and ``fork`` make rows that read cached blocks or those of other rows; ``reserve`` makes the next positions
    writable (a new block; for a shared partial block a private copy, or the block itself if no row has written
    further); the step writes; ``commit`` advances ``num_computed`` and adds the tokens to the prefix cache; ``free``
    releases the row.

    Rules that keep the data right:

    - A block has at most one writer. Readers rely only on positions below their own ``num_computed``, so the writer may
      append while others read.
    - Lookups find no token before its ``commit``, that is, before the step that wrote it is over.
    - A copy reads its source before the step writes; the source is held until ``finish_clone_plan``.

    Args: see ``Books``, which holds what the calls below read and change.
    """

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now, cached ones included."""
        return self.pool.num_free_blocks

    @property
    def num_free_rows(self) -> int:
        """Sequences that could be added now."""
        return self.table.num_free_rows

    @property
    def usage(self) -> float:
        """Share of the usable blocks that is held, 0 to 1."""
        return 1.0 - self.pool.num_free_blocks / self.num_usable_blocks

    def hash_blocks(
        self, token_ids: Int32Array, *, namespace: bytes = b"", known: Sequence[bytes] = ()
    ) -> Sequence[bytes]:
        """Hash a prompt once for any number of lookups; each block when a lookup first asks for it.

        Args:
            token_ids: the prompt, int32 ``[P]``; not to be changed later.
            namespace: see ``match``.
            known: earlier answer for a prefix of the same tokens in the same namespace; only the rest is hashed.

        Returns:
            The digest of the namespace and of each full block, ``1 + P // block_size``; none without a prefix cache.
        """
        if self.cache is None:
            return []
        return self.cache.hasher.hash_blocks(np.ascontiguousarray(token_ids, np.int32), namespace, known)

    def match(
        self,
        token_ids: Int32Array,
        *,
        namespace: bytes = b"",
        max_tokens: int | None = None,
        block_hashes: Sequence[bytes] | None = None,
    ) -> PrefixMatch:
        """Look up the longest cached prefix of a prompt. Changes nothing.

        Args:
            token_ids: the prompt, int32 ``[P]``.
            namespace: only blocks computed under the same namespace match (tenant salt, adapter id, ...).
            max_tokens: longest useful hit; at most, and by default, all but the last token, whose logits are needed.
            block_hashes: answer of ``hash_blocks`` for the same tokens and namespace; nothing is hashed then.

        Raises:
            RowError: ``block_hashes`` does not cover the prompt.
        """
        if self.cache is None or len(token_ids) == 0:
            return PrefixMatch(NO_BLOCKS, 0, b"", 0)
        limit = len(token_ids) - 1
        if max_tokens is not None:
            limit = max(min(limit, max_tokens), 0)
        token_ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        return self.cache.match(token_ids, namespace, limit, block_hashes)

    def blocks_needed(self, match: PrefixMatch, num_tokens: int, num_at_once: int | None = None) -> int:
        """Return by how many ``num_free_blocks`` shrinks, at least, when a match is added and holds ``num_tokens``.

        A partially matched block that nobody holds needs no copy: ``reserve`` overwrites it when blocks are short.

        Args:
            num_at_once: maximum tokens reserved past the computed ones, where windows free blocks meanwhile; None: all.
        """
        needed = self._blocks_needed_of(match.block_ids, match.num_tokens, num_tokens)
        if not self.pool.has_groups:
            return needed
        group_types, size = self.table.group_types, self.block_size
        needed *= group_types[0].num_groups
        num_columns = -(-num_tokens // size)
        blocks = match.blocks_of_group_types(len(group_types) - 1)
        for group_type, block_ids in zip(group_types[1:], blocks[1:], strict=True):
            own = num_columns - len(match.block_ids) + len(block_ids)
            num_new = self._blocks_needed_of(block_ids, match.num_tokens, own * size)
            if num_at_once is not None:
                num_new = min(num_new, int(group_type.type.most_columns(num_at_once, size)))
            needed += num_new * group_type.num_groups
        if self.states is not None:
            # A checkpoint is held until it has been copied.
            is_idle = match.checkpoint != NULL_BLOCK and self.pool.ref_counts[match.checkpoint] == 0
            needed += (1 + is_idle) * self.states.num_groups
        return needed

    def _blocks_needed_of(self, block_ids: Int32Array, num_matched: int, num_tokens: int) -> int:
        if not len(block_ids):
            return -(-num_tokens // self.block_size)
        num_idle = int(np.count_nonzero(self.pool.ref_counts[block_ids] == 0))
        num_new = max(-(-num_tokens // self.block_size) - len(block_ids), 0)
        offset = num_matched % self.block_size
        if not offset:
            return num_new + num_idle
        tail = block_ids[-1]
        can_claim = self.pool.writers[tail] == NO_WRITER and self.pool.num_written_tokens[tail] <= offset
        return num_new + num_idle + int(self.pool.ref_counts[tail] > 0 and not can_claim)

    def blocks_to_reserve(self, rows: IntArray, num_tokens: IntArray) -> int:
        """Return how many blocks ``reserve`` of the same takes at most, in one KV cache group."""
        table = self.table
        wanted, num_blocks = self.num_computed_tokens[rows] + num_tokens, table.num_row_blocks[rows]
        is_short = wanted > table.capacity[rows]
        num_new = np.maximum(-(-wanted // self.block_size) - num_blocks, 0)
        num_copies = np.count_nonzero(is_short & (table.capacity[rows] < table.full_capacity(num_blocks)))
        return int(num_new[is_short].sum()) + int(num_copies)

    def blocks_freed_with(self, rows: IntArray, kept: IntArray = NO_BLOCKS) -> int:
        """Return by how many blocks of the first group type ``num_free_blocks`` grows, at least, when rows are freed.

        Args:
            rows: ``[N]``, no row twice.
            kept: ``[K]`` blocks not to count, because somebody is about to take them.
        """
        entries = self.table.entries_tail_first(np.asarray(rows, np.int64))
        block_ids, counts = np.unique(self.table.entries[entries], return_counts=True)
        is_freed = (self.pool.ref_counts[block_ids] == counts) & ~np.isin(block_ids, kept)
        return int(np.count_nonzero(is_freed))

    def blocks_to_grow(self, row: int | None, num_tokens: int, num_at_once: int) -> int:
        """Return how many blocks a row, or None for a new one, takes to hold ``num_tokens``; see ``blocks_needed``."""
        table, size = self.table, self.block_size
        num_columns, total = 0 if row is None else int(table.num_row_blocks[row]), 0
        wanted = max(-(-num_tokens // size) - num_columns, 0)
        for group_type in table.group_types:
            most = group_type.type.most_columns(num_at_once, size)
            num_held = num_columns - (0 if row is None else int(group_type.first_block[row]))
            total += group_type.num_groups * int(min(wanted, max(most - num_held, 0)))
        if self.states is not None and (row is None or self.states.running[row] == NULL_BLOCK):
            total += self.states.num_groups
        return total

    def add(
        self,
        token_ids: Int32Array,
        *,
        namespace: bytes = b"",
        match: PrefixMatch | None = None,
        counts_lookup: bool = True,
    ) -> AddedSequence | None:
        """Give a new sequence a row that already reads the longest cached prefix of its prompt.

        Args:
            token_ids: the prompt, int32 ``[P]``, at least one token.
            namespace: see ``match``.
            match: an earlier answer of ``match`` for the same prompt; looked up again if the cache has changed.
            counts_lookup: False for a prompt that must not use the cache: it is no miss.

        Returns:
            None when all rows are taken. No block is allocated here; ``reserve`` does that.

        Raises:
            RowError: the prompt is empty or longer than a row.
        """
        if not 1 <= len(token_ids) <= self.max_model_len:
            raise RowError(f"prompt: got {len(token_ids)} tokens, allowed are 1 to {self.max_model_len}")
        if match is None or (self.cache is not None and match.epoch != self.cache.epoch):
            match = self.match(token_ids, namespace=namespace)
        table = self.table
        if not table.num_free_rows:
            return None
        blocks = match.blocks_of_group_types(len(table.windowed))
        if match.num_tokens:
            block_ids = match.block_ids if len(blocks) == 1 else np.concatenate(blocks)
            self.pool.share(block_ids.astype(np.int64))
            if table.windowed:
                self.pool.ends_hit[np.concatenate(blocks[1:])] = True
        (row,) = table.take_rows(1, blocks, match.num_tokens, match.chain_digest, namespace).tolist()
        if self.states is not None:
            start_from_checkpoint(self, self.states, row, match.checkpoint)
        if self.cache is not None:
            table.num_known[row] = match.num_known_tokens
        if self.cache is not None and counts_lookup:
            self.stats.count_lookup(len(token_ids), match.num_tokens, self.block_size)
        return AddedSequence(row, match.num_tokens)

    def fork(self, row: int, num_children: int) -> Int32Array | None:
        """Make rows that share all computed tokens of ``row``, the partial tail included.

        Returns:
            The new rows, or None when too few are free; then nothing has changed.

        Raises:
            RowError: ``row`` is not in use, ``num_children`` is negative, or rows have states.
        """
        table = self.table
        if self.states is not None:
            raise RowError("fork: rows with states cannot be forked")
        table.check_active(np.array([row]))
        if num_children < 0:
            raise RowError(f"num_children: got {num_children}, allowed is 0 or more")
        if num_children > table.num_free_rows:
            return None
        num_tokens = int(table.num_computed_tokens[row])
        num_blocks = -(-num_tokens // self.block_size)
        shared = [each.block_table[row, each.first_block[row] : num_blocks] for each in table.group_types]
        for block_ids in shared:
            self.pool.share(block_ids.astype(np.int64), num_children)
        self.stats.forks += num_children
        digest, namespace = table.chain_digests[row], table.namespaces[row]
        return table.take_rows(num_children, shared, num_tokens, digest, namespace).astype(np.int32)

    def free(self, rows: IntArray, *, states_are_known: BoolArray | None = None) -> None:
        """Release rows with their blocks and pending copies. Committed tokens stay in the prefix cache.

        Args:
            rows: ``[N]``, no row twice.
            states_are_known: ``[N]``, with states: whether each row's running state, once all queued device work has
                run, is that of its computed tokens and no others; it becomes a checkpoint then. None: no row's is.
        """
        rows = np.asarray(rows, np.int64)
        table, writers = self.table, self.pool.writers
        table.check_active(rows)
        if self.cache is not None:
            retire_rows(self, self.cache, rows)
        entries = table.entries_tail_first(rows)
        block_ids, row_of_block = table.blocks_at(entries)
        writers[block_ids[writers[block_ids] == row_of_block]] = NO_WRITER
        if self.states is not None:
            block_ids = np.concatenate((end_states(self, self.states, rows, states_are_known), block_ids))
        table.give_back(rows, entries)
        self.clones.release_blocks(block_ids)
        if self.states is not None:
            renew_last_checkpoints(self, self.states, rows)

    def checkpoint(self, rows: IntArray) -> None:
        """Copy the running states of rows into the prefix cache, where lookups find them at once.

        Call it between the ``commit`` of all that steps have computed so far and the next step. Rows for which blocks
        are short, and those without a running state, are left out; nothing happens without states or a prefix cache.

        Raises:
            RowError: a row is not in use or is listed twice.
        """
        if self.states is not None:
            rows = np.asarray(rows, np.int64)
            self.table.check_active(rows)
            copy_to_checkpoints(self, self.states, rows)

    def release_passed_blocks(self, rows: IntArray) -> None:
        """Release the blocks that the windows of rows have passed, as ``reserve`` does; they stay in the prefix cache.

        Steps that read them must be ordered before those that write what is reserved from now on.

        Raises:
            RowError: a row is not in use or is listed twice.
        """
        if self.table.windowed:
            rows = np.asarray(rows, np.int64)
            self.table.check_active(rows)
            release_passed(self, rows)

    def group_block_ids(self, rows: Any, columns: Any) -> list[Int32Array]:
        """Return the blocks at ``block_table[rows, columns]``: of each type int32 ``[num_groups, N]``, 0 if passed."""
        return [
            self.pool.blocks_of_groups(group_type.block_table[rows, columns], group_type.num_groups)
            for group_type in self.table.group_types
        ]

    def reserve(self, rows: IntArray, num_tokens: IntArray | int) -> Reservation:
        """Make the next ``num_tokens`` positions of each row writable by that row alone. All rows or none.

        Positions reserved earlier are used first, so a step inside an earlier reservation allocates nothing.

        Args:
            rows: ``[N]``, no row twice.
            num_tokens: ``[N]`` or one number: tokens after ``num_computed_tokens``.

        Raises:
            RowError: a row is not in use, is listed twice, or would exceed ``max_model_len``.
        """
        if len(rows) == 1:
            count: int = num_tokens if isinstance(num_tokens, int) else np.asarray(num_tokens).item()
            if (num_new_blocks := reserve_one_row(self, int(rows[0]), count)) is not None:
                return Reservation(True, np.ones(1, np.bool_), num_new_blocks)
        rows, num_tokens = np.asarray(rows, np.int64), self.table.checked_counts("reserve", num_tokens)
        self.table.check_distinct(rows)
        wanted = self.num_computed_tokens[rows] + num_tokens
        idle = wanted <= self.table.capacity[rows]
        if np.count_nonzero(idle) == len(rows):
            return Reservation(True, idle, 0)
        self.table.check_active(rows)
        if any_of(wanted > self.max_model_len):
            raise RowError(
                f"reserve: got {int(wanted.max())} tokens in a row, max_model_len is {self.max_model_len}"
            )
        return reserve_rows(self, rows, wanted, idle)

    def reserve_next_blocks(self, rows: IntArray) -> bool:
        """As ``reserve`` of one more block for each of ``rows``, whose blocks are all reserved by that row alone.

        Returns:
            False when blocks are short; nothing has changed then.

        Raises:
            RowError: a row is not in use, is listed twice, is as long as it may be, or reads a block that it has not
                reserved.
        """
        rows = np.asarray(rows, np.int64)
        self.table.check_distinct(rows)
        return append_block_to_each(self, rows)

    def commit(self, rows: IntArray, num_tokens: IntArray | int, token_ids: IntArray) -> None:
        """Declare reserved positions written: they count as computed, and lookups find them.

        Call it when the step that wrote them is over, or when every later step is ordered after it.

        Args:
            rows: ``[N]``, no row twice.
            num_tokens: ``[N]`` or one number: tokens written after ``num_computed_tokens``.
            token_ids: int32 ``[sum(num_tokens)]``, row after row.

        Raises:
            RowError: a row is not in use or has not reserved that much, or the number of ids is another.
        """
        num_tokens = self.table.checked_counts("commit", num_tokens)
        commit_rows(self, np.asarray(rows, np.int64), num_tokens, token_ids)

    def uncache(self, block_ids: IntArray) -> None:
        """Remove blocks that rows hold from the prefix cache: what they hold turned out to be wrong.

        Args:
            block_ids: those that are not in the prefix cache are left alone.
        """
        if self.cache is not None:
            block_ids = np.asarray(block_ids, np.int64)
            self.cache.forget(block_ids[self.pool.is_cached[block_ids]].tolist())

    def take_clone_plan(self) -> ClonePlan | None:
        """Drain the copies that must run before the next forward pass; None when there are none."""
        return self.clones.take_plan()

    def finish_clone_plan(self, plan: ClonePlan) -> None:
        """Release a plan's sources: the copies have run, or all later work is ordered after them."""
        self.clones.finish(plan)

    def take_changed_rows(self) -> IntArray:
        """Return the rows in use whose block table has changed since the last call."""
        rows: IntArray = np.flatnonzero(self.table.changed)
        self.table.changed[rows] = False
        return rows

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing is done, while a row is in use or a copy is not finished."""
        if self.table.is_active.any() or len(self.clones.held_blocks()):
            return False
        if self.cache is not None:
            self.cache.clear()
            self.pool.uncache_all()
        return True

    def take_events(self) -> list[CacheEvent]:
        """Drain the events of the prefix cache, oldest first; empty unless ``record_events``."""
        return self.cache.take_events() if self.cache is not None else []

    def check_integrity(self) -> None:
        """Recount every invariant.

        Raises:
            IntegrityError: names the invariant, the block and both counts.
        """
        check_all(self)
