"""benchmarks/report.py: README's tables and figures are those that the committed results make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import block_manager, report
from benchmarks.reports import engines, figures, parts, serving


def test_readme_and_results_agree() -> None:
    text = report.README.read_text()
    assert report.rewritten(text) == text
    assert report.old_figures() == []


@pytest.mark.parametrize("table", report.TABLES)
def test_every_table_ends_with_its_losses(table: str) -> None:
    last_line = report.TABLES[table].text().splitlines()[-1]
    assert re.match(r"(Losses|Slower than a peer|No difference|Faster without)\b", last_line)


def recounted_losses(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the losses that the figures of a result show; from the scripts that write them."""
    count: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "block_manager": lambda: block_manager.losses(result["scenes"]),
        "kv_append": lambda: parts.variant_losses(result["rows"], parts.OURS["kv_append"]),
        "kv_cow_clone": lambda: parts.variant_losses(result["rows"], parts.OURS["kv_cow_clone"]),
        "offline_compare": lambda: engines.losses(result["rows"]),
        "online_compare": lambda: serving.trace_losses(result["rows"]),
    }
    return count[result["benchmark"]]()


@pytest.mark.parametrize("path", report.RESULTS.glob("*/*.json"), ids=lambda path: path.stem)
def test_losses_in_a_result_are_those_that_its_figures_show(path: Path) -> None:
    result = json.loads(path.read_text())
    if "losses" in result:
        assert recounted_losses(result) == result["losses"]


def test_pictures_of_readme_are_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", report.README.read_text())
    assert "benchmarks/figures/block_manager_cost.svg" in pictures
    assert [path for path in pictures if not (report.ROOT / path).is_file()] == []


def test_a_changed_figure_is_noticed() -> None:
    text = report.README.read_text()
    figure = report.TABLES["block_manager"].text().split(" µs")[0].split("| ")[-1]
    assert report.rewritten(text.replace(f"{figure} µs", "0 µs")) == text
    assert text.replace(f"{figure} µs", "0 µs") != text


def test_a_missing_table_is_named() -> None:
    with pytest.raises(SystemExit, match="table block_manager: expected once, found 0 times"):
        report.rewritten("no tables here")


@pytest.fixture
def one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let README be one table of a result file that the test writes; return the file."""
    table = report.Table("cpu/some.json", lambda result: f"| {result['value']} |", report.no_problems)
    monkeypatch.setattr(report, "TABLES", {"some": table})
    monkeypatch.setattr(report, "DRAWN_RESULTS", ("cpu/some.json",))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text("before\n<!-- table: some -->\nold\n<!-- end of table -->\nbehind\n")
    (tmp_path / "cpu").mkdir()
    return tmp_path / "cpu" / "some.json"


def block_manager_result(value: int) -> dict[str, Any]:
    microseconds = {"median": 1.0, "p10": 1.0, "p90": 1.0}
    point = {"num_blocks": 1000, "side": "stock", "whole_block_us_per_row": microseconds}
    return {
        "benchmark": "block_manager",
        "value": value,
        "machine": {"cpu": "a processor"},
        "settings": {"rows": 256, "block_size": 16},
        "scenes": {"pool_size": [point], "sequence_length": []},
    }


def test_tables_and_figures_follow_their_result(one_result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib (the bench or dev extra)")
    out = ["--out", str(report.FIGURES)]
    for value in (1, 2):
        one_result.write_text(json.dumps(block_manager_result(value)))
        assert report.main(["--check"]) == 1
        assert "run python -m benchmarks.report" in capsys.readouterr().out
        assert report.main(out) == 0
        assert report.README.read_text().splitlines()[2] == f"| {value} |"
        assert report.main(["--check"]) == 0
    (report.FIGURES / "block_manager_cost.png").unlink()
    assert report.main(["--check"]) == 1
    assert "cpu/some.json" in capsys.readouterr().out


def test_readme_stays_as_it_is_where_a_picture_cannot_be_drawn(
    one_result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(figures, "DRAW", {"block_manager": draw})
    one_result.write_text(json.dumps(block_manager_result(1)))
    before = report.README.read_text()
    with pytest.raises(OSError, match="no space left"):
        report.main([])
    assert report.README.read_text() == before


def test_a_result_that_is_not_whole_is_not_published(one_result: Path) -> None:
    whole = report.TABLES["some"]
    report.TABLES["some"] = report.Table(whole.file, whole.make)
    failed = {**block_manager_result(1), "rows": [], "failed": {"vllm": "it died\nat line 3"}}
    one_result.write_text(json.dumps(failed))
    with pytest.raises(SystemExit, match=r"cpu/some.json: not every engine has run: vllm \(it died\)"):
        report.main(["--check"])


def test_only_results_with_a_figure_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"benchmark": "arrivals"}')
    with pytest.raises(SystemExit) as stopped:
        report.main(["--draw", str(path)])
    assert stopped.value.code == 2
    assert "--draw: got a result of arrivals, there are figures of block_manager" in capsys.readouterr().err
