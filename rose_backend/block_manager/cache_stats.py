"""Counters of the block manager since start-up."""

from __future__ import annotations

from dataclasses import dataclass, fields

_MIN_REPORTING_UNIT = 16


def reporting_unit(block_size: int) -> int:
    """Return the number of tokens in whose multiples clients and monitoring are told of hits.

    Who could see hits grow token by token would guess others' prompts token by token.
    """
    return max(block_size, _MIN_REPORTING_UNIT)


@dataclass(slots=True)
class CacheStats:
    """Monotonic counters; a reader keeps its own earlier copy to get a difference."""

    bytes_per_block: int = 0
    """Of one block over all layers, keys and values. Not a counter."""
    queries: int = 0
    """Prefix lookups that led to an admission."""
    query_tokens: int = 0
    """Prompt tokens of those lookups."""
    hit_tokens: int = 0
    """Prompt tokens whose K/V was found."""
    reported_hit_tokens: int = 0
    """The same, each lookup's rounded down to a multiple of ``reporting_unit``."""
    partial_hits: int = 0
    """Hits that ended inside a block."""
    evictions: int = 0
    """Cached blocks that were given away."""
    clones: int = 0
    """Blocks copied on write."""
    bytes_cloned: int = 0
    """K/V bytes of those blocks, over all layers."""
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
        self.reported_hit_tokens += num_hit_tokens - num_hit_tokens % reporting_unit(block_size)
        self.partial_hits += num_hit_tokens % block_size != 0

    def count_clones(self, num_blocks: int) -> None:
        """Count blocks copied on write."""
        self.clones += num_blocks
        self.bytes_cloned += num_blocks * self.bytes_per_block

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "bytes_per_block"
        }
