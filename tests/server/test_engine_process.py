"""The engine in a process of its own: whichever process ends, and however, no request hangs and no process is left."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rose_backend import EngineConfig
from rose_backend.engine import engine_process, remote_engine
from rose_backend.engine.client import OutputStream
from rose_backend.engine.engine_process import EngineProcess
from rose_backend.engine.messages import (
    HEADER,
    Add,
    Error,
    OutputBatch,
    Ready,
    Stop,
    TokenizerLoaded,
    Update,
    decode_answer,
    encode,
    read_message,
)
from rose_backend.engine.outputs import (
    CompletionOutput,
    FinishReason,
    GrowingCompletions,
    Logprob,
    RequestOutput,
)
from rose_backend.engine.remote_engine import RemoteEngine
from rose_backend.engine.request import ProcessedInput
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.tokenizer_loading import load_tokenizer
from rose_backend.errors import ConfigError, EngineDeadError, ModelError
from rose_backend.server import serve
from tests.server.live_server import (
    LONG,
    LiveServer,
    error_of,
    in_event_loop,
    is_alive,
    long_stream,
    running_server,
    wait_until,
)
from tests.support.patience import HANG_S

TWO = {"frontend_multiprocessing": True}


def engine_process_of(server: LiveServer) -> int:
    """Return the process id of a server's engine."""
    assert isinstance(server.engine, RemoteEngine)
    return server.engine._process.pid


def test_a_killed_engine(tiny_model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_server(tiny_model_path, TWO, device="cpu") as server:
        with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(engine_process_of(server), signal.SIGKILL)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead" and "the engine has stopped" in error["message"]
        assert "the engine process ended with signal SIGKILL" in caplog.messages
        for answer in (server.http.get("/health"), server.complete(prompt="a")):
            assert answer.status_code == 503 and error_of(answer)["code"] == "engine_dead"
        assert server.http.get("/metrics").status_code == 200
    assert server.server.engine_has_died


def wait_for_heartbeats(engine: RemoteEngine, number: int) -> None:
    """Return when the engine process has told its counters ``number`` times more."""
    for _ in range(number):
        wait_until(partial(lambda last: engine._counters is not last, engine._counters))


def test_a_stalled_engine_is_noticed_and_may_go_on(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_engine, "_HEARTBEAT_INTERVAL_S", 0.01)
    monkeypatch.setattr(remote_engine, "_HEARTBEAT_TIMEOUT_S", HANG_S)
    with running_server(tiny_model_path, TWO, device="cpu") as server:
        engine, pid = server.engine, engine_process_of(server)
        assert isinstance(engine, RemoteEngine)
        alone = server.text(**LONG)
        with long_stream(server) as lines:
            monkeypatch.setattr(remote_engine, "_HEARTBEAT_TIMEOUT_S", 0.05)
            # Then a heartbeat with that time is under way.
            wait_for_heartbeats(engine, 2)
            num_tokens = server.metric("generation_tokens_total")
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_until(lambda: server.http.get("/health").status_code == 503)
                for answer in (server.http.get("/health"), server.complete(**LONG)):
                    assert answer.status_code == 503 and error_of(answer)["code"] == "engine_stalled"
                    assert answer.headers["retry-after"] == "1"
                # With the values that are known, and what does without the engine is answered as ever.
                assert server.metric("generation_tokens_total") >= num_tokens
                assert server.http.post("/tokenize", json={"prompt": "a"}).status_code == 200
                assert sum("has not answered for" in message for message in caplog.messages) >= 1
            finally:
                monkeypatch.setattr(remote_engine, "_HEARTBEAT_TIMEOUT_S", HANG_S)
                os.kill(pid, signal.SIGCONT)
            wait_until(lambda: server.http.get("/health").status_code == 200)
            events = [line for line in lines if line]
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.text(**LONG) == alone
        with long_stream(server) as lines:
            # A real-time signal, which has no name.
            os.kill(pid, 40)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]" and "engine_dead" in events[-2]
        assert "the engine process ended with signal 40" in caplog.messages
    assert server.server.engine_has_died


def have_ended(answers: list[Future[httpx.Response]], number: int) -> bool:
    """Return whether at least so many have come."""
    return sum(answer.done() for answer in answers) >= number


def serves(server: LiveServer, number: int) -> bool:
    """Return whether so many requests to routes that generate are under way."""
    return server.service.num_active_requests == number


def test_what_waits_for_a_stalled_engine_is_bounded(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 100 * remote_engine._BYTES_PER_REQUEST
    monkeypatch.setattr(remote_engine, "MAX_UNREAD_BYTES", limit)
    # Only the test says when the engine counts as stalled.
    monkeypatch.setattr(remote_engine, "_HEARTBEAT_TIMEOUT_S", HANG_S)
    body = {"prompt": [[1, 2, 3]] * 64, "max_tokens": 2}
    with running_server(tiny_model_path, TWO) as server, ThreadPoolExecutor() as pool:
        engine, pid = server.engine, engine_process_of(server)
        assert isinstance(engine, RemoteEngine)

        def unread() -> int:
            return engine._num_sent_bytes - engine._num_read_bytes

        def is_full() -> bool:
            return unread() > limit and serves(server, 4)

        answers: list[Future[httpx.Response]]
        for is_noticed in (False, True):
            wait_until(lambda: not unread() and not engine._counter_waiters)
            os.kill(pid, signal.SIGSTOP)
            try:
                answers = [pool.submit(server.complete, **body) for _ in range(4)]
                wait_until(is_full)
                assert limit < unread() < limit + 2 * remote_engine._BYTES_PER_REQUEST
                assert len(engine._streams) <= 100
                # The next one waits in front of its body.
                answers.append(pool.submit(server.complete, **body))
                wait_until(partial(serves, server, 5))
                assert len(server.service.engine_request_ids) <= 4 * 64
                # Not one more for each request that waits.
                assert len(engine._counter_waiters) <= 2
                engine.is_stalled = is_noticed
                if is_noticed:
                    # The one whose prompts were sent before waits on.
                    wait_until(partial(have_ended, answers, 4))
            finally:
                os.kill(pid, signal.SIGCONT)
            got = [answer.result() for answer in answers]
            if is_noticed:
                assert sum(answer.status_code == 503 for answer in got) >= 4
            else:
                assert [len(answer.json()["choices"]) for answer in got] == [64] * 5
        server.wait_until_idle()


def test_an_engine_that_is_told_to_stop_may_still_answer(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(tiny_model_path, TWO) as server:
        engine, pid = server.engine, engine_process_of(server)
        assert isinstance(engine, RemoteEngine)
        shutdown = engine.shutdown

        async def asked_and_stopped() -> None:
            os.kill(pid, signal.SIGSTOP)
            waiter, stopping = engine._ask(), asyncio.create_task(shutdown())
            await asyncio.wait([waiter])
            assert waiter.cancelled()
            os.kill(pid, signal.SIGCONT)
            await stopping

        monkeypatch.setattr(engine, "shutdown", asked_and_stopped)
    assert not [record for record in caplog.records if record.exc_info], caplog.text


def test_a_status_is_described_whatever_ended_the_process() -> None:
    for number in range(1, signal.NSIG):
        assert str(number) in remote_engine._describe_status(-number) or number in set(signal.Signals)
    assert remote_engine._describe_status(-9) == "signal SIGKILL"
    assert remote_engine._describe_status(-40) == "signal 40"
    assert remote_engine._describe_status(3) == "exit code 3"


def test_draining_aborts_and_kills_what_takes_too_long(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "_END_TIMEOUT_S", 0.5)
    monkeypatch.setattr(serve, "_ABORT_TIMEOUT_S", HANG_S)
    settings = {**TWO, "drain_timeout_s": 0.1}
    with running_server(tiny_model_path, settings, device="cpu") as server:
        pid = engine_process_of(server)
        shutdown = server.engine.shutdown

        async def stopped() -> None:
            os.kill(pid, signal.SIGSTOP)
            await shutdown()

        with long_stream(server) as lines:
            monkeypatch.setattr(server.engine, "shutdown", stopped)
            server.signal()
            events = [line for line in lines if line]
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        server.join()
        assert not server.server.engine_has_died and not is_alive(pid)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "/no/such/dir"}, ModelError, "/no/such/dir"),
        ({"max_model_len": 5000}, ConfigError, "max_model_len: got 5000, allowed are at most 1024"),
    ],
)
def test_a_model_that_cannot_be_loaded(
    tiny_model_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = EngineConfig(**{"model": str(tiny_model_path), **options})
    with pytest.raises(error, match=message):
        RemoteEngine(config, lambda tokenizer: None)


def test_an_engine_process_that_ends_while_loading(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose_backend.engine.remote_engine.sys.executable", "false")
    with pytest.raises(EngineDeadError, match="ended with exit code 1 while it was loading"):
        RemoteEngine(EngineConfig(model=str(tiny_model_path)), lambda tokenizer: None)


def test_an_engine_process_that_sends_what_cannot_be_read_while_loading(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall(b'\\1\\0\\0\\0\\xc1')"
    monkeypatch.setattr(remote_engine, "_ENGINE_PROGRAM", program)
    with pytest.raises(EngineDeadError, match=r"the engine process sent what cannot be read \(.*malformed"):
        RemoteEngine(EngineConfig(model=str(tiny_model_path)), lambda tokenizer: None)


@pytest.mark.parametrize("reader", ["API process", "engine process"])
def test_a_message_that_cannot_be_read_ends_the_engine(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reader: str
) -> None:
    with running_server(tiny_model_path, TWO, device="cpu") as server, long_stream(server) as lines:
        engine, pid = server.engine, engine_process_of(server)
        assert isinstance(engine, RemoteEngine) and engine._writer is not None
        if reader == "API process":
            monkeypatch.setattr(remote_engine, "decode_answer", lambda content: decode_answer(content[:-1]))
        else:
            server._loop.call_soon_threadsafe(engine._writer.write, HEADER.pack(1) + b"\xc1")
        events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]" and "engine_dead" in events[-2]
        assert error_of(server.complete(prompt="a"))["code"] == "engine_dead"
        assert not is_alive(pid)
    how = {"API process": "signal SIGKILL", "engine process": "exit code 1"}[reader]
    assert f"the engine process ended with {how}" in caplog.messages
    assert server.server.engine_has_died


@pytest.fixture
def engine_in_a_thread(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[EngineProcess, socket.socket]]:
    """Return what runs in the engine's process, and the other end of its connection."""
    monkeypatch.setattr(engine_process.os, "_exit", lambda code: None)
    ours, its = socket.socketpair()
    config = EngineConfig(model=str(tiny_model_path), num_blocks=100, max_num_seqs=4)
    with ours, its, its.makefile("rb") as commands:
        # It is read once there is an engine process.
        threading.Thread(
            target=ours.sendall, args=(encode(TokenizerLoaded(load_tokenizer(tiny_model_path))),)
        ).start()
        yield EngineProcess(config, its, commands), ours
        ours.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not any(thread.name == "rose-commands" for thread in threading.enumerate()))


def test_a_step_that_fails(engine_in_a_thread: tuple[EngineProcess, socket.socket]) -> None:
    engine, ours = engine_in_a_thread
    step = engine._core._advance
    given = set()

    def fail_later() -> None:
        given.update((each.namespace, each.tenant) for each in engine._core._requests.values())
        if engine._core.stats.generated_tokens >= 2:
            raise RuntimeError("the device fell off the bus")
        step()

    engine._core._advance = fail_later  # type: ignore[method-assign]
    ids = np.arange(5, dtype=np.int32)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    ours.sendall(encode(Add.of("seven", ProcessedInput(7, None, ids, params, b"cache", [], b"key"))))
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        engine.run()
    with ours.makefile("rb") as stream:
        seen = [read_message(stream, decode_answer)]
        while not isinstance(seen[-1], Error):
            seen.append(read_message(stream, decode_answer))
    assert isinstance(seen[0], Ready)
    death = seen[-1].restored()
    assert isinstance(death, EngineDeadError) and "fell off the bus" in str(death)
    assert given == {(b"cache", b"key")}


def test_batches_without_ack_hold_later_ones_back(
    engine_in_a_thread: tuple[EngineProcess, socket.socket],
) -> None:
    engine, ours = engine_in_a_thread
    ids = np.arange(5, dtype=np.int32)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    ours.sendall(encode(Add.of("one", ProcessedInput(1, None, ids, params, b"", []))))
    stepper = threading.Thread(target=engine.run)
    stepper.start()
    with ours.makefile("rb") as stream:
        received = [read_message(stream, decode_answer)]
        while not received or not is_last(received[-1]):
            received.append(read_message(stream, decode_answer))
        ours.sendall(encode(Stop()))
    stepper.join()
    batches = [message for message in received if isinstance(message, OutputBatch)]
    # Two that were not acknowledged, and the last output, which never waits.
    assert len(batches) == 3
    assert (
        sum(
            len(piece.token_ids)
            for each in batches
            for update in each.updates
            for piece in update.completions
        )
        == 200
    )


def is_last(message: object) -> bool:
    """Return whether a message ends a request."""
    return isinstance(message, OutputBatch) and any(update.finished for update in message.updates)


def make_outputs(rng: np.random.Generator) -> list[RequestOutput]:
    """Return how a request with several completions might grow, what is new in each output."""
    num_completions, has_logprobs = int(rng.integers(1, 4)), bool(rng.integers(2))
    num_tokens, outputs = [0] * num_completions, list[RequestOutput]()
    unfinished = set(range(num_completions))
    while unfinished:
        completions = []
        # The first output of a prompt with several completions lacks those that have not split off yet.
        for index in sorted(unfinished) if outputs else [0]:
            # Each begins with a token.
            new = [
                int(token)
                for token in rng.integers(1000, size=rng.integers(0 if num_tokens[index] else 1, 3))
            ]
            num_tokens[index] += len(new)
            completion = CompletionOutput(index, "".join(f"{token} " for token in new), new)
            if has_logprobs:
                completion.logprobs = [{token: Logprob(-1.5, 1, f"{token} ")} for token in new]
                completion.cumulative_logprob = -1.5 * num_tokens[index]
            if rng.random() < 0.2:
                completion.finish_reason, completion.stop_reason = "stop", "x"
                unfinished.discard(index)
            if new or completion.finished:
                completions.append(completion)
        outputs.append(RequestOutput("r", None, [1, 2], completions, not unfinished, 1))
    return outputs


@pytest.mark.parametrize("seed", range(20))
@in_event_loop
async def test_streams_are_put_together_again(seed: int) -> None:
    rng = np.random.default_rng(seed)
    outputs = make_outputs(rng)
    batch = decode_answer(encode(OutputBatch([Update.of(output) for output in outputs]))[HEADER.size :])
    assert isinstance(batch, OutputBatch)
    stream = OutputStream("r", asyncio.get_running_loop())
    sent, got = GrowingCompletions(), GrowingCompletions()
    for update, output in zip(batch.updates, outputs, strict=True):
        stream.put(update.output(None, [1, 2]))
        sent.add(output.outputs)
        # Some are taken together.
        if not output.finished and rng.random() < 0.5:
            continue
        mine = await stream.get()
        got.add(mine.outputs)
        expected, actual = sent.snapshot(), got.snapshot()
        assert actual == expected
        assert replace(mine, outputs=[]) == replace(output, outputs=[])


def one_token(token: int, text: str, is_last: bool) -> RequestOutput:
    reason: FinishReason | None = "length" if is_last else None
    piece = CompletionOutput(0, text, [token], [{token: Logprob(-1.0, 1, text)}], -1.0 * token, reason)
    return RequestOutput("r", None, [1], [piece], is_last, 0, 0.5)


@in_event_loop
async def test_what_was_taken_does_not_change() -> None:
    stream = OutputStream("r", asyncio.get_running_loop())
    stream.put(one_token(1, "a", False))
    first = await stream.get()
    kept = copy.deepcopy(first)
    stream.put(one_token(2, "b", True))
    assert first == kept
    (second,) = (await stream.get()).outputs
    assert (second.text, second.token_ids, second.cumulative_logprob) == ("b", [2], -2.0)
    assert second.logprobs == [{2: Logprob(-1.0, 1, "b")}] and first == kept
