"""Reference counts, free blocks, LRU eviction and copies as arrays: take, share and release many blocks in one call.

A block is in exactly one of three states:

    free     no reference, and the prefix cache does not index it   -> on the free stack
    cached   no reference, but the prefix cache still indexes it    -> in the eviction queue
    held     referenced by at least one row or pending copy

Copies for copy-on-write are queued here, too: a copy's source is held until the copy was issued.

Block ids are stored as int32, and converted once to int64 when used as an index: NumPy would convert them at each use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rose_backend.errors import RowError

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
IntArray: TypeAlias = npt.NDArray[np.signedinteger[Any]]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NULL_BLOCK = 0
"""Never allocated. Unused entries of a block table point to it."""
NO_WRITER = -1

NO_BLOCKS: Int32Array = np.zeros(0, np.int32)
NO_BLOCKS.setflags(write=False)
_NO_SOURCE = -1
_ENDS = 0  # the null block is never queued, so it marks both ends of the eviction queue


class EvictionQueue:
    """Cached blocks, least recently released first: a doubly linked list in two arrays. Memory: 8 bytes per block.

    The cost of each call depends on the number of blocks passed, not on the length of the queue.
    """

    def __init__(self, num_blocks: int) -> None:
        self._next: Int32Array = np.zeros(num_blocks, np.int32)
        self._previous: Int32Array = np.zeros(num_blocks, np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, block_ids: Int64Array) -> None:
        """Append blocks, in eviction order."""
        if not len(block_ids):
            return
        newest = self._previous[_ENDS]
        chain = np.empty(len(block_ids) + 2, np.int64)
        chain[0], chain[1:-1], chain[-1] = newest, block_ids, _ENDS
        self._next[chain[:-1]] = chain[1:]
        self._previous[chain[1:]] = chain[:-1]
        self._count += len(block_ids)

    def pop(self, count: int) -> Int64Array:
        """Remove the ``count`` oldest blocks. The caller has checked the length."""
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
        """Remove blocks from any position, no id twice.

        Blocks of a sequence are queued last block first and matched first block first, so most of them are neighbours
        in reverse order: each run of neighbours is unlinked at once.
        """
        if not len(block_ids):
            return
        backwards = block_ids[::-1]
        breaks = np.flatnonzero(self._next[backwards[:-1]] != backwards[1:])
        firsts = backwards[np.concatenate(([0], breaks + 1))].tolist()
        lasts = backwards[np.concatenate((breaks, [-1]))].tolist()
        for first, last in zip(firsts, lasts, strict=True):
            # Read here, not before the loop: unlinking an earlier run may have changed the neighbours.
            before, after = self._previous[first], self._next[last]
            self._next[before] = after
            self._previous[after] = before
        self._count -= len(block_ids)

    def clear(self) -> None:
        """Remove all blocks."""
        self._next[_ENDS] = self._previous[_ENDS] = _ENDS
        self._count = 0

    def block_ids(self) -> Int64Array:
        """Return all blocks in eviction order."""
        next_of, block_id, found = self._next.data, _ENDS, []
        for _ in range(self._count):
            block_id = next_of[block_id]
            found.append(block_id)
        return np.array(found, np.int64)


class BlockPool:
    """Owns the state of every block. Memory: 29 bytes per block; with several groups 1 and 4 per further group more.

    Where several groups have a block each for the same positions, the first one's represents all: the state is kept by
    its id, and the followers share its references, its place in the eviction queue and its fate.

    Args:
        num_blocks: blocks of the KV cache, the null block included.
        group_counts: of each KV cache group type.
        has_states: whether the last group type is one of states.
    """

    def __init__(self, num_blocks: int, group_counts: Sequence[int] = (1,), has_states: bool = False) -> None:
        self.num_blocks = num_blocks
        self.num_usable_blocks = num_blocks - 1
        """All blocks but the null block."""
        self._state_type = len(group_counts) - 1 if has_states else None
        self._new_kv_blocks: list[Int32Array] = []
        self.has_groups = len(group_counts) > 1 or group_counts[0] > 1
        """Whether there is more than one group."""
        self._group_counts: Int64Array = np.array(group_counts, np.int64)
        size = num_blocks if self.has_groups else 0
        self.group_type_of: npt.NDArray[np.int8] = np.zeros(size, np.int8)
        """int8 ``[num_blocks]``: the group type of a held or cached block; only with several groups."""
        self.ends_hit: BoolArray = np.zeros(size, np.bool_)
        """bool ``[num_blocks]``: whether a block is in a window at the end of a hit; only with several groups."""
        self.followers: Int32Array = np.zeros((max(group_counts) - 1, size), np.int32)
        """int32 ``[groups - 1, num_blocks]``: the blocks of the other groups of its type; 0 for none."""
        self.ref_counts: Int32Array = np.zeros(num_blocks, np.int32)
        self.writers: Int32Array = np.full(num_blocks, NO_WRITER, np.int32)
        """int32 ``[num_blocks]``: the row that may append to a block, or NO_WRITER; always NO_WRITER if not held."""
        self.num_written_tokens: Int32Array = np.zeros(num_blocks, np.int32)
        """int32 ``[num_blocks]``: leading tokens of a block whose K/V is valid once all queued device work has run."""
        self.is_cached: BoolArray = np.zeros(num_blocks, np.bool_)
        """bool ``[num_blocks]``: whether the prefix cache indexes a block. Set by the prefix cache."""
        # Low ids first: pop from the end.
        self._free_stack: Int32Array = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_stacked = num_blocks - 1
        self._queue = EvictionQueue(num_blocks)
        self._num_queued = 0  # with the followers
        self._scratch: Int32Array = np.zeros(num_blocks, np.int32)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``take`` can allocate: free and cached ones."""
        return self._num_stacked + self._num_queued

    @property
    def num_cached_blocks(self) -> int:
        """Unreferenced blocks that the prefix cache still indexes, without followers."""
        return len(self._queue)

    def take(self, count: int) -> tuple[Int64Array, Int64Array]:
        """Allocate blocks, each with a reference count of one. The caller has checked ``num_free_blocks``.

        Free blocks go first; then cached ones, least recently released first.

        Returns:
            ``(block_ids, evicted_ids)``; ``evicted_ids`` are those of ``block_ids`` that the prefix cache must forget,
            before their ``num_written_tokens`` are set to 0.
        """
        top = self._num_stacked
        self._num_stacked = max(top - count, 0)
        block_ids = self._free_stack[self._num_stacked : top][::-1].astype(np.int64)
        evicted = block_ids[:0]
        if count > top:
            evicted = self._queue.pop(count - top)
            self._num_queued -= len(evicted)
            block_ids = np.concatenate((block_ids, evicted))
        self.ref_counts[block_ids] = 1
        return block_ids, evicted

    def evict(self, num_blocks: int, is_spared: Callable[[Int64Array], BoolArray]) -> Int64Array:
        """Take the least recently released blocks out of the queue, until ``num_blocks`` will be free.

        The caller makes the prefix cache forget them, then calls ``recycle``. It has checked ``num_free_blocks``.

        Args:
            is_spared: which of some blocks are moved to the end of the queue instead, once.
        """
        popped, most = [np.zeros(0, np.int64)], int(self._group_counts.max())
        num_left = len(self._queue)  # blocks not yet looked at; the spared ones come after them
        while (missing := num_blocks - self._num_stacked - sum(map(self._count, popped))) > 0:
            block_ids = self._queue.pop(min(-(-missing // most), len(self._queue)))
            if num_left:
                spared = np.zeros(len(block_ids), np.bool_)
                spared[:num_left] = is_spared(block_ids[:num_left])
                num_left = max(num_left - len(block_ids), 0)
                self._queue.push(block_ids[spared])
                block_ids = block_ids[~spared]
            popped.append(block_ids)
        block_ids = np.concatenate(popped)
        self._num_queued -= self._count(block_ids)
        return block_ids

    def discard(self, block_id: int) -> None:
        """Put a block that is in the eviction queue, and that the prefix cache has forgotten, on the free stack."""
        block_ids = np.array([block_id], np.int64)
        self._queue.remove(block_ids)
        self._num_queued -= self._count(block_ids)
        self.recycle(block_ids)

    def take_for(self, group_type: int, count: int) -> Int64Array:
        """Allocate ``count`` blocks for each group of a type, all of them free; return the first group's.

        Their reference count is one.
        """
        num_groups = int(self._group_counts[group_type])
        top = self._num_stacked
        self._num_stacked = top - count * num_groups
        blocks = self._free_stack[self._num_stacked : top][::-1].reshape(num_groups, count)
        block_ids: Int64Array = blocks[0].astype(np.int64)
        self.followers[: num_groups - 1, block_ids] = blocks[1:]
        self.group_type_of[block_ids] = group_type
        self.ref_counts[block_ids] = 1
        if self._state_type is not None and group_type != self._state_type:
            self._new_kv_blocks.append(blocks.reshape(-1))
        return block_ids

    def take_new_kv_blocks(self) -> Int32Array:
        """Return the blocks that were allocated for K/V since the last call, int32 ``[N]``; only with states.

        What a state has left in them may read as NaN, so an engine whose attention reads past what is written zeroes
        them before the copies and steps that write them.
        """
        blocks, self._new_kv_blocks = self._new_kv_blocks, []
        return np.concatenate(blocks) if blocks else NO_BLOCKS

    def blocks_of_groups(self, block_ids: IntArray, num_groups: int) -> Int32Array:
        """Return int32 ``[num_groups, N]``: blocks, and those of the other groups of their type."""
        blocks = np.empty((num_groups, len(block_ids)), np.int32)
        blocks[0] = block_ids
        if num_groups > 1:
            blocks[1:] = self.followers[: num_groups - 1, block_ids]
        return blocks

    def share(self, block_ids: Int64Array, times: int = 1) -> None:
        """Add ``times`` references to each of ``block_ids`` (no id twice); cached ones leave the queue."""
        counts = self.ref_counts[block_ids]
        queued = block_ids[counts == 0]
        self._queue.remove(queued)
        self._num_queued -= self._count(queued)
        self.ref_counts[block_ids] = counts + np.int32(times)

    def share_held(self, block_ids: IntArray) -> None:
        """Add one reference for each entry of ``block_ids``, which are all held (ids may repeat)."""
        np.add.at(self.ref_counts, block_ids, np.int32(1))

    def release(self, block_ids: Int64Array) -> Int64Array:
        """Drop one reference for each entry of ``block_ids`` (ids may repeat).

        Args:
            block_ids: in eviction order: the last block of a sequence before its first.

        Returns:
            The blocks whose reference count is now zero.
        """
        is_last = self.last_of_each(block_ids)
        if is_last.all():
            self.ref_counts[block_ids] -= 1
        else:
            np.subtract.at(self.ref_counts, block_ids, np.int32(1))
        dropped: Int64Array = block_ids[is_last & (self.ref_counts[block_ids] == 0)]
        is_cached = self.is_cached[dropped]
        queued = dropped[is_cached]
        self._queue.push(queued)
        self._num_queued += self._count(queued)
        self.recycle(dropped[~is_cached])
        self.writers[dropped] = NO_WRITER
        return dropped

    def uncache_all(self) -> None:
        """Move all cached blocks to the free stack. The prefix cache is already empty, and no block is held."""
        block_ids: Int64Array = np.flatnonzero(self.is_cached)
        self.is_cached[block_ids] = False
        self._queue.clear()
        self._num_queued = 0
        self.recycle(block_ids)

    def last_of_each(self, ids: Int64Array) -> BoolArray:
        """Return for each entry whether it is the last one with this id. Ids are below ``num_blocks``."""
        order = np.arange(len(ids), dtype=np.int32)
        self._scratch[ids] = order  # the last store into an element stays
        is_last: BoolArray = self._scratch[ids] == order
        return is_last

    def cached_blocks(self) -> Int64Array:
        """Return the cached blocks in eviction order."""
        return self._queue.block_ids()

    def free_blocks(self) -> Int32Array:
        """Return the blocks on the free stack."""
        return self._free_stack[: self._num_stacked]

    def num_groups_of(self, block_ids: Int64Array) -> Int64Array:
        """Return the number of groups of each block's group type. Only with several groups."""
        num_groups: Int64Array = self._group_counts[self.group_type_of[block_ids]]
        return num_groups

    def _count(self, block_ids: Int64Array) -> int:
        """Return the number of blocks with their followers."""
        return int(self.num_groups_of(block_ids).sum()) if self.has_groups else len(block_ids)

    def recycle(self, block_ids: Int64Array) -> None:
        """Put blocks with their followers on the free stack; they are neither held nor queued."""
        self.num_written_tokens[block_ids] = 0
        if self.has_groups:
            followers = self.followers[:, block_ids]
            self.followers[:, block_ids] = 0
            self.ends_hit[block_ids] = False
            block_ids = np.concatenate((block_ids, followers[followers != NULL_BLOCK]))
        end = self._num_stacked + len(block_ids)
        self._free_stack[self._num_stacked : end] = block_ids
        self._num_stacked = end


@dataclass(frozen=True, slots=True, eq=False)
class ClonePlan:
    """Whole-block copies that must run before the next forward pass.

    All sources must be read before any destination is written. Only the first ``num_tokens`` tokens of each block need
    to be copied. The arrays are contiguous.
    """

    src_block_ids: Int32Array  # [N]
    dst_block_ids: Int32Array  # [N]
    num_tokens: Int32Array  # [N]
    num_held: int
    """Copies at the beginning that hold their sources; with several KV cache groups the rest are their followers'."""

    def __len__(self) -> int:
        return len(self.src_block_ids)


class CloneQueue:
    """Copies of the next step, and plans that are in flight. Memory: 4 bytes per block."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pending: Int32Array = np.zeros((3, 0), np.int32)  # source, destination, tokens
        self._pending_source_of: Int32Array = np.full(pool.num_blocks, _NO_SOURCE, np.int32)
        self._in_flight: list[ClonePlan] = []
        self._held_copies: list[Int64Array] = []  # destinations that nobody else holds

    def add(self, tails: Int64Array, copies: Int64Array, num_tokens: IntArray) -> None:
        """Queue copies of ``tails``, whose references pass to the queue. All arguments are ``[N]``.

        A tail that is itself the destination of a pending copy is copied from that copy's source, as all sources are
        read first.
        """
        added = np.empty((3, len(tails)), np.int32)
        added[:] = tails, copies, num_tokens
        moved = tails[:0]
        if self._pending.shape[1]:
            roots = self._pending_source_of[tails]
            is_moved = roots != _NO_SOURCE
            moved = tails[is_moved]
            added[0, is_moved] = roots[is_moved]
            self._pool.share_held(roots[is_moved])
        self._pending_source_of[copies] = added[0]
        self._pending = np.concatenate((self._pending, added), axis=1)
        self.release_blocks(moved)

    def hold_until_planned(self, copies: Int64Array) -> None:
        """Take over the references of destinations of pending copies: nobody may take them before they are planned.

        Whatever uses them afterwards is ordered after the plan.
        """
        self._held_copies.append(copies)

    def awaits_copy(self, block_id: int) -> bool:
        """Whether a block is the destination of a pending copy."""
        return bool(self._pending_source_of[block_id] != _NO_SOURCE)

    def release_blocks(self, block_ids: Int64Array) -> None:
        """Drop one reference for each entry, in eviction order; cancel copies into blocks that become unreferenced."""
        while len(block_ids):
            dropped = self._pool.release(block_ids)
            if not self._pending.shape[1]:
                return
            cancelled = dropped[self._pending_source_of[dropped] != _NO_SOURCE]
            block_ids = self._pending_source_of[cancelled].astype(np.int64)
            self._pending_source_of[cancelled] = _NO_SOURCE
            is_wanted = self._pending_source_of[self._pending[1]] != _NO_SOURCE
            # compress, not an index: its result is contiguous, which the copy of a plan to a device needs.
            self._pending = self._pending.compress(is_wanted, axis=1)

    def take_plan(self) -> ClonePlan | None:
        """Drain the pending copies into a plan whose sources stay held until ``finish``."""
        if not self._pending.shape[1]:
            return None
        planned = self._with_followers(self._pending) if self._pool.has_groups else self._pending
        src_block_ids, dst_block_ids, num_tokens = planned
        plan = ClonePlan(src_block_ids, dst_block_ids, num_tokens, self._pending.shape[1])
        # Followers among them have no source here anyway.
        self._pending_source_of[dst_block_ids.astype(np.int64)] = _NO_SOURCE
        self._pending = self._pending[:, :0]
        self._in_flight.append(plan)
        held, self._held_copies = self._held_copies, []
        for copies in held:
            self._pool.release(copies)
        return plan

    def finish(self, plan: ClonePlan) -> None:
        """Release the sources of a plan.

        Raises:
            RowError: the plan is not in flight (never taken here, or finished before).
        """
        if plan not in self._in_flight:
            raise RowError(f"clone plan of {len(plan)} copies is not in flight: it was finished before")
        self._in_flight.remove(plan)
        self.release_blocks(plan.src_block_ids[: plan.num_held].astype(np.int64))

    def held_sources(self) -> Int32Array:
        """Return the source of every pending and in-flight copy, an id once per copy."""
        in_flight = (plan.src_block_ids[: plan.num_held] for plan in self._in_flight)
        return np.concatenate([self._pending[0], *in_flight])

    def held_blocks(self) -> Int32Array:
        """Return ``held_sources``, and the destinations that are held until they are planned."""
        return np.concatenate([self.held_sources(), *self._held_copies], dtype=np.int32)

    def _with_followers(self, copies: Int32Array) -> Int32Array:
        """Return copies of blocks and, after them, those of the other groups; int32 ``[3, N]``."""
        sources, destinations = (self._pool.followers[:, block_ids] for block_ids in copies[:2])
        exists = sources != NULL_BLOCK
        num_tokens = np.broadcast_to(copies[2], sources.shape)
        followers = np.stack((sources[exists], destinations[exists], num_tokens[exists]))
        return np.concatenate((copies, followers), axis=1)
