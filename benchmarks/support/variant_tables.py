"""The table of a benchmark that times variants of one job, each in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_variants(
    console: Console, rows: Sequence[dict[str, Any]], parts: Sequence[str], *, before: str, title: str
) -> None:
    """Print medians in microseconds, and how many times as long the variant ``before`` takes.

    Args:
        rows: ``batch``, and ``variants``: name -> part -> median, p10 and p90, ``total`` and maybe ``graph`` included.
    """
    has_graphs = any("graph" in figures for row in rows for figures in row["variants"].values())
    headings = [*parts, "total", f"{before} / this", *(["graph"] if has_graphs else [])]
    table = Table("batch", "variant", *headings, title=title)
    for row in rows:
        before_us = row["variants"][before]["total"]["median"]
        for name, figures in row["variants"].items():
            total = figures["total"]
            cells = [f"{figures[part]['median']:,.0f}" for part in parts]
            cells.append(f"{total['median']:,.0f} ({total['p10']:,.0f} - {total['p90']:,.0f})")
            cells.append(f"{before_us / total['median']:.1f}")
            if has_graphs:
                cells.append(f"{figures['graph']['median']:,.0f}" if "graph" in figures else "")
            table.add_row(str(row["batch"]), name, *cells)
        table.add_section()
    console.print(table)
