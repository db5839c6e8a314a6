"""The suite runs every published benchmark within its time; each program names its options and refuses bad ones."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import report, suite
from benchmarks.suite import STEPS, command
from benchmarks.support import checkpoint
from tests.conftest import ROOT
from tests.support.patience import HANG_S

UNPUBLISHED = ("draft_changes", "hit_differences_qwen3", "sglang_gpt2", "vllm_gemma3")
"""Steps without a result of an H200 in the repository."""


def rows_of(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *kinds: str, max_seconds: float = float("inf")
) -> list[Any]:
    steps = {kind: (f"tests.benchmarks.fake_step {kind}", ()) for kind in kinds}
    monkeypatch.setattr(suite, "STEPS", steps)
    options = suite.parse_options(["--results", str(folder), "--max-seconds", str(max_seconds)])
    rows = suite.run(options, Console(file=io.StringIO()))
    return [(row["step"], row["outcome"], row["has_result"]) for row in rows]


def test_each_step_writes_its_result_and_a_failure_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text("of an earlier run")
    rows = rows_of(monkeypatch, tmp_path, "good", "bad")
    assert rows == [("good", "done", True), ("bad", "ended with status 1", False)]
    logs = [(tmp_path / f"{name}.log").read_text() for name in ("good", "bad")]
    assert logs[0] == logs[1] and logs[0].startswith("checkpoints in /")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step's time be up as soon as the step is at it, and a stubborn one's grace at once."""
    now = [0.0]

    class Process(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            self._log, self._is_stubborn = Path(options["stdout"].name), "stubborn" in command
            super().__init__(command, **options)

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            if timeout == suite.GRACE_SECONDS and not self._is_stubborn:
                return super().wait(HANG_S)
            while "at it" not in self._log.read_text() and self.poll() is None:
                time.sleep(0.01)
            now[0] += timeout
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(suite.subprocess, "Popen", Process)
    monkeypatch.setattr(suite, "time", SimpleNamespace(monotonic=lambda: now[0]))


def test_a_step_is_interrupted_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, impatient: None
) -> None:
    rows = rows_of(monkeypatch, tmp_path, "long", "good", max_seconds=500.0)
    assert rows == [("long", "interrupted", True), ("good", "no time left", False)]


def test_a_step_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, impatient: None
) -> None:
    assert rows_of(monkeypatch, tmp_path, "stubborn", max_seconds=500.0) == [("stubborn", "killed", False)]


def test_the_status_says_whether_all_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for outcome, status in (("done", 0), ("no time left", 1)):
        row = {"step": "kernels", "outcome": outcome, "seconds": 1.0, "has_result": True}
        monkeypatch.setattr(suite, "run", lambda options, console, row=row: [row])
        assert suite.main(["--results", str(tmp_path)]) == status


def test_where_an_engine_is_installed_goes_to_the_steps_that_compare_it() -> None:
    options = suite.parse_options(["--python-path", "sglang=/opt/s", "--env", "vllm=A=B"])
    both = ["--python-path", "sglang=/opt/s", "--env", "vllm=A=B", "--json", "r"]
    assert command("online_compare", options, Path("r"))[-6:] == both
    inside = command("vllm_parts", options, Path("r"))
    assert inside[-4:] == both[2:] and "sglang=/opt/s" not in inside
    quick = suite.parse_options(["--quick"])
    assert quick.steps == list(STEPS)
    assert command("kv_append", quick, Path("r"))[3:] == ["--quick", "--json", "r"]
    assert command("vllm_serving", quick, Path("r"))[3:] == ["poisson", "--quick", "--json", "r"]


def test_comparisons_go_on_from_what_is_there(tmp_path: Path) -> None:
    resuming, anew = suite.parse_options(["--resume", "--results", str(tmp_path)]), suite.parse_options([])
    can = {name for name, (arguments, _) in STEPS.items() if arguments.split()[0].endswith("_compare")}
    assert len(can) == 40
    for name in STEPS:
        result = tmp_path / f"{name}.json"
        assert "--resume" not in command(name, resuming, result)
        result.write_text("{}")
        expected = ["--resume", str(result)] if name in can else []
        assert command(name, resuming, result)[-2 - len(expected) : -2] == expected
        assert "--resume" not in command(name, anew, result)
    # Turns that were taken are not lost where there is no time for others.
    resuming.steps, resuming.max_seconds = ["arrivals", "kv_append"], 1.0
    assert [row["has_result"] for row in suite.run(resuming, Console(file=io.StringIO()))] == [True, False]


def test_every_published_gpu_result_has_a_step() -> None:
    of_tables, others = (
        {file.stem for file in map(Path, files) if file.parent.name == "h200"}
        for files in ((table.file for table in report.TABLES.values()), report.OTHER_RUNS)
    )
    assert of_tables <= set(STEPS)
    assert set(STEPS) - (of_tables | others) == set(UNPUBLISHED)


@pytest.mark.parametrize("name", STEPS)
def test_each_benchmark_takes_its_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module, *arguments = shlex.split(STEPS[name][0])
    importlib.import_module(module).parse_options(arguments)


def test_checkpoints_are_kept_where_the_variable_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = []

    def write(folder: Path, shape: str, *, small: bool, window: int | None) -> Path:
        folder.mkdir(exist_ok=True)
        written.append((folder.name, shape, small, window))
        return folder

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)
    monkeypatch.setenv(checkpoint.KEPT_IN, str(tmp_path))
    for small, window in ((False, None), (False, None), (True, None), (True, 4112)):
        with checkpoint.checkpoint(None, checkpoint.LLAMA_1B, small=small, window=window) as model:
            assert Path(model).parent == tmp_path
    assert written == [
        ("llama-1b", "llama-1b", False, None),
        ("llama-1b-small", "llama-1b", True, None),
        ("llama-1b-small-window-4112", "llama-1b", True, 4112),
    ]
    monkeypatch.delenv(checkpoint.KEPT_IN)
    with checkpoint.checkpoint(None) as model:
        assert Path(model).parent != tmp_path
    assert len(written) == 4


@pytest.mark.parametrize("name", [name for name in STEPS if name not in ("kernels", *UNPUBLISHED)])
def test_steps_repeat_what_is_published(name: str) -> None:
    published = json.loads((report.RESULTS / "h200" / f"{name}.json").read_text(encoding="utf-8"))["command"]
    # Time limits and spelled-out paths are a run's own; commands have moved since.
    words = shlex.split(re.sub(r" --(max-seconds|json|python-path|env|resume) \S+", "", published))[3:]
    step = command(name, suite.parse_options([]), Path("r"))[3:-2]
    options = [[word for word in line if word not in ("poisson", "in-process")] for line in (words, step)]
    assert sorted(options[0]) == sorted(options[1])


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


SCRIPTS = [
    "block_manager",
    "kv_cow_clone",
    "kv_append",
    "offline_compare",
    "online_compare",
    "draft_changes",
    "hit_differences",
    "start_up",
    "loading",
    "step_profile",
    "vllm_step_profile",
    "kernels",
    "suite",
    "report",
]


def ended(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, Any]:
    """Return the exit status of a benchmark that does not come to run, and what it printed."""
    script, *arguments = command.split()
    if script == "online_compare":
        pytest.importorskip("aiohttp", reason="it talks HTTP (the bench or dev extra)")
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{script}").main(arguments)
    return stopped.value.code, capsys.readouterr()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_the_script_and_its_options(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = ended(f"{script} --help", capsys)
    assert status == 0 and f"python -m benchmarks.{script}" in printed.out
    assert ("--check" if script == "report" else "--quick") in printed.out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("block_manager --repeats 2", "--repeats: got 2, at least 3"),
        ("block_manager --rows 0", "--rows: got 0, at least 1"),
        ("kv_cow_clone --repeats 1", "--repeats: got 1, at least 3"),
        ("kv_cow_clone --old-len 64", "--old-len: got 64, its last block of 64 must be part-filled"),
        ("kernels --repeats 2", "--repeats: got 2, at least 3"),
        ("kernels --samples 0", "--samples: got 0, at least 1"),
        ("kernels --families none", "invalid choice: 'none'"),
        ("kv_append --repeats 2", "--repeats: got 2, at least 3"),
        ("kv_append --context 0", "--context: got 0, at least 1"),
        ("offline_compare --repeats 0", "--repeats: got 0, at least 1"),
        ("offline_compare --mixed-requests 0", "--mixed-requests: got 0, at least 1"),
        ("offline_compare --batches 1 0", "--batches: got 0, at least 1"),
        (
            "offline_compare --python-path nobody=/",
            "got 'nobody=/', needed is BACKEND=..., BACKEND one of rose, ",
        ),
        ("offline_compare --env vllm", "got 'vllm', needed is BACKEND=..."),
        ("online_compare --requests 0", "--requests: got 0, at least 1"),
        ("online_compare --scales 1 0", "--scales: got 0.0, has to be above 0"),
        ("online_compare --length-scale 0", "--length-scale: got 0.0, has to be above 0"),
        ("online_compare --clients 0", "--clients: got 0, at least 1"),
        ("online_compare --repeats 0", "--repeats: got 0, at least 1"),
        ("online_compare in-process --share 0", "--share: got 0.0, has to be above 0"),
        ("online_compare in-process --rate 0", "--rate: got 0.0, has to be above 0"),
        ("online_compare in-process --requests 1", "--requests: got 1, at least 2"),
        ("online_compare streams --streams 0", "--streams: got 0, at least 1"),
        ("online_compare streams --streams 256", "--streams: got 256, has to be below --max-num-seqs 256"),
        ("online_compare streams --stream-tokens 128", "--stream-tokens: got 128, has to be above 128"),
        ("online_compare streams --prompts 2", "--prompts: got 2, needed is one for each of 3 turns"),
        ("online_compare streams --interval 0", "--interval: got 0.0, has to be above 0"),
        ("online_compare streams --arrivals at-once", "invalid choice: 'at-once'"),
        ("online_compare poisson --requests 0", "--requests: got 0, at least 1"),
        ("online_compare poisson --max-seconds 0", "--max-seconds: got 0.0, has to be above 0"),
        ("online_compare poisson --seconds -1", "--seconds: got -1.0, has to be above 0"),
        ("online_compare poisson --loads 0.5 0", "--loads: got 0.0, has to be above 0"),
        ("online_compare poisson --rates -3", "--rates: got -3.0, has to be above 0"),
        ("online_compare poisson --loads 1 --rates 3", "argument --rates: not allowed with argument --loads"),
        ("online_compare poisson --sets both", "invalid choice: 'both'"),
        ("online_compare poisson --step-ms -1 --device cpu", "--step-ms: got -1.0, at least 0"),
        ("online_compare poisson --step-ms 1 --device cuda", "--step-ms: got --device cuda, "),
        (
            "online_compare poisson --compare-joined-outputs --rust-front-end",
            "--compare-joined-outputs: got --rust-front-end, ",
        ),
        (
            "online_compare --backends rose sglang --rust-front-end",
            "--rust-front-end: got --backends rose sglang, ",
        ),
        ("hit_differences --prompt-tokens 4 9", "--prompt-tokens: got 4, at least 5"),
        ("hit_differences --prompt-tokens 9 8", "--prompt-tokens: got 9 8, the first has to be"),
        ("loading --repeats 0", "--repeats: got 0, at least 1"),
        ("start_up --repeats 0", "--repeats: got 0, at least 1"),
        ("start_up --backends sglang", "invalid choice: 'sglang'"),
        (
            "vllm_step_profile --backends vllm rose-in-vllm",
            "--backends: got vllm rose-in-vllm, allowed is one",
        ),
        ("step_profile --batches 4 0", "--batches: got 0, at least 1"),
        ("tune_decode_layer --contexts 144 9-3", "--contexts: got 9-3, allowed: N, or N-N"),
        ("tune_decode_layer --contexts 0", "--contexts: got 0, allowed: N"),
        ("kernels --quick --prove", "--prove: --quick shows no speed"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = ended(command, capsys)
    assert status == 2 and message in printed.err


@pytest.mark.parametrize("script", ["kernels", "tune_decode_layer"])
def test_what_only_a_gpu_can_time_says_so(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [script])
    assert importlib.import_module(f"benchmarks.{script}").main() == 1
    assert "needs a CUDA device; torch" in capsys.readouterr().err
