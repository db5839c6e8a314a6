"""What an API process and its engine process tell each other: msgpack of typed structs, each preceded by its length.

Decoding creates only the types below, whatever the bytes are. The sender has checked the values of requests and
options; types are checked again here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, TypeVar, cast

import msgspec
import numpy as np

from rose_backend import errors
from rose_backend.config import EngineConfig
from rose_backend.engine.outputs import (
    CompletionOutput,
    Counters,
    LogprobWords,
    PromptLogprobs,
    RequestOutput,
)
from rose_backend.engine.request import InputProcessor, LoRARequest, ProcessedInput
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.structured_outputs import StructuredOutputsParams
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.engine.tokenizer_loading import TokenizerParts, read_backend, write_backend
from rose_backend.errors import RequestError, RoseError

HEADER = struct.Struct("=I")
"""Precedes each message: the number of bytes that follow."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """Anything that is sent: an array of the name of its type and its fields."""


class Error(Message):
    """An error of ``rose_backend.errors``. ``RequestError.value`` is not sent."""

    kind: str
    text: str
    parameter: str | None

    @classmethod
    def of(cls, error: RoseError) -> Error:
        """Return what is sent of an error."""
        # Paths may hold bytes that are no text.
        text = str(error).encode(errors="backslashreplace").decode()
        return cls(type(error).__name__, text, getattr(error, "parameter", None))

    def restored(self) -> RoseError:
        """Return the error.

        Raises:
            TypeError: its type is none of ``rose_backend.errors``.
        """
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, RoseError)):
            raise TypeError(f"an error of type {self.kind!r} was sent, which rose_backend.errors lacks")
        # Without __init__, whose arguments differ.
        error = kind.__new__(kind, self.text)
        if isinstance(error, RequestError):
            error.parameter, error.value = self.parameter, None
        return error

    def refusal(self) -> RequestError:
        """Return the error of a request.

        Raises:
            TypeError: it is another one.
        """
        error = self.restored()
        if not isinstance(error, RequestError):
            raise TypeError(f"a request was refused with {self.kind}")
        return error


# To the engine process. The first message is its ``StartUp``, the second the ``TokenizerLoaded`` of its model.


class StartUp(Message):
    """Options of the engine, and the log level."""

    options: dict[str, Any]
    """Of ``EngineConfig``."""
    log_level: int

    @classmethod
    def of(cls, config: EngineConfig, log_level: int) -> StartUp:
        """Return the message."""
        return cls(asdict(config), log_level)


class TokenizerLoaded(Message):
    """What the engine's tokenizer is made of."""

    parts: TokenizerParts


@dataclass(frozen=True, kw_only=True)
class _SentStructuredOutputs(StructuredOutputsParams):
    """Not checked again: that can take longer than to read a message."""

    json: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class _SentParams(SamplingParams):
    """Not checked again."""

    structured_outputs: _SentStructuredOutputs | None = None

    def __post_init__(self) -> None:
        pass


class Add(Message):
    """Start a request: a ``ProcessedInput`` on the wire."""

    request_id: str
    number: int
    token_ids: bytes
    """int32."""
    params: _SentParams
    namespace: bytes
    bad_words_token_ids: list[list[int]]
    tenant: bytes
    lora_id: int

    @classmethod
    def of(cls, request_id: str, processed: ProcessedInput) -> Add:
        """Return the message; the prompt's text is left out."""
        number, _, ids, params, namespace, words, tenant, lora_id = processed
        # Both have the same fields.
        params = cast(_SentParams, params)
        return cls(request_id, number, ids.tobytes(), params, namespace, words, tenant, lora_id)

    def processed(self) -> ProcessedInput:
        """Return what was sent."""
        ids = np.frombuffer(bytearray(self.token_ids), np.int32)
        words, tenant = self.bad_words_token_ids, self.tenant
        return ProcessedInput(
            self.number, None, ids, self.params, self.namespace, words, tenant, self.lora_id
        )


class LoadAdapter(Message):
    """Asks for an ``AdapterAnswer``."""

    lora: LoRARequest


class Unload(Message):
    """An ``UnloadAdapter``."""

    lora_id: int


class Abort(Message):
    """End a request; its last output comes like any other."""

    request_id: str


class Ack(Message):
    """An ``OutputBatch`` has been passed to the tasks that wait for it."""


class GetCounters(Message):
    """Asks for ``Counted``."""


class Stop(Message):
    """Stop after the present step."""


# From the engine process: first ``Ready``, or the error if the model cannot be loaded; then the others (``Counted``
# answers ``GetCounters``), and an ``EngineDeadError`` last if a step fails.


class Ready(Message):
    """The model is loaded."""

    options: dict[str, Any]
    """Of ``EngineConfig``, with a value for each that was left open."""
    vocab_size: int
    max_model_len: int
    num_blocks: int
    counters: Counters
    eos_token_ids: tuple[int, ...]
    """The model's end-of-sequence tokens."""

    def input_processor(self, tokenizer: Tokenizer) -> InputProcessor:
        """Return the processor that makes this engine's inputs from prompts."""
        return InputProcessor(
            tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.options["max_num_seqs"],
            seed=self.options["seed"],
            eos_token_ids=self.eos_token_ids,
        )


class Update(Message):
    """A ``RequestOutput`` without the prompt."""

    request_id: str
    num_cached_tokens: int
    finished: bool
    completions: list[CompletionOutput]
    scheduled_s: float | None
    has_prompt_logprobs: bool
    """It has the prompt's log-probabilities, which came before."""

    @classmethod
    def of(cls, output: RequestOutput) -> Update:
        """Return what is sent of an output."""
        return cls(
            output.request_id,
            output.num_cached_tokens,
            output.finished,
            output.outputs,
            output.scheduled_s,
            output.prompt_logprobs is not None,
        )

    def output(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> RequestOutput:
        """Return the output."""
        return RequestOutput(
            self.request_id,
            prompt,
            prompt_token_ids,
            self.completions,
            self.finished,
            self.num_cached_tokens,
            self.scheduled_s,
            prompt_logprobs if self.has_prompt_logprobs else None,
        )


class OutputBatch(Message):
    """What is new in all requests."""

    updates: list[Update]


class PromptPiece(Message):
    """Log-probabilities of some tokens of a request's prompt, see ``PromptLogprobs.write``; small ones, so that no
    message keeps the event loop busy. All come before the first output that has them."""

    request_id: str
    first: int
    num_columns: int
    content: bytes
    """float32 ``[N, num_columns]``."""

    @classmethod
    def of(cls, request_id: str, first: int, words: LogprobWords) -> PromptPiece:
        """Return the message."""
        return cls(request_id, first, words.shape[1], words.tobytes())

    def words(self) -> LogprobWords:
        """Return what was sent, read-only."""
        return np.frombuffer(self.content, np.float32).reshape(-1, self.num_columns)


class AdapterAnswer(Message):
    """An adapter is loaded, or cannot be."""

    lora_id: int
    error: Error | None


class Refused(Message):
    """A request was not started."""

    request_id: str
    error: Error


class Counted(Message):
    """Counters and present load."""

    counters: Counters


Command = StartUp | TokenizerLoaded | Add | LoadAdapter | Unload | Abort | Ack | GetCounters | Stop
Answer = Ready | OutputBatch | PromptPiece | AdapterAnswer | Refused | Counted | Error
Read = TypeVar("Read", Command, Answer)


def _write(value: object) -> object:
    """Return in types of msgpack what is none of them."""
    if isinstance(value, np.generic):
        return value.item()
    for kind in (str, int, float):
        if isinstance(value, kind):
            # Of a subclass, which msgspec does not encode.
            return kind(value)
    return write_backend(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_write)
_commands = msgspec.msgpack.Decoder(Command, dec_hook=read_backend)
_answers = msgspec.msgpack.Decoder(Answer, dec_hook=read_backend)


def encode(message: Message) -> bytes:
    """Return a message with its header."""
    content = _encoder.encode(message)
    return HEADER.pack(len(content)) + content


def decode_command(content: bytes) -> Command:
    """Return what is said to an engine process.

    Raises:
        ValueError: it is no ``Command``.
    """
    return _commands.decode(content)


def decode_answer(content: bytes) -> Answer:
    """Return what an engine process says.

    Raises:
        ValueError: it is no ``Answer``.
    """
    return _answers.decode(content)


def read_message(stream: BinaryIO, decode: Callable[[bytes], Read]) -> Read | None:
    """Return the next message, or None at the end of the connection.

    Raises:
        ValueError: by ``decode``.
    """
    try:
        header = stream.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (length,) = HEADER.unpack(header)
        content = stream.read(length)
    except OSError:
        return None
    return decode(content) if len(content) == length else None
