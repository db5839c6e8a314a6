"""benchmarks/vllm_scheduler.py end to end: every figure of every side, and goals that can be missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from benchmarks import vllm_scheduler

PARTS = {"schedule", "update_from_output", "both"}


def test_a_quick_run_writes_what_it_promises(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    arguments = ["--quick", "--batches", "1", "6", "--repeats", "2", "--json", str(path)]
    assert vllm_scheduler.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["settings"] == {"batches": [1, 6], "block_size": 16, "repeats": 2, "quick": True}
    assert report["scenes"].keys() == vllm_scheduler.NUM_STEPS.keys()
    for scene, batches in report["scenes"].items():
        assert list(batches) == ["1", "6"]
        for sides in batches.values():
            assert set(sides) == {"rose", "rose_unbatched", "stock"}
            for figures in sides.values():
                assert figures.keys() == PARTS
                # Steps that differ from one another count as one figure per run.
                expected = 2 * 12 if scene == "steady" else 2
                assert {figure["samples"] for figure in figures.values()} == {expected}
    assert len(report["bars"]) == 6


def test_goals_are_missed_where_rose_is_slower() -> None:
    def side(both: float) -> dict[str, dict[str, float]]:
        return {"both": {"median": both}}

    scenes = {"steady": {"256": {"rose": side(600.0), "stock": side(500.0)}}}
    assert [entry["met"] for entry in vllm_scheduler.judge(scenes)] == [False, False]
    scenes["steady"]["256"]["rose"] = side(400.0)
    assert [entry["met"] for entry in vllm_scheduler.judge(scenes)] == [True, True]
