"""Routes that bypass FastAPI refuse bodies by name, and admit a few new requests per turn of the event loop."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from rose_backend.server import routes
from rose_backend.server.middleware import MAX_PER_TURN, RequestThrottle
from rose_backend.server.serve import build_app
from tests.server.live_server import LiveServer, in_event_loop
from tests.support.patience import HANG_S

NUM_REQUESTS = 5 * MAX_PER_TURN + 1

NO_OBJECT = "allowed is: a valid dictionary or object to extract fields from"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body: missing, but required"),
        (b"null", "body: missing, but required"),
        (b"[1]", f"body: got [1], {NO_OBJECT}"),
        (b'"text"', f"body: got 'text', {NO_OBJECT}"),
        (b"{}", "prompt: missing, but required"),
        (b'{"prompt": ', "body: not valid JSON (Expecting value)"),
        (b'{"prompt": "a",}', "body: not valid JSON (Expecting property name enclosed in double quotes)"),
        (b"\xff", "body: not valid UTF-8 at byte 0 (invalid start byte), allowed is JSON in UTF-8"),
        (
            b'\xff\xfe{"prompt": "a"}',
            "body: not valid UTF-16-LE at byte 16 (truncated data), allowed is JSON in UTF-8",
        ),
        (
            b"[" * 100_000,
            "body: arrays or objects are nested too deeply, no field has more than a few levels",
        ),
        (
            b'{"max_tokens": ' + b"1" * 5000 + b"}",
            "body: got an integer of more digits than are allowed (4300)",
        ),
        (b'{"prompt": "a", "n": 0}', "n: got 0, allowed is: greater than or equal to 1"),
        (b'{"prompt": "a", "n": "1", "n": 1.5}', "n: got 1.5, allowed is: a valid integer"),
        (b'{"prompt": "a", "stop": [1, "b", ""]}', "stop.0: got 1, allowed is: a valid string"),
        (b'{"prompt": "a", "stream_options": []}', f"stream_options: got [], {NO_OBJECT}"),
        (
            b'{"prompt": "a", "stream_options": {"continuous_usage_stats": true}}',
            "stream_options.continuous_usage_stats: got True, allowed is: False",
        ),
        (
            b'{"prompt": "a", "temperature": NaN}',
            "temperature: got nan, allowed is: less than or equal to 1000",
        ),
        (b'{"prompt": "a", "model": 3, "logprobs": true}', "model: got 3, allowed is: a valid string"),
    ],
)
def test_bodies_that_are_refused(server: LiveServer, body: bytes, message: str) -> None:
    answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["message"], error["param"]) == (message, message.partition(":")[0])


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
