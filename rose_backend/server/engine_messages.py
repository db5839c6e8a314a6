"""Messages between the API process and the engine process: pickled named tuples, each behind its length.

The socket pair is made by the API process and inherited by the engine process alone, so unpickling is safe.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from rose_backend.config import EngineConfig
from rose_backend.engine.engine_stats import Counters
from rose_backend.engine.outputs import FinishReason, Logprobs
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.errors import RequestError, RoseError

HEADER = struct.Struct("=I")
"""In front of each message: the number of bytes that follow."""


def encode(message: object) -> bytes:
    """Return a message with its header."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(content)) + content


def decode(content: bytes) -> Any:
    """Return the message behind a header."""
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
    """Start a request: ``ProcessedInput`` as it travels."""

    number: int
    """Names the request in all later messages."""
    request_id: str
    token_ids: bytes
    """int32."""
    params: SamplingParams
    namespace: bytes
    """Of the prefix cache."""


class Abort(NamedTuple):
    """End a request; its last output comes like any other."""

    number: int


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


class CompletionDelta(NamedTuple):
    """What is new in one completion. Sent as a plain tuple, which is cheaper."""

    completion: int
    """Its index."""
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    """Of these tokens."""
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


Update: TypeAlias = tuple[int, int, bool, list[tuple[Any, ...]], float | None]
"""Number of the request, its cached prompt tokens, whether this is its last update, the fields of a ``CompletionDelta``
for each completion that has changed, and when the request was scheduled (``RequestOutput.scheduled_s``)."""


class OutputBatch(NamedTuple):
    """What is new in all requests."""

    updates: list[Update]


class Refused(NamedTuple):
    """A request was not started."""

    number: int
    error: RequestError


class EngineDied(NamedTuple):
    """The engine stopped after a failure; its process ends."""

    message: str
