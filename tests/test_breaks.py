"""Breaks of the package (``tests/support/breaks.py``) are the same for a seed, and each of them changes code."""

from __future__ import annotations

import ast
import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import breaks
from tests.support.breaks import (
    GPU_ONLY,
    KINDS,
    MIN_PER_ROOM,
    NUM_BREAKS,
    TESTS,
    Break,
    Finder,
    applied,
    broken,
    choose,
    close_tests,
    describe,
    find_breaks,
    identity,
    lost,
    matched,
)

PACKAGE = ROOT / "rose_backend"
SOURCE = '''
"""Text of 7 words."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 1 + 1


class A:
    size: int = 4

    def __init__(self, x: int | None) -> None:
        self.x = x

    def put(self, x: int) -> int | None:
        """Say more than 8."""
        logger.info("%d", x + 1)
        if x < self.size and self.fits(x):  # ü
            raise ValueError(f"x: {x + 1}", 9)
        self.x = x // 2
        self.note(
            "ü", x
        )
        if x.is_cuda:
            return x + 6
        return x if self.x else None
'''
CHANGES = [
    "4 -> 5",
    "x < self.size and self.fits(x) -> not (x < self.size and self.fits(x))",
    "x < self.size -> x <= self.size",
    "x < self.size -> x >= self.size",
    "raise ValueError(f'x: {x + 1}', 9) -> pass",
    "self.x = x // 2 -> pass",
    "x // 2 -> x * 2",
    "2 -> 3",
    "self.note('ü', x) -> pass",
    "self.note('ü', x) -> self.note(x, 'ü')",
    "self.x -> not self.x",
]


@pytest.fixture(scope="module")
def candidates() -> list[Break]:
    return find_breaks(PACKAGE)


def test_code_is_broken_and_what_only_people_read_is_not() -> None:
    assert [found.change for found, _, _ in Finder(SOURCE, "engine/a.py").found] == CHANGES


@pytest.mark.parametrize("index", range(len(CHANGES)))
def test_a_break_changes_the_syntax_tree_and_is_mended(tmp_path: Path, index: int) -> None:
    path = tmp_path / "engine" / "a.py"
    path.parent.mkdir()
    path.write_text(SOURCE, encoding="utf-8")
    wanted = Finder(SOURCE, "engine/a.py").found[index][0]
    with applied(wanted, tmp_path):
        text = path.read_text(encoding="utf-8")
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(SOURCE))
        assert text.splitlines()[: wanted.number - 1] == SOURCE.splitlines()[: wanted.number - 1]
    assert path.read_text(encoding="utf-8") == SOURCE


def test_a_seed_chooses_the_same_breaks_of_every_room(candidates: list[Break]) -> None:
    chosen = choose(candidates, 0)
    assert chosen == choose(candidates[:], 0) and len(chosen) == NUM_BREAKS
    assert chosen != choose(candidates, 1)
    rooms = {"scheduling", *(path.parent.name for path in PACKAGE.glob("*/__init__.py"))}
    rooms -= {"conformance"}  # tests themselves
    assert rooms == set(TESTS)
    assert min([each.room for each in chosen].count(room) for room in rooms) >= MIN_PER_ROOM
    assert {each.kind for each in chosen} == set(KINDS)
    assert all((PACKAGE / file).is_file() for file in GPU_ONLY)
    for each in chosen:
        assert matched(each, candidates) == each, describe(asdict(each))


def test_each_chosen_break_can_be_made(candidates: list[Break]) -> None:
    for each in choose(candidates, 0):
        source = (PACKAGE / each.file).read_text(encoding="utf-8")
        old, new = next(nodes for found, *nodes in Finder(source, each.file).found if found == each)
        assert broken(source, old, new) != source  # compared as syntax trees there


def test_tests_that_name_what_is_broken_come_first() -> None:
    wanted = Break("server", "server/generation.py", "ClientWatch.close", "statement", "", "", 1)
    assert close_tests(wanted, ROOT / "tests")[0].startswith("server/test_")
    for room in TESTS:
        assert close_tests(replace(wanted, room=room), ROOT / "tests")
    places = [ROOT / "tests" / place for room in TESTS.values() for place in room]
    assert [place for place in places if not place.exists()] == []


def test_a_break_is_found_again_where_code_has_moved() -> None:
    was = Break("engine", "engine/a.py", "A.put", "statement", "return x", "return x -> pass", 9)
    moved = replace(was, file="engine/b.py", number=99)
    assert matched(was, [replace(was, number=3), moved]) == replace(was, number=3)
    assert matched(was, [moved]) == moved
    assert matched(was, [replace(moved, function="B.put")]) == replace(moved, function="B.put")
    # Which of them it was, nobody knows.
    assert matched(was, [replace(moved, function="B.put"), replace(moved, function="C.put")]) is None
    assert matched(was, [replace(was, line="return x + 1")]) is None


def test_what_is_missed_afterwards_is_named() -> None:
    one = Break("engine", "engine/a.py", "A.put", "statement", "return x", "return x -> pass", 9)
    found = asdict(one) | {"result": "found", "test": "tests/engine/test_a.py::test_it"}
    after = asdict(replace(one, file="engine/b.py")) | {"before": identity(found)}
    assert lost([found | {"result": "missed"}], []) == []
    assert lost([found], [after | {"result": "found"}]) == []
    assert lost([found], [])[0].startswith("not run: engine/a.py:9 A.put, statement")
    assert lost([found], [after | {"result": "gone"}])[0].startswith("its line is gone")
    assert lost([found], [after | {"result": "missed"}])[0].endswith(
        "found before by tests/engine/test_a.py::test_it"
    )


def test_breaks_of_another_tree_are_made_once(
    candidates: list[Break],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"result": "found", "test": "tests/engine/test_a.py::test_it", "seconds": 1.0, "before": None}
    was = [asdict(each) | found for each in choose(candidates, 0)[:4]]
    was[1] |= {"line": "no such line"}
    was[2] |= {"result": "missed"}
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps({"breaks": was}), encoding="utf-8")
    made = []

    def look_for(wanted: Break, tree: Path, budget_s: float, first: str) -> dict[str, object]:
        made.append((identity(asdict(wanted)), first))
        return {"result": "found" if wanted.file == was[0]["file"] else "missed", "test": "", "seconds": 2.0}

    monkeypatch.setattr(breaks, "copied_tree", lambda: nullcontext(ROOT))
    monkeypatch.setattr(breaks, "find_breaks", lambda package: candidates)
    monkeypatch.setattr(breaks, "look_for", look_for)
    monkeypatch.setattr(breaks, "confirm", lambda *arguments: None)
    for times in (1, 2):
        if times == 2:  # everything has a result then, but what has timed out
            content = json.loads(after.read_text(encoding="utf-8"))
            content["breaks"].insert(0, content["breaks"].pop(0) | {"result": "timeout"})
            after.write_text(json.dumps(content), encoding="utf-8")
        assert breaks.main(["--compare", str(before), "--out", str(after)]) == 1
        gone, missed = capsys.readouterr().out.splitlines()[-2:]
        assert gone.startswith("its line is gone: ") and was[1]["file"] in gone
        assert missed.startswith("missed: ") and was[3]["file"] in missed
    assert made == [(identity(was[i]), "engine/test_a.py") for i in (0, 3, 0)]
