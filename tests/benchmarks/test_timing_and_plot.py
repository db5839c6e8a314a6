"""The benchmarks' own arithmetic: spreads, alternation, goals, and the curves that are drawn."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reports import figures
from benchmarks.reports.figures import is_drawn_from
from benchmarks.support import run_facts, timing


def test_a_spread_is_of_the_samples() -> None:
    assert timing.spread([3.0, 1.0, 2.0, 5.0, 4.0]) == {
        "median": 3.0,
        "p10": pytest.approx(1.4),
        "p90": pytest.approx(4.6),
        "min": 1.0,
        "samples": 5,
    }


def test_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str) -> Any:
        def run() -> dict[str, list[float]]:
            order.append(name)
            return {"us": [float(len(order))]}

        return run

    samples = timing.alternate({"a": side("a"), "b": side("b")}, 3)
    assert order == ["a", "b"] * 3
    assert samples == {"a": {"us": [1.0, 3.0, 5.0]}, "b": {"us": [2.0, 4.0, 6.0]}}


def test_garbage_waits_and_the_process_stays_on_one_core() -> None:
    with timing.no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    core = timing.pin_to_one_core()
    assert os.sched_getaffinity(0) == {core}
    assert run_facts.run_facts(core)["machine"]["pinned_to_core"] == core


@pytest.mark.parametrize(
    ("value", "at_least", "met"), [(40, False, True), (41, False, False), (40, True, True), (39, True, False)]
)
def test_a_goal_is_met_at_its_limit(value: float, at_least: bool, met: bool) -> None:
    assert run_facts.bar("a", value, 40, "us", at_least=at_least)["met"] is met


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/some/where/a.py", "--quick", "--json", "/tmp/out.json", "--rows", "3"], "--quick --rows 3"),
        (["a.py", "--json", "out.json"], ""),
        (["a.py", "--dtype", "float16"], "--dtype float16"),
        (["a.py", "--proofs", "/tmp/proofs", "--prove", "--commit", "1ca9133"], "--prove"),
    ],
)
def test_the_command_can_be_repeated_anywhere(arguments: list[str], expected: str) -> None:
    assert run_facts.repeatable_command(arguments) == f"python -m benchmarks.a {expected}".strip()


def a_report() -> dict[str, Any]:
    def point(axis: str, value: int, side: str, median: float) -> dict[str, Any]:
        figure = {"median": median, "p10": median - 1, "p90": median + 1}
        return {axis: value, "side": side, "whole_block_us_per_row": figure}

    skipped = {"num_blocks": 10_000, "side": "stock", "skipped": "needs more memory"}
    return {
        "benchmark": "block_manager",
        "machine": {"cpu": "a processor"},
        "settings": {"rows": 256, "block_size": 16},
        "scenes": {
            "pool_size": [
                point("num_blocks", 10_000, "rose_core", 3.0),
                point("num_blocks", 1000, "rose_core", 2.0),
                point("num_blocks", 1000, "stock", 9.0),
                skipped,
            ],
            "sequence_length": [point("num_tokens", 16, "rose_in_vllm", 4.0)],
        },
    }


def test_curves_are_sorted_and_leave_out_what_was_skipped() -> None:
    stock = figures.cost_curve(a_report(), "pool_size", "stock")
    assert (stock["x"], stock["median"]) == ([1000], [9.0])
    core = figures.cost_curve(a_report(), "pool_size", "rose_core")
    assert (core["x"], core["median"]) == ([1000, 10_000], [2.0, 3.0])
    assert (core["p10"], core["p90"]) == ([1.0, 2.0], [3.0, 4.0])
    in_vllm = figures.cost_curve(a_report(), "sequence_length", "rose_in_vllm")
    assert in_vllm["x"] == [16]


def test_pictures_are_drawn_on_a_light_ground_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib (the bench or dev extra)")
    (path,) = figures.draw(a_report(), "managers", tmp_path / "figures")
    text = path.read_text()
    assert "</svg>" in text and path.name == "managers_cost.svg"
    # The whole picture's rectangle comes first.
    assert re.findall(r"style=\"fill: (\S+)\"", text)[0] == figures.GROUND
    assert is_drawn_from(path, a_report())
    assert not is_drawn_from(path, {**a_report(), "settings": {"rows": 255}})
