"""benchmarks/reports/floors.py: which steps stand beside the time of their bytes, and that low shares have a reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.reports import floors
from benchmarks.support.checkpoint import LLAMA_8B, QWEN3_06B
from benchmarks.support.step_bytes import bytes_of_shape

MODEL = "random weights, Llama 8B's shapes"


def a_step(ms: float, date: str, host: str = "rose-in-vllm", **engine_options: Any) -> dict[str, Any]:
    row = {
        "scene": "decode",
        "mode": "greedy",
        "num_requests": 1,
        "input_len": [16, 16],
        "output_len": [256, 256],
        "backend": host,
        "figure": "step_ms",
        "figures": {"step_ms": {"median": ms}},
    }
    settings = {"model": MODEL, "dtype": "bfloat16", "engine_options": {host: engine_options}}
    return {"benchmark": "offline_compare", "date": date, "settings": settings, "rows": [row]}


def a_kind(ms: float, date: str, **settings: Any) -> dict[str, Any]:
    rows = [
        {"scene": scene, "backend": host, "num_requests": 1, "step_ms": ms}
        for scene, host in (("plain", "rose-in-vllm"), ("bias", "rose-in-vllm"), ("plain", "vllm"))
    ]
    settings = {"model": MODEL, "dtype": "bfloat16", "steps": 64, **settings}
    return {"benchmark": "vllm_request_kinds", "date": date, "settings": settings, "rows": rows}


A_COPY = {"date": "1", "copy_bytes_per_s": 4e12}


def test_steps_are_the_newest_of_whole_engines_without_drafts_ranks_and_adapters() -> None:
    results = {
        "h200/a.json": a_step(4.0, "2"),
        "h200/b.json": a_step(5.0, "1"),
        "h200/c.json": a_step(1.0, "3", speculative_config={"method": "ngram"}),
        "h200/d.json": a_step(2.0, "3", data_parallel_size=2),
        "h200/e.json": a_kind(3.0, "3"),
        "h200/f.json": a_step(3.9, "1", "rose"),
        "h200/g.json": a_step(3.5, "3", "vllm"),
        "cpu/h.json": a_step(9.0, "3"),
    }
    (hosts,) = floors.newest_steps(results).values()
    assert {host: (step.ms, step.file, step.context) for host, step in hosts.items()} == {
        "rose-in-vllm": (4.0, "h200/a.json", 144),
        "rose": (3.9, "h200/f.json", 144),
    }
    (only,) = floors.newest_steps({"h100/e.json": a_kind(3.0, "3")}).values()
    # Behind 16 tokens of a prompt and 24 steps, in the middle of 64.
    assert [(step.ms, step.context) for step in only.values()] == [(3.0, 72)]
    assert floors.newest_steps({"h200/e.json": a_kind(3.0, "3", adapters=8)}) == {}


@pytest.mark.parametrize("measured", [None, 2e12])
def test_a_share_is_of_the_copy_in_the_same_call_or_of_the_fastest(measured: float | None) -> None:
    step = a_step(10.0, "1") | ({"copy_bytes_per_s": measured} if measured else {})
    results = {"h200/a.json": step, "h200/copy.json": A_COPY, "h100/copy.json": A_COPY}
    num_bytes = bytes_of_shape(LLAMA_8B, "bfloat16").of(1, 144)
    share = num_bytes / (measured or 4e12) / 10e-3
    if share < floors.LOW_SHARE:
        with pytest.raises(ValueError, match="Llama 8B, 1 requests: no reason is known for its low share"):
            floors.table(results)
        return
    (row,) = re.findall(r"^\| Llama 8B \|.*", floors.table(results), re.MULTILINE)
    assert row.split(" | ")[5:8] == ["", "10 ms", f"{share:.0%}"] and f"{num_bytes / 1e9:.2f} GB" in row


def test_launches_are_those_of_the_newest_profile_of_either_host() -> None:
    def profile(count: float, date: str, **changes: Any) -> dict[str, Any]:
        settings = {"model": "random weights, Qwen3 0.6B's shapes"}
        profiles = [{"batch": 8, "launches": count}]
        return {
            "benchmark": "step_profile",
            "date": date,
            "settings": settings,
            "profiles": profiles,
        } | changes

    inside = [
        {"scene": scene, "num_requests": 8, "launches": count}
        for scene, count in (("decode", 129.2), ("prompts", 300))
    ]
    results = {
        "h100/a.json": profile(147.0, "2"),
        "h100/b.json": profile(175.0, "1"),
        "h200/c.json": profile(
            0, "1", benchmark="vllm_step_profile", backend="rose-in-vllm", profiles=inside
        ),
        "h200/d.json": profile(0, "1", benchmark="vllm_step_profile", backend="vllm", profiles=inside),
    }
    assert floors.launches(results) == {(QWEN3_06B, 8, "rose"): 147, (QWEN3_06B, 8, "rose-in-vllm"): 129}
