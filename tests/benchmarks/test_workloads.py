"""Workloads: all engines are asked for the same and never twice, traces are like the published, answers are timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.online.streams import Pieces, gap_figures, hold_streams, together
from benchmarks.online.timeline import Timeline, play, summary
from benchmarks.online.trace import TraceRequest, fitted, read_trace, statistics_of, synthetic_trace
from benchmarks.reports.serving import in_process_bars as goal_bars
from benchmarks.reports.serving import streams_bars
from benchmarks.support.workload import HeldStreams, NanoVllmRequests, RandomRequests, Requests

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


# The second prompt's answer takes more turns of the event loop than any stream.
HELD = HeldStreams(
    arriving=Requests([[60] * 5, [61] * 5], [3, 60], [0.0, 0.001]),
    seconds=0.01,
    num_streams=3,
    prompt_len=4,
    length=13,
    vocab_size=50,
    seed=7,
    settle_s=0.0,
)


class Echo:
    """Streams pieces of one token as fast as the event loop goes, and notes what it was asked for and what has ended.

    Args:
        lost: tokens that answers to prompts with this first token lack; a number below 0 is an error instead.
    """

    def __init__(self, lost: dict[int, int] | None = None) -> None:
        self._lost = lost or {}
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.num_ended = 0

    async def stream(self, prompt: list[int], output_len: int) -> AsyncGenerator[int, None]:
        self.asked.append((tuple(prompt), output_len))
        lost = self._lost.get(prompt[0], 0)
        if lost < 0:
            raise ConnectionError("the engine is gone")
        try:
            for _ in range(output_len - lost):
                await asyncio.sleep(0)
                yield 1
            yield 0
        finally:
            # As an engine's client does to abort a request: that is awaited, and not left to the event loop.
            for _ in range(10):
                await asyncio.sleep(0)
            self.num_ended += 1


def test_streams_follow_each_other_while_prompts_arrive() -> None:
    echo = Echo()

    async def held() -> tuple[dict[str, Any], int]:
        return await hold_streams(echo.stream, HELD), echo.num_ended

    figures, num_ended = asyncio.run(held())
    assert figures["duration"] >= HELD.seconds
    assert figures["completed"] == len(figures["ttfts_ms"]) == 2
    assert 0 < figures["p50_gap_ms"] <= figures["p99_gap_ms"] <= figures["max_gap_ms"]
    assert figures["tokens_per_piece"] == 1
    assert figures["num_gaps"] > 0 and figures["output_throughput"] > 0 and figures["client_busy"] > 0
    # No stream is left running, and no prompt came twice.
    assert num_ended == len(echo.asked) == len({prompt for prompt, _ in echo.asked})
    of_streams = [(len(prompt), output_len) for prompt, output_len in echo.asked if prompt[0] < 50]
    # The first ones end one after the other.
    assert of_streams[:3] == [(4, 3), (4, 6), (4, 9)] and set(of_streams[3:]) == {(4, 9)}
    again = Echo()
    asyncio.run(hold_streams(again.stream, HELD))
    assert again.asked[:3] == echo.asked[:3]
    other = Echo()
    asyncio.run(hold_streams(other.stream, replace(HELD, seed=8)))
    assert not {prompt for prompt, _ in other.asked[:3]} & {prompt for prompt, _ in echo.asked}


def test_a_stream_that_fails_ends_the_turn_and_says_why() -> None:
    first = next(HELD.prompts(1))[0][0]
    with pytest.raises(RuntimeError, match="a stream got 5 new tokens, 6 were asked for"):
        asyncio.run(hold_streams(Echo({first: 1}).stream, HELD))
    with pytest.raises(ConnectionError, match="the engine is gone"):
        asyncio.run(hold_streams(Echo({first: -1}).stream, HELD))
    with pytest.raises(RuntimeError, match="got 62 new tokens, 63 were asked for"):
        asyncio.run(hold_streams(Echo({61: 1}).stream, HELD))
    with pytest.raises(ConnectionError, match="the engine is gone"):
        asyncio.run(hold_streams(Echo({61: -1}).stream, HELD))


def test_gaps_count_within_a_stream_where_they_touch_the_time_of_prompts() -> None:
    before, after = Pieces([1.0, 9.0, 9.5], [1, 1, 1]), Pieces([21.0, 22.0], [1, 1])
    # The first begins before 10 s and the last ends after 20 s; from 14 to 16 s another stream takes the place.
    first, second = (
        Pieces([9.75, 10.0, 10.5, 14.0], [1, 1, 1, 5]),
        Pieces([16.0, 17.0, 20.0, 23.0], [1, 2, 1, 1]),
    )
    assert gap_figures([before, first, second, after, Pieces()], 10.0, 20.0) == {
        "num_gaps": 4,
        "p50_gap_ms": 2000.0,
        "p90_gap_ms": pytest.approx(3350.0),
        "p99_gap_ms": pytest.approx(3485.0),
        "max_gap_ms": 3500.0,
        "num_tokens": 10,
        "tokens_per_piece": 2.0,
    }
    late = Pieces([9.0, 19.0, 26.0], [1, 1, 1])
    assert gap_figures([late], 10.0, 20.0)["max_gap_ms"] == 10_000
    with pytest.raises(RuntimeError, match="no stream had two pieces"):
        gap_figures([before, after], 10.0, 20.0)


def test_turns_of_streams_are_put_together() -> None:
    names = ("p50_gap_ms", "p99_gap_ms", "max_gap_ms", "completed", "output_throughput")
    values = ((2.0, 3.0, 9.0, 1, 70.0), (4.0, 6.0, 50.0, 2, 90.0), (5.0, 6.0, 8.0, 2, 80.0))
    ttfts = ([10.0], [20.0, 30.0], [40.0, 50.0])
    turns = [
        {**dict(zip(names, of_turn, strict=True)), "ttfts_ms": of_prompts}
        for of_turn, of_prompts in zip(values, ttfts, strict=True)
    ]
    assert together(turns) == {
        "p50_gap_ms": 4.0,
        "p99_gap_ms": 6.0,
        "gap_tail": 1.5,
        "max_gap_ms": 50.0,
        "completed": 5,
        "output_throughput": 80.0,
        "p50_ttft_ms": 30.0,
        "p90_ttft_ms": pytest.approx(46.0),
        "p99_ttft_ms": pytest.approx(49.6),
    }


def test_goals_of_streams() -> None:
    def side(arrivals: str, backend: str, tail: float, p50: float, p99: float) -> dict[str, object]:
        figures = {"gap_tail": tail, "p50_ttft_ms": p50, "p99_ttft_ms": p99}
        return {"arrivals": arrivals, "backend": backend, **figures}

    rows = [
        side("fixed", "rose", 1.8, 115.0, 231.0),
        side("fixed", "rose-in-vllm", 1.81, 116.0, 230.0),
        side("fixed", "rose-in-vllm, step_budget auto", 9.0, 115.0, 900.0),
        side("fixed", "vllm", 9.0, 100.0, 200.0),
        side("poisson", "rose-in-vllm", 9.0, 900.0, 280.0),
        side("poisson", "vllm", 9.0, 100.0, 200.0),
    ]
    bars = {goal["name"]: goal["met"] for goal in streams_bars(rows)}
    assert bars == {
        "fixed arrivals, Rose: gaps, p99 over their median": True,
        "fixed arrivals, Rose: TTFT p50 over vLLM's": True,
        "fixed arrivals, Rose: TTFT p99 over vLLM's": False,
        "fixed arrivals, Rose in vLLM: gaps, p99 over their median": False,
        "fixed arrivals, Rose in vLLM: TTFT p50 over vLLM's": False,
        "fixed arrivals, Rose in vLLM: TTFT p99 over vLLM's": True,
        "fixed arrivals, Rose in vLLM, step budget: gaps, p99 over their median": False,
        "fixed arrivals, Rose in vLLM, step budget: TTFT p50 over vLLM's": True,
        "fixed arrivals, Rose in vLLM, step budget: TTFT p99 over vLLM's": False,
        "poisson arrivals, Rose in vLLM: TTFT p99 over vLLM's": True,
    }
    assert [goal["name"] for goal in streams_bars(rows[1:2])] == list(bars)[3:4]
