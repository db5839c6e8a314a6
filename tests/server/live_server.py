"""A real server on a free port, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import uvloop

from rose_backend import EngineConfig
from rose_backend.engine.async_engine import AsyncEngine
from rose_backend.engine.core import EngineCore
from rose_backend.engine.outputs import Counters, EngineLoad
from rose_backend.engine.remote_engine import RemoteEngine
from rose_backend.server.serve import bind, make_server, make_service
from rose_backend.server.settings import ServerSettings
from tests.support.patience import HANG_S

MODEL = "tiny"
LONG: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 1000,
    "ignore_eos": True,
    "temperature": 0,
}
"""Takes seconds; tests that start it also end it."""


ABORTED = 'request_success_total{finished_reason="abort",model_name="tiny"}'
LEFT = 'http_responses_total{route="/v1/completions",status="499"}'
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
USAGE: dict[str, Any] = {
    **{"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
    "prompt_tokens_details": {"cached_tokens": 1},
}
NO_REPLY: dict[str, None] = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
"""Fields of a chat's answer that are null, the last one where there is none."""


class LiveServer:
    """One running server.

    Attributes:
        url: root of its HTTP interface.
        http: plain client; its connections stay open between calls.
        openai: the real thing, without retries.
    """

    def __init__(self, model: Path, settings: dict[str, Any], options: dict[str, Any]) -> None:
        defaults: dict[str, Any] = {"served_model_names": (MODEL,), "port": 0, "drain_timeout_s": HANG_S}
        defaults["frontend_multiprocessing"] = False
        self.settings = ServerSettings(**{**defaults, **settings})
        self.service = make_service(EngineConfig(model=str(model), **options), self.settings)
        self.engine = self.service.engine
        listener = bind(self.settings)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(self.service)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="rose-server", daemon=True)
        self._thread.start()
        key = self.settings.api_keys[0] if self.settings.api_keys else "unused"
        self.http = httpx.Client(base_url=self.url, timeout=HANG_S)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=HANG_S)
        wait_until(lambda: self.server.started)

    def complete(self, **body: object) -> httpx.Response:
        """Post a completion request."""
        return self.http.post("/v1/completions", json=body)

    def post(self, path: str, content: object) -> httpx.Response:
        """Post bytes as they are, anything else as JSON, in which NaN and lone surrogates may be, too."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.http.post(path, content=data, headers={"Content-Type": "application/json"})

    def text(self, **body: object) -> str:
        """Return the text of the only completion of a request that must succeed."""
        answer = self.complete(**body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        return read_metric(self.http.get("/metrics").text, name)

    @property
    def core(self) -> EngineCore:
        """The engine itself, where it runs in this process."""
        assert isinstance(self.engine, AsyncEngine)
        return self.engine._core

    def counters(self) -> Counters:
        """Return what the engine has done and what it has in use."""
        return asyncio.run_coroutine_threadsafe(self.engine.counters(), self._loop).result(HANG_S)

    def wait_until_idle(self) -> None:
        """Return when no request is left, and check that none has left anything behind."""
        wait_until(lambda: not self.service.num_active_requests and not self._num_unfinished())
        assert not self.service.engine_request_ids
        if isinstance(self.engine, AsyncEngine):
            self.core.check_integrity()
        else:
            # The engine hears of a stop string when the answer is on its way.
            wait_until(lambda: not self.engine.is_running or self.counters().load == EngineLoad(0, 0, 0.0))

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self.server.serve([listener]))

    def _num_unfinished(self) -> int:
        if isinstance(self.engine, RemoteEngine):
            return len(self.engine._streams)
        assert isinstance(self.engine, AsyncEngine)
        with self.engine._lock:  # a request is either in the inbox or in the core
            return len(self.engine._steps._inbox) + self.core.num_unfinished

    def signal(self) -> None:
        """Do what the handler of SIGTERM does."""
        self.server.handle_exit(15, None)

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(HANG_S)
        assert not self._thread.is_alive(), "the server does not end"

    def close(self) -> None:
        """Stop; a request that is still running is the fault of the test."""
        if self._thread.is_alive():
            if self.engine.is_running:
                self.wait_until_idle()
            self.signal()
        self.http.close()
        self.openai.close()
        self.join()


@contextmanager
def running_server(
    model: Path, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[LiveServer]:
    """Start a server with fields of ``ServerSettings`` and of ``EngineConfig``; without either, in this process."""
    # In float32, so that texts are the same however steps come about.
    defaults = {"dtype": "float32", "max_num_seqs": 8, "num_blocks": 600}
    server = LiveServer(model, settings or {}, {**defaults, **options})
    try:
        yield server
    finally:
        server.close()


@contextmanager
def sent(server: LiveServer, content: bytes, *, length: int | None = None) -> Iterator[socket.socket]:
    """Send a completion request and hang up at the end; ``length`` may promise more than is sent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content) if length is None else length}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        yield connection


@contextmanager
def long_stream(server: LiveServer, **fields: object) -> Iterator[Iterator[str]]:
    """Start a streamed answer that takes seconds, wait for its first event, and hang up at the end."""
    with server.http.stream("POST", "/v1/completions", json={**LONG, **fields, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def stream(server: LiveServer, path: str = "/v1/completions", **body: object) -> list[dict[str, Any]]:
    """Return the events of a streamed answer, which must end as OpenAI's do."""
    with server.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in answer.headers
        events = [line for line in answer.iter_lines() if line]
    assert all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that no parent has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def connect(server: LiveServer) -> socket.socket:
    """Return a connection that nothing has been sent on."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S)


def read_all(connection: socket.socket) -> bytes:
    """Return all that comes until the server closes."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


def wait_until(condition: Callable[[], object]) -> None:
    """Return when ``condition`` is true."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def read_metric(text: str, name: str) -> float:
    """Return the sum of a metric's samples in Prometheus' text format; with labels in ``name``, of that one."""
    if "{" in name:
        values = re.findall(rf"(?m)^rose:{re.escape(name)} (\S+)$", text)
        # Prometheus leaves out what was never counted.
        return float(values[0]) if values else 0.0
    values = re.findall(rf"(?m)^rose:{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text)
    assert values, f"no metric {name}"
    return sum(map(float, values))


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the error object of a refused request; of Anthropic's, with what OpenAI's has besides."""
    body = answer.json()
    error: dict[str, Any] = body["error"]
    if answer.request.url.path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"} and body["type"] == "error"
        assert set(error) == {"type", "message"}
        return {**error, "param": error["message"].partition(":")[0], "code": None}
    assert set(error) == {"message", "type", "param", "code"}
    return error


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


def check_refused(answer: httpx.Response, param: str, message: str) -> None:
    """Check that a request was refused with status 400, and that its error names a field and has a text."""
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json", answer.text
    error = error_of(answer)
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
    assert message in error["message"] and len(error["message"]) < 1000
