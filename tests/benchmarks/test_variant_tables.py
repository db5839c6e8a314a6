"""The table of variants: medians in parts, the spread of totals, and graphs where any was timed."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from benchmarks.support.variant_tables import print_variants


def spread(us: float) -> dict[str, float]:
    return {"median": us, "p10": us - 1, "p90": us + 1}


@pytest.mark.parametrize("has_graph", [True, False])
def test_totals_are_compared_with_the_variant_before(has_graph: bool) -> None:
    slow: dict[str, Any] = {"plan": spread(100), "total": spread(3000)}
    fast = {"plan": spread(20), "total": spread(1200), **({"graph": spread(70)} if has_graph else {})}
    console = Console(width=120, record=True, file=io.StringIO())
    row = {"batch": 8, "variants": {"loop": slow, "batched": fast}}
    print_variants(console, [row], ["plan"], before="loop", title="A title")
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    graphs = (["", "70"]) if has_graph else None
    expected = [
        ["8", "loop", "100", "3,000 (2,999 - 3,001)", "1.0"],
        ["8", "batched", "20", "1,200 (1,199 - 1,201)", "2.5"],
    ]
    assert [cells for cells in lines if cells] == [
        [*cells, graphs[index]] if graphs else cells for index, cells in enumerate(expected)
    ]
