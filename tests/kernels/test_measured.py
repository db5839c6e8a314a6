"""The table of measured choices: how it is read, what it refuses, and who notices when it changes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

import pytest

from benchmarks.support import proof, run_facts
from benchmarks.tune_decode_layer import as_line
from rose_backend.compile_ahead import pool
from rose_backend.kernels.tuning import measured
from rose_backend.kernels.tuning.measured import Computed, Range, Table, constants, parse


@dataclass(frozen=True)
class Config:
    tile: int
    stages: int = 3
    early: bool = True


TEXT = """
== tiles
# First.
# Still first.
rows 1-8, wide yes, half -1/2  | tile=16, early=no | H200 | 1.5 | abc
rows 9-                        | tile=twice:4
# Second.
| tile=8, stages=2

== numbers
| most=12
"""


@pytest.fixture(autouse=True)
def small_table(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if not request.node.name.startswith("test_real"):
        use(monkeypatch, TEXT)


def use(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(measured, "sections", lambda: {each.operation: each for each in parse(text)})


def table() -> Table[Config]:
    rules = {"twice": lambda number, facts, values: int(2 * number * facts["rows"])}
    return Table("tiles", Config, ("rows", "wide", "half"), rules=rules)


def test_lines_are_read_with_the_comments_above_them() -> None:
    tiles, numbers = parse(TEXT)
    assert [(comment, len(rows)) for comment, rows in tiles.parts] == [
        ("First. Still first.", 2),
        ("Second.", 1),
    ]
    first, second, last = tiles.rows
    assert first.conditions == {"rows": Range(1, 8), "wide": Range(1, 1), "half": Range(-inf, 0.5)}
    assert first.values == {"tile": 16, "early": False}
    assert (first.gpu, first.microseconds, first.commit) == ("H200", 1.5, "abc")
    assert second.conditions == {"rows": Range(9, inf)} and second.values == {"tile": Computed("twice", 4)}
    assert (last.conditions, last.microseconds, numbers.operation) == ({}, None, "numbers")


def test_the_first_row_that_holds_is_taken() -> None:
    facts = {"rows": 8, "wide": True, "half": 0.5}
    assert table().choose(facts) == Config(16, early=False)
    assert table().choose({**facts, "half": 0.51}) == table().choose({**facts, "wide": 0}) == Config(8, 2)
    assert table().choose({**facts, "rows": 9}) == Config(72)
    assert table().borders("rows") == [8] and table().steps("rows") == [1, 9]
    assert constants("numbers") == {"most": 12}


def test_what_follows_from_a_configuration_may_be_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "\n== tiles\nprograms 4- | tile=64\nprograms 4- | tile=16\n | tile=8\n")
    programs = {"programs": lambda facts, config: facts["rows"] // config.tile}
    tiles = Table("tiles", Config, ("rows",), results=programs)
    assert [tiles.choose({"rows": rows}).tile for rows in (256, 255, 64, 63)] == [64, 16, 16, 8]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("columns 1-8 | tile=1", "unknown .'columns'."),
        ("rows 1-8 | tiles=1", "unknown .'tiles'."),
        ("rows 1-8 | tile=thrice:1", "unknown .'thrice'."),
        ("rows 1-8 | tile=x", "invalid literal .* in 'rows 1-8 | tile=x'"),
        ("rows 1-x | tile=1", "in 'rows 1-x"),
        ("rows | tile=1", "in 'rows | tile"),
        ("rows 1-8", "in 'rows 1-8'"),
        ("rows 1-8 | tile=1 | H200 | fast", "could not convert"),
    ],
)
def test_lines_that_say_nothing_known_are_refused(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_text = f"\n== tiles\n{line}\n"
    with pytest.raises(ValueError, match=message):
        use(monkeypatch, use_text)
        table()


def test_a_shape_without_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "\n== tiles\nrows 1-8 | tile=1\n")
    with pytest.raises(ValueError, match=r"tiles: nothing for \{'rows': 9\}"):
        table().choose({"rows": 9})


def test_what_was_found_is_written_as_it_is_read() -> None:
    line = as_line({"rows": "9-16", "wide": True, "half": 1}, Config(16, early=False), "H100", 2.25)
    assert line == "rows 9-16, wide yes, half 1 | tile=16, early=no | H100 | 2.2"
    (section,) = parse(f"\n== tiles\n{line}\n{as_line({}, Config(4), 'H100', 1)} | abc\n")
    first, second = section.rows
    assert first.values == {"tile": 16, "early": False} and first.conditions["wide"] == Range(1, 1)
    assert (second.values, second.commit) == ({"tile": 4}, "abc")


@pytest.mark.parametrize(
    "digest",
    [pool._package_digest, proof.source_digest, lambda: run_facts.run_facts()["sources_digest"]],
    ids=["recorded kernels", "proofs of kernels", "results"],
)
def test_real_choices_are_part_of_what_digests_are_of(digest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else kernels that were recorded before a choice changed would be taken for those of today."""
    before, read = digest(), Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda self: read(self) + b"\n" * (self.name == measured.PATH.name)
    )
    assert digest() != before
