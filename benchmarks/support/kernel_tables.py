"""The tables that benchmarks/kernels.py prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kernel_cases.case import ROSE


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print every row, then what was left out and what was lost."""
    copy = report["copy_bytes_per_s"]
    table = Table(title=f"{report['gpu']}, driver {report['driver']}, copy {copy / 1e12:.2f} TB/s")
    for name in ("case", "side", "p20 us", "p50 us", "p80 us", "GB/s", "of copy", "TFLOP/s", "x Rose"):
        table.add_column(name, justify="left" if name in ("case", "side") else "right", no_wrap=True)
    for row in report["rows"]:
        for side in sorted(row["sides"], key=lambda name: name != ROSE):
            table.add_row(row["case"] if side == ROSE else "", side, *cells(side, row["sides"][side]))
        table.add_section()
    console.print(table)
    for peer, why in report["missing_peers"].items():
        console.print(f"skipped: {peer}: {why}")
    for family, state in report["families"].items():
        if state["unproved_because"]:
            console.print(f"unproved, so not compared: {family}: {state['unproved_because']}")
    for row in report["rows"]:
        for side, figures in row["sides"].items():
            if "error" in figures:
                console.print(f"not timed: {row['case']}: {side}: {figures['error'][:300]}")
    for line in losses(report["rows"]):
        console.print(f"loss: {line}")


def brief(row: dict[str, Any]) -> str:
    """Return one line that shows how a long run proceeds."""
    sides = row["sides"].items()
    times = (
        f"{name} {side['p50_us']:.2f} us" if "p50_us" in side else f"{name} broke" for name, side in sides
    )
    return f"{row['case']}: {', '.join(times)}"


def cells(side: str, figures: dict[str, Any]) -> list[str]:
    """Return one side's columns."""
    if "error" in figures:
        return ["not timed"]
    flops = f"{figures['tflop_per_s']:.0f}" if figures["tflop_per_s"] else ""
    ratio = ""
    if side != ROSE:
        ratio = "unproved" if figures["times_rose"] is None else f"{figures['times_rose']:.2f}"
    times = (f"{figures[name]:,.2f}" for name in ("p20_us", "p50_us", "p80_us"))
    return [*times, f"{figures['gb_per_s']:,.0f}", f"{figures['copy_share']:.1%}", flops, ratio]


def losses(rows: list[dict[str, Any]]) -> list[str]:
    """Return where a peer is faster than Rose."""
    return [
        f"{row['case']}: {side} takes {figures['times_rose']:.2f} of Rose's time"
        for row in rows
        for side, figures in row["sides"].items()
        if (figures.get("times_rose") or 1.0) < 1.0
    ]
