"""The line in the log that says how much the engine does, in vLLM's words."""

from __future__ import annotations

import asyncio
import logging
import time

from rose_backend.engine.client import EngineClient
from rose_backend.engine.outputs import Counters

logger = logging.getLogger(__name__)

_INTERVAL_S = 10.0


class StatsLog:
    """Compares the engine's counters with those of the line before.

    Args:
        first: counters when the server began.
        start_s: ``time.monotonic`` then.
        exact_cached_tokens: see ``ServerSettings``; without it, what rounding hides is told as computed.
    """

    def __init__(self, first: Counters, start_s: float, *, exact_cached_tokens: bool = False) -> None:
        self._last, self._last_s = first.stats, start_s
        self._exact_cached_tokens = exact_cached_tokens
        self._was_idle = True

    def write(self, counters: Counters, now_s: float) -> None:
        """Write the line; at level DEBUG where this one and the one before tell of no traffic."""
        (stats, load), last = counters, self._last
        seconds = max(now_s - self._last_s, 1e-9)
        queries = stats.prefix_cache_queries - last.prefix_cache_queries
        found = stats.prefix_cache_hits - last.prefix_cache_hits
        reported = stats.reported_prefix_cache_hits - last.reported_prefix_cache_hits
        hits = found if self._exact_cached_tokens else reported
        num_prompt = stats.prompt_tokens_computed - last.prompt_tokens_computed + found - hits
        # Tokens after a stop string are taken back once the text is known.
        num_generated = max(stats.generated_tokens - last.generated_tokens, 0)
        preemptions = stats.preemptions - last.preemptions
        num_drafts = stats.spec_decode_num_draft_tokens - last.spec_decode_num_draft_tokens
        num_accepted = stats.spec_decode_num_accepted_tokens - last.spec_decode_num_accepted_tokens
        parts = [
            f"Avg prompt throughput: {num_prompt / seconds:.1f} tokens/s",
            f"Avg generation throughput: {num_generated / seconds:.1f} tokens/s",
            f"Running: {load.num_running} reqs",
            f"Waiting: {load.num_waiting} reqs",
            *([f"Preemptions: {preemptions}"] if preemptions else []),
            f"KV cache usage: {load.kv_cache_usage:.1%}",
            *([f"Prefix cache hit rate: {hits / queries:.1%}"] if queries else []),
            *([f"Avg Draft acceptance rate: {num_accepted / num_drafts:.1%}"] if num_drafts else []),
        ]
        # Requests that run or wait without a token are worth a line, too.
        is_idle = not (num_prompt or num_generated or load.num_running or load.num_waiting)
        logger.log(logging.DEBUG if is_idle and self._was_idle else logging.INFO, ", ".join(parts))
        self._last, self._last_s, self._was_idle = stats, now_s, is_idle


async def log_stats(engine: EngineClient, *, exact_cached_tokens: bool) -> None:
    """Write the line every ten seconds, until cancelled."""
    log = StatsLog(await engine.counters(), time.monotonic(), exact_cached_tokens=exact_cached_tokens)
    while True:
        await asyncio.sleep(_INTERVAL_S)
        log.write(await engine.counters(), time.monotonic())
