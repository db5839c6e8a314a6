"""One connection: limits before the API key is checked, answers before a request is complete, clients that close their
sending side, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
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
from rose_backend.server.connection import Connection, ConnectionConfig, _is_reset
from rose_backend.server.serve import bind
from rose_backend.server.settings import ServerSettings
from tests.server import live_server
from tests.server.live_server import (
    ABORTED,
    LEFT,
    LONG,
    LiveServer,
    connect,
    in_event_loop,
    read_all,
    read_metric,
    running_server,
    wait_until,
)
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


def ask(server: LiveServer, content: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of the only answer to what is sent."""
    with connect(server) as connection:
        connection.sendall(content)
        return parse(read_all(connection))


def parse(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of one answer, whose headers must be complete."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert b"connection: close" in lines and (b"content-type: application/json" in lines or not body)
    assert f"content-length: {len(body)}".encode() in lines
    assert any(line.startswith(b"x-request-id: ") for line in lines)
    return int(lines[0].split()[1]), json.loads(body or b"{}")


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


def test_refusals_of_headers_are_in_the_format_of_their_path(limited: LiveServer) -> None:
    for path, is_message in ((b"/v1/messages?beta=true", True), (b"/v1/messages/x", True), (b"/v1/m", False)):
        for more in (
            b"X-Long: " + b"x" * 3000,
            b"".join(b"X-%d: 1\r\n" % each for each in range(20)),
            b" \r\n\r\n",
        ):
            status, answer = ask(limited, b"POST " + path + b" HTTP/1.1\r\nHost: x\r\n" + more)
            assert status in (400, 431) and (answer.get("type") == "error") == is_message, answer
            assert answer["error"]["type"] == "invalid_request_error"
            assert ("code" in answer["error"]) != is_message


def test_many_headers(limited: LiveServer) -> None:
    status, answer = ask(limited, GET + b"".join(b"X-%d: 1\r\n" % number for number in range(20)))
    assert status == 431
    assert answer["error"]["message"].startswith("header: got more than 16 headers")
    assert limited.metric('http_responses_total{route="other",status="431"}') >= 1
    limited.http.close()


def test_what_is_just_allowed(limited: LiveServer) -> None:
    assert ask(limited, padded(GET, 2048)) == (200, {})
    most = GET + b"".join(b"X-%d: 1\r\n" % number for number in range(14)) + CLOSE
    assert ask(limited, most) == (200, {})
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


def test_a_header_that_never_comes(tiny_model_path: Path) -> None:
    settings = {"header_timeout_s": 0.1, "keep_alive_timeout_s": 0.1}
    with running_server(tiny_model_path, settings) as server:
        for content in (b"", b"GET /health HTT", GET):
            status, answer = ask(server, content)
            assert status == 408
            assert answer["error"]["message"] == "header: not complete after 0.1 seconds"
            assert answer["error"]["code"] == "header_timeout"
        # An idle connection ends, too.
        with connect(server) as connection:
            connection.sendall(GET + b"\r\n")
            answered = read_all(connection)
            assert answered.startswith(b"HTTP/1.1 200 ") and b"connection: close" not in answered.lower()


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

    def unread(self, num_bytes: int) -> None:
        """Let so many bytes wait for the client."""
        self.transport.get_write_buffer_size.return_value = num_bytes

    def written(self) -> bytes:
        """Return all that was sent."""
        return b"".join(call.args[0] for call in self.transport.write.call_args_list)


@in_event_loop
async def test_times_of_one_connection() -> None:
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


@in_event_loop
async def test_a_body_without_end_behind_its_answer() -> None:
    scene = Scene()
    scene.connection.data_received(POST + b"Content-Length: 1000000\r\n\r\n{")
    assert scene.timers.delays() == [2.0]
    await scene.answer()
    scene.connection.data_received(b"{" * 1000)
    assert 2.0 in scene.timers.delays(), "not longer because more comes"
    scene.timers.run_out()
    scene.transport.close.assert_called_once()
    assert scene.written().count(b"HTTP/1.1") == 1


@in_event_loop
async def test_a_header_in_advance_waits_for_the_answer_before_it() -> None:
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


@in_event_loop
async def test_a_body_behind_its_answer_leaves_a_timer() -> None:
    scene = Scene()
    scene.connection.data_received(POST + b"Content-Length: 2\r\n\r\n")
    await scene.answer()
    scene.connection.data_received(b"{}")
    assert scene.timers.delays() == [3.0], "idle"
    scene.timers.run_out()
    scene.transport.close.assert_called_once()


@pytest.mark.parametrize("max_lingering", [64, 0])
@in_event_loop
async def test_a_refused_client_that_reads_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, max_lingering: int
) -> None:
    monkeypatch.setattr(connection_module, "MAX_LINGERING", max_lingering)
    scene = Scene()
    scene.connection.data_received(b"no HTTP\r\n\r\n")
    assert b"HTTP/1.1 400 " in scene.written() and not scene.connection.connections
    scene.transport.abort.assert_not_called()
    scene.timers.run_out()
    scene.transport.abort.assert_called_once()


@in_event_loop
async def test_few_requests_wait_for_an_earlier_answer() -> None:
    scene = Scene()
    num_allowed = 1 + connection_module.MAX_PIPELINED
    scene.connection.data_received((GET + b"\r\n") * num_allowed)
    scene.transport.close.assert_not_called()
    scene.connection.data_received((GET + b"\r\n") * 1000)
    assert len(scene.connection.pipeline) == connection_module.MAX_PIPELINED
    scene.transport.close.assert_called_once()
    scene.timers.run_out()
    scene.transport.abort.assert_called_once()


@in_event_loop
async def test_a_request_in_advance_has_a_small_body() -> None:
    scene = Scene()
    scene.connection.data_received(GET + b"\r\n" + POST + b"Content-Length: 1000000\r\n\r\n")
    for _ in range(4):
        scene.connection.data_received(b"{" * (1 << 14))
        assert not scene.connection.flow.read_paused
        scene.transport.close.assert_not_called()
    scene.connection.data_received(b"{")
    scene.transport.close.assert_called_once()


@in_event_loop
async def test_the_request_that_is_being_answered_sees_the_disconnect() -> None:
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


@in_event_loop
async def test_no_100_continue_is_sent_after_a_refusal() -> None:
    scene = Scene()
    head = b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    scene.connection.data_received(POST + head + b"no number\r\n")
    assert b"HTTP/1.1 400 " in scene.written()
    assert await scene.connection.cycle.receive() == {"type": "http.disconnect"}
    assert b"100 Continue" not in scene.written()


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


LARGE = 4 << 20
"""More than the sockets of both sides hold."""
JSON = "Content-Type: application/json\r\n"
KEY = "Authorization: Bearer key\r\n"


@pytest.fixture(scope="module")
def locked(tiny_model_path: Path) -> Iterator[LiveServer]:
    """Return a server that asks for a key."""
    with running_server(tiny_model_path, {"api_keys": ("key",), "max_body_bytes": 1000}) as server:
        yield server


def status_of(answer: bytes) -> int:
    """Return the status of the last answer of a connection, and check that it is complete."""
    final = answer[answer.rindex(b"HTTP/1.1 ") :]
    head, _, body = final.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head or f"content-length: {len(body)}".encode() in head
    return int(final.split()[1])


@pytest.mark.parametrize(
    ("headers", "status", "is_chunked", "is_last"),
    [
        (KEY + JSON, 413, False, True),
        (KEY + JSON, 413, True, False),
        (KEY, 415, False, False),
        (KEY, 415, True, True),
        (KEY + JSON + "Content-Encoding: gzip\r\n", 415, True, False),
        (JSON, 401, False, True),
        (JSON, 401, True, False),
        (KEY + JSON + "X-Request-Id: a b\r\n", 400, False, False),
    ],
)
def test_a_client_that_sends_everything_first(
    locked: LiveServer, headers: str, status: int, is_chunked: bool, is_last: bool
) -> None:
    body, length = b"x" * LARGE, f"Content-Length: {LARGE}\r\n"
    if is_chunked:
        body = b"%x\r\n" % LARGE + body + b"\r\n0\r\n\r\n"
        length = "Transfer-Encoding: chunked\r\n"
    headers += length + ("Connection: close\r\n" if is_last else "")
    with connect(locked) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
        for start in range(0, len(body), 1 << 16):
            connection.sendall(body[start : start + (1 << 16)])
        if is_last or status == 413:
            assert status_of(read_all(connection)) == status
        else:
            # Its connection is good for another request.
            connection.sendall(GET + b"Connection: close\r\n\r\n")
            answers = read_all(connection)
            assert answers.startswith(b"HTTP/1.1 %d " % status) and status_of(answers) == 200


def test_a_refused_connection_drops_what_comes(locked: LiveServer) -> None:
    with connect(locked) as connection:
        connection.sendall(b"NONSENSE\r\n\r\n" + b"x" * LARGE)
        assert status_of(read_all(connection)) == 400


def refused_scene() -> Scene:
    """Return a connection whose request was answered, with ``Connection: close``, before its body came."""
    scene = Scene()
    scene.connection.data_received(POST + b"Connection: close\r\nContent-Length: 1000000\r\n\r\n{")
    return scene


@in_event_loop
async def test_dropping_ends_with_a_pause() -> None:
    scene = refused_scene()
    await scene.answer()
    scene.transport.write_eof.assert_called_once()
    assert not scene.connection.connections
    for _ in range(3):
        scene.connection.data_received(b"{" * 1000)
        scene.timers.run_out()
        scene.transport.abort.assert_not_called()
    scene.timers.run_out()
    scene.transport.abort.assert_called_once()
    assert scene.written().count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("limit", ["_MAX_LINGER_S", "_MAX_LINGER_BYTES"])
@in_event_loop
async def test_dropping_has_limits(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(connection_module, limit, -1)
    scene = refused_scene()
    await scene.answer()
    scene.connection.data_received(b"{")
    if limit == "_MAX_LINGER_S":
        scene.transport.abort.assert_not_called()
        scene.timers.run_out()
    scene.transport.abort.assert_called_once()


def half_closed(server: LiveServer, content: bytes) -> bytes:
    """Return all that a client gets that sends ``content`` and closes its sending side."""
    with connect(server) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


def completion(version: str = "1.1", **fields: Any) -> bytes:
    """Return a request for a completion."""
    body = json.dumps({**LONG, "max_tokens": 50, **fields}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\n{JSON}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_a_half_closed_client_gets_its_answer(server: LiveServer) -> None:
    for content in (GET + b"\r\n", GET.replace(b"1.1", b"1.0") + b"\r\n", completion()):
        assert status_of(half_closed(server, content)) == 200
    events = half_closed(server, completion(stream=True))
    assert status_of(events) == 200 and b"data: [DONE]" in events
    # All of several that were sent at once; the last one ends the connection.
    assert half_closed(server, (GET + b"\r\n") * 3).count(b"HTTP/1.1 200 ") == 3
    # What was not complete never will be.
    for content in (b"", b"GET /hea", GET, completion()[:-1]):
        assert half_closed(server, content) == b""


def test_a_half_closed_client_waits_as_long_as_it_takes(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, max_num_seqs=1, device="cpu") as server, connect(server) as first:
        first.sendall(completion(max_tokens=1000, stream=True))
        assert first.recv(1)
        with connect(server) as second:
            second.sendall(completion())
            second.shutdown(socket.SHUT_WR)
            # By then it was looked after, and found to be there.
            assert second.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            first.close()
            assert status_of(read_all(second)) == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_left_is_told_from_a_half_closed_one(tiny_model_path: Path, version: str) -> None:
    with running_server(tiny_model_path, max_num_seqs=1, device="cpu") as server, connect(server) as first:
        first.sendall(completion(max_tokens=1000, stream=True))
        assert first.recv(1)
        with connect(server) as second:
            second.sendall(completion(version))
            wait_until(lambda: len(server.service.engine_request_ids) == 2)
            if version == "1.0":
                # It would not understand an interim answer, so it counts as gone.
                second.shutdown(socket.SHUT_WR)
                assert second.recv(1) == b""
        wait_until(lambda: len(server.service.engine_request_ids) == 1)
        first.close()
        server.wait_until_idle()
        left = 'http_responses_total{route="/v1/completions",status="499"}'
        assert read_metric(server.http.get("/metrics").text, left) == 2


def test_a_unix_socket_shows_who_has_left() -> None:
    ours, its = socket.socketpair()
    with ours:
        with its:
            assert not _is_reset(ours)
            its.shutdown(socket.SHUT_WR)
            assert not _is_reset(ours)
        assert _is_reset(ours)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system keep little of what a client has not read."""

    def bind_small(settings: ServerSettings) -> socket.socket:
        listener = bind(settings)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(live_server, "bind", bind_small)


def ask_for_much(server: LiveServer, **fields: Any) -> socket.socket:
    """Send a request whose answer takes a quarter of a megabyte; the caller reads it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(HANG_S)
    client.connect(("127.0.0.1", server.port))
    content = completion(max_tokens=400, **{"prompt": ["The king", "A queen"] * 2, **fields})
    client.sendall(content.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n"))
    return client


def connections_of(server: LiveServer) -> list[Connection]:
    return [each for each in server.server.server_state.connections if isinstance(each, Connection)]


def has_unread(server: LiveServer) -> bool:
    return any(each.transport.get_write_buffer_size() > 1 << 15 for each in connections_of(server))


def test_a_client_that_reads_nothing_is_cut_off(tiny_model_path: Path, small_buffers: None) -> None:
    with running_server(tiny_model_path, {"send_timeout_s": 0.2}, device="cpu") as server:
        with ask_for_much(server, stream=True):
            wait_until(lambda: server.service.num_active_requests)
            server.wait_until_idle()
            text = server.http.get("/metrics").text
            assert read_metric(text, LEFT) == 1
            assert read_metric(text, ABORTED) > 0
        # A whole answer: nothing runs any more, and yet the connection ends.
        with ask_for_much(server, prompt="The king", logprobs=20):
            wait_until(lambda: has_unread(server))
            wait_until(lambda: not has_unread(server))
        assert server.text(prompt="a", max_tokens=2, temperature=0)


def test_a_client_may_take_its_time(tiny_model_path: Path, small_buffers: None) -> None:
    with running_server(tiny_model_path, {"send_timeout_s": 3600.0}, device="cpu") as server:
        with ask_for_much(server, stream=True) as client:
            wait_until(lambda: any(each.flow.write_paused for each in connections_of(server)))
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert b"data: [DONE]" in answer and answer.count(b'"finish_reason":"length"') == 4
        server.wait_until_idle()
        assert read_metric(server.http.get("/metrics").text, LEFT) == 0


@contextlib.contextmanager
def slow_reader(send_timeout_s: float = 5.0, **socket_info: Any) -> Iterator[Scene]:
    """Return a connection on which much of an answer waits for the client."""
    scene = Scene(send_timeout_s=send_timeout_s, keep_alive_timeout_s=4.0)
    scene.transport.get_extra_info = socket_info.get
    scene.connection.data_received(GET + b"\r\n")
    assert not scene.timers.delays(), "nothing waits for a client that keeps up"
    scene.unread(100_000)
    scene.connection.pause_writing()
    try:
        yield scene
    finally:
        # Also of a test that fails: an application that is cancelled would wait for the client for ever.
        scene.connection.connection_lost(ConnectionResetError())
    assert not scene.timers.delays(), "an end leaves no timer"


@in_event_loop
async def test_only_a_client_that_reads_nothing_is_cut_off() -> None:
    with slow_reader() as scene:
        made, timers, abort = scene.connection, scene.timers, scene.transport.abort
        for num_bytes in (99_999, 50_000, 20_000):
            scene.unread(num_bytes)
            timers.run_out()
            assert timers.delays() == [5.0]
            abort.assert_not_called()
        scene.unread(16_000)
        made.resume_writing()
        assert not timers.delays()
        scene.unread(30_000)
        await scene.answer()
        assert sorted(timers.delays()) == [4.0, 5.0], "the next request, and the rest of the answer"
        made.data_received(GET + b"\r\n")
        assert not timers.delays()
        made.pause_writing()
        made.on_message_begin()
        assert timers.delays() == [5.0], "sending more is not reading"
        timers.run_out()
        abort.assert_called_once()
        assert not timers.delays()


@in_event_loop
async def test_without_send_timeout_no_client_is_disconnected() -> None:
    with slow_reader(0.0) as scene:
        assert not scene.timers.delays()
    with slow_reader() as scene:
        assert scene.timers.delays() == [5.0]


@in_event_loop
async def test_reading_from_the_system_alone_is_reading() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                left.send(bytes(1 << 12))
        with slow_reader(socket=left) as scene:
            for _ in range(3):
                right.recv(1 << 16)
                scene.timers.run_out()
                assert scene.timers.delays() == [5.0]
            scene.timers.run_out()
            scene.transport.abort.assert_called_once()


@in_event_loop
async def test_the_end_of_a_whole_answer_is_looked_after() -> None:
    with slow_reader() as scene:
        for is_complete in (False, True):
            scene.connection.cycle.response_complete = is_complete
            scene.unread(100_000)
            scene.connection.pause_writing()
            scene.unread(10_000)
            scene.connection.resume_writing()
            assert scene.timers.delays() == [5.0] * is_complete
        scene.timers.run_out()
        scene.transport.abort.assert_called_once()
