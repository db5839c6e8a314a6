"""Outputs that wait in front of a busy API server, joined request by request before it looks at them.

vLLM's engine sends a message per step, with an output per request, and the API server pays for every output:
statistics, stop checks, an object for the request's reader. With a few hundred streams a fast engine's steps are
shorter than that takes, so the server falls behind, and every request waits for it. What has piled up meanwhile becomes
one output per request with several tokens, as speculative decoding makes them, too. Nothing is held back for it, and
tokens come in the same order. vLLM's histogram of inter-token latencies then gets a sample per joined output.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vllm.v1.engine import EngineCoreOutput

from rose_backend.vllm_plugin.options import is_rose_selected, rose_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core_client import AsyncMPClient

_JOINED_FIELDS = ("request_id", "new_token_ids", "finish_reason", "stop_reason")
_OTHER_FIELDS = tuple(name for name in EngineCoreOutput.__struct_fields__ if name not in _JOINED_FIELDS)
_others = attrgetter(*_OTHER_FIELDS)
_NONE_OF_THEM = _others(EngineCoreOutput("", []))

_JOINS: WeakKeyDictionary[AsyncMPClient, bool] = WeakKeyDictionary()
_NUM_JOINED: WeakKeyDictionary[AsyncMPClient, int] = WeakKeyDictionary()
"""How many messages at the head of a client's queue have been joined with each other."""


def is_plain(output: EngineCoreOutput) -> bool:
    """Whether an output has tokens and an end only: no first token's statistics, no log-probabilities, no events."""
    return all(map(is_, _others(output), _NONE_OF_THEM))


def join_outputs(messages: Sequence[EngineCoreOutputs]) -> None:
    """Move tokens to the last message that has a plain output of the same request, in place.

    An output that is not plain stays where it is, and nothing passes it, or the end of a request. Messages stay, with
    their statistics of the scheduler, though all of their outputs may have left.

    Args:
        messages: in the order in which they came, with at most one output per request each.
    """
    if sum(bool(message.outputs) for message in messages) < 2:  # as when they have been joined before
        return
    latest: dict[str, tuple[int, EngineCoreOutput]] = {}
    moved: list[set[str]] = [set() for _ in messages]
    for index, message in enumerate(messages):
        for output in message.outputs:
            request_id = output.request_id
            earlier = latest.pop(request_id, None)
            if not is_plain(output):
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


def joins_outputs(vllm_config: VllmConfig) -> bool:
    """Whether this engine's front end joins what waits for it."""
    return is_rose_selected(vllm_config) and rose_options(vllm_config).joined_outputs


def wrap_get_output_async(
    original: Callable[[AsyncMPClient], Awaitable[EngineCoreOutputs]],
) -> Callable[[AsyncMPClient], Awaitable[EngineCoreOutputs]]:
    """Build the replacement of ``AsyncMPClient.get_output_async``; see the patch ledger."""

    @functools.wraps(original)
    async def get_output_async(self: AsyncMPClient) -> EngineCoreOutputs:
        outputs = await original(self)
        queue = self.outputs_queue
        num_waiting = queue.qsize()
        # Once per message, however many wait: nothing has to be done while what was joined is handed out.
        num_left = max(_NUM_JOINED.get(self, 0) - 1, 0)
        _NUM_JOINED[self] = num_waiting
        if num_waiting > num_left and _joins(self):
            # Taken out and put back: nobody else runs meanwhile.
            waiting = [queue.get_nowait() for _ in range(num_waiting)]
            join_outputs([outputs, *(each for each in waiting if not isinstance(each, Exception))])
            for message in waiting:
                queue.put_nowait(message)
        return outputs

    return get_output_async


def _joins(client: AsyncMPClient) -> bool:
    """Return ``joins_outputs`` of a client's engine, looked up once."""
    joins = _JOINS.get(client)
    if joins is None:
        joins = _JOINS[client] = joins_outputs(client.vllm_config)
    return joins
