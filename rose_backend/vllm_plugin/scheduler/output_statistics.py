"""Statistics of an output with tokens only, without a look at the environment.

vLLM's front end counts the tokens of every output. It reads an environment variable for each, which takes longer than
the rest of the statistics, and whose value matters only to outputs that report NaNs. (In the engine core's process vLLM
caches the environment; in the API server's it does not.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.metrics.stats import IterationStats, RequestStateStats

KNOWN_NAMES = frozenset(
    {
        *(
            "len",
            "new_token_ids",
            "num_generation_tokens",
            "append",
            "inter_token_latencies_iter",
            "last_token_ts",
        ),
        # Of first tokens.
        *("prefill_stats", "prompt_token_stats", "update_from_output", "_time_since", "arrival_time"),
        *("time_to_first_tokens_iter", "first_token_latency", "first_token_ts"),
        # Of outputs with NaNs.
        *("envs", "VLLM_COMPUTE_NANS_IN_LOGITS", "is_corrupted", "num_nans_in_logits"),
        # Of outputs with events.
        *("events", "update_from_events", "request_id"),
    }
)
"""All that vLLM's function names. Where it names anything else, it counts what is not known here, and stays."""


def wrap_update_from_output(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``IterationStats.update_from_output``; see the patch ledger."""
    is_known = KNOWN_NAMES.issuperset(original.__code__.co_names)

    @functools.wraps(original)
    def update_from_output(
        self: IterationStats,
        output: EngineCoreOutput,
        engine_core_timestamp: float,
        is_prefilling: bool,
        req_stats: RequestStateStats,
        *others: Any,
        **named: Any,
    ) -> None:
        if is_prefilling or output.events is not None or output.num_nans_in_logits or not is_known:
            original(self, output, engine_core_timestamp, is_prefilling, req_stats, *others, **named)
            return
        num_tokens = len(output.new_token_ids)
        self.num_generation_tokens += num_tokens
        req_stats.num_generation_tokens += num_tokens
        self.inter_token_latencies_iter.append(engine_core_timestamp - req_stats.last_token_ts)
        req_stats.last_token_ts = engine_core_timestamp

    return update_from_output
