"""Engines take turns: one runs, the others are stopped, and only whole turns count."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.support.turns import EngineError, Turn, take_turns
from tests.benchmarks.sleepers import Sleeper, is_stopped, sleepers

TURNS = [Turn(f"turn {number}", {"number": number}, first=number, seed=number) for number in range(3)]


@pytest.mark.parametrize("pause", [True, False])
def test_an_interrupt_keeps_the_turns_that_were_whole(pause: bool) -> None:
    calls: list[str] = []
    stopped: list[list[str]] = []

    def take(engine: Sleeper, name: str, turn: Turn) -> dict[str, Any]:
        calls.append(name)
        stopped.append([name for name, other in engines.items() if is_stopped(other.pid)])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return {"calls": len(calls)}

    rows: list[dict[str, Any]] = []
    with sleepers("rose", "vllm") as engines:
        left_out = take_turns(engines, TURNS, take, rows, pause=pause, deadline=float("inf"))
        assert not any(is_stopped(engine.pid) for engine in engines.values())
    assert calls == ["rose", "vllm", "vllm", "rose"]
    assert stopped == ([["vllm"], ["rose"], ["rose"], ["vllm"]] if pause else [[]] * 4)
    assert rows == [
        {"backend": "rose", "number": 0, "calls": 1},
        {"backend": "vllm", "number": 0, "calls": 2},
    ]
    assert left_out == 2


class Engine:
    """Needs no process: nothing is paused."""

    pid = 0

    def wake(self) -> None:
        pass


def test_an_engine_that_fails_is_dropped_and_the_others_go_on() -> None:
    engines = {"rose": Engine(), "vllm": Engine()}
    failed: dict[str, str] = {}

    def take(engine: Engine, name: str, turn: Turn) -> dict[str, Any]:
        if name == "vllm" and turn.seed:
            raise EngineError("it died")
        return {}

    def drop(name: str, error: EngineError) -> None:
        failed[name] = str(error)
        del engines[name]

    rows: list[dict[str, Any]] = []
    assert take_turns(engines, TURNS, take, rows, pause=False, deadline=float("inf"), drop=drop) == 0
    assert failed == {"vllm": "it died"}
    assert [(row["backend"], row["number"]) for row in rows] == [
        ("rose", 0),
        ("vllm", 0),
        ("rose", 1),
        ("rose", 2),
    ]


def test_turns_without_time_or_engines_are_counted() -> None:
    def take(engine: Engine, name: str, turn: Turn) -> dict[str, Any]:
        pytest.fail("there is no time")

    rows: list[dict[str, Any]] = []
    assert take_turns({"rose": Engine()}, TURNS, take, rows, pause=False, deadline=0.0) == 3
    assert take_turns({}, TURNS, take, rows, pause=False, deadline=float("inf")) == 3
    assert rows == []
