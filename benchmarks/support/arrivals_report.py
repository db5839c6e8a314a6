"""Verdicts and tables of ``arrivals``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.compare_report import print_bars
from benchmarks.support.report import bar
from benchmarks.support.streaming import METRICS, PERCENTILES

MAX_ITL_TAIL = 3.0
MAX_TTFT_SHARE = 1 / 3


def goal_bars(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return Rose's goals: an even stream under its own load, and a quick first token under vLLM's."""
    by_key = {(row["scene"], row["backend"]): row for row in rows}
    bars = []
    own = by_key.get(("own load", "rose"))
    if own is not None:
        tail = own["p99_itl_ms"] / own["p50_itl_ms"]
        bars.append(bar("ITL p99 over its median, own load", tail, MAX_ITL_TAIL, "x"))
    rose, vllm = by_key.get(("same load", "rose")), by_key.get(("same load", "vllm"))
    if rose is not None and vllm is not None:
        share = rose["p50_ttft_ms"] / vllm["p50_ttft_ms"]
        bars.append(bar("TTFT p50 over vLLM's, same load", share, MAX_TTFT_SHARE, "x"))
        for metric in METRICS:
            for percentile in PERCENTILES:
                name = f"p{percentile}_{metric}_ms"
                label = f"{metric.upper()} p{percentile} over vLLM's, same load"
                if (metric, percentile) != ("ttft", 50):
                    bars.append(bar(label, rose[name] / vllm[name], 1.0, "x"))
    return bars


def print_arrivals(console: Console, report: dict[str, Any]) -> None:
    """Print one line per scene and engine, then goals, and who is not in it."""
    settings = report["settings"]
    table = Table(
        title=f"{report['device']}, {settings['model']}, {settings['requests']} requests a turn, milliseconds"
    )
    table.add_column("scene")
    table.add_column("backend")
    percentiles = "/".join(f"p{percentile}" for percentile in PERCENTILES)
    for name in ("requests/s", "output tok/s", *(f"{metric.upper()} {percentiles}" for metric in METRICS)):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        rate = row["request_rate"] or row["request_throughput"]
        cells = (
            " / ".join(f"{row[f'p{percentile}_{metric}_ms']:.2f}" for percentile in PERCENTILES)
            for metric in METRICS
        )
        table.add_row(
            row["scene"], row["backend"], f"{rate:,.0f}", f"{row['output_throughput']:,.0f}", *cells
        )
    console.print(table)
    print_bars(console, report["bars"])
    for label in ("missing", "failed"):
        for name, why in report[label].items():
            console.print(f"{label}: {name}: {why}", markup=False)
