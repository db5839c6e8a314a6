"""The books: every array of the block manager, each with one owner, and how blocks are allocated from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rose_backend.block_manager.block_pool import BlockPool, BoolArray, CloneQueue, Int64Array
from rose_backend.block_manager.prefix_cache import CacheStats, PrefixCache
from rose_backend.block_manager.sequence_table import (
    GroupType,
    GroupTypeTable,
    RowStates,
    SequenceTable,
    check_group_types,
)
from rose_backend.config import check_int
from rose_backend.errors import ConfigError

_MAX_BLOCKS = 2**31 - 1


class Books:
    """What ``BlockManager`` keeps. The functions of ``reservation`` and ``row_states`` take it as their first argument.

    Args:
        num_blocks: blocks of the KV cache including block 0, the null block, which is never allocated.
        block_size: tokens per block.
        max_num_seqs: rows.
        max_model_len: tokens a row can hold.
        group_types: of KV cache groups, one group that keeps everything unless told otherwise. The first type keeps
            everything; what the windows of the others have passed becomes free, and a prefix hit may end at any token
            whose window is there in all of them. All have the same ``block_size``. The last type may be one of states:
            a hit then ends where a ``checkpoint`` was made.
        prefix_cache: reuse K/V of other sequences.
        full_blocks_only: with ``prefix_cache``, let hits end at block boundaries only.
        hash_key: key of the prefix hashes, at most 64 bytes; None draws a random one.
        bytes_per_block: of one block over all layers of its group, keys and values; ``stats.bytes_cloned`` counts with
            it.
        record_events: record events for ``take_events``.

    Raises: ConfigError if a number is out of range.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        group_types: Sequence[GroupType] = (GroupType(),),
        prefix_cache: bool = True,
        full_blocks_only: bool = False,
        hash_key: bytes | None = None,
        bytes_per_block: int = 0,
        record_events: bool = False,
    ) -> None:
        check_int("num_blocks", num_blocks, 2, _MAX_BLOCKS)
        check_int("block_size", block_size, 1, 65_536)
        check_int("max_num_seqs", max_num_seqs, 1, 1 << 20)
        check_int("max_model_len", max_model_len, 1, 1 << 30)
        check_int("bytes_per_block", bytes_per_block, 0, 1 << 50)
        if hash_key is not None and len(hash_key) > 64:
            raise ConfigError(f"hash_key: got {len(hash_key)} bytes, allowed are at most 64")
        check_group_types(group_types)
        self.block_size = block_size
        self.max_model_len = max_model_len
        has_states = group_types[-1].is_state
        self.pool = BlockPool(num_blocks, [each.num_groups for each in group_types], has_states)
        kv_types = [each for each in group_types if not each.is_state]
        self.table = SequenceTable(max_num_seqs, max_model_len, block_size, kv_types)
        self.states: RowStates | None = None
        if has_states:
            self.states = RowStates(len(kv_types), group_types[-1].num_groups, max_num_seqs, self.pool)
        self.cache: PrefixCache | None = None
        if prefix_cache:
            windows = [each.window for each in kv_types if each.window is not None]
            self.cache = PrefixCache(
                self.pool, block_size, full_blocks_only, hash_key, record_events, windows, has_states
            )
        self.clones = CloneQueue(self.pool)
        self.stats = CacheStats(bytes_per_block)
        self.blocks_per_column = sum(each.num_groups for each in kv_types)
        """Blocks of all KV cache groups for the same positions."""
        # What callers read in every step, without a detour. The table owns these arrays and changes them in place.
        self.block_table = self.table.block_table
        self.num_computed_tokens = self.table.num_computed_tokens
        self.num_row_blocks = self.table.num_row_blocks
        self.num_usable_blocks = self.pool.num_usable_blocks

    def take_blocks(self, group_type: GroupTypeTable | RowStates, count: int) -> Int64Array:
        """Allocate ``count`` blocks for each group of a type; return the first group's, with one reference each.

        Free blocks go first, then cached ones, which the prefix cache forgets. The caller has checked
        ``BlockPool.num_free_blocks``.
        """
        pool = self.pool
        if pool.has_groups:
            evicted = pool.evict(count * group_type.num_groups, self._is_spared)
            self._forget(evicted)
            pool.recycle(evicted)
            return pool.take_for(group_type.index, count)
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
