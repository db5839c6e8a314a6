"""benchmarks/online_compare.py end to end against ``rose serve``, and its client against a server that misbehaves."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks import online_compare, plot_online
from benchmarks.support.engines import EngineOptions
from benchmarks.support.servers import Client, as_flags, client_session, server_command
from benchmarks.support.streaming import Timeline

OPTIONS = EngineOptions("some model", "float16", "cuda", 4, kv_cache_tokens=64, kv_cache_bytes=4096)


def test_a_quick_run_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "online.json"
    arguments = ["--quick", "--backends", "rose", "--scales", "0.02", "0.05", "--json", str(path)]
    assert online_compare.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["failed"] == {}
    assert report["trace"]["num_requests"] + report["trace"]["num_left_out"] == 8
    assert [(row["backend"], row["scale"]) for row in report["rows"]] == [("rose", 0.02), ("rose", 0.05)]
    for row in report["rows"]:
        assert (row["completed"], row["failed"]) == (report["trace"]["num_requests"], 0)
        assert row["duration"] >= report["trace"]["seconds"] * row["scale"]
        assert 0 < row["p50_ttft_ms"] < row["p50_e2el_ms"]
    assert "0.05" in capsys.readouterr().out
    assert plot_online.curve(report, "rose", "p99_ttft_ms")[0] == [0.02, 0.05]
    for file in plot_online.draw(report, tmp_path / "figures"):
        assert file.stat().st_size > 5000


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
            client = Client(session, f"http://127.0.0.1:{port}", "some model", {"temperature": 0.0})
            await client.send([5, 6], 3, timeline)
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
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        online_compare.parse_options(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
