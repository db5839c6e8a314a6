"""Tables of ``vllm_serving``: medians over turns, what Rose's are times vLLM's own, and where Rose loses."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.report import bar
from benchmarks.support.request_sets import SHARED_PREFIX

COMPARED = (
    "p50_ttft_ms",
    "p99_ttft_ms",
    "p50_tpot_ms",
    "p99_tpot_ms",
    "output_throughput",
    "prefilled_tokens",
)

OUTPUTS_APART = "rose-in-vllm, joined_outputs off"
"""Name of the server that tells what ``joined_outputs`` is worth."""

MIN_THROUGHPUT_TIMES = 1.3
MAX_EXTRA_START_UP_S = 5.0

Row = dict[str, Any]


def compare(rows: list[Row]) -> list[Row]:
    """Return a row for each set of requests and rate.

    It has the median of each of ``COMPARED`` for each backend, and under "times" Rose's median over vLLM's where both
    took part.
    """
    turns: dict[tuple[str, float | None], dict[str, list[Row]]] = {}
    for row in rows:
        turns.setdefault((row["set"], row["rate"]), {}).setdefault(row["backend"], []).append(row)
    compared = []
    for (name, rate), sides in turns.items():
        medians = {
            backend: {figure: statistics.median(row[figure] for row in side) for figure in COMPARED}
            for backend, side in sides.items()
        }
        row: Row = {"set": name, "rate": rate, "medians": medians}
        if {"rose-in-vllm", "vllm"} <= medians.keys():
            rose, stock = medians["rose-in-vllm"], medians["vllm"]
            row["times"] = {
                figure: rose[figure] / stock[figure] if stock[figure] else None for figure in COMPARED
            }
        compared.append(row)
    return compared


def bars(comparison: list[Row], start_up_s: dict[str, float]) -> list[Row]:
    """Return every goal of Rose inside vLLM that was measured: nothing slower, and more throughput at saturation."""
    found = []
    for row in comparison:
        if "times" not in row:
            continue
        name, times, medians = row["set"], row["times"], row["medians"]
        if row["rate"] is None:
            throughput = times["output_throughput"]
            found.append(
                bar(f"{name}, all at once: throughput", throughput, MIN_THROUGHPUT_TIMES, "x", at_least=True)
            )
        else:
            found += [
                bar(f"{name}, {row['rate']:.1f} a second: {figure}", times[figure], 1.0, "x")
                for figure in COMPARED
                if figure.endswith("_ms") and times[figure] is not None
            ]
        if name == SHARED_PREFIX.name:
            saved = medians["vllm"]["prefilled_tokens"] - medians["rose-in-vllm"]["prefilled_tokens"]
            found.append(bar(f"{name}: fewer tokens prefilled", saved, 1, "tokens", at_least=True))
    if start_up_s.keys() >= {"rose-in-vllm", "vllm"}:
        extra = start_up_s["rose-in-vllm"] - start_up_s["vllm"]
        found.append(bar("start-up, longer than vLLM's", extra, MAX_EXTRA_START_UP_S, "s"))
    return found


def losses(comparison: list[Row]) -> list[Row]:
    """Return every figure of ``COMPARED`` in which Rose's median is worse than that of another server.

    Returns:
        For each: ``set``, ``rate``, ``figure``, ``peer``, and the medians ``rose`` and ``peers``.
    """
    found = []
    for row in comparison:
        rose = row["medians"].get("rose-in-vllm", {})
        for peer in ("vllm", OUTPUTS_APART):
            for figure in COMPARED if rose and peer in row["medians"] else ():
                ours, theirs = rose[figure], row["medians"][peer][figure]
                if ours < theirs if figure == "output_throughput" else ours > theirs:
                    loss = {"set": row["set"], "rate": row["rate"], "figure": figure, "peer": peer}
                    found.append({**loss, "rose": ours, "peers": theirs})
    return found


def print_report(console: Console, report: Row) -> None:
    """Print medians, failures, and how long the servers took to start."""
    table = Table(title=f"{report['device']}, medians of at most {report['settings']['repeats']} turns")
    for name in ("set", "requests/s", "backend"):
        table.add_column(name)
    for figure in COMPARED:
        table.add_column(figure, justify="right")
    for row in report["comparison"]:
        rate = "all at once" if row["rate"] is None else f"{row['rate']:.1f}"
        for backend, medians in row["medians"].items():
            table.add_row(row["set"], rate, backend, *(f"{medians[figure]:,.2f}" for figure in COMPARED))
        if times := row.get("times"):
            cells = ("-" if times[figure] is None else f"{times[figure]:.3f}" for figure in COMPARED)
            table.add_row("", "", "times", *cells, end_section=True)
    console.print(table)
    starts = ", ".join(f"{backend} {seconds:.1f} s" for backend, seconds in report["start_up_s"].items())
    console.print(f"start-up: {starts}")
    busiest = max((row["client_busy"] for row in report["rows"]), default=0.0)
    console.print(f"busiest client: {busiest:.0%} of a core")
    for backend in report["start_up_s"]:
        shares = (row["server_busy"] for row in report["rows"] if row["backend"] == backend)
        busy = max(shares, key=_total, default={})
        cores = ", ".join(f"{name} {share:.2f}" for name, share in busy.items() if share > 0.05)
        console.print(f"{backend}, cores at most busy: {cores}")
    if report["turns_left_out"]:
        console.print(f"out of time: {report['turns_left_out']} turns were not taken")
    for goal in report["bars"]:
        if not goal["met"]:
            sign = "at least" if goal["at_least"] else "at most"
            console.print(
                f"missed: {goal['name']}: {goal['value']:.3f} {goal['unit']}, {sign} {goal['limit']}",
                markup=False,
            )
    for loss in losses(report["comparison"]):
        rate = "all at once" if loss["rate"] is None else f"{loss['rate']:.1f} a second"
        console.print(
            f"loss: {loss['set']}, {rate}, {loss['figure']}: {loss['rose']:,.2f}, {loss['peer']} {loss['peers']:,.2f}",
            markup=False,
        )
    for row in report["rows"]:
        for error in row["errors"][:1]:
            console.print(f"{row['backend']}, {row['set']}: {row['failed']} failed: {error}", markup=False)


def _total(shares: dict[str, float]) -> float:
    return sum(shares.values())
