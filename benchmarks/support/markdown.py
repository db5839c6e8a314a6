"""Markdown for README."""

from __future__ import annotations

from collections.abc import Iterable


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
