"""Limits that hold before the API key is checked: bytes, headers, time, number of connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from uvicorn.server import ServerState

from rose_backend.errors import ConfigError
from rose_backend.server import connection as connection_module
from rose_backend.server import serve
from rose_backend.server.connection import Connection, ConnectionConfig
from rose_backend.server.settings import ServerSettings
from tests.server.live_server import LiveServer, running_server, wait_until
from tests.support.patience import HANG_S

LIMITS = {"max_header_bytes": 2048, "max_headers": 16, "header_timeout_s": 600.0, "max_connections": 3}
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def limited(tiny_model_path: Path) -> Iterator[LiveServer]:
    """Return a server with low limits and no time limit that a test would ever reach."""
    with running_server(tiny_model_path, LIMITS) as server:
        yield server


@pytest.fixture(autouse=True)
def no_connection_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that ended connections count no longer."""
    yield
    if "limited" in request.fixturenames:
        server: LiveServer = request.getfixturevalue("limited")
        wait_until(lambda: not server.server.server_state.connections)


def connect(server: LiveServer) -> socket.socket:
    """Return a connection that nothing has been sent on."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S)


def read_all(connection: socket.socket) -> bytes:
    """Return all that comes until the server closes."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


def ask(server: LiveServer, content: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of the only answer to what is sent."""
    with connect(server) as connection:
        connection.sendall(content)
        return parse(read_all(connection))


def parse(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of one answer, whose headers must be complete."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert b"connection: close" in lines and b"content-type: application/json" in lines
    assert f"content-length: {len(body)}".encode() in lines
    assert any(line.startswith(b"x-request-id: ") for line in lines)
    return int(lines[0].split()[1]), json.loads(body)


def padded(head: bytes, size: int) -> bytes:
    """Return a whole header of ``size`` bytes."""
    start = head + b"X-Long: "
    end = b"\r\n" + CLOSE
    return start + b"x" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize(
    "content",
    [
        padded(GET, 2049),
        # Nothing of these ever ends, so they are counted as they arrive.
        GET + b"X-Long: " + b"x" * 3000,
        GET + b"x" * 3000,
        b"GET /" + b"x" * 3000,
        b"GET /health?" + b"x" * 3000,
        b"\r\n" * 2000,
    ],
    ids=["whole", "value", "name", "path", "query", "lines"],
)
def test_long_headers(limited: LiveServer, content: bytes) -> None:
    status, answer = ask(limited, content)
    assert status == 431
    error = answer["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "header_too_large")
    assert (
        error["message"].startswith("header: got more than 2048 bytes")
        and "max_header_bytes" in error["message"]
    )


def test_many_headers(limited: LiveServer) -> None:
    status, answer = ask(limited, GET + b"".join(b"X-%d: 1\r\n" % number for number in range(20)))
    assert status == 431
    assert answer["error"]["message"].startswith("header: got more than 16 headers")
    assert limited.metric('http_responses_total{route="other",status="431"}') >= 1
    limited.http.close()


def test_what_is_just_allowed(limited: LiveServer) -> None:
    assert ask(limited, padded(GET, 2048)) == (200, {"status": "ok"})
    most = GET + b"".join(b"X-%d: 1\r\n" % number for number in range(14)) + CLOSE
    assert ask(limited, most) == (200, {"status": "ok"})
    # A body is no header, however long and in however many chunks.
    body = json.dumps({"prompt": "a" * 500, "user": "u" * 20_000}).encode()
    whole = POST + b"Content-Length: %d\r\n" % len(body) + CLOSE + body
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    chunked = POST + b"Transfer-Encoding: chunked\r\n" + CLOSE + chunks
    for content in (whole, chunked):
        assert ask(limited, content)[0] in (200, 400)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (b"0\r\nX-Long: " + b"x" * 5000, "more than 2048 bytes"),
        (b"0\r\n" + b"".join(b"X-%d: 1\r\n" % number for number in range(20)), "more than 16 headers"),
    ],
)
def test_headers_behind_a_body(limited: LiveServer, end: bytes, message: str) -> None:
    status, answer = ask(limited, CHUNKED + b"2\r\n{}\r\n" + end)
    assert status == 431 and message in answer["error"]["message"]
    limited.wait_until_idle()


@pytest.mark.parametrize("content", [b"NONSENSE\r\n\r\n", CHUNKED + b"no number\r\n"])
def test_what_is_not_http(limited: LiveServer, content: bytes) -> None:
    status, answer = ask(limited, content)
    assert status == 400
    assert (answer["error"]["message"], answer["error"]["code"]) == (
        "request: not valid HTTP",
        "invalid_http",
    )


def test_number_of_connections(limited: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    state = limited.server.server_state
    others = [connect(limited) for _ in range(3)]
    wait_until(lambda: len(state.connections) == 3)
    for max_lingering in (connection_module.MAX_LINGERING, 0):
        monkeypatch.setattr(connection_module, "MAX_LINGERING", max_lingering)
        # More than once: refused connections do not count.
        for _ in range(2):
            with connect(limited) as connection:
                answer = read_all(connection)
            status, content = parse(answer)
            assert status == 503 and b"retry-after: 1" in answer.lower()
            assert content["error"]["code"] == "too_many_connections"
            assert "as it may: 3 (max_connections)" in content["error"]["message"]
    assert len(state.connections) == 3
    # Those that are allowed are served, and leave room.
    others[0].sendall(GET + CLOSE)
    assert parse(read_all(others[0]))[0] == 200
    wait_until(lambda: len(state.connections) == 2)
    assert ask(limited, GET + CLOSE)[0] == 200
    for each in others:
        each.close()


@pytest.mark.parametrize("content", [b"", b"GET /health HTT", GET])
def test_a_header_that_never_comes(tiny_model_path: Path, content: bytes) -> None:
    with running_server(tiny_model_path, {"header_timeout_s": 0.1}) as server:
        status, answer = ask(server, content)
        assert status == 408
        assert answer["error"]["message"] == "header: not complete after 0.1 seconds"
        assert answer["error"]["code"] == "header_timeout"


def test_an_idle_connection_ends(tiny_model_path: Path) -> None:
    with (
        running_server(tiny_model_path, {"keep_alive_timeout_s": 0.1}) as server,
        connect(server) as connection,
    ):
        connection.sendall(GET + b"\r\n")
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" not in answer.lower()


class Timers:
    """An event loop's timers, which run out when a test says so."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.waiting: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay_s: float, call: Callable[..., None], *values: Any) -> Mock:
        entry = (delay_s, call, values)
        self.waiting.append(entry)
        return Mock(cancel=lambda: self.waiting.remove(entry))

    def delays(self) -> list[float]:
        """Return what is being waited for, in seconds."""
        return [delay_s for delay_s, *_ in self.waiting]

    def run_out(self) -> None:
        """Let the only timer run out."""
        ((_, call, values),) = self.waiting
        self.waiting.clear()
        call(*values)


class Scene:
    """One connection whose application answers when the test says so, without reading the body."""

    def __init__(self, **settings: Any) -> None:
        self.timers = Timers(asyncio.get_running_loop())
        self.transport = Mock(get_extra_info=Mock(return_value=None))
        self.transport.is_closing.return_value = False
        self.transport.close.side_effect = lambda: self.transport.is_closing.configure_mock(return_value=True)
        self.transport.get_write_buffer_size.return_value = 0
        self.may_answer = asyncio.Event()
        settings = {"header_timeout_s": 1.0, "body_timeout_s": 2.0, "keep_alive_timeout_s": 3.0, **settings}
        service = Mock(settings=ServerSettings(served_model_names=("a",), **settings))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self.may_answer.wait()
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

        config = ConnectionConfig(app, service, lifespan="off", ws="none", log_config=None)
        self.connection = Connection(config, ServerState(), {}, self.timers)  # type: ignore[arg-type]
        self.connection.connection_made(self.transport)

    async def answer(self) -> None:
        """Let the application answer all that it has been asked."""
        self.may_answer.set()
        await asyncio.gather(*self.connection.tasks)

    def written(self) -> bytes:
        """Return all that was sent."""
        return b"".join(call.args[0] for call in self.transport.write.call_args_list)


def test_times_of_one_connection() -> None:
    async def play() -> None:
        scene = Scene()
        timers, connection = scene.timers, scene.connection
        assert timers.delays() == [1.0], "from the connection to the end of the header"
        for byte in GET:
            connection.data_received(bytes([byte]))
            assert timers.delays() == [1.0], "once, however slowly it comes"
        connection.data_received(b"\r\n")
        assert timers.delays() == [], "an answer may take its time"
        await scene.answer()
        assert timers.delays() == [3.0], "idle"
        connection.data_received(b"\r\n")
        connection.data_received(b"GET /")
        assert timers.delays() == [1.0], "the next header"
        timers.run_out()
        assert b"HTTP/1.1 408 " in scene.written()
        connection.connection_lost(None)
        assert timers.delays() == []

    asyncio.run(play())


def test_a_body_without_end_behind_its_answer() -> None:
    async def play() -> None:
        scene = Scene()
        scene.connection.data_received(POST + b"Content-Length: 1000000\r\n\r\n{")
        assert scene.timers.delays() == [2.0]
        await scene.answer()
        scene.connection.data_received(b"{" * 1000)
        assert 2.0 in scene.timers.delays(), "not longer because more comes"
        scene.timers.run_out()
        scene.transport.close.assert_called_once()
        assert scene.written().count(b"HTTP/1.1") == 1

    asyncio.run(play())


def test_a_header_in_advance_waits_for_the_answer_before_it() -> None:
    async def play() -> None:
        scene = Scene()
        scene.connection.data_received(GET + b"\r\n")
        scene.connection.data_received(b"GET /he")
        for _ in range(2):
            scene.timers.run_out()
            scene.transport.close.assert_not_called()
        # What cannot be read ends both: an answer in the middle of another would be taken for a part of it.
        scene.connection.data_received(b"\x00")
        scene.transport.close.assert_called_once()
        assert not scene.written()

    asyncio.run(play())


def test_a_body_behind_its_answer_leaves_a_timer() -> None:
    async def play() -> None:
        scene = Scene()
        scene.connection.data_received(POST + b"Content-Length: 2\r\n\r\n")
        await scene.answer()
        scene.connection.data_received(b"{}")
        assert scene.timers.delays() == [3.0], "idle"
        scene.timers.run_out()
        scene.transport.close.assert_called_once()

    asyncio.run(play())


@pytest.mark.parametrize("max_lingering", [64, 0])
def test_a_refused_client_that_reads_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, max_lingering: int
) -> None:
    monkeypatch.setattr(connection_module, "MAX_LINGERING", max_lingering)

    async def play() -> None:
        scene = Scene()
        scene.connection.data_received(b"no HTTP\r\n\r\n")
        assert b"HTTP/1.1 400 " in scene.written() and not scene.connection.connections
        scene.transport.abort.assert_not_called()
        scene.timers.run_out()
        scene.transport.abort.assert_called_once()

    asyncio.run(play())


def test_few_requests_wait_for_an_earlier_answer() -> None:
    async def play() -> None:
        scene = Scene()
        num_allowed = 1 + connection_module.MAX_PIPELINED
        scene.connection.data_received((GET + b"\r\n") * num_allowed)
        scene.transport.close.assert_not_called()
        scene.connection.data_received((GET + b"\r\n") * 1000)
        assert len(scene.connection.pipeline) == connection_module.MAX_PIPELINED
        scene.transport.close.assert_called_once()
        scene.timers.run_out()
        scene.transport.abort.assert_called_once()

    asyncio.run(play())


def test_a_request_in_advance_has_a_small_body() -> None:
    async def play() -> None:
        scene = Scene()
        scene.connection.data_received(GET + b"\r\n" + POST + b"Content-Length: 1000000\r\n\r\n")
        for _ in range(4):
            scene.connection.data_received(b"{" * (1 << 14))
            assert not scene.connection.flow.read_paused
            scene.transport.close.assert_not_called()
        scene.connection.data_received(b"{")
        scene.transport.close.assert_called_once()

    asyncio.run(play())


def test_the_request_that_is_being_answered_sees_the_disconnect() -> None:
    async def play() -> None:
        scene = Scene()
        scene.connection.data_received((GET + b"\r\n") * 2)
        first, second = scene.connection._running, scene.connection.cycle
        assert first is not None and first is not second
        assert not scene.connection.flow.read_paused, "a disconnect would not be seen"
        scene.connection.connection_lost(None)
        assert first.disconnected and await first.receive() == {"type": "http.disconnect"}
        assert not scene.connection.pipeline
        await scene.answer()
        assert not scene.written()

    asyncio.run(play())


def test_no_100_continue_is_sent_after_a_refusal() -> None:
    async def play() -> None:
        scene = Scene()
        head = b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
        scene.connection.data_received(POST + head + b"no number\r\n")
        assert b"HTTP/1.1 400 " in scene.written()
        assert await scene.connection.cycle.receive() == {"type": "http.disconnect"}
        assert b"100 Continue" not in scene.written()

    asyncio.run(play())


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(serve.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(serve.resource, "setrlimit", lambda _, pair: limits.append(pair))
    serve._allow_open_files(100)
    assert not limits
    serve._allow_open_files(2048)
    assert len(limits) == 1 and 2048 < limits[0][0] <= limits[0][1] == 4096
    with pytest.raises(
        ConfigError, match=r"^max_connections: got 5000, allowed are at most \d+ where .* 4096 files"
    ):
        serve._allow_open_files(5000)
