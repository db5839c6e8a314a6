"""The suites as their users run them: what is wrong is found, named and reported, and nothing else is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_backend.conformance.attention.host import find_backend
from rose_backend.conformance.block_manager.differences import DIFFERENCES
from rose_backend.conformance.block_manager.managers import find_manager
from rose_backend.conformance.plugin import read_differences
from tests.conformance.table import PAGE, differences, overview, read_results, with_tables
from tests.conftest import ROOT
from tests.support.patience import HANG_S

DECLARED = """
[[difference]]
scene = "attention: layers: sliding_window=9 soft_cap=2.0"
what = "sees everything"

[[difference]]
scene = "attention: layers: dtype=bfloat16"
what = "conforms, so that this is wrong"
"""
FAILED = {
    *(f"attention: layers: sliding_window={size}" for size in (1, 9, 16)),
    "attention: layers: sliding_window=9 alibi=True",
    "attention: layers: dtype=bfloat16",
    "block_manager: a reset is refused while requests hold blocks",
    "block_manager: a reset is one event",
}


def run_suites(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run them from an empty folder, as another project would."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "rose_backend.conformance.plugin", "--pyargs", "rose_backend.conformance", *options),
        ],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the suites report of a backend that forgets windows, and of a manager that forgets resets."""
    pytest.importorskip("vllm.v1.worker.cpu_worker", reason="vLLM's CPU build is not installed")
    if torch.cuda.is_available():
        pytest.skip("the broken backend is one of vLLM's CPU build")
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "known.toml").write_text(DECLARED)
    finished = run_suites(
        folder,
        *("--attention-backend", "tests.conformance.broken:ForgetsWindows"),
        *("--block-manager", "tests.conformance.broken:ForgetsResets"),
        *("--conformance-differences", "known.toml"),
        *("--conformance-report", "out/report.json", "--conformance-report", "report.html"),
        *(
            "-k",
            "test_layers and not drafts and not fp8 and not heads or alone or reset or copies or watermark_counts",
        ),
    )
    assert finished.returncode == 1, finished.stdout + finished.stderr
    report: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    report["html"] = (folder / "report.html").read_text()
    return report


def test_what_is_wrong_fails_and_nothing_else(broken: dict[str, Any]) -> None:
    scenes = {each["scene"]: each for each in broken["scenes"]}
    assert {name for name, scene in scenes.items() if scene["outcome"] == "failed"} == FAILED
    assert "over the budget" in scenes["attention: layers: sliding_window=9"]["detail"]
    assert "XPASS(strict)" in scenes["attention: layers: dtype=bfloat16"]["detail"]
    assert broken["counts"]["failed"] == len(FAILED) and broken["counts"]["passed"] > 10


def test_what_differs_or_is_unsupported_is_reported_with_the_reason(broken: dict[str, Any]) -> None:
    details = {
        (each["outcome"], each["scene"]): each["detail"] for each in broken["scenes"] if "detail" in each
    }
    declared = "attention: layers: sliding_window=9 soft_cap=2.0"
    assert details["differs by design", declared] == "sees everything"
    assert details["unsupported", "attention: layers: sinks=True"].endswith("attention sinks not supported")
    watermark = "block_manager: the watermark counts in the full sequence check"
    assert details["unsupported", watermark] == "no watermark"
    alone = details["differs by design", "attention: rows of a batch are as alone: mixed"]
    assert alone.startswith("not batch invariant: 1 of 5 rows")


def test_the_page_and_the_data_say_what_was_run(broken: dict[str, Any]) -> None:
    assert broken["attention_backend"] == "tests.conformance.broken:ForgetsWindows"
    assert broken["versions"].keys() >= {"python", "rose-backend", "torch", "vllm"}
    assert all(each["scene"] in broken["html"] for each in broken["scenes"] if "<" not in each["scene"])
    assert broken["html"].count("<tr") == 1 + len(broken["scenes"])
    assert "ForgetsWindows" in broken["html"] and "http" not in broken["html"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--conformance-report", "report.txt"], "report.txt ends with neither .html nor .json"),
        (["--conformance-differences", "missing.toml"], "missing.toml needs [[difference]]"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: list[str], complaint: str) -> None:
    finished = run_suites(tmp_path, *options)
    assert finished.returncode == pytest.ExitCode.USAGE_ERROR and complaint in finished.stderr


def test_what_cannot_be_found_is_said() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_module"):
        find_backend("no_module:Class")
    with pytest.raises(ValueError, match="'NO_BACKEND'"):
        find_backend("NO_BACKEND")
    with pytest.raises(ValueError, match="a KV cache manager is named module:Class"):
        find_manager("KVCacheManager")


@pytest.mark.parametrize("text", ["difference = 1", "[[difference]]\nscene = 'x'", "[other]", "["])
def test_a_file_of_differences_has_nothing_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(pytest.UsageError, match="needs"):
        read_differences(tmp_path / "known.toml")


def test_other_runs_of_pytest_keep_the_names_of_the_options(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--block-manager', action='store_true')"
    )
    (tmp_path / "test_it.py").write_text(
        "def test_it(pytestconfig): assert pytestconfig.option.block_manager"
    )
    command = [*(sys.executable, "-m", "pytest", "-q"), *("-p", "rose_backend.conformance.plugin")]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    finished = subprocess.run([*command, "--block-manager"], cwd=tmp_path, env=environment, timeout=HANG_S)
    assert finished.returncode == 0


def test_the_page_has_the_tables_of_the_results() -> None:
    page = PAGE.read_text()
    assert with_tables(page, read_results()) == page, "run python -m tests.conformance.table"


def test_tables_have_each_report_and_what_differs(broken: dict[str, Any]) -> None:
    named = "`ForgetsWindows, ForgetsResets`"
    assert (
        overview([broken])[1][0] == named
        and [row[1] for row in overview([])[1:]] == ["on a GPU: not yet"] * 5
    )
    rows = {(row[0].partition(", CPU")[0], row[1]): row[2] for row in differences([broken])}
    assert rows[named, "sees everything"] == "1"
    assert rows[named, "fails: a reset is one event"] == "1" and rows[named, "fails: layers"] == "5"


def test_every_entry_is_a_difference() -> None:
    assert [entry.question for entry in DIFFERENCES if entry.rose == entry.stock] == []
    assert len({entry.question for entry in DIFFERENCES}) == len(DIFFERENCES)
