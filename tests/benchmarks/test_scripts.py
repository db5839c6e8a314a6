"""Each benchmark starts from the repository's root, and refuses options that make no sense."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support.patience import HANG_S


def test_a_script_starts_from_the_root() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.block_manager", "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert "python -m benchmarks.block_manager" in done.stdout


SCRIPTS = (
    "block_manager",
    "kv_cow_clone",
    "kv_append",
    "offline_compare",
    "online_compare",
    "start_up",
    "loading",
    "step_profile",
    "vllm_request_kinds",
    "vllm_step_profile",
    "kernels",
    "suite",
    "report",
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_the_script_and_its_options(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    if script == "online_compare":
        pytest.importorskip("aiohttp", reason="it talks HTTP (the bench or dev extra)")
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{script}").main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert f"python -m benchmarks.{script}" in printed
    assert ("--check" if script == "report" else "--quick") in printed


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("block_manager", ["--repeats", "2"], "--repeats: got 2, at least 3"),
        ("block_manager", ["--rows", "0"], "--rows: got 0, at least 1"),
        ("kv_cow_clone", ["--repeats", "1"], "--repeats: got 1, at least 3"),
        ("kv_cow_clone", ["--old-len", "64"], "--old-len: got 64, its last block of 64 must be part-filled"),
        ("kernels", ["--repeats", "2"], "--repeats: got 2, at least 3"),
        ("kernels", ["--samples", "0"], "--samples: got 0, at least 1"),
        ("kernels", ["--families", "none"], "invalid choice: 'none'"),
        ("kv_append", ["--repeats", "2"], "--repeats: got 2, at least 3"),
        ("kv_append", ["--context", "0"], "--context: got 0, at least 1"),
        ("offline_compare", ["--repeats", "0"], "--repeats: got 0, at least 1"),
        ("offline_compare", ["--mixed-requests", "0"], "--mixed-requests: got 0, at least 1"),
        ("offline_compare", ["--batches", "1", "0"], "--batches: got 0, at least 1"),
        (
            "offline_compare",
            ["--python-path", "nobody=/"],
            "got 'nobody=/', needed is BACKEND=..., BACKEND one of rose, ",
        ),
        ("offline_compare", ["--env", "vllm"], "got 'vllm', needed is BACKEND=..."),
        ("online_compare", ["--requests", "0"], "--requests: got 0, at least 1"),
        ("online_compare", ["--scales", "1", "0"], "--scales: got 0.0, has to be above 0"),
        ("online_compare", ["--length-scale", "0"], "--length-scale: got 0.0, has to be above 0"),
        ("online_compare", ["--clients", "0"], "--clients: got 0, at least 1"),
        ("online_compare", ["--repeats", "0"], "--repeats: got 0, at least 1"),
        (
            "online_compare",
            ["in-process", "--share", "0"],
            "--share: got 0.0, has to be above 0",
        ),
        ("online_compare", ["in-process", "--rate", "0"], "--rate: got 0.0, has to be above 0"),
        ("online_compare", ["in-process", "--requests", "1"], "--requests: got 1, at least 2"),
        ("online_compare", ["poisson", "--requests", "0"], "--requests: got 0, at least 1"),
        ("online_compare", ["poisson", "--max-seconds", "0"], "--max-seconds: got 0.0, has to be above 0"),
        ("online_compare", ["poisson", "--seconds", "-1"], "--seconds: got -1.0, has to be above 0"),
        (
            "online_compare",
            ["poisson", "--loads", "0.5", "0"],
            "--loads: got 0.0, has to be above 0",
        ),
        ("online_compare", ["poisson", "--rates", "-3"], "--rates: got -3.0, has to be above 0"),
        (
            "online_compare",
            ["poisson", "--loads", "1", "--rates", "3"],
            "argument --rates: not allowed with argument --loads",
        ),
        ("online_compare", ["poisson", "--sets", "both"], "invalid choice: 'both'"),
        (
            "online_compare",
            ["poisson", "--step-ms", "-1", "--device", "cpu"],
            "--step-ms: got -1.0, at least 0",
        ),
        (
            "online_compare",
            ["poisson", "--step-ms", "1", "--device", "cuda"],
            "--step-ms: got --device cuda, ",
        ),
        (
            "online_compare",
            ["poisson", "--compare-joined-outputs", "--rust-front-end"],
            "--compare-joined-outputs: got --rust-front-end, ",
        ),
        (
            "online_compare",
            ["--backends", "rose", "sglang", "--rust-front-end"],
            "--rust-front-end: got --backends rose sglang, ",
        ),
        ("loading", ["--repeats", "0"], "--repeats: got 0, at least 1"),
        ("start_up", ["--repeats", "0"], "--repeats: got 0, at least 1"),
        ("start_up", ["--backends", "sglang"], "invalid choice: 'sglang'"),
        (
            "vllm_step_profile",
            ["--backends", "vllm", "rose-in-vllm"],
            "--backends: got vllm rose-in-vllm, allowed is one",
        ),
        ("step_profile", ["--batches", "4", "0"], "--batches: got 0, at least 1"),
        ("tune_decode_layer", ["--contexts", "144", "9-3"], "--contexts: got 9-3, allowed: N, or N-N"),
        ("tune_decode_layer", ["--contexts", "0"], "--contexts: got 0, allowed: N"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    script: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if script == "online_compare":
        pytest.importorskip("aiohttp", reason="it talks HTTP (the bench or dev extra)")
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{script}").main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("script", ["kernels", "tune_decode_layer"])
def test_what_only_a_gpu_can_time_says_so(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [script])
    assert importlib.import_module(f"benchmarks.{script}").main() == 1
    assert "needs a CUDA device; torch" in capsys.readouterr().err
