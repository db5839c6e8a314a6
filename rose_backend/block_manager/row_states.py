"""States of layers that keep no K/V: the running one of each row, and checkpoints of it in the prefix cache.

A recurrent layer has one state per sequence, that of all tokens computed so far. Each step overwrites it, so a
*running* state belongs to one row alone, from its first reservation to its end. A *checkpoint* is a copy that stays as
it is. A row that starts from one gets a copy in turn; only when a row ends its running state becomes a checkpoint
itself.
"""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager.allocation import Allocation
from rose_backend.block_manager.block_pool import (
    NULL_BLOCK,
    BlockPool,
    BoolArray,
    Int32Array,
    Int64Array,
    IntArray,
)
from rose_backend.block_manager.clone_queue import CloneQueue
from rose_backend.block_manager.kind_table import GroupKind
from rose_backend.block_manager.observability import CacheStats
from rose_backend.block_manager.prefix_cache import PrefixCache
from rose_backend.block_manager.sequence_table import SequenceTable
from rose_backend.block_manager.state_index import Place


class RowStates:
    """The states of all rows.

    Args:
        index: of the kind of groups that keep a state.
        kind: that kind.
        max_num_seqs: rows.

    Memory: 8 bytes per row.
    """

    def __init__(
        self,
        index: int,
        kind: GroupKind,
        max_num_seqs: int,
        pool: BlockPool,
        table: SequenceTable,
        cache: PrefixCache | None,
        clones: CloneQueue,
        stats: CacheStats,
        block_size: int,
    ) -> None:
        self.index, self.num_groups = index, kind.num_groups
        self.running: Int32Array = np.zeros(max_num_seqs, np.int32)
        """int32 ``[max_num_seqs]``: the block of each row's running state, which stands for those of all groups; the
        null block before the first reservation."""
        self.found: Int32Array = np.zeros(max_num_seqs, np.int32)
        """int32 ``[max_num_seqs]``: the checkpoint that a row starts from, held until it has asked for its copy."""
        self.last: dict[int, Place] = {}
        """Where each row's last checkpoint is, or was."""
        self._pool, self._table, self._cache, self._clones = pool, table, cache, clones
        self._stats, self._block_size = stats, block_size
        self._allocation = Allocation(pool, cache, stats)

    def add(self, row: int, checkpoint: int) -> None:
        """Let a new row start from a checkpoint, if it is not the null block, and hold it."""
        if checkpoint != NULL_BLOCK:
            assert self._cache is not None and self._cache.states is not None, "checkpoints are in the cache"
            self._pool.share(np.array([checkpoint], np.int64))
            self.found[row] = checkpoint
            if self._pool.ends_hit[checkpoint]:
                # Several rows started here, so more may. The end of a conversation's turn is passed once.
                self._note_last(row, self._cache.states.place_of(checkpoint))
            self._pool.ends_hit[checkpoint] = True

    def num_blocks_to_start(self, rows: Int64Array) -> Int64Array:
        """Return how many blocks each of ``rows`` needs for a running state, int64 ``[N]``."""
        counts: Int64Array = (self.running[rows] == NULL_BLOCK) * np.int64(self.num_groups)
        return counts

    def start(self, rows: Int64Array) -> None:
        """Give rows that have none a running state, and ask for the copies of what they start from."""
        rows = rows[self.running[rows] == NULL_BLOCK]
        if not len(rows):
            return
        block_ids = self._allocation.take(self, len(rows))
        self.running[rows] = block_ids
        self._table.changed[rows] = True
        starts = self.found[rows] != NULL_BLOCK
        sources = self.found[rows[starts]].astype(np.int64)
        self.found[rows] = NULL_BLOCK
        self._copy(sources, block_ids[starts])

    def checkpoint(self, rows: Int64Array) -> None:
        """See ``BlockManager.checkpoint``."""
        places = self._places_of(rows)
        # Every row could still take a column: whoever runs comes before what is kept.
        num_spare = self._pool.num_free_blocks - int(np.count_nonzero(self._table.is_active)) * sum(
            kind.num_groups for kind in self._table.kinds
        )
        for row, place in zip(rows.tolist(), places, strict=True):
            source = int(self.running[row])
            if place is None or source == NULL_BLOCK:
                continue
            self._note_last(row, place)
            if self._renew(place) or num_spare < self.num_groups:
                continue
            num_spare -= self.num_groups
            copies = self._allocation.take(self, 1)
            running = np.array([source], np.int64)
            self._pool.share(running)
            self._copy(running, copies)
            self._clones.hold_until_planned(copies)
            self._publish(place, int(copies[0]))
            self._stats.checkpoints += 1

    def blocks_of(self, rows: IntArray) -> Int32Array:
        """Return the blocks of the running states of rows, int32 ``[num_groups, N]``."""
        return self._pool.blocks_of_groups(self.running[rows], self.num_groups)

    def end(self, rows: Int64Array, are_known: BoolArray | None) -> Int64Array:
        """Let rows that end go of their states; return the blocks to release, in eviction order.

        Args:
            rows: ``[N]``.
            are_known: ``[N]``: the state is that of the row's computed tokens, and becomes a checkpoint; None: no
                row's is.
        """
        are_known = np.zeros(len(rows), np.bool_) if are_known is None else are_known
        places = self._places_of(rows) if are_known.any() else [None] * len(rows)
        for row, place, is_known in zip(rows.tolist(), places, are_known.tolist(), strict=True):
            running = int(self.running[row])
            # Its copy is still to be made where no step has run since: then it is the checkpoint that is there already.
            is_old = running == NULL_BLOCK or self._clones.awaits_copy(running)
            if is_known and place is not None and not is_old and not self._renew(place):
                self._publish(place, running)
        held = np.concatenate((self.running[rows], self.found[rows]))
        self.running[rows] = self.found[rows] = NULL_BLOCK
        blocks: Int64Array = held[held != NULL_BLOCK].astype(np.int64)
        return blocks

    def renew(self, rows: Int64Array) -> None:
        """Make the last checkpoint of each row that has ended as young as the K/V that it has just released."""
        for row in rows.tolist():
            if (place := self.last.get(row)) is not None:
                self._note_last(row, None)
                self._renew(place)

    def held_blocks(self) -> Int32Array:
        """Return the blocks that rows hold, an id once per row."""
        held = np.concatenate((self.running, self.found))
        blocks: Int32Array = held[held != NULL_BLOCK]
        return blocks

    def _copy(self, sources: Int64Array, copies: Int64Array) -> None:
        """Ask for copies of whole blocks; the references of the sources pass to the queue."""
        if len(sources):
            self._clones.add(sources, copies, np.full(len(sources), self._block_size, np.int32))
            self._stats.clones += len(copies)
            self._stats.bytes_cloned += len(copies) * self.num_groups * self._stats.bytes_per_block

    def _places_of(self, rows: Int64Array) -> list[Place | None]:
        """Return where the checkpoint of each row's computed tokens belongs; None where no lookup could use it."""
        table, size, cache = self._table, self._block_size, self._cache
        if cache is None:
            return [None] * len(rows)
        places: list[Place | None] = []
        for row in rows.tolist():
            column, offset = divmod(int(table.num_computed_tokens[row]), size)
            tail = cache.tokens_of(int(table.block_table[row, column]))[:offset].tobytes() if offset else b""
            is_usable = (column or offset) and not (offset and cache.full_blocks_only)
            places.append((table.chain_digests[row], tail) if is_usable else None)
        return places

    def _note_last(self, row: int, place: Place | None) -> None:
        """Let a row's last checkpoint be that at a place; None: it has none any longer."""
        assert self._cache is not None and self._cache.states is not None, "checkpoints are in the cache"
        last, marks = self.last.pop(row, None), self._cache.states.last_of_rows
        if last is not None:
            marks[last] -= 1
            if not marks[last]:
                del marks[last]
        if place is not None:
            self.last[row] = place
            marks[place] += 1

    def _renew(self, place: Place) -> bool:
        """Make the checkpoint at a place, if there is one, the one to be evicted last; return whether there is one."""
        assert self._cache is not None and self._cache.states is not None, "checkpoints are in the cache"
        block_id = self._cache.states.get(place)
        if block_id != NULL_BLOCK and not self._pool.ref_counts[block_id]:
            block_ids = np.array([block_id], np.int64)
            self._pool.share(block_ids)
            self._pool.release(block_ids)
        return block_id != NULL_BLOCK

    def _publish(self, place: Place, block_id: int) -> None:
        assert self._cache is not None and self._cache.states is not None, "checkpoints are in the cache"
        self._pool.num_written_tokens[block_id] = self._block_size
        self._cache.states.add(place, block_id)
