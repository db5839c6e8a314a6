"""One request and its completions: state outside the step path."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from rose_backend.engine.outputs import CompletionOutput, FinishReason, Logprobs
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.tokenizer import Detokenizer
from rose_backend.errors import RequestError


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str | None]
    """Only requests with the same salt share cached prefixes: 1 to 128 characters, none of them @, /, \\ or NUL."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str | None]
    """As in ``TextPrompt``."""


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(slots=True, eq=False)
class CompletionText:
    """What the caller sees of a completion. Only the output thread touches it while the engine runs."""

    stream: Detokenizer | None
    """None when the text is only needed at the end, and a ``ByteLevelDecoder`` makes it."""
    logprobs: Logprobs | None
    """Those that are in no output yet; None unless asked for."""
    decoded_bytes: bytearray
    """Text of a completion without ``stream``, in UTF-8; first, the beginning of a character at the prompt's end."""
    token_ids: list[int] = field(default_factory=list)
    """Output so far; without ``Completion.needs_each_token``, until the end, what was sent in portions."""
    num_decoded: int = 0
    """Of these, how many ``stream`` has been given, or without one, ``decoded_bytes`` hold."""
    num_reported: int = 0
    """Of these, how many are in an output."""
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    final: CompletionOutput | None = None
    """The last output, until it is delivered."""
    is_decoded_lazily: bool = field(init=False)
    """No stop string or logprob needs single tokens: they are decoded when an output is made."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing will be added."""
        return self.finish_reason is not None

    def __post_init__(self) -> None:
        has_stop_strings = self.stream is not None and self.stream.has_stop_strings
        self.is_decoded_lazily = self.logprobs is None and not has_stop_strings


@dataclass(slots=True, eq=False)
class Completion:
    """One of a request's ``n`` completions: a sequence of tokens that holds one request slot while it runs.

    While it runs its tokens are in the slot's buffers; ``token_ids`` is written when it leaves the slot.
    Only the step loop touches it, but for ``text``.
    """

    request: Request
    index: int
    seed: int
    token_ids: NDArray[np.int32]
    """Prompt and output, as of the last time it had no slot."""
    text: CompletionText
    slot: int = -1
    num_siblings_to_fork: int = 0
    """Completions that are split off when this one has computed the prompt."""
    num_computed_before: int = 0
    """Tokens that were computed before a preemption took the slot away."""
    has_ended: bool = False
    """No further step computes anything for it."""
    num_sent_tokens: int = 0
    """Tokens sent to the output thread, counted where there are stop strings."""

    @property
    def needs_each_token(self) -> bool:
        """Whether each token goes to the output thread in its own step: streams, stop strings, logprobs."""
        params = self.request.params
        return self.request.is_streaming or bool(params.stop_strings) or params.logprobs is not None


@dataclass(slots=True, eq=False)
class Request:
    """A checked request. Built by ``InputProcessor``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: NDArray[np.int32]
    params: SamplingParams
    max_tokens: int
    is_streaming: bool
    namespace: bytes = b""
    """Of the prefix cache: only requests with the same one share cached tokens."""
    text_context: list[int] = field(default_factory=list)
    """Tokens of the prompt on which the text of its answers depends."""
    completions: list[Completion] = field(default_factory=list)
    num_cached_tokens: int | None = None
    """None until it first got a slot."""
    scheduled_s: float | None = None
    """``time.monotonic`` when it first got a slot."""
    is_aborted: bool = False
    has_output: bool = False
    """Its caller has been given an output. For the output thread."""
    _prompt_list: list[int] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether its last output can be made. For the output thread."""
        if self.is_aborted:
            return True
        if len(self.completions) != self.params.n:
            return False
        # Called for every output of every stream: a generator would take most of the time.
        for completion in self.completions:  # noqa: SIM110
            if completion.text.finish_reason is None:
                return False
        return True

    def prompt_list(self) -> list[int]:
        """Return the prompt's tokens as outputs have them; made at the first call, in any thread."""
        if self._prompt_list is None:
            self._prompt_list = self.prompt_token_ids.tolist()
        return self._prompt_list


def check_request_id(request_id: str, unfinished: Container[str]) -> None:
    """Raise RequestError if an unfinished request has the same id."""
    if request_id in unfinished:
        message = f"request_id: got {request_id!r}, which an unfinished request has"
        raise RequestError(message, parameter="request_id")
