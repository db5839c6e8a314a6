"""Reference counts and free blocks as arrays: take, share, release, each for many blocks in one call.

A block is in exactly one of three states:

    free     nobody refers to it, nothing in it can be found        -> on the free stack
    cached   nobody refers to it, the prefix cache can still find it -> in the eviction queue
    held     at least one row or clone refers to it

The eviction queue is a plain array of (block, stamp) entries. A block that leaves the queue early only loses its stamp;
its stale entry is skipped later. So leaving costs one vector store, whatever the place in the queue.
"""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager.array_types import NO_BLOCKS, BoolArray, Int32Array, Int64Array, IntArray

NULL_BLOCK = 0
"""Never handed out. Unused table entries point to it."""
NO_WRITER = -1

_NOT_QUEUED = 0


class BlockPool:
    """Owns the state of every block. Memory: 53 bytes per block.

    Args:
        num_blocks: blocks of the KV cache, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts: Int32Array = np.zeros(num_blocks, np.int32)
        self.writers: Int32Array = np.full(num_blocks, NO_WRITER, np.int32)
        """Row that may append to a block, or NO_WRITER."""
        self.num_written_tokens: Int32Array = np.zeros(num_blocks, np.int32)
        """Leading tokens of a block whose K/V is there once all work queued so far has run."""
        self.is_cached: BoolArray = np.zeros(num_blocks, np.bool_)
        """Whether a lookup can find a block. Set by the prefix cache."""

        # Low ids first: pop from the end.
        self._free_stack: Int32Array = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_stacked = num_blocks - 1
        self._queue_blocks: Int32Array = np.zeros(2 * num_blocks, np.int32)
        self._queue_stamps: Int64Array = np.zeros(2 * num_blocks, np.int64)
        self._queue_head = 0
        self._queue_end = 0
        self._stamps: Int64Array = np.zeros(num_blocks, np.int64)
        self._next_stamp = 1
        self._num_cached = 0
        self._scratch: Int32Array = np.zeros(num_blocks, np.int32)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``take`` can hand out: free and cached ones."""
        return self._num_stacked + self._num_cached

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds and the prefix cache can still find."""
        return self._num_cached

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    def take(self, count: int) -> tuple[Int32Array, Int32Array] | None:
        """Hand out blocks with a reference count of one each.

        Free blocks go first; then cached ones, least recently released first.

        Returns:
            ``(block_ids, evicted_ids)``; ``evicted_ids`` are those of ``block_ids`` that the prefix cache must forget.
            None when fewer than ``count`` are left; then nothing has changed.
        """
        if count > self.num_free_blocks:
            return None
        from_stack = min(count, self._num_stacked)
        top = self._num_stacked
        block_ids = self._free_stack[top - from_stack : top][::-1].copy()
        self._num_stacked = top - from_stack
        evicted = NO_BLOCKS
        if from_stack < count:
            evicted = self._pop_queue(count - from_stack)
            block_ids = np.concatenate((block_ids, evicted))
        self.ref_counts[block_ids] = 1
        self.writers[block_ids] = NO_WRITER
        self.num_written_tokens[block_ids] = 0
        return block_ids, evicted

    def share(self, block_ids: IntArray, times: int = 1) -> None:
        """Add ``times`` references to each of ``block_ids`` (no id twice); cached ones leave the queue."""
        queued = block_ids[self._stamps[block_ids] != _NOT_QUEUED]
        self._stamps[queued] = _NOT_QUEUED
        self._num_cached -= len(queued)
        self.ref_counts[block_ids] += times

    def release(self, block_ids: IntArray) -> Int32Array:
        """Drop one reference for each entry of ``block_ids`` (an id may stand there several times).

        Args:
            block_ids: in the order in which they shall be evicted: tails before heads.

        Returns:
            The blocks that nobody holds any more.
        """
        np.subtract.at(self.ref_counts, block_ids, 1)
        dropped = self._keep_last_of_each(block_ids[self.ref_counts[block_ids] == 0])
        cached = self.is_cached[dropped]
        self._push_queue(dropped[cached])
        self._push_stack(dropped[~cached])
        self.writers[dropped] = NO_WRITER
        return dropped

    def uncache(self, block_ids: IntArray) -> None:
        """Move cached blocks that the prefix cache has just forgotten to the free stack."""
        queued = block_ids[self._stamps[block_ids] != _NOT_QUEUED]
        self._stamps[queued] = _NOT_QUEUED
        self._num_cached -= len(queued)
        self._push_stack(queued)

    def cached_blocks(self) -> Int32Array:
        """Return the cached blocks, next to be evicted first."""
        blocks = self._queue_blocks[self._queue_head : self._queue_end]
        live = self._stamps[blocks] == self._queue_stamps[self._queue_head : self._queue_end]
        cached: Int32Array = blocks[live]
        return cached

    def free_blocks(self) -> Int32Array:
        """Return the blocks on the free stack."""
        return self._free_stack[: self._num_stacked]

    def _push_stack(self, block_ids: IntArray) -> None:
        end = self._num_stacked + len(block_ids)
        self._free_stack[self._num_stacked : end] = block_ids
        self._num_stacked = end
        self.num_written_tokens[block_ids] = 0

    def _push_queue(self, block_ids: IntArray) -> None:
        count = len(block_ids)
        if not count:
            return
        if self._queue_end + count > len(self._queue_blocks):
            self._drop_stale_entries()
        stamps = np.arange(self._next_stamp, self._next_stamp + count)
        self._next_stamp += count
        self._stamps[block_ids] = stamps
        self._queue_blocks[self._queue_end : self._queue_end + count] = block_ids
        self._queue_stamps[self._queue_end : self._queue_end + count] = stamps
        self._queue_end += count
        self._num_cached += count

    def _drop_stale_entries(self) -> None:
        # At most num_blocks entries are live, so this frees at least half of the queue: amortised O(1) per entry.
        live_blocks = self.cached_blocks()
        count = len(live_blocks)
        self._queue_stamps[:count] = self._stamps[live_blocks]
        self._queue_blocks[:count] = live_blocks
        self._queue_head, self._queue_end = 0, count

    def _pop_queue(self, count: int) -> Int32Array:
        parts: list[Int32Array] = []
        while count:
            # Entries may be stale, so look at some more than are wanted.
            end = min(self._queue_head + count + 64, self._queue_end)
            blocks = self._queue_blocks[self._queue_head : end]
            live = np.flatnonzero(self._stamps[blocks] == self._queue_stamps[self._queue_head : end])
            chosen = live[:count]
            self._queue_head = self._queue_head + int(chosen[-1]) + 1 if len(live) >= count else end
            part = blocks[chosen]
            self._stamps[part] = _NOT_QUEUED
            self._num_cached -= len(part)
            count -= len(part)
            parts.append(part)
        popped: Int32Array = np.concatenate(parts)
        return popped

    def _keep_last_of_each(self, block_ids: IntArray) -> Int32Array:
        order = np.arange(len(block_ids), dtype=np.int32)
        self._scratch[block_ids] = order
        kept: Int32Array = block_ids[self._scratch[block_ids] == order].astype(np.int32, copy=False)
        return kept
