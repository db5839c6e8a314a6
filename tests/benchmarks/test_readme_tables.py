"""The README's tables are those that the committed results make."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme_tables
from benchmarks.kernel_cases import FAMILIES


def test_readme_and_results_agree() -> None:
    text = readme_tables.README.read_text()
    assert readme_tables.rewritten(text) == text


def test_a_changed_figure_is_noticed() -> None:
    text = readme_tables.README.read_text()
    figure = readme_tables.block_manager().split(" µs")[0].split("| ")[-1]
    assert readme_tables.rewritten(text.replace(f"{figure} µs", "0 µs")) == text
    assert text.replace(f"{figure} µs", "0 µs") != text


def test_a_missing_table_is_named() -> None:
    with pytest.raises(SystemExit, match="table block_manager: expected once, found 0 times"):
        readme_tables.rewritten("no tables here")


def kernel_report(**changes: Any) -> dict[str, Any]:
    def sides(peer_us: float) -> dict[str, Any]:
        return {
            "Rose": {"p50_us": 20.0, "copy_share": 0.5, "tflop_per_s": 77.0},
            "slow": {"p50_us": 90.0, "times_rose": 4.5},
            "best": {"p50_us": peer_us, "times_rose": peer_us / 20.0},
        }

    rows = [
        {"case": name, "family": name.split()[0], "sides": sides(30.0)}
        for name in readme_tables.KERNEL_ROWS.values()
    ]
    rows[0]["sides"] = sides(19.0)
    report = {
        "gpu": "some GPU",
        "copy_bytes_per_s": 4.1e12,
        "versions": {"torch": "2.11", "python": "3.12"},
        "missing_peers": {},
        "families": {"decode": {"unproved_because": None}},
        "rows": rows,
    }
    return {**report, **changes}


def kernel_table(folder: Path, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "h200").mkdir(exist_ok=True)
    (folder / "h200" / "kernels.json").write_text(json.dumps(report))
    monkeypatch.setattr(readme_tables, "RESULTS", folder)
    return readme_tables.kernels()


def test_kernels_are_compared_with_the_best_peer_and_losses_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = kernel_table(tmp_path, kernel_report(), monkeypatch)
    (label, name), *_ = readme_tables.KERNEL_ROWS.items()
    assert f"| {label} | 20 µs | 50% of copy | 19 µs, best | 0.95x |" in text
    assert text.count("| 20 µs | 77 TFLOP/s | 30 µs, best | 1.50x |") == 3
    assert text.count("| 20 µs | 50% of copy | 30 µs, best | 1.50x |") == len(readme_tables.KERNEL_ROWS) - 4
    assert "some GPU (copy 4.10 TB/s), torch 2.11; `python -m benchmarks.kernels --prove" in text
    assert f"Slower than a peer in 1 of {len(readme_tables.KERNEL_ROWS)} cases: {name} (0.95x, best)." in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"families": {"decode": {"unproved_because": "one failed"}}}, "decode is unproved: one failed"),
        ({"missing_peers": {"best": "no module"}}, r"not every peer was timed: best \(no module\)"),
        (
            {"rows": [{"case": "work", "sides": {"Rose": {}, "best": {"error": "broke"}}}]},
            r"not every peer was timed: best in work \(broke\)",
        ),
    ],
)
def test_what_is_unproved_or_incomplete_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        kernel_table(tmp_path, kernel_report(**changes), monkeypatch)


def test_every_kernel_row_is_a_case() -> None:
    modules = (importlib.import_module(f"benchmarks.kernel_cases.{family}") for family in FAMILIES)
    assert set(readme_tables.KERNEL_ROWS.values()) <= {
        case.name for module in modules for case in module.cases()
    }
