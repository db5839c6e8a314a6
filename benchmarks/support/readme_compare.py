"""The README's tables of whole engines, from what ``offline_compare`` and ``arrivals`` wrote."""

from __future__ import annotations

from typing import Any

from benchmarks.support.compare_options import ROSE_HOSTS
from benchmarks.support.compare_report import Row, by_case, compared
from benchmarks.support.markdown import markdown, milliseconds
from benchmarks.support.resume import in_runs
from benchmarks.support.streaming import METRICS, PERCENTILES

LABELS = {"rose": "Rose", "rose-in-vllm": "Rose in vLLM", "vllm": "vLLM", "sglang": "SGLang"}
PEERS = ("vllm", "sglang")
COMPARISON_COMMAND = "python -m benchmarks.offline_compare"
ARRIVALS_COMMAND = "python -m benchmarks.arrivals"


def offline_table(result: dict[str, Any]) -> str:
    """Return every case with all engines, and every loss."""
    check_complete(result)
    cases = by_case(result["rows"])
    backends = [name for name in LABELS if name in result["backends"]]
    peers = [name for name in backends if name in PEERS]
    rows = []
    for case, sides in cases.items():
        ratio = min(compared(sides[peer]) for peer in peers) / compared(sides["rose"])
        rows.append((case, *(cell(sides[name]) for name in backends), f"{ratio:.2f}x"))
    header = ("", *(LABELS[name] for name in backends), "best peer / Rose")
    return "\n\n".join((markdown(header, rows), source(result), losses_line(result, len(cases))))


def switches_table(result: dict[str, Any]) -> str:
    """Return how much longer Rose takes with one part switched off, for every case."""
    check_complete(result)
    cases = by_case(result["rows"])
    rows, costs = [], []
    for variant in (name for name in result["backends"] if name.endswith(" off")):
        host, switch = variant.removesuffix(" off").split(", ")
        times = {case: compared(sides[variant]) / compared(sides[host]) for case, sides in cases.items()}
        rows.append((LABELS[host], f"`{switch}`", *(f"{share:.2f}x" for share in times.values())))
        costs += [f"`{switch}` in {case} ({share:.3f}x)" for case, share in times.items() if share < 1.0]
    verdict = f"Faster without: {'; '.join(costs) if costs else 'none'}."
    return "\n\n".join((markdown(("time without / with", "", *cases), rows), source(result), verdict))


def arrivals_table(result: dict[str, Any]) -> str:
    """Return latencies of both loads, which goals were missed, and every loss at the same load."""
    check_complete(result)
    rows = []
    for row in result["rows"]:
        if row["scene"] == "capacity":
            continue
        latencies = (
            " / ".join(milliseconds(row[f"p{share}_{metric}_ms"]) for share in PERCENTILES)
            for metric in METRICS
        )
        load = f"{row['scene']}, {row['request_rate']:,.0f} requests/s"
        rows.append((load, LABELS[row["backend"]], *latencies))
    header = ("p50 / p90 / p99 in ms", "", *(metric.upper() for metric in METRICS))
    missed = [
        f"{goal['name']} ({goal['value']:.2f}, at most {goal['limit']:.2f})"
        for goal in result["bars"]
        if not goal["met"]
    ]
    verdict = f"Goals missed: {'; '.join(missed) if missed else 'none'}, of {len(result['bars'])}."
    return "\n\n".join((markdown(header, rows), source(result), verdict, _arrivals_losses(result)))


def _arrivals_losses(result: dict[str, Any]) -> str:
    sides = {row["backend"]: row for row in result["rows"] if row["scene"] == "same load"}
    lost = [
        f"{LABELS[rose]} behind {LABELS[peer]}, {metric.upper()} p{share} "
        f"{milliseconds(sides[rose][name])} against {milliseconds(sides[peer][name])}"
        for rose in ROSE_HOSTS
        for peer in PEERS
        if rose in sides and peer in sides
        for metric in METRICS
        for share in PERCENTILES
        for name in [f"p{share}_{metric}_ms"]
        if sides[rose][name] > sides[peer][name]
    ]
    return f"Losses at the same load, in ms: {'; '.join(lost) if lost else 'none'}."


def check_complete(result: dict[str, Any]) -> None:
    """Exit where an engine was missing or failed: such a comparison is not published."""
    absent = [
        f"{name} ({why.splitlines()[0]})"
        for label in ("missing", "failed")
        for name, why in result[label].items()
    ]
    if absent:
        raise SystemExit(f"{result['benchmark']}.json: not every engine has run: {'; '.join(absent)}")


def cell(row: Row) -> str:
    """Return a step in milliseconds, or seconds and throughput of a batch."""
    if row["scene"] == "decode":
        return milliseconds(compared(row)) + " ms"
    tokens = row["figures"]["output_throughput"]["median"]
    return f"{compared(row):.2f} s, {tokens / 1e3:,.0f} k tok/s"


def source(result: dict[str, Any]) -> str:
    """Return what was run, where, how often, and the command that repeats it."""
    settings, turns = result["settings"], _turns(result["rows"]) + in_runs(result)
    return (
        f"Medians of {turns}, {result['device']}, {settings['model']}, {settings['dtype']}; "
        f"{versions(result)}; `{result['command']}`."
    )


def versions(result: dict[str, Any]) -> str:
    """Return each engine and its version."""
    return ", ".join(
        f"{LABELS[name]} {facts['version']}" for name, facts in result["backends"].items() if name in LABELS
    )


def _turns(rows: list[Row]) -> str:
    counts: dict[str, set[int]] = {}
    for row in rows:
        counts.setdefault(row["scene"], set()).add(_num_turns(row))
    everywhere = set.union(*counts.values())
    if len(everywhere) == 1:
        return f"{everywhere.pop()} turns"
    return (
        "turns ("
        + ", ".join(
            f"{scene}: {' to '.join(str(count) for count in sorted({min(found), max(found)}))}"
            for scene, found in counts.items()
        )
        + ")"
    )


def _num_turns(row: Row) -> int:
    num_turns: int = len(row["turns"]) if "turns" in row else row["figures"][row["figure"]]["samples"]
    return num_turns


def losses_line(result: dict[str, Any], num_cases: int) -> str:
    """Return every case in which Rose takes longer than a peer."""
    lost = [
        f"{LABELS[loss['backend']]} takes {loss['times']:.2f} x {LABELS[loss['peer']]}'s time in {loss['case']}"
        for loss in result["losses"]
    ]
    return f"Losses in {num_cases} cases: {'; '.join(lost) if lost else 'none'}."
