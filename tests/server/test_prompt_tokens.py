"""What becomes of a prompt's text before the model sees it: special tokens and truncation, against transformers."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rose_backend.server import routes
from tests.server.live_server import LiveServer, check_refused, in_event_loop, running_server, stream
from tests.support.llama_checkpoints import change_json
from tests.support.patience import HANG_S

CHAT = "/v1/chat/completions"
BEGIN = 0
TEXT = "The old king walked through the garden, and the roses spoke to him."
ONE: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def checkpoint(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose tokenizer puts the token ``BEGIN`` in front of every text."""
    path = tmp_path_factory.mktemp("begins") / "model"
    shutil.copytree(tiny_model_path, path)
    name = AutoTokenizer.from_pretrained(path).convert_ids_to_tokens(BEGIN)
    begin = {"SpecialToken": {"id": name, "type_id": 0}}
    single = [begin, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, begin, {"Sequence": {"id": "B", "type_id": 0}}]
    special = {name: {"id": name, "ids": [BEGIN], "tokens": [name]}}
    made = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    change_json(path / "tokenizer.json", post_processor=made)
    return path


@pytest.fixture(scope="module")
def begins(checkpoint: Path, chat_template: Path) -> Iterator[LiveServer]:
    with running_server(checkpoint, {"chat_template": str(chat_template)}) as server:
        yield server


@pytest.fixture(scope="module")
def ids(checkpoint: Path) -> list[int]:
    """Return the tokens of ``TEXT`` without the one in front."""
    found: list[int] = AutoTokenizer.from_pretrained(checkpoint).encode(TEXT, add_special_tokens=False)
    return found


def prompt_of(server: LiveServer, prompt: object = TEXT, **fields: object) -> list[int]:
    answer = server.complete(prompt=prompt, **ONE, **fields)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["prompt_token_ids"]
    return found


def chat_prompt_of(server: LiveServer, content: str, **fields: object) -> list[int]:
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": content}], **ONE, **fields})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["prompt_token_ids"]
    return found


def test_special_tokens(begins: LiveServer, ids: list[int]) -> None:
    for value in (True, None):
        assert prompt_of(begins, add_special_tokens=value) == [BEGIN, *ids]
    assert prompt_of(begins, add_special_tokens=False) == ids
    assert prompt_of(begins, ids, add_special_tokens=True) == ids
    plain = chat_prompt_of(begins, TEXT)
    assert BEGIN not in plain
    for value in (False, None):
        assert chat_prompt_of(begins, TEXT, add_special_tokens=value) == plain
    assert chat_prompt_of(begins, TEXT, add_special_tokens=True) == [BEGIN, *plain]


def test_special_tokens_of_tokenize(begins: LiveServer, ids: list[int]) -> None:
    def tokens(**body: object) -> object:
        return begins.post("/tokenize", body).json()["tokens"]

    assert tokens(prompt=TEXT) == tokens(prompt=TEXT, add_special_tokens=True) == [BEGIN, *ids]
    assert tokens(prompt=TEXT, add_special_tokens=False) == ids
    messages = [{"role": "user", "content": TEXT}]
    plain = chat_prompt_of(begins, TEXT)
    assert tokens(messages=messages) == plain
    assert tokens(messages=messages, add_special_tokens=True) == [BEGIN, *plain]


def test_truncation_is_transformers(begins: LiveServer, checkpoint: Path, ids: list[int]) -> None:
    # vLLM's tokenizer truncates on the left unless told.
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, truncation_side="left")
    for limit in (2, 5, len(ids), len(ids) + 1, 1000):
        for adds in (True, False):
            expected = tokenizer.encode(TEXT, truncation=True, max_length=limit, add_special_tokens=adds)
            assert prompt_of(begins, truncate_prompt_tokens=limit, add_special_tokens=adds) == expected


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_the_side_of_truncation(begins: LiveServer, ids: list[int], limit: int) -> None:
    fields = {"truncate_prompt_tokens": limit}
    whole = [BEGIN, *ids]
    assert prompt_of(begins, **fields, truncation_side="left") == whole[-limit:]
    assert prompt_of(begins, **fields, truncation_side="right") == whole[:limit]
    for side, expected in (("left", ids[-limit:]), (None, ids[-limit:]), ("right", ids[:limit])):
        assert prompt_of(begins, ids, **fields, truncation_side=side) == expected
        answer = begins.complete(prompt=[TEXT, "a"], **ONE, **fields, truncation_side=side, stream=True)
        assert answer.status_code == 200
    plain = chat_prompt_of(begins, TEXT)
    assert chat_prompt_of(begins, TEXT, **fields) == plain[-limit:]
    assert chat_prompt_of(begins, TEXT, **fields, truncation_side="right") == plain[:limit]


def test_prompts_longer_than_the_window(begins: LiveServer) -> None:
    text = "rose king " * 30_000  # more characters than a window of the longest token has
    tokens = prompt_of(begins, text, truncate_prompt_tokens=-1)
    assert len(tokens) == 1023 and tokens[0] == BEGIN and BEGIN not in tokens[1:]
    assert prompt_of(begins, [7] * 5000 + [8, 9], truncate_prompt_tokens=-1) == [7] * 1021 + [8, 9]
    # What is cut off is not looked at.
    assert prompt_of(begins, [10**9] * 5000 + [8, 9], truncate_prompt_tokens=2) == [8, 9]
    assert len(chat_prompt_of(begins, text, truncate_prompt_tokens=-1)) == 1023
    long = "a " * 1_100_000 + TEXT + "b " * 1_100_000
    for side, end in (("left", [*"b "]), ("right", [*"a "])):
        tokens = prompt_of(begins, long, truncate_prompt_tokens=6, truncation_side=side)
        kept = begins.post("/detokenize", {"tokens": tokens[1:]}).json()["prompt"]
        assert len(tokens) == 6 and set(kept) == set(end), kept
    events = stream(begins, prompt=text, truncate_prompt_tokens=1000, max_tokens=99, ignore_eos=True)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
        (
            {"truncate_prompt_tokens": 1025},
            "truncate_prompt_tokens",
            "got 1025, allowed are at most 1024, the",
        ),
        ({"truncate_prompt_tokens": 10**30}, "truncate_prompt_tokens", "allowed are at most 1024"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens", "got True"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "got 0, allowed are -1 and 1 to 1024"),
        ({"truncate_prompt_tokens": 1024, "prompt": [5] * 1024}, "prompt", "got 1024 tokens"),
        ({"truncate_prompt_tokens": 3, "prompt": [5, "a"] * 5}, "prompt", "allowed are a string"),
        ({"truncate_prompt_tokens": 3, "prompt": [[5], ["a"] * 5]}, "prompt", "got token id str"),
        ({"truncate_prompt_tokens": 3, "prompt": [5] * 2000 + [9999]}, "prompt", "got token id 9999"),
        ({"truncate_prompt_tokens": 9, "prompt": "a " * 1_100_000}, "prompt", "got more than 1048576 tokens"),
        ({"truncation_side": "middle"}, "truncation_side", "got 'middle', allowed is: 'left' or 'right'"),
        ({"add_special_tokens": 5}, "add_special_tokens", "got 5, allowed is: a valid boolean"),
    ],
)
def test_refusals(server: LiveServer, fields: dict[str, Any], param: str, message: str) -> None:
    check_refused(server.complete(**{"prompt": "a", "max_tokens": 1, **fields}), param, message)


@in_event_loop
async def test_long_texts_to_truncate_take_turns() -> None:
    """As many at once as there are threads would take 2 GB and more."""
    turn, running, most, proceed = asyncio.Semaphore(1), 0, 0, threading.Event()

    def work() -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert proceed.wait(HANG_S)
        running -= 1
        return most

    tasks = [asyncio.create_task(routes.run_by_length(1 << 20, work, turn)) for _ in range(3)]
    try:
        while not running:
            await asyncio.sleep(0)
        # Its client leaves: the thread goes on, and the next one waits for it all the same.
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        # Shorter texts do not wait.
        assert await routes.run_by_length(1 << 17, lambda: 5, turn) == 5 and turn.locked()
    finally:
        proceed.set()
    assert await asyncio.gather(*tasks[1:]) == [1, 1] and not turn.locked()
