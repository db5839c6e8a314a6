"""The README's table of kernels: the best peer, every loss, and nothing unproved."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kernel_cases import FAMILIES, cases_of
from benchmarks.reports import parts as readme_kernels


def kernel_report(**changes: Any) -> dict[str, Any]:
    def sides(peer_us: float) -> dict[str, Any]:
        return {
            "Rose": {"p50_us": 20.0, "copy_share": 0.5, "tflop_per_s": 77.0},
            "slow": {"p50_us": 90.0, "times_rose": 4.5},
            "best": {"p50_us": peer_us, "times_rose": peer_us / 20.0},
        }

    rows = [
        {"case": name, "family": name.split()[0], "sides": sides(30.0)}
        for name in readme_kernels.KERNEL_ROWS.values()
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


def test_kernels_are_compared_with_the_best_peer_and_losses_are_named() -> None:
    text = readme_kernels.kernels_table(kernel_report())
    (label, name), *_ = readme_kernels.KERNEL_ROWS.items()
    assert f"| {label} | 20 µs | 50% of copy | 19 µs, best | 0.95x |" in text
    assert text.count("| 20 µs | 77 TFLOP/s | 30 µs, best | 1.50x |") == 3
    assert text.count("| 20 µs | 50% of copy | 30 µs, best | 1.50x |") == len(readme_kernels.KERNEL_ROWS) - 4
    assert "some GPU (copy 4.10 TB/s), torch 2.11; `python -m benchmarks.kernels --prove" in text
    assert (
        f"Slower than a peer in 1 of {len(readme_kernels.KERNEL_ROWS)} cases: {name} (0.95x, best)." in text
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"families": {"decode": {"unproved_because": "one failed"}}}, "decode is unproved: one failed"),
        ({"missing_peers": {"best": "no module"}}, "not every peer was timed: best (no module)"),
        (
            {"rows": [{"case": "work", "sides": {"Rose": {}, "best": {"error": "broke"}}}]},
            "not every peer was timed: best in work (broke)",
        ),
    ],
)
def test_what_is_unproved_or_incomplete_is_not_published(changes: dict[str, Any], message: str) -> None:
    assert readme_kernels.kernel_problems(kernel_report()) == []
    assert readme_kernels.kernel_problems(kernel_report(**changes)) == [message]


def test_every_kernel_row_is_a_case() -> None:
    names = {case.name for family in FAMILIES for case in cases_of(family)}
    assert set(readme_kernels.KERNEL_ROWS.values()) <= names
