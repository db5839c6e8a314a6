"""Each benchmark starts from the repository's root, and refuses options that make no sense."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script}", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "script", ["block_manager", "kv_cow_clone", "plot_block_manager", "offline_compare", "arrivals"]
)
def test_help_names_the_script_and_its_options(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert f"python -m benchmarks.{script}" in done.stdout
    assert ("--out" if script.startswith("plot") else "--quick") in done.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("block_manager", ["--repeats", "2"], "--repeats: got 2, at least 3"),
        ("block_manager", ["--rows", "0"], "--rows must be at least 1"),
        ("kv_cow_clone", ["--repeats", "1"], "--repeats: got 1, at least 3"),
        ("kv_cow_clone", ["--old-len", "64"], "--old-len: got 64, its last block of 64 must be part-filled"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    script: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{script}").main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
