"""Verdicts and tables of ``online_compare``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.compare_report import PEERS
from benchmarks.support.streaming import METRICS, PERCENTILES

Row = dict[str, Any]
Point = tuple[str, float, str]
"""Mode, scale and backend."""

FIGURES = tuple(f"p{share}_{metric}_ms" for metric in METRICS for share in PERCENTILES)


def points(rows: Iterable[Row]) -> dict[Point, Row]:
    """Return every figure's median over the turns of a point, and the number of ``turns``."""
    by_point: dict[Point, list[Row]] = {}
    for row in rows:
        by_point.setdefault((row["mode"], row["scale"], row["backend"]), []).append(row)
    names = (*FIGURES, "output_throughput", "request_throughput", "client_busy")
    return {
        point: {
            "turns": len(turns),
            "failed": sum(turn["failed"] for turn in turns),
            **{name: statistics.median(turn[name] for turn in turns) for name in names},
        }
        for point, turns in by_point.items()
    }


def losses(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return every figure at which Rose, in either host, was behind a peer."""
    figures = points(rows)
    found = []
    for (mode, scale, backend), rose in figures.items():
        for peer in PEERS.get(backend, ()):
            other = figures.get((mode, scale, peer))
            found += [
                {
                    "mode": mode,
                    "scale": scale,
                    "backend": backend,
                    "peer": peer,
                    "figure": name,
                    "rose": rose[name],
                    "peers": other[name],
                }
                for name in FIGURES
                if other is not None and rose[name] > other[name]
            ]
    return found


def print_online(console: Console, report: dict[str, Any]) -> None:
    """Print one line per point, then losses, and who is not in it."""
    trace = report["trace"]
    table = Table(
        title=f"{report['device']}, {trace['num_requests']} requests of {trace['source']}, milliseconds"
    )
    table.add_column("mode")
    table.add_column("scale", justify="right")
    table.add_column("backend")
    percentiles = "/".join(f"p{share}" for share in PERCENTILES)
    names = ("turns", "failed", "tok/s", "busy", *(f"{metric.upper()} {percentiles}" for metric in METRICS))
    for name in names:
        table.add_column(name, justify="right")
    figures = points(report["rows"])
    for (mode, scale, backend), row in sorted(figures.items(), key=lambda item: item[0][:2]):
        cells = (" / ".join(f"{row[f'p{p}_{metric}_ms']:.2f}" for p in PERCENTILES) for metric in METRICS)
        counts = (str(row["turns"]), str(row["failed"]))
        speed = (f"{row['output_throughput']:,.0f}", f"{row['client_busy']:.0%}")
        table.add_row(mode, f"{scale:g}", backend, *counts, *speed, *cells)
    console.print(table)
    if report["turns_left_out"]:
        console.print(f"out of time: {report['turns_left_out']} turns were not taken")
    for row in report["rows"]:
        for error in row["errors"][:1]:
            console.print(f"{row['backend']}, scale {row['scale']:g}: {error}", markup=False)
    for loss in report["losses"]:
        console.print(
            f"loss: {loss['backend']}, {loss['mode']}, scale {loss['scale']:g}: {loss['figure']} "
            f"{loss['rose']:.2f}, {loss['peer']} {loss['peers']:.2f}"
        )
    for label in ("missing", "failed"):
        for name, why in report[label].items():
            console.print(f"{label}: {name}: {why}", markup=False)
