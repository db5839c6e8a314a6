"""The table of variants: medians in parts, totals, graphs where any was timed; and which variants lose."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from benchmarks.support.variant_tables import losses, print_losses, print_variants


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


def test_a_loss_is_every_variant_of_rose_that_one_before_it_beats(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def figures(total: float, graph: float) -> dict[str, Any]:
        return {"total": spread(total), "graph": spread(graph)}

    variants = {"loop": {"total": spread(3.0)}, "slower": {"total": spread(7.0)}, "write": figures(4.0, 2.0)}
    rows: list[dict[str, Any]] = [
        {"batch": 1, "variants": {**variants, "fused": figures(5.0, 1.0)}},
        {"batch": 2, "variants": {**variants, "fused": figures(2.0, 2.5)}},
    ]
    found = losses(rows, ("write", "fused"))
    assert [(loss["batch"], loss["figure"], loss["variant"], loss["faster"]) for loss in found] == [
        (1, "total", "write", "loop"), (1, "total", "fused", "loop"), (1, "total", "fused", "write"),
        (2, "total", "write", "loop"), (2, "graph", "fused", "write"),
    ]  # fmt: skip
    assert (found[0]["us"], found[0]["faster_us"]) == (4.0, 3.0)
    print_losses(found[:1])
    assert capsys.readouterr().out == "batch 1, total: write 4 us, loop 3 us\n"
