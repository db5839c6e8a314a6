"""Reasoning apart from answers, and what requests set in the chat template, over HTTP with a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import RequestError
from rose_backend.server.chat_template import ChatTemplate
from tests.server.live_server import GREEDY, LiveServer, check_refused, stream
from tests.server.test_tools import CALL, TOOLS, Script, scripted, template_server

PATH = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Where?"}]}
TEMPLATE = (
    "{{ reasoning_effort }}/{{ enable_thinking }}/{{ tone }}/{{ bos_token }}\n"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module", params=["qwen3", "deepseek_r1"])
def reasoning_server(
    request: pytest.FixtureRequest, tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Return a server for models that reason."""
    folder = tmp_path_factory.mktemp("template")
    with template_server(tiny_model_path, folder, TEMPLATE, reasoning_parser=request.param) as server:
        yield server


@pytest.fixture
def script(reasoning_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Script:
    return scripted(reasoning_server, monkeypatch)


def said(server: LiveServer, **fields: object) -> tuple[str | None, str | None, int]:
    """Return content, reasoning and the number of calls of an answer, which must be the same as a stream's."""
    answer = server.post(PATH, {**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    deltas = [event["choices"][0]["delta"] for event in stream(server, PATH, **{**ASKED, **fields})]
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == (message.get(name) or "")
    num_calls = sum("name" in call["function"] for delta in deltas for call in delta.get("tool_calls", ()))
    assert num_calls == len(message.get("tool_calls", ()))
    return message["content"], message.get("reasoning"), num_calls


def prompt(server: LiveServer, script: Script) -> str:
    return server.engine.input_processor.tokenizer.decode(script.inputs[-1].token_ids.tolist())


def test_reasoning_is_apart(reasoning_server: LiveServer, script: Script) -> None:
    script.text = "<think>\nHm.\n</think>\n\nHere."
    assert said(reasoning_server) == ("\n\nHere.", "\nHm.\n", 0)
    assert said(reasoning_server, include_reasoning=False) == ("\n\nHere.", None, 0)
    script.text = "Hm.</think>" + CALL
    assert said(reasoning_server, tools=TOOLS) == (None, "Hm.", 1)
    script.text = "Hm."
    assert said(reasoning_server) == (None, "Hm.", 0)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "//"),
        ({"reasoning_effort": "none"}, "none/False/"),
        ({"reasoning_effort": "high"}, "high/True/"),
        ({"chat_template_kwargs": {"enable_thinking": False, "tone": "kind"}}, "/False/kind"),
        (
            {
                "reasoning_effort": "low",
                "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "x"},
            },
            "low/False/",
        ),
    ],
)
def test_variables_of_the_template(
    reasoning_server: LiveServer, script: Script, fields: dict[str, Any], shown: str
) -> None:
    script.text = "Yes."
    thinks = "False" not in shown or reasoning_server.settings.reasoning_parser == "deepseek_r1"
    assert said(reasoning_server, **fields) == ((None, "Yes.", 0) if thinks else ("Yes.", None, 0))
    assert prompt(reasoning_server, script).startswith(f"{shown}/")


@pytest.mark.parametrize("last", ["It is", "It is ", "", "<think>Hm", "<think>Hm</think>It"])
def test_an_answer_goes_on(reasoning_server: LiveServer, script: Script, last: str) -> None:
    script.text = " here."
    messages = [*ASKED["messages"], {"role": "assistant", "content": last}]
    answer = said(reasoning_server, messages=messages, continue_final_message=True)
    assert answer == ((None, " here.", 0) if last == "<think>Hm" else (" here.", None, 0))
    assert prompt(reasoning_server, script).endswith(f"<user>Where?<end>\n<assistant>{last}")


@pytest.mark.parametrize("source", ["{{ m.content }}", "{{ m.content | trim }}", "[{{ m.content }}]\n"])
@pytest.mark.parametrize("last", ["It is", "It is \n", "  It", ""])
def test_a_message_that_goes_on_is_transformers(
    tiny_model_path: Path, tmp_path: Path, source: str, last: str
) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}" + source + "{% endfor %}")
    template = ChatTemplate(str(path))
    template.use(Tokenizer(tiny_model_path))
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": last}]
    ours = template.render(messages, add_generation_prompt=False, max_length=1000, continues=True)
    (theirs,), _ = render_jinja_template(
        [messages], chat_template=path.read_text(), continue_final_message=True
    )
    assert ours == theirs


def test_a_last_message_that_is_not_shown(tiny_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }}")
    template = ChatTemplate(str(path))
    template.use(Tokenizer(tiny_model_path))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(RequestError, match=r"^continue_final_message: got a last message") as caught:
        template.render(messages, add_generation_prompt=False, max_length=1000, continues=True)
    assert caught.value.parameter == "continue_final_message"


def test_without_a_parser_reasoning_is_content(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    monkeypatch.setattr(server.engine, "generate_deltas", script.generate_deltas)
    script.text = "<think>Hm.</think>Yes."
    assert said(server, **GREEDY) == (script.text, None, 0)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "a valid dictionary"),
        *(
            (
                {"chat_template_kwargs": {name: []}},
                "chat_template_kwargs",
                f"got {name}, which the server sets",
            )
            for name in ("messages", "tools", "add_generation_prompt", "chat_template", "bos_token", "self")
        ),
        ({"chat_template_kwargs": {"a": [1] * 70_000}}, "chat_template_kwargs", "more than 65536 values"),
        ({"chat_template_kwargs": {"a": "x" * 250_000}}, "chat_template_kwargs", "characters, allowed are"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "got 'huge', allowed is: 'none', "),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "got true together with add_generation_prompt",
        ),
        ({"include_reasoning": "no"}, "include_reasoning", "a valid boolean"),
    ],
)
def test_refusals(server: LiveServer, fields: dict[str, Any], param: str, message: str) -> None:
    check_refused(server.post(PATH, {**ASKED, **fields}), param, message)
