"""What callers of a stream see, from a stream whose timing is known."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.online.timeline import Timeline, play, summary
from benchmarks.reports.serving import in_process_bars as goal_bars
from benchmarks.support.workload import Requests

KEYS = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"} | {
    f"{what}_throughput" for what in ("request", "output", "total_token")
}


def test_figures_have_vllms_names_and_meanings() -> None:
    timelines = [
        Timeline(5, [0.1, 0.2, 0.4], 3),
        Timeline(7, [0.3, 0.5], 5),  # four tokens came in one piece
        Timeline(1, [0.2], 1),
        Timeline(90, [0.9], 1, error="connection lost"),
    ]
    figures = summary(timelines, 2.0)
    assert figures.keys() >= KEYS
    statistics = [
        f"{name}_{metric}_ms"
        for name in ("mean", "median", "std", "p50", "p90", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    ]
    assert set(statistics) == figures.keys() - KEYS
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (13, 9)
    assert figures["request_throughput"] == 1.5
    assert figures["output_throughput"] == 4.5
    assert figures["total_token_throughput"] == 11.0
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["mean_e2el_ms"] == pytest.approx(1100 / 3)
    assert figures["mean_itl_ms"] == pytest.approx(500 / 3)
    assert figures["mean_tpot_ms"] == pytest.approx((150 + 50) / 2)
    assert figures["p99_ttft_ms"] == pytest.approx(298)
    assert figures["p50_itl_ms"] == figures["median_itl_ms"] == pytest.approx(200)


def test_a_late_start_counts() -> None:
    """The event loop is blocked for 50 ms while the second request becomes due."""

    async def send(prompt: list[int], output_len: int, timeline: Timeline) -> None:
        if prompt == [0]:
            time.sleep(0.05)
        await asyncio.sleep(0)
        timeline.arrivals.append(time.perf_counter() - timeline.due)
        timeline.num_tokens = output_len

    timelines, duration = asyncio.run(play(send, Requests([[0], [1, 1]], [4, 6], [0.0, 0.001])))
    assert [timeline.num_tokens for timeline in timelines] == [4, 6]
    assert timelines[1].prompt_len == 2
    assert timelines[1].arrivals[0] > 0.045
    assert duration >= 0.05


def test_requests_wait_until_they_are_due() -> None:
    async def send(prompt: list[int], output_len: int, timeline: Timeline) -> None:
        sent.append(time.perf_counter())

    sent: list[float] = []
    start = time.perf_counter() + 0.1
    timelines, duration = asyncio.run(play(send, Requests([[1], [1]], [2, 2], [0.0, 0.2]), start))
    assert duration >= 0.2 and sent[1] >= start + 0.2
    assert [timeline.due for timeline in timelines] == [start, start + 0.2]


def row(scene: str, backend: str, **figures: float) -> dict[str, object]:
    names = [f"p{p}_{metric}_ms" for p in (50, 90, 99) for metric in ("ttft", "tpot", "itl", "e2el")]
    return {"scene": scene, "backend": backend, **dict.fromkeys(names, 10.0), **figures}


def test_goals() -> None:
    rows = [
        row("own load", "rose", p50_itl_ms=1.0, p99_itl_ms=3.1),
        row("same load", "rose", p50_ttft_ms=3.0),
        row("same load", "vllm", p99_e2el_ms=9.0),
        row("own load", "vllm"),
    ]
    bars = {goal["name"]: goal for goal in goal_bars(rows)}
    assert not bars["ITL p99 over its median, own load"]["met"]
    assert bars["TTFT p50 over vLLM's, same load"]["met"]
    assert bars["TTFT p50 over vLLM's, same load"]["value"] == 0.3
    assert [name for name, goal in bars.items() if not goal["met"]] == [
        "ITL p99 over its median, own load",
        "E2EL p99 over vLLM's, same load",
    ]
    assert goal_bars(rows[1:2]) == []
