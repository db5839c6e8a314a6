"""benchmarks/arrivals.py end to end with Rose alone on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import arrivals


def test_a_quick_run_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new folder" / "arrivals.json"
    arguments = ["--quick", "--backends", "rose", "--repeats", "2", "--share", "0.25", "--json", str(path)]
    assert arrivals.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "arrivals"
    assert report["missing"] == report["failed"] == {}
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


def test_an_interrupt_keeps_the_turns_that_were_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Worker:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, op: str, **fields: Any) -> dict[str, float]:
            asked.append(self.name)
            if len(asked) == 4:
                raise KeyboardInterrupt
            return {"seconds": float(len(asked))}

    pool = SimpleNamespace(workers={name: Worker(name) for name in ("rose", "vllm")})
    contest = arrivals.Contest(pool, arrivals.parse_options(["--quick"]))  # type: ignore[arg-type]
    monkeypatch.setattr(contest, "_workload", lambda seed: SimpleNamespace(as_json=dict))
    contest.run(float("inf"))
    assert len(asked) == 4
    assert {side: len(runs) for side, runs in contest.runs.items()} == {
        (arrivals.CAPACITY, "rose"): 1,
        (arrivals.CAPACITY, "vllm"): 1,
    }
