"""Anthropic's Messages API: what it asks of a chat, and how the chat's answer comes back, whole and as events."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from rose_backend.engine.outputs import CompletionOutput, RequestOutput
from rose_backend.errors import GenerationError
from rose_backend.server.answer_parsers import MAKE_TOOL_CALL_PARSER, NamedCallParser
from rose_backend.server.answers import AnswerOptions
from rose_backend.server.chat_template import ChatTemplate, plain_messages
from rose_backend.server.message_answers import MessageAnswer
from rose_backend.server.protocol import CountTokensRequest, MessagesRequest
from tests.server.live_server import (
    ABORTED,
    MODEL,
    USAGE,
    LiveServer,
    check_refused,
    error_of,
    running_server,
    wait_until,
)
from tests.server.test_responses import SCHEMA, TEMPLATE
from tests.server.test_tools import CALL, PARAMETERS, Script, scripted, template_server
from tests.support.patience import HANG_S

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Where?"}],
    "temperature": 0,
    "max_tokens": 12,
}
TOOLS: Any = [{"name": "find", "description": "Finds.", "input_schema": PARAMETERS}]
CACHED = {"cache_control": {"type": "ephemeral"}}
HISTORY: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Where?", **CACHED}, {"type": "text", "text": "?"}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "So.", "signature": "s"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "find", "input": {"where": "a"}},
            {"type": "tool_use", "id": "c2", "name": "find", "input": {}, **CACHED},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Go on."},
            {"type": "tool_result", "tool_use_id": "c1", "content": "Here.", "is_error": False},
            {
                "type": "tool_result",
                "tool_use_id": "c2",
                "content": [{"type": "text", "text": "There"}, {"type": "text", "text": "or there."}],
            },
        ],
    },
    {"role": "system", "content": [{"type": "text", "text": "Now be brief."}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c3", "name": "find", "input": {"a": [1]}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c3"}]},
    {"role": "assistant", "content": []},
    {"role": "system", "content": "x-anthropic-billing-header: 5"},
    {"role": "user", "content": [{"type": "text", "text": ""}]},
    {"role": "user", "content": "Thanks."},
]
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: 5"},
    {"type": "text", "text": "Be kind.", **CACHED},
    {"type": "text", "text": " Be true."},
]


@pytest.fixture(scope="module")
def reasoning_server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Return a server that looks for reasoning and calls."""
    folder = tmp_path_factory.mktemp("template")
    with template_server(tiny_model_path, folder, TEMPLATE, reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture
def script(reasoning_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Script:
    return scripted(reasoning_server, monkeypatch)


def client(server: LiveServer, **how: Any) -> anthropic.Anthropic:
    """Return the real thing, without retries."""
    arguments = {"api_key": "unused", "max_retries": 0, "timeout": HANG_S, **how}
    return anthropic.Anthropic(base_url=server.url, **arguments)


def arguments(fields: dict[str, Any]) -> dict[str, Any]:
    """Return what the client takes by name, and what it takes in ``extra_body`` only."""
    asked = {**ASKED, **fields}
    named = {name: asked.pop(name) for name in ("model", "messages", "max_tokens")}
    return {**named, "extra_body": asked}


def create(server: LiveServer, **fields: Any) -> Message:
    message = client(server).messages.create(**arguments(fields))
    assert isinstance(message, Message)
    # As the client's own model has it, which it does not check.
    Message.model_validate_json(message.model_dump_json(exclude_unset=True))
    return message


def events(server: LiveServer, **fields: object) -> list[dict[str, Any]]:
    """Return the events of a stream, which have their types' names."""
    answer = server.post(PATH, {**ASKED, **fields, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for text in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return what two answers to the same request have in common; all tokens of a prompt count."""
    blocks = [dict(block) for block in message["content"]]
    for block in blocks:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("chatcmpl-tool-")
        if block["type"] == "thinking":
            assert len(block.pop("signature")) == 32
    usage = dict(message["usage"])
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    assert message["id"].startswith("msg_")
    return {**message, "id": None, "content": blocks, "usage": usage}


def check_stream(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """Check that the client's accumulator and the events make what a whole answer has; return that."""
    answer = server.post(PATH, {**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    whole = without_ids(answer.json())
    start, *found, delta, stop = events(server, **fields)
    assert stop == {"type": "message_stop"}
    message = {**start["message"], **delta["delta"], "usage": delta["usage"]}
    # As in vLLM, all tokens of the prompt.
    num_tokens = delta["usage"]["input_tokens"] + delta["usage"]["cache_read_input_tokens"]
    assert start["message"]["usage"] == {"input_tokens": num_tokens, "output_tokens": 0}
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    for event in found:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert event["index"] == len(message["content"])
            message["content"] = [*message["content"], {**event["content_block"], "json": ""}]
            continue
        block = message["content"][-1]
        assert event["index"] == len(message["content"]) - 1
        if kind == "stop":
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(text) if text.endswith("}") else block["input"]
            continue
        change = event["delta"]
        name = change["type"].removesuffix("_delta").removeprefix("input_")
        block[name] += change.get("partial_json", change.get(name))
    assert all("json" not in block for block in message["content"])
    whole_calls = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
    is_cut_off = whole["stop_reason"] == "max_tokens" and whole_calls
    if not is_cut_off:
        assert without_ids(message) == whole
    with client(server).messages.stream(**arguments(fields)) as stream:
        final = stream.get_final_message().model_dump(exclude_unset=True)
    # The client marks blocks of its own accord.
    own = [
        {name: value for name, value in block.items() if name in first}
        for block, first in zip(without_ids(final)["content"], whole["content"], strict=True)
    ]
    assert (own, final["stop_reason"], final["stop_sequence"]) == (
        whole["content"],
        whole["stop_reason"],
        whole["stop_sequence"],
    )
    return whole


def prompt(server: LiveServer, script: Script) -> str:
    return server.engine.input_processor.tokenizer.decode(script.inputs[-1].token_ids.tolist())


def test_an_answer_is_that_of_a_chat(server: LiveServer) -> None:
    messages = [{"role": "system", "content": "Be kind. Be true."}, {"role": "user", "content": "Where?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    chat = server.post("/v1/chat/completions", body).json()
    message = create(server, system=SYSTEM, metadata={"user_id": "u"}, service_tier="auto", **CACHED)
    (block,) = message.content
    assert block.type == "text" and block.text == chat["choices"][0]["message"]["content"] != ""
    assert (message.stop_reason, message.stop_sequence, message.model) == ("max_tokens", None, MODEL)
    cached = message.usage.cache_read_input_tokens
    assert cached is not None and message.usage.output_tokens == 12
    num_tokens = message.usage.input_tokens + cached
    counted = client(server).messages.count_tokens(
        model=MODEL, messages=ASKED["messages"], extra_body={"system": SYSTEM}
    )
    assert counted.input_tokens == num_tokens == chat["usage"]["prompt_tokens"]
    counts = server.post(COUNT_PATH, {"model": MODEL, "messages": messages[1:], "system": SYSTEM}).json()
    assert counts == {
        "input_tokens": num_tokens,
        "context_management": {"original_input_tokens": num_tokens},
    }
    for fields in ({}, {"system": "Be kind."}, {"temperature": 1.0, "top_k": 1, "top_p": 0.5}):
        check_stream(server, **fields)


def test_stop_sequences(server: LiveServer) -> None:
    text = create(server).content[0].text  # type: ignore[union-attr]
    stop = text[10:14]
    message = check_stream(server, stop_sequences=["\n\n\n", stop])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"] == [{"type": "text", "text": text[: text.index(stop)]}]
    # Clients expect a block.
    empty = check_stream(server, stop_sequences=[text[:2]])
    assert empty["content"] == [{"type": "text", "text": ""}]


def vllms(body: dict[str, Any], *, merges: bool = False) -> Any:
    theirs = AnthropicMessagesRequest.model_validate(json.loads(json.dumps(body)))
    return AnthropicServingMessages.to_chat_completion_request(theirs, merge_inline_system=merges)


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("number", range(1, len(HISTORY) + 1))
def test_blocks_become_vllms_messages(number: int, merges: bool) -> None:
    body: dict[str, Any] = {**ASKED, "messages": HISTORY[:number], "system": SYSTEM}
    ours = MessagesRequest.model_validate(body).chat_request(merges_instructions=lambda: merges)
    expected: list[Any] = vllms(body, merges=merges).messages
    plain = plain_messages(ours.messages)
    assert len(plain) == len(expected)
    for own, other in zip(plain, expected, strict=True):
        content = other.get("content") or ""
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        assert (own["role"], own["content"]) == (other["role"], text)
        assert own.get("reasoning") == other.get("reasoning")
        assert own.get("tool_call_id") == other.get("tool_call_id")
        calls = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in other.get("tool_calls", ())
        ]
        assert own.get("tool_calls", []) == calls


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS},
        {"tools": [{**TOOLS[0], "type": "custom", "strict": True, "input_schema": {}, **CACHED}]},
        {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": False}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "find"}},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"output_config": {"effort": "high"}},
        {"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"stop_sequences": ["a"], "top_k": 5, "top_p": 0.5, "cache_salt": "s", "stream": True},
        {"chat_template_kwargs": {"a": 1}},
    ],
)
def test_fields_become_vllms(fields: dict[str, Any]) -> None:
    body = {**ASKED, **fields}
    ours = MessagesRequest.model_validate(body).chat_request(merges_instructions=lambda: False)
    theirs = vllms(body)
    names = ["max_tokens", "temperature", "top_p", "top_k", "cache_salt", "reasoning_effort"]
    for name in (*names, "chat_template_kwargs"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.stop or [], bool(ours.stream)) == (theirs.stop or [], bool(theirs.stream))
    assert (ours.parallel_tool_calls is False) == (theirs.parallel_tool_calls is False)
    choice: Any = ours.tool_choice or ("auto" if ours.tools else None)
    expected = theirs.tool_choice
    if not isinstance(choice, str | None):
        choice, expected = choice.function.name, expected.function.name
    assert choice == expected
    assert len(ours.tools or ()) == len(theirs.tools or ())
    for own, other in zip(ours.tools or (), theirs.tools or (), strict=True):
        for name in ("name", "description", "parameters", "strict"):
            assert getattr(own.function, name) == getattr(other.function, name)
    if theirs.response_format is None:
        assert ours.response_format is None
    else:
        assert ours.response_format is not None and ours.response_format.json_schema is not None
        assert ours.response_format.type == theirs.response_format.type
        assert ours.response_format.json_schema.json_schema == SCHEMA


def test_calls_and_their_results(reasoning_server: LiveServer, script: Script) -> None:
    script.text = "Hm.</think>I look.\n" + CALL + CALL
    message = create(reasoning_server, tools=TOOLS)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    call = message.content[2]
    assert call.type == "tool_use" and (call.name, call.input) == ("find", {"where": "\u00fcber"})
    script.text = "No.</think>Here."
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "There."}
        for block in message.content
        if block.type == "tool_use"
    ]
    answer = {"role": "assistant", "content": message.model_dump(exclude_unset=True)["content"]}
    history: Any = [*ASKED["messages"], answer, {"role": "user", "content": results}]
    last = create(reasoning_server, messages=history, tools=TOOLS)
    assert last.content[-1].text == "Here." and last.stop_reason == "end_turn"  # type: ignore[union-attr]
    shown = prompt(reasoning_server, script)
    assert call.id in shown and shown.count("tool: There.") == 2 and "I look.\nHm." in shown
    assert shown.startswith('{"type": "function", "function": {"name": "find"')
    counted = client(reasoning_server).messages.count_tokens(model=MODEL, messages=history, tools=TOOLS)
    assert counted.input_tokens == len(script.inputs[-1].token_ids)


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Hm.</think>I look.\n" + CALL + CALL, ["thinking", "text", "tool_use", "tool_use"]),
        ("</think>" + CALL, ["tool_use"]),
        ("</think>" + CALL[:-16], ["tool_use"]),
        ("Hm.", ["thinking"]),
        ("</think>", ["text"]),
    ],
)
def test_streams_add_up(
    reasoning_server: LiveServer, script: Script, text: str, kinds: list[str], reason: str, step: int
) -> None:
    script.text, script.reason, script.step = text, reason, step
    message = check_stream(reasoning_server, tools=TOOLS)
    assert [block["type"] for block in message["content"]] == kinds
    ended = "tool_use" if "tool_use" in kinds else "end_turn"
    assert message["stop_reason"] == (ended if reason == "stop" else "max_tokens")


def test_choices_of_tools(
    reasoning_server: LiveServer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(reasoning_server.service.settings, reasoning_parser=None)
    monkeypatch.setattr(reasoning_server.service, "settings", settings)
    script.text = json.dumps([{"name": "find", "parameters": {"where": "a"}}] * 2)
    message = check_stream(reasoning_server, tools=TOOLS, tool_choice={"type": "any"})
    assert [block["input"] for block in message["content"]] == [{"where": "a"}] * 2
    one = {"type": "any", "disable_parallel_tool_use": True}
    assert len(check_stream(reasoning_server, tools=TOOLS, tool_choice=one)["content"]) == 1
    script.text = '{"where": "a"}'
    named = check_stream(reasoning_server, tools=TOOLS, tool_choice={"type": "tool", "name": "find"})
    assert named["content"][0]["name"] == "find" and named["stop_reason"] == "tool_use"
    assert script.inputs[-1].params.structured_outputs is not None
    script.text = CALL
    text = check_stream(reasoning_server, tools=TOOLS, tool_choice={"type": "none"})
    assert text["content"][0]["text"] == CALL
    # As in vLLM, and unlike in chats.
    auto = check_stream(reasoning_server, tools=[], tool_choice={"type": "auto"})
    assert auto["content"] == text["content"]


def test_thinking(reasoning_server: LiveServer, script: Script) -> None:
    script.text = "Hmmmmm.</think>Here."
    thought = check_stream(reasoning_server, thinking={"type": "adaptive"})
    assert [block["type"] for block in thought["content"]] == ["thinking", "text"]
    assert thought["content"][0]["thinking"] == "Hmmmmm."
    plain = check_stream(reasoning_server, thinking={"type": "disabled"})
    assert plain["content"] == [{"type": "text", "text": script.text}]


def test_templates_that_take_system_messages_in_front_only(tiny_model_path: Path, tmp_path: Path) -> None:
    strict = (
        "{% for message in messages %}"
        "{% if message.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        "{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    path = tmp_path / "chat.jinja"
    for template, expected in ((strict, True), (TEMPLATE, False)):
        path.write_text(template)
        assert ChatTemplate(str(path)).takes_instructions_in_front_only == expected
    path.write_text(strict)
    late = [*ASKED["messages"], {"role": "system", "content": "Be true."}]
    with running_server(tiny_model_path, {"chat_template": str(path)}) as server:
        number = create(server, messages=late, system="Be kind. ").usage.input_tokens
        front = server.post(COUNT_PATH, {**ASKED, "system": "Be kind. Be true."}).json()["input_tokens"]
        assert number == front


def test_structured_text(server: LiveServer) -> None:
    # Without room for spaces, which the tiny model would write for ever.
    wanted = {"format": {"type": "json_schema", "schema": {"enum": ["rose"]}}}
    message = check_stream(server, output_config=wanted, max_tokens=20)
    assert message["content"] == [{"type": "text", "text": '"rose"'}]
    assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_keys(tiny_model_path: Path, chat_template: Path, key: str) -> None:
    settings = {"api_keys": ("first-key", "second-key"), "chat_template": str(chat_template)}
    with running_server(tiny_model_path, settings, block_size=16) as server:
        long: Any = {"model": MODEL, "messages": [{"role": "user", "content": "rose " * 40}], "max_tokens": 1}

        def cached(**headers: str) -> int:
            answer = server.http.post(PATH, json=long, headers=headers)
            assert answer.status_code == 200, answer.text
            return int(answer.json()["usage"]["cache_read_input_tokens"])

        # The same key has the same prefix cache, however it is sent, and no other key has.
        assert not cached(**{"x-api-key": key})
        assert client(server, api_key=key).messages.create(**long).usage.cache_read_input_tokens
        assert cached(**{"x-api-key": key})
        other = {"first-key": "second-key", "second-key": "first-key"}[key]
        assert not cached(**{"x-api-key": other})
        # A bearer token is what counts beside it.
        assert cached(**{"x-api-key": "none", "authorization": f"Bearer {other}"})
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            client(server, api_key="third-key").messages.create(**long)
        wrong = {"x-api-key": key, "authorization": "Bearer third-key", "content-type": "application/json"}
        refusal = server.http.post(PATH, content=b"{}", headers=wrong)
        assert refusal.status_code == 401 and error_of(refusal)["type"] == "authentication_error"


def message(**fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a", **fields}]}


def block(role: str = "user", **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [fields]}]}


def deep(levels: int) -> Any:
    return json.loads('{"a":' * levels + "1" + "}" * levels)


IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
FIRST = "messages.0.content.0"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": ASKED["messages"] * 1025}, "messages", "at most 1024 items"),
    ({"messages": [{"role": "user", "content": []}]}, "messages", "got no text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 250}] * 17},
        "messages",
        "got 4267 messages and blocks, allowed are at most 4096",
    ),
    (message(content="x" * 1_000_000), "messages", "got 1000000 characters"),
    (message(role="tool"), "messages.0.role", "'user', 'assistant' or 'system'"),
    (message(content="forbidden"), "messages", "the model's chat template refuses them"),
    (block(**IMAGE), f"{FIRST}.type", "got 'image', allowed is: 'text', 'tool_use'"),
    (block(type="document"), f"{FIRST}.type", "got 'document'"),
    (block(type="tool_addition"), f"{FIRST}.type", "got 'tool_addition'"),
    (
        block(type="tool_result", tool_use_id="c", content=[IMAGE]),
        f"{FIRST}.content.0.type",
        "got 'image', allowed is: 'text'",
    ),
    (block(type="text"), f"{FIRST}.text", "missing, but required"),
    (block(type="tool_result"), f"{FIRST}.tool_use_id", "missing, but required"),
    (block("assistant", type="tool_use", id="c", name="f"), f"{FIRST}.input", "missing, but required"),
    (
        block(type="thinking", thinking="a"),
        f"{FIRST}.type",
        "in the role user, allowed are text, tool_result",
    ),
    (block("system", type="tool_result", tool_use_id="c"), f"{FIRST}.type", "in the role system"),
    (
        block("assistant", type="tool_use", id="c", name="f", input=deep(300)),
        "messages",
        "more than 64 levels",
    ),
    (
        block("assistant", type="tool_use", id="c", name="f", input={"a": [1] * 70_000}),
        "messages",
        "got more than 65536 values",
    ),
    ({"system": [IMAGE]}, "system.0.type", "allowed is: 'text'"),
    ({"model": None}, "model", "valid string"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type", "'custom'"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema", "missing, but required"),
    (
        {"tools": [{**TOOLS[0], "input_schema": deep(300)}], "tool_choice": {"type": "none"}},
        "tools",
        "64 levels",
    ),
    ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name", "missing, but required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type", "'adaptive' or 'disabled'"),
    ({"output_config": {"effort": "some"}}, "output_config.effort", "got 'some'"),
    ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "which the server sets"),
    ({"mcp_servers": [{}]}, "mcp_servers", "which is not supported; allowed is null or []"),
    ({"container": "c"}, "container", "which is not supported; allowed is null"),
    ({"sytem": "x"}, "'sytem'", "did you mean 'system'"),
]
REFUSED_ANSWERS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "valid integer"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"max_tokens": 10**6}, "max_tokens", "the model's window"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"stop_sequences": ["a"] * 100}, "stop_sequences", "at most"),
    ({"stop_sequences": [""]}, "stop_sequences.0", "at least 1 character"),
    ({"tools": TOOLS}, "tool_choice", "--enable-auto-tool-choice and --tool-call-parser"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "got 'required' without tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "lose"}}, "tool_choice", "got 'lose', allowed"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "objec"}}}},
        "output_config",
        "compiled",
    ),
    ({"cache_salt": "a@b"}, "cache_salt", "allowed is a string"),
]


@pytest.mark.parametrize(
    ("path", "fields", "field", "text"),
    [
        *((path, *each) for path in (PATH, COUNT_PATH) for each in REFUSED),
        *((PATH, *each) for each in REFUSED_ANSWERS),
    ],
)
def test_refusals(server: LiveServer, path: str, fields: dict[str, Any], field: str, text: str) -> None:
    check_refused(server.post(path, {**ASKED, **fields}), field, text)


def test_errors_are_anthropics(server: LiveServer) -> None:
    for path in (PATH, COUNT_PATH):
        nobody = {name: value for name, value in ASKED.items() if name != "model"}
        check_refused(server.post(path, nobody), "model", "missing, but required")
        other = server.post(path, {**ASKED, "model": "other"})
        assert other.status_code == 404 and error_of(other)["type"] == "not_found_error"
        kind = server.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
        assert kind.status_code == 415 and error_of(kind)["type"] == "invalid_request_error"
        method = server.http.get(path)
        assert method.status_code == 405 and error_of(method)["type"] == "invalid_request_error"
        large = server.post(path, b" " * (server.settings.max_body_bytes + 1))
        assert large.status_code == 413 and error_of(large)["type"] == "request_too_large"
    below = server.post(f"{PATH}/batches", {})
    assert below.status_code == 404 and error_of(below)["type"] == "not_found_error"
    assert "param" in server.post("/v1/messages_", {}).json()["error"]
    with pytest.raises(anthropic.NotFoundError, match="model: got 'other'"):
        create(server, model="other")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: got 0"):
        create(server, max_tokens=0)


def test_an_error_ends_a_stream(
    reasoning_server: LiveServer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.text = "Hm.</think>Here."
    generate = script.generate_deltas

    async def fail(*arguments: Any, **how: Any) -> Any:
        async for output in generate(*arguments, **how):
            yield output
            raise GenerationError("no more")

    monkeypatch.setattr(reasoning_server.engine, "generate_deltas", fail)
    last = events(reasoning_server)[-1]
    assert last == {"type": "error", "error": {"type": "api_error", "message": "no more"}}
    with pytest.raises(anthropic.APIError, match="no more"):
        list(client(reasoning_server).messages.create(**arguments({}), stream=True))
    with pytest.raises(anthropic.InternalServerError, match="no more"):
        create(reasoning_server)


def test_a_client_that_leaves_ends_its_answer(server: LiveServer) -> None:
    left = f'http_responses_total{{route="{PATH}",status="499"}}'
    before = server.metric(left), server.metric(ABORTED)
    body = {**ASKED, "max_tokens": 900, "stream": True}
    with server.http.stream("POST", PATH, json=body) as answer:
        assert next(answer.iter_lines()) == "event: message_start"
    wait_until(lambda: server.metric(left) == before[0] + 1)
    wait_until(lambda: server.metric(ABORTED) == before[1] + 1)
    server.wait_until_idle()


def test_many_blocks_are_translated_beside_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    translate = CountTokensRequest.chat_request

    def note(self: CountTokensRequest, **how: Any) -> Any:
        names.append(threading.current_thread().name)
        return translate(self, **how)

    monkeypatch.setattr(CountTokensRequest, "chat_request", note)
    many = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 200}]
    for path in (PATH, COUNT_PATH):
        for messages in (ASKED["messages"], many):
            assert server.post(path, {**ASKED, "messages": messages, "max_tokens": 1}).status_code == 200
    assert [name == "rose-server" for name in names] == [True, False] * 2


OPTIONS = AnswerOptions("msg_1", 0, MODEL)


def answered(text: str, parser: Any = MAKE_TOOL_CALL_PARSER["hermes"], **end: Any) -> dict[str, Any]:
    """Return the whole answer that an engine's text makes."""
    answer = MessageAnswer(OPTIONS, usage=lambda: USAGE, parser=parser, token_bytes=lambda _: b"")
    output = RequestOutput("1", None, [1], [CompletionOutput(0, text, [7], **end)], True)
    assert set(answer.keep(0, output)) <= {""}
    body: dict[str, Any] = json.loads(b"".join(answer.body(USAGE)))
    return body


@pytest.mark.parametrize(
    ("text", "end", "reason", "sequence"),
    [
        ("a", {"finish_reason": "stop"}, "end_turn", None),
        ("a", {"finish_reason": "stop", "stop_reason": 5}, "end_turn", None),
        ("a", {"finish_reason": "stop", "stop_reason": "x"}, "stop_sequence", "x"),
        ("a", {"finish_reason": "length"}, "max_tokens", None),
        ("a", {"finish_reason": "abort"}, None, None),
        (CALL, {"finish_reason": "stop"}, "tool_use", None),
        (CALL, {"finish_reason": "stop", "stop_reason": "x"}, "tool_use", None),
        (CALL[:-18], {"finish_reason": "stop", "stop_reason": "x"}, "stop_sequence", "x"),
        (CALL[:-18], {"finish_reason": "stop"}, "tool_use", None),
        (CALL, {"finish_reason": "length"}, "max_tokens", None),
    ],
)
def test_reasons_of_an_end(text: str, end: dict[str, Any], reason: str | None, sequence: str | None) -> None:
    body = answered(text, **end)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    counts = {"input_tokens": 4, "cache_read_input_tokens": 1, "cache_creation_input_tokens": 0}
    assert body["usage"] == {**counts, "output_tokens": 3}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1, {"b": 2.50}]}', {"a": [1, {"b": 2.5}]}),
        ('{"a": [1, {"b": "x', {"a": [1, {}]}),
        ('{"a": 1, "b', {"a": 1}),
        ("{", {}),
        ("[1]", {}),
        ('{"a": NaN}', {}),
        ('{"a": 1}}', {"a": 1}),
        ('{"a": ' + "[" * 500, {}),
        ('{"a": ' + "9" * 5000 + ', "b": 1', {}),
        ('{"a": 1e999, "b": 1', {}),
    ],
)
def test_arguments_become_an_object(arguments: str, expected: dict[str, Any]) -> None:
    body = answered(arguments, lambda: NamedCallParser("find"), finish_reason="length")
    assert [each["input"] for each in body["content"] if each["type"] == "tool_use"] == [expected]


@pytest.mark.parametrize("streams", [False, True])
def test_long_answers_are_written_in_pieces(streams: bool) -> None:
    text = "x" * (1 << 18) + "[TOOL_CALLS]f{}" * 5000
    parser = MAKE_TOOL_CALL_PARSER["mistral"]
    answer = MessageAnswer(OPTIONS, usage=lambda: USAGE, parser=parser, token_bytes=lambda _: b"")
    output = RequestOutput("1", None, [1], [CompletionOutput(0, text, [7], finish_reason="stop")], True)
    if streams:
        pieces = list(answer.events(0, output))
    else:
        assert set(answer.keep(0, output)) == {""}
        pieces = list(answer.body(USAGE))
    # What comes between two pieces holds the event loop.
    assert max(map(len, pieces)) < 1 << 18
    whole = b"".join(pieces)
    if streams:
        assert whole.count(b"event: content_block_stop\n") == 5001
    else:
        assert len(json.loads(whole)["content"]) == 5001
