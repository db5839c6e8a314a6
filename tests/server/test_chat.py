"""``/v1/chat/completions``: the template's text goes through the engine, OpenAI's shapes come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rose_backend import LLM, SamplingParams
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import ConfigError, ModelError, RequestError
from rose_backend.server.chat_template import ChatTemplate, plain_messages
from rose_backend.server.protocol import ChatMessage
from tests.server.live_server import (
    GREEDY,
    MODEL,
    NO_REPLY,
    LiveServer,
    check_refused,
    error_of,
    running_server,
    stream,
)

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "name": "Ann", "content": "Tell me of the king."},
]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "chat_template.jinja"
RENDERED = "system: Be kind.\nuser Ann: Tell me of the king.\nassistant:"


def said(content: object, **fields: object) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def post(server: LiveServer, **body: object) -> Any:
    return server.post("/v1/chat/completions", body)


def test_the_template_makes_the_prompt(server: LiveServer, llm: LLM) -> None:
    expected = llm.generate(RENDERED, SamplingParams(**GREEDY))[0]
    answer = server.openai.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_tokens_are_forbidden_and_biased(server: LiveServer, llm: LLM) -> None:
    fields = {"bad_words": [" king"], "logit_bias": {"11": 3.0}, "allowed_token_ids": list(range(700))}
    expected = llm.generate(RENDERED, SamplingParams(**GREEDY, **fields))[0].outputs[0].text
    answer = post(server, messages=MESSAGES, **GREEDY, **fields).json()
    assert answer["choices"][0]["message"]["content"] == expected


def test_the_example_serves_a_model_without_a_template(tiny_model_path: Path) -> None:
    template = ChatTemplate(str(EXAMPLE))
    template.use(Tokenizer(tiny_model_path))
    messages = plain_messages([ChatMessage(**each) for each in MESSAGES])
    text = rendered(template, messages)
    assert text == "System: Be kind.\n\nUser: Tell me of the king.\n\nAssistant:"


def test_without_the_start_of_an_answer(server: LiveServer, llm: LLM) -> None:
    text = RENDERED.removesuffix("assistant:")
    expected = llm.generate(text, SamplingParams(**GREEDY))[0].outputs[0].text
    answer = post(server, messages=MESSAGES, add_generation_prompt=False, **GREEDY).json()
    assert answer["choices"][0]["message"] == {**NO_REPLY, "role": "user", "content": expected}


def test_the_last_message_is_repeated(server: LiveServer) -> None:
    body = {
        "messages": [*MESSAGES, said("The king", role="assistant")],
        "continue_final_message": True,
        **GREEDY,
    }
    plain, echoed = (post(server, **body, echo=echo).json() for echo in (False, True))
    text = plain["choices"][0]["message"]["content"]
    assert echoed["choices"][0]["message"]["content"] == "The king" + text
    # As in vLLM.
    assert plain["prompt_logprobs"] is None
    assert [len(each or ()) for each in echoed["prompt_logprobs"]][:2] == [0, 1]
    usage = {"include_usage": True, "continuous_usage_stats": True}
    opening, repeated, *rest, counts = stream(
        server, "/v1/chat/completions", **body, echo=True, stream_options=usage
    )
    for event in (opening, repeated):
        assert event["usage"]["completion_tokens"] == 0
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert repeated["choices"][0]["delta"] == {"content": "The king"}
    assert "".join(event["choices"][0]["delta"]["content"] for event in rest) == text
    assert counts["usage"]["completion_tokens"] == echoed["usage"]["completion_tokens"]
    # Not the user's.
    asked = {"messages": MESSAGES, **GREEDY}
    assert post(server, **asked, echo=True).json()["choices"] == post(server, **asked).json()["choices"]


def test_a_message_without_content_is_empty(server: LiveServer) -> None:
    bare, empty = (
        post(server, messages=[{"role": "user", **fields}], **GREEDY).json()["choices"]
        for fields in ({}, {"content": ""})
    )
    assert bare == empty


def test_text_parts_are_joined(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    whole = post(server, messages=[{"role": "user", "content": "One\ntwo"}], **GREEDY).json()
    assert (
        post(server, messages=[{"role": "user", "content": parts}], **GREEDY).json()["choices"]
        == whole["choices"]
    )


def test_an_answer_can_be_sent_back(server: LiveServer) -> None:
    first = server.openai.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    messages = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "And then?"}]
    second = server.openai.chat.completions.create(model=MODEL, messages=messages, **GREEDY)
    assert second.choices[0].message.content
    assert second.usage is not None and first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(server: LiveServer, name: str) -> None:
    answer = post(server, messages=MESSAGES, temperature=0, **{name: 3}).json()
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("others", [2, 5, 1025, None])
def test_the_newer_name_of_the_limit_counts(server: LiveServer, others: int | None) -> None:
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": others, "max_completion_tokens": 3}
    assert post(server, messages=MESSAGES, **fields).json()["usage"]["completion_tokens"] == 3


def test_a_limit_beyond_the_window_ends_there(server: LiveServer) -> None:
    message = {"role": "user", "content": "rose " * 300}
    fields = {"temperature": 0, "ignore_eos": True}
    for limit in ({"max_tokens": 1024}, {"max_completion_tokens": 1000}):
        answer = post(server, messages=[message], **fields, **limit).json()
        assert answer["usage"]["total_tokens"] == 1024
        assert answer["choices"][0]["finish_reason"] == "length"
    answer = server.complete(
        prompt=[[70] * 1023, [71] * 1020], max_tokens=4, n=2, seed=1, ignore_eos=True
    ).json()
    assert answer["usage"]["completion_tokens"] == 2 * (1 + 4)
    events = stream(server, prompt=[70] * 1020, max_tokens=1000, **fields)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_no_limit_fills_the_window(server: LiveServer) -> None:
    message = {"role": "user", "content": "rose " * 300}
    answer = post(server, messages=[message], temperature=0, ignore_eos=True).json()
    assert answer["usage"]["total_tokens"] == server.engine.input_processor.max_model_len


def test_logprobs_are_the_engines(server: LiveServer, llm: LLM) -> None:
    expected = llm.generate(RENDERED, SamplingParams(seed=1, max_tokens=6, logprobs=3))[0].outputs[0].logprobs
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=1, max_tokens=6, logprobs=True, top_logprobs=3
    )
    shown = answer.choices[0].logprobs
    assert shown is not None and shown.content is not None and expected is not None
    for position, entry in zip(shown.content, expected, strict=True):
        chosen, *_ = entry.values()
        assert (position.token, position.logprob) == (
            chosen.decoded_token,
            pytest.approx(chosen.logprob, abs=1e-4),
        )
        assert bytes(position.bytes or []).decode() == position.token
        best = sorted((each for each in entry.values() if each.rank <= 3), key=lambda each: each.rank)
        assert [top.token for top in position.top_logprobs] == [each.decoded_token for each in best]
        assert [top.logprob for top in position.top_logprobs] == pytest.approx(
            [each.logprob for each in best], abs=1e-4
        )


def test_logprobs_without_alternatives(server: LiveServer) -> None:
    answer = post(server, messages=MESSAGES, logprobs=True, **GREEDY).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 12 and all(position["top_logprobs"] == [] for position in content)


def test_a_stream_adds_up_to_the_whole(server: LiveServer) -> None:
    fields = {"messages": MESSAGES, "n": 2, "seed": 6, "max_tokens": 10, "logprobs": True, "top_logprobs": 1}
    whole = post(server, **fields).json()
    events = stream(server, "/v1/chat/completions", **fields)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(set(part["delta"]) == {"content"} for part in mine[1:])
        assert "".join(part["delta"]["content"] for part in mine) == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
        tokens = [
            entry["token"] for part in mine if part["logprobs"] for entry in part["logprobs"]["content"]
        ]
        assert tokens == [entry["token"] for entry in choice["logprobs"]["content"]]


def test_a_template_with_a_mistake(tiny_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for message in messages %}\n{{ message.content }")
    tokenizer = Tokenizer(tiny_model_path)
    with pytest.raises(ConfigError, match=r"^chat_template: line 2: "):
        ChatTemplate(str(path)).use(tokenizer)
    with pytest.raises(ConfigError, match=r"^chat_template: line 2: "):
        ChatTemplate(str(path)).check_syntax()
    path.write_text("{{ raise_exception('at least two messages') }}")
    template = ChatTemplate(str(path))
    template.use(tokenizer)
    template.check_available()


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.a.b }}",
        "{{ messages[0].content.encode('ascii').foo() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages | sum }}",
        "{% include 'a' %}",
        "{{ raise_exception(3) }}",
    ],
)
def test_a_template_that_fails_does_not_end_the_start(
    tiny_model_path: Path, tmp_path: Path, source: str
) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(source)
    template = ChatTemplate(str(path))
    template.use(Tokenizer(tiny_model_path))
    template.check_available()
    with pytest.raises(RequestError, match=r"^messages: the model's chat template refuses them") as caught:
        rendered(template, [{"role": "user", "content": "a"}])
    assert caught.value.parameter == "messages"


def rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    return template.render(messages, add_generation_prompt=True, max_length=1000)


def model_with(path: Path, tiny_model_path: Path, **files: str) -> ChatTemplate:
    """Return the template of a model's directory that has these files, too; ``__`` is a dot."""
    for file in ("config.json", "tokenizer.json"):
        (path / file).write_bytes((tiny_model_path / file).read_bytes())
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    template = ChatTemplate(None)
    template.use(Tokenizer(path))
    return template


def test_the_template_of_a_processor(tiny_model_path: Path, tmp_path: Path) -> None:
    file = json.dumps({"chat_template": "{{ messages[0].content }}!"})
    template = model_with(tmp_path, tiny_model_path, chat_template__json=file)
    assert rendered(template, [{"role": "user", "content": "a"}]) == "a!"
    template = model_with(tmp_path, tiny_model_path, chat_template__jinja="{{ messages[0].content }}?")
    assert rendered(template, [{"role": "user", "content": "a"}]) == "a?"


@pytest.mark.parametrize("content", ['{"chat_template": 5}', "[]", "{"])
def test_a_processors_file_without_template(tiny_model_path: Path, tmp_path: Path, content: str) -> None:
    with pytest.raises(ModelError, match="chat"):
        model_with(tmp_path, tiny_model_path, chat_template__json=content)


@pytest.mark.parametrize("names", [("tool_use", "default"), ("tool_use", "rag")])
def test_named_templates(tiny_model_path: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    config = {"chat_template": [{"name": name, "template": f"{name} {{{{ eos_token }}}}"} for name in names]}
    template = model_with(
        tmp_path, tiny_model_path, tokenizer_config__json=json.dumps({**config, "eos_token": "<|endoftext|>"})
    )
    if "default" in names:
        template.check_available()
        assert rendered(template, []) == "default <|endoftext|>"
    else:
        with pytest.raises(
            RequestError, match=r"several chat templates \(\['rag', 'tool_use'\]\), none of them named"
        ):
            template.check_available()


SYSTEM, DEVELOPER, USER = (
    {"role": "system", "content": "s"},
    {"role": "developer", "content": "d"},
    {"role": "user", "content": "u"},
)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([DEVELOPER, USER], "system:d user:u "),
        ([SYSTEM, USER, DEVELOPER, USER], "system:s\n\nd user:u user:u "),
        ([USER, DEVELOPER], "system:d user:u "),
        # As the template has it, where nobody has this role.
        ([USER, SYSTEM], "user:u system:s "),
    ],
)
def test_instructions_of_a_developer(
    tiny_model_path: Path, tmp_path: Path, messages: list[dict[str, Any]], expected: str
) -> None:
    source = "{% for message in messages %}{{ message.role }}:{{ message.content }} {% endfor %}"
    template = model_with(tmp_path, tiny_model_path, chat_template__jinja=source)
    assert rendered(template, messages) == expected
    assert rendered(template, messages) == _vllms(source, messages)
    # A template that knows the role gets it.
    knows = source + "{{ '' if messages[0].role == 'developer' }}"
    template = model_with(tmp_path, tiny_model_path, chat_template__jinja=knows)
    own = "".join(f"{message['role']}:{message['content']} " for message in messages)
    assert rendered(template, messages) == own == _vllms(knows, messages)


def _vllms(source: str, messages: list[Any]) -> str:
    """Return what vLLM makes of a conversation."""
    from vllm.renderers.hf import safe_apply_chat_template

    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=BackendTokenizer(BPE()))
    return str(
        safe_apply_chat_template(
            cast(Any, None),
            tokenizer,
            messages,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=True,
        )
    )


def test_a_model_without_template_is_named(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path) as server:
        answer = post(server, messages=MESSAGES)
        assert answer.status_code == 400
        assert "no chat template" in error_of(answer)["message"]
        assert "--chat-template" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "messages", "messages: missing, but required"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [said("a")] * 1025}, "messages", "at most 1024 items"),
        ({"messages": [said("a", name="x" * 257)]}, "messages.0.name", "at most 256 characters"),
        ({"messages": [{"role": "pirate", "content": "a"}]}, "messages.0.role", "got 'pirate'"),
        ({"messages": [said(5)]}, "messages.0.content", "valid string or a valid list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "got 'image_url', allowed is: 'text'",
        ),
        ({"messages": [said("forbidden")]}, "messages", "not this word"),
        ({"messages": [said("divided")]}, "messages", "refuses them (ZeroDivisionError"),
        ({"messages": [said("endless")]}, "messages", "refuses them (RecursionError"),
        ({"messages": [said("huge")]}, "messages", "refuses them ("),
        ({"messages": [said("nothing")]}, "messages", "refuses them (UndefinedError"),
        ({"messages": [said("a\ud800")]}, "messages", "not valid Unicode text"),
        ({"messages": [said("a", name="\udfff")]}, "messages.0.name", "allowed is: a valid string"),
        (
            {"messages": [said("a\ud800" * 999, name="refused")]},
            "messages",
            "refuses them (TemplateError: a\ud800a",
        ),
        ({"messages": [said("a", audio={"id": "1"})]}, "messages", "messages.0.audio: not supported"),
        # Clients look for these words.
        (
            {"messages": [said("rose " * 50_000)]},
            "messages",
            "this model's maximum context length is 1024 tokens",
        ),
        (
            {"messages": [said("rose " * 2_000)]},
            "messages",
            "this model's maximum context length is 1024 tokens",
        ),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "without logprobs"),
        (
            {"messages": MESSAGES, "max_tokens": 1025},
            "max_tokens",
            "max_tokens: got 1025, allowed are at most 1024",
        ),
        (
            {"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 1025},
            "max_completion_tokens",
            "max_completion_tokens: got 1025, allowed are at most 1024, the model's window",
        ),
        ({"messages": MESSAGES, "message": []}, "message", "did you mean 'messages'?"),
    ],
)
def test_chats_that_are_refused(server: LiveServer, fields: dict[str, Any], param: str, message: str) -> None:
    check_refused(server.post("/v1/chat/completions", fields), param, message)
