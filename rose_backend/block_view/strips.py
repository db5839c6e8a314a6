"""A frame as strips of blocks under each other, and what links one strip to the next: the order of every picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rose_backend.block_view.view_model import BlockView, CellView, Frame, RowView, SlotKind


@dataclass(frozen=True, slots=True)
class Strip:
    """One line of blocks. Equal columns of sequences hold equal positions."""

    kind: Literal["sequence", "source", "cached"]
    name: str
    notes: tuple[str, ...]
    cells: tuple[CellView | None, ...]
    """None leaves a column empty."""


@dataclass(frozen=True, slots=True)
class Link:
    """Joins a column of one strip to the same column of the next: the same block, or its copy."""

    kind: Literal["same", "copy"]
    text: str


def strips_of(frame: Frame, block_size: int) -> list[Strip]:
    """Return the strips from top to bottom: sequences, unread copy sources just above the copy, the cache."""
    strips: list[Strip] = []
    for row in frame.rows:
        strips += _sources_above(frame, row, block_size)
        notes = [f"{row.num_computed} {SlotKind.COMPUTED.value}"]
        if row.num_reserved:
            notes.append(f"{row.num_reserved} {SlotKind.RESERVED.value}")
        strips.append(Strip("sequence", row.name, tuple(notes), row.cells))
    if frame.pool.eviction_order:
        cells = tuple(_unread(frame, block_id, block_size) for block_id in frame.pool.eviction_order)
        strips.append(Strip("cached", "cache", ("first to go", "at the left"), cells))
    return strips


def links_between(upper: Strip, lower: Strip, frame: Frame) -> list[Link | None]:
    """Return the link of each column that both strips have."""
    copies = {(copy.source, copy.destination): copy.num_tokens for copy in frame.copies}
    links: list[Link | None] = []
    for above, below in zip(upper.cells, lower.cells, strict=False):
        link = None
        if above is not None and below is not None:
            pair = (above.block.block_id, below.block.block_id)
            if pair[0] == pair[1]:
                link = Link("same", "same block")
            elif pair in copies:
                link = Link("copy", f"copy {copies[pair]} token{'s' if copies[pair] > 1 else ''}")
        links.append(link)
    return links


def fill_note(block: BlockView, block_size: int) -> str:
    """Say which sequence may write a block."""
    if len(block.words) == block_size:
        return "full"
    return f"{block.writer} may write" if block.writer else "no writer"


def references_note(block: BlockView) -> str:
    """Say how many hold a block."""
    return f"{block.ref_count} ref{'' if block.ref_count == 1 else 's'}"


def counts_line(frame: Frame) -> str:
    """Say how the counts of the pool add up."""
    pool = frame.pool
    total = pool.num_free + pool.num_cached + pool.num_held
    return f"free {pool.num_free} + cached {pool.num_cached} + held {pool.num_held} = {total} blocks"


def history_line(frame: Frame) -> str:
    """Say what the manager has counted since the first frame."""
    counters = frame.counters
    return (
        f"so far: forks {counters['forks']}, copies {counters['clones']}, "
        f"prompt tokens found {counters['hit_tokens']} of {counters['query_tokens']}"
    )


def _sources_above(frame: Frame, row: RowView, block_size: int) -> Iterator[Strip]:
    read = {cell.block.block_id for other in frame.rows for cell in other.cells}
    columns = {cell.block.block_id: column for column, cell in enumerate(row.cells)}
    for copy in frame.copies:
        if copy.source not in read and copy.destination in columns:
            cells = (*(None,) * columns[copy.destination], _unread(frame, copy.source, block_size))
            yield Strip("source", "source", ("held until", "copied"), cells)


def _unread(frame: Frame, block_id: int, block_size: int) -> CellView:
    """Return a block that no sequence reads."""
    block = frame.pool.blocks[block_id]
    return CellView.of(block, block_size, len(block.words))
