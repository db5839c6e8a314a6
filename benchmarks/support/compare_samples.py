"""What turns of ``offline_compare`` have shown, as it is kept and as it is written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.support.compare_scenes import Case
from benchmarks.support.timing import spread

Samples = dict[tuple[Case, str], list[dict[str, float]]]
"""Case and side -> the figures of each turn."""


def samples_of(report: dict[str, Any] | None, todo: Sequence[Case]) -> Samples:
    """Return what an earlier report holds.

    Raises:
        SystemExit: a case that this run has not.
    """
    by_name = {case.name: case for case in todo}
    rows = report["rows"] if report else []
    for row in rows:
        if row["case"] not in by_name:
            raise SystemExit(f"--resume: case: the file has {row['case']!r}, this run has not")
    return {(by_name[row["case"]], row["backend"]): row["turns"] for row in rows}


def rows_of(samples: Samples) -> list[dict[str, Any]]:
    """Return one row per case and side."""
    return [
        {
            "case": case.name,
            "scene": case.scene,
            "num_requests": case.num_requests,
            "input_len": list(case.input_len),
            "output_len": list(case.output_len),
            "mode": case.mode,
            "backend": side,
            "figure": case.figure,
            "figures": {name: spread([run[name] for run in runs]) for name in runs[0]},
            "turns": runs,
        }
        for (case, side), runs in samples.items()
    ]
