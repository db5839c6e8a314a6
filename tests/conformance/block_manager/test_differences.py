"""Each entry of the table of differences holds, on both sides."""

from __future__ import annotations

import pytest

from tests.conformance.block_manager.__main__ import render
from tests.conformance.block_manager.conftest import MANAGER_NAMES, MakeHost
from tests.conformance.block_manager.differences import DIFFERENCES, Difference


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.question)
def test_the_manager_answers_as_listed(
    make_host: MakeHost, manager_name: str, difference: Difference
) -> None:
    assert difference.observe(make_host) == getattr(difference, manager_name), difference.question


def test_every_entry_is_a_difference() -> None:
    assert [entry.question for entry in DIFFERENCES if entry.rose == entry.stock] == []
    assert len({entry.question for entry in DIFFERENCES}) == len(DIFFERENCES)


def test_the_printed_table_has_every_answer() -> None:
    lines = render(width=400)
    for entry in DIFFERENCES:
        (line,) = [line for line in lines.splitlines() if entry.question in line]
        cells = [cell.strip() for cell in line.split("│")]
        assert cells[1:5] == [entry.question, str(entry.rose), str(entry.stock), entry.why]
    assert set(MANAGER_NAMES) == {"rose", "stock"}
