"""What the API process and the engine process tell each other, and how it travels: pickled behind its length.

The socket is a pair made by the API process and known to no one else, so what comes out of it may be unpickled.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from rose_backend.config import EngineConfig
from rose_backend.engine.engine_stats import EngineLoad, EngineStats
from rose_backend.engine.outputs import FinishReason, Logprob
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.errors import RequestError, RoseError

HEADER = struct.Struct("=I")
"""Stands before each message: the number of bytes that follow."""


def encode(message: object) -> bytes:
    """Return a message with its header."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(content)) + content


def decode(content: bytes) -> Any:
    """Return the message behind a header."""
    return pickle.loads(content)


def read_message(stream: BinaryIO) -> object | None:
    """Return the next message, or None when the other end has closed or gone."""
    try:
        header = stream.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (length,) = HEADER.unpack(header)
        content = stream.read(length)
    except OSError:
        return None
    return decode(content) if len(content) == length else None


# To the engine process. The first message is its ``StartUp``.


class StartUp(NamedTuple):
    """What to load, and what to log meanwhile."""

    config: EngineConfig
    log_level: int


class Add(NamedTuple):
    """Start a request, which has been checked."""

    number: int
    """Its name in all later messages."""
    request_id: str
    prompt_token_ids: bytes
    """int32."""
    params: SamplingParams
    namespace: bytes
    """Of the prefix cache."""


class Abort(NamedTuple):
    """End a request; its last output comes like any other."""

    number: int


class Seen(NamedTuple):
    """The streams have had their turn with a round of outputs."""


class AskCounters(NamedTuple):
    """Send ``Counters``."""


class Stop(NamedTuple):
    """End after the present step."""


# From the engine process: first ``Ready`` or ``Failed``, then the rest, and ``Dead`` last if a step fails.


class Counters(NamedTuple):
    """Answers ``AskCounters``."""

    stats: EngineStats
    load: EngineLoad


class Ready(NamedTuple):
    """The model is loaded."""

    config: EngineConfig
    """With a choice made for each option that was left open."""
    vocab_size: int
    max_model_len: int
    num_blocks: int
    parts: dict[str, str]
    counters: Counters


class Failed(NamedTuple):
    """The model cannot be loaded."""

    error: RoseError


class Piece(NamedTuple):
    """What is new in one completion. Travels as a plain tuple, which is cheaper."""

    completion: int
    """Its index."""
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    """Of these tokens."""
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


Update: TypeAlias = tuple[int, int, bool, list[tuple[Any, ...]]]
"""A request's number, its cached prompt tokens, whether this is its last update, and fields of ``Piece`` for each
completion that has news."""


class Round(NamedTuple):
    """Everything that is new in all requests."""

    updates: list[Update]


class Refused(NamedTuple):
    """A request was not started."""

    number: int
    error: RequestError


class Dead(NamedTuple):
    """The engine stopped after a failure; the process ends."""

    message: str
