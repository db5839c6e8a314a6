"""A batch that changes its kind: what is timed, and when the number of drafts has followed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import draft_changes
from benchmarks.draft_changes import WINDOW, steps_to_change
from benchmarks.reports import figures


def test_three_sides_decode_the_same_kinds_of_text(
    run_benchmark: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(draft_changes, "RATES", ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0)))
    report = run_benchmark(draft_changes.main, "--quick --device cpu --requests 3 --steps 20")
    points = report["sides"]
    assert points.keys() == draft_changes.SIDES.keys()
    assert all([point["step"] for point in side] == [0, 10, 20, 30] for side in points.values())
    assert {point["drafts"] for point in points["all"]} == {3.0}
    assert {point["drafts"] for point in points["none"]} == {0.0}
    assert all(point["tokens_per_s"] > 0 for side in points.values() for point in side)
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib (the bench or dev extra)")
    (path,) = figures.draw(report, "changes", tmp_path)
    assert path.name == "changes.svg" and figures.is_drawn_from(path, report)


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ([3.0] * 10 + [0.0] * 10 + [3.0] * 10, [0, 0]),
        # Trials are no change of mind, nor is one before.
        ([3.0] * 10 + [3.0, 1.0, 3.0, 3.0] + [0.0] * 4 + [3.0, 0.0] + [1.0] * 3 + [3.0] * 7, [40, 30]),
        ([3.0] * 30, [None, 0]),
    ],
)
def test_the_number_of_drafts_has_followed_where_it_stays(
    drafts: list[float], expected: list[int | None]
) -> None:
    points = [{"step": index * WINDOW, "drafts": number} for index, number in enumerate(drafts)]
    assert steps_to_change(points, 10 * WINDOW) == expected


def test_longer_texts_than_the_model_takes_are_refused(run_benchmark: Callable[..., Any]) -> None:
    with pytest.raises(SystemExit, match="--steps: a request has"):
        run_benchmark(draft_changes.main, "--quick --device cpu --steps 100000")
