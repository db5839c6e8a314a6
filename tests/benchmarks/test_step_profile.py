"""benchmarks/step_profile.py end to end on a CPU."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import step_profile, vllm_step_profile, vllm_weight_updates
from benchmarks.step_profile import time_decoding
from benchmarks.support.cli import QUICK_MODEL
from rose_backend import LLM, SamplingParams
from rose_backend.kernels import pack_linear
from tests.conftest import ROOT
from tests.support.patience import HANG_S

DEVICE = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@pytest.mark.usefixtures("serves_nobody")
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


def test_quick_step_profile(run_benchmark: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    report = run_benchmark(step_profile.main, "--quick --batches 2")
    assert report["device"] == DEVICE and report["copy_bytes_per_s"] > 1e8
    (step,) = report["profiles"]
    assert step["batch"] == 2 and step["launches"] > 10
    assert 0 < step["floor_us"] < step["engine_step_us"]
    times = [kernel["us"] for kernel in step["kernels"]]
    assert times == sorted(times, reverse=True) and sum(times) == pytest.approx(step["busy_us"])
    assert "2 requests, greedy" in capsys.readouterr().out


def test_time_in_which_kernels_overlap_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [("b", 20, 30), ("a", 0, 10), ("a", 5, 8), ("b", 8, 14)]
    events = [
        SimpleNamespace(
            name=name,
            device_type=torch.autograd.DeviceType.CUDA,
            time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda us=end - start: us),
        )
        for name, start, end in spans
    ]
    events.append(SimpleNamespace(name="a launch", device_type=torch.autograd.DeviceType.CPU))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    profiler = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiler)
    kernels, busy_us = step_profile.kernel_times(lambda: None, 2)
    assert busy_us == (14 + 10) / 2
    assert kernels == [{"name": "b", "launches": 1, "us": 8.0}, {"name": "a", "launches": 1, "us": 6.5}]


@pytest.mark.parametrize("backend", ["rose-in-vllm", "vllm"])
def test_quick_profile_inside_vllm(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    path = tmp_path / "profile.json"
    arguments = ["--quick", "--backends", backend, "--batches", "2", "--chunks", "8"]
    arguments += ["--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm_step_profile", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("Rose is active" in done.stdout + done.stderr) == (backend == "rose-in-vllm")
    decode, prompts, chunks = json.loads(path.read_text())["profiles"]
    assert (decode["scene"], decode["num_requests"]) == ("decode", 2)
    assert (prompts["num_requests"], prompts["prompt_tokens"]) == (8, 32) and prompts["num_steps"] >= 1
    assert (chunks["num_requests"], chunks["chunk"], chunks["num_steps"]) == (2, 8, 4)
    for step in (decode, prompts, chunks):
        assert step["busy_us"] > 0 and step["launches"] > 10
        assert step["idle_us"] == pytest.approx(step["step_us"] - step["busy_us"])
        called = {each["function"].partition("(")[2]: each for each in step["host"]}
        assert called["execute_model)"]["calls"] >= 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--steps", "10000"], "--steps"), (["--prompt-tokens", "99999"], "--prompt-tokens, --chunks")],
)
def test_requests_that_the_model_cannot_take_are_refused(arguments: list[str], named: str) -> None:
    with pytest.raises(SystemExit, match=rf"{named}: the longest request has [\d,]+ tokens; the model takes"):
        vllm_step_profile.main(["--quick", *arguments])


def test_quick_comparison_of_request_kinds(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    path = tmp_path / "kinds.json"
    kinds = ["5 log-probabilities", "JSON schema"]
    arguments = ["--quick", "--shape", "qwen3-0.6b", "--batches", "2", "--kinds", *kinds, "--json", str(path)]
    arguments += ["--adapters", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm_request_kinds", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    scenes = ["plain", *kinds, *(f"one of 2: {kind}" for kind in kinds)]
    assert [row["scene"] for row in rows] == 2 * scenes
    assert {row["backend"] for row in rows} == {"rose-in-vllm", "vllm"}
    assert all(row["num_requests"] == 2 and row["step_ms"] > 0 for row in rows)
    for scene in scenes:
        assert scene in done.stdout


def test_quick_weight_updates(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    path = tmp_path / "updates.json"
    entrances = ["load_weights, buckets", "weight transfer"]
    arguments = ["--quick", "--starts", "2", "--entrances", *entrances, "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm_weight_updates", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in json.loads(path.read_text())["rows"] if row["backend"] == "rose-in-vllm"]
    by_scene = {scene: [row for row in rows if row["scene"] == scene] for scene in ("as loaded", *entrances)}
    for scene, (first, second) in by_scene.items():
        assert first["stale"] == second["stale"] == [] and first["answers"] == second["answers"]
        assert len(first["times_ms"]) == (0 if scene == "as loaded" else 2)
        assert scene in done.stdout
    assert by_scene["as loaded"][0]["answers"] != by_scene["weight transfer"][0]["answers"]


def test_a_stale_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up, other = (torch.randn(4, 3) for _ in range(3))
    weights = {"model.layers.11.mlp.gate_proj.weight": gate, "model.layers.11.mlp.up_proj.weight": up}
    weights |= {"model.layers.11.mlp.down_proj.weight": other, "model.embed_tokens.weight": other}
    read = {
        "model.layers.11.mlp.gate_up_proj": pack_linear(torch.cat((gate, up)), gated=True),
        "model.layers.11.mlp.down_proj": other,
        "lm_head": torch.cat((other, torch.zeros(2, 3))),
    }
    monkeypatch.setattr(vllm_weight_updates, "tensors_read", lambda model: read.items())
    assert vllm_weight_updates.find_stale(None, list(weights.items())) == []
    up[3, 2] += 1
    other[0, 0] += 1
    assert vllm_weight_updates.find_stale(None, list(weights.items())) == [
        "model.layers.11.mlp.gate_up_proj",
        "lm_head",
    ]
