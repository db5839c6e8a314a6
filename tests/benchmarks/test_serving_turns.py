"""Turns of benchmarks/vllm_serving.py: who begins, and what is kept of one that was interrupted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import vllm_serving
from benchmarks.support import serving_turns

BOTH = ("rose-in-vllm", "vllm")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let servers answer at once, and return the list of those that were asked."""
    names: list[str] = []

    def figures(self: Any, server: Any, requests: Any) -> dict[str, float]:
        names.append(server.name)
        if names.count("vllm") == 3:
            raise KeyboardInterrupt
        return {"request_throughput": 10.0}

    monkeypatch.setattr(serving_turns.Turns, "_figures", figures)
    monkeypatch.setattr(serving_turns.Turns, "warm_up", lambda self, request_set: None)
    return names


def measured(*arguments: str) -> tuple[list[dict[str, Any]], int]:
    options = vllm_serving.parse_options(["--quick", "--no-pause", *arguments])
    servers: Any = {name: SimpleNamespace(name=name, pid=0, wake=lambda: None) for name in BOTH}
    return vllm_serving.measure(servers, 1000, options, float("inf"))


def test_an_interrupt_keeps_the_turns_that_were_whole(asked: list[str]) -> None:
    rows, left_out = measured("--repeats", "2", "--sets", "random")
    # Two whole turns; in the third, the second server was interrupted.
    assert asked == ["rose-in-vllm", "vllm", "vllm", "rose-in-vllm", "vllm"]
    assert [(row["repeat"], row["rate"], row["backend"]) for row in rows] == [
        (0, None, "rose-in-vllm"),
        (0, None, "vllm"),
        (0, 5.0, "vllm"),
        (0, 5.0, "rose-in-vllm"),
    ]
    assert left_out == 2


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("num_rates", [1, 2])
def test_each_server_begins_in_every_other_turn_of_a_kind(
    monkeypatch: pytest.MonkeyPatch, num_rates: int
) -> None:
    monkeypatch.setattr(serving_turns.Turns, "_figures", lambda *arguments: {"request_throughput": 10.0})
    loads = [str(0.5 + number) for number in range(num_rates)]
    rows, left_out = measured("--repeats", "4", "--loads", *loads)
    assert left_out == 0
    kinds: dict[Any, list[str]] = {}
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert {first["backend"], second["backend"]} == set(BOTH)
        kinds.setdefault((first["set"], first["rate"]), []).append(first["backend"])
    assert len(kinds) == 2 * (1 + num_rates)
    for firsts in kinds.values():
        assert firsts in ([*BOTH] * 2, [*reversed(BOTH)] * 2)
