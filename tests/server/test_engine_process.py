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
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose_backend import EngineConfig
from rose_backend.engine.outputs import CompletionOutput, Logprob, RequestOutput
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.tokenizer_loading import load_tokenizer
from rose_backend.errors import ConfigError, EngineDeadError, ModelError
from rose_backend.server import engine_client, engine_process, serve
from rose_backend.server import engine_messages as messages
from rose_backend.server.engine_client import EngineClient
from rose_backend.server.engine_messages import HEADER, decode, encode, read_message
from rose_backend.server.engine_process import EngineProcess, UpdateBuilder
from rose_backend.server.remote_stream import RemoteStream
from tests.server.live_server import LONG, LiveServer, error_of, running_server, sent, wait_until
from tests.server.test_lifecycle import long_stream
from tests.server.test_serve_command import is_alive
from tests.support.patience import HANG_S

TWO = {"frontend_multiprocessing": True}


def engine_process_of(server: LiveServer) -> int:
    """Return the process id of a server's engine."""
    assert isinstance(server.engine, EngineClient)
    return server.engine._process.pid


def test_a_full_queue_and_a_killed_engine(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, TWO, max_num_seqs=1, max_queue_size=1, device="cpu") as server:
        with long_stream(server), sent(server, json.dumps({**LONG, "prompt": "Waiting"}).encode()):
            wait_until(lambda: server.metric("num_requests_waiting") == 1)
            for fields in ({}, {"stream": True}, {"prompt": ["a", "b"]}):
                answer = server.complete(**{**LONG, **fields})
                assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
                assert error_of(answer)["code"] == "queue_full"
        server.wait_until_idle()
        with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(engine_process_of(server), signal.SIGKILL)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead" and "signal SIGKILL" in error["message"]
        for answer in (server.http.get("/health"), server.complete(prompt="a")):
            assert answer.status_code == 503 and error_of(answer)["code"] == "engine_dead"
        assert server.http.get("/metrics").status_code == 200
    assert server.server.engine_has_died


def test_draining_aborts_and_kills_what_takes_too_long(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "_END_TIMEOUT_S", 0.5)
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
        EngineClient(config, lambda tokenizer: None)


def test_an_engine_process_that_ends_while_loading(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose_backend.server.engine_client.sys.executable", "false")
    with pytest.raises(EngineDeadError, match="ended with exit code 1 while it was loading"):
        EngineClient(EngineConfig(model=str(tiny_model_path)), lambda tokenizer: None)


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
        threading.Thread(target=ours.sendall, args=(encode(load_tokenizer(tiny_model_path)),)).start()
        yield EngineProcess(config, its, commands), ours
        ours.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not any(thread.name == "rose-commands" for thread in threading.enumerate()))


def test_a_step_that_fails(engine_in_a_thread: tuple[EngineProcess, socket.socket]) -> None:
    engine, ours = engine_in_a_thread
    step = engine._core._advance

    def fail_later() -> None:
        if engine._core.stats.generated_tokens >= 2:
            raise RuntimeError("the device fell off the bus")
        step()

    engine._core._advance = fail_later  # type: ignore[method-assign]
    ids = np.arange(5, dtype=np.int32).tobytes()
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    ours.sendall(encode(messages.Add(7, "seven", ids, params, b"")))
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        engine.run()
    with ours.makefile("rb") as stream:
        seen = [read_message(stream)]
        while not isinstance(seen[-1], messages.EngineDied):
            seen.append(read_message(stream))
    assert isinstance(seen[0], messages.Ready) and "fell off the bus" in seen[-1].message


def test_batches_without_ack_hold_later_ones_back(
    engine_in_a_thread: tuple[EngineProcess, socket.socket],
) -> None:
    engine, ours = engine_in_a_thread
    ids = np.arange(5, dtype=np.int32).tobytes()
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    ours.sendall(encode(messages.Add(1, "one", ids, params, b"")))
    stepper = threading.Thread(target=engine.run)
    stepper.start()
    with ours.makefile("rb") as stream:
        received = [read_message(stream)]
        while not received or not is_last(received[-1]):
            received.append(read_message(stream))
        ours.sendall(encode(messages.Stop()))
    stepper.join()
    batches = [message for message in received if isinstance(message, messages.OutputBatch)]
    # Two that were not acknowledged, and the last output, which never waits.
    assert len(batches) == 3
    assert sum(len(piece[2]) for each in batches for update in each.updates for piece in update[3]) == 200


def is_last(message: object) -> bool:
    """Return whether a message ends a request."""
    return isinstance(message, messages.OutputBatch) and any(update[2] for update in message.updates)


def make_outputs(rng: np.random.Generator) -> list[RequestOutput]:
    """Return how a request with several completions might grow, the whole state in each output."""
    num_completions, has_logprobs = int(rng.integers(1, 4)), bool(rng.integers(2))
    completions = [
        CompletionOutput(index, "", [], [] if has_logprobs else None, 0.0 if has_logprobs else None)
        for index in range(num_completions)
    ]
    outputs = []
    while not all(completion.finished for completion in completions):
        # The first output of a prompt with several completions lacks those that have not split off yet.
        shown = completions if outputs else completions[:1]
        for completion in shown:
            completion.delta_text = ""
            # Each begins with a token.
            fewest = 0 if completion.token_ids else 1
            for _ in range(0 if completion.finished else int(rng.integers(fewest, 3))):
                token = int(rng.integers(1000))
                completion.delta_text += f"{token} "
                completion.token_ids.append(token)
                if completion.logprobs is not None:
                    completion.logprobs.append({token: Logprob(-1.5, 1, f"{token} ")})
                    completion.cumulative_logprob = -1.5 * len(completion.logprobs)
            completion.text += completion.delta_text
            if not completion.finished and rng.random() < 0.2:
                completion.finish_reason, completion.stop_reason = "stop", "x"
        is_over = all(completion.finished for completion in completions)
        outputs.append(RequestOutput("r", None, [1, 2], copy.deepcopy(shown), is_over, 1))
    return outputs


@pytest.mark.parametrize("seed", range(20))
def test_streams_are_put_together_again(seed: int) -> None:
    rng = np.random.default_rng(seed)
    outputs = make_outputs(rng)
    updates = [decode(encode(update)[HEADER.size :]) for update in map(UpdateBuilder(5).update, outputs)]
    pieces = [messages.CompletionDelta(*fields) for update in updates for fields in update[3]]
    ended = [piece.completion for piece in pieces if piece.finish_reason is not None]
    assert sorted(ended) == list(range(len(outputs[-1].outputs))), "each ends once"

    async def check() -> None:
        stream = RemoteStream("r", None, [1, 2], asyncio.get_running_loop())
        texts = [""] * len(outputs[-1].outputs)
        got: list[tuple[RequestOutput, RequestOutput]] = []
        for update, output in zip(updates, outputs, strict=True):
            stream.put(update)
            # Some are taken together.
            if not output.finished and rng.random() < 0.5:
                continue
            got.append((await stream.get(), output))
        # Compared when all have been taken: no output may change after it was returned.
        for mine, output in got:
            for completion in mine.outputs:
                texts[completion.index] += completion.delta_text
                assert completion.text == texts[completion.index]
                completion.delta_text = output.outputs[completion.index].delta_text
            assert mine == output

    asyncio.run(check())
