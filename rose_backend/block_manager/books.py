"""The books: every array of the block manager, each with one owner, and how blocks are allocated from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rose_backend.block_manager.block_pool import BlockPool, BoolArray, Int64Array
from rose_backend.block_manager.clone_queue import CloneQueue
from rose_backend.block_manager.observability import CacheStats
from rose_backend.block_manager.prefix_cache import PrefixCache
from rose_backend.block_manager.sequence_table import GroupKind, KindTable, RowStates, SequenceTable


class Books:
    """What ``BlockManager`` keeps. The functions of ``reservation`` and ``row_states`` take it as their first argument.

    Args: see ``BlockManager``, which has checked them.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        kinds: Sequence[GroupKind],
        prefix_cache: bool,
        full_blocks_only: bool,
        hash_key: bytes | None,
        bytes_per_block: int,
        record_events: bool,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        has_states = kinds[-1].is_state
        self.pool = BlockPool(num_blocks, [kind.num_groups for kind in kinds], has_states)
        kv_kinds = [kind for kind in kinds if not kind.is_state]
        self.table = SequenceTable(max_num_seqs, max_model_len, block_size, kv_kinds)
        self.states: RowStates | None = None
        if has_states:
            self.states = RowStates(len(kv_kinds), kinds[-1].num_groups, max_num_seqs, self.pool)
        self.cache: PrefixCache | None = None
        if prefix_cache:
            windows = [kind.window for kind in kv_kinds if kind.window is not None]
            self.cache = PrefixCache(
                self.pool, block_size, full_blocks_only, hash_key, record_events, windows, has_states
            )
        self.clones = CloneQueue(self.pool)
        self.stats = CacheStats(bytes_per_block)
        self.blocks_per_column = sum(kind.num_groups for kind in kv_kinds)
        """Blocks of all KV cache groups for the same positions."""

    def take_blocks(self, kind: KindTable | RowStates, count: int) -> Int64Array:
        """Allocate ``count`` blocks for each group of a kind; return the first group's, with one reference each.

        Free blocks go first, then cached ones, which the prefix cache forgets. The caller has checked
        ``BlockPool.num_free_blocks``.
        """
        pool = self.pool
        if pool.has_groups:
            evicted = pool.evict(count * kind.num_groups, self._is_spared)
            self._forget(evicted)
            pool.recycle(evicted)
            return pool.take_for(kind.index, count)
        block_ids, evicted = pool.take(count)
        self._forget(evicted)
        return block_ids

    def _is_spared(self, block_ids: Int64Array) -> BoolArray:
        """Which blocks end a hit, or are the last checkpoint of a running row, while somebody holds their prefix."""
        is_spared: BoolArray = self.pool.ends_hit[block_ids]
        if self.cache is not None and self.cache.states is not None:
            is_spared = is_spared | self.cache.states.are_last(block_ids)
        if self.cache is not None and np.count_nonzero(is_spared):
            for place in np.flatnonzero(is_spared).tolist():
                is_spared[place] = self.cache.is_prefix_held(int(block_ids[place]))
        return is_spared

    def _forget(self, evicted: Int64Array) -> None:
        if len(evicted):
            assert self.cache is not None, "only cached blocks are evicted"
            self.cache.forget(evicted.tolist())
            self.pool.num_written_tokens[evicted] = 0
            self.stats.evictions += len(evicted)
