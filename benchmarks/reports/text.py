"""Markdown of tables and figures, for README and, rendered by rich, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.support.run_facts import write_json

Row = dict[str, Any]
Result = dict[str, Any]

MOVED = {
    "benchmarks.arrivals": "benchmarks.online_compare in-process",
    "benchmarks.vllm_serving": "benchmarks.online_compare poisson",
}
"""Modules that recorded commands name -> what does the same now."""


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def micros(us: float) -> str:
    """Return microseconds with two or more digits."""
    return f"{us:,.0f} µs" if us >= 10 else f"{us:.1f} µs"


def milliseconds(value: float) -> str:
    """Return a number of milliseconds with three digits, without its unit."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percentiles(figures: Mapping[str, float], metric: str, shares: Iterable[int]) -> str:
    """Return the percentiles of a metric in milliseconds, such as ``1.2 / 3.4 / 5``."""
    return " / ".join(milliseconds(figures[f"p{share}_{metric}_ms"]) for share in shares)


def listed(title: str, entries: Iterable[str], none: str = "none") -> str:
    """Return ``title: a; b.``, or what to say where there are no entries."""
    return f"{title}: {'; '.join(entries) or none}."


def command(result: Result) -> str:
    """Return the recorded command line; behind one that has moved, the sources it ran with and its new name."""
    text = f"`{result['command']}`"
    for old, new in MOVED.items():
        if old in result["command"]:
            sources = result.get("sources_digest", "not recorded")
            text += f" (sources: {sources}; today `python -m {new}`)"
    return text


def turns_text(counts: Iterable[int]) -> str:
    """Return ``3``, or ``2 to 3`` where numbers of turns differ."""
    counts = set(counts)
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


def in_runs(result: Result) -> str:
    """Return what follows a number of turns: nothing where one run took all of them."""
    return f" in {len(result['runs'])} runs" if "runs" in result else ""


def absent_engines(result: Result) -> list[str]:
    """Return engines that were missing or failed, each with the first line of the reason."""
    return [
        f"{name} ({why.splitlines()[0]})"
        for label in ("missing", "failed")
        for name, why in result.get(label, {}).items()
    ]


def missed_goals(result: Result) -> str:
    """Return each goal that was missed, with its value and limit."""
    missed = [
        f"{goal['name']} ({goal['value']:.2f} {goal['unit']}, at {'least' if goal['at_least'] else 'most'} "
        f"{goal['limit']:g})"
        for goal in result["bars"]
        if not goal["met"]
    ]
    return f"Goals missed: {'; '.join(missed) or 'none'}, of {len(result['bars'])}."


def all_figures(tree: Any, *path: str) -> Iterator[tuple[str, str]]:
    """Yield name and ``median (p10 - p90)`` of every figure in nested dicts and lists."""
    if isinstance(tree, Mapping):
        if "median" in tree:
            yield ", ".join(path), "{median:,.2f} ({p10:,.2f} - {p90:,.2f})".format(**tree)
            return
        # Entries of a list are told apart by their sizes and sides.
        names = [str(value) for value in tree.values() if isinstance(value, str | int)]
        for name, value in tree.items():
            yield from all_figures(value, *path, *(names if isinstance(value, Mapping) else ()), name)
    elif isinstance(tree, list):
        for entry in tree:
            yield from all_figures(entry, *path)


def publish(report: Result, table: str, path: Path | None) -> None:
    """Print a result as README would show it, then its goals and whatever is not in it; write it to ``path``."""
    console = Console(width=180)
    console.print(Markdown(table))
    for goal in report.get("bars", ()):
        verdict = "met" if goal["met"] else "MISSED"
        least = "at least" if goal["at_least"] else "at most"
        text = f"{verdict}: {goal['name']}: {goal['value']:.3f} {goal['unit']}, {least} {goal['limit']:g}"
        console.print(text, markup=False)
    if report.get("turns_left_out"):
        console.print(f"out of time: {report['turns_left_out']} turns were not taken")
    for row in report["rows"] if isinstance(report.get("rows"), list) else ():
        for error in row.get("errors", [])[:1]:
            console.print(f"{row['backend']}: {row['failed']} requests failed: {error}", markup=False)
    for label in ("missing", "failed"):
        for name, why in report.get(label, {}).items():
            console.print(f"{label}: {name}: {why}", markup=False)
    if path:
        write_json(path, report)
