"""What a picture of a block manager shows, as plain values: read once from its arrays, drawn by several renderers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager import NULL_BLOCK, BlockManager, ClonePlan
from rose_backend.block_manager.block_pool import NO_WRITER


class BlockState(enum.Enum):
    """State of a block in the picture of the pool. The value is the legend's text."""

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

    @classmethod
    def of(cls, block: BlockView, block_size: int, num_computed: int, name: str = "") -> CellView:
        """Return a block as sequence ``name`` sees it, which has computed its first ``num_computed`` positions."""
        slots = []
        for offset in range(block_size):
            word = block.words[offset] if offset < len(block.words) else ""
            if offset < num_computed:
                kind = SlotKind.COMPUTED
            elif word:
                kind = SlotKind.FOREIGN
            else:
                kind = SlotKind.RESERVED if block.writer == name else SlotKind.EMPTY
            slots.append((word, kind))
        return cls(block, tuple(slots))


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


@dataclass(frozen=True, slots=True)
class PoolView:
    """All blocks, in order of their ids, and the counts that must add up."""

    blocks: tuple[BlockView, ...]
    eviction_order: tuple[int, ...]
    """Cached blocks, next to be given away first."""
    num_free: int
    num_cached: int
    num_held: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One step of the demonstration."""

    title: str
    text: str
    calls: tuple[str, ...]
    """What the host has just asked of the block manager."""
    rows: tuple[RowView, ...]
    copies: tuple[CopyView, ...]
    pool: PoolView
    counters: Mapping[str, int]
    """``BlockManager.stats`` at this moment."""


@dataclass(frozen=True, slots=True)
class Story:
    """Frames in order, and what they have in common."""

    block_size: int
    prompt: tuple[str, ...]
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Observer:
    """Takes frames of a block manager; changes nothing in it."""

    manager: BlockManager
    """With its prefix cache on."""
    names: Mapping[int, str]
    """Row to the name of its sequence; the caller keeps it up to date."""
    word_of: Callable[[int], str]
    """Text of a token id."""

    def frame(self, title: str, text: str, calls: tuple[str, ...], plan: ClonePlan | None) -> Frame:
        """Return the state of every block and sequence, and the copies of a plan that has not been carried out yet."""
        pool = self._pool()
        rows = tuple(self._row(row, pool) for row in sorted(self.names))
        columns = () if plan is None else (plan.src_block_ids, plan.dst_block_ids, plan.num_tokens)
        copies = tuple(CopyView(*copy) for copy in zip(*(ids.tolist() for ids in columns), strict=True))
        return Frame(title, text, calls, rows, copies, pool, self.manager.stats.as_dict())

    def _pool(self) -> PoolView:
        pool = self.manager.pool
        cached = pool.cached_blocks().tolist()
        sources = frozenset(self.manager.clones.held_sources().tolist())
        return PoolView(
            blocks=tuple(self._block(block_id, cached, sources) for block_id in range(pool.num_blocks)),
            eviction_order=tuple(cached),
            num_free=len(pool.free_blocks()),
            num_cached=pool.num_cached_blocks,
            num_held=int(np.count_nonzero(pool.ref_counts)),
        )

    def _block(self, block_id: int, cached: list[int], sources: frozenset[int]) -> BlockView:
        manager = self.manager
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
        words = tuple(map(self.word_of, manager.cache.tokens_of(block_id).tolist()))
        is_findable = bool(manager.pool.is_cached[block_id])
        return BlockView(block_id, state, ref_count, self._writer(block_id), words, is_findable)

    def _writer(self, block_id: int) -> str | None:
        row = int(self.manager.pool.writers[block_id])
        return None if row == NO_WRITER else self.names[row]

    def _row(self, row: int, pool: PoolView) -> RowView:
        manager, name = self.manager, self.names[row]
        size, num_computed = manager.block_size, int(manager.num_computed_tokens[row])
        block_ids = manager.block_table[row, : manager.num_row_blocks[row]].tolist()
        cells = tuple(
            CellView.of(pool.blocks[block_id], size, num_computed - column * size, name)
            for column, block_id in enumerate(block_ids)
        )
        num_reserved = sum(kind is SlotKind.RESERVED for cell in cells for _, kind in cell.slots)
        return RowView(name, num_computed, num_reserved, cells)
