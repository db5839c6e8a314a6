"""Tools of chat requests over HTTP. The engine's text is scripted; the tiny model has never seen a tool."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

from rose_backend.engine.outputs import CompletionOutput, Logprob, RequestOutput
from rose_backend.engine.request import ProcessedInput
from rose_backend.errors import ConfigError
from rose_backend.server.answer_parsers import MAKE_TOOL_CALL_PARSER
from rose_backend.server.answers import AnswerOptions, ChatAnswer
from rose_backend.server.protocol import Tool
from rose_backend.server.settings import TOOL_CALL_PARSERS, ServerSettings
from tests.server.live_server import (
    GREEDY,
    NO_REPLY,
    USAGE,
    LiveServer,
    check_refused,
    running_server,
    stream,
)

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }} {% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.where }}{% endfor %}\n{% endfor %}"
)
PARAMETERS = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}]
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Where?"}], "tools": TOOLS}
CALL = '<tool_call>\n{"name": "find", "arguments": {"where": "\u00fcber"}}\n</tool_call>'


class Script:
    """Stands for an engine's answers: gives ``text`` to each completion, a few characters at a time."""

    def __init__(self) -> None:
        self.text, self.reason, self.step = "", "stop", 3
        self.inputs: list[ProcessedInput] = []

    async def generate_deltas(
        self, prompt: ProcessedInput, *, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield as an engine does."""
        self.inputs.append(prompt)
        for first in range(0, max(len(self.text), 1), self.step):
            is_last = first + self.step >= len(self.text)
            reason: Any = self.reason if is_last else None
            piece = self.text[first : first + self.step]
            # So that each is known by where its text begins.
            logprobs = None if prompt.params.logprobs is None else [{7: Logprob(-float(first), 1, piece)}]
            outputs = [
                CompletionOutput(index, piece, [7], logprobs=logprobs, finish_reason=reason)
                for index in range(prompt.params.n)
            ]
            yield RequestOutput(str(request_id), None, prompt.token_ids.tolist(), outputs, is_last)


@contextlib.contextmanager
def template_server(model: Path, folder: Path, template: str, **settings: object) -> Iterator[LiveServer]:
    """Run a server that looks for Hermes' calls, with a chat template."""
    path = folder / "chat.jinja"
    path.write_text(template)
    calls = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with running_server(model, {"chat_template": str(path), **calls, **settings}) as server:
        yield server


def scripted(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return what the server's engine says from now on."""
    script = Script()
    monkeypatch.setattr(server.engine, "generate_deltas", script.generate_deltas)
    return script


@pytest.fixture(scope="module")
def tool_server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Return a server that looks for calls."""
    with template_server(tiny_model_path, tmp_path_factory.mktemp("template"), TEMPLATE) as server:
        yield server


@pytest.fixture
def script(tool_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Script:
    return scripted(tool_server, monkeypatch)


def answered(server: LiveServer, **fields: object) -> Any:
    answer = server.post(PATH, {**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Return the message that a stream's events make, as clients put it together."""
    message: dict[str, Any] = {**NO_REPLY, "role": "assistant", "content": ""}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            if choice["index"] != index:
                continue
            message["content"] += delta.get("content") or ""
            for new in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if new["index"] == len(calls):
                    assert new["function"]["name"] and new["type"] == "function"
                    calls.append({**new, "function": {**new["function"]}})
                    del calls[-1]["index"]
                else:
                    assert set(new) == {"index", "function"} and set(new["function"]) == {"arguments"}
                    calls[new["index"]]["function"]["arguments"] += new["function"]["arguments"]
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [dict(call) for call in message.get("tool_calls", ())]
    for call in calls:
        assert call.pop("id").startswith("chatcmpl-tool-")
    return {**message, "tool_calls": calls}


CALLS = {
    "hermes": CALL + "\n" + CALL,
    "llama3_json": '<|python_tag|>{"name": "find", "parameters": {"where": "\u00fcber"}}; '
    '{"name": "find", "arguments": {"where": "\u00fcber"}}',
    "mistral": '[TOOL_CALLS][{"name": "find", "arguments": {"where": "\u00fcber"}}]'
    '[TOOL_CALLS]find[ARGS]{"where": "\u00fcber"}',
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_in_each_format(
    tool_server: LiveServer, script: Script, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings = replace(tool_server.service.settings, tool_call_parser=name)
    monkeypatch.setattr(tool_server.service, "settings", settings)
    script.text = "I look. " + CALLS[name]
    whole = answered(tool_server)
    # Without the others' marks there are no calls.
    assert script.inputs[0].params.skip_special_tokens == (name == "llama3_json")
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "I look. "
    expected = {"name": "find", "arguments": '{"where": "\u00fcber"}'}
    # Templates of Mistral's models refuse other ids.
    own_ids = r"[0-9A-Za-z]{9}" if name == "mistral" else r"chatcmpl-tool-[0-9a-f]{32}"
    for message in (whole["message"], *(joined(stream(tool_server, PATH, **ASKED)) for _ in range(2))):
        assert [call["function"] for call in message["tool_calls"]] == [expected, expected]
        ids = {call["id"] for call in message["tool_calls"]}
        assert len(ids) == 2 and all(re.fullmatch(own_ids, each) for each in ids)


def test_each_parser_is_tried() -> None:
    assert set(CALLS) == set(MAKE_TOOL_CALL_PARSER) == set(TOOL_CALL_PARSERS)


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("text", ["I look.\n" + CALL + "\n" + CALL, CALL, CALL[:50], CALL[:30], "None.", ""])
def test_streams_add_up_to_whole_answers(
    tool_server: LiveServer, script: Script, text: str, step: int, reason: str
) -> None:
    script.text, script.step, script.reason = text, step, reason
    whole = answered(tool_server)
    events = stream(tool_server, PATH, **ASKED, n=2)
    # As in vLLM, none without anything new.
    assert all(each["delta"] or each["finish_reason"] for event in events for each in event["choices"])
    num_calls = text.count('"arguments": {')
    assert len(whole["message"].get("tool_calls", ())) == num_calls
    for index in range(2):
        assert without_ids(joined(events, index)) == without_ids(whole["message"])
        last = [event for event in events if event["choices"][0]["index"] == index][-1]["choices"][0]
        assert last["finish_reason"] == whole["finish_reason"]
    assert whole["finish_reason"] == ("tool_calls" if num_calls and reason == "stop" else reason)


def test_what_is_called(tool_server: LiveServer, script: Script) -> None:
    script.text = "I look.\n" + CALL
    message = answered(tool_server)["message"]
    assert message["content"] == "I look.\n"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "find", "arguments": '{"where": "\u00fcber"}'}
    assert not script.inputs[0].params.skip_special_tokens


def test_clients_read_calls(tool_server: LiveServer, script: Script) -> None:
    script.text = CALL + CALL
    messages, tools = ASKED["messages"], ASKED["tools"]
    whole = tool_server.openai.chat.completions.create(model="tiny", messages=messages, tools=tools)
    calls = whole.choices[0].message.tool_calls
    assert calls is not None and len({call.id for call in calls}) == 2
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "Here."}
    history: Any = [*messages, whole.choices[0].message, result]
    with tool_server.openai.chat.completions.stream(model="tiny", messages=history, tools=tools) as chunks:
        final = chunks.get_final_completion().choices[0].message
    assert final.tool_calls is not None and len(final.tool_calls) == 2
    assert final.tool_calls[1].function.arguments == '{"where": "\u00fcber"}'
    # The template has seen the call.
    text = tool_server.engine.input_processor.tokenizer.decode(script.inputs[-1].token_ids.tolist())
    assert "\u00fcber\u00fcbertool: Here." in text


def test_only_the_first_call(tool_server: LiveServer, script: Script) -> None:
    script.text = CALL + CALL
    assert len(answered(tool_server, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    message = joined(stream(tool_server, PATH, **ASKED, parallel_tool_calls=False))
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}])
def test_text_is_left_alone(tool_server: LiveServer, script: Script, fields: dict[str, Any]) -> None:
    script.text = CALL
    assert answered(tool_server, **fields)["message"] == {**NO_REPLY, "role": "assistant", "content": CALL}
    assert script.inputs[0].params.skip_special_tokens
    text = tool_server.engine.input_processor.tokenizer.decode(script.inputs[0].token_ids.tolist())
    assert ("find" in text) == ("tools" not in fields)


def test_templates_get_vllms_tools() -> None:
    for tool in (TOOLS[0], {"function": {"name": "f", "description": "d", "strict": True, "x": 1}}):
        assert Tool(**tool).for_template() == ChatCompletionToolsParam(**tool).model_dump()  # type: ignore[arg-type]


def deep(levels: int) -> Any:
    return json.loads('{"a":' * levels + "1" + "}" * levels)


def tool(**fields: object) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": []}, "tools", "at least 1 item"),
        ({"tools": [{"function": {"name": "f"}}] * 129}, "tools", "at most 128 items"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "allowed is: 'function'"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
        ({"tools": [{**TOOLS[0], "type": "custom"}]}, "tools.0.type", "allowed is: 'function'"),
        (tool(name=""), "tools.0.function.name", "at least 1 character"),
        (tool(name="x" * 257), "tools.0.function.name", "at most 256 characters"),
        (tool(parameters=[1]), "tools.0.function.parameters", "a valid dictionary"),
        (tool(parameters=deep(70)), "tools", "nested more than 64 levels"),
        (tool(parameters={"enum": [1] * 70_000}), "tools", "more than 65536 values"),
        (tool(description="x" * 250_000), "tools", "characters, allowed are at most"),
        (tool(strict="yes"), "tools.0.function.strict", "allowed is: a valid boolean"),
        ({"tool_choice": "some"}, "tool_choice", "got 'some', allowed is: 'none', 'auto' or 'required'"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "lose"}}},
            "tool_choice",
            "got 'lose', allowed is the name of one of the tools",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "got 'required' without tools"),
        (
            {**tool(parameters={"type": "objec"}), "tool_choice": "required"},
            "tool_choice",
            "tool_choice: got one that cannot be compiled (",
        ),
        (
            {
                "tools": [
                    tool(name=name, parameters={"$defs": {"a": {"type": name}}})["tools"][0]
                    for name in ("string", "object")
                ],
                "tool_choice": "required",
            },
            "tools",
            "got two schemas named 'a' in $defs",
        ),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice", "without tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "a valid boolean"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ],
)
def test_refusals(tool_server: LiveServer, fields: dict[str, Any], param: str, message: str) -> None:
    check_refused(tool_server.post(PATH, {**ASKED, **fields}), param, message)


def test_a_server_without_parser(server: LiveServer) -> None:
    check_refused(server.post(PATH, ASKED), "tool_choice", "--enable-auto-tool-choice and --tool-call-parser")
    assert server.post(PATH, {**ASKED, "tool_choice": "none", **GREEDY}).status_code == 200


def test_options_of_the_server() -> None:
    names = ("a",)
    with pytest.raises(ConfigError, match=r"^tool_call_parser: got 'x', allowed are hermes"):
        ServerSettings(served_model_names=names, tool_call_parser="x")
    with pytest.raises(ConfigError, match=r"^enable_auto_tool_choice: needs tool_call_parser"):
        ServerSettings(served_model_names=names, enable_auto_tool_choice=True)


@pytest.mark.parametrize("streams", [False, True])
def test_many_calls_are_written_in_pieces(streams: bool) -> None:
    text = "[TOOL_CALLS]f{}" * 20_000
    options = AnswerOptions("chatcmpl-1", 0, "tiny")
    answer = ChatAnswer(options, token_bytes=lambda _: b"", parser=MAKE_TOOL_CALL_PARSER["mistral"])
    output = RequestOutput("1", None, [1], [CompletionOutput(0, text, [7], finish_reason="stop")], True)
    if streams:
        pieces = list(answer.events(0, output))
    else:
        assert list(answer.keep(0, output)) == []
        pieces = list(answer.body(USAGE))
    # What comes between two pieces holds the event loop.
    assert max(map(len, pieces)) < 1 << 17 and len(pieces) > len(text) // 4096
    whole = b"".join(pieces)
    if streams:
        message = json.loads(whole.split(b"data: ")[-1])["choices"][0]["delta"]
    else:
        message = json.loads(whole)["choices"][0]["message"]
    assert len({call["id"] for call in message["tool_calls"]}) == 20_000
