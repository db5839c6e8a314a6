"""benchmarks/offline_compare.py end to end on the embedded model beside an engine that answers at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import offline_compare
from benchmarks.offline_compare import Case
from benchmarks.reports.engines import goal_bars, losses
from benchmarks.support.workload import Requests
from tests.benchmarks.fake_engine import write_fake_sglang


def test_a_quick_run_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new folder" / "compare.json"
    site = write_fake_sglang(tmp_path / "site")
    arguments = [
        "--quick",
        "--backends",
        "rose",
        "sglang",
        "--compare-run-ahead",
        "--repeats",
        "2",
        "--cases",
        "greedy",
        "--batches",
        "4",
        "--python-path",
        f"sglang={site}",
        "--json",
        str(path),
    ]
    assert offline_compare.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "offline_compare"
    assert {"python", "torch"} <= report["versions"].keys()
    assert report["settings"]["model"] == "models/tiny-gpt2"
    assert report["settings"]["pause"] is True
    sides = ["rose", "sglang", "rose, run_ahead off"]
    assert set(report["backends"]) == set(sides)
    assert report["backends"]["rose"]["parts"]["prefix_cache"] == "on"
    assert report["missing"] == report["failed"] == {}
    cases = {row["case"] for row in report["rows"]}
    assert len(cases) == 1 + 1 + 1
    assert {(row["case"], row["backend"]) for row in report["rows"]} == {(c, s) for c in cases for s in sides}
    for row in report["rows"]:
        assert {figure["samples"] for figure in row["figures"].values()} == {2}
        if row["backend"] == "rose":
            assert row["figures"][row["figure"]]["median"] > 0
    assert report["losses"] == losses(report["rows"]) != []
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        f"Slower in {len(report['losses'])} of 3 comparisons:" in printed
        and "Rose behind SGLang: " in printed
    )


def test_an_engine_that_dies_half_way_is_named_and_its_figures_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "compare.json"
    site = write_fake_sglang(tmp_path / "site")
    # Seven calls warm up, three each are for a decode case: it dies in the second one.
    arguments = [
        "--quick",
        "--backends",
        "sglang",
        "--python-path",
        f"sglang={site}",
        "--repeats",
        "1",
        "--env",
        "sglang=FAKE_CALLS=11",
        "--json",
        str(path),
    ]
    assert offline_compare.main(arguments) == 1
    report = json.loads(path.read_text())
    assert "the process ended" in report["failed"]["sglang"]
    assert [row["case"] for row in report["rows"]] == ["step, 1 requests, greedy"]
    assert "something terrible" in capsys.readouterr().out


def test_turns_without_time_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = write_fake_sglang(tmp_path / "site")
    arguments = ["--quick", "--backends", "sglang", "--python-path", f"sglang={site}", "--repeats", "2"]
    assert offline_compare.main([*arguments, "--max-seconds", "0.001"]) == 1
    assert "out of time: 14 turns were not taken" in capsys.readouterr().out


def fake_row(scene: str, backend: str, value: float, **changes: Any) -> dict[str, Any]:
    figure = "step_ms" if scene == "decode" else "duration"
    row = {
        "case": scene,
        "scene": scene,
        "num_requests": 256,
        "input_len": [512, 512],
        "output_len": [128, 128],
        "mode": "greedy",
        "backend": backend,
        "figure": figure,
        "figures": {figure: {"median": value}},
    }
    return {**row, **changes}


def test_losses_name_every_faster_peer() -> None:
    rows = [
        fake_row("decode", "rose", 2.0),
        fake_row("decode", "vllm", 3.0),
        fake_row("decode", "sglang", 1.0),
        fake_row("mixed", "rose-in-vllm", 4.0),
        fake_row("mixed", "vllm", 2.0),
        fake_row("mixed", "rose, fused_mlp off", 1.0),
    ]
    assert losses(rows) == [
        {"case": "decode", "backend": "rose", "peer": "sglang", "times": 2.0},
        {"case": "mixed", "backend": "rose-in-vllm", "peer": "vllm", "times": 2.0},
    ]


def test_goals_are_those_of_the_standalone_engine() -> None:
    rows = [
        fake_row("decode", "rose", 0.96),
        fake_row("decode", "rose", 1.0, mode="top-k 50, top-p 0.9"),
        fake_row("decode", "vllm", 0.1),
        fake_row("offline", "rose", 0.2),
        fake_row("offline", "rose", 0.1, num_requests=8),
        fake_row("mixed", "rose", 9.0),
        fake_row("mixed", "vllm", 18.1),
        fake_row("mixed", "sglang", 14.0),
    ]
    bars = {goal["name"]: (goal["value"], goal["met"]) for goal in goal_bars(rows)}
    assert bars == {
        "step, 256 requests": (0.96, False),
        "sampling over greedy, 256 requests": (1.0 / 0.96, True),
        "offline, 256 x 512 / 128 new": (0.2, True),
        "rose over vllm, goal: mixed": (9.0 / 18.1, True),
        "rose over sglang, goal: mixed": (9.0 / 14.0, False),
    }


class Clockwork:
    """Takes 2 s for every prompt batch, and 10 ms for each token of the longest answer."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def run(self, requests: Requests, sampling: Any) -> dict[str, Any]:
        self.prompts.append(requests.prompts[0])
        return {"seconds": 2 + 0.01 * max(requests.output_lens), "output_tokens": 60}


def test_a_step_is_what_one_more_token_takes() -> None:
    worker = Clockwork()
    case = Case("decode", 4, (16, 16), (256, 256), "greedy", short_output_len=16)
    assert case.run(worker, 3, 1000)["step_ms"] == pytest.approx(10.0)
    assert case.run(worker, 4, 1000)["step_ms"] == pytest.approx(10.0)
    assert len(set(map(tuple, worker.prompts))) == 4


def test_throughput_counts_what_was_done() -> None:
    figures = Case("mixed", 6, (5, 5), (100, 100), "greedy").run(Clockwork(), 0, 1000)
    assert figures == {
        "duration": pytest.approx(3.0),
        "request_throughput": pytest.approx(2.0),
        "output_throughput": pytest.approx(20.0),
        "total_token_throughput": pytest.approx(30.0),
    }


def test_the_block_manager_is_switched_off_where_there_is_another() -> None:
    options = offline_compare.parse_options(
        ["--quick", "--backends", "rose", "--compare-block-manager", "--compare-fused-mlp"]
    )
    assert offline_compare.Offline.sides(options) == {
        "rose": ("rose", []),
        "rose, fused_mlp off": ("rose", ["fused_mlp"]),
        "rose-in-vllm, block_manager off": ("rose-in-vllm", ["block_manager"]),
    }


def test_a_scene_longer_than_the_model_is_refused(tiny_model_path: Path) -> None:
    arguments = [
        "--scenes",
        "nano-vllm",
        "--backends",
        "rose",
        "--device",
        "cpu",
        "--model",
        str(tiny_model_path),
    ]
    with pytest.raises(
        SystemExit, match="--scenes, --offline: the longest request has 2,048 tokens; the model takes 1,024"
    ):
        offline_compare.main(arguments)
