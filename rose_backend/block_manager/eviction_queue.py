"""The order in which cached blocks are given away: a doubly linked list in two arrays.

Block 0, the null block, is never queued, so it stands for both ends of the list. Putting blocks in, taking the oldest
out and removing any others costs time for the blocks concerned only, however long the queue is and whatever happened
before.
"""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager.array_types import Int32Array, Int64Array

_ENDS = 0


class EvictionQueue:
    """Blocks, least recently released first. Memory: 8 bytes per block."""

    def __init__(self, num_blocks: int) -> None:
        self._next: Int32Array = np.zeros(num_blocks, np.int32)
        self._previous: Int32Array = np.zeros(num_blocks, np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, block_ids: Int64Array) -> None:
        """Append blocks, the next to be evicted first."""
        if not len(block_ids):
            return
        newest = self._previous[_ENDS]
        chain = np.empty(len(block_ids) + 2, np.int64)
        chain[0], chain[1:-1], chain[-1] = newest, block_ids, _ENDS
        self._next[chain[:-1]] = chain[1:]
        self._previous[chain[1:]] = chain[:-1]
        self._count += len(block_ids)

    def pop(self, count: int) -> Int64Array:
        """Take out the ``count`` oldest blocks. The caller has checked that there are so many."""
        next_of = self._next.data  # single elements are read faster through it
        block_id, popped = _ENDS, []
        for _ in range(count):
            block_id = next_of[block_id]
            popped.append(block_id)
        oldest = next_of[block_id]
        self._next[_ENDS] = oldest
        self._previous[oldest] = _ENDS
        self._count -= count
        return np.array(popped, np.int64)

    def remove(self, block_ids: Int64Array) -> None:
        """Take out blocks from wherever they are, no id twice.

        Blocks of a sequence were queued tail first and are asked for head first, so most stand next to each other:
        they are unlinked as one run.
        """
        if not len(block_ids):
            return
        backwards = block_ids[::-1]
        breaks = np.flatnonzero(self._next[backwards[:-1]] != backwards[1:])
        firsts = backwards[np.concatenate(([0], breaks + 1))].tolist()
        lasts = backwards[np.concatenate((breaks, [-1]))].tolist()
        for first, last in zip(firsts, lasts, strict=True):
            # Read only now: an earlier run may have been the neighbour.
            before, after = self._previous[first], self._next[last]
            self._next[before] = after
            self._previous[after] = before
        self._count -= len(block_ids)

    def clear(self) -> None:
        """Take out all blocks."""
        self._next[_ENDS] = self._previous[_ENDS] = _ENDS
        self._count = 0

    def block_ids(self) -> Int64Array:
        """Return all blocks, the next to be evicted first."""
        oldest_first = self.pop(self._count)
        self.push(oldest_first)
        return oldest_first
