"""The decision behind ``BlockManager.reserve``: new block, take-over, or clone, for all rows of a step at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rose_backend.block_manager.array_types import BoolArray, Int32Array, IntArray
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
    """``[N]``; with ``ok`` False, the largest number of rows that could be served together."""
    num_new_blocks: int
    """Blocks taken, clones included."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """What rows need; computed without changing anything. All arrays are ``[N]``."""

    rows: IntArray
    num_new: IntArray  # blocks behind the present ones
    is_claim: BoolArray  # tail is taken over in place: nobody has written beyond the row's own length
    is_clone: BoolArray  # tail is copied
    is_overwrite: (
        BoolArray  # tail is taken over, and what the cache knows beyond the row's length is given up
    )
    tails: Int32Array
    offsets: IntArray

    @property
    def cost(self) -> IntArray:
        cost: IntArray = self.num_new + self.is_clone
        return cost


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
        num_idle = int(np.count_nonzero(self._pool.ref_counts[match.block_ids] == 0))
        num_new = max(-(-num_tokens // self._block_size) - len(match.block_ids), 0)
        offset = match.num_tokens % self._block_size
        if not offset:
            return num_new + num_idle
        tail = match.block_ids[-1]
        can_claim = self._pool.writers[tail] == NO_WRITER and self._pool.num_written_tokens[tail] <= offset
        return num_new + num_idle + int(self._pool.ref_counts[tail] > 0 and not can_claim)

    def reserve(self, rows: IntArray, wanted: IntArray, idle: BoolArray) -> Reservation:
        """Serve all rows or none.

        Args:
            rows: ``[N]``, checked.
            wanted: ``[N]`` tokens each row must be able to hold.
            idle: ``[N]``, rows that need nothing.
        """
        demand = self._demand(rows[~idle], wanted[~idle])
        if demand.cost.sum() > self._pool.num_free_blocks:
            demand = self._overwrite_instead_of_clone(demand)
        cost = demand.cost
        total = int(cost.sum())
        if total > self._pool.num_free_blocks:
            servable = idle.copy()
            cheapest_first = np.argsort(cost, kind="stable")
            fits = np.cumsum(cost[cheapest_first]) <= self._pool.num_free_blocks
            servable[np.flatnonzero(~idle)[cheapest_first[fits]]] = True
            return Reservation(False, servable, 0)
        self._serve(demand, total)
        return Reservation(True, np.ones(len(rows), np.bool_), total)

    def _demand(self, rows: IntArray, wanted: IntArray) -> _Demand:
        size = self._block_size
        computed = self._table.num_computed_tokens[rows]
        num_new = np.maximum(-(-wanted // size) - self._table.num_row_blocks[rows], 0)
        columns = computed // size
        offsets = computed - columns * size
        # A full row has no column behind its last; such a row has offset 0 and its tail is not looked at.
        tails = self._table.block_table[rows, np.minimum(columns, self._table.block_table.shape[1] - 1)]
        needs_writer = ~self._table.tail_writable[rows] & (offsets != 0) & (wanted > computed)
        is_claim = np.zeros(len(rows), np.bool_)
        if needs_writer.any():
            candidates = np.flatnonzero(
                needs_writer
                & (self._pool.writers[tails] == NO_WRITER)
                & (self._pool.num_written_tokens[tails] <= offsets)
            )
            # Several rows may want the same tail: one gets it, the others clone.
            is_claim[candidates[np.unique(tails[candidates], return_index=True)[1]]] = True
        return _Demand(
            rows, num_new, is_claim, needs_writer & ~is_claim, np.zeros(len(rows), np.bool_), tails, offsets
        )

    def _overwrite_instead_of_clone(self, demand: _Demand) -> _Demand:
        """Spare the clones whose source only the row itself still holds, at the price of what is cached beyond."""
        alone = (self._pool.ref_counts[demand.tails] == 1) & (self._pool.writers[demand.tails] == NO_WRITER)
        is_overwrite = demand.is_clone & alone
        return replace(demand, is_clone=demand.is_clone & ~is_overwrite, is_overwrite=is_overwrite)

    def _serve(self, demand: _Demand, total: int) -> None:
        self._table.changed[demand.rows] = True
        taken_over = demand.is_claim | demand.is_overwrite
        if taken_over.any():
            self._pool.writers[demand.tails[taken_over]] = demand.rows[taken_over]
            self._stats.claims += int(np.count_nonzero(demand.is_claim))
            self._stats.overwrites += int(np.count_nonzero(demand.is_overwrite))
            for index in np.flatnonzero(demand.is_overwrite).tolist():
                if self._cache is not None:
                    self._cache.truncate(int(demand.tails[index]), int(demand.offsets[index]))
        block_ids = self._take(total)
        num_clones = int(np.count_nonzero(demand.is_clone))
        if num_clones:
            self._clone_tails(demand, block_ids[:num_clones])
        new_rows = self._table.append(demand.rows, demand.num_new, block_ids[num_clones:])
        self._pool.writers[block_ids[num_clones:]] = new_rows
        # Rows that reserved nothing behind a shared tail keep their place in line for a writer.
        decided = taken_over | demand.is_clone | (demand.offsets == 0)
        self._table.tail_writable[demand.rows[decided]] = True

    def _clone_tails(self, demand: _Demand, copies: Int32Array) -> None:
        rows, tails = demand.rows[demand.is_clone], demand.tails[demand.is_clone]
        offsets = demand.offsets[demand.is_clone]
        self._table.block_table[rows, self._table.num_computed_tokens[rows] // self._block_size] = copies
        self._pool.writers[copies] = rows
        self._pool.num_written_tokens[copies] = offsets
        if self._cache is not None:
            self._cache.copy_tokens(tails, copies)
        self._clones.add(tails, copies, offsets)
        self._stats.clones += len(copies)

    def _take(self, count: int) -> Int32Array:
        taken = self._pool.take(count)
        assert taken is not None, "reserve() has counted the free blocks"
        block_ids, evicted = taken
        if len(evicted) and self._cache is not None:
            self._cache.forget(evicted)
            self._stats.evictions += len(evicted)
        return block_ids
