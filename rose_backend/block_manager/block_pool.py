"""Reference counts and free blocks as arrays: take, share, release, each for many blocks in one call.

A block is in exactly one of three states:

    free     nobody refers to it, nothing in it can be found        -> on the free stack
    cached   nobody refers to it, the prefix cache can still find it -> in the eviction queue
    held     at least one row or clone refers to it
"""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager.array_types import BoolArray, Int32Array, Int64Array, IntArray
from rose_backend.block_manager.eviction_queue import EvictionQueue

NULL_BLOCK = 0
"""Never handed out. Unused table entries point to it."""
NO_WRITER = -1

_NONE: Int64Array = np.zeros(0, np.int64)


class BlockPool:
    """Owns the state of every block. Memory: 29 bytes per block.

    Args:
        num_blocks: blocks of the KV cache, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts: Int32Array = np.zeros(num_blocks, np.int32)
        self.writers: Int32Array = np.full(num_blocks, NO_WRITER, np.int32)
        """Row that may append to a block, or NO_WRITER. Of blocks that nobody holds always NO_WRITER."""
        self.num_written_tokens: Int32Array = np.zeros(num_blocks, np.int32)
        """Leading tokens of a block whose K/V is there once all work queued so far has run."""
        self.is_cached: BoolArray = np.zeros(num_blocks, np.bool_)
        """Whether a lookup can find a block. Set by the prefix cache."""
        # Low ids first: pop from the end.
        self._free_stack: Int32Array = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_stacked = num_blocks - 1
        self._queue = EvictionQueue(num_blocks)
        self._scratch: Int32Array = np.zeros(num_blocks, np.int32)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``take`` can hand out: free and cached ones."""
        return self._num_stacked + len(self._queue)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds and the prefix cache can still find."""
        return len(self._queue)

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    def take(self, count: int) -> tuple[Int64Array, Int64Array]:
        """Hand out blocks with a reference count of one each. The caller has checked that so many are left.

        Free blocks go first; then cached ones, least recently released first.

        Returns:
            ``(block_ids, evicted_ids)``; ``evicted_ids`` are those of ``block_ids`` that the prefix cache must forget,
            before their ``num_written_tokens`` are set to 0.
        """
        top = self._num_stacked
        self._num_stacked = max(top - count, 0)
        block_ids = self._free_stack[self._num_stacked : top][::-1].astype(np.int64)
        evicted = _NONE
        if count > top:
            evicted = self._queue.pop(count - top)
            block_ids = np.concatenate((block_ids, evicted))
        self.ref_counts[block_ids] = 1
        return block_ids, evicted

    def share(self, block_ids: Int64Array, times: int = 1) -> None:
        """Add ``times`` references to each of ``block_ids`` (no id twice); cached ones leave the queue."""
        counts = self.ref_counts[block_ids]
        self._queue.remove(block_ids[counts == 0])
        self.ref_counts[block_ids] = counts + np.int32(times)

    def share_held(self, block_ids: IntArray) -> None:
        """Add one reference for each entry of ``block_ids``, which somebody holds (an id may stand there again)."""
        np.add.at(self.ref_counts, block_ids, np.int32(1))

    def release(self, block_ids: Int64Array) -> Int64Array:
        """Drop one reference for each entry of ``block_ids`` (an id may stand there several times).

        Args:
            block_ids: in the order in which they shall be evicted: tails before heads.

        Returns:
            The blocks that nobody holds any more.
        """
        is_last = self.last_of_each(block_ids)
        if is_last.all():
            self.ref_counts[block_ids] -= 1
        else:
            np.subtract.at(self.ref_counts, block_ids, np.int32(1))
        dropped: Int64Array = block_ids[is_last & (self.ref_counts[block_ids] == 0)]
        is_cached = self.is_cached[dropped]
        self._queue.push(dropped[is_cached])
        self._push_stack(dropped[~is_cached])
        self.writers[dropped] = NO_WRITER
        return dropped

    def uncache_all(self) -> None:
        """Move all cached blocks to the free stack. The prefix cache has forgotten everything, and nothing is held."""
        block_ids: Int64Array = np.flatnonzero(self.is_cached)
        self.is_cached[block_ids] = False
        self._queue.clear()
        self._push_stack(block_ids)

    def last_of_each(self, ids: Int64Array) -> BoolArray:
        """Return for each entry whether the same id does not come again behind it. Ids are below ``num_blocks``."""
        order = np.arange(len(ids), dtype=np.int32)
        self._scratch[ids] = order  # the last store into an element stays
        is_last: BoolArray = self._scratch[ids] == order
        return is_last

    def cached_blocks(self) -> Int64Array:
        """Return the cached blocks, next to be evicted first."""
        return self._queue.block_ids()

    def free_blocks(self) -> Int32Array:
        """Return the blocks on the free stack."""
        return self._free_stack[: self._num_stacked]

    def _push_stack(self, block_ids: Int64Array) -> None:
        end = self._num_stacked + len(block_ids)
        self._free_stack[self._num_stacked : end] = block_ids
        self._num_stacked = end
        self.num_written_tokens[block_ids] = 0
