"""benchmarks/scheduler.py end to end, what its options ask of the engine, and its arithmetic."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import scheduler
from benchmarks.online.timeline import Timeline
from benchmarks.scheduler import METRICS, PERCENTILES, figures, serve
from rose_backend import SamplingParams


def test_a_quick_run_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new folder" / "scheduler.json"
    arguments = [
        "--quick",
        "--device",
        "cpu",
        "--warmup-runs",
        "0",
        "--repeat-runs",
        "2",
        "--max-batch-size",
        "3",
        "--submit-interval-ms",
        "2",
        "--prefill-max-batch-size",
        "1",
        "--no-stop-on-eos",
        "--json",
        str(path),
    ]
    assert scheduler.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "scheduler" and report["device"] == "cpu"
    assert len(report["runs"]) == 2
    for run in (report["figures"], *report["runs"]):
        assert (run["completed"], run["total_output_tokens"]) == (8, 8 * 8)
        # Eight requests, three at a time: the last ones wait for others to end.
        assert 0 < run["p50_queue_wait_ms"] <= run["p99_queue_wait_ms"]
        assert run["p99_queue_wait_ms"] > run["p50_prefill_ms"]
        assert 0 < run["p50_ttft_ms"] < run["p50_latency_ms"]
        assert run["mean_ttft_ms"] == pytest.approx(run["mean_queue_wait_ms"] + run["mean_prefill_ms"])
        assert all(f"p{share}_{name}_ms" in run for share in PERCENTILES for name in METRICS)
    assert "8 requests of 21 tokens, 8 new" in capsys.readouterr().out


def engine_options(*arguments: str) -> dict[str, Any]:
    options = scheduler.parse_options(["--device", "cpu", *arguments])
    return scheduler.engine_options(options, num_prompt_tokens=100)


def test_options_are_the_engines_own() -> None:
    assert engine_options() == {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 256,
        "prefix_cache": True,
    }
    assert engine_options("--no-prefix-cache")["prefix_cache"] is False
    chosen = engine_options("--max-batch-size", "8", "--prefill-max-batch-size", "3")
    assert (chosen["max_num_seqs"], chosen["max_num_batched_tokens"]) == (8, 308)


class InstantEngine:
    """Answers at once, in two pieces."""

    async def generate(self, prompt: str, params: Any, request_id: str) -> Any:
        for count in (1, 3):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)])


def test_requests_come_one_after_the_other() -> None:
    engine: Any = InstantEngine()
    served, duration = asyncio.run(serve(engine, ["a"] * 4, SamplingParams(max_tokens=3), 0.05))
    first = served[0].due
    assert [request.due - first for request in served] == pytest.approx([0.0, 0.05, 0.1, 0.15])
    assert all(request.arrivals[0] >= 0 for request in served) and duration >= 0.15
    assert [(len(request.arrivals), request.num_tokens) for request in served] == [(2, 3)] * 4


def test_figures_are_those_of_all_requests() -> None:
    first = Timeline(9, [1.0, 1.5, 3.0], num_tokens=5, queue_wait=0.5)
    second = Timeline(9, [0.25], num_tokens=1)
    got = figures([first, second], duration=4.0)
    assert (got["completed"], got["request_throughput"], got["output_throughput"]) == (2, 0.5, 1.5)
    assert got["mean_queue_wait_ms"] == pytest.approx(250)
    assert got["mean_prefill_ms"] == pytest.approx(375)
    assert got["p50_ttft_ms"] == pytest.approx(625)
    assert got["p99_tpot_ms"] == pytest.approx(500)
    assert got["mean_itl_ms"] == pytest.approx(1000)
    assert got["mean_latency_ms"] == pytest.approx(1625)
