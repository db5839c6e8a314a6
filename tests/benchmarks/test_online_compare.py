"""benchmarks/online_compare.py end to end, and its client against a server that misbehaves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks import online_compare
from benchmarks.online import servers, workloads
from benchmarks.online.http_client import Replay, note_answer, replay
from benchmarks.online.servers import server_command
from benchmarks.online.timeline import METRICS, PERCENTILES, Timeline
from benchmarks.reports import figures
from benchmarks.reports.serving import trace_losses
from benchmarks.support.checkpoint import ModelFacts
from benchmarks.support.engines import EngineOptions, as_flags
from benchmarks.support.worker_pool import EngineError, is_installed
from benchmarks.support.workload import Requests
from rose_backend import __version__
from tests.benchmarks.fake_vllm_server import fake_command


def test_a_quick_run_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "online.json"
    arguments = [
        "--quick",
        "--backends",
        "rose",
        "--scales",
        "0.05",
        "0.02",
        "--modes",
        "greedy",
        "--repeats",
        "1",
        "--json",
        str(path),
    ]
    assert online_compare.main(arguments) == 0
    report = json.loads(path.read_text())
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
    files = figures.draw(report, path.stem, tmp_path / "figures")
    assert [file.name for file in files] == ["online_greedy.svg"]
    assert all(file.stat().st_size > 5000 for file in files)


def test_streams_in_process_at_a_rate_and_at_their_own_capacity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new folder" / "arrivals.json"
    arguments = ["in-process", "--quick", "--backends", "rose", "--repeats", "2", "--rate", "40"]
    assert online_compare.main([*arguments, "--share", "0.25", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "online.json"
    ending: list[servers.Server] = []

    def wait_for_end(server: servers.Server) -> None:
        ending.append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(servers.Server, "wait_for_end", wait_for_end)
    monkeypatch.setattr(servers, "server_command", fake_command)
    arguments = ["--quick", "--backends", "rose", "--scales", "0.02", "--repeats", "1"]
    assert online_compare.main([*arguments, "--modes", "greedy", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
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
    assert as_flags(options) == [
        "--max-num-seqs",
        "8",
        "--no-fused-mlp",
        "--cuda-graph",
        "--extra",
        '{"a": 1}',
    ]


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


def turn(backend: str, scale: float, value: float, **changes: float) -> dict[str, Any]:
    figures = {f"p{share}_{metric}_ms": value for metric in METRICS for share in PERCENTILES}
    others = {"output_throughput": 1.0, "request_throughput": 1.0, "client_busy": 0.1, "failed": 0}
    return {"backend": backend, "mode": "greedy", "scale": scale, **figures, **others, **changes}


def test_every_figure_behind_a_peer_is_a_loss() -> None:
    rows = [
        *(turn("rose", 0.1, 2.0, p99_itl_ms=value) for value in (1.0, 5.0, 6.0)),
        turn("vllm", 0.1, 3.0),
        turn("vllm", 0.2, 1.0),
        turn("sglang", 0.1, 4.0, p50_ttft_ms=1.5),
        turn("rose-in-vllm", 0.2, 1.0),
    ]
    found = [(loss["peer"], loss["figure"], loss["rose"], loss["peers"]) for loss in trace_losses(rows)]
    assert found == [
        ("vllm", "p99_itl_ms", 5.0, 3.0),
        ("sglang", "p50_ttft_ms", 2.0, 1.5),
        ("sglang", "p99_itl_ms", 5.0, 4.0),
    ]


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
