"""The README's tables are those that the committed results make."""

from __future__ import annotations

import pytest

from benchmarks import readme_tables


def test_readme_and_results_agree() -> None:
    text = readme_tables.README.read_text()
    assert readme_tables.rewritten(text) == text


def test_a_changed_figure_is_noticed() -> None:
    text = readme_tables.README.read_text()
    figure = readme_tables.block_manager().split(" µs")[0].split("| ")[-1]
    assert readme_tables.rewritten(text.replace(f"{figure} µs", "0 µs")) == text
    assert text.replace(f"{figure} µs", "0 µs") != text


def test_a_missing_table_is_named() -> None:
    with pytest.raises(SystemExit, match="table block_manager: expected once, found 0 times"):
        readme_tables.rewritten("no tables here")
