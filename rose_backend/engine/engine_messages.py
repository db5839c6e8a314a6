"""Messages between the API process and the engine process: pickled named tuples, each preceded by its length.

The socket pair is made by the API process and inherited by the engine process alone, so unpickling is safe.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from rose_backend.config import EngineConfig
from rose_backend.engine.engine_stats import Counters
from rose_backend.engine.outputs import CompletionOutput, RequestOutput
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.errors import RequestError, RoseError

HEADER = struct.Struct("=I")
"""Precedes each message: the number of bytes that follow."""


def encode(message: object) -> bytes:
    """Return a message with its header."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(content)) + content


def decode(content: bytes) -> Any:
    """Return the message that followed a header."""
    return pickle.loads(content)


def read_message(stream: BinaryIO) -> object | None:
    """Return the next message, or None at the end of the connection."""
    try:
        header = stream.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (length,) = HEADER.unpack(header)
        content = stream.read(length)
    except OSError:
        return None
    return decode(content) if len(content) == length else None


# To the engine process. The first message is its ``StartUp``, the second the ``TokenizerParts`` of its model.


class StartUp(NamedTuple):
    """Options of the engine, and the log level."""

    config: EngineConfig
    log_level: int


class Add(NamedTuple):
    """Start a request: a ``ProcessedInput`` on the wire."""

    request_id: str
    number: int
    token_ids: bytes
    """int32."""
    params: SamplingParams
    namespace: bytes
    """Of the prefix cache."""


class Abort(NamedTuple):
    """End a request; its last output comes like any other."""

    request_id: str


class Ack(NamedTuple):
    """An ``OutputBatch`` has been passed to the tasks that wait for it."""


class GetCounters(NamedTuple):
    """Asks for ``Counters``."""


class Stop(NamedTuple):
    """Stop after the present step."""


# From the engine process: first ``Ready`` or ``Failed``, then the others (``Counters`` answers ``GetCounters``), and
# ``EngineDied`` last if a step fails.


class Ready(NamedTuple):
    """The model is loaded."""

    config: EngineConfig
    """With a value for each option that was left open."""
    vocab_size: int
    max_model_len: int
    num_blocks: int
    counters: Counters


class Failed(NamedTuple):
    """The model cannot be loaded."""

    error: RoseError


Update: TypeAlias = tuple[str, int, bool, list[tuple[Any, ...]], float | None]
"""A ``RequestOutput`` on the wire: without the prompt, and as plain tuples, which are cheaper than objects."""


def pack(output: RequestOutput) -> Update:
    """Return the update for an output."""
    completions: list[tuple[Any, ...]] = [
        (
            each.index,
            each.text,
            each.token_ids,
            each.logprobs,
            each.cumulative_logprob,
            each.finish_reason,
            each.stop_reason,
            each.delta_text,
        )
        for each in output.outputs
    ]
    return output.request_id, output.num_cached_tokens, output.finished, completions, output.scheduled_s


def unpack(update: Update, prompt: str | None, prompt_token_ids: list[int]) -> RequestOutput:
    """Return the output of an update."""
    request_id, num_cached_tokens, is_finished, completions, scheduled_s = update
    outputs = [CompletionOutput(*each) for each in completions]
    return RequestOutput(
        request_id, prompt, prompt_token_ids, outputs, is_finished, num_cached_tokens, scheduled_s
    )


class OutputBatch(NamedTuple):
    """What is new in all requests."""

    updates: list[Update]


class Refused(NamedTuple):
    """A request was not started."""

    request_id: str
    error: RequestError


class EngineDied(NamedTuple):
    """The engine stopped after a failure; its process ends."""

    message: str
