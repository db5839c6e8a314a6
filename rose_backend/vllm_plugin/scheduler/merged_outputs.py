"""What a busy API server saves for each output: queued outputs are merged per request, statistics read no environment.

vLLM's engine sends one message per step, with one output per request, and the API server does work for every output:
statistics, stop checks, an object for the client's stream. With a few hundred streams that takes longer than a step of
a fast engine, so messages queue up and every request is delayed. Queued messages become one output per request with
several tokens, as under speculative decoding. No output is delayed for it, and tokens keep their order. vLLM's
histogram of inter-token latencies then gets one sample per merged output.

For the statistics of every output vLLM reads an environment variable, which takes longer than the rest of them, and
whose value matters only to outputs that report NaNs. (In the engine core's process vLLM caches the environment; in the
API server's it does not.)
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm.v1.engine import EngineCoreOutput

from rose_backend.vllm_plugin.options import is_rose_selected, rose_options

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.metrics.stats import IterationStats, RequestStateStats

_MERGED_FIELDS = ("request_id", "new_token_ids", "finish_reason", "stop_reason")
_OTHER_FIELDS = tuple(name for name in EngineCoreOutput.__struct_fields__ if name not in _MERGED_FIELDS)
_others = attrgetter(*_OTHER_FIELDS)
_NONE_OF_THEM = _others(EngineCoreOutput("", []))

_MERGES_OUTPUTS: WeakKeyDictionary[AsyncMPClient, bool] = WeakKeyDictionary()
_NUM_MERGED: WeakKeyDictionary[AsyncMPClient, int] = WeakKeyDictionary()
"""How many messages at the head of a client's queue have been merged with each other."""


def has_tokens_only(output: EngineCoreOutput) -> bool:
    """Whether an output has tokens and a finish reason only: no log-probabilities, no events, no prefill statistics."""
    return all(map(is_, _others(output), _NONE_OF_THEM))


def merge_outputs(messages: Sequence[EngineCoreOutputs]) -> None:
    """Move tokens to the last message that has an output of the same request, in place.

    An output with more than tokens stays where it is, and no tokens move past it or past the end of a request. Messages
    stay in the queue, with their scheduler statistics, even if all of their outputs have moved.

    Args:
        messages: in order of arrival, with at most one output per request each.
    """
    if sum(bool(message.outputs) for message in messages) < 2:  # for instance merged already
        return
    latest: dict[str, tuple[int, EngineCoreOutput]] = {}
    moved: list[set[str]] = [set() for _ in messages]
    for index, message in enumerate(messages):
        for output in message.outputs:
            request_id = output.request_id
            earlier = latest.pop(request_id, None)
            if not has_tokens_only(output):
                continue
            if earlier is not None and messages[earlier[0]].weight_version == message.weight_version:
                moved[earlier[0]].add(request_id)
                token_ids = earlier[1].new_token_ids
                token_ids += output.new_token_ids
                output.new_token_ids = token_ids
            if output.finish_reason is None:
                latest[request_id] = index, output
    for message, request_ids in zip(messages, moved, strict=True):
        if request_ids:
            message.outputs = [output for output in message.outputs if output.request_id not in request_ids]


def _merges_outputs(client: AsyncMPClient) -> bool:
    """Whether the front end of a client's engine merges queued outputs."""
    if client not in _MERGES_OUTPUTS:
        config = client.vllm_config
        _MERGES_OUTPUTS[client] = is_rose_selected(config) and rose_options(config).joined_outputs
    return _MERGES_OUTPUTS[client]


def wrap_get_output_async(
    original: Callable[[AsyncMPClient], Awaitable[EngineCoreOutputs]],
) -> Callable[[AsyncMPClient], Awaitable[EngineCoreOutputs]]:
    """Build the replacement of ``AsyncMPClient.get_output_async``; see the patch ledger."""

    @functools.wraps(original)
    async def get_output_async(self: AsyncMPClient) -> EngineCoreOutputs:
        outputs = await original(self)
        queue = self.outputs_queue
        num_waiting = queue.qsize()
        # Each message is merged once: while merged messages are handed out, nothing is to be done.
        num_left = max(_NUM_MERGED.get(self, 0) - 1, 0)
        _NUM_MERGED[self] = num_waiting
        if num_waiting > num_left and _merges_outputs(self):
            # Taking out and putting back does not await, so no other task sees the queue in between.
            waiting = [queue.get_nowait() for _ in range(num_waiting)]
            merge_outputs([outputs, *(each for each in waiting if not isinstance(each, Exception))])
            for message in waiting:
                queue.put_nowait(message)
        return outputs

    return get_output_async


KNOWN_NAMES = frozenset(
    {
        *("len", "new_token_ids", "num_generation_tokens", "append"),
        *("inter_token_latencies_iter", "last_token_ts"),
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
