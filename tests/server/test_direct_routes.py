"""Routes that bypass FastAPI give its answers, and admit a few new requests per turn of the event loop."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.types import Message

from rose_backend.server import routes
from rose_backend.server.middleware import MAX_PER_TURN, DirectRoutes, RequestThrottle
from rose_backend.server.serve import build_app
from tests.server.live_server import LiveServer
from tests.support.patience import HANG_S

NUM_REQUESTS = 5 * MAX_PER_TURN + 1

BODIES = [
    b"",
    b"null",
    b"[]",
    b"[1]",
    b'"text"',
    b"1",
    b"{}",
    b'{"prompt": ',
    b'{"prompt": "a",}',
    b"\xff",
    b'\xff\xfe{"prompt": "a"}',
    b"[" * 100_000,
    b'{"max_tokens": ' + b"1" * 5000 + b"}",
    b'{"prompt": "a", "n": 0}',
    b'{"prompt": "a", "n": "1", "n": 1.5}',
    b'{"prompt": "a", "stop": [1, "b", ""]}',
    b'{"prompt": "a", "stream_options": []}',
    b'{"prompt": "a", "stream_options": {"continuous_usage_stats": true}}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "model": 3, "logprobs": true}',
    b'{"prompt": "a", "model": "other"}',
    b'{"prompt": "a", "promt": "a"}',
    b'{"prompt": [], "best_of": 2}',
    b'{"messages": []}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "nobody", "content": "a"}, 3]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}',
    b'{"tokens": [1, -1]}',
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_refusals_are_those_of_fastapi(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    parsed = []
    parse = DirectRoutes.__call__

    async def count(self: DirectRoutes, *rest: object) -> None:
        parsed.append(self._routes)
        await parse(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(DirectRoutes, "__call__", count)
    direct = build_app(server.service)
    monkeypatch.setattr(routes, "DIRECT_ROUTES", {})
    through_fastapi = build_app(server.service)

    async def answers(app: object) -> list[tuple[object, ...]]:
        headers = {"content-type": "application/json", "x-request-id": "one"}
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://rose") as client:
            got = [await client.post(path, content=body, headers=headers) for body in BODIES]
        return [(each.status_code, sorted(each.headers.items()), each.content) for each in got]

    expected = asyncio.run(answers(through_fastapi))
    assert {status for status, *_ in expected} <= {400, 404} | ({200} if path == "/tokenize" else set())
    for body, ours, theirs in zip(BODIES, asyncio.run(answers(direct)), expected, strict=True):
        assert ours == theirs, body[:80]
    assert {} in parsed and len({id(each) for each in parsed}) == 2, "each went its own way"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_body_that_breaks_off_is_not_answered(server: LiveServer, path: str) -> None:
    """What has come of it is valid, but who knows what would have followed."""
    parts: list[Message] = [
        {
            "type": "http.request",
            "body": b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
            "more_body": True,
        },
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return parts.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(build_app(server.service)(scope, receive, send))
    assert sent[0]["status"] == 400
    assert b"body: the connection was closed before it was complete" in sent[1]["body"]


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


def test_other_methods_and_the_schema_are_fastapis(server: LiveServer) -> None:
    for path in routes.DIRECT_ROUTES:
        answer = server.http.get(path)
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        assert "requestBody" in server.http.get("/openapi.json").json()["paths"][path]["post"]


def test_a_burst_is_spread_over_turns() -> None:
    async def play() -> None:
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

    asyncio.run(play())


def test_a_cancelled_request_does_not_hold_up_others() -> None:
    async def play() -> None:
        request_throttle = RequestThrottle()
        tasks = [asyncio.create_task(request_throttle.pass_through()) for _ in range(NUM_REQUESTS)]
        await asyncio.sleep(0)
        given_up = tasks[MAX_PER_TURN : 3 * MAX_PER_TURN]
        for task in given_up:
            task.cancel()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_S)
        assert sum(isinstance(end, asyncio.CancelledError) for end in ends) == len(given_up)

    asyncio.run(play())
