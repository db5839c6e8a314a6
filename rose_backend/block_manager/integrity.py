"""Recounts every invariant of the block manager, one function each; all raise IntegrityError with the counts.

Vectorized, so that tests can afford it after every single call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager.block_pool import (
    NO_WRITER,
    NULL_BLOCK,
    BlockPool,
    BoolArray,
    CloneQueue,
    Int32Array,
    Int64Array,
)
from rose_backend.block_manager.books import Books
from rose_backend.block_manager.prefix_cache import PrefixCache
from rose_backend.block_manager.sequence_table import GroupTypeTable, RowStates, SequenceTable
from rose_backend.errors import IntegrityError


def check_all(books: Books) -> None:
    """Run every check below. Cost: O(blocks + rows * table width)."""
    pool, table, block_size = books.pool, books.table, books.block_size
    check_tables(table, block_size)
    entries = _TableEntries.of(table)
    check_reference_counts(pool, entries, books.clones, books.states)
    if books.states is not None:
        check_row_states(pool, table, books.states)
    check_followers(pool)
    check_group_types(pool, entries)
    check_states(pool)
    check_writers(pool, table, entries, block_size)
    check_written_lengths(pool, table, entries, block_size)
    if books.cache is not None:
        check_cache(pool, books.cache)


@dataclass(frozen=True, slots=True)
class _TableEntries:
    """Every block that a row in use lists, group type after group type, row after row. All arrays are ``[entries]``."""

    rows: Int64Array
    columns: Int64Array
    blocks: Int32Array
    group_types: Int64Array

    @classmethod
    def of(cls, table: SequenceTable) -> _TableEntries:
        active = np.flatnonzero(table.is_active)
        counts = table.num_row_blocks[active]
        width = int(counts.max()) if len(active) else 0
        found = []
        for group_type in table.group_types:
            is_listed = np.arange(width) < counts[:, None]
            is_listed &= np.arange(width) >= group_type.first_block[active][:, None]
            index, columns = np.nonzero(is_listed)
            rows = active[index]
            blocks = group_type.block_table[rows, columns]
            found.append((rows, columns, blocks, np.full(len(rows), group_type.index)))
        rows, columns, blocks, group_types = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return cls(rows, columns, blocks, group_types)


def _refuse(is_bad: BoolArray, message: Callable[[int], str]) -> None:
    """Raise IntegrityError with the message of the first index that is bad, if there is one."""
    bad = np.flatnonzero(is_bad)
    if len(bad):
        raise IntegrityError(message(int(bad[0])))


def check_tables(table: SequenceTable, block_size: int) -> None:
    """Computed tokens lie inside a row's blocks; entries after them point to the null block; idle rows are empty."""
    computed, num_blocks = table.num_computed_tokens, table.num_row_blocks
    columns = np.arange(table.width)
    unused = columns >= num_blocks[:, None]
    for group_type in table.group_types:
        _refuse(
            ((group_type.block_table != NULL_BLOCK) & unused).any(axis=1),
            lambda row: f"row {row} has an entry after its last block",
        )
        check_passed(table, group_type, block_size)
    _refuse(
        computed > num_blocks * block_size,
        lambda row: f"row {row}: {computed[row]} computed tokens in {num_blocks[row]} blocks",
    )
    _refuse(
        ~table.is_active & (num_blocks > 0),
        lambda row: f"row {row} is not in use but holds {num_blocks[row]} blocks",
    )
    num_active, num_rows = int(np.count_nonzero(table.is_active)), len(table.is_active)
    if num_active + table.num_free_rows != num_rows:
        raise IntegrityError(
            f"rows: {num_active} in use + {table.num_free_rows} free, expected {num_rows} in all"
        )


def check_passed(table: SequenceTable, group_type: GroupTypeTable, block_size: int) -> None:
    """A row has the null block exactly in columns that the window has passed, and in none that its next token needs."""
    columns, first = np.arange(table.width), group_type.first_block
    passed = columns < first[:, None]
    _refuse(
        ((group_type.block_table != NULL_BLOCK) & passed).any(axis=1),
        lambda row: f"row {row} has an entry before its first block, {first[row]}",
    )
    window = group_type.window or table.num_computed_tokens.max(initial=0) + 1
    needed = table.num_computed_tokens - window + 1
    _refuse(
        first * block_size > np.maximum(needed, 0),
        lambda row: (
            f"row {row}: the first block is that of column {first[row]}, its next token needs position {needed[row]}"
        ),
    )


def check_followers(pool: BlockPool) -> None:
    """Blocks of further groups are followers of one block that is held or cached, and have no state themselves."""
    if not pool.has_groups:
        return
    leaders = np.flatnonzero(pool.followers.any(axis=0))
    followers = pool.followers[:, leaders].reshape(-1)
    followers = followers[followers != NULL_BLOCK]
    _refuse(
        np.bincount(followers, minlength=pool.num_blocks) > 1,
        lambda block: f"block {block} follows several blocks",
    )
    has_state = (pool.ref_counts != 0) | pool.is_cached | (pool.num_written_tokens != 0)
    _refuse(has_state[followers], lambda at: f"block {followers[at]} follows another and has a state itself")
    _refuse(~has_state[leaders], lambda at: f"block {leaders[at]} is free but has followers")
    free = pool.free_blocks()
    _refuse(pool.ends_hit[free], lambda at: f"block {free[at]} is free but marked as the end of a hit")
    in_use = np.flatnonzero((pool.ref_counts > 0) | pool.is_cached)
    expected = pool.num_groups_of(in_use) - 1
    counted = np.count_nonzero(pool.followers[:, in_use], axis=0)
    _refuse(
        counted != expected,
        lambda at: f"block {in_use[at]} has {counted[at]} followers, expected {expected[at]}",
    )


def check_group_types(pool: BlockPool, entries: _TableEntries) -> None:
    """A row lists a block under the group type that it was taken for."""
    if pool.has_groups:
        _refuse(
            pool.group_type_of[entries.blocks] != entries.group_types,
            lambda at: (
                f"block {entries.blocks[at]} is of type {pool.group_type_of[entries.blocks[at]]}, "
                f"row {entries.rows[at]} lists it under {entries.group_types[at]}"
            ),
        )


def check_row_states(pool: BlockPool, table: SequenceTable, states: RowStates) -> None:
    """A running state is one row's alone, and no lookup finds it; rows that are not in use have none."""
    idle = ~table.is_active & ((states.running != NULL_BLOCK) | (states.found != NULL_BLOCK))
    _refuse(idle, lambda row: f"row {row} is not in use but has a state")
    running = states.running[states.running != NULL_BLOCK]
    _refuse(
        np.bincount(running, minlength=pool.num_blocks) > 1,
        lambda block: f"block {block} is the running state of several rows",
    )
    _refuse(pool.is_cached[running], lambda at: f"block {running[at]}: a running state can be found")
    _refuse(
        np.isin([*states.last], np.flatnonzero(table.is_active), invert=True),
        lambda at: f"row {[*states.last][at]} is not in use but has a last checkpoint",
    )
    held = states.held_blocks()
    _refuse(
        pool.group_type_of[held] != states.index,
        lambda at: (
            f"block {held[at]} is of type {pool.group_type_of[held[at]]}, states are of {states.index}"
        ),
    )


def check_reference_counts(
    pool: BlockPool, entries: _TableEntries, clones: CloneQueue, states: RowStates | None
) -> None:
    """A block's count equals the rows that hold it plus the clones that do."""
    keys = np.sort(entries.rows * pool.num_blocks + entries.blocks)
    repeated = keys[1:][keys[1:] == keys[:-1]]
    if len(repeated):
        row, block = divmod(int(repeated[0]), pool.num_blocks)
        raise IntegrityError(f"row {row} lists block {block} twice")
    counted = np.bincount(entries.blocks, minlength=pool.num_blocks)
    counted += np.bincount(clones.held_blocks(), minlength=pool.num_blocks)
    if states is not None:
        counted += np.bincount(states.held_blocks(), minlength=pool.num_blocks)
    if counted[NULL_BLOCK]:
        raise IntegrityError(f"the null block is held {counted[NULL_BLOCK]} times, expected 0")
    _refuse(
        counted != pool.ref_counts,
        lambda block: (
            f"block {block}: reference count is {pool.ref_counts[block]}, {counted[block]} holders were counted"
        ),
    )


def check_states(pool: BlockPool) -> None:
    """free + cached + held = usable, no block is in two states; free blocks are empty, cached ones are indexed."""
    free, cached = pool.free_blocks(), pool.cached_blocks()
    if len(cached) != pool.num_cached_blocks:
        raise IntegrityError(
            f"{len(cached)} blocks are in the eviction queue, counted as {pool.num_cached_blocks}"
        )
    is_held = pool.ref_counts > 0
    num_states = is_held + np.bincount(free, minlength=pool.num_blocks)
    num_states += np.bincount(cached, minlength=pool.num_blocks)
    # Followers are in the state of the block that they follow.
    num_states += np.bincount(pool.followers[pool.followers != NULL_BLOCK], minlength=pool.num_blocks)
    # The null block is never allocated and never released.
    num_states[NULL_BLOCK] += 1
    _refuse(
        num_states != 1,
        lambda block: (
            f"block {block} is in {num_states[block]} states, expected 1: free {len(free)} + cached {len(cached)} + "
            f"held {np.count_nonzero(is_held)}, expected {pool.num_usable_blocks} in all"
        ),
    )
    _refuse(pool.is_cached[free], lambda at: f"block {free[at]} is free but can still be found")
    written = pool.num_written_tokens[free]
    _refuse(written != 0, lambda at: f"block {free[at]} is free but counts {written[at]} written tokens")
    _refuse(~pool.is_cached[cached], lambda at: f"block {cached[at]} waits for eviction but cannot be found")


def check_writers(pool: BlockPool, table: SequenceTable, entries: _TableEntries, block_size: int) -> None:
    """The writer of a block is a row that lists it, and a row may write wherever it has reserved."""
    is_writer = pool.writers[entries.blocks] == entries.rows
    has_listed_writer = np.zeros(pool.num_blocks, np.bool_)
    has_listed_writer[entries.blocks[is_writer]] = True
    _refuse(
        (pool.writers != NO_WRITER) & ~has_listed_writer,
        lambda block: f"block {block}: writer is row {pool.writers[block]}, which does not list it",
    )
    computed, capacity = table.num_computed_tokens, table.capacity
    full_capacity = table.full_capacity(table.num_row_blocks)
    has_reserved = capacity > computed
    _refuse(
        has_reserved & (capacity != full_capacity) | table.is_active & (capacity < computed),
        lambda row: (
            f"row {row}: may write up to {capacity[row]} with {computed[row]} computed tokens, "
            f"its blocks hold {full_capacity[row]}"
        ),
    )
    first_written = computed[entries.rows] // block_size
    reserved = has_reserved[entries.rows] & (entries.columns >= first_written)
    _refuse(
        reserved & ~is_writer,
        lambda at: (
            f"block {entries.blocks[at]}: row {entries.rows[at]} may write it, "
            f"but its writer is {pool.writers[entries.blocks[at]]}"
        ),
    )


def check_written_lengths(
    pool: BlockPool, table: SequenceTable, entries: _TableEntries, block_size: int
) -> None:
    """Every token that a row counts as computed is written, and nothing past the writer's; no block is overfull."""
    rows, blocks = entries.rows, entries.blocks
    read = np.clip(table.num_computed_tokens[rows] - entries.columns * block_size, 0, block_size)
    written = pool.num_written_tokens[blocks]
    _refuse(
        written < read,
        lambda at: f"block {blocks[at]}: row {rows[at]} reads {read[at]} tokens, {written[at]} are written",
    )
    _refuse(
        (pool.writers[blocks] == rows) & (written != read),
        lambda at: (
            f"block {blocks[at]}: {written[at]} tokens are written, "
            f"its writer, row {rows[at]}, has computed {read[at]} of them"
        ),
    )
    _refuse(
        pool.num_written_tokens > block_size,
        lambda block: f"block {block}: {pool.num_written_tokens[block]} written tokens, {block_size} fit",
    )


def check_cache(pool: BlockPool, cache: PrefixCache) -> None:
    """Every indexed block has at least one written token; the indexes and the flags agree."""
    indexed, written = np.sort(cache.cached_blocks()), pool.num_written_tokens
    flagged = np.flatnonzero(pool.is_cached)
    if not np.array_equal(indexed, flagged):
        odd = np.setxor1d(indexed, flagged)
        raise IntegrityError(f"blocks {odd[:8].tolist()} are in the index or flagged, not both")
    _refuse(
        written[indexed] < 1,
        lambda at: f"block {indexed[at]} can be found but holds {written[indexed[at]]} tokens",
    )
    for index in cache.indexes:
        check_full_index(pool, cache, index.full)
    if cache.states is not None:
        checkpoints = cache.states.block_ids()
        _refuse(
            (pool.group_type_of[checkpoints] != len(cache.indexes))
            | (written[checkpoints] != cache.block_size),
            lambda at: f"block {checkpoints[at]} is indexed as a state and is none, or not whole",
        )


def check_full_index(pool: BlockPool, cache: PrefixCache, full_index: dict[bytes, int]) -> None:
    """A digest leads to a full block, and each to another one."""
    written = pool.num_written_tokens
    full = np.fromiter(full_index.values(), np.int64, len(full_index))
    _refuse(
        ~pool.is_cached[full] | (written[full] != cache.block_size),
        lambda at: (
            f"block {full[at]} is indexed as full with {written[full[at]]} tokens of {cache.block_size}"
        ),
    )
    if len(np.unique(full)) != len(full):
        raise IntegrityError(
            f"{len(full)} digests lead to {len(np.unique(full))} full blocks, expected one each"
        )
