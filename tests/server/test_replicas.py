"""``rose serve --replicas``: two engines on a CPU behind one address, as Ray Serve runs them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from rose_backend import SamplingParams
from rose_backend.engine.client import EngineClient
from rose_backend.engine.remote_engine import num_waiting_bytes
from rose_backend.engine.request import LoRARequest, ProcessedInput
from rose_backend.errors import EngineDeadError, RequestError
from tests.server.live_server import is_alive, read_metric, wait_until
from tests.server.test_serve_command import launched, run, serving
from tests.support.adapters import NUM_TOKENS, AdapterCase, make_case
from tests.support.patience import HANG_S

pytest.importorskip("ray", reason="Ray is not installed")

from rose_backend.server import replicas
from rose_backend.server.replicas import EngineReplica, ReplicatedEngine

BASE, ADAPTER = "base", "adapter 1"
ENGINE = ("--device", "cpu", "--dtype", "float32", "--num-blocks", "600", "--max-num-seqs", "8")


class Served:
    """A server with two replicas.

    Attributes:
        http: a client of it.
        log: what it has written, the replicas' lines apart.
    """

    def __init__(self, process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
        self.process, self.log = process, log
        transport = httpx.HTTPTransport(uds=str(socket))
        self.http = httpx.Client(transport=transport, base_url="http://rose", timeout=HANG_S)

    def complete(self, **body: Any) -> dict[str, Any]:
        """Return the answer to a completion request, which must succeed."""
        answer = self.http.post("/v1/completions", json={"model": BASE, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def metric(self, name: str) -> float:
        return read_metric(self.http.get("/metrics").text, name)

    def processes(self) -> dict[int, str]:
        """Return all processes that the server has started, and theirs: number and command line."""
        found = {self.process.pid: "rose serve"}
        commands = {}
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parents[int(folder.name)] = int(
                    folder.joinpath("stat").read_text().rpartition(")")[2].split()[1]
                )
                commands[int(folder.name)] = folder.joinpath("cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
        while more := {pid: commands[pid] for pid in commands if parents[pid] in found and pid not in found}:
            found |= more
        return found

    def replicas(self) -> list[int]:
        return [
            pid for pid, command in self.processes().items() if command.startswith("ray::ServeReplica:rose")
        ]

    def engine_of(self, replica: int) -> int:
        """Return the process of a replica's engine."""
        folder = Path(f"/proc/{replica}/task")
        children = [child for task in folder.iterdir() for child in (task / "children").read_text().split()]
        (engine,) = children
        return int(engine)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AdapterCase:
    return make_case(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    # The paths of Ray's sockets would be too long below tmp_path. With a token of our own Ray writes none to the home.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        yield {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture(scope="module")
def server(
    case: AdapterCase, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    socket, log = folder / "socket", folder / "log"
    options = ["--replicas", "2", "--uds", str(socket), "--served-model-name", BASE, "--exact-cached-tokens"]
    options += [
        "--enable-lora",
        "--max-loras",
        "2",
        "--lora-modules",
        f"{ADAPTER}={case.path.parent / 'adapter1'}",
    ]
    with serving(log, str(case.path), *options, *ENGINE, **environment) as process:
        served = Served(process, socket, log)
        yield served
        served.http.close()
        process.terminate()
        process.wait(HANG_S)


def test_answers_are_those_of_transformers(server: Served, case: AdapterCase) -> None:
    def difference(which: int, index: int) -> str | None:
        answer = server.complete(
            model=(BASE, ADAPTER)[which],
            prompt=list(case.prompts[which][index]),
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            return_token_ids=True,
        )
        token_ids = answer["choices"][0]["token_ids"]
        reference = case.references[which]
        same = tuple(token_ids) == reference.token_ids[index]
        return None if same else reference.explain_difference(index, token_ids)

    cases = [(which, index) for index in range(6) for which in range(2)]
    with ThreadPoolExecutor(len(cases)) as threads:
        assert [each for each in threads.map(lambda each: difference(*each), cases) if each] == []


def test_all_of_an_answer_arrives(server: Served, case: AdapterCase) -> None:
    """Streamed, with several completions and log-probabilities of the prompt, it is that of an engine alone."""
    prompt = list(max(case.prompts[0], key=len))
    params = {"max_tokens": 8, "n": 2, "seed": 5, "ignore_eos": True}
    with case.llm() as llm:
        wanted = llm.generate([prompt], SamplingParams(**params, prompt_logprobs=2))[0]
    body = {"prompt": prompt, "temperature": 1, "return_token_ids": True, "prompt_logprobs": 2, **params}
    answer = server.complete(**body)
    expected = [list(each.token_ids) for each in wanted.outputs]
    assert [each["token_ids"] for each in answer["choices"]] == expected
    found = answer["choices"][0]["prompt_logprobs"]
    assert found[0] is None and len(found) == len(prompt)
    for entry, reference in zip(found[1:], list(wanted.prompt_logprobs)[1:], strict=True):
        assert {int(token): each["rank"] for token, each in entry.items()} == {
            token: each.rank for token, each in reference.items()
        }
        for token, each in reference.items():
            assert entry[str(token)]["logprob"] == pytest.approx(each.logprob, abs=1e-5)
    streamed: list[list[int]] = [[], []]
    del body["prompt_logprobs"]
    with server.http.stream("POST", "/v1/completions", json={"model": BASE, **body, "stream": True}) as lines:
        for event in events_of(lines.iter_lines()):
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["token_ids"]
    assert streamed == expected


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield a stream's events; it must end as OpenAI's do."""
    last = ""
    for line in lines:
        if line:
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                yield json.loads(last)
    assert last == "[DONE]"


def test_refusals_of_the_engine_arrive(server: Served) -> None:
    body = {"model": BASE, "prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": "("}}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 400 and "structured_outputs" in answer.json()["error"]["message"]


def test_a_conversation_stays_with_its_replica(server: Served) -> None:
    hits = server.metric("prefix_cache_hits_total")
    num_cached = 0
    # An odd number: that they take turns does not lead them home.
    prompts = [[100 + number] * 50 for number in range(7)]
    for turn in range(4):
        for number, prompt in enumerate(prompts):
            answer = server.complete(prompt=prompt, max_tokens=10, ignore_eos=True, return_token_ids=True)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            # All that the turn before has computed, which is without its last token.
            assert cached == (len(prompt) - 4 if turn else 0)
            num_cached += cached
            prompts[number] = [*prompt, *answer["choices"][0]["token_ids"], 7, 7, 7]
    assert server.metric("prefix_cache_hits_total") - hits == num_cached
    assert len(server.replicas()) == 2


def long_streams(server: Served, stack: ExitStack, number: int) -> list[Iterator[str]]:
    """Start streamed answers that take seconds, and wait for the first event of each."""
    streams = []
    for index in range(number):
        body = {
            "model": BASE,
            "prompt": [50 + index] * 5,
            "max_tokens": 1000,
            "ignore_eos": True,
            "stream": True,
        }
        answer = stack.enter_context(server.http.stream("POST", "/v1/completions", json=body))
        lines = answer.iter_lines()
        assert answer.status_code == 200 and next(lines).startswith("data: ")
        streams.append(lines)
    return streams


def test_leaving_a_stream_frees_its_place(server: Served) -> None:
    before = server.metric("generation_tokens_total")
    with ExitStack() as stack:
        # httpx hangs up where nobody holds what reads the lines.
        streams = long_streams(server, stack, 4)
        wait_until(lambda: server.metric("num_requests_running") == 4)
    del streams
    wait_until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("generation_tokens_total") - before < 4 * 1000


@pytest.mark.parametrize("what", ["replica", "engine"])
def test_a_killed_replica_costs_its_own_requests_only(server: Served, what: str) -> None:
    log_length = len(server.log.read_text())
    for index in range(8):
        server.complete(prompt=[index] * 5, max_tokens=30, ignore_eos=True)
    num_tokens = server.metric("generation_tokens_total")
    victim = server.replicas()[0]
    process = victim if what == "replica" else server.engine_of(victim)
    with ExitStack() as stack, ThreadPoolExecutor(6) as threads:
        ends = [
            threads.submit(lambda stream: list(events_of(stream))[-1], stream)
            for stream in long_streams(server, stack, 6)
        ]
        os.kill(process, signal.SIGKILL)
        # The router had given each replica as many.
        wait_until(lambda: sum("error" in end.result() for end in ends if end.done()) == 3)
        # The other one takes what comes meanwhile.
        for _ in range(4):
            assert server.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
    last = [end.result() for end in ends]
    assert [event["error"]["code"] for event in last if "error" in event] == ["engine_dead"] * 3
    whole = [event["choices"][0]["finish_reason"] for event in last if "error" not in event]
    assert whole == ["length"] * 3
    # Nothing that was counted is lost.
    assert server.metric("generation_tokens_total") > num_tokens + 3 * 1000
    wait_until(lambda: "replicas that run: 2" in server.log.read_text()[log_length:])
    assert victim not in server.replicas() and len(server.replicas()) == 2
    assert server.http.get("/health").status_code == 200
    with ThreadPoolExecutor(6) as threads:
        # The new one loads the adapter with its first prompt.
        list(
            threads.map(
                lambda each: server.complete(model=ADAPTER, prompt=[each] * 40, max_tokens=2), range(6)
            )
        )
    assert not is_alive(victim)


def test_sigterm_lets_requests_finish_and_leaves_no_process(server: Served) -> None:
    processes = server.processes()
    with ExitStack() as stack:
        streams = long_streams(server, stack, 2)
        server.process.terminate()
        refused = server.http.post("/v1/completions", json={"model": BASE, "prompt": "a", "max_tokens": 2})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        for stream in streams:
            assert list(events_of(stream))[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(HANG_S) == 0
    wait_until(lambda: not any(is_alive(pid) for pid in processes))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--replicas", "1000"], "replicas: got 1000, allowed are at most "),
        (["--replicas", "1", "--max-model-len", "5000"], "max_model_len: got 5000, allowed are at most 1024"),
    ],
    ids=["machine", "model"],
)
def test_what_does_not_fit_ends_the_start(
    tiny_model_path: Path, tmp_path: Path, environment: dict[str, str], options: list[str], reason: str
) -> None:
    log = tmp_path / "log"
    options += ["--uds", str(tmp_path / "socket"), *ENGINE]
    with log.open("wb") as file, launched(file, str(tiny_model_path), *options, **environment) as process:
        assert process.wait(HANG_S) == 2
    assert f"rose: error: {reason}" in log.read_text()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            '{"min_replica": 1}',
            "'min_replica', which Ray Serve's AutoscalingConfig lacks; did you mean 'min_replicas'?",
        ),
        ('{"min_replicas": 3, "max_replicas": 2}', "which Ray Serve does not allow"),
        ('{"min_replicas": 0}', "replicas: got min_replicas 0, allowed is 1 or more"),
    ],
)
def test_wrong_autoscaling_is_refused_at_once(
    tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, reason: str
) -> None:
    assert run(str(tiny_model_path), "--replicas", value, "--uds", str(tmp_path / "socket")) == 2
    assert reason in capsys.readouterr().err


class Pretended(ReplicatedEngine):
    """Answers of replicas that are not there.

    Args:
        answers: of all replicas, to any call but the one that unloads an adapter.
        generate: what Ray is asked for an answer to a prompt.
    """

    def __init__(self, answers: list[Any], generate: Any = None) -> None:
        EngineClient.__init__(self, threading.Condition())
        self.answers, self.unloaded = answers, list[int]()
        self._adapters, self._tasks, self._background_tasks = {}, {}, set()
        self._num_waiting_bytes, self._has_room = 0, asyncio.Event()
        self._generate = SimpleNamespace(remote=generate)
        self.input_processor = SimpleNamespace(make_prompt_logprobs=lambda prompt: None)  # type: ignore[assignment]

    async def _tell_all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        if method == "unload_adapter":
            self.unloaded.append(*arguments)
        return self.answers


LORA = LoRARequest("one", 7, "/somewhere")
PROMPT = ProcessedInput(0, None, np.arange(50, dtype=np.int32), SamplingParams(), b"", [], b"", 0)


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([None, RequestError("no such file")], RequestError),
        ([], EngineDeadError),
        ([OSError("gone"), OSError("gone")], EngineDeadError),
        ([None, OSError("gone")], None),
    ],
)
def test_an_adapter_is_loaded_where_replicas_say_so(
    answers: list[Any], error: type[Exception] | None
) -> None:
    async def load() -> Pretended:
        engine = Pretended(answers)
        with ExitStack() if error is None else pytest.raises(error):
            await engine.load_adapter(LORA)
        await asyncio.sleep(0)
        return engine

    engine = asyncio.run(load())
    assert (LORA.lora_int_id in engine._adapters) == (error is None)
    # By those that have loaded it.
    assert engine.unloaded == ([7] if error is RequestError else [])


def test_an_adapter_is_unloaded_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(EngineReplica, "__del__")

    async def unload() -> list[str]:
        told, loaded = [], asyncio.Event()

        async def load(lora: LoRARequest) -> None:
            await loaded.wait()
            told.append("load")

        async def nothing() -> None:
            pass

        replica: Any = object.__new__(EngineReplica)
        replica._adapters, replica._started = {}, nothing
        replica._engine = SimpleNamespace(load_adapter=load, unload_adapter=lambda _: told.append("unload"))
        loading = asyncio.ensure_future(replica.load_adapter(LORA))
        await asyncio.sleep(0)
        loading.cancel()
        unloading = asyncio.ensure_future(replica.unload_adapter(7))
        await asyncio.sleep(0)
        loaded.set()
        await unloading
        return told

    assert asyncio.run(unload()) == ["load", "unload"]


@pytest.mark.parametrize("fails", [True, False])
def test_requests_that_no_replica_has_begun_take_room(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(replicas, "MAX_UNREAD_BYTES", num_waiting_bytes(PROMPT))

    async def serve_some() -> None:
        goes_on = asyncio.Event()

        async def answer() -> Any:
            await goes_on.wait()
            yield RequestError("too long")

        def generate(*_: Any, **__: Any) -> Any:
            if fails:
                raise OSError("Ray is gone")
            return answer()

        engine = Pretended([], generate)
        streams = [engine.generate_deltas(PROMPT, request_id=str(each)) for each in range(2)]
        outputs = [asyncio.ensure_future(anext(each)) for each in streams]
        await asyncio.sleep(0.05)
        # There is room for one.
        waiting = asyncio.ensure_future(engine.wait_for_room())
        await asyncio.sleep(0.05)
        assert waiting.done() == fails
        goes_on.set()
        await asyncio.wait_for(waiting, HANG_S)
        for output in outputs:
            with pytest.raises(EngineDeadError if fails else RequestError):
                await asyncio.wait_for(output, HANG_S)
        assert engine._num_waiting_bytes == 0 and not engine._streams

    asyncio.run(serve_some())
