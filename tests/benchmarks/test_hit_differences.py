"""Answers after a prefix hit beside answers to prompts that were computed whole."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks import hit_differences
from benchmarks.hit_differences import difference, summary
from benchmarks.support.engines import Answer

HOSTS = ["rose", *(["rose-in-vllm"] if find_spec("vllm") else [])]


def test_both_hosts_are_compared_with_themselves(
    run_benchmark: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"--quick --device cpu --prompts 3 --prompt-tokens 5 80 --backends {' '.join(HOSTS)}"
    report = run_benchmark(hit_differences.main, arguments)
    assert report["benchmark"] == "hit_differences" and report["failed"] == {}
    assert [row["backend"] for row in report["rows"]] == HOSTS
    for row in report["rows"]:
        # Hits end at the token that was drawn, in no two prompts at the same.
        assert row["prompts"] == row["hits"] == row["hits_to_the_token"] == 3
        assert 0 < row["mean_hit_tokens"] < row["mean_prompt_tokens"]
        assert row["again"]["bit_equal"] == 3 and row["again"]["largest_difference"] == 0.0
        hit = row["hit"]
        assert 0.0 <= hit["largest_difference"] < 1e-3
        assert hit["median_difference"] <= hit["largest_difference"] >= hit["largest_first_difference"]
    printed = capsys.readouterr().out
    assert "after a hit" in printed and "computed again" in printed


def test_an_engine_that_fails_is_named(
    run_benchmark: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = '--quick --device cpu --backends rose --engine-options rose={"block_size":0}'
    report = run_benchmark(hit_differences.main, arguments, status=1)
    assert report["rows"] == [] and "block_size: got 0" in report["failed"]["rose"]
    assert "rose: ConfigError: block_size: got 0" in capsys.readouterr().err


def answer(token_ids: list[int], *logprobs: dict[int, float]) -> Answer:
    return Answer(token_ids, list(logprobs), 0)


def test_places_count_up_to_the_first_token_that_differs() -> None:
    one = answer([5, 6, 7], {5: -1.0, 8: -2.0}, {6: -1.0, 9: -1.5}, {7: -1.0, 3: -9.0})
    assert difference(one, one) == {"changed_at": None, "largest": 0.0, "first": 0.0}
    other = answer([5, 9, 7], {5: -1.25, 4: -9.0}, {9: -1.0, 6: -1.125}, {7: -8.0, 3: -9.0})
    # At the place of the change both have the same context, after it they have not.
    assert difference(one, other) == {"changed_at": 1, "largest": 0.5, "first": 0.25}


def test_prompts_without_a_hit_do_not_count() -> None:
    equal = {"changed_at": None, "largest": 0.0, "first": 0.0}
    small = {"changed_at": None, "largest": 0.25, "first": 0.125}
    changed = {"changed_at": 3, "largest": 0.5, "first": 0.0}

    def row(cut: int, hit_tokens: int, hit: dict[str, Any]) -> dict[str, Any]:
        sizes = {"prompt_tokens": 40, "cut": cut, "hit_tokens": hit_tokens}
        return {**sizes, "again": equal, "hit": hit}

    rows = [row(20, 16, small), row(32, 32, changed), row(32, 32, equal), row(9, 0, changed)]
    found = summary(rows)
    counts = ("prompts", "hits", "hits_to_the_token", "mean_prompt_tokens", "mean_hit_tokens")
    assert [found[name] for name in counts] == [4, 3, 2, 40, 80 / 3]
    assert found["hit"] == {
        "bit_equal": 1,
        "answers_changed": 1,
        "median_changed_at": 3,
        "largest_difference": 0.5,
        "median_difference": 0.25,
        "largest_first_difference": 0.125,
    }
    assert found["again"]["bit_equal"] == 3
    none = summary([row(9, 0, changed)])
    assert none["hits"] == 0 and none["mean_hit_tokens"] is None and "hit" not in none


def test_an_engine_without_hits_has_a_line() -> None:
    rows = [{"backend": "vllm", "hits": 0}]
    assert "| vLLM | no hits |" in hit_differences.table({"rows": rows})


def test_longer_prompts_than_the_model_takes_are_refused(run_benchmark: Callable[..., Any]) -> None:
    with pytest.raises(SystemExit, match="--prompt-tokens: a request has"):
        run_benchmark(hit_differences.main, "--quick --device cpu --prompt-tokens 8 100000")
