"""Engines take turns: one runs, the others are stopped, and only whole turns count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.turns import Turn
from benchmarks.support.worker_pool import EngineError, Engines
from tests.benchmarks.sleepers import Sleeper, is_stopped, sleepers

TURNS = [Turn(f"turn {number}", {"number": number}, first=number, seed=number) for number in range(3)]


def engines_of(folder: Path, running: dict[str, Any]) -> Engines:
    """Return engines that have started already."""
    engines = Engines(lambda options, log: pytest.fail("nothing is to start"), folder)
    engines.running = running
    return engines


@pytest.mark.parametrize("pause", [True, False])
def test_an_interrupt_keeps_the_turns_that_were_whole(tmp_path: Path, pause: bool) -> None:
    calls: list[str] = []
    stopped: list[list[str]] = []

    def take(engine: Sleeper, name: str, turn: Turn) -> dict[str, Any]:
        calls.append(name)
        stopped.append([name for name, other in running.items() if is_stopped(other.pid)])
        assert engine is running[name] and engine.woken == calls.count(name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return {"calls": len(calls)}

    rows: list[dict[str, Any]] = []
    with sleepers("rose", "vllm") as running:
        engines = engines_of(tmp_path, running)
        left_out = engines.take_turns(TURNS, take, rows, pause=pause, deadline=float("inf"))
        assert not any(is_stopped(engine.pid) for engine in running.values())
    assert calls == ["rose", "vllm", "vllm", "rose"]
    assert stopped == ([["vllm"], ["rose"], ["rose"], ["vllm"]] if pause else [[]] * 4)
    assert rows == [
        {"backend": "rose", "number": 0, "calls": 1},
        {"backend": "vllm", "number": 0, "calls": 2},
    ]
    assert left_out == 2


def test_an_engine_that_fails_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    def take(engine: Sleeper, name: str, turn: Turn) -> dict[str, Any]:
        if name == "vllm" and turn.seed:
            raise EngineError("it died")
        return {}

    rows: list[dict[str, Any]] = []
    with sleepers("rose", "vllm") as running:
        engines = engines_of(tmp_path, dict(running))
        assert engines.take_turns(TURNS, take, rows, pause=True, deadline=float("inf")) == 0
        assert not is_stopped(running["rose"].pid)
    assert engines.failed == {"vllm": "it died"}
    assert [(row["backend"], row["number"]) for row in rows] == [
        ("rose", 0),
        ("vllm", 0),
        ("rose", 1),
        ("rose", 2),
    ]


def test_one_that_does_not_wake_leaves_nothing_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sleeper: Sleeper) -> None:
        raise TimeoutError

    monkeypatch.setattr(Sleeper, "wake", fail)
    with sleepers("rose", "vllm") as running:
        engines = engines_of(tmp_path, running)
        with pytest.raises(TimeoutError):
            engines.take_turns(TURNS, fail, [], pause=True, deadline=float("inf"))  # type: ignore[arg-type]
        assert not any(is_stopped(engine.pid) for engine in running.values())


def test_turns_without_time_or_engines_are_counted(tmp_path: Path) -> None:
    def take(engine: Any, name: str, turn: Turn) -> dict[str, Any]:
        pytest.fail("there is no time")

    rows: list[dict[str, Any]] = []
    late = engines_of(tmp_path, {"rose": None})
    assert late.take_turns(TURNS, take, rows, pause=False, deadline=0.0) == 3
    nobody = engines_of(tmp_path, {})
    assert nobody.take_turns(TURNS, take, rows, pause=False, deadline=float("inf")) == 3
    assert rows == []
