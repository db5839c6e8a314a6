"""Blocks for rows and checkpoints: free ones, and cached ones that the prefix cache forgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rose_backend.block_manager.block_pool import BlockPool, BoolArray, Int64Array
from rose_backend.block_manager.observability import CacheStats
from rose_backend.block_manager.prefix_cache import PrefixCache


class KindOfBlocks(Protocol):
    """What blocks are taken for."""

    index: int
    num_groups: int


@dataclass
class Allocation:
    """Works on the block manager's own parts; holds no state itself."""

    _pool: BlockPool
    _cache: PrefixCache | None
    _stats: CacheStats

    def take(self, kind: KindOfBlocks, count: int) -> Int64Array:
        """Allocate ``count`` blocks for each group of a kind; return the first group's, with one reference each.

        The caller has checked ``BlockPool.num_free_blocks``.
        """
        pool = self._pool
        if pool.has_groups:
            evicted = pool.evict(count * kind.num_groups, self._is_spared)
            self._forget(evicted)
            pool.recycle(evicted)
            return pool.take_for(kind.index, count)
        block_ids, evicted = pool.take(count)
        self._forget(evicted)
        return block_ids

    def _is_spared(self, block_ids: Int64Array) -> BoolArray:
        """Which blocks end a hit, or are the last checkpoint of a running row, where somebody holds their prefix."""
        is_spared: BoolArray = self._pool.ends_hit[block_ids]
        if self._cache is not None and self._cache.states is not None:
            is_spared = is_spared | self._cache.states.are_last(block_ids)
        if self._cache is not None and np.count_nonzero(is_spared):
            for place in np.flatnonzero(is_spared).tolist():
                is_spared[place] = self._cache.is_prefix_held(int(block_ids[place]))
        return is_spared

    def _forget(self, evicted: Int64Array) -> None:
        if len(evicted):
            assert self._cache is not None, "only cached blocks are evicted"
            self._cache.forget(evicted.tolist())
            self._pool.num_written_tokens[evicted] = 0
            self._stats.evictions += len(evicted)
