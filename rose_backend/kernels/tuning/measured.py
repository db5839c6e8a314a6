"""Reads ``measured.txt``: what was measured, and is chosen for speed alone. The file's head explains its lines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

PATH = Path(__file__).with_name("measured.txt")
_FLAGS = {"yes": True, "no": False}

Config = TypeVar("Config")
Facts = Mapping[str, float]
"""What conditions are about; flags are 0 or 1."""


class Range(NamedTuple):
    """Of one fact, both ends included."""

    low: float
    high: float


class Computed(NamedTuple):
    """A field that follows from the shape: the name of its rule, and the number that the rule is given."""

    rule: str
    number: int


Value = bool | int | Computed
Rule = Callable[[int, Facts, Mapping[str, Value]], int]
"""Computes a field from its number, the facts, and the fields that are written as they are."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the file."""

    conditions: Mapping[str, Range]
    values: Mapping[str, Value]
    gpu: str = ""
    """Where it was measured; empty: nowhere, or unknown."""
    microseconds: float | None = None
    commit: str = ""
    cells: tuple[str, ...] = ()
    """Of the line, as they are written."""


@dataclass(frozen=True, slots=True)
class Section:
    """The lines of one operation, and the comments above them."""

    operation: str
    parts: tuple[tuple[str, tuple[Row, ...]], ...]
    """Each comment with the rows that follow it."""

    @property
    def rows(self) -> list[Row]:
        """All, in the order in which they are tried."""
        return [row for _, rows in self.parts for row in rows]


class Table(Generic[Config]):
    """The choices of one operation.

    Args:
        config: what a row's fields make, a dataclass, a named tuple or ``dict``.
        facts: names that conditions may have and that ``choose`` is given.
        rules: how computed fields are computed.
        results: facts that follow from a configuration, by name; conditions may have these too.
    """

    def __init__(
        self,
        operation: str,
        config: type[Config],
        facts: tuple[str, ...] = (),
        *,
        rules: Mapping[str, Rule] | None = None,
        results: Mapping[str, Callable[[Facts, Config], float]] | None = None,
    ) -> None:
        self.operation = operation
        self.rows = sections()[operation].rows
        self._config = config
        self._rules = rules or {}
        self._results = results or {}
        self._checks = [
            (row, [(name, *limits) for name, limits in row.conditions.items() if name in facts])
            for row in self.rows
        ]
        self._find_unknown({*facts, *self._results})

    def _find_unknown(self, facts: set[str]) -> None:
        for row in self.rows:
            rules = {value.rule for value in row.values.values() if isinstance(value, Computed)}
            unknown = (row.conditions.keys() - facts) | (rules - self._rules.keys())
            if self._config is not dict:
                unknown |= row.values.keys() - self._config.__annotations__.keys()
            if unknown:
                raise ValueError(f"{PATH.name}, {self.operation}: unknown {sorted(unknown)} in {row}")

    def choose(self, facts: Facts) -> Config:
        """Return the configuration of the first row whose conditions all hold."""
        for row, checks in self._checks:
            for name, low, high in checks:
                if not low <= facts[name] <= high:
                    break
            else:
                config = self._make(row, facts)
                if not self._results or self._fits(row, facts, config):
                    return config
        raise ValueError(f"{PATH.name}, {self.operation}: nothing for {dict(facts)}")

    def all(self) -> list[Config]:
        """Return the configurations of all rows, where none has conditions."""
        return [self._make(row, {}) for row in self.rows]

    def borders(self, name: str) -> list[float]:
        """Return the upper ends of a fact's ranges."""
        ranges = [row.conditions[name] for row in self.rows if name in row.conditions]
        return sorted({each.high for each in ranges if each.high < inf})

    def steps(self, name: str) -> list[int]:
        """Return whole numbers from which on a fact meets other conditions than the number below."""
        ranges = [row.conditions[name] for row in self.rows if name in row.conditions]
        starts = {int(each.low) for each in ranges if each.low > -inf}
        return sorted(starts | {int(each.high) + 1 for each in ranges if each.high < inf})

    def _make(self, row: Row, facts: Facts) -> Config:
        values = dict(row.values)
        for name, value in values.items():
            if isinstance(value, Computed):
                values[name] = self._rules[value.rule](value.number, facts, row.values)
        return self._config(**values)

    def _fits(self, row: Row, facts: Facts, config: Config) -> bool:
        """Return whether the conditions hold that are about what follows from the configuration."""
        return all(
            row.conditions[name].low <= result(facts, config) <= row.conditions[name].high
            for name, result in self._results.items()
            if name in row.conditions
        )


@functools.lru_cache(maxsize=256)
def constants(operation: str, **facts: float) -> Mapping[str, int]:
    """Return the values of the first row whose conditions hold, by name: for numbers that are no tiles of a kernel."""
    return MappingProxyType(Table(operation, dict, tuple(facts)).choose(facts))


@functools.cache
def sections() -> dict[str, Section]:
    """Return what the file says, by operation."""
    return {section.operation: section for section in parse(PATH.read_text(encoding="utf-8"))}


def parse(text: str) -> Iterator[Section]:
    """Yield each section of a file.

    Raises:
        ValueError: a line has another form.
    """
    for section in text.split("\n== ")[1:]:
        operation, *lines = section.splitlines()
        parts: list[tuple[list[str], list[Row]]] = [([], [])]
        for line in lines:
            if line.startswith("#"):
                if parts[-1][1]:
                    parts.append(([], []))
                parts[-1][0].append(line.removeprefix("#").strip())
            elif line:
                parts[-1][1].append(_row(line))
        yield Section(operation, tuple((" ".join(comment), tuple(rows)) for comment, rows in parts))


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def _row(line: str) -> Row:
    cells = [cell.strip() for cell in line.split("|")]
    try:
        conditions, values, gpu, microseconds, commit = (*cells, "", "", "")[:5]
        return Row(
            {name: _range(limits) for name, limits in map(str.split, filter(None, conditions.split(", ")))},
            {name: _value(value) for name, value in (each.split("=") for each in values.split(", "))},
            gpu,
            float(microseconds) if microseconds else None,
            commit,
            tuple(cells),
        )
    except ValueError as error:
        raise ValueError(f"{PATH.name}: {error} in {line!r}") from error


def _range(text: str) -> Range:
    if text in _FLAGS:
        return Range(_FLAGS[text], _FLAGS[text])
    low, dash, high = text.partition("-")
    if not dash:
        return Range(float(low), float(low))
    return Range(float(Fraction(low)) if low else -inf, float(Fraction(high)) if high else inf)


def _value(text: str) -> Value:
    if text in _FLAGS:
        return _FLAGS[text]
    rule, colon, number = text.rpartition(":")
    return Computed(rule, int(number)) if colon else int(number)
