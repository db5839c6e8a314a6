"""What happens after a step has written: lengths move on, and the written tokens become findable."""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager.array_types import (
    Int32Array,
    Int64Array,
    IntArray,
    any_of,
    concatenate_ranges,
)
from rose_backend.block_manager.block_pool import BlockPool
from rose_backend.block_manager.prefix_cache import PrefixCache
from rose_backend.block_manager.sequence_table import SequenceTable
from rose_backend.errors import RowError


class Committer:
    """Works on the block manager's own arrays; holds no state itself."""

    def __init__(
        self, pool: BlockPool, table: SequenceTable, cache: PrefixCache | None, block_size: int
    ) -> None:
        self._pool = pool
        self._table = table
        self._cache = cache
        self._block_size = block_size

    def commit(self, rows: Int64Array, num_tokens: Int32Array | int, token_ids: IntArray) -> None:
        """See ``BlockManager.commit``."""
        table, size = self._table, self._block_size
        table.check_distinct(rows)
        start = table.num_computed_tokens[rows]
        end = start + num_tokens
        self._check(rows, end)
        # One token each is what decoding does in every step.
        one_each = num_tokens == 1 if isinstance(num_tokens, int) else not any_of(num_tokens != 1)
        row_of_token, positions = (rows, start) if one_each else _spread(rows, start, end)
        if len(token_ids) != len(positions):
            raise RowError(f"commit: got {len(token_ids)} token ids for {len(positions)} tokens")
        columns = positions // size
        offsets = positions - columns * size
        blocks = table.entries[row_of_token * table.width + columns].astype(np.int64)
        # Positions ascend within a row and no two rows write one block: the last store into each block is the largest.
        self._pool.num_written_tokens[blocks] = offsets + 1
        table.num_computed_tokens[rows] = end
        if self._cache is not None:
            self._cache.store_tokens(blocks * size + offsets, np.asarray(token_ids, np.int32))
            # Only tokens that open or fill a block, or go first into a copy, touch the index; all others cost nothing.
            is_due = end >= table.next_publish[rows]
            if any_of(is_due):
                self._publish(self._cache, rows[is_due], start[is_due], end[is_due])

    def _publish(self, cache: PrefixCache, rows: Int64Array, start: IntArray, end: IntArray) -> None:
        """Make findable what ``rows`` have just computed, from ``start`` to ``end``."""
        table, size = self._table, self._block_size
        first_columns = start // size
        counts = (end - 1) // size + 1 - first_columns
        entries = concatenate_ranges(rows * table.width + first_columns, counts)
        row_of_block = np.repeat(rows, counts)
        blocks = table.entries[entries]
        is_full = (entries - row_of_block * table.width + 1) * size <= np.repeat(end, counts)
        opens = np.zeros_like(is_full) if cache.full_blocks_only else ~self._pool.is_cached[blocks]
        cache.publish(row_of_block, blocks, is_full, opens, table.chain_digests, table.namespaces)
        next_publish = (end // size + 1) * size
        if not cache.full_blocks_only:
            next_publish = np.where(end % size == 0, end + 1, next_publish)
        table.next_publish[rows] = next_publish

    def _check(self, rows: Int64Array, end: IntArray) -> None:
        is_bad = end > self._table.capacity[rows]
        if any_of(is_bad):
            row = int(rows[np.argmax(is_bad)])
            raise RowError(f"commit: row {row} is not in use or has not reserved the tokens to commit")


def _spread(rows: Int64Array, start: Int32Array, end: Int32Array) -> tuple[Int64Array, Int32Array]:
    """Return row and position of each token."""
    counts = end - start
    return np.repeat(rows, counts), concatenate_ranges(start, counts).astype(np.int32)
