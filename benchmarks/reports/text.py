"""Markdown of tables, captions and verdicts, for documents and, rendered by rich, for the terminal."""

from __future__ import annotations

import operator
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.support.run_facts import write_json

Row = dict[str, Any]
Result = dict[str, Any]

LABELS = {"rose": "Rose", "rose-in-vllm": "Rose in vLLM", "vllm": "vLLM", "sglang": "SGLang"}
_LIBRARIES = {"torch": "torch", "triton": "Triton", "vllm": "vLLM", "flashinfer-python": "flashinfer"}
# What was measured after a release, with that release's number still in the sources.
_MEASURED_AS = {("Rose", "0.1.0"): "0.2.0 development"}


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]], *paragraphs: str) -> str:
    """Return a table, and paragraphs below it."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join((table, *paragraphs))


def micros(us: float) -> str:
    """Return microseconds with two or more digits."""
    return f"{us:,.0f} µs" if us >= 10 else f"{us:.1f} µs"


def milliseconds(value: float) -> str:
    """Return a number of milliseconds with three digits, without its unit."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percentiles(figures: Mapping[str, float], metric: str, shares: Iterable[int]) -> str:
    """Return the percentiles of a metric in milliseconds, such as ``1.2 / 3.4 / 5``."""
    return " / ".join(milliseconds(figures[f"p{share}_{metric}_ms"]) for share in shares)


def grouped(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    """Return rows by their values of one column, or by tuples of several, in the order of their first rows."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(operator.itemgetter(*names)(row), []).append(row)
    return groups


def medians(rows: Sequence[Row], names: Iterable[str]) -> dict[str, float]:
    """Return each column's median."""
    return {name: statistics.median(row[name] for row in rows) for name in names}


def caption(result: Result, *facts: str, turns: Iterable[int] = ()) -> str:
    """Return what a table's medians are of, ``turns`` of engines for instance, the versions and the command."""
    counts = sorted(set(turns))
    of = (
        f" of {' to '.join(str(count) for count in dict.fromkeys(counts[:1] + counts[-1:]))} turns"
        if counts
        else ""
    )
    runs = f" in {len(result['runs'])} runs" if "runs" in result else ""
    if "backends" in result:
        facts += (result["device"], _shapes(result["settings"]["model"]), result["settings"]["dtype"])
    return f"Medians{of}{runs}, {', '.join(facts)}; {versions(result)}; {command(result)}."


def _shapes(model: str) -> str:
    """Return the model of a result; of a name with a remark, which is ``NAME, REMARK's shapes``, in another order."""
    return re.sub(
        r"^random weights, ([^,]+), (.+)'s shapes$", r"random weights, the shapes of \1 (\2)", model
    )


def command(result: Result) -> str:
    """Return the command line that made a result."""
    return f"`{result['command']}`"


def versions(result: Result) -> str:
    """Return each engine's version, or those of the libraries where no engines are compared."""
    of_engines = {name: facts["version"] for name, facts in result.get("backends", {}).items()}
    names, found = (LABELS, of_engines) if of_engines else (_LIBRARIES, result["versions"])
    pairs = ((label, found[name]) for name, label in names.items() if name in found)
    return ", ".join(f"{label} {_MEASURED_AS.get((label, version), version)}" for label, version in pairs)


def verdict(
    lost: Iterable[tuple[str, str]], of: str, *, some: str = "Slower", none: str = "No losses"
) -> str:
    """Return in how many of all cases Rose is behind, and each: with a title that several may share, and its values."""
    by_title: dict[str, list[str]] = {}
    for title, case in lost:
        by_title.setdefault(title, []).append(case)
    if not by_title:
        return f"{none} in {of}."
    entries = (f"- {title}: {'; '.join(cases)}" for title, cases in by_title.items())
    return "\n".join((f"{some} in {sum(map(len, by_title.values()))} of {of}:\n", *entries))


def all_figures(tree: Any, *path: str) -> Iterator[tuple[str, str]]:
    """Yield name and ``median (p10 - p90)`` of every figure in nested dicts and lists."""
    if isinstance(tree, list):
        for entry in tree:
            # Entries of a list are told apart by their sizes and sides.
            names = (str(value) for value in entry.values() if isinstance(value, str | int))
            yield from all_figures(entry, *path, *names)
    elif "median" in tree:
        yield ", ".join(path), "{median:,.2f} ({p10:,.2f} - {p90:,.2f})".format(**tree)
    else:
        for name, value in tree.items():
            yield from all_figures(value, *path, name) if isinstance(value, dict | list) else ()


def publish(report: Result, table: str, path: Path | None) -> None:
    """Print a result as the documents would show it, its goals and whatever is not in it; write it to ``path``."""
    console = Console(width=180)
    console.print(Markdown(table))
    for goal in report.get("bars", ()):
        met, least = "met" if goal["met"] else "MISSED", "at least" if goal["at_least"] else "at most"
        value = f"{goal['value']:.3f} {goal['unit']}, {least} {goal['limit']:g}"
        console.print(f"{met}: {goal['name']}: {value}", markup=False)
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
