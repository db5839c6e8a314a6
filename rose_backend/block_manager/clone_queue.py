"""Copy-on-write pairs that wait for the next step, and sources that are held until their copy was issued."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager.array_types import Int32Array, IntArray
from rose_backend.block_manager.block_pool import BlockPool
from rose_backend.errors import RowError


@dataclass(frozen=True, slots=True, eq=False)
class ClonePlan:
    """Whole-block copies that must run before the next forward pass.

    All sources are to be read before any destination is written. ``num_tokens`` says how many leading tokens of each
    block matter; a copy of the whole block is right, too.
    """

    src_block_ids: Int32Array  # [N]
    dst_block_ids: Int32Array  # [N]
    num_tokens: Int32Array  # [N]

    def __len__(self) -> int:
        return len(self.src_block_ids)


class CloneQueue:
    """Pairs of the coming step by destination, and plans whose copies were not yet issued."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pending: dict[int, tuple[int, int]] = {}  # destination -> (source, tokens)
        self._in_flight: list[ClonePlan] = []

    def __len__(self) -> int:
        return len(self._pending)

    def root_source(self, block_id: int) -> int:
        """Follow a block that is itself still to be filled by a pending copy back to where its content is now."""
        pair = self._pending.get(block_id)
        return block_id if pair is None else pair[0]

    def add(self, src_block_id: int, dst_block_id: int, num_tokens: int) -> None:
        """Queue one copy. ``src_block_id`` must be a root source that the caller holds a reference to."""
        self._pending[dst_block_id] = (src_block_id, num_tokens)

    def release_blocks(self, block_ids: IntArray) -> None:
        """Drop one reference for each entry, tails first; call off copies into blocks nobody holds any more."""
        while len(block_ids):
            dropped = self._pool.release(block_ids)
            if not self._pending:
                return
            pairs = (self._pending.pop(block_id, None) for block_id in dropped.tolist())
            block_ids = np.array([pair[0] for pair in pairs if pair is not None], np.int32)

    def take_plan(self) -> ClonePlan | None:
        """Drain the pending pairs into a plan whose sources stay held until ``finish``."""
        if not self._pending:
            return None
        destinations = np.fromiter(self._pending, np.int32, len(self._pending))
        sources, num_tokens = np.array(list(self._pending.values()), np.int32).T.copy()
        self._pending.clear()
        plan = ClonePlan(sources, destinations, num_tokens)
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
        self.release_blocks(plan.src_block_ids)

    def held_sources(self) -> Int32Array:
        """Return the source of every pending and in-flight copy, an id as often as it is held."""
        pending = np.array([source for source, _ in self._pending.values()], np.int32)
        return np.concatenate([pending, *(plan.src_block_ids for plan in self._in_flight)])
