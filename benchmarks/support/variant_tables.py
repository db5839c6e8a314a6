"""The table of a benchmark that times variants of one job, each in parts, and which variants lose to another."""

from __future__ import annotations

import itertools
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


def losses(rows: Sequence[dict[str, Any]], ours: Sequence[str]) -> list[dict[str, Any]]:
    """Return every case in which a variant of Rose took longer than one that stands before it.

    Args:
        rows: as in ``print_variants``.
        ours: the variants of Rose; all others stand before them.

    Returns:
        For each: ``batch``; ``figure``, "total" or "graph"; ``variant`` with its ``us``, and ``faster`` with its
        ``faster_us``: medians in microseconds.
    """
    found = []
    for row in rows:
        names = list(row["variants"])
        pairs = [(later, earlier) for earlier, later in itertools.combinations(names, 2) if later in ours]
        for name, faster in pairs:
            sides = row["variants"][name], row["variants"][faster]
            for figure in ("total", "graph"):
                if all(figure in side for side in sides):
                    us, faster_us = (side[figure]["median"] for side in sides)
                    if us > faster_us:
                        loss = {"batch": row["batch"], "figure": figure, "variant": name, "us": us}
                        found.append({**loss, "faster": faster, "faster_us": faster_us})
    return found


def print_losses(rows: Sequence[dict[str, Any]]) -> None:
    """Print what ``losses`` found, a line each."""
    for loss in rows:
        print(
            f"batch {loss['batch']}, {loss['figure']}: {loss['variant']} {loss['us']:,.0f} us, "
            f"{loss['faster']} {loss['faster_us']:,.0f} us"
        )
