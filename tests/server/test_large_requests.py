"""No request keeps others waiting: what is done between two turns of the event loop, or in one call, is bounded."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from rose_backend.engine.client import OutputStream
from rose_backend.engine.outputs import CompletionOutput, Logprob, RequestOutput
from rose_backend.engine.request import ProcessedInput
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import QueueFullError, RequestError
from rose_backend.server import answers, generation, middleware, protocol, routes
from rose_backend.server.answers import Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from rose_backend.server.chat_template import ChatTemplate
from rose_backend.server.generation import ClientWatch, EventStream, Generation, PromptOutput
from rose_backend.server.middleware import (
    _SHARES_THE_LOCK,
    MAX_PER_TURN,
    BodyParts,
    RequestThrottle,
    as_utf8,
    check_body_parts,
    count_body_parts,
    parse_body,
)
from rose_backend.server.protocol import ChatCompletionRequest, CompletionRequest
from rose_backend.server.routes import read_prompts, read_token_ids
from rose_backend.server.service import RequestRecord
from rose_backend.server.settings import MAX_BODY_FIELDS, MAX_BODY_LISTS
from tests.server.live_server import (
    MODEL,
    USAGE,
    LiveServer,
    check_refused,
    error_of,
    in_event_loop,
    running_server,
)
from tests.support.patience import HANG_S

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


def count_objects(is_counted: Callable[[object], bool]) -> int:
    """Return how many such objects this process refers to: those of other tests too, so compare two counts."""
    gc.collect()
    return sum(map(is_counted, gc.get_objects()))


def count_logprobs() -> int:
    return count_objects(lambda each: type(each) is Logprob)


def expected_logprobs(kind: str, logprobs: list[dict[int, Logprob]]) -> dict[str, Any]:
    return made(kind)._described(0, logprobs)


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize("number", [0, 1, 63, 64, 65, NUM_POSITIONS])
def test_whole_answers_are_written_in_pieces(kind: str, number: int, described: list[int]) -> None:
    expected = [expected_logprobs(kind, positions(number, seed)) for seed in range(4)]
    described.clear()
    answer = made(kind)
    num_before = count_logprobs()
    for prompt in (1, 0):
        completions = [output(index, positions(number, 2 * prompt + index)) for index in range(2)]
        state = RequestOutput("r", None, [1, 2, 3], completions, finished=True)
        assert checked((piece.encode() for piece in answer.keep(prompt, state)), described) == b""
    del completions, state
    # Many objects would make each collection of garbage long.
    assert count_logprobs() <= num_before
    whole = json.loads(checked(answer.body(USAGE), described))
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
    pieces = list(answer.body(USAGE))
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
        engine=engine,
        metrics=NoMetrics(),
        engine_request_ids=set(),
        hit_unit=1,
        submission=submission,
        tracing=None,
    )
    inputs: Any = [SimpleNamespace(params=SimpleNamespace(n=1))] * num_prompts
    return Generation(service, RequestRecord("r", "/v1/completions"), inputs)


def test_few_prompts_start_in_one_turn() -> None:
    started: list[int] = [0]

    async def generate_deltas(_: object, *, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        started[-1] += 1
        yield RequestOutput(request_id, None, [1], [CompletionOutput(0, "", [5])], finished=True)

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            started.append(0)

    async def run() -> int:
        counting = asyncio.create_task(count_turns())
        generation = make_generation(SimpleNamespace(generate_deltas=generate_deltas), 1024, asyncio.Lock())
        number = len([each async for each in generation.outputs()])
        counting.cancel()
        return number

    assert asyncio.run(run()) == 1024 == sum(started)
    assert max(started) <= 32


def test_requests_that_come_at_once_enter_the_queue_whole() -> None:
    """Twelve requests of 1,024 prompts were all refused by a queue of 10,000, though it has room for nine."""
    num_queued, all_came = 0, asyncio.Event()

    async def generate_deltas(_: object, *, request_id: str) -> AsyncGenerator[RequestOutput, None]:
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
        answers = [
            asyncio.create_task(
                answer(make_generation(SimpleNamespace(generate_deltas=generate_deltas), 102, submission))
            )
            for _ in range(12)
        ]
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


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/tokenize", "/v1/messages", "/v1/messages/count_tokens"]
)
def test_long_arguments_of_calls_are_measured_in_a_thread(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    names: set[str] = set()

    def noting(measure: Any) -> Any:
        def note(*arguments: Any) -> Any:
            names.add(threading.current_thread().name)
            return measure(*arguments)

        return note

    monkeypatch.setattr(routes, "text_lengths", noting(routes.text_lengths))
    monkeypatch.setattr(protocol, "measure_json", noting(protocol.measure_json))
    for number in (1, 20_000):
        arguments = {"a": [5] * number}
        message: dict[str, Any] = {"role": "assistant"}
        if path.startswith("/v1/messages"):
            message["content"] = [{"type": "tool_use", "id": "b", "name": "f", "input": arguments}]
        else:
            message |= {"tool_calls": [{"id": "b", "function": {"name": "f", "arguments": arguments}}]}
        names.clear()
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}, message], "max_tokens": 1}
        assert server.post(path, body).status_code in (200, 400)
        assert names and (names == {"rose-server"}) == (number == 1)
        assert number == 1 or "rose-server" not in names


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
    def count_lists() -> int:
        return count_objects(lambda each: type(each) is list and len(each) == 987)

    counts: list[int] = []

    async def generate(*_: object, **options: object) -> None:
        counts.append(count_lists())
        raise RequestError("prompt: seen", parameter="prompt")

    with running_server(tiny_model_path) as server:
        monkeypatch.setattr(routes, "generate", generate)
        num_before = count_lists()
        prompts = json.dumps([[5] * 987, [6] * 987])
        content = f'{{"prompt": {prompts}, "echo": true}}'
        del prompts
        answer = server.http.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert "prompt: seen" in answer.text
    (num_during,) = counts
    assert num_during <= num_before


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
        limit = "allowed are at most 120 in one request (--max-answer-tokens)"
        for body, message in too_many:
            for stream in (False, True):
                answer = server.complete(**body, stream=stream)
                check_refused(answer, "max_tokens", message)
                assert error_of(answer)["message"].endswith(limit)


MAX_PROMPTS, MAX_MODEL_LEN = 1024, 1024


def plain_count(value: Any) -> BodyParts:
    """Count what ``json.dumps`` writes for a value, by looking at the value."""
    if not isinstance(value, (list, dict)):
        return BodyParts(0, 0, 0, words=int(value is None or isinstance(value, str)))
    inner = [plain_count(each) for each in (value.values() if isinstance(value, dict) else value)]
    num_colons = len(value) if isinstance(value, dict) else 0
    return BodyParts(
        sum(each.commas for each in inner) + max(len(value) - 1, 0),
        sum(each.colons for each in inner) + num_colons,
        sum(each.brackets for each in inner) + 1,
        sum(each.words for each in inner) + num_colons,
    )


texts = st.text(alphabet='a"\\,:[{é\n', max_size=8)


@given(
    st.recursive(
        texts | st.integers() | st.none(),
        lambda children: st.lists(children, max_size=4) | st.dictionaries(texts, children, max_size=4),
    ),
    st.integers(1, 40),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-le"]),
)
def test_parts_are_counted_outside_of_strings(value: Any, chunk: int, encoding: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(middleware, "_CHUNK_BYTES", chunk)
        content = as_utf8(json.dumps(value, ensure_ascii=False).encode(encoding))
        assert count_body_parts(content) == plain_count(value)


def test_the_largest_body_that_may_have_a_meaning_is_taken() -> None:
    prompts = {"prompt": [[1] * MAX_MODEL_LEN] * MAX_PROMPTS, "stop": ["a"] * 16}
    check_body_parts(json.dumps(prompts).encode(), MAX_PROMPTS, MAX_MODEL_LEN)
    # Whatever is written in strings.
    check_body_parts(json.dumps({"prompt": ',:[{"\\' * 1_000_000}).encode(), MAX_PROMPTS, MAX_MODEL_LEN)


TOO_MANY = [
    (b'{"prompt": [' + b"1," * 1_300_000 + b"1]}", "values"),
    (b'{"prompt": "a", "stop": [' + b"[]," * 70_000 + b"[]]}", "lists and objects"),
    (b'{"prompt": "a", "stop": [[' + b"1," * 1_300_000 + b"1]]}", "values"),
    (b'{"prompt": [' + b'"",' * 150_000 + b'""]}', "strings, truth values and nulls"),
    (b'{"prompt": "a", "stop": [' + b"null,true," * 75_000 + b"null]}", "strings, truth values and nulls"),
    (b'{"prompt": "a", ' + b",".join(b'"q%07d": 1' % each for each in range(140_000)) + b"}", "fields"),
]


@pytest.mark.parametrize(
    ("content", "what"), TOO_MANY, ids=["ids", "nested stop", "ids in stop", "texts", "nulls", "fields"]
)
def test_too_many_parts_are_refused_before_they_are_parsed(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, content: bytes, what: str
) -> None:
    def parse(*_: object, **__: object) -> None:
        raise AssertionError("the body is parsed")

    monkeypatch.setattr(middleware, "parse_body", parse)
    for path in routes.DIRECT_ROUTES:
        check_refused(server.post(path, content), "body", f"{what}, allowed are at most ")


def test_limits_are_named() -> None:
    max_lists = MAX_PROMPTS + MAX_BODY_LISTS
    for content, limit in (
        (b'"a":1,', MAX_BODY_FIELDS),
        (b"[", max_lists),
        (b"true ", 2 * MAX_BODY_FIELDS + max_lists),
    ):
        check_body_parts(content * limit, MAX_PROMPTS, MAX_MODEL_LEN)
        with pytest.raises(
            RequestError, match=f"^body: got {limit + 1} .* allowed are at most {limit} in one"
        ):
            check_body_parts(content * (limit + 1), MAX_PROMPTS, MAX_MODEL_LEN)


def test_unknown_fields_are_counted_before_they_are_checked(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*_: object, **__: object) -> None:
        raise AssertionError("each of the fields is looked at")

    monkeypatch.setattr("rose_backend.server.protocol.CompletionRequest.model_validate", check)
    answer = server.complete(prompt="a", **{f"q{index}": 1 for index in range(1000)})
    assert answer.status_code == 400
    assert "got 1000 unknown fields, allowed are at most 16" in error_of(answer)["message"]


class Untouchable(list[Any]):
    """A list that gives its length and first element, and fails when it is iterated over."""

    def __iter__(self) -> Any:
        raise AssertionError("the elements are iterated over")


def test_lengths_come_before_elements(server: LiveServer) -> None:
    with pytest.raises(RequestError, match="prompt: got 5 prompts, allowed are at most 4"):
        read_prompts(Untouchable(["a"] * 5), max_prompts=4, max_model_len=10)
    with pytest.raises(RequestError, match="tokens: got 11 token ids, allowed are at most 10"):
        read_token_ids("tokens", Untouchable([1] * 11), 10, 100)
    (prompt,) = read_prompts(Untouchable([1] * 11), max_prompts=4, max_model_len=10)
    assert isinstance(prompt, Untouchable)
    # The engine's: of one prompt, and of one of several.
    for prompts in ([1, "a"] * 600, [[1, "a"] * 600], [[1], [None] * 1024]):
        answer = server.complete(prompt=prompts)
        assert answer.status_code == 400 and "tokens, allowed are at most 1023" in error_of(answer)["message"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_half_a_surrogate_hides_nothing(encoding: str) -> None:
    # The second character has a byte of its own that looks like a quotation mark.
    text = '["\ud800", "\u2200", ' + "[], " * 1000 + "1]"
    content = text.encode(encoding, "surrogatepass")
    assert len(json.loads(content)) == 1003
    assert count_body_parts(as_utf8(content)) == BodyParts(commas=1002, colons=0, brackets=1001, words=2)


NUM_REQUESTS = 5 * MAX_PER_TURN + 1


def test_requests_pass_the_request_throttle(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    num_passed = 0
    pass_through = RequestThrottle.pass_through

    async def count(self: RequestThrottle) -> None:
        nonlocal num_passed
        num_passed += 1
        await pass_through(self)

    monkeypatch.setattr(RequestThrottle, "pass_through", count)
    for stream in (False, True):
        assert server.complete(prompt="a", max_tokens=2, stream=stream).status_code == 200
    assert num_passed == 2


@in_event_loop
async def test_a_burst_is_spread_over_turns() -> None:
    request_throttle = RequestThrottle()
    passed: list[tuple[int, int]] = []
    turn = 0

    async def request(number: int) -> None:
        await request_throttle.pass_through()
        passed.append((turn, number))

    # Twice: it becomes idle in between, and starts again.
    for _ in range(2):
        passed.clear()
        tasks = [asyncio.create_task(request(number)) for number in range(NUM_REQUESTS)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turn += 1
        turns = [at for at, _ in passed]
        assert [number for _, number in passed] == list(range(NUM_REQUESTS))
        assert max(map(turns.count, turns)) <= MAX_PER_TURN
        for _ in range(3):
            await asyncio.sleep(0)
        assert not request_throttle._is_turning, "an idle server does nothing"


@in_event_loop
async def test_a_cancelled_request_does_not_hold_up_others() -> None:
    request_throttle = RequestThrottle()
    tasks = [asyncio.create_task(request_throttle.pass_through()) for _ in range(NUM_REQUESTS)]
    await asyncio.sleep(0)
    given_up = tasks[MAX_PER_TURN : 3 * MAX_PER_TURN]
    for task in given_up:
        task.cancel()
    ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_S)
    assert sum(isinstance(end, asyncio.CancelledError) for end in ends) == len(given_up)


NUM_PROMPTS, NUM_TOKENS = 128, 400


MAX_BYTES = 8 << 20


PROMPT = [1, 2, 3]


class EngineOfStreams:
    """Streams of an engine in another process, each of which gets whatever is put into it."""

    def __init__(self) -> None:
        self.streams: list[OutputStream] = []
        self.num_taken = 0

    async def generate_deltas(
        self, prompt: ProcessedInput, *, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        stream = OutputStream(request_id, asyncio.get_running_loop())
        self.streams.append(stream)
        is_over = False
        while not is_over:
            output = await stream.get()
            self.num_taken += 1
            is_over = output.finished
            yield output


def make_output(token: int) -> RequestOutput:
    """Return what comes for a token; it shares nothing with other outputs, as if it had come from elsewhere."""
    is_last = token == NUM_TOKENS - 1
    piece = CompletionOutput(0, f" {token:03}", [1000 + token], finish_reason="length" if is_last else None)
    return RequestOutput("r", None, PROMPT, [piece], is_last)


@in_event_loop
async def test_little_is_kept_for_a_client_that_does_not_read() -> None:
    engine = EngineOfStreams()
    outputs = make_generation(engine, NUM_PROMPTS, asyncio.Lock()).outputs()
    first = asyncio.create_task(anext(outputs))
    while len(engine.streams) < NUM_PROMPTS:
        await asyncio.sleep(0)
    tracemalloc.start()
    try:
        for token in range(NUM_TOKENS):
            for stream in engine.streams:
                stream.put(make_output(token))
            for _ in range(3):
                await asyncio.sleep(0)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # One in the queue and one in front of it, each with all tokens that there were.
    assert engine.num_taken <= 2 * NUM_PROMPTS + 1
    assert num_bytes < MAX_BYTES
    texts = [""] * NUM_PROMPTS
    num_outputs, num_unfinished = 0, NUM_PROMPTS
    while num_unfinished:
        index, output = await first if not num_outputs else await anext(outputs)
        num_outputs += 1
        texts[index] += output.outputs[0].text
        num_unfinished -= output.finished
    assert num_outputs <= 4 * NUM_PROMPTS
    assert set(texts) == {"".join(f" {token:03}" for token in range(NUM_TOKENS))}
    await outputs.aclose()
