"""benchmarks/arrivals.py end to end with Rose alone on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import arrivals
from tests.benchmarks.sleepers import Sleeper, is_stopped, sleepers


def test_a_quick_run_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new folder" / "arrivals.json"
    arguments = ["--quick", "--backends", "rose", "--repeats", "2", "--share", "0.25", "--json", str(path)]
    assert arrivals.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "arrivals"
    assert report["missing"] == report["failed"] == {}
    assert report["settings"]["pause"] is True
    rows = {row["scene"]: row for row in report["rows"]}
    assert set(rows) == {"capacity", "same load", "own load"}
    capacity = rows["capacity"]["request_throughput"]
    for scene in ("same load", "own load"):
        # Alone, Rose has the smallest capacity, too.
        assert rows[scene]["request_rate"] == pytest.approx(capacity / 4)
        # The last of 12 requests is due after 12 gaps, on average; then it still has to be served.
        assert rows[scene]["request_throughput"] < capacity
    for row in rows.values():
        assert row["backend"] == "rose"
        assert len(row["turns"]) == 2
        assert row["completed"] == 12
        assert 0 < row["p50_ttft_ms"] <= row["p90_ttft_ms"] <= row["p99_ttft_ms"] < row["p99_e2el_ms"]
    # Its own load is the same load: nothing is played twice.
    assert rows["own load"]["turns"] == rows["same load"]["turns"]
    assert [goal["name"] for goal in report["bars"]] == ["ITL p99 over its median, own load"]
    assert "own load" in capsys.readouterr().out


def test_a_rate_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.json"
    arguments = ["--quick", "--backends", "rose", "--repeats", "1", "--rate", "40", "--json", str(path)]
    assert arrivals.main(arguments) == 0
    rows = {row["scene"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["same load"]["request_rate"] == 40
    assert rows["own load"]["request_rate"] == pytest.approx(rows["capacity"]["request_throughput"] / 2)
    assert rows["own load"]["turns"] != rows["same load"]["turns"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--share", "0"], "--share: got 0.0, allowed is more than 0 and at most 1"),
        (["--rate", "0"], "--rate: got 0.0, allowed is more than 0"),
        (["--requests", "1"], "--requests: got 1, at least 2"),
        (["--repeats", "0"], "--repeats: got 0, at least 1"),
        (["--input-len", "9", "8"], "--input-len: got 9 8, allowed is 1 <= LOW <= HIGH"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    option: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        arrivals.parse_options(option)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("pause", [True, False])
def test_an_interrupt_keeps_the_turns_that_were_whole(monkeypatch: pytest.MonkeyPatch, pause: bool) -> None:
    asked: list[str] = []
    stopped: list[list[str]] = []

    def ask(sleeper: Sleeper, op: str, **fields: Any) -> dict[str, float]:
        asked.append(sleeper.name)
        stopped.append([name for name, engine in engines.items() if is_stopped(engine.pid)])
        if len(asked) == 4:
            raise KeyboardInterrupt
        return {"seconds": float(len(asked))}

    monkeypatch.setattr(Sleeper, "ask", ask, raising=False)
    with sleepers("rose", "vllm") as engines:
        pool = SimpleNamespace(workers=engines)
        contest = arrivals.Contest(pool, arrivals.parse_options(["--quick", *["--no-pause"] * (not pause)]))  # type: ignore[arg-type]
        monkeypatch.setattr(contest, "_workload", lambda seed: SimpleNamespace(as_json=dict))
        contest.run(float("inf"))
        assert not any(is_stopped(engine.pid) for engine in engines.values())
    assert asked == ["vllm", "rose", "rose", "vllm"]
    assert stopped == ([["rose"], ["vllm"], ["vllm"], ["rose"]] if pause else [[]] * 4)
    assert {side: len(runs) for side, runs in contest.runs.items()} == {
        (arrivals.CAPACITY, "rose"): 1,
        (arrivals.CAPACITY, "vllm"): 1,
    }
