"""The matrix' table in docs/models.md, made from the verdicts of the latest run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.gpu_matrix.cases import ARCHITECTURES, CASES, Case

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "models.md"
SECTION = re.compile(r"(<!-- table: gpu_matrix -->\n).*?(<!-- end of table -->)", re.DOTALL)
_HEAD = (
    "",
    "Run on a GPU",
    "Requests",
    "Parted at near ties",
    "Mean error of log-probabilities, Rose / stock",
    "Preempted",
)


def read_results(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the verdict of each case, of the run that had it last."""
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def keep_results(verdicts: dict[str, dict[str, Any]], path: Path = RESULTS) -> None:
    """Put verdicts in place of earlier ones of the same cases, in the order of the cases."""
    known = read_results(path) | verdicts
    ordered = {name: known[name] for name in CASES if name in known}
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the table, one row for each case, run or not."""
    rows = [_HEAD, ("---",) * len(_HEAD), *(_row(case, results.get(case.name)) for case in CASES.values())]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows).replace("|  |", "| |")


def with_table(page: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the page's text with the table in its place."""
    changed, count = SECTION.subn(lambda found: found[1] + "\n" + table(results) + "\n" + found[2], page)
    assert count == 1, "docs/models.md has no place for the table"
    return changed


def _row(case: Case, verdict: dict[str, Any] | None) -> tuple[str, ...]:
    name = f"`{case.name}`" if case in ARCHITECTURES else case.name
    if verdict is None:
        return (name, "not yet", *[""] * (len(_HEAD) - 2))
    versions = verdict["versions"]
    where = f"vLLM {versions['vllm']}, {versions['device']}, {verdict['date']}"
    if verdict["outcome"] == "not run":
        return (name, f"not run: {'; '.join(verdict['complaints'])} ({where})", *[""] * (len(_HEAD) - 2))
    errors = verdict["mean_error"]
    return (
        name,
        f"{verdict['outcome']} ({where})",
        str(verdict["num_requests"]),
        str(verdict["num_parted"]),
        f"{errors['rose']:.1e} / {errors['stock']:.1e}",
        str(verdict["counts"].get("preemptions", 0)),
    )
