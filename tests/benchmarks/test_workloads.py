"""Workloads: all engines are asked for the same and never twice, traces are like the published, streams are timed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.online.timeline import Timeline, play, summary
from benchmarks.online.trace import TraceRequest, fitted, read_trace, statistics_of, synthetic_trace
from benchmarks.reports.serving import in_process_bars as goal_bars
from benchmarks.support.workload import NanoVllmRequests, RandomRequests, Requests

MIXED = RandomRequests(200, (16, 64), (1, 8), seed=5)


def test_lengths_and_tokens_are_in_their_ranges() -> None:
    requests = MIXED.requests(50)
    assert len(requests.prompts) == len(requests.output_lens) == 200
    assert {min(map(len, requests.prompts)), max(map(len, requests.prompts))} == {16, 64}
    assert set(requests.output_lens) == set(range(1, 9))
    assert {token for prompt in requests.prompts for token in prompt} == set(range(1, 50))
    assert requests.due == [0.0] * 200
    assert MIXED.requests(50) == requests


def test_no_prompt_of_another_seed_has_a_known_beginning() -> None:
    known = {tuple(prompt[:8]) for prompt in MIXED.requests(50_257).prompts}
    later = replace(MIXED, seed=6).requests(50_257).prompts
    assert not known & {tuple(prompt[:8]) for prompt in later}
    assert len(known) == 200


def test_arrivals_are_poisson() -> None:
    many = RandomRequests(20_000, (1, 1), (1, 1), seed=0)
    gaps = np.diff([0.0, *many.requests(9, 40.0).due])
    assert abs(gaps.mean() * 40 - 1) < 0.03
    assert abs(gaps.std() * 40 - 1) < 0.03  # as large as the mean: exponential
    assert np.allclose(gaps, 2 * np.diff([0.0, *many.requests(9, 80.0).due]))


def test_warming_up_takes_fewer_and_shorter_requests() -> None:
    short = MIXED.shortened(10, 4)
    assert (short.num_requests, short.input_len, short.output_len) == (10, (16, 64), (1, 4))
    assert RandomRequests(2, (1, 1), (9, 9), 0).shortened(10, 4).requests(9).output_lens == [4, 4]


def test_the_workload_of_nano_vllm() -> None:
    requests = NanoVllmRequests(256).requests(151_936)
    assert (sum(map(len, requests.prompts)), sum(requests.output_lens)) == (142_827, 133_966)
    assert requests.prompts[0][:5] == [6311, 6890, 663, 4242, 8376]
    later = NanoVllmRequests(256, seed=2).requests(151_936)
    assert later.output_lens == requests.output_lens
    assert not {tuple(prompt[:8]) for prompt in later.prompts} & {
        tuple(each[:8]) for each in requests.prompts
    }
    few = NanoVllmRequests(256, seed=3).shortened(10, 8).requests(50)
    assert {len(prompt) for prompt in few.prompts} == {*few.output_lens} == {8}
    assert len(few.prompts) == 10
    assert max(token for prompt in few.prompts for token in prompt) < 50


def test_the_made_up_trace_is_like_the_published_one() -> None:
    facts = statistics_of(synthetic_trace(20_000))
    assert facts["input_length"]["p50"] == pytest.approx(1046, rel=0.15)
    assert facts["input_length"]["mean"] == pytest.approx(2331, rel=0.15)
    assert facts["input_length"]["p99"] == pytest.approx(14_359, rel=0.15)
    assert facts["output_length"]["p50"] == pytest.approx(375, rel=0.05)
    assert facts["output_length"]["mean"] == pytest.approx(430, rel=0.1)
    assert facts["best_prefix_hit_ratio"] == pytest.approx(0.579, abs=0.05)
    assert 20_000 / facts["seconds"] == pytest.approx(5.98, rel=0.1)


def test_a_seed_makes_one_trace() -> None:
    assert synthetic_trace(50, seed=3) == synthetic_trace(50, seed=3)
    assert synthetic_trace(50, seed=3) != synthetic_trace(50, seed=4)
    times = [request.timestamp for request in synthetic_trace(200)]
    assert times == sorted(times)


def test_equal_ids_are_equal_tokens_of_one_turn_only() -> None:
    first = TraceRequest(0.0, 40, 5, (1, 2, 3))
    second = TraceRequest(1.0, 33, 5, (1, 2, 4))
    assert len(first.prompt(100, salt=0)) == 40
    assert first.prompt(100, salt=0)[:32] == second.prompt(100, salt=0)[:32]
    assert first.prompt(100, salt=0)[32] != second.prompt(100, salt=0)[32]
    assert first.prompt(100, salt=0)[:16] != first.prompt(100, salt=1)[:16]
    assert set(first.prompt(3, salt=0)) == {1, 2}


def test_lengths_are_scaled_and_what_does_not_fit_is_counted() -> None:
    trace = [
        TraceRequest(5.0, 400, 100, tuple(range(25))),
        TraceRequest(6.0, 800, 200, tuple(range(50))),
        TraceRequest(8.0, 802, 200, tuple(range(51))),
    ]
    kept, num_left_out = fitted(trace, 9, length_scale=0.5, max_model_len=500)
    assert num_left_out == 1
    assert fitted([trace[2], *trace], 1, length_scale=0.5, max_model_len=500) == (kept[:1], 1)
    assert [request.timestamp for request in kept] == [0.0, 1.0]
    assert [(request.input_length, request.output_length) for request in kept] == [(200, 50), (400, 100)]
    assert [len(request.hash_ids) for request in kept] == [13, 25]


def test_an_endless_cache_supplies_what_came_before() -> None:
    trace = [TraceRequest(0.0, 48, 1, (1, 2, 3)), TraceRequest(1.0, 64, 1, (1, 2, 9, 3))]
    # Block 3 stands somewhere else in the second prompt, behind another text.
    assert statistics_of(trace)["best_prefix_hit_ratio"] == 2 / 7
    assert statistics_of(trace)["input_length"]["mean"] == 56


def test_a_file_is_read_as_published(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"chat_id": 1, "timestamp": 61.5, "input_length": 20, "output_length": 3, "hash_ids": [7, 8]}\n'
    path.write_text(line * 3)
    assert list(read_trace(path)) == [TraceRequest(61.5, 20, 3, (7, 8))] * 3
    path.write_text(line + '{"timestamp": 1}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl, line 2: KeyError: 'input_length'"):
        list(read_trace(path))


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
