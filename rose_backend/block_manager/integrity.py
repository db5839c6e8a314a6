"""Recounts every invariant of the block manager, one function each; all raise IntegrityError with the counts.

Vectorised, so that tests can afford it after every single call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager.array_types import Int32Array, Int64Array
from rose_backend.block_manager.block_pool import NO_WRITER, NULL_BLOCK, BlockPool
from rose_backend.block_manager.clone_queue import CloneQueue
from rose_backend.block_manager.prefix_cache import PrefixCache
from rose_backend.block_manager.sequence_table import SequenceTable
from rose_backend.errors import IntegrityError


def check_all(
    pool: BlockPool, table: SequenceTable, cache: PrefixCache | None, clones: CloneQueue, block_size: int
) -> None:
    """Run every check below. Cost: O(blocks + rows * table width)."""
    check_tables(table, block_size)
    entries = _TableEntries.of(table)
    check_reference_counts(pool, entries, clones)
    check_states(pool)
    check_writers(pool, table, entries, block_size)
    check_written_lengths(pool, table, entries, block_size)
    if cache is not None:
        check_cache(pool, cache)


@dataclass(frozen=True, slots=True)
class _TableEntries:
    """Every block that a row in use lists, row after row. All arrays are ``[entries]``."""

    rows: Int64Array
    columns: Int64Array
    blocks: Int32Array

    @classmethod
    def of(cls, table: SequenceTable) -> _TableEntries:
        active = np.flatnonzero(table.is_active)
        counts = table.num_row_blocks[active]
        width = int(counts.max()) if len(active) else 0
        index, columns = np.nonzero(np.arange(width) < counts[:, None])
        rows = active[index]
        return cls(rows, columns, table.block_table[rows, columns])


def check_tables(table: SequenceTable, block_size: int) -> None:
    """Computed tokens lie inside a row's blocks; entries behind them point to the null block; idle rows are empty."""
    behind = np.arange(table.block_table.shape[1]) >= table.num_row_blocks[:, None]
    bad = np.flatnonzero(((table.block_table != NULL_BLOCK) & behind).any(axis=1))
    if len(bad):
        raise IntegrityError(f"row {bad[0]} has an entry behind its last block")
    short = np.flatnonzero(table.num_computed_tokens > table.num_row_blocks * block_size)
    if len(short):
        row = int(short[0])
        raise IntegrityError(
            f"row {row}: {table.num_computed_tokens[row]} computed tokens in {table.num_row_blocks[row]} blocks"
        )
    idle = np.flatnonzero(~table.is_active & (table.num_row_blocks > 0))
    if len(idle):
        raise IntegrityError(f"row {idle[0]} is not in use but holds {table.num_row_blocks[idle[0]]} blocks")
    num_active, num_rows = int(np.count_nonzero(table.is_active)), len(table.is_active)
    if num_active + table.num_free_rows != num_rows:
        raise IntegrityError(
            f"rows: {num_active} in use + {table.num_free_rows} free, expected {num_rows} in all"
        )


def check_reference_counts(pool: BlockPool, entries: _TableEntries, clones: CloneQueue) -> None:
    """A block's count equals the rows that list it plus the clones that read it."""
    keys = np.sort(entries.rows * pool.num_blocks + entries.blocks)
    repeated = keys[1:][keys[1:] == keys[:-1]]
    if len(repeated):
        row, block = divmod(int(repeated[0]), pool.num_blocks)
        raise IntegrityError(f"row {row} lists block {block} twice")
    counted = np.bincount(entries.blocks, minlength=pool.num_blocks)
    counted += np.bincount(clones.held_sources(), minlength=pool.num_blocks)
    if counted[NULL_BLOCK]:
        raise IntegrityError(f"the null block is held {counted[NULL_BLOCK]} times, expected 0")
    wrong = np.flatnonzero(counted != pool.ref_counts)
    if len(wrong):
        block = int(wrong[0])
        raise IntegrityError(
            f"block {block}: reference count is {pool.ref_counts[block]}, {counted[block]} holders were counted"
        )


def check_states(pool: BlockPool) -> None:
    """free + cached + held = usable, no block is in two states; free blocks are empty, cached ones can be found."""
    free, cached = pool.free_blocks(), pool.cached_blocks()
    if len(cached) != pool.num_cached_blocks:
        raise IntegrityError(
            f"{len(cached)} blocks are in the eviction queue, counted as {pool.num_cached_blocks}"
        )
    is_held = pool.ref_counts > 0
    num_states = is_held + np.bincount(free, minlength=pool.num_blocks)
    num_states += np.bincount(cached, minlength=pool.num_blocks)
    # Nobody hands out the null block, and nobody takes it back.
    num_states[NULL_BLOCK] += 1
    wrong = np.flatnonzero(num_states != 1)
    if len(wrong):
        block = int(wrong[0])
        raise IntegrityError(
            f"block {block} is in {num_states[block]} states, expected 1: free {len(free)} + cached {len(cached)} + "
            f"held {np.count_nonzero(is_held)}, expected {pool.num_usable_blocks} in all"
        )
    found = free[pool.is_cached[free]]
    if len(found):
        raise IntegrityError(f"block {found[0]} is free but can still be found")
    used = free[pool.num_written_tokens[free] != 0]
    if len(used):
        raise IntegrityError(
            f"block {used[0]} is free but counts {pool.num_written_tokens[used[0]]} written tokens"
        )
    lost = cached[~pool.is_cached[cached]]
    if len(lost):
        raise IntegrityError(f"block {lost[0]} waits for eviction but cannot be found")


def check_writers(pool: BlockPool, table: SequenceTable, entries: _TableEntries, block_size: int) -> None:
    """The writer of a block is a row that lists it, and a row may write wherever it has reserved."""
    is_writer = pool.writers[entries.blocks] == entries.rows
    has_listed_writer = np.zeros(pool.num_blocks, np.bool_)
    has_listed_writer[entries.blocks[is_writer]] = True
    stray = np.flatnonzero((pool.writers != NO_WRITER) & ~has_listed_writer)
    if len(stray):
        block = int(stray[0])
        raise IntegrityError(f"block {block}: writer is row {pool.writers[block]}, which does not list it")
    computed, capacity = table.num_computed_tokens, table.capacity
    full_capacity = table.full_capacity(table.num_row_blocks)
    has_reserved = capacity > computed
    wrong = np.flatnonzero(
        has_reserved & (capacity != full_capacity) | table.is_active & (capacity < computed)
    )
    if len(wrong):
        row = int(wrong[0])
        raise IntegrityError(
            f"row {row}: may write up to {capacity[row]} with {computed[row]} computed tokens, "
            f"its blocks hold {full_capacity[row]}"
        )
    first_written = computed[entries.rows] // block_size
    reserved = has_reserved[entries.rows] & (entries.columns >= first_written)
    foreign = np.flatnonzero(reserved & ~is_writer)
    if len(foreign):
        row, block = int(entries.rows[foreign[0]]), int(entries.blocks[foreign[0]])
        raise IntegrityError(
            f"block {block}: row {row} may write it, but its writer is {pool.writers[block]}"
        )


def check_written_lengths(
    pool: BlockPool, table: SequenceTable, entries: _TableEntries, block_size: int
) -> None:
    """Every token that a row counts as computed is written, and nothing behind the writer's; no block is overfull."""
    read = np.clip(table.num_computed_tokens[entries.rows] - entries.columns * block_size, 0, block_size)
    short = np.flatnonzero(pool.num_written_tokens[entries.blocks] < read)
    if len(short):
        row, block = int(entries.rows[short[0]]), int(entries.blocks[short[0]])
        raise IntegrityError(
            f"block {block}: row {row} reads {read[short[0]]} tokens, "
            f"{pool.num_written_tokens[block]} are written"
        )
    is_writer = pool.writers[entries.blocks] == entries.rows
    odd = np.flatnonzero(is_writer & (pool.num_written_tokens[entries.blocks] != read))
    if len(odd):
        row, block = int(entries.rows[odd[0]]), int(entries.blocks[odd[0]])
        raise IntegrityError(
            f"block {block}: {pool.num_written_tokens[block]} tokens are written, "
            f"its writer, row {row}, has computed {read[odd[0]]} of them"
        )
    over = np.flatnonzero(pool.num_written_tokens > block_size)
    if len(over):
        raise IntegrityError(
            f"block {over[0]}: {pool.num_written_tokens[over[0]]} written tokens, {block_size} fit"
        )


def check_cache(pool: BlockPool, cache: PrefixCache) -> None:
    """Every findable block has at least one written token; the indexes and the flags agree."""
    findable = np.sort(cache.cached_blocks())
    flagged = np.flatnonzero(pool.is_cached)
    if not np.array_equal(findable, flagged):
        odd = np.setxor1d(findable, flagged)
        raise IntegrityError(f"blocks {odd[:8].tolist()} are in the index or flagged, not both")
    unwritten = findable[pool.num_written_tokens[findable] < 1]
    if len(unwritten):
        raise IntegrityError(
            f"block {unwritten[0]} can be found but holds {pool.num_written_tokens[unwritten[0]]} tokens"
        )
    full_index = cache.full_index()
    full = np.fromiter(full_index.values(), np.int64, len(full_index))
    bad = full[~pool.is_cached[full] | (pool.num_written_tokens[full] != cache.block_size)]
    if len(bad):
        raise IntegrityError(
            f"block {bad[0]} is indexed as full with {pool.num_written_tokens[bad[0]]} tokens "
            f"of {cache.block_size}"
        )
    if len(np.unique(full)) != len(full):
        raise IntegrityError(
            f"{len(full)} digests lead to {len(np.unique(full))} full blocks, expected one each"
        )
