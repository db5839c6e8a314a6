"""Answers before a request is complete, and clients that only close their sending side: both get the answer."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose_backend.server import connection as connection_module
from rose_backend.server.connection import _is_reset
from tests.server.live_server import LONG, LiveServer, read_metric, running_server, wait_until
from tests.server.test_connections import GET, POST, Scene, connect, read_all

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


@pytest.mark.parametrize("is_last", [True, False], ids=["close", "keep-alive"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (KEY + JSON, 413),
        (KEY, 415),
        (KEY + JSON + "Content-Encoding: gzip\r\n", 415),
        (JSON, 401),
        (KEY + JSON + "X-Request-Id: a b\r\n", 400),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
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


def test_dropping_ends_with_a_pause() -> None:
    async def play() -> None:
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

    asyncio.run(play())


@pytest.mark.parametrize("limit", ["_MAX_LINGER_S", "_MAX_LINGER_BYTES"])
def test_dropping_has_limits(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(connection_module, limit, -1)

    async def play() -> None:
        scene = refused_scene()
        await scene.answer()
        scene.connection.data_received(b"{")
        if limit == "_MAX_LINGER_S":
            scene.transport.abort.assert_not_called()
            scene.timers.run_out()
        scene.transport.abort.assert_called_once()

    asyncio.run(play())


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
