"""Planted mistakes fit the code, and the simulation finds those that it is known to find."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.simulation import mutants
from tests.simulation.mutants import PLANTED, Planted

PACKAGE = ROOT / "rose_backend"


@pytest.mark.parametrize("mistake", PLANTED, ids=lambda each: each.why)
def test_a_mistake_by_hand_changes_one_place(mistake: Planted) -> None:
    source = (PACKAGE / mistake.file).read_text(encoding="utf-8")
    assert source.count(mistake.old) == 1
    changed = ast.parse(source.replace(mistake.old, mistake.new))
    assert ast.dump(changed) != ast.dump(ast.parse(source))


def test_there_are_thirty_of_all_files_with_commits() -> None:
    assert len(PLANTED) == len({each.why for each in PLANTED}) == 30
    assert {each.file for each in PLANTED} <= set(mutants.FILES)
    assert all((PACKAGE / name).exists() for name in mutants.FILES)


def test_a_seed_chooses_the_same_changes_of_different_lines() -> None:
    chosen = mutants.choose(3, 40)
    assert chosen == mutants.choose(3, 40) != mutants.choose(4, 40)
    assert len({(each.file, each.number) for each in chosen}) == 40


def test_what_is_known_to_be_missed_changes_nothing() -> None:
    known = json.loads((Path(mutants.__file__).parent / "found_mutants.json").read_text(encoding="utf-8"))
    assert sorted(each["why"] for each in known["by_hand"]) == sorted(each.why for each in PLANTED)
    assert len(known["seed_0"]) == 100
    for each in (*known["by_hand"], *known["seed_0"]):
        if each["result"] == "missed":
            assert each["note"].startswith("equivalent: "), each
        else:
            assert each["result"] == "found"
            # By the simulation of a host, or by a test.
            if "host" not in each:
                path, name = each["by"].split("[")[0].split("::")[:2]
                assert name in (ROOT / path).read_text(encoding="utf-8"), each


def test_a_planted_mistake_is_found_and_mended(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    mutants.copy_tree(tree)
    mistake = next(each for each in PLANTED if each.why == "siblings of a fork share one reference")
    before = (tree / "rose_backend" / mistake.file).read_text(encoding="utf-8")
    result = mutants.look(mistake, [tree], runs_tests=False)
    assert (result["result"], result["host"]) == ("found", "standalone")
    assert "reference count" in result["by"]
    assert (tree / "rose_backend" / mistake.file).read_text(encoding="utf-8") == before
