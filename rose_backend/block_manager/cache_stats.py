"""Counters of the block manager since start-up."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class CacheStats:
    """Monotonic counters; a reader keeps its own earlier copy to get a difference."""

    queries: int = 0
    """Prefix lookups that led to an admission."""
    query_tokens: int = 0
    """Prompt tokens of those lookups."""
    hit_tokens: int = 0
    """Prompt tokens whose K/V was found."""
    partial_hits: int = 0
    """Hits that ended inside a block."""
    evictions: int = 0
    """Cached blocks that were given away."""
    clones: int = 0
    """Blocks copied on write."""
    claims: int = 0
    """Part-filled tails taken over in place, without a copy."""
    overwrites: int = 0
    """Part-filled tails taken over in place although the cache knew more of them, because blocks were short."""
    forks: int = 0
    """Rows made by ``fork``."""

    def count_lookup(self, num_tokens: int, num_hit_tokens: int, block_size: int) -> None:
        """Count the lookup of a prompt of ``num_tokens``."""
        self.queries += 1
        self.query_tokens += num_tokens
        self.hit_tokens += num_hit_tokens
        self.partial_hits += num_hit_tokens % block_size != 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)
