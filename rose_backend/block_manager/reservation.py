"""The decision behind ``BlockManager.reserve``: new block, take-over, or clone, for all rows of a step at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager.array_types import BoolArray, Int32Array, Int64Array, any_of
from rose_backend.block_manager.block_pool import NO_WRITER, BlockPool
from rose_backend.block_manager.cache_stats import CacheStats
from rose_backend.block_manager.clone_queue import CloneQueue
from rose_backend.block_manager.prefix_cache import PrefixCache, PrefixMatch
from rose_backend.block_manager.sequence_table import SequenceTable


@dataclass(frozen=True, slots=True)
class Reservation:
    """Answer of ``BlockManager.reserve``."""

    ok: bool
    """True: every row was served. False: nothing has changed."""
    servable: BoolArray
    """``[N]``; with ``ok`` False, as many rows as can be served together; ``Reserver.reserve`` says which."""
    num_new_blocks: int
    """Blocks taken, clones included."""


@dataclass(slots=True)
class _Tails:
    """The part-filled blocks that ``M`` of the rows share and come to write in. All arrays are ``[M]``."""

    index: Int64Array  # of the row among the rows that need something
    entries: Int64Array  # where the block stands in the block table
    block_ids: Int64Array
    offsets: Int32Array  # of the row's next token in the block
    is_claim: BoolArray  # taken over in place: nobody has written beyond the row's own length
    is_clone: BoolArray  # copied
    is_overwrite: BoolArray  # taken over, and what the cache knows beyond the row's length is given up


class Reserver:
    """Works on the block manager's own arrays; holds no state itself."""

    def __init__(
        self,
        pool: BlockPool,
        table: SequenceTable,
        cache: PrefixCache | None,
        clones: CloneQueue,
        stats: CacheStats,
        block_size: int,
    ) -> None:
        self._pool = pool
        self._table = table
        self._cache = cache
        self._clones = clones
        self._stats = stats
        self._block_size = block_size

    def blocks_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """See ``BlockManager.blocks_needed``.

        A part-matched tail that nobody else holds counts no clone: ``reserve`` overwrites it when blocks are short.
        """
        if not match.num_tokens:
            return -(-num_tokens // self._block_size)
        num_idle = int(np.count_nonzero(self._pool.ref_counts[match.block_ids] == 0))
        num_new = max(-(-num_tokens // self._block_size) - len(match.block_ids), 0)
        offset = match.num_tokens % self._block_size
        if not offset:
            return num_new + num_idle
        tail = match.block_ids[-1]
        can_claim = self._pool.writers[tail] == NO_WRITER and self._pool.num_written_tokens[tail] <= offset
        return num_new + num_idle + int(self._pool.ref_counts[tail] > 0 and not can_claim)

    def reserve(self, rows: Int64Array, wanted: Int32Array, idle: BoolArray) -> Reservation:
        """Serve all rows or none.

        When blocks are short, ``servable`` is a largest set of rows that can be served together: rows in the order of
        the blocks they need, until no more fit. A row needs the blocks behind its present ones, and one for the clone
        of a shared tail unless it takes the tail over. A tail gets one writer: of the rows that may claim it, the one
        that needs the fewest blocks. So what a row needs does not depend on who else is served among those before it
        in this order, and cheapest first is largest.

        Args:
            rows: ``[N]``, checked.
            wanted: ``[N]`` tokens each row must be able to hold.
            idle: ``[N]``, rows that need nothing.
        """
        needy = np.flatnonzero(~idle)
        rows, wanted = rows[needy], wanted[needy]
        num_blocks = self._table.num_row_blocks[rows]
        num_new = np.maximum((wanted + (self._block_size - 1)) // self._block_size - num_blocks, 0)
        tails = self._shared_tails(rows, num_blocks, num_new)
        total, num_free = int(num_new.sum()), self._pool.num_free_blocks
        if tails is not None:
            total += int(np.count_nonzero(tails.is_clone))
            if total > num_free:
                total -= self._overwrite_instead_of_clone(tails)
        if total > num_free:
            if tails is not None:
                num_new[tails.index[tails.is_clone]] += 1
            cheapest_first = np.argsort(num_new, kind="stable")
            fits = np.cumsum(num_new[cheapest_first]) <= num_free
            servable = idle.copy()
            servable[needy[cheapest_first[fits]]] = True
            return Reservation(False, servable, 0)
        self._serve(rows, num_new, tails, total)
        return Reservation(True, np.ones(len(idle), np.bool_), total)

    def _shared_tails(self, rows: Int64Array, num_blocks: Int32Array, num_new: Int32Array) -> _Tails | None:
        table, pool = self._table, self._pool
        is_shared = table.capacity[rows] < table.full_capacity(num_blocks)
        if not any_of(is_shared):
            return None
        index = np.flatnonzero(is_shared)
        rows = rows[index]
        computed = table.num_computed_tokens[rows]
        entries = rows * table.width + computed // self._block_size
        offsets = computed % self._block_size
        block_ids = table.entries[entries].astype(np.int64)
        is_claim = (pool.writers[block_ids] == NO_WRITER) & (pool.num_written_tokens[block_ids] <= offsets)
        if any_of(is_claim):
            # Several rows may claim one tail: the cheapest, of equals the first, gets it.
            candidates = np.flatnonzero(is_claim)
            candidates = candidates[np.argsort(num_new[index[candidates]], kind="stable")][::-1]
            is_claim[candidates] = pool.last_of_each(block_ids[candidates])
        return _Tails(index, entries, block_ids, offsets, is_claim, ~is_claim, np.zeros_like(is_claim))

    def _overwrite_instead_of_clone(self, tails: _Tails) -> int:
        """Spare and count the clones whose source only the row holds, at the price of what is cached beyond."""
        holds_alone = self._pool.ref_counts[tails.block_ids] == 1
        holds_alone &= self._pool.writers[tails.block_ids] == NO_WRITER
        tails.is_overwrite = tails.is_clone & holds_alone
        tails.is_clone &= ~holds_alone
        return int(np.count_nonzero(tails.is_overwrite))

    def _serve(self, rows: Int64Array, num_new: Int32Array, tails: _Tails | None, total: int) -> None:
        self._table.changed[rows] = True
        block_ids = self._take(total)
        if tails is not None:
            num_clones = int(np.count_nonzero(tails.is_clone))
            if num_clones < len(tails.index):
                self._take_over_tails(rows, tails)
            if num_clones:
                self._clone_tails(rows, tails, block_ids[:num_clones])
                block_ids = block_ids[num_clones:]
        new_rows = self._table.append(rows, num_new, block_ids)
        self._pool.writers[block_ids] = new_rows.astype(np.int32)

    def _take_over_tails(self, rows: Int64Array, tails: _Tails) -> None:
        claimed, overwritten = tails.block_ids[tails.is_claim], tails.block_ids[tails.is_overwrite]
        self._stats.claims += len(claimed)
        self._stats.overwrites += len(overwritten)
        if self._cache is not None:
            for block_id in claimed.tolist():
                self._cache.reopen(block_id)
            for block_id in overwritten.tolist():
                self._cache.truncate(block_id)
        taken = ~tails.is_clone
        block_ids = tails.block_ids[taken]
        self._pool.writers[block_ids] = rows[tails.index[taken]]
        self._pool.num_written_tokens[block_ids] = tails.offsets[taken]

    def _clone_tails(self, rows: Int64Array, tails: _Tails, copies: Int64Array) -> None:
        is_clone = tails.is_clone
        sources, offsets = tails.block_ids[is_clone], tails.offsets[is_clone]
        self._table.entries[tails.entries[is_clone]] = copies.astype(np.int32)
        self._pool.writers[copies] = rows[tails.index[is_clone]].astype(np.int32)
        self._pool.num_written_tokens[copies] = offsets
        if self._cache is not None:
            self._cache.copy_tokens(sources, copies)
        self._clones.add(sources, copies, offsets)
        self._stats.count_clones(len(copies))

    def _take(self, count: int) -> Int64Array:
        block_ids, evicted = self._pool.take(count)
        if len(evicted):
            assert self._cache is not None, "only findable blocks are evicted"
            self._cache.forget(evicted.tolist())
            self._pool.num_written_tokens[evicted] = 0
            self._stats.evictions += len(evicted)
        return block_ids
