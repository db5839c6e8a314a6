"""States of layers that keep no K/V: the running one of each row, and checkpoints of it in the prefix cache.

A recurrent layer has one state per sequence, that of all tokens computed so far. Each step overwrites it, so a
*running* state belongs to one row alone, from its first reservation to its end. A *checkpoint* is a copy that never
changes. A row that starts from one gets a copy in turn; only when a row ends its running state becomes a checkpoint
itself.
"""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager.block_pool import NULL_BLOCK, BoolArray, Int64Array
from rose_backend.block_manager.books import Books
from rose_backend.block_manager.prefix_index import Place, StateIndex
from rose_backend.block_manager.sequence_table import RowStates


def start_from_checkpoint(books: Books, states: RowStates, row: int, checkpoint: int) -> None:
    """Let a new row start from a checkpoint, if it is not the null block, and hold it."""
    if checkpoint != NULL_BLOCK:
        books.pool.share(np.array([checkpoint], np.int64))
        states.found[row] = checkpoint
        if books.pool.ends_hit[checkpoint]:
            # Several rows started here, so more may. The end of a conversation's turn is passed once.
            _note_last(books, states, row, _index_of(books).place_of(checkpoint))
        books.pool.ends_hit[checkpoint] = True


def start_running(books: Books, states: RowStates, rows: Int64Array) -> None:
    """Give rows that have none a running state, and queue the copies of what they start from."""
    rows = rows[states.running[rows] == NULL_BLOCK]
    if not len(rows):
        return
    block_ids = books.take_blocks(states, len(rows))
    states.running[rows] = block_ids
    books.table.changed[rows] = True
    starts = states.found[rows] != NULL_BLOCK
    sources = states.found[rows[starts]].astype(np.int64)
    states.found[rows] = NULL_BLOCK
    _copy(books, states, sources, block_ids[starts])


def copy_to_checkpoints(books: Books, states: RowStates, rows: Int64Array) -> None:
    """See ``BlockManager.checkpoint``."""
    places = _places_of(books, rows)
    # Every row could still take a column: running rows come before what is kept.
    num_active = int(np.count_nonzero(books.table.is_active))
    num_spare = books.pool.num_free_blocks - num_active * books.blocks_per_column
    for row, place in zip(rows.tolist(), places, strict=True):
        source = int(states.running[row])
        if place is None or source == NULL_BLOCK:
            continue
        _note_last(books, states, row, place)
        if _renew(books, place) or num_spare < states.num_groups:
            continue
        num_spare -= states.num_groups
        copies = books.take_blocks(states, 1)
        running = np.array([source], np.int64)
        books.pool.share(running)
        _copy(books, states, running, copies)
        books.clones.hold_until_planned(copies)
        _publish(books, place, int(copies[0]))
        books.stats.checkpoints += 1


def end_states(books: Books, states: RowStates, rows: Int64Array, are_known: BoolArray | None) -> Int64Array:
    """Take the states of rows that end; return the blocks to release, in eviction order.

    Args:
        rows: ``[N]``.
        are_known: ``[N]``: the state is that of the row's computed tokens, and becomes a checkpoint; None: no row's is.
    """
    are_known = np.zeros(len(rows), np.bool_) if are_known is None else are_known
    places = _places_of(books, rows) if are_known.any() else [None] * len(rows)
    for row, place, is_known in zip(rows.tolist(), places, are_known.tolist(), strict=True):
        running = int(states.running[row])
        # If no step has run since, its copy is still pending, and the checkpoint it comes from is in the cache already.
        is_old = running == NULL_BLOCK or books.clones.awaits_copy(running)
        if is_known and place is not None and not is_old and not _renew(books, place):
            _publish(books, place, running)
    held = np.concatenate((states.running[rows], states.found[rows]))
    states.running[rows] = states.found[rows] = NULL_BLOCK
    blocks: Int64Array = held[held != NULL_BLOCK].astype(np.int64)
    return blocks


def renew_last_checkpoints(books: Books, states: RowStates, rows: Int64Array) -> None:
    """Give the last checkpoint of each row that has ended the LRU age of the K/V that the row has just released."""
    for row in rows.tolist():
        if (place := states.last.get(row)) is not None:
            _note_last(books, states, row, None)
            _renew(books, place)


def _copy(books: Books, states: RowStates, sources: Int64Array, copies: Int64Array) -> None:
    """Queue copies of whole blocks; the references of the sources pass to the queue."""
    if len(sources):
        books.clones.add(sources, copies, np.full(len(sources), books.block_size, np.int32))
        books.stats.count_clones(len(copies), states.num_groups)


def _places_of(books: Books, rows: Int64Array) -> list[Place | None]:
    """Return where the checkpoint of each row's computed tokens belongs; None where no lookup could use it."""
    table, cache = books.table, books.cache
    if cache is None:
        return [None] * len(rows)
    places: list[Place | None] = []
    for row in rows.tolist():
        column, offset = divmod(int(table.num_computed_tokens[row]), books.block_size)
        tail = cache.tokens_of(int(table.block_table[row, column]))[:offset].tobytes() if offset else b""
        is_usable = (column or offset) and not (offset and cache.full_blocks_only)
        places.append((table.chain_digests[row], tail) if is_usable else None)
    return places


def _note_last(books: Books, states: RowStates, row: int, place: Place | None) -> None:
    """Let a row's last checkpoint be the one at a place; None: it has none any longer."""
    last, marks = states.last.pop(row, None), _index_of(books).last_of_rows
    if last is not None:
        marks[last] -= 1
        if not marks[last]:
            del marks[last]
    if place is not None:
        states.last[row] = place
        marks[place] += 1


def _renew(books: Books, place: Place) -> bool:
    """Make the checkpoint at a place, if there is one, the one to be evicted last; return whether there is one."""
    block_id = _index_of(books).get(place)
    if block_id != NULL_BLOCK and not books.pool.ref_counts[block_id]:
        block_ids = np.array([block_id], np.int64)
        books.pool.share(block_ids)
        books.pool.release(block_ids)
    return block_id != NULL_BLOCK


def _publish(books: Books, place: Place, block_id: int) -> None:
    books.pool.num_written_tokens[block_id] = books.block_size
    _index_of(books).add(place, block_id)


def _index_of(books: Books) -> StateIndex:
    assert books.cache is not None and books.cache.states is not None, "checkpoints are in the cache"
    return books.cache.states
