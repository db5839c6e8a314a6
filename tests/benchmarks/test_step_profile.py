"""benchmarks/step_profile.py end to end on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import step_profile
from benchmarks.step_profile import time_decoding
from benchmarks.support.cli import QUICK_MODEL
from rose_backend import LLM, SamplingParams

DEVICE = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def test_steps_are_timed_as_generate_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    before, intervals = sys.getswitchinterval(), []
    with LLM(QUICK_MODEL, max_num_seqs=4) as llm:
        step = llm.core.step

        def noting() -> Any:
            intervals.append(sys.getswitchinterval())
            return step()

        monkeypatch.setattr(llm.core, "step", noting)
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
        in_generate = set(intervals)
        run = time_decoding(llm, 2, "greedy", seed=0, max_tokens=8)
    assert in_generate == {intervals[-1]} and intervals[-1] < before == sys.getswitchinterval()
    assert 0 < run["host_us"] <= run["engine_step_us"]


def test_quick_step_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    assert step_profile.main(["--quick", "--batches", "2", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["device"] == DEVICE and report["copy_bytes_per_s"] > 1e8
    (step,) = report["profiles"]
    assert step["batch"] == 2 and step["launches"] > 10
    assert 0 < step["floor_us"] < step["engine_step_us"]
    times = [kernel["us"] for kernel in step["kernels"]]
    assert times == sorted(times, reverse=True) and sum(times) == pytest.approx(step["busy_us"])
    assert "2 requests, greedy" in capsys.readouterr().out
