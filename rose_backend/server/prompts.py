"""From what a body says to prompts and sampling parameters, checked before anything is tokenized or queued."""

from __future__ import annotations

import asyncio
import dataclasses
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import RequestError
from rose_backend.server.request_models import ChatCompletionRequest, CompletionRequest, GenerationRequest

T = TypeVar("T")

_SAMPLING_NAMES = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_MAX_INLINE_LENGTH = 8192
"""Longer texts are tokenized in a thread: meanwhile the event loop serves the streams of others."""


def read_prompts(value: Any, max_prompts: int, max_model_len: int) -> list[str | list[int]]:
    """Return the prompts of a completion request, each as text or as token ids.

    Lengths are looked at first, so that nobody can make the event loop look at millions of elements. Token ids are
    checked by the engine, and those of a prompt that does not fit the window not at all.

    Raises:
        RequestError: it is neither a prompt nor a list of them, or there are too many.
    """
    prompts: list[str | list[int]] = []
    if isinstance(value, str):
        prompts = [value]
    elif isinstance(value, list) and value:
        kind = type(value[0])
        if kind in (str, list):
            check_number("prompt", len(value), "prompts", max_prompts)
        is_too_long = kind is int and len(value) >= max_model_len
        if is_too_long or (kind in (int, str, list) and set(map(type, value)) == {kind}):
            prompts = [value] if kind is int else value
    if not prompts:
        raise RequestError(
            f"prompt: got {reprlib.repr(value)}, allowed are a string, a list of token ids, a list of strings and "
            "a list of lists of token ids",
            parameter="prompt",
        )
    return prompts


def read_token_ids(field: str, value: Any, max_number: int, vocab_size: int) -> list[int]:
    """Return a list of token ids, whose length has been checked before its elements.

    Raises:
        RequestError: it is no list of ids of the vocabulary, or too long.
    """
    if not isinstance(value, list):
        raise RequestError(
            f"{field}: got {reprlib.repr(value)}, allowed is a list of token ids", parameter=field
        )
    check_number(field, len(value), "token ids", max_number)
    if set(map(type, value)) <= {int} and min(value, default=0) >= 0 and max(value, default=0) < vocab_size:
        return value
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{field}.{index}: got {reprlib.repr(token_id)}, allowed are integers from 0 to {vocab_size - 1}",
                parameter=f"{field}.{index}",
            )
    return value


def check_number(field: str, number: int, what: str, limit: int) -> None:
    """Refuse more of something than ``limit``.

    Raises:
        RequestError: there are more.
    """
    if number > limit:
        raise RequestError(f"{field}: got {number} {what}, allowed are at most {limit}", parameter=field)


def sampling_params(body: GenerationRequest) -> SamplingParams:
    """Return what the request asks for; a field that is missing or null takes its default.

    Raises:
        RequestError: values that are fine each but not together.
    """
    names = body.model_fields_set & _SAMPLING_NAMES
    fields = {name: getattr(body, name) for name in names}
    given = {name: value for name, value in fields.items() if value is not None}
    if "max_tokens" in fields:
        given["max_tokens"] = fields["max_tokens"]
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "stream_options: got options without stream, allowed with stream set to true only",
            parameter="stream_options",
        )
    if isinstance(body, ChatCompletionRequest):
        given.pop("logprobs", None)
        given |= _chat_fields(body)
    elif isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        raise RequestError(
            "echo: got true together with logprobs, which is not supported; allowed is one of the two",
            parameter="echo",
        )
    return SamplingParams(**given)


def _chat_fields(body: ChatCompletionRequest) -> dict[str, Any]:
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise RequestError(
            f"max_tokens: got {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}, allowed is "
            "one of the two",
            parameter="max_tokens",
        )
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            f"top_logprobs: got {body.top_logprobs} without logprobs, allowed with logprobs set to true only",
            parameter="top_logprobs",
        )
    fields: dict[str, Any] = {"max_tokens": limits.pop() if limits else None}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    return fields


async def encode_prompts(
    prompts: Sequence[str | list[int]], tokenizer: Tokenizer, max_model_len: int
) -> list[list[int]]:
    """Return the token ids of each prompt.

    Raises:
        RequestError: a text is longer than any text that fits the model's window, or not valid Unicode.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    check_text_length("prompt", max(map(len, texts), default=0), tokenizer, max_model_len)

    def encode() -> list[list[int]]:
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    return await run_by_length(sum(map(len, texts)), encode)


def check_text_length(field: str, num_characters: int, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Refuse a text that cannot fit, before time is spent on it.

    Raises:
        RequestError: it is longer than a window full of the longest token.
    """
    limit = max_model_len * tokenizer.max_token_length
    if num_characters > limit:
        raise RequestError(
            f"{field}: got {num_characters} characters, allowed are at most {limit} (a window of {max_model_len} "
            f"tokens, none longer than {tokenizer.max_token_length} characters)",
            parameter=field,
        )


async def run_by_length(length: int, work: Callable[[], T]) -> T:
    """Do the work here, or in a thread when there are many characters or token ids."""
    return work() if length <= _MAX_INLINE_LENGTH else await asyncio.to_thread(work)
