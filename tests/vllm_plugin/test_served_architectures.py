"""The table of the architectures that are served most says what vLLM with ROSE, and the standalone engine, accept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rose_backend.models.base import MODEL_CLASSES
from tests.support.architecture_check import ARCHITECTURES, REFUSED, STOCK_MANAGER, TEXT_ALONE, WORKS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ROW = re.compile(r"^\| `(\w+)`[^|]*\| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    command = [sys.executable, "-m", "tests.support.architecture_check"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, str] = json.loads(output.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def table() -> dict[str, tuple[str, str]]:
    section = PAGE.read_text().partition("### The architectures served most")[2].partition("\n##")[0]
    return {name: (inside, without) for name, inside, without in ROW.findall(section)}


def test_the_table_has_all_of_them(table: dict[str, tuple[str, str]]) -> None:
    assert table.keys() == ARCHITECTURES.keys()
    assert len(table) == 20


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_table_says_what_is_accepted(
    name: str, table: dict[str, tuple[str, str]], outcomes: dict[str, str]
) -> None:
    inside, without = table[name]
    # The longest of the words that it may begin with: "works" is the beginning of two others.
    said = max(
        (each for each in (WORKS, TEXT_ALONE, STOCK_MANAGER, REFUSED) if inside.startswith(each)), key=len
    )
    assert outcomes[name].startswith(said) and (said != WORKS or outcomes[name] == WORKS), outcomes[name]
    assert without.startswith("works" if name in MODEL_CLASSES else "no")
