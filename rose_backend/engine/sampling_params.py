"""Sampling parameters and stop conditions of one request. Names and meaning are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from rose_backend.config import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    is_unicode,
)
from rose_backend.engine.structured_outputs import StructuredOutputsParams
from rose_backend.errors import RequestError, nearest_name_hint

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy."""

_MAX_INT32 = 2**31 - 1


class Range(NamedTuple):
    """Numbers that are allowed; integers if the bounds are."""

    low: float
    high: float
    above_low: bool = False
    """``low`` itself is not."""


RANGES = {
    "n": Range(1, MAX_N),
    "max_tokens": Range(1, _MAX_INT32),
    "min_tokens": Range(0, _MAX_INT32),
    "temperature": Range(0.0, MAX_TEMPERATURE),
    "top_k": Range(-1, _MAX_INT32),
    "top_p": Range(0.0, 1.0, above_low=True),
    "min_p": Range(0.0, 1.0),
    "seed": Range(0, 2**63 - 1),
    "repetition_penalty": Range(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": Range(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": Range(-MAX_PENALTY, MAX_PENALTY),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
}
"""Of fields of ``SamplingParams``."""
TOKEN_IDS = Range(0, _MAX_INT32)
"""Of any model."""
BIASES = Range(-1e30, 1e30)
"""Of logits: sums and products with penalties stay finite float32 numbers."""
_MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping options of one request.

    Every value is checked here where that is possible without a model, the rest when the request is submitted.

    Raises:
        RequestError: names the field, what was got and what is allowed.
    """

    n: int = 1
    """Completions of the prompt; number ``i`` draws with ``seed + i``."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None fills the model's window."""
    min_tokens: int = 0
    """No stop token may be drawn and no stop string ends the text before this many tokens."""
    temperature: float = 1.0
    """0 to 1000; below 1e-5 the most likely token is taken."""
    top_k: int = 0
    """Draw among the k most likely tokens; 0 and -1 switch this off."""
    top_p: float = 1.0
    """Above 0 up to 1; draw among the most likely tokens that reach this probability together."""
    min_p: float = 0.0
    """0 to 1; leave out tokens less likely than this share of the most likely one."""
    seed: int | None = None
    """Seed of the draws; None derives one from the engine's seed and the number of the request."""
    repetition_penalty: float = 1.0
    """0.01 to 100; above 1 makes tokens of the prompt and the output less likely."""
    presence_penalty: float = 0.0
    """-2 to 2; subtracted from the logit of every token that the output contains."""
    frequency_penalty: float = 0.0
    """-2 to 2; subtracted once for each time the output contains the token."""
    logit_bias: Mapping[int, float] | None = None
    """Numbers that are added to the logits of tokens; token ids may be texts, as in JSON."""
    allowed_token_ids: Sequence[int] | None = None
    """Draw only these tokens."""
    bad_words: Sequence[str] | None = None
    """Words that are not drawn, with or without a space before them: not the last token of one, after its others."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text, wherever token boundaries fall."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the text like the model's end-of-text token."""
    ignore_eos: bool = False
    """Continue after the end-of-text token."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the text."""
    logprobs: int | None = None
    """Report each token's log-probability and this many of the most likely tokens; None reports none."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, all but the first. No cached prefix is used then, as in vLLM."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured_outputs: StructuredOutputsParams | None = None
    """JSON, a match of an expression, a choice or a text of a grammar: nothing else can be drawn, then an end token."""

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                _check_number(name, value, allowed)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        self._check_stops()
        self._check_processors()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "true and false")
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            raise _refusal("structured_outputs", self.structured_outputs, "StructuredOutputsParams and None")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any], *, source: str) -> SamplingParams:
        """Build from user-supplied fields.

        Args:
            options: field name to value.
            source: how to call the place the fields came from in an error.

        Raises:
            RequestError: unknown field (the nearest valid one is named) or bad value.
        """
        valid = [field.name for field in fields(cls)]
        for name in options:
            if name not in valid:
                hint = nearest_name_hint(name, valid)
                raise RequestError(
                    f"{source}: unknown sampling option {name!r}{hint} (valid: {', '.join(valid)})",
                    parameter=name,
                )
        given = dict(options)
        if isinstance(given.get("structured_outputs"), Mapping):
            given["structured_outputs"] = StructuredOutputsParams.from_mapping(given["structured_outputs"])
        return cls(**given)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, empty for None."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_processors(self) -> bool:
        """Whether bias, allowed tokens or bad words change the logits."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words)

    def check_against_model(
        self, *, prompt_length: int, vocab_size: int, max_model_len: int, max_num_seqs: int
    ) -> None:
        """Check what depends on the model and on the prompt's length, in tokens.

        Raises:
            RequestError: a value is too large for this model, this engine or this prompt.
        """
        room = max_model_len - prompt_length
        if self.max_tokens is not None and self.max_tokens > room:
            raise _refusal(
                "max_tokens",
                self.max_tokens,
                f"at most {room} after a prompt of {prompt_length} tokens in a window of {max_model_len}",
            )
        if self.min_tokens > room:
            raise _refusal("min_tokens", self.min_tokens, f"at most {room} after this prompt")
        if self.n > max_num_seqs:
            raise _refusal("n", self.n, f"at most {max_num_seqs}, the engine's max_num_seqs")
        if self.top_k > vocab_size:
            raise _refusal("top_k", self.top_k, f"-1 to {vocab_size}, the size of the vocabulary")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise _refusal(name, token_id, f"ids from 0 to {vocab_size - 1}")

    def _check_stops(self) -> None:
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise _refusal("stop", self.stop, "a string, a list of strings and None")
        _check_count("stop", self.stop_strings, MAX_STOP_STRINGS, "strings")
        for text in self.stop_strings:
            if not is_unicode(text) or not 1 <= len(text) <= MAX_STOP_STRING_LENGTH:
                raise _refusal("stop", text, f"strings of 1 to {MAX_STOP_STRING_LENGTH} Unicode characters")
        _check_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)

    def _check_processors(self) -> None:
        _check_token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _refusal("allowed_token_ids", self.allowed_token_ids, "at least one token id, and None")
        if not isinstance(self.logit_bias, (Mapping, type(None))):
            raise _refusal("logit_bias", self.logit_bias, "a mapping of token ids to numbers and None")
        if self.logit_bias is not None:
            _check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIAS_TOKENS, "tokens")
            biases = {_token_id_of("logit_bias", key): value for key, value in self.logit_bias.items()}
            for token_id, value in biases.items():
                _check_number("logit_bias", token_id, TOKEN_IDS)
                _check_number("logit_bias", value, BIASES)
            biases = {token_id: float(value) for token_id, value in biases.items()}
            object.__setattr__(self, "logit_bias", biases)
        if not isinstance(self.bad_words, (list, tuple, type(None))):
            raise _refusal("bad_words", self.bad_words, "a list of strings and None")
        _check_count("bad_words", self.bad_words or (), MAX_BAD_WORDS, "words")
        for word in self.bad_words or ():
            if not is_unicode(word) or not 1 <= len(word) <= MAX_BAD_WORD_LENGTH:
                raise _refusal("bad_words", word, f"strings of 1 to {MAX_BAD_WORD_LENGTH} Unicode characters")


def _check_token_ids(name: str, token_ids: object, most: int) -> None:
    if not isinstance(token_ids, (list, tuple, type(None))):
        raise _refusal(name, token_ids, "a list of token ids and None")
    _check_count(name, token_ids or (), most, "ids")
    for token_id in token_ids or ():
        _check_number(name, token_id, TOKEN_IDS)


def _check_count(name: str, values: Sized, most: int, noun: str) -> None:
    if len(values) > most:
        raise _refusal(name, values, f"at most {most}", shown=f"{len(values)} {noun}")


def _token_id_of(name: str, key: object) -> object:
    try:
        return int(key) if isinstance(key, str) else key
    except ValueError:
        raise _refusal(name, key, "token ids as keys") from None


def _check_number(name: str, value: object, allowed: Range) -> None:
    low, high, above_low = allowed
    is_integral = isinstance(low, int)
    is_number = isinstance(value, int if is_integral else (int, float)) and not isinstance(value, bool)
    # Comparing instead of converting keeps an int too large for a float from raising.
    if is_number and low <= value <= high and not (above_low and value == low):  # type: ignore[operator]
        return
    start = "above" if above_low else "from"
    what = f"an integer from {low} to {high}" if is_integral else f"a number {start} {low:g} to {high:g}"
    raise _refusal(name, value, what)


def _refusal(name: str, value: object, allowed: str, *, shown: str | None = None) -> RequestError:
    got = _shorten(value) if shown is None else shown
    return RequestError(f"{name}: got {got}, allowed is {allowed}", parameter=name, value=value)


def _shorten(value: object) -> str:
    # str() of a huge int raises; a request must not be able to trigger that.
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
