"""What the block manager reports to the outside: counters since start-up, and events of the prefix cache.

Events let a router or an external cache keep a copy of the index. Only full blocks have events: the content of a
partial block still changes. Replaying all events in order gives the full blocks that lookups can find, by digest.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

_MIN_REPORTING_UNIT = 16


def reporting_unit(block_size: int) -> int:
    """Return the unit, in tokens, in which prefix hits are reported to clients and metrics.

    A client that saw hits grow token by token could guess the prompts of other clients token by token.
    """
    return max(block_size, _MIN_REPORTING_UNIT)


@dataclass(slots=True)
class CacheStats:
    """Monotonic counters; for a difference, a reader keeps an earlier copy."""

    bytes_per_block: int = 0
    """K/V bytes of one block over all layers. Not a counter."""
    queries: int = 0
    """Prefix lookups of sequences that were added."""
    query_tokens: int = 0
    """Prompt tokens of those lookups."""
    hit_tokens: int = 0
    """Prompt tokens whose K/V was found."""
    reported_hit_tokens: int = 0
    """The same, each lookup rounded down to a multiple of ``reporting_unit``."""
    partial_hits: int = 0
    """Hits that ended inside a block."""
    evictions: int = 0
    """Cached blocks that were reallocated."""
    clones: int = 0
    """Blocks copied on write, and states copied."""
    bytes_cloned: int = 0
    """K/V bytes of those blocks, over all layers."""
    checkpoints: int = 0
    """States copied into the prefix cache; these copies are among ``clones``."""
    claims: int = 0
    """Shared partial blocks that a row got to append to without a copy, as no row had written beyond its length."""
    overwrites: int = 0
    """Shared partial blocks that a row got to append to by dropping cached tokens, as blocks were short."""
    forks: int = 0
    """Rows made by ``fork``."""

    def count_lookup(self, num_tokens: int, num_hit_tokens: int, block_size: int) -> None:
        """Count the lookup of a sequence that was added."""
        self.queries += 1
        self.query_tokens += num_tokens
        self.hit_tokens += num_hit_tokens
        self.reported_hit_tokens += num_hit_tokens - num_hit_tokens % reporting_unit(block_size)
        self.partial_hits += num_hit_tokens % block_size != 0

    def count_clones(self, num_clones: int, num_groups: int) -> None:
        """Count copies of blocks of a group type with ``num_groups`` groups."""
        self.clones += num_clones
        self.bytes_cloned += num_clones * num_groups * self.bytes_per_block

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        names = (field.name for field in fields(self) if field.name != "bytes_per_block")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block was added to the index."""

    block_hash: bytes
    parent_hash: bytes | None
    """Hash of the block before it; None for the first block of a sequence."""
    token_ids: tuple[int, ...]
    namespace: bytes
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A full block was removed from the index."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All blocks were removed from the index."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | CacheCleared
