"""Copy-on-write: block copies of the next step, and source blocks that are held until their copy was issued."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager.block_pool import NULL_BLOCK, BlockPool, Int32Array, Int64Array, IntArray
from rose_backend.errors import RowError

_NO_SOURCE = -1


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
