"""The made-up trace has the published statistics, prompts share what their ids say, and nothing is cut in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.online.trace import TraceRequest, fitted, read_trace, statistics_of, synthetic_trace


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
