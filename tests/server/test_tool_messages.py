"""Histories with tool calls and their results, as agents send them: what templates get of them, and refusals."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from vllm.renderers.chat_utils import parse_chat_messages

from rose_backend.errors import RequestError
from rose_backend.server.chat_template import parse_arguments, plain_messages
from rose_backend.server.protocol import ChatMessage
from tests.server.live_server import GREEDY, LiveServer, check_refused


def called(arguments: object, **fields: object) -> dict[str, Any]:
    function = {"name": "find", "arguments": arguments}
    calls = [{"id": "call-1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def for_template(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plain = plain_messages([ChatMessage(**each) for each in messages])
    parse_arguments(plain)
    return plain


@pytest.mark.parametrize(
    "message",
    [
        called('{"where": ["a", {"b": null}]}'),
        called({"where": None}),
        called(""),
        called(None),
        called("{"),
        called("[1]"),
        called("9" * 5000),
        called("{}", content="I look.", name="Ann"),
        {"role": "assistant", "tool_calls": [], "content": "a"},
        {"role": "assistant", "reasoning_content": "hm", "content": "a"},
        {"role": "assistant", "reasoning": "hm", "reasoning_content": "no", "content": "a"},
        {"role": "tool", "tool_call_id": "call-1", "content": "found"},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "tool", "tool_call_id": "call-1", "name": "find", "content": None},
        {"role": "developer", "content": "Be kind."},
    ],
    ids=lambda message: json.dumps(message)[:60],
)
def test_templates_get_what_vllm_gives_them(message: dict[str, Any]) -> None:
    sent = copy.deepcopy(message)
    reasoning = sent.pop("reasoning_content", None)  # as vLLM's model of a request does
    if reasoning is not None:
        sent.setdefault("reasoning", reasoning)
    try:
        (expected,), *_ = parse_chat_messages([sent], _NoImages(), content_format="string")  # type: ignore[arg-type, list-item]
    except ValueError:
        expected = {**for_template([called("{}")])[0]}  # vLLM fails on integers of too many digits
    if message["role"] == "developer":
        expected.pop("tools")  # type: ignore[typeddict-item]
    assert for_template([message]) == [expected]


class _NoImages:
    enable_prompt_embeds = False
    multimodal_config = None
    hf_config = None
    allowed_local_media_path = ""
    allowed_media_domains = None


def test_a_history_reaches_the_template(server: LiveServer) -> None:
    history = [
        {"role": "user", "content": "Where?"},
        called('{"a": 1}'),
        {"role": "tool", "tool_call_id": "call-1", "content": "Here."},
    ]
    plain = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": ""}]
    plain.append({"role": "user", "content": "Here."})
    counts = [
        server.post("/v1/chat/completions", {"messages": each, **GREEDY}).json()["usage"]["prompt_tokens"]
        for each in (history, plain)
    ]
    # The template of these tests shows role and content: "tool" and "user" take a token or two.
    assert abs(counts[0] - counts[1]) <= 3


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        (called(5), "messages.0.tool_calls.0.function.arguments", "got 5, allowed is: a valid string or"),
        (called("a" * (1 << 20)), "messages.0.tool_calls.0.function.arguments", "at most 524288 characters"),
        (called("[" * 65 + "]" * 65), "messages.0.tool_calls.0.function.arguments", "64 levels"),
        (called("[" * 9999), "messages.0.tool_calls.0.function.arguments", "nested too deeply"),
        (
            called(json.loads('{"a":' * 65 + "1" + "}" * 65)),
            "messages.0.tool_calls.0.function.arguments",
            "64 lev",
        ),
        (called("[" + "1," * 66_000 + "1]"), "messages", "characters, allowed are at most"),
        ({**called("{}"), "role": "user", "content": "a"}, "messages.0.tool_calls", "allowed is assistant"),
        ({**called("{}"), "tool_call_id": "a"}, "messages.0.tool_call_id", "allowed is tool"),
        (called("{}", tool_calls=[{"id": "a"}]), "messages.0.tool_calls.0.function", "missing"),
        (
            called("{}", tool_calls=[{"type": "custom"}]),
            "messages.0.tool_calls.0.type",
            "allowed is: 'function'",
        ),
        (called("{}", tool_calls=called("{}")["tool_calls"] * 129), "messages.0.tool_calls", "at most 128"),
    ],
)
def test_refusals(server: LiveServer, message: dict[str, Any], param: str, text: str) -> None:
    check_refused(server.post("/v1/chat/completions", {"messages": [message]}), param, text)


def test_too_many_values_of_arguments() -> None:
    with pytest.raises(RequestError, match="more than 65536 values"):
        for_template([called("[" + "1," * 66_000 + "1]")])
