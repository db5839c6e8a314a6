"""benchmarks/online_compare.py end to end against ``rose serve``, and its client against a server that misbehaves."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks import online_compare
from benchmarks.report import figure_files
from benchmarks.support import online_figure, servers
from benchmarks.support.engines import EngineOptions
from benchmarks.support.http_client import Client, Load, Replay, client_session, note_answer
from benchmarks.support.online_report import losses
from benchmarks.support.servers import as_flags, server_command
from benchmarks.support.streaming import METRICS, PERCENTILES, Timeline
from benchmarks.support.workload import MODES
from rose_backend import __version__
from tests.benchmarks.sleepers import is_stopped, sleepers

OPTIONS = EngineOptions("some model", "float16", "cuda", 4, kv_cache_tokens=64, kv_cache_bytes=4096)


def test_a_quick_run_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "online.json"
    arguments = ["--quick", "--backends", "rose", "--scales", "0.05", "0.02", "--repeats", "1",
                 "--clients", "2", "--json", str(path)]  # fmt: skip
    assert online_compare.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["missing"] == report["failed"] == {} and report["losses"] == []
    assert report["backends"] == {"rose": {"version": __version__}}
    assert report["trace"]["num_requests"] == 8
    assert report["settings"]["pause"] is True
    sides = [(row["backend"], row["mode"], row["scale"]) for row in report["rows"]]
    assert sides == [("rose", mode, scale) for scale in (0.02, 0.05) for mode in MODES]
    for row in report["rows"]:
        assert (row["completed"], row["failed"]) == (8, 0)
        assert row["duration"] >= report["trace"]["seconds"] * row["scale"]
        assert 0 < row["p50_ttft_ms"] < row["p50_e2el_ms"]
        assert 8 <= row["pieces"] <= row["total_output_tokens"]
        assert 0 < row["client_busy"] < 1.5
    assert "0.05" in capsys.readouterr().out
    assert online_figure.curve(report, "greedy", "rose", "p99_ttft_ms")[0] == [0.02, 0.05]
    files = online_figure.draw(report, tmp_path / "figures")
    assert [file.name for file in files] == figure_files(report)
    assert all(file.stat().st_size > 5000 for file in files)


def test_an_interrupt_while_servers_end_costs_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "online.json"
    ending: list[servers.Server] = []

    def stop(server: servers.Server) -> None:
        ending.append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(servers.Server, "stop", stop)
    arguments = ["--quick", "--backends", "rose", "--scales", "0.02", "--repeats", "1"]
    assert online_compare.main([*arguments, "--modes", "greedy", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert len(report["rows"]) == 1 and report["turns_left_out"] == 0
    (server,) = ending
    assert server._process.returncode is not None


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
        timeline = Timeline(2)
        async with client_session() as session:
            load = Load(f"http://127.0.0.1:{port}", "some model", {"temperature": 0.0}, [], [], [])
            client = Client(session, load)
            await client.send([5, 6], 3, timeline)
            client.note_answers()
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
        with pytest.raises(servers.ServerError, match=f"no port is free between {port} and {port}"):
            servers.free_port()
    assert servers.free_port() == port


def test_a_server_that_does_not_say_its_version_is_no_reason_to_stop() -> None:
    silent = servers.Server.__new__(servers.Server)
    silent.backend, silent.url = "sglang", f"http://127.0.0.1:{servers.free_port()}"
    assert silent.version().startswith("not told (URLError: ")


def test_options_become_flags() -> None:
    options = {"max_num_seqs": 8, "fused_mlp": False, "cuda_graph": True, "seed": None, "extra": {"a": 1}}
    assert as_flags(options) == [
        "--max-num-seqs", "8", "--no-fused-mlp", "--cuda-graph", "--extra", '{"a": 1}',
    ]  # fmt: skip


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
    command = " ".join(server_command(backend, OPTIONS, 99))
    assert all(part in command for part in [*parts, "--host 127.0.0.1", "--dtype float16"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "--requests: got 0, at least 1"),
        (["--scales", "1", "0"], "--scales: got [1.0, 0.0], each has to be above 0"),
        (["--length-scale", "0"], "--length-scale: got 0.0, has to be above 0"),
        (["--clients", "0"], "--clients: got 0, at least 1"),
        (["--timed-trace-sec-multiplier", "0"], "--timed-trace-sec-multiplier: got 0.0, has to be above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        online_compare.parse_options(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


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
    found = [(loss["peer"], loss["figure"], loss["rose"], loss["peers"]) for loss in losses(rows)]
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
    load = Load("url", "model", {}, [[1], [2], [3], [4], [5]], [1, 2, 3, 4, 5], [0.1, 0.2, 0.3, 0.4, 0.5])
    parts = [load.share(index, 2) for index in range(2)]
    assert [part.prompts for part in parts] == [[[1], [3], [5]], [[2], [4]]]
    assert [part.output_lens for part in parts] == [[1, 3, 5], [2, 4]]
    assert [part.due for part in parts] == [[0.1, 0.3, 0.5], [0.2, 0.4]]


class Postbox:
    """Takes loads in place of the client's processes, and answers at once."""

    def __init__(self, count: int) -> None:
        self.loads: list[Load] = []
        self.pids: dict[str, int] = {}
        self.stopped: list[list[str]] = []

    def send(self, load: Load) -> Replay:
        self.loads.append(load)
        self.stopped.append([name for name, pid in self.pids.items() if is_stopped(pid)])
        timelines = [
            Timeline(len(p), [0.1, 0.3], n) for p, n in zip(load.prompts, load.output_lens, strict=True)
        ]
        return Replay(timelines, 0.3, 0.1, 0.0)


@pytest.fixture
def contest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[online_compare.Contest]:
    monkeypatch.setattr(online_compare, "ClientProcesses", Postbox)
    options = online_compare.parse_options(
        ["--quick", "--scales", "0.5", "0.1", "--repeats", "2", "--modes", "greedy"]
    )
    both = servers.Servers(tmp_path)
    trace, _ = online_compare.read_requests(options, 1024)
    with sleepers("rose", "vllm") as running:
        for name, server in running.items():
            server.url, server.model = name, "m"
        both.running = running  # type: ignore[assignment]
        yield online_compare.Contest(both, trace, 100, options)


def test_a_server_that_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(servers, "Server", lambda backend, *_, **__: started.append(backend))
    (tmp_path / "installed" / "sglang").mkdir(parents=True)
    found = servers.Servers(tmp_path)
    found.add("rose", OPTIONS)
    found.add("sglang", OPTIONS, python_path=str(tmp_path))
    assert found.missing == {"sglang": "no module named sglang"} and found.running.keys() == {"rose"}
    found.add("sglang", OPTIONS, python_path=str(tmp_path / "installed"))
    assert started == ["rose", "sglang"]
    # A Python that does not even start is no answer.
    monkeypatch.setattr(servers.sys, "executable", "false")
    assert servers.missing_module("sglang", str(tmp_path), {}) is None


def test_servers_take_turns_with_the_same_prompts(contest: online_compare.Contest) -> None:
    contest.run(float("inf"))
    loads = contest._clients.loads  # type: ignore[attr-defined]
    assert [load.url for load in loads] == ["rose", "vllm", "vllm", "rose"] * 2
    assert [row["backend"] for row in contest.rows] == [load.url for load in loads]
    assert [(row["scale"], row["repeat"]) for row in contest.rows[::2]] == [
        (0.1, 0),
        (0.5, 0),
        (0.1, 1),
        (0.5, 1),
    ]
    for first, second in zip(loads[::2], loads[1::2], strict=True):
        assert first.prompts == second.prompts and first.due == second.due
    assert len({tuple(load.prompts[0]) for load in loads[::2]}) == 4
    assert loads[2].due == pytest.approx([at * 5 for at in loads[0].due])
    assert contest.turns_left_out == 0


@pytest.mark.parametrize("pause", [True, False])
def test_whose_turn_it_is_not_is_stopped(contest: online_compare.Contest, pause: bool) -> None:
    postbox: Any = contest._clients
    postbox.pids = {name: server.pid for name, server in contest._servers.items()}
    contest._options.pause = pause
    contest.run(float("inf"))
    assert postbox.stopped == ([["vllm"], ["rose"], ["rose"], ["vllm"]] * 2 if pause else [[]] * 8)
    assert not any(is_stopped(pid) for pid in postbox.pids.values())


def test_turns_without_time_are_counted(contest: online_compare.Contest) -> None:
    contest.run(0.0)
    assert (contest.rows, contest.turns_left_out) == ([], 4)


def test_an_interrupt_keeps_the_turns_that_were_whole(
    contest: online_compare.Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    postbox = contest._clients

    def send(load: Load) -> Replay:
        if len(postbox.loads) == 3:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return Postbox.send(postbox, load)  # type: ignore[arg-type]

    monkeypatch.setattr(postbox, "send", send)
    contest.run(float("inf"))
    assert [(row["backend"], row["scale"]) for row in contest.rows] == [("rose", 0.1), ("vllm", 0.1)]
    assert contest.turns_left_out == 3
