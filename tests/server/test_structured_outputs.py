"""Structured outputs over HTTP: each way to ask for them, whole and as a stream, beside reasoning."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rose_backend.engine.structured_outputs import StructuredOutputsParams
from rose_backend.errors import RequestError
from rose_backend.server.protocol import ChatCompletionRequest
from rose_backend.server.routes import after_reasoning
from tests.server.live_server import LiveServer, check_refused, stream

SCHEMA = {
    "type": "object",
    "properties": {"petals": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["petals"],
}
WANTED: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "rose", "strict": True, "schema": SCHEMA},
        },
        "structured_outputs": {"disable_any_whitespace": True},
    },
    "json": {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
    "json_object": {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"json": None, "disable_any_whitespace": False},
        "stop": "}",
        "include_stop_str_in_output": True,
    },
    "regex": {"structured_outputs": {"regex": "[ab]{3}"}, "response_format": {"type": "text"}},
    "choice": {"structured_outputs": {"choice": ["red", "wh\u00efte"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "x" root | "y"'}},
}


def check(kind: str, text: str) -> None:
    if kind in ("json_schema", "json"):
        assert set(json.loads(text)) == {"petals"} and json.loads(text)["petals"] in range(100)
    elif kind == "json_object":
        assert text.startswith("{")
    else:
        expected = {"regex": "[ab]{3}", "choice": "red|wh\u00efte", "grammar": "x*y"}[kind]
        assert re.fullmatch(expected, text), text


@pytest.mark.parametrize("kind", list(WANTED))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_are_what_was_asked_for(server: LiveServer, path: str, kind: str) -> None:
    is_chat = path.endswith("/chat/completions")
    asked = {"messages": [{"role": "user", "content": "The rose"}]} if is_chat else {"prompt": "The rose"}
    fields = {**asked, "max_tokens": 60, "temperature": 1.0, "seed": 5, **WANTED[kind]}
    answer = server.post(path, fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"] if is_chat else choice["text"]
    if choice["finish_reason"] == "stop":
        check(kind, text)
    else:
        assert kind == "json_object"
    events = stream(server, path, **fields, n=2)
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
    assert (
        "".join(each["delta"].get("content") or "" if is_chat else each["text"] for each in choices) == text
    )


def test_masks_begin_behind_reasoning(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    body = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}
    )
    processor, wanted = server.engine.input_processor, StructuredOutputsParams(json_object=True)
    with pytest.raises(RequestError, match=r"^response_format: got one beside --reasoning-parser"):
        after_reasoning(wanted, body, processor)
    monkeypatch.setattr(processor.tokenizer, "encode", lambda text, **_: {"</think>": [77]}[text])
    assert after_reasoning(wanted, body, processor) == StructuredOutputsParams(
        json_object=True, begins_after=77
    )


def test_allowed_tokens_of_which_none_may_be_the_first(server: LiveServer) -> None:
    for is_streaming in (False, True):
        answer = server.complete(
            prompt="a", allowed_token_ids=[3], structured_outputs={"regex": "[a-c]+"}, stream=is_streaming
        )
        check_refused(answer, "allowed_token_ids", "got none that may begin the structured output")


PLACE = {"$defs": {"place": {"enum": ["here", "there"]}}, "type": "object", "required": ["where"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": PLACE | {"properties": {"where": {"$ref": "#/$defs/place"}}},
        },
    },
    {"type": "function", "function": {"name": "wait"}},
]
NAMED = {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("fields", [{}, {"parallel_tool_calls": False}], ids=["calls", "call"])
def test_answers_that_have_to_call_a_tool(server: LiveServer, choice: Any, fields: dict[str, Any]) -> None:
    path, names = "/v1/chat/completions", set()
    messages = [{"role": "user", "content": "Where?"}]
    asked = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "max_tokens": 120, **fields}
    # Or it would write white space between the parts.
    asked |= {"frequency_penalty": 2.0}
    for seed in range(3):
        answer = server.post(path, {**asked, "seed": seed})
        assert answer.status_code == 200, answer.text
        (whole,) = answer.json()["choices"]
        events = stream(server, path, **asked, seed=seed)
        deltas = [each["delta"] for event in events for each in event["choices"]]
        new = [call for delta in deltas for call in delta.get("tool_calls", ())]
        calls = [each["function"] for each in whole["message"]["tool_calls"]]
        for index, call in enumerate(calls):
            functions = [each["function"] for each in new if each["index"] == index]
            assert "".join(each.get("name") or "" for each in functions) == call["name"]
            assert "".join(each["arguments"] for each in functions) == call["arguments"]
        if whole["finish_reason"] == "length":
            continue
        assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
        assert not whole["message"]["content"] and len(calls) >= 1
        assert len(calls) == 1 or not fields
        for call in calls:
            names.add(call["name"])
            arguments = json.loads(call["arguments"])
            assert arguments in ([{}] if call["name"] == "wait" else [{"where": "here"}, {"where": "there"}])
    assert names and names <= ({"find", "wait"} if choice == "required" else {"find"})
