"""Recounts every invariant of the block manager, one function each; all raise IntegrityError with the counts."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rose_backend.block_manager.block_pool import NO_WRITER, NULL_BLOCK, BlockPool
from rose_backend.block_manager.clone_queue import CloneQueue
from rose_backend.block_manager.prefix_cache import PrefixCache
from rose_backend.block_manager.sequence_table import SequenceTable
from rose_backend.errors import IntegrityError


def check_all(
    pool: BlockPool, table: SequenceTable, cache: PrefixCache | None, clones: CloneQueue, block_size: int
) -> None:
    """Run every check below. Cost: O(blocks + rows * table width)."""
    check_reference_counts(pool, table, clones)
    check_states(pool)
    check_writers(pool, table, block_size)
    check_tables(table, block_size)
    if cache is not None:
        check_cache(pool, cache)


def check_reference_counts(pool: BlockPool, table: SequenceTable, clones: CloneQueue) -> None:
    """A block's count equals the rows that list it plus the clones that read it."""
    counted = np.zeros(pool.num_blocks, np.int64)
    for row in np.flatnonzero(table.is_active):
        blocks = table.block_table[row, : table.num_row_blocks[row]]
        if len(np.unique(blocks)) != len(blocks):
            raise IntegrityError(f"row {row} lists a block twice: {blocks.tolist()}")
        counted[blocks] += 1
    np.add.at(counted, clones.held_sources(), 1)
    if counted[NULL_BLOCK]:
        raise IntegrityError(f"the null block is held {counted[NULL_BLOCK]} times, expected 0")
    wrong = np.flatnonzero(counted != pool.ref_counts)
    if len(wrong):
        block = int(wrong[0])
        raise IntegrityError(
            f"block {block}: reference count is {pool.ref_counts[block]}, {counted[block]} holders were counted"
        )


def check_states(pool: BlockPool) -> None:
    """free + cached + held = usable, and no block is in two states."""
    free, cached = pool.free_blocks(), pool.cached_blocks()
    held = np.flatnonzero(pool.ref_counts > 0)
    if len(cached) != pool.num_cached_blocks:
        raise IntegrityError(
            f"{len(cached)} blocks are in the eviction queue, counted as {pool.num_cached_blocks}"
        )
    seen = Counter([*free.tolist(), *cached.tolist(), *held.tolist()])
    for block, times in seen.items():
        if times != 1:
            raise IntegrityError(f"block {block} is in {times} states, expected 1")
    if len(seen) != pool.num_usable_blocks:
        raise IntegrityError(
            f"free {len(free)} + cached {len(cached)} + held {len(held)} blocks, "
            f"expected {pool.num_usable_blocks} in all"
        )
    for block in free.tolist():
        if pool.is_cached[block]:
            raise IntegrityError(f"block {block} is free but can still be found")
    for block in cached.tolist():
        if not pool.is_cached[block]:
            raise IntegrityError(f"block {block} waits for eviction but cannot be found")


def check_writers(pool: BlockPool, table: SequenceTable, block_size: int) -> None:
    """The writer of a block is a row that lists it, and a row may write wherever it has reserved."""
    for block in np.flatnonzero(pool.writers != NO_WRITER).tolist():
        row = int(pool.writers[block])
        if not table.is_active[row] or block not in table.block_table[row, : table.num_row_blocks[row]]:
            raise IntegrityError(f"block {block}: writer is row {row}, which does not list it")
    for row in np.flatnonzero(table.is_active & table.tail_writable).tolist():
        first = int(table.num_computed_tokens[row]) // block_size
        blocks = table.block_table[row, first : table.num_row_blocks[row]]
        foreign = blocks[pool.writers[blocks] != row]
        if len(foreign):
            block = int(foreign[0])
            raise IntegrityError(
                f"block {block}: row {row} may write it, but its writer is {pool.writers[block]}"
            )


def check_tables(table: SequenceTable, block_size: int) -> None:
    """Computed tokens lie inside a row's blocks; entries behind them point to the null block; idle rows are empty."""
    columns = np.arange(table.block_table.shape[1])
    behind = columns >= table.num_row_blocks[:, None]
    bad = np.flatnonzero((table.block_table != NULL_BLOCK) & behind)
    if len(bad):
        raise IntegrityError(f"row {bad[0] // len(columns)} has an entry behind its last block")
    short = np.flatnonzero(table.num_computed_tokens > table.num_row_blocks * block_size)
    if len(short):
        row = int(short[0])
        raise IntegrityError(
            f"row {row}: {table.num_computed_tokens[row]} computed tokens in {table.num_row_blocks[row]} blocks"
        )
    idle = np.flatnonzero(~table.is_active & (table.num_row_blocks > 0))
    if len(idle):
        raise IntegrityError(f"row {idle[0]} is not in use but holds {table.num_row_blocks[idle[0]]} blocks")


def check_cache(pool: BlockPool, cache: PrefixCache) -> None:
    """Every findable block has at least one written token; the indexes and the flags agree."""
    findable = set(cache.cached_blocks().tolist())
    flagged = set(np.flatnonzero(pool.is_cached).tolist())
    if findable != flagged:
        raise IntegrityError(f"blocks {sorted(findable ^ flagged)[:8]} are in the index or flagged, not both")
    for block in findable:
        if pool.num_written_tokens[block] < 1:
            raise IntegrityError(
                f"block {block} can be found but holds {pool.num_written_tokens[block]} tokens"
            )
    for block in cache.full_index().values():
        if block not in findable or pool.num_written_tokens[block] != cache.block_size:
            raise IntegrityError(
                f"block {block} is indexed as full with {pool.num_written_tokens[block]} tokens of {cache.block_size}"
            )
