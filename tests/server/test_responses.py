"""OpenAI's Responses API: what it asks of a chat, and how the chat's answer comes back, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest as VllmRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

from rose_backend.engine.outputs import CompletionOutput, Logprob, RequestOutput
from rose_backend.errors import GenerationError
from rose_backend.server.answer_parsers import MAKE_TOOL_CALL_PARSER
from rose_backend.server.answers import AnswerOptions
from rose_backend.server.chat_template import parse_arguments, plain_messages
from rose_backend.server.protocol import ResponsesRequest
from rose_backend.server.response_answers import ResponseAnswer
from tests.server.live_server import ABORTED, MODEL, LiveServer, check_refused, wait_until
from tests.server.test_tools import CALL, PARAMETERS, Script, scripted, template_server

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"input": "Where?", "temperature": 0, "max_output_tokens": 12}
TOOLS: Any = [{"type": "function", "name": "find", "parameters": PARAMETERS}]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} {% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ message.reasoning }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    },
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "find", "arguments": '{"where": "a"}'},
    {"type": "function_call", "call_id": "c2", "name": "find", "arguments": '{"where": "b"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "Here."},
    {"type": "function_call_output", "call_id": "c2", "output": "There."},
    {"role": "assistant", "content": "Here, there."},
    {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "So."}]},
    {"role": "user", "content": "Thanks."},
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


def create(server: LiveServer, **fields: Any) -> Response:
    asked = {**ASKED, **fields}
    response = server.openai.responses.create(model=MODEL, input=asked.pop("input"), extra_body=asked)
    assert isinstance(response, Response)
    # As the client's own model has it, which it does not check.
    Response.model_validate_json(response.model_dump_json(exclude_unset=True))
    return response


def events(server: LiveServer, **fields: object) -> list[dict[str, Any]]:
    """Return the events of a stream, which have their types' names and are numbered."""
    answer = server.post(PATH, {**ASKED, **fields, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for number, text in enumerate(answer.text.removesuffix("\n\n").split("\n\n")):
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}" and found[-1]["sequence_number"] == number
    return found


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return what two answers to the same request have in common; ids have OpenAI's prefixes."""
    items = [dict(item) for item in response["output"]]
    prefixes = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
    for item in items:
        assert item.pop("id").startswith(prefixes[item["type"]])
        assert item.pop("call_id", "chatcmpl-tool-").startswith("chatcmpl-tool-")
    assert response["id"].startswith("resp_")
    usage = {**response["usage"], "input_tokens_details": None}
    return {**response, "output": items, "id": None, "created_at": None, "usage": usage}


def check_stream(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """Check that the client's accumulator and the events make what a whole answer has; return that."""
    whole = server.post(PATH, {**ASKED, **fields}).json()
    found = events(server, **fields)
    last = found[-1]["response"]
    assert found[-1]["type"] == f"response.{last['status']}"
    assert without_ids(last) == without_ids(whole)
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:2] == ["created", "in_progress"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    for index, item in enumerate(done):
        own = [event for event in found[:-1] if event.get("output_index") == index]
        names = [event["type"].removeprefix("response.") for event in own]
        is_call = item["type"] == "function_call"
        name = {"message": "output_text", "reasoning": "reasoning_text"}.get(item["type"])
        name = name or "function_call_arguments"
        part = [] if is_call else ["content_part"]
        starts = ["output_item.added", *(f"{each}.added" for each in part)]
        ends = [f"{name}.done", *(f"{each}.done" for each in part), "output_item.done"]
        deltas = names[len(starts) : -len(ends)]
        assert names == [*starts, *deltas, *ends] and set(deltas) <= {f"{name}.delta"}
        text = item["arguments"] if is_call else item["content"][0]["text"]
        assert "".join(event["delta"] for event in own if "delta" in event) == text
        assert own[len(starts) + len(deltas)]["arguments" if is_call else "text"] == text
        assert own[0]["item"]["id"] == item["id"] and own[0]["item"]["status"] == "in_progress"
        if item["type"] == "message":
            # As in vLLM, null without any, and empty in the events of the text.
            logprobs = item["content"][0]["logprobs"]
            assert logprobs is None or logprobs
            logprobs = logprobs or []
            streamed = [each for event in own if "delta" in event for each in event["logprobs"]]
            # Tokens that end the answer have no text.
            assert logprobs[: len(streamed)] == streamed and bool(streamed) == bool(logprobs)
            assert own[len(starts) + len(deltas)]["logprobs"] == logprobs
    if last["status"] == "completed":
        asked = {**ASKED, **fields}
        with server.openai.responses.stream(
            model=MODEL, input=asked.pop("input"), extra_body=asked
        ) as stream:
            final = stream.get_final_response().model_dump()
        assert [item["type"] for item in final["output"]] == [item["type"] for item in whole["output"]]
    return without_ids(whole)


def prompt(server: LiveServer, script: Script) -> str:
    return server.engine.input_processor.tokenizer.decode(script.inputs[-1].token_ids.tolist())


def test_an_answer_is_that_of_a_chat(server: LiveServer) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Where?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    chat = server.post("/v1/chat/completions", body).json()
    response = create(server, instructions="Be kind.", metadata={"a": "b"}, store=True, user="u")
    assert response.output_text == chat["choices"][0]["message"]["content"] != ""
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    usage = response.usage
    assert usage is not None and usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert (usage.output_tokens, usage.total_tokens) == (12, usage.input_tokens + 12)
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert (response.instructions, response.metadata, response.temperature) == ("Be kind.", {"a": "b"}, 0)
    assert (response.max_output_tokens, response.top_p, response.tools) == (12, 1.0, [])
    assert (response.object, response.model, response.tool_choice) == ("response", MODEL, "none")
    assert (response.user, response.service_tier, response.max_tool_calls) == ("u", "auto", None)
    for fields in ({}, {"stop": response.output_text[10:14]}, {"input": HISTORY[:2]}):
        check_stream(server, **fields)


def rounded(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what does not depend on how much of a prompt is cached."""
    return [
        {**each, "logprob": round(each["logprob"], 3), "top_logprobs": rounded(each.get("top_logprobs", []))}
        for each in logprobs
    ]


def test_log_probabilities_of_the_text_are_those_of_a_chat(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Where?"}], "temperature": 0, "max_tokens": 12}
    chat = server.post("/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2}).json()
    include = ["message.output_text.logprobs"]
    response = check_stream(server, include=include, top_logprobs=2)
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert rounded(logprobs) == rounded(chat["choices"][0]["logprobs"]["content"]) and len(logprobs) == 12
    assert response["top_logprobs"] == 2
    # With the tokens of a stop string, which have no text.
    asked = {"stop": response["output"][0]["content"][0]["text"][10:14], "top_logprobs": 1}
    chat = server.post("/v1/chat/completions", {**body, "logprobs": True, **asked}).json()
    response = check_stream(server, include=include, **asked)
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert rounded(logprobs) == rounded(chat["choices"][0]["logprobs"]["content"])
    own = check_stream(server, include=include)
    assert [each["top_logprobs"] for each in own["output"][0]["content"][0]["logprobs"]] == [[]] * 12
    # As in vLLM, the number alone asks for nothing.
    for fields in ({}, {"top_logprobs": 2}):
        response = check_stream(server, **fields)
        assert response["output"][0]["content"][0]["logprobs"] is None and response["top_logprobs"] is None
    # Clients send items back as they came.
    create(server, input=[{"role": "user", "content": "Where?"}, *own["output"]])


def test_log_probabilities_of_reasoning_and_calls_are_left_out(
    reasoning_server: LiveServer, script: Script
) -> None:
    script.text, script.step = "Hmm.</think>Here it is." + CALL, 4
    response = check_stream(reasoning_server, tools=TOOLS, include=["message.output_text.logprobs"])
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    logprobs = response["output"][1]["content"][0]["logprobs"]
    assert [each["logprob"] for each in logprobs] == [-12, -16, -20]


def test_an_answer_that_a_stop_string_ends_is_complete(server: LiveServer) -> None:
    text = create(server).output_text
    response = check_stream(server, stop=text[10:14])
    assert response["status"] == "completed" and response["incomplete_details"] is None
    assert response["output"][0]["content"][0]["text"] == text[: text.index(text[10:14])]
    assert response["output"][0]["status"] == "completed"
    # Nothing at all.
    empty = check_stream(server, stop=text[:2])
    assert (empty["output"], empty["status"]) == ([], "completed")


@pytest.mark.parametrize("number", range(1, len(HISTORY) + 1))
def test_items_become_vllms_messages(number: int) -> None:
    body: dict[str, Any] = {"input": HISTORY[:number], "instructions": "Be brief.", "tools": TOOLS}
    chat = ResponsesRequest.model_validate(body).chat_request()
    ours = plain_messages(chat.messages)
    parse_arguments(ours)
    theirs = VllmRequest.model_validate(json.loads(json.dumps(body)))
    expected: list[Any] = construct_input_messages(
        request_instructions=theirs.instructions, request_input=theirs.input
    )
    assert len(ours) == len(expected)
    for own, other in zip(ours, expected, strict=True):
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
    assert [tool.for_template() for tool in chat.tools or ()] == construct_tool_dicts(theirs.tools, "auto")


def test_calls_and_their_results(reasoning_server: LiveServer, script: Script) -> None:
    script.text = "Hm.</think>I look.\n" + CALL + CALL
    response = create(reasoning_server, tools=TOOLS)
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    call = response.output[2]
    assert call.type == "function_call" and call.name == "find" and call.status == "completed"
    assert json.loads(call.arguments) == {"where": "\u00fcber"}
    script.text = "No.</think>Here."
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "There."}
        for item in response.output
        if item.type == "function_call"
    ]
    history: Any = [{"role": "user", "content": "Where?"}, *response.output, *results]
    assert create(reasoning_server, input=history, tools=TOOLS).output_text == "Here."
    shown = prompt(reasoning_server, script)
    assert call.call_id in shown and shown.count("tool: There.") == 2 and "I look.\nHm." in shown
    assert shown.startswith('{"type": "function", "function": {"name": "find"')


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize(
    "text",
    ["Hm.</think>I look.\n" + CALL + CALL, "</think>" + CALL, "</think>" + CALL[:60], "Hm.", "</think>"],
)
def test_streams_add_up(
    reasoning_server: LiveServer, script: Script, text: str, reason: str, step: int
) -> None:
    script.text, script.reason, script.step = text, reason, step
    response = check_stream(reasoning_server, tools=TOOLS)
    assert response["status"] == ("completed" if reason == "stop" else "incomplete")
    assert [item["status"] for item in response["output"][:-1]] == ["completed"] * (
        len(response["output"]) - 1
    )
    assert all(item["status"] == response["status"] for item in response["output"][-1:])
    assert response["parallel_tool_calls"] and response["tools"][0]["name"] == "find"


def test_choices_of_tools(
    reasoning_server: LiveServer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(reasoning_server.service.settings, reasoning_parser=None)
    monkeypatch.setattr(reasoning_server.service, "settings", settings)
    script.text = json.dumps([{"name": "find", "parameters": {"where": "a"}}] * 2)
    response = check_stream(reasoning_server, tools=TOOLS, tool_choice="required")
    assert [item["arguments"] for item in response["output"]] == ['{"where": "a"}'] * 2
    one = check_stream(reasoning_server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert len(one["output"]) == 1 and one["parallel_tool_calls"] is False
    script.text = '{"where": "a"}'
    choice = {"type": "function", "name": "find"}
    named = check_stream(reasoning_server, tools=TOOLS, tool_choice=choice)
    assert named["output"][0]["name"] == "find" and named["tool_choice"] == choice
    assert script.inputs[-1].params.structured_outputs is not None
    script.text = CALL
    text = check_stream(reasoning_server, tools=TOOLS, tool_choice="none")
    assert text["output"][0]["content"][0]["text"] == CALL
    # As in vLLM, and unlike in chats.
    assert check_stream(reasoning_server, tools=[], tool_choice="auto")["output"] == text["output"]


def test_reasoning(reasoning_server: LiveServer, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script.text, script.step = "Hmmmmm.</think>Here.", 3
    response = check_stream(reasoning_server, reasoning={"effort": "low", "summary": "auto"})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    nulls = dict.fromkeys(("context", "generate_summary", "mode", "summary"))
    assert response["reasoning"] == {**nulls, "effort": "low"}
    assert [item["type"] for item in check_stream(reasoning_server, include_reasoning=False)["output"]] == [
        "message"
    ]
    # With effort none a model in the format qwen3 does not reason.
    plain = check_stream(reasoning_server, reasoning={"effort": "none"})
    assert plain["output"][0]["content"][0]["text"] == script.text
    # The script's tokens are all 7.
    tokenizer = reasoning_server.engine.input_processor.tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **how: [8] if text == "</think>" else encode(text, **how)
    )
    usage = check_stream(reasoning_server)["usage"]
    assert (
        usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"]
        and usage["output_tokens"] == 7
    )
    none = check_stream(reasoning_server, reasoning={"effort": "none"})["usage"]
    assert none["output_tokens_details"]["reasoning_tokens"] == 0
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **how: [7] if text == "</think>" else encode(text, **how)
    )
    assert check_stream(reasoning_server)["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_an_unfinished_answer_is_continued(reasoning_server: LiveServer, script: Script) -> None:
    script.text = "</think>."
    for status, end in (("incomplete", "assistant: Her"), ("completed", "Herassistant:")):
        item = {"role": "assistant", "content": [{"type": "output_text", "text": "Her"}], "status": status}
        create(reasoning_server, input=[{"role": "user", "content": "Where?"}, {"type": "message", **item}])
        assert prompt(reasoning_server, script).endswith(end)


SCHEMA = {
    "type": "object",
    "properties": {"petals": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["petals"],
    "additionalProperties": False,
}


def test_structured_text(server: LiveServer) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "rose", "strict": True, "schema": SCHEMA}}
    how: dict[str, Any] = {"max_output_tokens": 60, "temperature": 1.0, "seed": 5}
    how["structured_outputs"] = {"disable_any_whitespace": True}
    response = check_stream(server, text=wanted, **how)
    assert json.loads(response["output"][0]["content"][0]["text"])["petals"] in range(100)
    assert response["text"] == {"verbosity": None, "format": {**wanted["format"], "description": None}}
    assert response["status"] == "completed"
    how.pop("structured_outputs")
    text = create(server, text={"format": {"type": "json_object"}}, temperature=1.0, max_output_tokens=3)
    assert text.output_text.startswith("{")
    assert create(server, text={"format": {"type": "text"}}).output_text == create(server).output_text


def test_long_inputs_are_cut_if_asked(server: LiveServer) -> None:
    window = server.engine.input_processor.max_model_len
    asked = {"input": "rose " * window, "max_output_tokens": 1}
    refused = server.post(PATH, asked)
    check_refused(refused, "input", "tokens")
    usage = create(server, **asked, truncation="auto").usage
    assert usage is not None and usage.input_tokens == window - 1


def message(**fields: object) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a", **fields}]}


def deep(levels: int) -> Any:
    return json.loads('{"a":' * levels + "1" + "}" * levels)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": None}, "input", "a text or a list of items"),
        ({"input": 5}, "input", "a text or a list of items"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"role": "user", "content": "a"}] * 1025}, "input", "at most 1024 items"),
        ({"input": "x" * 1_000_000}, "input", "got 1000000 characters"),
        (message(role="tool"), "input.0.role", "'system', 'developer', 'user' or 'assistant'"),
        (message(role=None), "input.0.role", "missing, but required"),
        (message(content=None), "input.0.content", "missing, but required"),
        (message(name="x"), "input.0.name", "not supported in a message; allowed are content, id, role"),
        (message(**{"x" * 5000: 1}), "input.0." + "x" * 256, "not supported in a message"),
        (
            message(content=[{"type": "input_image", "image_url": "data:"}]),
            "input.0.content.0.type",
            "got 'input_image', allowed is: 'input_text', 'output_text'",
        ),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input.0.type", "got 'item_reference'"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input.0.call_id",
            "missing, but required",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input.0.encrypted_content",
            "not supported in a reasoning",
        ),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" * 500 + "]" * 500}
                ]
            },
            "input",
            "nested more than 64 levels deep",
        ),
        ({"conversation": {"id": "c"}}, "conversation", "which is not supported; allowed is null"),
        ({"background": True}, "background", "which is not supported; allowed is null or False"),
        ({"prompt": {"id": "p"}}, "prompt", "which is not supported"),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": "5"}, "top_logprobs", "valid integer"),
        ({"include": ["message.output_text"]}, "include.0", "got 'message.output_text'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": True}, "max_output_tokens", "valid integer"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "the model's window"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "a")}, "metadata", "at most 16 items"),
        ({"truncation": "left"}, "truncation", "'auto' or 'disabled'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "allowed is: 'function'"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "missing, but required"),
        (
            {"tools": [{**TOOLS[0], "parameters": deep(300)}], "tool_choice": "none"},
            "tools",
            "nested more than 64 levels",
        ),
        ({"tools": TOOLS}, "tool_choice", "--enable-auto-tool-choice and --tool-call-parser"),
        ({"tool_choice": "required"}, "tool_choice", "got 'required' without tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "lose"}},
            "tool_choice",
            "got 'lose', allowed is the name of one of the tools",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "got json_schema without one"),
        (
            {
                "text": {"format": {"type": "json_schema", "schema": deep(300)}},
                "tools": TOOLS,
                "tool_choice": "required",
            },
            "text",
            "allowed is a schema of at most 64 levels",
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "objec"}}}},
            "text",
            "text: got one that cannot be compiled",
        ),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", "got 'some'"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "which the server sets"),
        ({"instuctions": "x"}, "instuctions", "did you mean 'instructions'"),
    ],
)
def test_refusals(server: LiveServer, fields: dict[str, Any], param: str, text: str) -> None:
    check_refused(server.post(PATH, {**ASKED, **fields}), param, text)


def test_the_template_refuses_an_input(server: LiveServer) -> None:
    check_refused(
        server.post(PATH, {"input": "forbidden"}), "input", "the model's chat template refuses them"
    )


def test_nothing_is_stored(server: LiveServer) -> None:
    for call in (
        server.openai.responses.retrieve,
        server.openai.responses.delete,
        server.openai.responses.cancel,
    ):
        with pytest.raises(openai.NotFoundError, match="answers are not stored"):
            call("resp_1")
    with pytest.raises(openai.NotFoundError, match="previous_response_id: got 'resp_1', but answers are not"):
        create(server, previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="model: got 'other'"):
        create(server, model="other")


def test_a_client_that_leaves_ends_its_answer(server: LiveServer) -> None:
    left = f'http_responses_total{{route="{PATH}",status="499"}}'
    before = server.metric(left), server.metric(ABORTED)
    body = {"input": "Once upon a time", "max_output_tokens": 900, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", PATH, json=body) as answer:
        assert next(answer.iter_lines()) == "event: response.created"
    wait_until(lambda: (server.metric(left), server.metric(ABORTED)) == (before[0] + 1, before[1] + 1))
    server.wait_until_idle()


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
    assert (last["type"], last["message"], last["code"]) == ("error", "no more", "generation_error")
    with pytest.raises(openai.APIError, match="no more"):
        list(reasoning_server.openai.responses.create(model=MODEL, input="a", stream=True))


@pytest.mark.parametrize("streams", [False, True])
def test_long_answers_are_written_in_pieces(streams: bool) -> None:
    text = "x" * (1 << 18) + "[TOOL_CALLS]f{}" * 5000
    answer = ResponseAnswer(
        AnswerOptions("resp_1", 0, MODEL),
        echoed={},
        usage=lambda: (
            {name: 1 for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
            | {"prompt_tokens_details": {"cached_tokens": 0}}
        ),
        end_of_reasoning=None,
        parser=MAKE_TOOL_CALL_PARSER["mistral"],
        token_bytes=lambda _: b"",
        num_top_logprobs=20,
    )
    position = {token_id: Logprob(-1.0, token_id + 1, "x" * 64) for token_id in range(21)}
    completion = CompletionOutput(0, text, [7], logprobs=[position] * 2000, finish_reason="stop")
    output = RequestOutput("1", None, [1], [completion], True)
    if streams:
        pieces = list(answer.events(0, output))
    else:
        assert set(answer.keep(0, output)) == {""}
        pieces = list(answer.body({}))
    # What comes between two pieces holds the event loop.
    assert max(map(len, pieces)) < 1 << 18
    whole = b"".join(pieces)
    body = json.loads(whole.split(b"data: ")[-1])["response"] if streams else json.loads(whole)
    assert len(body["output"]) == 5001 and body["output"][0]["content"][0]["text"] == "x" * (1 << 18)
    assert len(body["output"][0]["content"][0]["logprobs"]) == 2000
