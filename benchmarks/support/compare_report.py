"""Verdicts and tables of ``offline_compare``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.report import bar

# Wall time of one decode step of the standalone engine, GPT-2 124M on one H200.
STEP_LIMITS_MS = {1: 0.25, 8: 0.27, 32: 0.34, 128: 0.60, 256: 0.95}
MAX_SAMPLING_SHARE = 1.08
MAX_OFFLINE_S = 0.30
# The standalone engine's time over a peer's, where more prompts than fit have many lengths.
MIXED_TIMES = {"vllm": 1 / 2, "sglang": 1 / 1.6}
# Rose inside vLLM over vLLM's own time, the same model and GPU.
INSIDE_VLLM_STEP_TIMES = {1: 0.95, 128: 0.6, 256: 0.5}
INSIDE_VLLM_OFFLINE_TIMES = 1 / 1.4
PEERS = {"rose": ("vllm", "sglang"), "rose-in-vllm": ("vllm", "sglang")}

Row = dict[str, Any]


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Return case -> backend -> row."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["backend"]] = row
    return cases


def compared(row: Row) -> float:
    """Return the median of the figure that is compared; less is better."""
    median: float = row["figures"][row["figure"]]["median"]
    return median


def losses(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return every case in which Rose, in either host, took longer than a peer."""
    return [
        {"case": case, "backend": rose, "peer": peer, "times": compared(sides[rose]) / compared(sides[peer])}
        for case, sides in by_case(rows).items()
        for rose, peers in PEERS.items()
        for peer in peers
        if rose in sides and peer in sides and compared(sides[rose]) > compared(sides[peer])
    ]


def peer_bars(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return, for each case and host, whether Rose takes no longer than the fastest peer in the same run."""
    bars = []
    for case, sides in by_case(rows).items():
        for rose, peers in PEERS.items():
            times = {peer: compared(sides[peer]) for peer in peers if peer in sides}
            if rose in sides and times:
                fastest = min(times, key=lambda peer: times[peer])
                name = f"{rose} over {fastest}: {case}"
                bars.append(bar(name, compared(sides[rose]) / times[fastest], 1.0, "x"))
    return bars


def goal_bars(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the standalone engine's own goals; they are for GPT-2 124M on one H200 and the default sizes."""
    rose = [row for row in rows if row["backend"] == "rose"]
    steps = {(row["num_requests"], row["mode"]): compared(row) for row in rose if row["scene"] == "decode"}
    bars = []
    for batch, limit in STEP_LIMITS_MS.items():
        greedy = steps.get((batch, "greedy"))
        drawn = steps.get((batch, "top-k 50, top-p 0.9"))
        if greedy is not None:
            bars.append(bar(f"step, {batch} requests", greedy, limit, "ms"))
            if drawn is not None:
                share = drawn / greedy
                bars.append(bar(f"sampling over greedy, {batch} requests", share, MAX_SAMPLING_SHARE, "x"))
    for row in rose:
        if _is_usual_offline(row):
            bars.append(bar("offline, 256 x 512 / 128 new", compared(row), MAX_OFFLINE_S, "s"))
    return [*bars, *_mixed_bars(rows)]


def _mixed_bars(rows: Iterable[Row]) -> list[dict[str, Any]]:
    bars = []
    for case, sides in by_case(row for row in rows if row["scene"] == "mixed").items():
        for peer, limit in MIXED_TIMES.items():
            if {"rose", peer} <= sides.keys():
                bars.append(
                    bar(
                        f"rose over {peer}, goal: {case}",
                        compared(sides["rose"]) / compared(sides[peer]),
                        limit,
                        "x",
                    )
                )
    return bars


def inside_vllm_bars(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the goals of Rose inside vLLM beyond being no slower, over vLLM's own time in the same run; greedy."""
    bars = []
    for case, sides in by_case(rows).items():
        if not {"rose-in-vllm", "vllm"} <= sides.keys():
            continue
        row = sides["rose-in-vllm"]
        limit = INSIDE_VLLM_OFFLINE_TIMES if _is_usual_offline(row) else None
        if row["scene"] == "decode" and row["mode"] == "greedy":
            limit = INSIDE_VLLM_STEP_TIMES.get(row["num_requests"])
        if limit is not None:
            bars.append(
                bar(f"rose-in-vllm, goal: {case}", compared(row) / compared(sides["vllm"]), limit, "x")
            )
    return bars


def _is_usual_offline(row: Row) -> bool:
    sizes = (row["num_requests"], row["input_len"], row["output_len"])
    return row["scene"] == "offline" and row["mode"] == "greedy" and sizes == (256, [512, 512], [128, 128])


def print_comparison(console: Console, report: dict[str, Any]) -> None:
    """Print one table of all cases, then goals, losses, and who is not in it."""
    table = Table(
        title=f"{report['device']}, {report['settings']['model']}: medians (10th to 90th percentile)"
    )
    table.add_column("case")
    table.add_column("backend")
    for name in ("ms", "output tok/s", "x rose"):
        table.add_column(name, justify="right")
    for case, sides in by_case(report["rows"]).items():
        for backend, row in sides.items():
            table.add_row(case, backend, *_cells(row, sides.get("rose")))
        table.add_section()
    console.print(table)
    if report["turns_left_out"]:
        console.print(f"out of time: {report['turns_left_out']} turns were not taken")
    print_bars(console, report["bars"])
    for loss in report["losses"]:
        console.print(
            f"loss: {loss['backend']} takes {loss['times']:.2f} x {loss['peer']}'s time: {loss['case']}"
        )
    for label in ("missing", "failed"):
        for name, why in report[label].items():
            console.print(f"{label}: {name}: {why}", markup=False)


def print_bars(console: Console, bars: Iterable[dict[str, Any]]) -> None:
    """Print each goal as met or missed."""
    for goal in bars:
        verdict = "met" if goal["met"] else "MISSED"
        least = "at least" if goal["at_least"] else "at most"
        value = f"{goal['value']:.3f} {goal['unit']}, {least} {goal['limit']:g}"
        console.print(f"{verdict}: {goal['name']}: {value}", markup=False)


def _cells(row: Row, rose: Row | None) -> tuple[str, str, str]:
    figure = row["figures"][row["figure"]]
    unit = 1.0 if row["figure"] == "step_ms" else 1e3
    low, middle, high = (figure[name] * unit for name in ("p10", "median", "p90"))
    digits = 3 if row["figure"] == "step_ms" else 0
    span = f"{middle:,.{digits}f} ({low:,.{digits}f} - {high:,.{digits}f})"
    if row["figure"] == "step_ms":
        speed = row["num_requests"] / figure["median"] * 1e3
    else:
        speed = row["figures"]["output_throughput"]["median"]
    ratio = "" if rose is None else f"{compared(row) / compared(rose):.2f}"
    return span, f"{speed:,.0f}", ratio
