"""The published table of kernels: the best peer, every loss, and nothing unproved."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report import problems
from benchmarks.reports.parts import kernels_table


def kernel_report(**changes: Any) -> dict[str, Any]:
    def sides(peer_us: float) -> dict[str, Any]:
        return {
            "Rose": {"p50_us": 20.0, "copy_share": 0.5, "tflop_per_s": 77.0},
            "slow": {"p50_us": 90.0, "times_rose": 4.5},
            "best": {"p50_us": peer_us, "times_rose": peer_us / 20.0},
        }

    rows = [
        {"case": name, "family": name.split()[0], "sides": sides(30.0)}
        for name in ("decode A", "decode B", "prefill A")
    ]
    rows[0]["sides"] = sides(19.0)
    report = {
        "gpu": "some GPU",
        "driver": "1.2",
        "copy_bytes_per_s": 4.1e12,
        "versions": {"torch": "2.11", "python": "3.12"},
        "missing_peers": {},
        "families": {"decode": {"unproved_because": None}},
        "rows": rows,
    }
    return {**report, **changes}


def test_kernels_are_compared_with_the_best_peer_and_losses_are_named() -> None:
    text = kernels_table(kernel_report())
    assert "| decode A | 20 µs | 50% of copy | 19 µs, best | 0.95x |" in text
    assert "| decode B | 20 µs | 50% of copy | 30 µs, best | 1.50x |" in text
    assert "| prefill A | 20 µs | 77 TFLOP/s | 30 µs, best | 1.50x |" in text
    source = (
        "Medians, some GPU, driver 1.2, copy 4.10 TB/s; torch 2.11; `python -m benchmarks.kernels --prove`."
    )
    assert source in text
    assert text.endswith("Slower in 1 of 3 cases:\n\n- behind best: decode A (0.95x)")


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
    assert problems(kernel_report()) == []
    assert problems(kernel_report(**changes)) == [message]
