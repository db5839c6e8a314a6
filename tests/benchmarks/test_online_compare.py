"""benchmarks/online_compare.py end to end with each workload, its client, and servers that only seem to be vLLM's."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks import online_compare
from benchmarks.online import servers, workloads
from benchmarks.online.http_client import Replay, note_answer, replay
from benchmarks.online.servers import parse_counts, server_command, server_counts
from benchmarks.online.timeline import Timeline
from benchmarks.reports import figures, serving
from benchmarks.reports.serving import BUDGET_AUTO, COMPARED, GAPS, OUTPUTS_APART, compare, poisson_bars
from benchmarks.support import worker_pool
from benchmarks.support.checkpoint import ModelFacts
from benchmarks.support.cli import QUICK_MODEL
from benchmarks.support.comparison import engine_options
from benchmarks.support.engines import (
    BLOCK_SIZE,
    STEP_MS,
    EngineOptions,
    RoseServing,
    as_flags,
    rose_options,
    vllm_options,
)
from benchmarks.support.turns import paused
from benchmarks.support.worker_pool import EngineError, Engines, is_installed
from benchmarks.support.workload import WAKING, HeldStreams, RandomRequests, Requests, request_sets
from rose_backend import __version__
from tests.benchmarks.fake_vllm_server import FAKES, METRICS, fake_command
from tests.benchmarks.sleepers import Sleeper, is_stopped
from tests.support.patience import HANG_S


def test_a_quick_run_and_its_picture(
    run_benchmark: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--quick --backends rose --scales 0.05 0.02 --modes greedy --repeats 1"
    report = run_benchmark(online_compare.main, arguments)
    assert report["benchmark"] == "online_compare"
    assert report["missing"] == report["failed"] == {} and report["losses"] == []
    assert report["backends"] == {"rose": {"version": __version__}}
    assert report["trace"]["num_requests"] == 8
    assert report["settings"]["pause"] is True
    sides = [(row["backend"], row["mode"], row["scale"]) for row in report["rows"]]
    assert sides == [("rose", "greedy", scale) for scale in (0.02, 0.05)]
    for row in report["rows"]:
        assert (row["completed"], row["failed"]) == (8, 0)
        assert row["duration"] >= report["trace"]["seconds"] * row["scale"]
        assert 0 < row["p50_ttft_ms"] < row["p50_e2el_ms"]
        assert 8 <= row["pieces"] <= row["total_output_tokens"]
        assert 0 < row["client_busy"] < 1.5
    assert "0.05" in capsys.readouterr().out
    loads = [8 / (report["trace"]["seconds"] * scale) for scale in (0.05, 0.02)]
    assert figures.latency_curve(report, "greedy", "rose", "ttft")["x"] == loads
    files = figures.draw(report, "online", tmp_path / "figures")
    assert [file.name for file in files] == ["online_greedy.svg"]
    assert all(file.stat().st_size > 5000 for file in files)


def test_streams_in_process_at_a_rate_and_at_their_own_capacity(
    run_benchmark: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "in-process --quick --backends rose --repeats 2 --rate 40 --share 0.25"
    report = run_benchmark(online_compare.main, arguments)
    assert report["benchmark"] == "arrivals"
    assert report["missing"] == report["failed"] == {} and report["turns_left_out"] == 0
    rows = {row["scene"]: row for row in report["rows"]}
    assert list(rows) == ["capacity", "same load", "own load"]
    assert rows["same load"]["request_rate"] == 40
    capacity = rows["capacity"]["request_throughput"]
    assert rows["own load"]["request_rate"] == pytest.approx(capacity / 4)
    for row in rows.values():
        assert row["backend"] == "rose" and len(row["turns"]) == 2 and row["completed"] == 12
        assert 0 < row["p50_ttft_ms"] <= row["p90_ttft_ms"] <= row["p99_ttft_ms"] < row["p99_e2el_ms"]
    assert rows["own load"]["turns"] != rows["same load"]["turns"]
    assert [goal["name"] for goal in report["bars"]] == ["ITL p99 over its median, own load"]
    assert "own load" in capsys.readouterr().out


def test_streams_while_prompts_arrive(
    run_benchmark: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "streams --quick --backends rose --repeats 2 --prompts 5 --arrivals fixed poisson"
    report = run_benchmark(online_compare.main, arguments)
    assert report["benchmark"] == "streams"
    assert report["missing"] == report["failed"] == {} and report["turns_left_out"] == 0
    assert list(report["start_up_s"]) == ["rose"]
    facts = {"version": __version__, "max_num_batched_tokens": 2048, "event_loop": "uvloop"}
    assert report["backends"] == {"rose": facts}
    rows = {row["arrivals"]: row for row in report["rows"]}
    assert list(rows) == ["fixed", "poisson"]
    for row in rows.values():
        assert row["completed"] == 5 and [turn["completed"] for turn in row["turns"]] == [3, 2]
        assert 0 < row["p50_gap_ms"] <= row["p99_gap_ms"] and row["p90_gap_ms"] <= row["max_gap_ms"]
        assert 0 < row["p50_ttft_ms"] <= row["p99_ttft_ms"]
        assert row["tokens_per_piece"] >= 1 and row["output_throughput"] > 0
    for turn in rows["fixed"]["turns"]:
        assert turn["duration"] >= turn["completed"] * report["settings"]["interval"]
    assert [goal["name"] for goal in report["bars"]] == ["fixed arrivals, Rose: gaps, p99 over their median"]
    printed = capsys.readouterr().out
    assert "poisson arrivals" in printed and "No losses in 0 comparisons" in printed


def test_no_answer_is_on_its_way_to_an_event_loop_that_stands_still() -> None:
    options = EngineOptions("rose", QUICK_MODEL, "float32", "cpu", 8, 1280, 2**20, dict(os.environ))
    engine = RoseServing(options)
    try:
        asked = [len(engine._engine._counter_waiters)]
        figures = engine.run(WAKING, {"temperature": 0.0})
        asked.append(len(engine._engine._counter_waiters))
    finally:
        engine.close()
    assert figures["completed"] == 1 and asked == [0, 0]


class Holder:
    """Stands in for an engine's process: notes the streams that it is to hold, or says that it cannot."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self.held: list[HeldStreams] = []

    def hold(self, streams: HeldStreams, sampling: Any) -> dict[str, Any]:
        if self._error:
            raise EngineError(self._error)
        assert sampling == {"temperature": 0.0}
        self.held.append(streams)
        return {"completed": len(streams.arriving.prompts)}

    def kill(self) -> None:
        """Do nothing; nor do those that end it gently."""

    ask_to_end = wait_for_end = kill


def streams_workload(*arguments: str) -> workloads.Streams:
    options = online_compare.parse_options(["streams", "--quick", "--prompts", "7", *arguments])
    return workloads.Streams(options, FACTS)


def test_prompts_beside_streams_are_split_over_turns() -> None:
    workload = streams_workload("--arrivals", "fixed", "poisson", "--interval", "0.5")
    engine: Any = Holder()
    taken = [workload.take(engine, "rose", turn) for turn in workload.turns_left()]
    assert [figures["completed"] for figures in taken] == [3, 3, 2, 2, 2, 2]
    arriving = [held.arriving for held in engine.held]
    assert [requests.due for requests in arriving[::2]] == [[0.0, 0.5, 1.0], [0.0, 0.5], [0.0, 0.5]]
    for poisson in arriving[1::2]:
        assert poisson.due == sorted(set(poisson.due)) and 0.5 not in poisson.due
    prompts = [tuple(prompt) for requests in arriving for prompt in requests.prompts]
    assert len(set(prompts)) == 14 and {len(prompt) for prompt in prompts} == {24}
    assert {length for requests in arriving for length in requests.output_lens} == {16}
    assert [held.seconds for held in engine.held] == [1.5, 1.5, 1.0, 1.0, 1.0, 1.0]
    assert len({held.seed for held in engine.held}) == 6
    assert {(held.num_streams, held.length, held.vocab_size) for held in engine.held} == {(3, 48, 1000)}
    workload.rows = workload.rows_of(
        {"rows": [{"arrivals": "fixed", "backend": "rose", "turns": [{}, {}]}], "failed": {}}
    )
    left = [turn.columns for turn in workload.turns_left()]
    assert left[:2] == [{"arrivals": "poisson", "repeat": repeat} for repeat in (0, 1)] and len(left) == 4


def test_engines_meet_prompts_at_once_and_apart_before_streams_count(tmp_path: Path) -> None:
    workload = streams_workload("--interval", "0.5")
    well: Any = Holder()
    engines = Engines(lambda options, log: pytest.fail("nothing is to start"), tmp_path)
    engines.running = {"rose-in-vllm": Holder("it died"), "rose": well}
    workload.warm_up(engines)
    assert engines.failed == {"rose-in-vllm": "it died"} and list(engines.running) == ["rose"]
    (held,) = well.held
    assert held.arriving.due == [0.0] * 8 + [0.5 * number for number in range(1, 9)]
    assert held.seed not in {turn.seed for turn in workload.turns_left()}


def test_the_kv_cache_holds_all_streams_and_a_few_prompts() -> None:
    def size(*arguments: str) -> int:
        options = online_compare.parse_options(["streams", *arguments])
        workload = workloads.Streams(options, replace(FACTS, max_model_len=4112))
        return int(workload.settings["kv_cache_tokens"])

    assert size() == 20 * 4096 + 8 * 4112
    assert size("--streams", "1", "--stream-tokens", "200", "--prompt-tokens", "9") == 4112 + 256
    assert size("--kv-cache-tokens", "5000") == 5000
    options = online_compare.parse_options(["streams", "--prompt-tokens", "5000"])
    assert workloads.Streams.window(options) == 5016
    with pytest.raises(SystemExit, match="the longest request has 5,016 tokens; the model takes 64"):
        workloads.Streams(options, FACTS)


def test_rose_in_vllm_runs_with_a_step_budget_beside_itself() -> None:
    arguments = ["streams", "--backends", *workloads.Streams.backends, "--compare-step-budget"]
    options = online_compare.parse_options(
        [*arguments, "--engine-options", 'rose-in-vllm={"additional_config": {"rose": {"step_budget": 12}}}']
    )
    made: dict[str, dict[str, Any]] = {}
    for name, (backend, off) in workloads.Streams.sides(options).items():
        side = engine_options(options, backend, "model", FACTS, off)
        made[name] = rose_options(side) if backend == "rose" else vllm_options(side)
    assert list(made) == [*workloads.Streams.backends, BUDGET_AUTO]
    assert made["rose-in-vllm"]["additional_config"] == {"rose": {"step_budget": 12}}
    budget = {"additional_config": {"rose": {"step_budget": "auto"}}}
    assert made[BUDGET_AUTO] == made["rose-in-vllm"] | budget
    assert "additional_config" not in made["vllm"]
    assert list(workloads.Streams.sides(online_compare.parse_options(arguments[:5]))) == arguments[2:5]


def test_the_table_of_streams_has_ratios_and_losses() -> None:
    options = online_compare.parse_options(["streams"])
    figures = dict.fromkeys(GAPS, 20.0) | {"tokens_per_piece": 1.25, "client_busy": 0.5, "turns": [{}] * 3}
    sides = {"vllm": {}, "rose-in-vllm": {"p99_gap_ms": 30.0, "output_throughput": 19.0}}
    sides[BUDGET_AUTO] = {"gap_tail": 7.5}
    result = {
        "rows": [{"arrivals": "fixed", "backend": side, **figures, **of} for side, of in sides.items()],
        "settings": {
            **workloads.Streams(options, replace(FACTS, max_model_len=4112)).settings,
            "model": "m",
            "dtype": "bfloat16",
        },
        **{"backends": {}, "device": "a GPU", "versions": {}, "command": "python"},
    }
    lines = serving.streams_table(result).splitlines()
    assert [line.split(" | ")[1] for line in lines[2 : lines.index("")]] == [
        "Rose in vLLM",
        "the same, `step_budget` auto",
        "vLLM",
        "Rose in vLLM / vLLM",
        "rose-in-vllm, step_budget auto / vLLM",
    ]
    assert lines[5].split(" | ")[2:] == ["1.00x", "1.00x", "1.50x", *["1.00x"] * 4, "0.95x |"]
    text = "\n".join(lines)
    assert (
        "Slower in 2 of 8 comparisons" in text and "gap p99 30 ms against 20 ms; output tokens/s 19" in text
    )
    assert "Medians of 3 turns, 32 streams of up to 4,096 tokens" in text
    assert "Busiest client: 50% of a core; at most 1.25 tokens in a piece on average." in text


class Recorder:
    """Stands in for an engine: notes when the last request is due, and completes so many a second."""

    def __init__(self, throughput: float) -> None:
        self.last_due: list[float] = []
        self._figures = {"request_throughput": throughput, "failed": 0}

    def run(self, requests: Requests, sampling: Any) -> dict[str, float]:
        self.last_due.append(requests.due[-1])
        return dict(self._figures)


def played(options: Any, rows: list[dict[str, Any]], engines: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Let engines take the turns in process that are not in ``rows``; return the rates by scene and backend."""
    workload = workloads.InProcess(options, ModelFacts(512, 64, 1))
    workload.rows = rows
    for turn in workload.turns_left():
        taken = [
            {"backend": name, **turn.columns, **workload.take(engine, name, turn)}  # type: ignore[arg-type]
            for name, engine in engines.items()
        ]
        rows += taken
    return {(row["scene"], row["backend"]): row["request_rate"] for row in rows}


def test_loads_follow_from_capacities() -> None:
    options = online_compare.parse_options(["in-process", "--quick", "--repeats", "2"])
    engines = {"rose": Recorder(80.0), "vllm": Recorder(20.0)}
    rows: list[dict[str, Any]] = []
    assert played(options, rows, engines) == {
        ("capacity", "rose"): None,
        ("capacity", "vllm"): None,
        ("same load", "rose"): 10.0,
        ("same load", "vllm"): 10.0,
        ("own load", "rose"): 40.0,
        ("own load", "vllm"): 10.0,
    }
    for engine in engines.values():
        assert [due > 0 for due in engine.last_due] == [False, False, True, True, True, True]
    # An earlier run's turns are kept, and its rates.
    kept = [row for row in rows[:8] if row["scene"] != "own load"]
    resumed = {"rose": Recorder(800.0), "vllm": Recorder(200.0)}
    rates = played(options, kept, resumed)
    assert rates["own load", "rose"] == 40.0 and rates["same load", "rose"] == 10.0
    assert [len(engine.last_due) for engine in resumed.values()] == [3, 3]


def test_an_interrupt_while_servers_end_costs_no_figures(
    run_benchmark: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ending: list[servers.Server] = []

    def wait_for_end(server: servers.Server) -> None:
        ending.append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(servers.Server, "wait_for_end", wait_for_end)
    monkeypatch.setattr(servers, "server_command", fake_command)
    arguments = "--quick --backends rose --scales 0.02 --repeats 1 --modes greedy"
    report = run_benchmark(online_compare.main, arguments)
    assert len(report["rows"]) == 1 and report["turns_left_out"] == 0
    (server,) = ending
    assert server.popen.returncode is not None


def answer(*events: Any, status: int = 200) -> Timeline:
    """Return what the client notes of a server that sends these events."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert (body["prompt"], body["max_tokens"], body["model"]) == ([5, 6], 3, "some model")
        assert body["stream"] and body["ignore_eos"] and body["stream_options"] == {"include_usage": True}
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response

    async def run() -> Timeline:
        app = web.Application()
        app.router.add_post("/v1/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        requests = Requests([[5, 6]], [3], [0.0])
        fields = {"model": "some model", "temperature": 0.0}
        answered = await replay(f"http://127.0.0.1:{port}", fields, requests, time.perf_counter())
        (timeline,) = answered.timelines
        await runner.cleanup()
        return timeline

    return asyncio.run(run())


PIECE = {"choices": [{"text": "x"}]}


def test_pieces_are_timed_and_tokens_are_what_the_server_counts() -> None:
    timeline = answer(PIECE, PIECE, {"choices": [], "usage": {"completion_tokens": 3}})
    assert timeline.error == ""
    assert len(timeline.arrivals) == 2
    assert timeline.num_tokens == 3


@pytest.mark.parametrize(
    ("events", "status", "message"),
    [
        ([PIECE, PIECE], 200, "got 2 new tokens, 3 were asked for"),
        ([PIECE, {"error": {"message": "out of luck"}}], 200, "ValueError: .*out of luck"),
        ([{"message": "too many"}], 429, '429: data: {"message": "too many"}'),
    ],
)
def test_what_goes_wrong_is_no_fast_answer(events: list[Any], status: int, message: str) -> None:
    timeline = answer(*events, status=status)
    assert re.match(message, timeline.error)


def test_a_busy_port_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        port = busy.getsockname()[1]
        monkeypatch.setattr(servers, "_PORTS", range(port, port + 1))
        with pytest.raises(EngineError, match=f"no port is free between {port} and {port}"):
            servers.free_port()
    assert servers.free_port() == port


def test_a_server_that_does_not_say_its_version_is_no_reason_to_stop() -> None:
    silent = servers.Server.__new__(servers.Server)
    silent._version_path, silent.url = "version", f"http://127.0.0.1:{servers.free_port()}"
    assert silent.version().startswith("not told (URLError: ")


def test_options_become_flags() -> None:
    options = {"max_num_seqs": 8, "fused_mlp": False, "cuda_graph": True, "seed": None, "extra": {"a": 1}}
    *switches, extra = as_flags(options)
    assert (
        switches == ["--max-num-seqs", "8", "--no-fused-mlp", "--cuda-graph", "--extra"]
        and extra == '{"a": 1}'
    )


@pytest.mark.parametrize(
    ("backend", "parts"),
    [
        ("rose", ["rose_backend.cli serve some model", "--num-blocks 5", "--port 99"]),
        ("rose-in-vllm", ["serve some model", "--attention-backend rose", "--kv-cache-memory-bytes 4096"]),
        ("vllm", ["serve some model", "--attention-backend FLASH_ATTN"]),
        ("sglang", ["sglang.launch_server", "--model-path some model", "--max-total-tokens 64"]),
    ],
)
def test_servers_are_started_with_the_same_limits(backend: str, parts: list[str]) -> None:
    options = EngineOptions(backend, "some model", "float16", "cuda", 4, 64, 4096, {})
    command = " ".join(server_command(options, 99))
    assert all(part in command for part in [*parts, "--host 127.0.0.1", "--dtype float16"])


def test_an_event_came_when_its_end_came() -> None:
    timeline = Timeline(2, due=10.0)
    event = f"data: {json.dumps(PIECE)}\n\n".encode()
    note_answer([(11.0, event[:9]), (12.0, event[9:] + event), (13.0, event[:-2]), (14.0, b"\n\n")], timeline)
    assert timeline.arrivals == [2.0, 2.0, 4.0]


def test_requests_are_dealt_out_to_all_processes() -> None:
    requests = Requests([[1], [2], [3], [4], [5]], [1, 2, 3, 4, 5], [0.1, 0.2, 0.3, 0.4, 0.5])
    parts = [requests.share(index, 2) for index in range(2)]
    assert [part.prompts for part in parts] == [[[1], [3], [5]], [[2], [4]]]
    assert [part.output_lens for part in parts] == [[1, 3, 5], [2, 4]]
    assert [part.due for part in parts] == [[0.1, 0.3, 0.5], [0.2, 0.4]]


class Postbox:
    """Takes loads in place of the client's processes, and answers at once."""

    def __init__(self) -> None:
        self.loads: list[Requests] = []

    def send(self, url: str, fields: dict[str, Any], requests: Requests) -> Replay:
        assert (url, fields) == ("url", {"model": "m", "temperature": 0.0})
        self.loads.append(requests)
        asked = zip(requests.prompts, requests.output_lens, strict=True)
        return Replay([Timeline(len(p), [0.1, 0.3], n) for p, n in asked], 0.3, 0.1, 0.0)


def test_engines_that_are_not_installed_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir(parents=True)
    here = EngineOptions("sglang", "m", "float16", "cuda", 4, 64, 4096, dict(os.environ))
    there = replace(here, variables={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert is_installed(there) and not is_installed(here)
    assert is_installed(replace(here, backend="rose"))
    # A Python that does not even start is no answer.
    monkeypatch.setattr(sys, "executable", "false")
    assert is_installed(here)


def test_turns_of_a_trace_have_their_own_prompts_and_due_times() -> None:
    arguments = ["--quick", "--scales", "0.5", "0.1", "--repeats", "2", "--modes", "greedy"]
    trace = workloads.Trace(online_compare.parse_options(arguments), ModelFacts(100, 1024, 1))
    postbox = Postbox()
    trace.clients = postbox  # type: ignore[assignment]
    turns = trace.turns_left()
    assert [(turn.columns["scale"], turn.columns["repeat"], turn.first) for turn in turns] == [
        (0.1, 0, 0),
        (0.5, 0, 1),
        (0.1, 1, 1),
        (0.5, 1, 2),
    ]
    server: Any = Recorder(1.0)
    server.url, server.model = "url", "m"
    for turn in turns:
        figures = trace.take(server, "rose", turn)
        assert (figures["completed"], figures["pieces"]) == (8, 16)
    loads = postbox.loads
    assert len({tuple(load.prompts[0]) for load in loads}) == 4
    assert loads[1].due == pytest.approx([at * 5 for at in loads[0].due])
    trace.rows = [{"repeat": 0, "mode": "greedy", "scale": scale} for scale in (0.1, 0.5)]
    assert trace.turns_left() == turns[2:]


FACTS = ModelFacts(vocab_size=1000, max_model_len=64, kv_elements_per_token=2)


def test_a_quick_run_of_poisson_arrivals(
    run_benchmark: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(servers, "server_command", fake_command)
    # What a machine's clock ticks count of so short a turn says nothing: each look finds a quarter of a second more.
    looks = itertools.count()
    monkeypatch.setattr(workloads, "processor_seconds", lambda pid: {"server": next(looks) / 4})
    arguments = f"poisson --quick --requests 24 --seconds 0.25 --rates 80 --logs {tmp_path}"
    report = run_benchmark(online_compare.main, arguments)
    turns = [(row["set"], row["rate"]) for row in report["rows"]][::2]
    assert turns == [(name, rate) for name in workloads.SETS for rate in (None, 80.0)]
    backends = [row["backend"] for row in report["rows"]]
    # Who begins changes from turn to turn.
    assert backends[:4] == ["rose-in-vllm", "vllm", "vllm", "rose-in-vllm"]
    for first, second in zip(report["rows"][::2], report["rows"][1::2], strict=True):
        assert first["total_input_tokens"] == second["total_input_tokens"]
        assert first["completed"] == {None: 24, 80.0: 20}[first["rate"]] and not first["failed"]
    for row in report["rows"]:
        assert row["prefilled_tokens"] + row["cached_tokens"] == row["total_input_tokens"]
        # No turn meets prompts of another one.
        assert (row["set"] == "shared-prefix") == (row["cached_tokens"] > BLOCK_SIZE)
        if row["rate"]:
            assert row["duration"] > 0.7 * row["completed"] / row["rate"]
        assert row["client_busy"] > 0
        assert row["server_busy"]["server"] * row["duration"] == pytest.approx(0.25)

    assert [(row["set"], row["rate"]) for row in report["comparison"]] == turns
    for row in report["comparison"]:
        for backend, (_, delay_ms) in FAKES.items():
            assert row["medians"][backend]["p50_ttft_ms"] >= float(delay_ms)
        assert (row["set"] == "shared-prefix") == (row["times"]["prefilled_tokens"] < 0.99)
    assert report["start_up_s"].keys() == FAKES.keys()
    assert report["turns_left_out"] == 0
    assert report["backends"].keys() == report["settings"]["engine_options"].keys() == FAKES.keys()
    assert len(report["bars"]) == 1 + 4 + 1 + 4 + 2 + 1
    assert "all at once" in capsys.readouterr().out


def measured(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, Any]]:
    """Return rows of servers that are asked nothing; vLLM's own ends 40 requests a second, later fewer."""
    speeds = {
        "vllm": itertools.chain([40.0], itertools.repeat(7.0)),
        "rose-in-vllm": itertools.repeat(1000.0),
    }

    def counted(self: Any, server: Any, requests: Any) -> dict[str, Any]:
        return {"request_throughput": next(speeds[server]), "asked": len(requests.prompts)}

    monkeypatch.setattr(workloads.Poisson, "counted", counted)
    poisson = workloads.Poisson(online_compare.parse_options(["poisson", "--quick", *arguments]), FACTS)
    for turn in poisson.turns_left():
        poisson.rows += [
            {"backend": name, "first": turn.first, **turn.columns, **poisson.take(name, name, turn)}  # type: ignore[arg-type]
            for name in FAKES
        ]
    return poisson.rows


def test_loads_are_shares_of_what_saturates_vllms_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--sets", "random", "--loads", "0.5", "1.5", "--repeats", "3", "--requests", "9")
    rows = measured(monkeypatch, *arguments)[::2]
    assert [row["rate"] for row in rows] == [None, 20.0, 60.0] * 3
    assert [row["repeat"] for row in rows][::3] == [0, 1, 2]
    # Half a second of arrivals each.
    assert [row["asked"] for row in rows] == [9, 10, 30] * 3


@pytest.mark.parametrize("num_rates", [1, 2])
def test_each_server_begins_in_every_other_turn_of_a_kind(
    monkeypatch: pytest.MonkeyPatch, num_rates: int
) -> None:
    loads = [str(0.5 + number) for number in range(num_rates)]
    kinds: dict[Any, list[int]] = {}
    for row in measured(monkeypatch, "--repeats", "4", "--loads", *loads)[::2]:
        kinds.setdefault((row["set"], row["number"]), []).append(row["first"] % 2)
    assert len(kinds) == 2 * (1 + num_rates)
    assert all(firsts in ([0, 1, 0, 1], [1, 0, 1, 0]) for firsts in kinds.values())


def test_turns_that_an_earlier_run_has_taken_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(monkeypatch, "--repeats", "2", "--loads", "0.5", "1.0")
    options = online_compare.parse_options(["poisson", "--quick", "--repeats", "2", "--loads", "0.5", "1.0"])
    poisson = workloads.Poisson(options, FACTS)
    left = []
    for count in (12, 0, 1, 4):
        poisson.rows = rows[: 2 * count]
        left = poisson.turns_left()
        assert len(left) == 12 - count
    assert left[0].seed == 5
    assert {(turn.columns["set"], turn.columns["repeat"]) for turn in left} == {
        ("shared-prefix", 0),
        ("random", 1),
        ("shared-prefix", 1),
    }


class SlowServer(Sleeper):
    """Is ready when it is looked at for the third time; notes who was there and who was stopped meanwhile."""

    made: list[Sleeper]
    seen: list[list[tuple[str, bool]]]

    def __init__(self, options: EngineOptions, log: Path) -> None:
        super().__init__(options.backend, looks=0)
        self.made.append(self)

    def facts_if_ready(self) -> dict[str, str] | None:
        self.looks += 1
        if self.looks < 3:
            return None
        self.seen.append([(other.name, is_stopped(other.pid)) for other in self.made if other is not self])
        return {"version": "1"}


@pytest.mark.parametrize("in_turn", [True, False])
def test_servers_start_together_or_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_turn: bool
) -> None:
    SlowServer.made, SlowServer.seen = [], []
    wanted = {
        name: EngineOptions(name, "model", "float32", "cpu", 8, 64, 64, dict(os.environ)) for name in FAKES
    }
    monkeypatch.setattr(worker_pool, "is_installed", lambda options: True)
    with Engines(SlowServer, tmp_path, in_turn=in_turn) as engines:
        start_up_s = engines.start(wanted)
        assert list(engines.running) == list(start_up_s) == list(engines.facts) == list(FAKES)
        first, second = FAKES
        together = [[(second, False)], [(first, False)]]
        assert SlowServer.seen == ([[], [(first, True)]] if in_turn else together)
        assert not any(is_stopped(server.pid) for server in SlowServer.made)
    assert all(server.ended for server in SlowServer.made)


def test_a_part_that_is_off_has_a_server_of_its_own() -> None:
    arguments = ["poisson", "--quick", "--compare-joined-outputs", "--step-ms", "2", "--device", "cpu"]
    sides = workloads.Poisson.sides(online_compare.parse_options(arguments))
    assert list(sides) == [*FAKES, OUTPUTS_APART]
    assert sides[OUTPUTS_APART] == ("rose-in-vllm", ["joined_outputs"])
    assert sides["rose-in-vllm"] == ("rose-in-vllm", [])


def test_a_server_without_a_model_is_another_program() -> None:
    parsed = online_compare.parse_options(["poisson", "--step-ms", "2", "--device", "cpu"])
    options = engine_options(parsed, "rose-in-vllm", "model", FACTS, ["joined_outputs"])
    assert options.variables[STEP_MS] == "2.0"
    command = servers.server_command(options, 1)
    assert servers.HOST_ONLY_SERVER in command and "vllm.entrypoints.cli.main" not in command
    assert '{"rose": {"joined_outputs": false, "exact_cached_tokens": true}}' in command
    with_model = engine_options(online_compare.parse_options(["poisson"]), "vllm", "model", FACTS, [])
    assert "vllm.entrypoints.cli.main" in servers.server_command(with_model, 1)
    assert STEP_MS not in with_model.variables


@pytest.mark.parametrize("workload", ["trace", "poisson"])
def test_both_sides_stand_behind_the_front_end_that_is_asked_for(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, expected, otherwise in (([], {"0"}, "1"), (["--rust-front-end"], {"1"}, "0")):
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", otherwise)
        parsed = online_compare.parse_options([workload, *arguments])
        sides = (engine_options(parsed, backend, "model", FACTS, []) for backend in FAKES)
        assert {side.variables.get("VLLM_USE_RUST_FRONTEND") for side in sides} == expected
        assert parsed.workload(parsed, FACTS).settings["rust_front_end"] is bool(arguments)
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND")
    rose = engine_options(parsed, "rose", "model", FACTS, [])
    assert "VLLM_USE_RUST_FRONTEND" not in rose.variables


def test_a_server_that_does_not_start_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = [sys.executable, "-c", "raise SystemExit('no such backend')"]
    monkeypatch.setattr(servers, "server_command", lambda *arguments: fails)
    assert online_compare.main(["poisson", "--quick", "--logs", str(tmp_path)]) == 1
    assert "no such backend" in capsys.readouterr().out


SETS = request_sets(200, quick=False)


@pytest.mark.parametrize("request_set", SETS.values(), ids=SETS)
def test_prompts_of_a_turn_are_its_own(request_set: RandomRequests) -> None:
    turns = [replace(request_set, seed=seed).requests(50_000) for seed in (1, 2)]
    starts = [{tuple(prompt[:12]) for prompt in turn.prompts} for turn in turns]
    assert not starts[0] & starts[1]
    assert len(starts[0]) == (request_set.num_prefixes or 200)
    lengths = {len(prompt) - request_set.prefix_len for prompt in turns[0].prompts}
    assert (min(lengths), max(lengths)) == request_set.input_len
    assert turns[0].output_lens == [128] * 200 and turns[0].due == [0.0] * 200


def test_shared_prefixes_end_inside_a_block() -> None:
    prompts = SETS["shared-prefix"].requests(50_000).prompts
    assert len({tuple(prompt[:500]) for prompt in prompts}) == 8
    assert len({tuple(prompt[:501]) for prompt in prompts}) > 100
    assert 500 % BLOCK_SIZE != 0


def test_quick_sets_are_short() -> None:
    quick = request_sets(200, quick=True)
    assert quick.keys() == SETS.keys() == set(workloads.SETS)
    for name, short in quick.items():
        long = SETS[name]
        assert [16 * length for length in short.input_len] == list(long.input_len)
        assert [16 * length for length in short.output_len] == list(long.output_len)
        assert short.prefix_len == long.prefix_len // 16 and short.num_prefixes == long.num_prefixes


def test_counters_are_read_and_summed_over_engines() -> None:
    page = METRICS.format(prompt=10, hits=4, generated=7)
    second = page.replace('engine="0"', 'engine="1"')
    assert parse_counts(page + "\n".join(line for line in second.splitlines() if line[0] != "#") + "\n") == {
        "prompt_tokens": 20,
        "cached_tokens": 8,
        "generated_tokens": 14,
        "preemptions": 0,
    }
    with pytest.raises(KeyError, match="does not count vllm:prefix_cache_hits_total"):
        parse_counts(page.replace("prefix_cache_hits", "other"))


def test_medians_are_compared() -> None:
    def row(backend: str, value: float) -> dict[str, Any]:
        return {"set": "random", "rate": 3.0, "backend": backend, **dict.fromkeys(COMPARED, value)}

    rows = [row("vllm", value) for value in (1.0, 4.0, 90.0)]
    (alone,) = compare(rows)
    assert "times" not in alone
    (both,) = compare(rows + [row("rose-in-vllm", value) for value in (50.0, 2.0, 0.0)])
    assert both["medians"]["vllm"]["p99_ttft_ms"] == 4.0
    assert both["times"] == dict.fromkeys(COMPARED, 0.5)


def test_goals_are_checked() -> None:
    def row(name: str, rate: float | None, times: float, prefilled: int) -> dict[str, Any]:
        medians = {"vllm": {"prefilled_tokens": 100}, "rose-in-vllm": {"prefilled_tokens": prefilled}}
        return {"set": name, "rate": rate, "medians": medians, "times": dict.fromkeys(COMPARED, times)}

    comparison = [
        row("random", None, 1.31, 100),
        row("random", 5.0, 1.01, 100),
        row("shared-prefix", None, 1.29, 100),
        row("shared-prefix", 5.0, 1.0, 99),
    ]
    goals = poisson_bars(comparison, {"vllm": 20.0, "rose-in-vllm": 24.9})
    missed = [goal["name"] for goal in goals if not goal["met"]]
    latencies = [figure for figure in COMPARED if figure.endswith("_ms")]
    assert missed == [
        *(f"random, 5.0 a second: {figure}" for figure in latencies),
        "shared-prefix, all at once: throughput",
        "shared-prefix: fewer tokens prefilled",
    ]
    assert len(goals) == len(missed) + 1 + len(latencies) + 2
    assert not poisson_bars(comparison, {"vllm": 20.0, "rose-in-vllm": 25.1})[-1]["met"]
    assert poisson_bars([{"set": "random", "rate": None, "medians": {}}], {"vllm": 1.0}) == []


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engines]:
    """Yield a server that only seems to be Rose's."""
    monkeypatch.setattr(servers, "server_command", fake_command)
    options = EngineOptions("rose", "m", "float32", "cpu", 4, 64, 4096, dict(os.environ))
    with Engines(servers.Server, tmp_path) as started:
        started.start({"rose": options})
        yield started


def test_a_server_is_woken_by_a_token(engines: Engines) -> None:
    server = engines.running["rose"]
    server.wake()
    counts = server_counts(server.url)
    assert (counts["prompt_tokens"], counts["generated_tokens"]) == (4, 1)
    engines.drop("rose", EngineError("it is tired"))
    # Its requests will say so.
    server.wake()


def test_a_paused_server_ends_at_once_and_in_order(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MAX_STOP_S", HANG_S)
    server = engines.running["rose"]
    with paused([server.pid]):
        engines.drop("rose", EngineError("it is tired"))
    assert server.popen.returncode != -signal.SIGKILL
