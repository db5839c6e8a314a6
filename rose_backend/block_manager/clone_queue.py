"""Copy-on-write pairs that wait for the next step, and sources that are held until their copy was issued."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager.array_types import Int32Array, Int64Array, IntArray
from rose_backend.block_manager.block_pool import BlockPool
from rose_backend.errors import RowError

_NO_SOURCE = -1
_NONE: Int64Array = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ClonePlan:
    """Whole-block copies that must run before the next forward pass.

    All sources are to be read before any destination is written. ``num_tokens`` says how many leading tokens of each
    block matter; a copy of the whole block is right, too. The arrays are contiguous.
    """

    src_block_ids: Int32Array  # [N]
    dst_block_ids: Int32Array  # [N]
    num_tokens: Int32Array  # [N]

    def __len__(self) -> int:
        return len(self.src_block_ids)


class CloneQueue:
    """Pairs of the coming step, and plans whose copies were not yet issued. Memory: 4 bytes per block."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pending: Int32Array = np.zeros((3, 0), np.int32)  # source, destination, tokens
        self._pending_source_of: Int32Array = np.full(pool.num_blocks, _NO_SOURCE, np.int32)
        self._in_flight: list[ClonePlan] = []

    def add(self, tails: Int64Array, copies: Int64Array, num_tokens: IntArray) -> None:
        """Queue copies of ``tails``, whose references the queue takes over.

        A tail that a pending copy is still to fill is copied from where its content is now: sources are all read first.
        """
        added = np.empty((3, len(tails)), np.int32)
        added[:] = tails, copies, num_tokens
        moved = _NONE
        if self._pending.shape[1]:
            roots = self._pending_source_of[tails]
            is_moved = roots != _NO_SOURCE
            moved = tails[is_moved]
            added[0, is_moved] = roots[is_moved]
            self._pool.share_held(roots[is_moved])
        self._pending_source_of[copies] = added[0]
        self._pending = np.concatenate((self._pending, added), axis=1)
        self.release_blocks(moved)

    def release_blocks(self, block_ids: Int64Array) -> None:
        """Drop one reference for each entry, tails first; call off copies into blocks nobody holds any more."""
        while len(block_ids):
            dropped = self._pool.release(block_ids)
            if not self._pending.shape[1]:
                return
            called_off = dropped[self._pending_source_of[dropped] != _NO_SOURCE]
            block_ids = self._pending_source_of[called_off].astype(np.int64)
            self._pending_source_of[called_off] = _NO_SOURCE
            is_wanted = self._pending_source_of[self._pending[1]] != _NO_SOURCE
            # Not by an index, whose result is laid out by columns: plans are copied to a device row by row.
            self._pending = self._pending.compress(is_wanted, axis=1)

    def take_plan(self) -> ClonePlan | None:
        """Drain the pending pairs into a plan whose sources stay held until ``finish``."""
        if not self._pending.shape[1]:
            return None
        plan = ClonePlan(*self._pending)
        self._pending_source_of[plan.dst_block_ids.astype(np.int64)] = _NO_SOURCE
        self._pending = self._pending[:, :0]
        self._in_flight.append(plan)
        return plan

    def finish(self, plan: ClonePlan) -> None:
        """Let go of the sources of a plan.

        Raises:
            RowError: the plan is not in flight (never taken here, or finished before).
        """
        if plan not in self._in_flight:
            raise RowError(f"clone plan of {len(plan)} copies is not in flight: it was finished before")
        self._in_flight.remove(plan)
        self.release_blocks(plan.src_block_ids.astype(np.int64))

    def held_sources(self) -> Int32Array:
        """Return the source of every pending and in-flight copy, an id as often as it is held."""
        return np.concatenate([self._pending[0], *(plan.src_block_ids for plan in self._in_flight)])
