"""How rows come and go: a prompt with its cached prefix, the children of a fork, and the end of them all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager.array_types import Int64Array
from rose_backend.block_manager.block_pool import NO_WRITER, BlockPool
from rose_backend.block_manager.cache_stats import CacheStats
from rose_backend.block_manager.clone_queue import CloneQueue
from rose_backend.block_manager.prefix_cache import PrefixCache, PrefixMatch
from rose_backend.block_manager.sequence_table import SequenceTable


@dataclass(frozen=True, slots=True)
class Admission:
    """Answer of ``BlockManager.add``."""

    row: int
    num_cached_tokens: int
    """Prompt tokens that need no computation."""


class Admitter:
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

    def add(self, num_tokens: int, namespace: bytes, match: PrefixMatch) -> Admission:
        """Give a row to a prompt of ``num_tokens``, of which ``match`` was found. A row is free."""
        if len(match.block_ids):
            self._pool.share(match.block_ids.astype(np.int64))
        (row,) = self._table.take_rows(
            1, match.block_ids, match.num_tokens, match.chain_digest, namespace
        ).tolist()
        if self._cache is not None:
            self._stats.count_lookup(num_tokens, match.num_tokens, self._block_size)
        return Admission(row, match.num_tokens)

    def fork(self, row: int, num_children: int) -> Int64Array:
        """See ``BlockManager.fork``. Enough rows are free."""
        table = self._table
        num_tokens = int(table.num_computed_tokens[row])
        shared = table.block_table[row, : -(-num_tokens // self._block_size)]
        self._pool.share(shared.astype(np.int64), num_children)
        self._stats.forks += num_children
        return table.take_rows(
            num_children, shared, num_tokens, table.chain_digests[row], table.namespaces[row]
        )

    def free(self, rows: Int64Array) -> None:
        """Let go of rows that are in use and of all they hold."""
        table, writers = self._table, self._pool.writers
        if self._cache is not None:
            last_columns = np.maximum(table.num_computed_tokens[rows] - 1, 0) // self._block_size
            tails = table.entries[rows * table.width + last_columns].astype(np.int64)
            self._cache.retire_tails(rows, tails)
        entries = table.entries_tail_first(rows)
        block_ids = table.entries[entries].astype(np.int64)
        writers[block_ids[writers[block_ids] == entries // table.width]] = NO_WRITER
        table.give_back(rows, entries)
        self._clones.release_blocks(block_ids)
