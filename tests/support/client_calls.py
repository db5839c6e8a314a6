"""Calls of the clients that people use: the openai, anthropic, langchain and litellm packages, and a plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import httpx

from tests.support.patience import HANG_S

KEY = "unused"


class Call(NamedTuple):
    """One call of a client.

    Attributes:
        client: name of its package.
        what: the route, and what is asked of it.
        make: does it, at the server with this URL and model.
    """

    client: str
    what: str
    make: Callable[[str, str], object]

    @property
    def name(self) -> str:
        """How tests call it."""
        return f"{self.client} {self.what}"

    def outcome(self, url: str, model: str) -> str:
        """Return the name of the exception that the client raises, or "answered"."""
        try:
            self.make(url, model)
        except Exception as error:
            return f"{type(error).__module__}.{type(error).__name__}"
        return "answered"


def all_calls() -> Iterator[Call]:
    """Yield all calls, in an order that is always the same."""
    yield from openai_calls()
    yield from anthropic_calls()
    yield from langchain_calls()
    yield from litellm_calls()
    yield from plain_calls()


def _read(answer: Any) -> None:
    """Read a streamed answer to its end, or look at a whole one."""
    if hasattr(answer, "__next__"):
        for _ in answer:
            pass


QUESTION = "What is the capital of France?"
USER = {"role": "user", "content": QUESTION}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Tokyo"]}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5Erk"
    "Jggg=="
)
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": PARAMETERS}}
LONG_TEXT = "the city of roses " * 100

# Fields of both completions and chats.
SHARED: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "n": {"n": 2, "temperature": 0.7, "seed": 1},
    "stop": {"stop": "is"},
    "stops": {"stop": ["zebra", " is"]},
    "stop that never comes": {"stop": ["zebra"]},
    "no stops": {"stop": []},
    "seed": {"seed": 7, "temperature": 1.0},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"5": 3, "6": -100}},
    "top_p": {"top_p": 0.5},
    "user": {"user": "someone"},
    "text format": {"extra_body": {"response_format": {"type": "text"}}},
    "nulls": {"stop": None, "seed": None, "top_p": None, "logit_bias": None},
    "null n": {"n": None},
    "top_k and min_p": {"extra_body": {"top_k": 5, "min_p": 0.1}},
    "repetition_penalty": {"extra_body": {"repetition_penalty": 1.2}},
    "min_tokens": {"extra_body": {"min_tokens": 3}},
    "stop_token_ids": {"extra_body": {"stop_token_ids": [1199], "include_stop_str_in_output": True}},
    "ignore_eos": {"extra_body": {"ignore_eos": True}},
    "special tokens": {"extra_body": {"skip_special_tokens": False, "add_special_tokens": False}},
    "return_token_ids": {"extra_body": {"return_token_ids": True}},
    "truncate_prompt_tokens": {"extra_body": {"truncate_prompt_tokens": 5}},
    "allowed_token_ids": {"extra_body": {"allowed_token_ids": [300, 301, 302]}},
    "bad_words": {"extra_body": {"bad_words": ["Paris"]}},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["red", "white"]}}},
    "regex": {"extra_body": {"structured_outputs": {"regex": "[0-9]{3}"}}},
    "json": {"max_tokens": 30, "extra_body": {"structured_outputs": {"json": PARAMETERS}}},
    "grammar": {"extra_body": {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}},
    "cache_salt": {"extra_body": {"cache_salt": "tenant"}},
    "priority": {"extra_body": {"priority": 0, "request_id": "mine"}},
    "prompt_logprobs": {"extra_body": {"prompt_logprobs": 1}},
    "unknown field": {"extra_body": {"zzzzzz": 1}},
    "numbers as texts": {"temperature": "0.0", "max_tokens": "4"},
}
SHARED_STREAMS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "n": {"n": 2, "temperature": 0.7, "seed": 1},
    "stop": {"stop": "is"},
    "stop_token_ids": {"extra_body": {"stop_token_ids": [1199]}},
    "return_token_ids": {"extra_body": {"return_token_ids": True}},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["red", "white"]}}},
}
SHARED_MISTAKES: dict[str, dict[str, Any]] = {
    "negative temperature": {"temperature": -1},
    "temperature of a word": {"temperature": "hot"},
    "top_p 0": {"top_p": 0},
    "top_p 2": {"top_p": 2},
    "n 0": {"n": 0},
    "n -1": {"n": -1},
    "n of a word": {"n": "two"},
    "max_tokens -1": {"max_tokens": -1},
    "max_tokens of a word": {"max_tokens": "many"},
    "max_tokens beyond the window": {"max_tokens": 100_000},
    "huge max_tokens": {"max_tokens": 1 << 40},
    "stop of a number": {"stop": 5},
    "empty stop": {"stop": ""},
    "seed of a word": {"seed": "x"},
    "huge seed": {"seed": 1 << 70},
    "presence_penalty 5": {"presence_penalty": 5},
    "frequency_penalty -5": {"frequency_penalty": -5},
    "logit_bias of a word": {"logit_bias": {"word": 1}},
    "logit_bias beyond the vocabulary": {"logit_bias": {"99999": 1}},
    "unknown model": {"model": "no-such-model"},
    "stream_options without stream": {"stream_options": {"include_usage": True}},
    "stream of a word": {"stream": "maybe"},
    "unknown format": {"extra_body": {"response_format": {"type": "yaml"}}},
    "format without schema": {"extra_body": {"response_format": {"type": "json_schema"}}},
    "top_k -5": {"extra_body": {"top_k": -5}},
    "min_p 2": {"extra_body": {"min_p": 2}},
    "repetition_penalty 0": {"extra_body": {"repetition_penalty": 0}},
    "min_tokens beyond max_tokens": {"extra_body": {"min_tokens": 50}},
    "negative min_tokens": {"extra_body": {"min_tokens": -1}},
    "allowed_token_ids none": {"extra_body": {"allowed_token_ids": []}},
    "allowed_token_ids beyond the vocabulary": {"extra_body": {"allowed_token_ids": [99_999]}},
    "bad regex": {"extra_body": {"structured_outputs": {"regex": "("}}},
    "two structured outputs": {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}},
    "no structured output": {"extra_body": {"structured_outputs": {}}},
    "bad schema": {"extra_body": {"structured_outputs": {"json": {"type": "thing"}}}},
    "bad grammar": {"extra_body": {"structured_outputs": {"grammar": "root ::= ("}}},
    "truncate_prompt_tokens beyond the window": {"extra_body": {"truncate_prompt_tokens": 100_000}},
    "prompt_logprobs in a stream": {"stream": True, "extra_body": {"prompt_logprobs": 1}},
    "empty cache_salt": {"extra_body": {"cache_salt": ""}},
    "misspelt field": {"extra_body": {"temprature": 1}},
}


@cache
def openai_client(url: str) -> Any:
    """Return a client of OpenAI's that asks once."""
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=HANG_S)


def openai_calls() -> Iterator[Call]:
    """Yield the calls of OpenAI's client."""
    for what, fields in _openai_bodies("chat", _CHAT_FIELDS):
        yield Call("openai", f"chat: {what}", partial(_chat, fields))
    for what, fields in _openai_bodies("completion", _COMPLETION_FIELDS):
        yield Call("openai", f"completion: {what}", partial(_complete, fields))
    for what, fields in _RESPONSES.items():
        yield Call("openai", f"response: {what}", partial(_respond, fields))
    yield Call("openai", "models", lambda url, model: openai_client(url).models.list())
    for name in ("scripted", "no-such-model"):
        yield Call("openai", f"model {name}", partial(_retrieve, name))
    yield Call("openai", "response: retrieve", lambda url, _: openai_client(url).responses.retrieve("resp_1"))


def _openai_bodies(kind: str, own: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from SHARED.items()
    for what, fields in SHARED_STREAMS.items():
        yield f"{what}, streamed", {**fields, "stream": True}
    yield from SHARED_MISTAKES.items()
    yield from own.items()


def _chat(fields: Mapping[str, Any], url: str, model: str) -> None:
    body = {"model": model, "messages": [USER], "max_tokens": 6, "temperature": 0, **fields}
    _read(openai_client(url).chat.completions.create(**body))


def _complete(fields: Mapping[str, Any], url: str, model: str) -> None:
    body = {"model": model, "prompt": "The capital", "max_tokens": 6, "temperature": 0, **fields}
    _read(openai_client(url).completions.create(**body))


def _respond(fields: Mapping[str, Any], url: str, model: str) -> None:
    body = {"model": model, "input": QUESTION, "max_output_tokens": 6, "temperature": 0, **fields}
    _read(openai_client(url).responses.create(**body))


def _retrieve(name: str, url: str, model: str) -> None:
    openai_client(url).models.retrieve(name)


_CHAT_FIELDS: dict[str, dict[str, Any]] = {
    "to its end": {"max_tokens": 60},
    "no limit": {"max_tokens": None},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "turns": {"messages": [USER, {"role": "assistant", "content": "Paris."}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]},
    "name": {"messages": [{**USER, "name": "Ann"}]},
    "both limits": {"max_completion_tokens": 3},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs, streamed": {"logprobs": True, "top_logprobs": 2, "stream": True},
    "tokens as ids": {"logprobs": True, "extra_body": {"return_tokens_as_token_ids": True}},
    "json_object": {"max_tokens": 12, "response_format": {"type": "json_object"}},
    "json_schema": {"max_tokens": 30, "response_format": SCHEMA_FORMAT},
    "json_schema, streamed": {"max_tokens": 30, "response_format": SCHEMA_FORMAT, "stream": True},
    "tools": {"tools": [TOOL]},
    "tools, streamed": {"tools": [TOOL], "stream": True},
    "tools, none": {"tools": [TOOL], "tool_choice": "none"},
    "tools, auto": {"tools": [TOOL], "tool_choice": "auto", "max_tokens": 60},
    "tools, required": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
    "tools, required, streamed": {
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 60,
        "stream": True,
    },
    "tools, named": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 60,
    },
    "tools, named, streamed": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 60,
        "stream": True,
    },
    "tools, required, cut off": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 4},
    "tools, one at a time": {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 60,
    },
    "tools, history": {
        "tools": [TOOL],
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
    },
    "store and metadata": {"store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
    "effort none": {"reasoning_effort": "none"},
    "effort low": {"reasoning_effort": "low"},
    "modalities": {"modalities": ["text"]},
    "no generation prompt": {"extra_body": {"add_generation_prompt": False}},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "The capital"}],
        "extra_body": {"add_generation_prompt": False, "continue_final_message": True},
    },
    "template variables": {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    "include_reasoning": {"extra_body": {"include_reasoning": False}},
    "echo": {"extra_body": {"echo": True}},
    "continued with echo": {
        "messages": [USER, {"role": "assistant", "content": "The capital"}],
        "extra_body": {"add_generation_prompt": False, "continue_final_message": True, "echo": True},
    },
    "continued with echo, streamed": {
        "messages": [USER, {"role": "assistant", "content": "The capital"}],
        "extra_body": {"add_generation_prompt": False, "continue_final_message": True, "echo": True},
        "stream": True,
    },
    # Mistakes.
    "no messages": {"messages": []},
    "messages of a text": {"messages": "hello"},
    "message without a role": {"messages": [{"content": "hello"}]},
    "unknown role": {"messages": [{"role": "pirate", "content": "hello"}]},
    "message without content": {"messages": [{"role": "user"}]},
    "content of a number": {"messages": [{"role": "user", "content": 5}]},
    "image": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]
    },
    "audio": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
            }
        ]
    },
    "unknown part": {"messages": [{"role": "user", "content": [{"type": "smell", "smell": "rose"}]}]},
    "too long": {"messages": [{"role": "user", "content": LONG_TEXT}]},
    "max_tokens 0": {"max_tokens": 0},
    "max_completion_tokens 0": {"max_completion_tokens": 0},
    "top_logprobs without logprobs": {"top_logprobs": 2},
    "top_logprobs 100": {"logprobs": True, "top_logprobs": 100},
    "top_logprobs -2": {"logprobs": True, "top_logprobs": -2},
    "logprobs of a number": {"logprobs": 5},
    "tools none": {"tools": []},
    "tool without a function": {"tools": [{"type": "function"}]},
    "tool without a name": {"tools": [{"type": "function", "function": {}}]},
    "unknown kind of tool": {"tools": [{"type": "web_search"}]},
    "tools of a text": {"tools": "get_weather"},
    "tool with a bad schema": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}],
        "tool_choice": "required",
    },
    "unknown tool_choice": {"tools": [TOOL], "tool_choice": "perhaps"},
    "tool_choice of an unknown tool": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "sunset"}},
    },
    "tool_choice required without tools": {"tool_choice": "required"},
    "tool_choice auto without tools": {"tool_choice": "auto"},
    "named tool_choice without tools": {
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}}
    },
    "unknown effort": {"reasoning_effort": "heroic"},
    "continued with a generation prompt": {
        "extra_body": {"add_generation_prompt": True, "continue_final_message": True}
    },
}
_COMPLETION_FIELDS: dict[str, dict[str, Any]] = {
    "no limit": {"max_tokens": None},
    "token ids": {"prompt": [300, 301, 302]},
    "two prompts": {"prompt": ["The capital", "A rose"]},
    "two prompts of ids": {"prompt": [[300, 301], [302]]},
    "two prompts, streamed": {"prompt": ["The capital", "A rose"], "stream": True},
    "echo": {"echo": True},
    "echo, streamed": {"echo": True, "stream": True},
    "echo alone": {"echo": True, "max_tokens": 0},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "logprobs": {"logprobs": 2},
    "logprobs 0": {"logprobs": 0},
    "logprobs, streamed": {"logprobs": 2, "stream": True},
    "tokens as ids": {"logprobs": 1, "extra_body": {"return_tokens_as_token_ids": True}},
    "json_object": {"max_tokens": 12, "extra_body": {"response_format": {"type": "json_object"}}},
    "best_of 1": {"best_of": 1},
    # Mistakes.
    "best_of 3": {"best_of": 3},
    "suffix": {"suffix": "the end"},
    "empty prompt": {"prompt": ""},
    "no prompts": {"prompt": []},
    "prompt of null": {"prompt": None},
    "prompt of a number": {"prompt": 5},
    "mixed prompt": {"prompt": ["a", 5]},
    "id beyond the vocabulary": {"prompt": [99_999]},
    "negative id": {"prompt": [-1]},
    "too long": {"prompt": LONG_TEXT},
    "too many ids": {"prompt": [300] * 600},
    "max_tokens 0": {"max_tokens": 0},
    "logprobs 100": {"logprobs": 100},
    "logprobs -2": {"logprobs": -2},
    "logprobs of a word": {"logprobs": "some"},
}
_FLAT_TOOL = {"type": "function", **FUNCTION, "strict": False}
_RESPONSES: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "to its end": {"max_output_tokens": 60},
    "to its end, streamed": {"max_output_tokens": 60, "stream": True},
    "cut off, streamed": {"stream": True},
    "instructions": {"instructions": "Be brief."},
    "messages": {"input": [USER, {"role": "assistant", "content": "Paris."}, USER]},
    "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]},
    "metadata": {"metadata": {"a": "b"}, "user": "someone", "store": False},
    "text format": {"text": {"format": {"type": "text"}}},
    "json_schema": {
        "max_output_tokens": 30,
        "text": {"format": {"type": "json_schema", "name": "city", "schema": PARAMETERS}},
    },
    "tools": {"tools": [_FLAT_TOOL]},
    "tools, none": {"tools": [_FLAT_TOOL], "tool_choice": "none"},
    "tools, required": {"tools": [_FLAT_TOOL], "tool_choice": "required", "max_output_tokens": 60},
    "tools, required, streamed": {
        "tools": [_FLAT_TOOL],
        "tool_choice": "required",
        "max_output_tokens": 60,
        "stream": True,
    },
    "tools, history": {
        "tools": [_FLAT_TOOL],
        "input": [
            USER,
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "get_weather",
                "arguments": '{"city": "Paris"}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
    },
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "effort": {"reasoning": {"effort": "low"}},
    "truncation": {"truncation": "auto"},
    "top_p": {"top_p": 0.5, "temperature": 0.5},
    "parallel": {"parallel_tool_calls": False},
    # Mistakes.
    "too long": {"input": LONG_TEXT},
    "no input": {"input": []},
    "input of a number": {"input": 5},
    "unknown model": {"model": "no-such-model"},
    "negative temperature": {"temperature": -1},
    "max_output_tokens of a word": {"max_output_tokens": "many"},
    "max_output_tokens 0": {"max_output_tokens": 0},
    "unknown role": {"input": [{"role": "pirate", "content": "hello"}]},
    "previous response": {"previous_response_id": "resp_1"},
    "background": {"background": True},
    "unknown tool_choice": {"tools": [_FLAT_TOOL], "tool_choice": "perhaps"},
    "tool without a name": {"tools": [{"type": "function"}]},
    "image": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE, "detail": "low"}]}]
    },
    "bad schema": {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "thing"}}}},
}


@cache
def anthropic_client(url: str) -> Any:
    """Return a client of Anthropic's that asks once."""
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=HANG_S)


def anthropic_calls() -> Iterator[Call]:
    """Yield the calls of Anthropic's client."""
    for what, fields in _MESSAGES.items():
        yield Call("anthropic", f"message: {what}", partial(_message, fields))
    for what, fields in _COUNTS.items():
        yield Call("anthropic", f"count: {what}", partial(_count, fields))
    yield Call("anthropic", "models", lambda url, model: anthropic_client(url).models.list())


def _message(fields: Mapping[str, Any], url: str, model: str) -> None:
    body = {"model": model, "messages": [USER], "max_tokens": 6, **fields}
    # The client's own method warns of temperatures, which it does not know; the field goes over the wire all the same.
    body["extra_body"] = {"temperature": 0, **body.get("extra_body", {})}
    _read(anthropic_client(url).messages.create(**body))


def _count(fields: Mapping[str, Any], url: str, model: str) -> None:
    anthropic_client(url).messages.count_tokens(**{"model": model, "messages": [USER], **fields})


_SCHEMA_TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}
_MESSAGES: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "streamed": {"stream": True},
    "to its end": {"max_tokens": 60},
    "to its end, streamed": {"max_tokens": 60, "stream": True},
    "system": {"system": "Be brief."},
    "system in blocks": {"system": [{"type": "text", "text": "Be brief."}]},
    "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]},
    "turns": {"messages": [USER, {"role": "assistant", "content": "Paris."}, USER]},
    "stop": {"stop_sequences": ["is"]},
    "stop, streamed": {"stop_sequences": ["is"], "stream": True},
    "top_k": {"extra_body": {"top_k": 5, "top_p": 0.5}},
    "metadata": {"metadata": {"user_id": "someone"}},
    "tools": {"tools": [_SCHEMA_TOOL]},
    "tools, none": {"tools": [_SCHEMA_TOOL], "tool_choice": {"type": "none"}},
    "tools, any": {"tools": [_SCHEMA_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60},
    "tools, any, streamed": {
        "tools": [_SCHEMA_TOOL],
        "tool_choice": {"type": "any"},
        "max_tokens": 60,
        "stream": True,
    },
    "tools, named": {
        "tools": [_SCHEMA_TOOL],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "max_tokens": 60,
    },
    "tools, history": {
        "tools": [_SCHEMA_TOOL],
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}],
            },
        ],
    },
    # Mistakes.
    "no messages": {"messages": []},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens -1": {"max_tokens": -1},
    "max_tokens of a word": {"max_tokens": "many"},
    "max_tokens beyond the window": {"max_tokens": 100_000},
    "unknown model": {"model": "no-such-model"},
    "unknown role": {"messages": [{"role": "pirate", "content": "hello"}]},
    "message without content": {"messages": [{"role": "user"}]},
    "image": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {
                            "type": "base64",
                            "media_type": "image/png",
                            "data": IMAGE.partition(",")[2],
                        },
                    }
                ],
            }
        ]
    },
    "too long": {"messages": [{"role": "user", "content": LONG_TEXT}]},
    "negative temperature": {"extra_body": {"temperature": -1}},
    "temperature of a word": {"extra_body": {"temperature": "hot"}},
    "tool without a schema": {"tools": [{"name": "get_weather"}]},
    "unknown tool_choice": {"tools": [_SCHEMA_TOOL], "tool_choice": {"type": "perhaps"}},
    "tool_choice of an unknown tool": {
        "tools": [_SCHEMA_TOOL],
        "tool_choice": {"type": "tool", "name": "sunset"},
    },
    "tool_choice without tools": {"tool_choice": {"type": "any"}},
    "thinking with a budget": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
}
_COUNTS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "system": {"system": "Be brief."},
    "tools": {"tools": [_SCHEMA_TOOL]},
    "no messages": {"messages": []},
    "unknown model": {"model": "no-such-model"},
}


def langchain_calls() -> Iterator[Call]:
    """Yield the calls of LangChain's chat models."""
    history = [("system", "Be brief."), ("human", QUESTION), ("ai", "Paris."), ("human", QUESTION)]
    ways: dict[str, Callable[[Any], object]] = {
        "invoke": lambda chat: chat.invoke(QUESTION),
        "stream": lambda chat: list(chat.stream(QUESTION)),
        "batch": lambda chat: chat.batch([QUESTION], config={"max_concurrency": 1}),
        "history": lambda chat: chat.invoke(history),
        "bind": lambda chat: chat.bind(stop=["is"]).invoke(QUESTION),
        "tools": lambda chat: chat.bind_tools([TOOL]).invoke(QUESTION),
        "tool_choice": lambda chat: chat.bind_tools([TOOL], tool_choice="get_weather").invoke(QUESTION),
        "any tool": lambda chat: chat.bind_tools([TOOL], tool_choice="any").invoke(QUESTION),
        "any tool, stream": lambda chat: list(chat.bind_tools([TOOL], tool_choice="any").stream(QUESTION)),
        "structured output": lambda chat: chat.with_structured_output({"title": "city", **PARAMETERS}).invoke(
            QUESTION
        ),
        "empty": lambda chat: chat.invoke([]),
        "too long": lambda chat: chat.invoke(LONG_TEXT),
        "unknown model": lambda chat: chat.bind(model="no-such-model").invoke(QUESTION),
        "image": lambda chat: chat.invoke(
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": IMAGE}}],
                }
            ]
        ),
    }
    makers = {
        "ChatOpenAI": _chat_openai,
        "ChatOpenAI, responses": _chat_responses,
        "ChatAnthropic": _chat_anthropic,
    }
    for kind, maker in makers.items():
        for what, way in ways.items():
            yield Call("langchain", f"{kind}: {what}", partial(_in_langchain, maker, way))


def _in_langchain(
    maker: Callable[[str, str], Any], way: Callable[[Any], object], url: str, model: str
) -> None:
    way(maker(url, model))


def _chat_openai(url: str, model: str) -> Any:
    from langchain_openai import ChatOpenAI

    options: Any = {"base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0}
    return ChatOpenAI(model=model, temperature=0, max_tokens=40, **options)


def _chat_responses(url: str, model: str) -> Any:
    return _chat_openai(url, model).model_copy(update={"use_responses_api": True})


def _chat_anthropic(url: str, model: str) -> Any:
    from langchain_anthropic import ChatAnthropic

    options: Any = {"base_url": url, "api_key": KEY, "max_retries": 0}
    return ChatAnthropic(model=model, temperature=0, max_tokens=40, **options)


def litellm_calls() -> Iterator[Call]:
    """Yield the calls of LiteLLM."""
    chats: dict[str, dict[str, Any]] = {
        "nothing else": {},
        "streamed": {"stream": True},
        "usage, streamed": {"stream": True, "stream_options": {"include_usage": True}},
        "tools": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
        "json_schema": {"response_format": SCHEMA_FORMAT, "max_tokens": 30},
        "logprobs": {"logprobs": True, "top_logprobs": 2},
        "n": {"n": 2, "temperature": 0.7},
        "unknown model": {"model": "no-such-model"},
        "too long": {"messages": [{"role": "user", "content": LONG_TEXT}]},
        "negative temperature": {"temperature": -1},
        "no messages": {"messages": []},
    }
    for provider in ("hosted_vllm", "openai", "anthropic"):
        for what, fields in chats.items():
            if provider == "anthropic" and what in ("logprobs", "n", "json_schema", "no messages"):
                continue
            yield Call("litellm", f"{provider}: {what}", partial(_in_litellm, provider, fields))
    for what, fields in chats.items():
        if "messages" not in fields and what in (
            "nothing else",
            "streamed",
            "unknown model",
            "negative temperature",
        ):
            yield Call(
                "litellm", f"completion: {what}", partial(_in_litellm, "text-completion-openai", fields)
            )


def _in_litellm(provider: str, fields: Mapping[str, Any], url: str, model: str) -> None:
    import litellm

    litellm.suppress_debug_info = True
    body = {"model": model, "messages": [USER], "max_tokens": 6, "temperature": 0, **fields}
    body["model"] = f"{provider}/{body['model']}"
    root = url if provider == "anthropic" else f"{url}/v1"
    if provider == "text-completion-openai":
        body["prompt"] = "The capital"
        del body["messages"]
        _read(litellm.text_completion(api_base=root, api_key=KEY, num_retries=0, **body))
        return
    _read(litellm.completion(api_base=root, api_key=KEY, num_retries=0, max_retries=0, **body))


def plain_calls() -> Iterator[Call]:
    """Yield requests that no client sends."""
    good = '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}'
    requests: dict[str, tuple[str, str, object]] = {
        "tokenize": ("POST", "/tokenize", {"prompt": "A rose"}),
        "tokenize with texts": ("POST", "/tokenize", {"prompt": "A rose", "return_token_strs": True}),
        "tokenize a conversation": ("POST", "/tokenize", {"messages": [USER]}),
        "tokenize nothing": ("POST", "/tokenize", {}),
        "tokenize a number": ("POST", "/tokenize", {"prompt": 5}),
        "tokenize for an unknown model": ("POST", "/tokenize", {"prompt": "A", "model": "no-such-model"}),
        "detokenize": ("POST", "/detokenize", {"tokens": [300, 301]}),
        "detokenize a text": ("POST", "/detokenize", {"tokens": "rose"}),
        "detokenize a negative id": ("POST", "/detokenize", {"tokens": [-1]}),
        "no JSON": ("POST", "/v1/chat/completions", "{"),
        "empty": ("POST", "/v1/chat/completions", ""),
        "a list": ("POST", "/v1/chat/completions", "[]"),
        "nothing": ("POST", "/v1/chat/completions", "{}"),
        "no model": ("POST", "/v1/chat/completions", good),
        "no prompt": ("POST", "/v1/completions", "{}"),
        "no input": ("POST", "/v1/responses", "{}"),
        "no message": ("POST", "/v1/messages", "{}"),
        "another method": ("GET", "/v1/chat/completions", ""),
        "another route": ("GET", "/v1/nowhere", ""),
        "health": ("GET", "/health", ""),
        "ping": ("GET", "/ping", ""),
        "version": ("GET", "/version", ""),
    }
    for what, (method, path, body) in requests.items():
        yield Call("plain", what, partial(_send, method, path, body))


def _send(method: str, path: str, body: object, url: str, model: str) -> None:
    how: dict[str, Any] = {"json": body}
    if isinstance(body, str):
        how = {"content": body, "headers": {"Content-Type": "application/json"}}
    httpx.request(method, f"{url}{path}", timeout=HANG_S, **how)
