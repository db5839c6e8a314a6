"""The block manager's part of ``--kv-canary``: which K/V no step may write, and which none may read.

No step may write to a committed token while its block keeps it, or to a free block; this is compared from check to
check (``kernels/kv/canary.py``). No step may read a free block: free blocks are poisoned with NaN at a check, and
cleared before the step whose rows hold them again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rose_backend.block_manager.block_manager import BlockManager
from rose_backend.block_manager.block_pool import Int32Array, Int64Array, IntArray
from rose_backend.errors import ConfigError

CHECK_INTERVAL = 16
"""Steps from one check to the next: each reads the whole KV pool."""


class CanaryPlan(NamedTuple):
    """What is done before the copies and passes of a step, in this order, where all earlier steps have run."""

    clear: Int64Array  # [N]
    """Poisoned blocks that rows hold from this step on: attention multiplies what it masks by 0, and NaN stays NaN."""
    num_settled: Int32Array | None  # [NB]
    """Leading tokens of each block that nobody may have written since the last check; -1: it is poisoned, and must be
    as it was then. None: no check is due."""
    poison: Int64Array  # [N]
    """Free blocks that nobody may write or read from now on."""


class CanaryPlanner:
    """Follows a block manager from step to step. Memory: 6 bytes per block; time: that of a few passes over them.

    Raises:
        ConfigError: the blocks are those of several KV cache groups.
    """

    def __init__(self, manager: BlockManager) -> None:
        if manager.pool.has_groups:
            raise ConfigError("kv_canary: got a model with several KV cache groups, allowed is one with one")
        self._manager = manager
        self._num_settled: Int32Array = np.zeros(manager.pool.num_blocks, np.int32)
        self._is_poisoned = np.zeros(manager.pool.num_blocks, np.bool_)
        self._num_steps = 0

    def plan(self, copied: IntArray) -> CanaryPlan:
        """Return what is due before a step; called once for each, in order, when all its blocks are reserved.

        Args:
            copied: ``[N]`` blocks that are copied to before this step.
        """
        pool = self._manager.pool
        # What a step commits was not committed before it, so a block that was taken since the last step shows here.
        np.minimum(self._num_settled, pool.num_written_tokens, out=self._num_settled)
        self._num_settled[copied] = 0
        is_free = np.zeros(pool.num_blocks, np.bool_)
        is_free[pool.free_blocks()] = True
        clear = np.flatnonzero(self._is_poisoned & ~is_free)
        self._is_poisoned[clear] = False
        self._num_steps += 1
        if self._num_steps % CHECK_INTERVAL:
            return CanaryPlan(clear, None, clear[:0])
        num_settled = np.where(self._is_poisoned, np.int32(-1), self._num_settled)
        poison = np.flatnonzero(is_free & ~self._is_poisoned)
        self._is_poisoned[poison] = True
        self._num_settled[:] = pool.num_written_tokens
        self._num_settled[copied] = 0
        return CanaryPlan(clear, num_settled, poison)
