"""What an engine has done, and what it has in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class EngineStats:
    """Counted since the engine started."""

    steps: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model: prompt, generated and recomputed ones."""
    prompt_tokens_computed: int = 0
    """Prompt tokens computed for the first time; a prompt with ``n`` completions counts once."""
    recomputed_tokens: int = 0
    """Tokens computed again after a preemption."""
    generated_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens supplied by the prefix cache."""
    prefix_cache_queries: int = 0
    """Tokens looked up in the prefix cache, including by sequences that resume after a preemption."""
    prefix_cache_hits: int = 0
    """Tokens found there."""
    reported_prefix_cache_hits: int = 0
    """The same, each lookup's rounded down to whole blocks of at least 16 tokens: what clients may see."""
    preemptions: int = 0
    clones: int = 0
    """Blocks copied because a sequence wrote into a shared, partly filled block."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What is in use at one moment."""

    num_running: int
    """Sequences that hold a row; each of a request's ``n`` completions counts."""
    num_waiting: int
    """Requests that have no row yet, preempted ones included."""
    kv_cache_usage: float
    """Share of the KV blocks that sequences hold, 0 to 1."""


class Counters(NamedTuple):
    """Both, for metrics."""

    stats: EngineStats
    load: EngineLoad
