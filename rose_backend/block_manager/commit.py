"""What happens after a step has written: lengths move on, and the written tokens become findable."""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager.array_types import Int32Array, IntArray, within_group_index
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
        start = self._table.num_computed_tokens[rows]
        end = start + num_tokens
        one_each = isinstance(num_tokens, int) and num_tokens == 1
        if one_each:
            positions, row_of_token, num_ids = start, rows, len(rows)
        else:
            counts = end - start
            row_of_token = np.repeat(rows, counts)
            positions = np.repeat(start, counts) + within_group_index(counts)
            num_ids = len(positions)
        self._check(rows, start, end, len(token_ids), num_ids)
        columns = positions // self._block_size
        offsets = positions - columns * self._block_size
        blocks = self._table.block_table[row_of_token, columns]
        # Positions ascend within a row and no two rows write one block: the last store into each block is the largest.
        self._pool.num_written_tokens[blocks] = offsets + 1
        self._table.num_computed_tokens[rows] = end
        if self._cache is not None:
            self._cache.store_tokens(blocks, offsets, np.asarray(token_ids, np.int32))
            # Only tokens that open or fill a block, or go first into a copy, touch the index; all others cost nothing.
            is_event = ~self._pool.is_cached[blocks]
            if not one_each:
                is_event[1:] &= blocks[1:] != blocks[:-1]
            is_event |= offsets == self._block_size - 1
            events = is_event.nonzero()[0]
            if len(events):
                self._publish(self._cache, row_of_token[events], blocks[events], offsets[events])

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

    def _publish(self, cache: PrefixCache, rows: IntArray, blocks: Int32Array, offsets: IntArray) -> None:
        digests = self._table.chain_digests
        last = self._block_size - 1
        for row, block_id, offset in zip(rows.tolist(), blocks.tolist(), offsets.tolist(), strict=True):
            if block_id not in cache:
                cache.publish(block_id, digests[row])
            if offset == last:
                digests[row] = cache.publish_full(block_id, digests[row])

    def _check(self, rows: IntArray, start: IntArray, end: IntArray, num_given: int, num_ids: int) -> None:
        table = self._table
        ready = end <= table.num_row_blocks[rows] * self._block_size
        ready &= table.tail_writable[rows]
        ready |= start == end
        ready &= table.is_active[rows]
        if not ready.all():
            bad = int(rows[np.argmin(ready)])
            raise RowError(f"commit: row {bad} is not in use or has not reserved the tokens to commit")
        if num_given != num_ids:
            raise RowError(f"commit: got {num_given} token ids for {num_ids} tokens")
