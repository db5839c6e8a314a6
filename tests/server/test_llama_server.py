"""A Qwen3 with a chat template and a generation_config.json over HTTP, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.server.live_server import (
    MODEL,
    LiveServer,
    running_server,
    stream,
)
from tests.support.llama_checkpoints import WINDOW, change_json, write_checkpoint
from tests.support.reference_generation import greedy_reference, tie_free_answer

CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who planted the rose?"},
]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint; one of the first tokens of its answer to ``MESSAGES`` ends it."""
    path = write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


@pytest.fixture(scope="module")
def prompt(checkpoint: Path) -> list[int]:
    """Return the conversation in tokens."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.fixture(scope="module")
def greedy(checkpoint: Path, prompt: list[int]) -> tuple[int, ...]:
    """Return transformers' greedy answer."""
    return tie_free_answer(checkpoint, prompt, NUM_TOKENS)


@pytest.fixture(scope="module", params=[False, True], ids=["one-process", "two-processes"])
def server(request: pytest.FixtureRequest, checkpoint: Path, greedy: tuple[int, ...]) -> Iterator[LiveServer]:
    """Return a server whose model recommends a draw among one token."""
    fields = {"do_sample": True, "temperature": 0.6, "top_k": 1, "max_new_tokens": NUM_TOKENS}
    change_json(checkpoint / "generation_config.json", **fields)
    with running_server(checkpoint, {"frontend_multiprocessing": request.param}) as server:
        yield server
        server.wait_until_idle()


def test_an_answer_by_recommended_parameters(
    server: LiveServer, checkpoint: Path, prompt: list[int], greedy: tuple[int, ...]
) -> None:
    text = AutoTokenizer.from_pretrained(checkpoint).decode(greedy)
    answer = server.openai.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), NUM_TOKENS)
    events = stream(server, "/v1/chat/completions", messages=MESSAGES, top_k=None, max_tokens=None)
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == text


def test_what_a_request_says_counts(server: LiveServer, greedy: tuple[int, ...]) -> None:
    drawn = {
        server.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=seed, max_tokens=6, temperature=2.0, extra_body={"top_k": 0}
        )
        .choices[0]
        .message.content
        for seed in range(4)
    }
    assert len(drawn) > 1


def test_completions_take_them_but_for_the_limit(
    server: LiveServer, checkpoint: Path, prompt: list[int], greedy: tuple[int, ...]
) -> None:
    text = AutoTokenizer.from_pretrained(checkpoint).decode(greedy[:16])
    assert server.text(prompt=prompt) == text


def test_a_limit_ends_with_the_window(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "薔" * 970}]
    answer = server.http.post("/v1/chat/completions", json={"messages": messages, "ignore_eos": True}).json()
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert WINDOW - NUM_TOKENS < prompt_tokens < WINDOW
    assert answer["usage"]["total_tokens"] == WINDOW


def test_off(checkpoint: Path, prompt: list[int], greedy: tuple[int, ...]) -> None:
    text = AutoTokenizer.from_pretrained(checkpoint).decode(greedy[:16])
    with running_server(checkpoint, generation_config="none") as server:
        answers = {server.text(prompt=prompt, seed=seed) for seed in range(4)}
        assert len(answers) > 1
        assert server.text(prompt=prompt, temperature=0) == text
        long = server.http.post("/v1/chat/completions", json={"messages": MESSAGES, "ignore_eos": True})
        assert long.json()["usage"]["total_tokens"] == WINDOW


def test_an_end_token_of_the_file_ends_an_answer(checkpoint: Path, tmp_path: Path, prompt: list[int]) -> None:
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokens = greedy_reference(checkpoint, (tuple(prompt),), NUM_TOKENS).token_ids[0]
    end = tokens[5]
    place = tokens.index(end)
    change_json(tmp_path / "generation_config.json", eos_token_id=[end, 0])
    with running_server(tmp_path, generation_config="none") as server:
        answer = server.openai.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0.0)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == AutoTokenizer.from_pretrained(checkpoint).decode(
        tokens[:place]
    )
