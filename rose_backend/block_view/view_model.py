"""What a picture of a block manager shows, as plain values: taken once from its arrays, drawn by several renderers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager import NULL_BLOCK, BlockManager, ClonePlan
from rose_backend.block_manager.block_pool import NO_WRITER


class BlockState(enum.Enum):
    """What the pool's map says about a block. The value is the legend's text."""

    SHARED = "shared"
    HELD = "one holder"
    CLONE_SOURCE = "being copied"
    CACHED = "cached"
    FREE = "free"
    NULL = "null block"


MARKS = {
    BlockState.SHARED: "◆",
    BlockState.HELD: "●",
    BlockState.CLONE_SOURCE: "▲",
    BlockState.CACHED: "○",
    BlockState.FREE: "□",
    BlockState.NULL: "∅",
}
"""A sign for each state, so that no picture depends on colours."""


class SlotKind(enum.Enum):
    """What one token position of a block is for the sequence that is drawn. The value is the legend's text."""

    COMPUTED = "computed"
    FOREIGN = "not read here"
    RESERVED = "reserved"
    EMPTY = "not reserved"


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block of the pool."""

    block_id: int
    state: BlockState
    ref_count: int
    writer: str | None
    """Name of the sequence that may append."""
    words: tuple[str, ...]
    """Tokens whose K/V is there."""
    is_findable: bool
    """Whether the lookup of another prompt can find it."""


@dataclass(frozen=True, slots=True)
class CellView:
    """One block as one sequence sees it: a slot is ``(word, kind)``, the word empty where nothing is written."""

    block: BlockView
    slots: tuple[tuple[str, SlotKind], ...]


@dataclass(frozen=True, slots=True)
class RowView:
    """One running sequence."""

    name: str
    num_computed: int
    num_reserved: int
    cells: tuple[CellView, ...]


@dataclass(frozen=True, slots=True)
class CopyView:
    """A copy-on-write that runs before the step writes."""

    source: int
    destination: int
    num_tokens: int
    name: str
    """Sequence that gets the copy."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """All blocks, in order of their ids, and the counts that must add up."""

    blocks: tuple[BlockView, ...]
    eviction_order: tuple[int, ...]
    """Cached blocks, next to be given away first."""
    num_free: int
    num_cached: int
    num_held: int

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return len(self.blocks) - 1


@dataclass(frozen=True, slots=True)
class Frame:
    """One step of a story about blocks."""

    title: str
    text: str
    calls: tuple[str, ...]
    """What the host has just asked of the block manager."""
    rows: tuple[RowView, ...]
    copies: tuple[CopyView, ...]
    pool: PoolView
    counters: Mapping[str, int]
    """``BlockManager.stats`` at this moment."""

    def block(self, block_id: int) -> BlockView:
        """Return a block of the pool."""
        return self.pool.blocks[block_id]


@dataclass(frozen=True, slots=True)
class Story:
    """Frames in order, and what they have in common."""

    block_size: int
    prompt: tuple[str, ...]
    frames: tuple[Frame, ...]


class Observer:
    """Takes views of a block manager; changes nothing in it.

    Args:
        manager: with its prefix cache on.
        names: row to the name of its sequence; the caller keeps it up to date.
        word_of: text of a token id.
    """

    def __init__(
        self, manager: BlockManager, names: Mapping[int, str], word_of: Callable[[int], str]
    ) -> None:
        self._manager = manager
        self._names = names
        self._word_of = word_of

    def pool(self) -> PoolView:
        """Return every block and the counts."""
        pool = self._manager.pool
        cached = pool.cached_blocks().tolist()
        sources = frozenset(self._manager.clones.held_sources().tolist())
        return PoolView(
            blocks=tuple(self._block(block_id, cached, sources) for block_id in range(pool.num_blocks)),
            eviction_order=tuple(cached),
            num_free=len(pool.free_blocks()),
            num_cached=pool.num_cached_blocks,
            num_held=int(np.count_nonzero(pool.ref_counts)),
        )

    def rows(self, pool: PoolView) -> tuple[RowView, ...]:
        """Return every sequence in use, in the order of its row."""
        return tuple(self._row(row, pool) for row in sorted(self._names))

    def copies(self, plan: ClonePlan | None) -> tuple[CopyView, ...]:
        """Return the copies of a plan that has not been carried out yet."""
        if plan is None:
            return ()
        columns = (plan.src_block_ids.tolist(), plan.dst_block_ids.tolist(), plan.num_tokens.tolist())
        return tuple(
            CopyView(source, destination, num_tokens, self._writer(destination) or "")
            for source, destination, num_tokens in zip(*columns, strict=True)
        )

    def _block(self, block_id: int, cached: list[int], sources: frozenset[int]) -> BlockView:
        manager = self._manager
        assert manager.cache is not None, "the pictures read the tokens of a block from the prefix cache"
        ref_count = int(manager.pool.ref_counts[block_id])
        if block_id == NULL_BLOCK:
            state = BlockState.NULL
        elif block_id in sources:
            state = BlockState.CLONE_SOURCE
        elif ref_count:
            state = BlockState.SHARED if ref_count > 1 else BlockState.HELD
        else:
            state = BlockState.CACHED if block_id in cached else BlockState.FREE
        return BlockView(
            block_id=block_id,
            state=state,
            ref_count=ref_count,
            writer=self._writer(block_id),
            words=tuple(self._word_of(token) for token in manager.cache.tokens_of(block_id).tolist()),
            is_findable=bool(manager.pool.is_cached[block_id]),
        )

    def _writer(self, block_id: int) -> str | None:
        row = int(self._manager.pool.writers[block_id])
        return None if row == NO_WRITER else self._names[row]

    def _row(self, row: int, pool: PoolView) -> RowView:
        size = self._manager.block_size
        block_ids = self._manager.block_table[row, : self._manager.num_row_blocks[row]].tolist()
        num_computed = int(self._manager.num_computed_tokens[row])
        cells = tuple(
            CellView(
                pool.blocks[block_id],
                self._slots(pool.blocks[block_id], self._names[row], num_computed - column * size),
            )
            for column, block_id in enumerate(block_ids)
        )
        num_reserved = sum(kind is SlotKind.RESERVED for cell in cells for _, kind in cell.slots)
        return RowView(self._names[row], num_computed, num_reserved, cells)

    def _slots(self, block: BlockView, name: str, num_computed: int) -> tuple[tuple[str, SlotKind], ...]:
        """Return the slots of a block for a sequence that has computed its first ``num_computed`` positions."""
        slots = []
        for offset in range(self._manager.block_size):
            word = block.words[offset] if offset < len(block.words) else ""
            if offset < num_computed:
                kind = SlotKind.COMPUTED
            elif word:
                kind = SlotKind.FOREIGN
            else:
                kind = SlotKind.RESERVED if block.writer == name else SlotKind.EMPTY
            slots.append((word, kind))
        return tuple(slots)
