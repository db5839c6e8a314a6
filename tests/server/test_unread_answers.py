"""Clients that do not read: what is kept for them is bounded, and at some time they are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tracemalloc
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from uvicorn.server import ServerState

from rose_backend.engine.client import OutputStream
from rose_backend.engine.outputs import CompletionOutput, RequestOutput
from rose_backend.engine.request import ProcessedInput
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.server.connection import ConnectionConfig, SendTimeoutProtocol
from rose_backend.server.generation import Generation
from rose_backend.server.serve import bind
from rose_backend.server.service import RequestRecord, ServerMetrics, Service
from rose_backend.server.settings import ServerSettings
from tests.server import live_server
from tests.server.live_server import LONG, LiveServer, read_metric, running_server, wait_until
from tests.server.test_lifecycle import ABORTED, LEFT
from tests.support.patience import HANG_S

NUM_PROMPTS, NUM_TOKENS = 128, 400
MAX_BYTES = 8 << 20
PROMPT = [1, 2, 3]


class RemoteEngine:
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


def make_generation(engine: RemoteEngine) -> Generation:
    service = SimpleNamespace(engine=engine, engine_request_ids=set(), metrics=None, hit_unit=16)
    service.submission = asyncio.Lock()
    service.metrics = ServerMetrics("tiny", block_size=16, num_blocks=1, max_model_len=1024)
    record = RequestRecord("id", "/v1/completions")
    ids, params = np.array([1, 2, 3], np.int32), SamplingParams(max_tokens=NUM_TOKENS)
    inputs = [ProcessedInput(number, None, ids, params, b"") for number in range(NUM_PROMPTS)]
    return Generation(cast(Service, service), record, inputs)


def test_little_is_kept_for_a_client_that_does_not_read() -> None:
    async def play() -> None:
        engine = RemoteEngine()
        outputs = make_generation(engine).outputs()
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

    asyncio.run(play())


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system keep little of what a client has not read."""

    def bind_small(settings: ServerSettings) -> socket.socket:
        listener = bind(settings)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(live_server, "bind", bind_small)


def ask(server: LiveServer, **fields: object) -> socket.socket:
    """Send a request whose answer takes a quarter of a megabyte; the caller reads it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(HANG_S)
    client.connect(("127.0.0.1", server.port))
    content = json.dumps(
        {**LONG, "max_tokens": 400, "prompt": ["The king", "A queen"] * 2, **fields}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    client.sendall(head.encode() + content)
    return client


def connections_of(server: LiveServer) -> list[SendTimeoutProtocol]:
    return [each for each in server.server.server_state.connections if isinstance(each, SendTimeoutProtocol)]


def has_unread(server: LiveServer) -> bool:
    return any(each.transport.get_write_buffer_size() > 1 << 15 for each in connections_of(server))


def test_a_client_that_reads_nothing_is_cut_off(tiny_model_path: Path, small_buffers: None) -> None:
    with running_server(tiny_model_path, {"send_timeout_s": 0.2}, device="cpu") as server:
        with ask(server, stream=True):
            wait_until(lambda: server.service.num_active_requests)
            server.wait_until_idle()
            text = server.http.get("/metrics").text
            assert read_metric(text, LEFT) == 1
            assert read_metric(text, ABORTED) > 0
        # A whole answer: nothing runs any more, and yet the connection ends.
        with ask(server, prompt="The king", logprobs=20):
            wait_until(lambda: has_unread(server))
            wait_until(lambda: not has_unread(server))
        assert server.text(prompt="a", max_tokens=2, temperature=0)


def test_a_client_may_take_its_time(tiny_model_path: Path, small_buffers: None) -> None:
    with running_server(tiny_model_path, {"send_timeout_s": 3600.0}, device="cpu") as server:
        with ask(server, stream=True) as client:
            wait_until(lambda: any(each.flow.write_paused for each in connections_of(server)))
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert b"data: [DONE]" in answer and answer.count(b'"finish_reason":"length"') == 4
        server.wait_until_idle()
        assert read_metric(server.http.get("/metrics").text, LEFT) == 0


class Timers:
    """A loop on which time passes when told."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, Callable[[], object]]] = []

    def call_later(self, seconds: float, callback: Callable[..., object], *values: object) -> Any:
        entry = (seconds, lambda: callback(*values))
        self.waiting.append(entry)

        def cancel() -> None:
            self.waiting = [each for each in self.waiting if each is not entry]

        return SimpleNamespace(cancel=cancel)

    def pass_time(self) -> None:
        due, self.waiting = self.waiting, []
        for _, callback in due:
            callback()


class Transport:
    """One that tells how much waits, as the test says."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def get_extra_info(self, name: str) -> None:
        return None

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return True


def make_connection(send_timeout_s: float) -> tuple[SendTimeoutProtocol, Transport, Timers]:
    timers, transport = Timers(), Transport()
    settings = ServerSettings(served_model_names=("a",), send_timeout_s=send_timeout_s)
    config = ConnectionConfig(
        lambda: None, cast(Service, SimpleNamespace(settings=settings)), log_config=None
    )
    config.load()
    made = SendTimeoutProtocol(config, ServerState(), {}, cast(Any, timers))
    made.connection_made(cast(Any, transport))
    return made, transport, timers


@pytest.fixture
def connection() -> tuple[SendTimeoutProtocol, Transport, Timers]:
    return make_connection(5.0)


def test_without_send_timeout_no_client_is_disconnected() -> None:
    made, transport, timers = make_connection(0.0)
    transport.num_bytes = 100_000
    made.pause_writing()
    assert not timers.waiting


def test_only_a_client_that_reads_nothing_is_cut_off(
    connection: tuple[SendTimeoutProtocol, Transport, Timers],
) -> None:
    made, transport, timers = connection
    assert not timers.waiting, "nothing waits for a client that keeps up"
    transport.num_bytes = 100_000
    made.pause_writing()
    for num_bytes in (99_999, 50_000, 20_000):
        transport.num_bytes = num_bytes
        timers.pass_time()
        assert len(timers.waiting) == 1 and timers.waiting[0][0] == 5.0 and not transport.is_aborted
    transport.num_bytes = 16_000
    made.resume_writing()
    assert not timers.waiting
    transport.num_bytes = 30_000
    made.on_response_complete()
    assert len(timers.waiting) == 1
    # The next request of the same client.
    made.on_message_begin()
    assert not timers.waiting
    made.pause_writing()
    made.on_message_begin()
    assert len(timers.waiting) == 1, "sending more is not reading"
    timers.pass_time()
    assert transport.is_aborted and not timers.waiting


def test_reading_from_the_system_alone_is_reading(
    connection: tuple[SendTimeoutProtocol, Transport, Timers], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, transport, timers = connection
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                left.send(bytes(1 << 12))
        monkeypatch.setattr(transport, "get_extra_info", {"socket": left}.get)
        transport.num_bytes = 100_000
        made.pause_writing()
        for _ in range(3):
            right.recv(1 << 16)
            timers.pass_time()
            assert len(timers.waiting) == 1 and not transport.is_aborted
        timers.pass_time()
        assert transport.is_aborted


def test_the_end_of_a_whole_answer_is_looked_after(
    connection: tuple[SendTimeoutProtocol, Transport, Timers],
) -> None:
    made, transport, timers = connection
    for is_complete in (False, True):
        made.cycle = cast(Any, SimpleNamespace(response_complete=is_complete))
        transport.num_bytes = 100_000
        made.pause_writing()
        transport.num_bytes = 10_000
        made.resume_writing()
        assert len(timers.waiting) == is_complete
    timers.pass_time()
    assert transport.is_aborted


def test_an_end_leaves_no_timer(connection: tuple[SendTimeoutProtocol, Transport, Timers]) -> None:
    made, transport, timers = connection
    transport.num_bytes = 1
    made.pause_writing()
    made.connection_lost(ConnectionResetError())
    assert not timers.waiting
