"""What happens after a step has written: lengths move on, and the written tokens become findable."""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager.array_types import BoolArray, Int32Array, IntArray, within_group_index
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

    def commit(self, rows: IntArray, num_tokens: IntArray | int, token_ids: IntArray) -> None:
        """See ``BlockManager.commit``."""
        counts = np.broadcast_to(np.asarray(num_tokens), rows.shape)
        start = self._table.num_computed_tokens[rows]
        end = start + counts
        self._check(rows, counts, end, len(token_ids))
        if (counts == 1).all():
            positions, row_of_token = start, rows
        else:
            row_of_token = np.repeat(rows, counts)
            positions = np.repeat(start, counts) + within_group_index(counts)
        columns = positions // self._block_size
        offsets = positions - columns * self._block_size
        blocks = self._table.block_table[row_of_token, columns]
        # Positions ascend within a row and no two rows write one block: the last store into each block is the largest.
        self._pool.num_written_tokens[blocks] = offsets + 1
        self._table.num_computed_tokens[rows] = end
        if self._cache is not None:
            self._cache.store_tokens(blocks, offsets, np.asarray(token_ids, np.int32))
            self._publish(self._cache, row_of_token, blocks, offsets)

    def drop_redundant_tails(self, rows: IntArray) -> None:
        """Keep only one copy of equal part-filled tails findable, so that copies do not push other content out."""
        cache = self._cache
        if cache is None:
            return
        last_columns = np.maximum(self._table.num_computed_tokens[rows] - 1, 0) // self._block_size
        tails = self._table.block_table[rows, last_columns]
        part_filled = self._pool.is_cached[tails] & (self._pool.num_written_tokens[tails] < self._block_size)
        for tail in tails[part_filled & (self._pool.ref_counts[tails] == 1)].tolist():
            if cache.is_redundant(tail):
                cache.forget(np.array([tail]))

    def _publish(
        self, cache: PrefixCache, row_of_token: IntArray, blocks: Int32Array, offsets: IntArray
    ) -> None:
        digests = self._table.chain_digests
        is_full = offsets == self._block_size - 1
        # Only tokens that open or fill a block, or go first into a copy, touch the index; all others cost nothing here.
        opens: BoolArray = np.ones(len(blocks), np.bool_)
        opens[1:] = blocks[1:] != blocks[:-1]
        for index in np.flatnonzero((opens & ~self._pool.is_cached[blocks]) | is_full).tolist():
            row, block_id = int(row_of_token[index]), int(blocks[index])
            if block_id not in cache:
                cache.publish(block_id, digests[row])
            if is_full[index]:
                digests[row] = cache.publish_full(block_id, digests[row])

    def _check(self, rows: IntArray, counts: IntArray, end: IntArray, num_ids: int) -> None:
        table = self._table
        ready = (end <= table.num_row_blocks[rows] * self._block_size) & table.tail_writable[rows]
        ready = (ready | (counts == 0)) & table.is_active[rows]
        if not ready.all():
            bad = int(rows[np.argmin(ready)])
            raise RowError(f"commit: row {bad} is not in use or has not reserved the tokens to commit")
        if num_ids != counts.sum():
            raise RowError(f"commit: got {num_ids} token ids for {int(counts.sum())} tokens")
