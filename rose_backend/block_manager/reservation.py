"""Before a step, rows reserve the positions that it writes; after it, they commit what it wrote.

``reserve`` decides for all rows at once where each gets its positions from: a new block, the shared partial block at
its end if no other row has written beyond the row's length (claim), or a copy of that block (copy-on-write).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager.block_pool import (
    NO_WRITER,
    NULL_BLOCK,
    BoolArray,
    Int32Array,
    Int64Array,
    IntArray,
)
from rose_backend.block_manager.books import Books
from rose_backend.block_manager.prefix_cache import PrefixCache
from rose_backend.block_manager.row_states import start_running
from rose_backend.block_manager.sequence_table import FEW_ROWS, GroupTypeTable, any_of, concatenate_ranges
from rose_backend.errors import RowError


@dataclass(frozen=True, slots=True)
class Reservation:
    """Answer of ``BlockManager.reserve``."""

    ok: bool
    """True: every row has its positions. False: nothing has changed, except that blocks which windows have passed are
    released."""
    servable: BoolArray
    """``[N]``; with ``ok`` False, rows that could be served together; a largest set if there is one group type."""
    num_new_blocks: int
    """Blocks allocated, copies included, over all KV cache groups."""


@dataclass(slots=True)
class _Tails:
    """The shared partial blocks of one type that ``M`` of the rows are about to write to. All arrays are ``[M]``."""

    group_type: GroupTypeTable
    index: Int64Array  # of the row, among the rows that need positions
    entries: Int64Array  # of the block, in ``GroupTypeTable.entries``
    block_ids: Int64Array
    offsets: Int32Array  # of the row's next token in the block
    is_claim: BoolArray  # the row becomes the writer: no row has written beyond its length
    is_clone: BoolArray  # the row gets a copy
    is_overwrite: BoolArray  # the row becomes the writer, and cached tokens beyond its length are dropped


def reserve_one_row(books: Books, row: int, num_tokens: int) -> int | None:
    """Serve one row without arrays, which take longer than numbers: a prompt is admitted as one row.

    Returns:
        The number of blocks allocated; None where there is more to check or to do (its end is shared, it has no state
        yet, blocks are short), and nothing has changed but for blocks that windows have passed.
    """
    table = books.table
    if num_tokens < 0 or not table.is_in_use(row):
        return None
    wanted = int(table.num_computed_tokens[row]) + num_tokens
    if wanted <= table.capacity[row]:
        return 0
    if wanted > table.max_model_len or (books.states is not None and books.states.running[row] == NULL_BLOCK):
        return None
    if table.windowed:
        release_passed(books, np.array([row], np.int64))
    num_blocks = int(table.num_row_blocks[row])
    num_new = -(-wanted // books.block_size) - num_blocks
    total = num_new * books.blocks_per_column
    if table.capacity[row] < table.full_capacity_of(num_blocks) or total > books.pool.num_free_blocks:
        return None
    for group_type in table.group_types:
        block_ids = books.take_blocks(group_type, num_new)
        group_type.block_table[row, num_blocks : num_blocks + num_new] = block_ids
        books.pool.writers[block_ids] = row
    table.append_to(row, num_blocks, num_new)
    return total


def reserve_rows(books: Books, rows: Int64Array, wanted: Int32Array, idle: BoolArray) -> Reservation:
    """Serve all rows or none.

    When blocks are short, ``servable`` is a largest set of rows that can be served together, the cheapest first. A
    row needs new blocks at its end, and one for the copy of a shared partial block unless it claims that block. Of
    the rows that may claim a block, the one that needs the fewest blocks does, so the need of a row does not depend
    on which of the rows before it in this order are served. With several group types, a row may claim the block
    of one and copy that of another, and ``servable`` may be smaller than it could be.

    Args:
        rows: ``[N]``, checked.
        wanted: ``[N]`` tokens each row must be able to hold.
        idle: ``[N]``, rows that already can.
    """
    if books.table.windowed:
        release_passed(books, rows)
    needy = np.flatnonzero(~idle)
    rows, wanted = rows[needy], wanted[needy]
    num_blocks = books.table.num_row_blocks[rows]
    num_new = np.maximum((wanted + (books.block_size - 1)) // books.block_size - num_blocks, 0)
    tails = _shared_tails(books, rows, num_blocks, num_new)
    num_columns, num_free = int(num_new.sum()), books.pool.num_free_blocks
    total = num_columns * books.blocks_per_column
    for each in tails:
        total += int(np.count_nonzero(each.is_clone)) * each.group_type.num_groups
    to_start: Int64Array | None = None
    if books.states is not None:
        to_start = (books.states.running[rows] == NULL_BLOCK) * np.int64(books.states.num_groups)
        total += int(to_start.sum())
    if total > num_free:
        for each in tails:
            total -= _overwrite_instead_of_clone(books, each) * each.group_type.num_groups
    if total > num_free:
        num_new *= books.blocks_per_column
        if to_start is not None:
            num_new += to_start
        for each in tails:
            num_new[each.index[each.is_clone]] += each.group_type.num_groups
        cheapest_first = np.argsort(num_new, kind="stable")
        fits = np.cumsum(num_new[cheapest_first]) <= num_free
        servable = idle.copy()
        servable[needy[cheapest_first[fits]]] = True
        return Reservation(False, servable, 0)
    _serve(books, rows, num_new, num_columns, tails)
    return Reservation(True, np.ones(len(idle), np.bool_), total)


def _shared_tails(
    books: Books, rows: Int64Array, num_blocks: Int32Array, num_new: Int32Array
) -> list[_Tails]:
    """Return those of each group type; none if no row has one."""
    table, pool = books.table, books.pool
    is_shared = table.capacity[rows] < table.full_capacity(num_blocks)
    if not any_of(is_shared):
        return []
    index = np.flatnonzero(is_shared)
    rows = rows[index]
    computed = table.num_computed_tokens[rows]
    entries = rows * table.width + computed // books.block_size
    offsets = computed % books.block_size
    tails = []
    for group_type in table.group_types:
        block_ids = group_type.entries[entries].astype(np.int64)
        is_claim = (pool.writers[block_ids] == NO_WRITER) & (pool.num_written_tokens[block_ids] <= offsets)
        if any_of(is_claim):
            # Several rows may claim one block: the one with the lowest need gets it, of equals the first.
            candidates = np.flatnonzero(is_claim)
            candidates = candidates[np.argsort(num_new[index[candidates]], kind="stable")][::-1]
            is_claim[candidates] = pool.last_of_each(block_ids[candidates])
        is_overwrite = np.zeros(len(index), np.bool_)
        is_clone = ~is_claim
        tails.append(_Tails(group_type, index, entries, block_ids, offsets, is_claim, is_clone, is_overwrite))
    return tails


def _overwrite_instead_of_clone(books: Books, tails: _Tails) -> int:
    """Turn copies whose source only the row holds into overwrites, which drop cached tokens; return how many."""
    holds_alone = books.pool.ref_counts[tails.block_ids] == 1
    holds_alone &= books.pool.writers[tails.block_ids] == NO_WRITER
    tails.is_overwrite = tails.is_clone & holds_alone
    tails.is_clone &= ~holds_alone
    return int(np.count_nonzero(tails.is_overwrite))


def _serve(
    books: Books, rows: Int64Array, num_new: Int32Array, num_columns: int, tails: list[_Tails]
) -> None:
    table = books.table
    table.changed[rows] = True
    new_rows, new_entries = table.append(rows, num_new, num_columns)
    for group_type in table.group_types:
        num_clones = 0
        if tails:
            of_type = tails[group_type.index]
            num_clones = int(np.count_nonzero(of_type.is_clone))
            if num_clones < len(of_type.index):
                _claim_tails(books, rows, of_type)
        block_ids = books.take_blocks(group_type, num_clones + len(new_entries))
        if num_clones:
            _clone_tails(books, rows, tails[group_type.index], block_ids[:num_clones])
            block_ids = block_ids[num_clones:]
        if num_columns:  # not only copies
            group_type.entries[new_entries] = block_ids.astype(np.int32)
            books.pool.writers[block_ids] = new_rows.astype(np.int32)
    if books.states is not None:
        start_running(books, books.states, rows)


def _claim_tails(books: Books, rows: Int64Array, tails: _Tails) -> None:
    claimed, overwritten = tails.block_ids[tails.is_claim], tails.block_ids[tails.is_overwrite]
    books.stats.claims += len(claimed)
    books.stats.overwrites += len(overwritten)
    if books.cache is not None:
        for block_id in claimed.tolist():
            books.cache.reopen(block_id)
        for block_id in overwritten.tolist():
            books.cache.truncate(block_id)
    in_place = ~tails.is_clone
    block_ids = tails.block_ids[in_place]
    books.pool.writers[block_ids] = rows[tails.index[in_place]]
    books.pool.num_written_tokens[block_ids] = tails.offsets[in_place]


def _clone_tails(books: Books, rows: Int64Array, tails: _Tails, copies: Int64Array) -> None:
    is_clone = tails.is_clone
    sources, offsets = tails.block_ids[is_clone], tails.offsets[is_clone]
    tails.group_type.entries[tails.entries[is_clone]] = copies.astype(np.int32)
    books.pool.writers[copies] = rows[tails.index[is_clone]].astype(np.int32)
    books.pool.num_written_tokens[copies] = offsets
    if books.cache is not None:
        books.cache.copy_tokens(sources, copies)
    books.clones.add(sources, copies, offsets)
    books.stats.count_clones(len(copies), tails.group_type.num_groups)


def append_block_to_each(books: Books, rows: Int64Array) -> bool:
    """See ``BlockManager.reserve_next_blocks``."""
    table = books.table
    counts = table.num_row_blocks[rows]
    if len(rows) <= FEW_ROWS and not table.windowed:
        return _append_block_to_few(books, rows.tolist(), counts.tolist())
    if any_of((table.capacity[rows] != counts * books.block_size) | (counts == table.width)):
        raise _no_next_block(rows.tolist())
    if table.windowed:
        release_passed(books, rows)
    if len(rows) * books.blocks_per_column > books.pool.num_free_blocks:
        return False
    for group_type in table.group_types:
        block_ids = books.take_blocks(group_type, len(rows))
        group_type.block_table[rows, counts] = block_ids
        books.pool.writers[block_ids] = rows
    table.changed[rows] = True
    counts += 1
    table.num_row_blocks[rows] = counts
    table.capacity[rows] = table.full_capacity(counts)
    return True


def _append_block_to_few(books: Books, rows: list[int], counts: list[int]) -> bool:
    """As ``append_block_to_each``, without windows; ``counts`` are the columns of each row."""
    table, writers = books.table, books.pool.writers
    for row, count in zip(rows, counts, strict=True):
        if table.capacity[row] != count * books.block_size or count == table.width:
            raise _no_next_block(rows)
    if len(rows) * books.blocks_per_column > books.pool.num_free_blocks:
        return False
    (group_type,) = table.group_types
    block_ids = books.take_blocks(group_type, len(rows)).tolist()
    for row, count, block_id in zip(rows, counts, block_ids, strict=True):
        group_type.block_table[row, count] = block_id
        writers[block_id] = row
        table.append_to(row, count, 1)
    return True


def _no_next_block(rows: list[int]) -> RowError:
    return RowError(f"reserve_next_blocks: one of rows {rows} cannot get a block after its own")


def release_passed(books: Books, rows: Int64Array) -> None:
    """See ``BlockManager.release_passed_blocks``."""
    block_ids = books.table.cut_passed(rows)
    if len(block_ids):
        writers = books.pool.writers
        writers[block_ids[np.isin(writers[block_ids], rows)]] = NO_WRITER
        books.clones.release_blocks(block_ids)


def commit_rows(books: Books, rows: Int64Array, num_tokens: Int32Array | int, token_ids: IntArray) -> None:
    """See ``BlockManager.commit``."""
    table, size = books.table, books.block_size
    table.check_distinct(rows)
    start = table.num_computed_tokens[rows]
    end = start + num_tokens
    if any_of(is_bad := end > table.capacity[rows]):
        row = int(rows[np.argmax(is_bad)])
        raise RowError(f"commit: row {row} is not in use or has not reserved the tokens to commit")
    # Every decode step commits one token per row.
    one_each = num_tokens == 1 if isinstance(num_tokens, int) else not any_of(num_tokens != 1)
    row_of_token, positions = rows, start
    if not one_each:
        counts = end - start
        row_of_token, positions = np.repeat(rows, counts), concatenate_ranges(start, counts).astype(np.int32)
    if len(token_ids) != len(positions):
        raise RowError(f"commit: got {len(token_ids)} token ids for {len(positions)} tokens")
    columns = positions // size
    offsets = positions - columns * size
    entries = row_of_token * table.width + columns
    token_ids = np.asarray(token_ids, np.int32)
    for group_type in table.group_types:
        blocks = group_type.entries[entries].astype(np.int64)
        # Positions ascend within a row and a block has one writer: the last store into each block is the largest.
        books.pool.num_written_tokens[blocks] = offsets + 1
        if books.cache is not None:
            books.cache.store_tokens(blocks * size + offsets, token_ids)
    table.num_computed_tokens[rows] = end
    if books.cache is not None:
        # The index changes only with a token that is the first of a block or copy, or fills a block.
        is_due = end >= table.next_publish[rows]
        if any_of(is_due):
            _publish(books, books.cache, rows[is_due], start[is_due], end[is_due])


def _publish(books: Books, cache: PrefixCache, rows: Int64Array, start: IntArray, end: IntArray) -> None:
    """Add to the index what ``rows`` have just computed, from ``start`` to ``end``."""
    table, size = books.table, books.block_size
    first_columns = start // size
    counts = (end - 1) // size + 1 - first_columns
    entries = concatenate_ranges(rows * table.width + first_columns, counts)
    row_of_block = rows.repeat(counts)
    blocks = [group_type.entries[entries] for group_type in table.group_types]
    is_full = (entries - row_of_block * table.width + 1) * size <= end.repeat(counts)
    opens = [~books.pool.is_cached[each] for each in blocks]
    if cache.full_blocks_only:
        opens = [np.zeros_like(is_full)] * len(blocks)
    cache.publish(row_of_block, blocks, is_full, opens, table.chain_digests, table.namespaces)
    if cache.full_blocks_only:
        next_publish = (end // size + 1) * size
    else:
        next_publish = np.maximum(-(-end // size) * size, end + 1)
    table.next_publish[rows] = next_publish


def retire_rows(books: Books, cache: PrefixCache, rows: Int64Array) -> None:
    """Prepare rows to be freed.

    Equal partial tails are indexed once, and rows hold again what their windows have passed of tokens that others
    shared with them.
    """
    table, size = books.table, books.block_size
    tails = np.maximum(table.num_computed_tokens[rows] - 1, 0) // size + rows * table.width
    for group_type, index in zip(table.group_types, cache.indexes, strict=True):
        index.retire_tails(rows, group_type.entries[tails].astype(np.int64))
    # Released with the rest of the row, a window gets the LRU age of the prefix that it makes usable. Otherwise it
    # would be evicted first, and the prefix would be useless to the next row that shares it.
    for row in rows.tolist() if table.windowed else ():
        num_known = min(table.num_known[row], int(table.num_computed_tokens[row]))
        for group_type in table.windowed if num_known else ():
            assert group_type.window is not None, "only the first group type keeps everything"
            first = max(num_known - group_type.window + 1, 0) // size
            stop = min(num_known // size, int(group_type.first_block[row]))
            if first < stop:
                block_ids = cache.blocks_of_group_type(table.block_table[row, first:stop], group_type.index)
                if block_ids is not None:
                    books.pool.share(block_ids)
                    group_type.block_table[row, first:stop] = block_ids
                    group_type.first_block[row] = first
