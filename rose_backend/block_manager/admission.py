"""Rows for new sequences: how many blocks they take, and which blocks they read from the start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager.block_pool import NO_WRITER, NULL_BLOCK, BlockPool, Int32Array
from rose_backend.block_manager.observability import CacheStats
from rose_backend.block_manager.prefix_cache import PrefixCache, PrefixMatch
from rose_backend.block_manager.row_states import RowStates
from rose_backend.block_manager.sequence_table import SequenceTable
from rose_backend.errors import RowError


@dataclass(frozen=True, slots=True)
class AddedSequence:
    """Answer of ``BlockManager.add``."""

    row: int
    num_cached_tokens: int
    """Prompt tokens that need no computation."""


@dataclass
class Admission:
    """Works on the block manager's own arrays; holds no state itself."""

    _pool: BlockPool
    _table: SequenceTable
    _cache: PrefixCache | None
    _stats: CacheStats
    _block_size: int
    _states: RowStates | None

    def blocks_needed(self, match: PrefixMatch, num_tokens: int, num_at_once: int | None) -> int:
        """See ``BlockManager.blocks_needed``.

        A partially matched block without a holder needs no copy: ``reserve`` overwrites it when blocks are short.
        """
        needed = self._blocks_needed(match.block_ids, match.num_tokens, num_tokens)
        kinds = self._table.kinds
        if not self._pool.has_groups:
            return needed
        needed *= kinds[0].num_groups
        num_columns = -(-num_tokens // self._block_size)
        for kind, block_ids in zip(kinds[1:], match.blocks_of_kinds(len(kinds) - 1)[1:], strict=True):
            own = num_columns - len(match.block_ids) + len(block_ids)
            num_new = self._blocks_needed(block_ids, match.num_tokens, own * self._block_size)
            if num_at_once is not None:
                num_new = min(num_new, int(kind.kind.most_columns(num_at_once, self._block_size)))
            needed += num_new * kind.num_groups
        if self._states is not None:
            # A checkpoint is held until it was copied.
            is_idle = match.checkpoint != NULL_BLOCK and self._pool.ref_counts[match.checkpoint] == 0
            needed += (1 + is_idle) * self._states.num_groups
        return needed

    def blocks_to_grow(self, row: int | None, num_tokens: int, num_at_once: int) -> int:
        """See ``BlockManager.blocks_to_grow``."""
        table = self._table
        num_columns, total = 0 if row is None else int(table.num_row_blocks[row]), 0
        wanted = max(-(-num_tokens // self._block_size) - num_columns, 0)
        for kind in table.kinds:
            most = kind.kind.most_columns(num_at_once, self._block_size)
            num_held = num_columns - (0 if row is None else int(kind.first_block[row]))
            total += kind.num_groups * int(min(wanted, max(most - num_held, 0)))
        if self._states is not None and (row is None or self._states.running[row] == NULL_BLOCK):
            total += self._states.num_groups
        return total

    def _blocks_needed(self, block_ids: Int32Array, num_matched: int, num_tokens: int) -> int:
        if not len(block_ids):
            return -(-num_tokens // self._block_size)
        num_idle = int(np.count_nonzero(self._pool.ref_counts[block_ids] == 0))
        num_new = max(-(-num_tokens // self._block_size) - len(block_ids), 0)
        offset = num_matched % self._block_size
        if not offset:
            return num_new + num_idle
        tail = block_ids[-1]
        can_claim = self._pool.writers[tail] == NO_WRITER and self._pool.num_written_tokens[tail] <= offset
        return num_new + num_idle + int(self._pool.ref_counts[tail] > 0 and not can_claim)

    def check_prompt(self, token_ids: Int32Array) -> None:
        """Raise RowError unless a row can hold a prompt."""
        if not 1 <= len(token_ids) <= self._table.max_model_len:
            raise RowError(
                f"prompt: got {len(token_ids)} tokens, allowed are 1 to {self._table.max_model_len}"
            )

    def add(self, token_ids: Int32Array, namespace: bytes, match: PrefixMatch) -> AddedSequence | None:
        """See ``BlockManager.add``; the match is of now."""
        self.check_prompt(token_ids)
        if not self._table.num_free_rows:
            return None
        blocks = match.blocks_of_kinds(len(self._table.windowed))
        if match.num_tokens:
            block_ids = match.block_ids if len(blocks) == 1 else np.concatenate(blocks)
            self._pool.share(block_ids.astype(np.int64))
            if self._table.windowed:
                self._pool.ends_hit[np.concatenate(blocks[1:])] = True
        (row,) = self._table.take_rows(1, blocks, match.num_tokens, match.chain_digest, namespace).tolist()
        if self._states is not None:
            self._states.add(row, match.checkpoint)
        if self._cache is not None:
            self._table.num_known[row] = match.num_known_tokens
            self._stats.count_lookup(len(token_ids), match.num_tokens, self._block_size)
        return AddedSequence(row, match.num_tokens)

    def fork(self, row: int, num_children: int) -> Int32Array | None:
        """See ``BlockManager.fork``."""
        table = self._table
        if self._states is not None:
            raise RowError("fork: rows with states cannot be forked")
        table.check_active(np.array([row]))
        if num_children < 0:
            raise RowError(f"num_children: got {num_children}, allowed is 0 or more")
        if num_children > table.num_free_rows:
            return None
        num_tokens = int(table.num_computed_tokens[row])
        num_blocks = -(-num_tokens // self._block_size)
        shared = [kind.block_table[row, kind.first_block[row] : num_blocks] for kind in table.kinds]
        for block_ids in shared:
            self._pool.share(block_ids.astype(np.int64), num_children)
        self._stats.forks += num_children
        digest, namespace = table.chain_digests[row], table.namespaces[row]
        return table.take_rows(num_children, shared, num_tokens, digest, namespace).astype(np.int32)
