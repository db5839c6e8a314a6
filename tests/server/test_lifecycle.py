"""Disconnects, full queues, failed engines and shutdown: no request hangs, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from starlette.requests import ClientDisconnect
from starlette.types import Message

from rose_backend.errors import ConfigError
from rose_backend.server import serve
from rose_backend.server.generation import ClientWatch
from rose_backend.server.serve import bind
from rose_backend.server.settings import ServerSettings
from tests.server.live_server import (
    ABORTED,
    LEFT,
    LONG,
    MODEL,
    LiveServer,
    error_of,
    in_event_loop,
    long_stream,
    read_metric,
    running_server,
    sent,
    wait_until,
)
from tests.support.patience import HANG_S


@pytest.mark.parametrize(
    ("fields", "num_completions"),
    [({}, 1), ({"n": 3, "seed": 1}, 3), ({"prompt": ["The king", "A queen", "薔薇"]}, 3)],
)
def test_leaving_a_stream_frees_everything(
    server: LiveServer, fields: dict[str, Any], num_completions: int
) -> None:
    before = server.http.get("/metrics").text
    with long_stream(server, **fields):
        assert server.metric("kv_cache_usage_perc") > 0
    server.wait_until_idle()
    after = server.http.get("/metrics").text
    assert read_metric(after, "kv_cache_usage_perc") == 0
    assert read_metric(after, ABORTED) - read_metric(before, ABORTED) == num_completions
    assert read_metric(after, LEFT) - read_metric(before, LEFT) == 1
    num_tokens = read_metric(after, "generation_tokens_total") - read_metric(
        before, "generation_tokens_total"
    )
    assert num_tokens < num_completions * LONG["max_tokens"]


@pytest.mark.parametrize("prompts", [["The king"], ["The king", "A queen"]])
def test_leaving_while_waiting_for_a_whole_answer(tiny_model_path: Path, prompts: list[str]) -> None:
    with running_server(tiny_model_path, device="cpu") as server:
        body = json.dumps({**LONG, "model": MODEL, "prompt": prompts}).encode()
        with sent(server, body):
            wait_until(lambda: len(server.service.engine_request_ids) == len(prompts))
        server.wait_until_idle()
        text = server.http.get("/metrics").text
        assert read_metric(text, LEFT) == 1
        assert read_metric(text, ABORTED) == len(prompts)
        assert read_metric(text, "generation_tokens_total") < len(prompts) * LONG["max_tokens"]


def test_one_request_id_twice_at_once(server: LiveServer) -> None:
    server.http.headers["X-Request-Id"] = "twin"
    try:
        with long_stream(server), long_stream(server) as lines:
            assert '"id":"cmpl-twin"' in next(line for line in lines if line)
    finally:
        del server.http.headers["X-Request-Id"]


@pytest.mark.parametrize("in_two", [False, True], ids=["one-process", "two-processes"])
def test_a_full_queue_is_told_to_come_back(tiny_model_path: Path, in_two: bool) -> None:
    settings = {"frontend_multiprocessing": in_two}
    with running_server(tiny_model_path, settings, max_num_seqs=1, max_queue_size=1, device="cpu") as server:
        with long_stream(server), sent(server, json.dumps({**LONG, "prompt": "Waiting"}).encode()):
            wait_until(lambda: server.metric("num_requests_waiting") == 1)
            assert server.metric("num_requests_running") == 1
            for fields in ({}, {"stream": True}, {"prompt": ["a", "b"]}):
                answer = server.complete(**{**LONG, **fields})
                assert answer.status_code == 429
                assert answer.headers["retry-after"] == "1"
                error = error_of(answer)
                assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
                assert "allowed are 1 (max_queue_size)" in error["message"]
            with pytest.raises(openai.RateLimitError):
                server.openai.completions.create(model=MODEL, prompt="a")
        server.wait_until_idle()
        # A batch that does not fit the queue as a whole leaves nothing of itself behind.
        assert server.complete(prompt=["a"] * 5, max_tokens=2).status_code == 429
        server.wait_until_idle()
        assert server.complete(prompt="a", max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    "failure",
    [
        KeyError("cmpl-another-clients-request"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_after_the_engine_has_died(
    tiny_model_path: Path, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    # On a CPU, which is slow enough for an answer to have begun by then.
    with running_server(tiny_model_path, device="cpu") as server:
        step = server.core.step

        def fail_later() -> Any:
            if server.core.stats.generated_tokens >= 5:
                raise failure
            return step()

        server.core.step = fail_later  # type: ignore[method-assign]
        with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            events = [line for line in answer.iter_lines() if line]
        *pieces, error = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert events[-1] == "data: [DONE]"
        # Nobody can take it for a whole answer.
        assert all(piece["choices"][0]["finish_reason"] is None for piece in pieces)
        error = error["error"]
        # Whatever the step failed with, it may be about another client.
        assert error["message"] == "the engine has stopped; the server's log has the reason"
        assert f"{type(failure).__name__}: {failure}" in caplog.text
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")
        for answer in (server.http.get("/health"), server.complete(prompt="a")):
            assert answer.status_code == 503 and error_of(answer)["code"] == "engine_dead"
        with pytest.raises(openai.APIStatusError) as caught:
            server.openai.completions.create(model=MODEL, prompt="a")
        assert caught.value.status_code == 503
        assert server.http.get("/metrics").status_code == 200
    assert server.server.engine_has_died


def test_a_failure_of_the_server_itself(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise ZeroDivisionError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(server.service.metrics, "render", fail)
        answer = server.http.get("/metrics")
    assert answer.status_code == 500
    assert error_of(answer)["code"] == "internal_error" and "secret" not in answer.text
    # On the same connection.
    assert server.http.get("/metrics").status_code == 200


def test_draining_finishes_what_runs(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path) as server, ThreadPoolExecutor() as pool:
        alone = server.text(**{**LONG, "max_tokens": 300})
        running: Future[str] = pool.submit(server.text, **{**LONG, "max_tokens": 300})
        wait_until(lambda: server.service.engine_request_ids)
        server.signal()
        refused = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=HANG_S)
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "draining"
        assert refused.headers["retry-after"] == "1" and refused.headers["connection"] == "close"
        health = httpx.get(f"{server.url}/health", timeout=HANG_S)
        assert health.status_code == 503 and error_of(health)["code"] == "draining"
        assert httpx.get(f"{server.url}/metrics", timeout=HANG_S).status_code == 200
        assert running.result() == alone
        server.join()
        assert not server.engine.is_running
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_draining_aborts_what_takes_too_long(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_ABORT_TIMEOUT_S", HANG_S)
    with (
        running_server(tiny_model_path, {"drain_timeout_s": 0.1}, device="cpu") as server,
        ThreadPoolExecutor() as pool,
    ):
        with long_stream(server) as lines:
            whole = pool.submit(server.complete, **{**LONG, "prompt": ["The king", "A queen"]})
            wait_until(lambda: len(server.service.engine_request_ids) == 3)
            server.signal()
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        choices = whole.result().json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
        server.join()


def test_a_second_signal_ends_at_once(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, device="cpu") as server:
        with long_stream(server) as lines:
            server.signal()
            server.signal()
            events = [line for line in lines if line]
        assert "the engine has stopped" in events[-2] and events[-1] == "data: [DONE]"
        server.join()
        assert not server.engine.is_running and not server.server.engine_has_died


def test_idle_connections_do_not_hold_up_the_end(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_ABORT_TIMEOUT_S", 10 * HANG_S)
    with running_server(tiny_model_path) as server:
        assert server.http.get("/health").status_code == 200
        server.signal()
        server.join()


def test_an_address_in_use(server: LiveServer) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"^host, port: got 127.0.0.1:{port}, which cannot be used"):
        bind(ServerSettings(served_model_names=("a",), port=port))
    with pytest.raises(ConfigError, match=r"^uds: got /no/such/dir/socket, which cannot be used"):
        bind(ServerSettings(served_model_names=("a",), uds="/no/such/dir/socket"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"served_model_names": ()}, "served_model_name: got ()"),
        ({"served_model_names": ("",)}, "served_model_name: got ('',)"),
        ({"host": ""}, "host: got an empty name"),
        ({"port": 65_536}, "port: got 65536, allowed is an integer from 0 to 65535"),
        ({"max_body_bytes": 0}, "max_body_bytes: got 0"),
        ({"max_prompts": 0}, "max_prompts: got 0"),
        ({"max_answer_tokens": 0}, "max_answer_tokens: got 0"),
        ({"max_connections": 0}, "max_connections: got 0"),
        ({"max_header_bytes": 1023}, "max_header_bytes: got 1023, allowed is an integer from 1024"),
        ({"max_headers": 15}, "max_headers: got 15, allowed is an integer from 16"),
        ({"header_timeout_s": 0.0}, "header_timeout_s: got 0.0, allowed is a number of seconds above 0"),
        ({"body_timeout_s": float("inf")}, "body_timeout_s: got inf"),
        ({"keep_alive_timeout_s": float("nan")}, "keep_alive_timeout_s: got nan"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s: got -1.0"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s: got nan"),
        ({"send_timeout_s": -1.0}, "send_timeout_s: got -1.0"),
        ({"send_timeout_s": float("inf")}, "send_timeout_s: got inf"),
        ({"api_keys": ("",)}, "api_key: got an empty key"),
        ({"api_keys": ("ü",)}, "api_key: got"),
    ],
)
def test_settings_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**{"served_model_names": ("a",), **fields})
    assert message in str(caught.value)
    assert not any(key and key in str(caught.value) for key in fields.get("api_keys", ()))


class Client:
    """One that sends nothing more, and leaves when told."""

    def __init__(self) -> None:
        self._has_left = asyncio.Event()

    async def receive(self) -> Message:
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def leave(self) -> None:
        """Disconnect."""
        self._has_left.set()
        await asyncio.sleep(0.01)


Scene = Callable[[Client, ClientWatch], Coroutine[Any, Any, None]]


async def leaves_during_work(client: Client, watch: ClientWatch) -> None:
    leaving = asyncio.create_task(client.leave())
    with pytest.raises(ClientDisconnect):
        async with watch:
            await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None and not task.cancelling(), "nothing of it is left in the task"
    await leaving


async def leaves_between(client: Client, watch: ClientWatch) -> None:
    async with watch:
        await asyncio.sleep(0)
    await client.leave()
    with pytest.raises(ClientDisconnect):
        async with watch:
            raise AssertionError("the client has disconnected")


async def leaves_after_the_end(client: Client, watch: ClientWatch) -> None:
    async with watch:
        await asyncio.sleep(0)
    watch.close()
    await client.leave()


async def work_fails_as_it_is_given_up(client: Client, watch: ClientWatch) -> None:
    leaving = asyncio.create_task(client.leave())
    with pytest.raises(KeyError):
        async with watch:
            try:
                await asyncio.sleep(60)
            finally:
                raise KeyError
    await leaving


async def another_cancellation(client: Client, watch: ClientWatch) -> None:
    async def work() -> None:
        async with watch:
            await asyncio.sleep(60)

    for leaves_too in (False, True):
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        if leaves_too:
            leaving = asyncio.create_task(client.leave())
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await leaving


@pytest.mark.parametrize(
    "scene",
    [
        leaves_during_work,
        leaves_between,
        leaves_after_the_end,
        work_fails_as_it_is_given_up,
        another_cancellation,
    ],
)
@in_event_loop
async def test_a_client_leaves(scene: Scene) -> None:
    client = Client()
    watch = ClientWatch(client.receive)
    try:
        await scene(client, watch)
    finally:
        watch.close()
