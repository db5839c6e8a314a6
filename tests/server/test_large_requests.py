"""No request keeps others waiting: what is done between two turns of the event loop, or in one call, is bounded."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message

from rose_backend.engine.outputs import CompletionOutput, Logprob, RequestOutput
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import QueueFullError, RequestError
from rose_backend.server import answers, generation, middleware, routes
from rose_backend.server.answers import Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from rose_backend.server.chat_template import ChatTemplate
from rose_backend.server.generation import ClientWatch, EventStream, Generation, PromptOutput
from rose_backend.server.middleware import _SHARES_THE_LOCK, parse_body
from rose_backend.server.protocol import ChatCompletionRequest, CompletionRequest
from rose_backend.server.service import RequestRecord
from tests.server.live_server import LiveServer, error_of, running_server

OPTIONS = AnswerOptions("id", 0, "m", n=2)
NUM_POSITIONS = 1000
MAX_CHARACTERS = 200_000
"""Of one piece: 65,536, and the part that reaches them."""


def positions(number: int, seed: int = 0) -> list[dict[int, Logprob]]:
    """Return log-probabilities of as many tokens as are reported at most for each."""
    return [
        {token: Logprob(-float(token + place), token + 1, f"é{token + seed}") for token in range(21)}
        for place in range(number)
    ]


def output(index: int, logprobs: list[dict[int, Logprob]] | None, text: str = "text") -> CompletionOutput:
    num_tokens = NUM_POSITIONS if logprobs is None else len(logprobs)
    return CompletionOutput(index, text, [5] * num_tokens, logprobs, -1.0, "length", None, text)


def made(kind: str) -> Answer:
    if kind == "completions":
        return CompletionAnswer(OPTIONS)
    return ChatAnswer(OPTIONS, token_bytes=lambda token_id: b"%d" % token_id, num_top_logprobs=20)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of positions that are formatted at once, as they come."""
    numbers: list[int] = []
    for kind in (CompletionAnswer, ChatAnswer):
        original = kind._described

        def note(answer: Any, index: int, some: Any, original: Any = original) -> Any:
            numbers.append(len(some))
            return original(answer, index, some)

        monkeypatch.setattr(kind, "_described", note)
    return numbers


def checked(pieces: Iterator[bytes], described: list[int]) -> bytes:
    """Return all pieces joined, each of which took few positions and characters."""
    joined = []
    for piece in pieces:
        assert sum(described) <= 3 * 64 and len(piece) <= MAX_CHARACTERS
        described.clear()
        joined.append(piece)
    return b"".join(joined)


def expected_logprobs(kind: str, logprobs: list[dict[int, Logprob]]) -> dict[str, Any]:
    return made(kind)._described(0, logprobs)


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize("number", [0, 1, 63, 64, 65, NUM_POSITIONS])
def test_whole_answers_are_written_in_pieces(kind: str, number: int, described: list[int]) -> None:
    expected = [expected_logprobs(kind, positions(number, seed)) for seed in range(4)]
    described.clear()
    answer = made(kind)
    for prompt in (1, 0):
        completions = [output(index, positions(number, 2 * prompt + index)) for index in range(2)]
        state = RequestOutput("r", None, [1, 2, 3], completions, finished=True)
        assert checked((piece.encode() for piece in answer.keep(prompt, state)), described) == b""
    del completions, state
    gc.collect()
    # Many objects would make each collection of garbage long.
    assert not any(type(each) is Logprob for each in gc.get_objects())
    whole = json.loads(checked(answer.body({}), described))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in whole["choices"]] == expected
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_events_are_written_in_pieces(kind: str, described: list[int]) -> None:
    expected = [expected_logprobs(kind, positions(NUM_POSITIONS, seed)) for seed in range(2)]
    described.clear()
    completions = [output(index, positions(NUM_POSITIONS, index)) for index in range(2)]
    state = RequestOutput("r", None, [1], completions, finished=True)
    events = checked(made(kind).events(0, state), described).split(b"\n\n")[:-1]
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    assert [choice["logprobs"] for choice in choices if choice["logprobs"]] == expected
    # The output's own lists are left alone.
    assert [len(each.logprobs or []) for each in completions] == [NUM_POSITIONS] * 2


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_long_texts_are_written_in_pieces(kind: str) -> None:
    text = "\u85d4\n\U0001f642" * 100_000
    answer = made(kind) if kind == "chat" else CompletionAnswer(OPTIONS, echo=[text])
    list(answer.keep(0, RequestOutput("r", None, [1], [output(0, None, text)], finished=True)))
    pieces = list(answer.body({}))
    # A character may be written as twelve.
    assert max(map(len, pieces)) < 13 * 65_536 and len(pieces) > 4
    (choice,) = json.loads(b"".join(pieces))["choices"]
    assert (choice["message"]["content"] if kind == "chat" else choice["text"]) in (text, text + text)


async def turns_between(sent: list[int]) -> None:
    """Count turns of the event loop in the last of ``sent``."""
    while True:
        sent[-1] += 1
        await asyncio.sleep(0)


def test_other_tasks_run_between_two_pieces() -> None:
    state = RequestOutput("r", None, [1], [output(0, positions(NUM_POSITIONS))], finished=True)
    turns = [0]
    bodies: list[bytes] = []

    async def send(message: Message) -> None:
        bodies.append(message["body"])
        turns.append(0)

    async def outputs() -> AsyncGenerator[PromptOutput, None]:
        return
        yield

    async def run() -> None:
        counting = asyncio.create_task(turns_between(turns))
        await asyncio.sleep(0)
        record = RequestRecord("r", "/v1/completions")
        watch = cast(ClientWatch, None)
        await EventStream((0, state), outputs(), made("completions"), record, 1, watch)._send_events(send)
        counting.cancel()

    asyncio.run(run())
    assert b"".join(bodies).endswith(b"data: [DONE]\n\n")
    assert len(bodies) > NUM_POSITIONS // 64 and all(turns[:-1])


def test_whole_answers_let_other_tasks_run(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_POSITIONS_AT_ONCE", 1)
    counts: Counter[str] = Counter()
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        counts[threading.current_thread().name] += 1
        await sleep(seconds)

    monkeypatch.setattr(generation, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": note}))
    answer = server.complete(prompt=["a", "b"], max_tokens=9, n=3, logprobs=2, ignore_eos=True)
    assert counts["rose-server"] >= 2 * 3 * 8
    assert int(answer.headers["content-length"]) == len(answer.content)
    lengths = [len(choice["logprobs"]["tokens"]) for choice in answer.json()["choices"]]
    assert lengths == [9] * 6


class NoMetrics:
    """Takes everything."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __getitem__(self, name: str) -> Any:
        return self

    def __call__(self, *_: object) -> None:
        pass


def make_generation(engine: object, num_prompts: int, submission: asyncio.Lock) -> Generation:
    service: Any = SimpleNamespace(
        engine=engine, metrics=NoMetrics(), engine_request_ids=set(), hit_unit=1, submission=submission
    )
    inputs: Any = [SimpleNamespace(params=SimpleNamespace(n=1))] * num_prompts
    return Generation(service, RequestRecord("r", "/v1/completions"), inputs)


def test_few_prompts_start_in_one_turn() -> None:
    started: list[int] = [0]

    class Engine:
        async def generate_deltas(
            self, processed: object, *, request_id: str
        ) -> AsyncGenerator[RequestOutput, None]:
            started[-1] += 1
            yield RequestOutput(request_id, None, [1], [CompletionOutput(0, "", [5])], finished=True)

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            started.append(0)

    async def run() -> int:
        counting = asyncio.create_task(count_turns())
        generation = make_generation(Engine(), 1024, asyncio.Lock())
        number = len([each async for each in generation.outputs()])
        counting.cancel()
        return number

    assert asyncio.run(run()) == 1024 == sum(started)
    assert max(started) <= 32


def test_requests_that_come_at_once_enter_the_queue_whole() -> None:
    """Twelve requests of 1,024 prompts were all refused by a queue of 10,000, though it has room for nine."""
    num_queued, all_came = 0, asyncio.Event()

    class Engine:
        async def generate_deltas(
            self, processed: object, *, request_id: str
        ) -> AsyncGenerator[RequestOutput, None]:
            nonlocal num_queued
            if num_queued == 1_000:
                raise QueueFullError("the queue is full")
            num_queued += 1
            await all_came.wait()
            yield RequestOutput(request_id, None, [1], [CompletionOutput(0, "", [5])], finished=True)

    async def answer(generation: Generation) -> int | QueueFullError:
        try:
            return len([each async for each in generation.outputs()])
        except QueueFullError as error:
            return error

    async def run() -> list[int | QueueFullError]:
        submission = asyncio.Lock()
        answers = [asyncio.create_task(answer(make_generation(Engine(), 102, submission))) for _ in range(12)]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        while sum(task.done() for task in answers) < 3:
            await asyncio.sleep(0)
        all_came.set()
        return await asyncio.gather(*answers)

    answers = asyncio.run(run())
    assert answers[:9] == [102] * 9
    assert all(isinstance(each, QueueFullError) for each in answers[9:])


@pytest.mark.parametrize(
    ("model", "body", "num_calls"),
    [
        (CompletionRequest, {"prompt": [1, 300, 50_000] * 10_000}, 30_000),
        (CompletionRequest, {"prompt": "a", "anything": [0.5] * 10_000}, 10_000),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 9}] * 1000},
            1000 * (1 + 9 + 1),
        ),
    ],
    ids=["ids", "numbers", "messages"],
)
def test_parsing_a_large_body_calls_python(model: Any, body: dict[str, Any], num_calls: int) -> None:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    # Another thread can only take the interpreter lock where Python code runs.
    sys.setprofile(count)
    try:
        parsed = parse_body(model, json.dumps(body).encode(), **_SHARES_THE_LOCK)
    finally:
        sys.setprofile(None)
    assert calls >= num_calls
    assert parsed == parse_body(model, json.dumps(body).encode())


def test_large_bodies_are_parsed_in_a_thread(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def note(model: Any, content: bytes, **how: Any) -> Any:
        seen.append((threading.current_thread().name, how))
        return parse_body(model, content, **how)

    monkeypatch.setattr(middleware, "parse_body", note)
    assert server.complete(prompt=[1, 2], max_tokens=1).status_code == 200
    assert server.complete(prompt=[1] * 200_000, max_tokens=1).status_code == 400
    assert server.complete(prompt=[[1, 300] * 100] * 400, max_tokens=5000).status_code == 400
    assert seen[0] == ("rose-server", {})
    for name, how in seen[1:]:
        assert name != "rose-server" and how == _SHARES_THE_LOCK
    assert len(seen) == 3


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a", "name": "rose " * 40}] * 50,
        [{"role": "user", "content": "a"}] * 100,
        [{"role": "user", "content": [{"type": "text", "text": "rose " * 100}] * 20}],
    ],
    ids=["names", "messages", "parts"],
)
def test_long_conversations_leave_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]]
) -> None:
    names: list[str] = []
    render = server.service.chat_template.render

    def note(*arguments: Any, **how: Any) -> str:
        names.append(threading.current_thread().name)
        return render(*arguments, **how)

    monkeypatch.setattr(server.service.chat_template, "render", note)
    short = [{"role": "user", "content": "a"}]
    for each in (short, messages):
        server.http.post("/v1/chat/completions", json={"messages": each, "max_tokens": 1})
    assert names[0] == "rose-server" and names[1] != "rose-server"


def test_a_long_rendered_text_is_not_finished(tiny_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for number in range(90000) %}{{ messages[0].content }}{% endfor %}")
    template = ChatTemplate(str(path))
    template.use(Tokenizer(tiny_model_path))
    shown = 0

    class Counted(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            nonlocal shown
            shown += name == "content"
            return super().__getitem__(name)

    with pytest.raises(
        RequestError, match=r"^messages: got more than 1000 characters from the chat template"
    ) as caught:
        template.render([Counted(role="user", content="a" * 10)], add_generation_prompt=True, max_length=1000)
    assert caught.value.parameter == "messages" and 100 <= shown <= 110
    assert (
        len(
            template.render([{"role": "user", "content": "a"}], add_generation_prompt=True, max_length=90_000)
        )
        == 90_000
    )


def test_a_rendered_text_that_cannot_fit_is_not_tokenized(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for number in range(20000) %}{{ messages[0].content }}{% endfor %}")
    with running_server(tiny_model_path, {"chat_template": str(path)}) as server:

        def tokenize(*_: object, **__: object) -> None:
            raise AssertionError("the text is tokenized")

        monkeypatch.setattr(server.engine.input_processor.tokenizer, "encode", tokenize)
        body = {"messages": [{"role": "user", "content": "rose "}]}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert (
            answer.status_code == 400 and "from the chat template, allowed are" in error_of(answer)["message"]
        )


def test_a_prompt_is_decoded_once_to_be_echoed(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.engine.input_processor.tokenizer
    decode = tokenizer.decode
    decoded: list[tuple[int, ...]] = []

    def note(token_ids: list[int], **how: Any) -> str:
        decoded.append(tuple(token_ids))
        return decode(token_ids, **how)

    monkeypatch.setattr(tokenizer, "decode", note)
    prompts = [[271, 280, 290], [281, 291, 301]]
    echoed = server.complete(prompt=prompts, n=4, echo=True, max_tokens=1).json()["choices"]
    assert [decoded.count(tuple(prompt)) for prompt in prompts] == [1, 1]
    for choice in echoed:
        assert choice["text"].startswith(decode(prompts[choice["index"] // 4], skip_special_tokens=False))


def test_a_request_that_runs_keeps_no_lists_of_token_ids(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    async def generate(*_: object, **options: object) -> None:
        gc.collect()
        lengths.extend(len(each) for each in gc.get_objects() if type(each) is list and len(each) == 987)
        raise RequestError("prompt: seen", parameter="prompt")

    with running_server(tiny_model_path) as server:
        monkeypatch.setattr(routes, "generate", generate)
        prompts = json.dumps([[5] * 987, [6] * 987])
        content = f'{{"prompt": {prompts}, "echo": true}}'
        del prompts
        answer = server.http.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert "prompt: seen" in answer.text
    assert lengths == []


def test_tokens_of_one_answer(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, {"max_answer_tokens": 120}) as server:
        fits: list[dict[str, Any]] = [
            {"prompt": ["a", "b"], "max_tokens": 60},
            {"prompt": "a", "max_tokens": 30, "n": 4},
            {"prompt": ["a", "b"], "max_tokens": 10, "n": 2, "logprobs": 2},
            {"prompt": ["aaaa", "b"], "max_tokens": 55, "n": 1, "echo": True},
            # A single completion is as long as the window allows.
            {"prompt": "a", "max_tokens": 300, "logprobs": 20},
            {"prompt": [5] * 1000, "max_tokens": None, "echo": True},
        ]
        for body in fits:
            assert server.complete(temperature=0, **body).status_code == 200, body
        too_many: list[tuple[dict[str, Any], str]] = [
            ({"prompt": ["a", "b"], "max_tokens": 61}, "got up to 122 tokens in 2 completions"),
            ({"prompt": "a", "max_tokens": 31, "n": 4}, "got up to 124 tokens in 4 completions"),
            (
                {"prompt": ["a", "b"], "max_tokens": 11, "n": 2, "logprobs": 2},
                "got up to 132 tokens in 4 completions, each counted once and once more for each of its 2 log",
            ),
            ({"prompt": [[5], [6] * 2], "max_tokens": 900}, "got up to 1800 tokens in 2 completions"),
            ({"prompt": ["aaaa" * 10, "b"], "max_tokens": 40, "echo": True}, "got up to 121 tokens in 2"),
        ]
        for body, message in too_many:
            for stream in (False, True):
                answer = server.complete(**body, stream=stream)
                assert answer.status_code == 400, answer.text
                error = error_of(answer)
                assert error["param"] == "max_tokens" and message in error["message"]
                assert error["message"].endswith(
                    "allowed are at most 120 in one request (--max-answer-tokens)"
                )
