"""The oracle's books: rows, blocks, what can be found, and what happens when a block gets or loses a holder."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


class Disagreement(AssertionError):
    """The manager's answer is not among those that are right."""


def agree(what: str, got: object, expected: object) -> None:
    """Raise Disagreement unless both are equal."""
    if got != expected:
        raise Disagreement(f"{what}: the manager says {got}, the oracle {expected}")


Prefix = tuple[bytes, tuple[int, ...]]
"""Namespace, and all tokens in front of a block."""


@dataclass
class Block:
    """A block that a row holds or a lookup can find."""

    tokens: list[int] = field(default_factory=list)
    """Tokens whose K/V is there once all work queued so far has run."""
    rows: set[int] = field(default_factory=set)
    num_copies: int = 0
    """Pending and in-flight copies that read this block."""
    writer: int | None = None
    prefix: Prefix | None = None
    """Where lookups find it; None while they do not."""

    @property
    def num_holders(self) -> int:
        return len(self.rows) + self.num_copies


@dataclass
class Row:
    namespace: bytes
    tokens: list[int]
    """Computed tokens."""
    blocks: list[int]


class Books:
    """Arguments as for ``BlockManager``. All lists, dicts and sets; every question is answered by looking."""

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, full_blocks_only: bool = False
    ) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.full_blocks_only = full_blocks_only
        self.free_blocks = set(range(1, num_blocks))
        self.evict_next: dict[int, None] = {}
        """Cached blocks, least recently released first."""
        self.blocks: dict[int, Block] = {}
        """Cached and held blocks."""
        self.findable: dict[Prefix, list[int]] = {}
        self.rows: dict[int, Row] = {}
        self.pending: dict[int, tuple[int, int]] = {}
        """Destination -> (source, tokens) of the copies that the next plan will name."""
        self.must_change: set[int] = set()
        """Rows whose table has changed since they were last asked for."""
        self.may_change: set[int] = set()
        """Rows that something was done to since then."""
        self.stats: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        """How often each path was taken."""

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks) + len(self.evict_next)

    @property
    def num_free_rows(self) -> int:
        return self.max_num_seqs - len(self.rows)

    def new_row(self, row: int, state: Row) -> None:
        self.rows[row] = state
        for block_id in state.blocks:
            self.blocks[block_id].rows.add(row)
            self.evict_next.pop(block_id, None)
        self.must_change.add(row)
        self.may_change.add(row)

    def take(self, block_ids: list[int]) -> None:
        """Check that these were the right blocks to hand out: free ones, then the least recently released."""
        if len(set(block_ids)) != len(block_ids):
            raise Disagreement(f"a block was handed out twice: {block_ids}")
        num_evicted = max(len(block_ids) - len(self.free_blocks), 0)
        evicted = list(self.evict_next)[:num_evicted]
        if not num_evicted:
            agree("handed out, but not free", set(block_ids) - self.free_blocks, set())
        else:
            agree("blocks handed out", sorted(block_ids), sorted([*self.free_blocks, *evicted]))
        for block_id in evicted:
            del self.evict_next[block_id]
            self.unpublish(block_id)
            del self.blocks[block_id]
        self.free_blocks -= set(block_ids)
        self.stats["evictions"] += num_evicted
        self.paths["eviction of several blocks, others staying"] += bool(num_evicted > 1 and self.evict_next)

    def let_go(self, block_id: int) -> list[int]:
        """Deal with a block that has lost a holder. Returns the source of its pending copy if that is called off."""
        block = self.blocks[block_id]
        if block.num_holders:
            return []
        block.writer = None
        if block.prefix is None:
            del self.blocks[block_id]
            self.free_blocks.add(block_id)
        else:
            self.evict_next[block_id] = None
        if block_id not in self.pending:
            return []
        self.paths["clone called off"] += 1
        return [self.pending.pop(block_id)[0]]

    def release_sources(self, sources: list[int]) -> None:
        """Let go of blocks that copies have read, or will not read."""
        for source in sources:
            self.blocks[source].num_copies -= 1
            self.release_sources(self.let_go(source))

    def publish(self, block_id: int, prefix: Prefix) -> None:
        self.blocks[block_id].prefix = prefix
        self.findable.setdefault(prefix, []).append(block_id)

    def unpublish(self, block_id: int) -> None:
        prefix = self.blocks[block_id].prefix
        assert prefix is not None
        self.blocks[block_id].prefix = None
        self.findable[prefix].remove(block_id)
        if not self.findable[prefix]:
            del self.findable[prefix]
