"""What changed in the prefix cache, as events for a router or an outer cache that keeps a copy of the index.

Only full blocks have events: a part-filled block still grows, so it has no lasting content. Whoever replays all events
in order knows exactly the full blocks that lookups can find, each under its chained digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block can be found from now on."""

    block_hash: bytes
    parent_hash: bytes | None
    """Hash of the block before it; None for the first block of a sequence."""
    token_ids: tuple[int, ...]
    namespace: bytes
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A full block that was announced before cannot be found any more."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing that was announced before can be found any more."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | CacheCleared
