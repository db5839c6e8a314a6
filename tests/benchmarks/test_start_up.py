"""Starts of engines: what a cold and a warm one find, what is measured, and what is said of those that fail."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import start_up
from benchmarks.reports.engines import start_up_bars, start_up_table
from benchmarks.support.engines import EngineOptions, rose_options, vllm_options
from benchmarks.support.worker_pool import EngineError

Start = Callable[[str, EngineOptions, Path], tuple[dict[str, Any], dict[str, Any]]]


def row(backend: str, caches: str, ready_s: float, kv_cache_tokens: int) -> dict[str, Any]:
    figures = {"ready_s": ready_s, "first_token_s": ready_s + 1, "kv_cache_tokens": kv_cache_tokens}
    return {"backend": backend, "caches": caches, **figures}


@pytest.fixture
def caching(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Return what each start finds in its home folder; engines leave a file there. "vllm" does not start."""
    found: list[tuple[str, list[str]]] = []

    def start(name: str, options: EngineOptions, logs: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        home = Path(options.variables["HOME"])
        found.append((name, sorted(path.name for path in home.iterdir() if path.name != "tmp")))
        assert Path(options.variables["TMPDIR"]).is_dir() and "TRITON_CACHE_DIR" not in options.variables
        assert options.variables["PYTHONUSERBASE"]
        if name == "vllm":
            raise EngineError("it has no wheels")
        (home / "compiled").touch()
        return {"ready_s": 5.0, "first_token_s": 6.0, "kv_cache_tokens": 64}, {"version": "1"}

    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    monkeypatch.setattr(start_up, "start", start)
    return found


def test_a_warm_start_finds_what_the_cold_one_left(
    caching: list[tuple[str, list[str]]], run_benchmark: Callable[..., Any]
) -> None:
    report = run_benchmark(start_up.main, "--quick --backends rose vllm rose-in-vllm", status=1)
    cold_and_warm = [[], ["compiled"]]
    # Those that begin take turns; who has failed is not tried again.
    expected = [("rose", each) for each in cold_and_warm] + [("vllm", [])]
    expected += [("rose-in-vllm", each) for each in cold_and_warm] * 2
    expected += [("rose", each) for each in cold_and_warm]
    assert caching == expected
    assert report["failed"] == {"vllm": "it has no wheels"}
    assert [(each["backend"], each["caches"], each["repeat"]) for each in report["rows"]] == [
        (backend, caches, repeat)
        for backend, repeat in (("rose", 0), ("rose-in-vllm", 0), ("rose-in-vllm", 1), ("rose", 1))
        for caches in ("cold", "warm")
    ]
    assert "Rose in vLLM, warm | 5.0 s | 5.0 to 5.0 s | 6.0 s | 64" in start_up_table(report)


def test_no_start_begins_behind_the_limit(caching: list[Any], run_benchmark: Callable[..., Any]) -> None:
    report = run_benchmark(start_up.main, "--quick --max-seconds 1e-9 --backends rose", status=1)
    assert caching == [] and report["turns_left_out"] == 2


def test_goals_are_seconds_behind_vllm_and_a_share_of_its_cache() -> None:
    rows = [
        *(row("vllm", "warm", ready_s, 1000) for ready_s in (20, 30, 22)),
        *(row("rose-in-vllm", "warm", ready_s, 980) for ready_s in (24, 26, 24)),
        row("vllm", "cold", 90, 1000),
        row("rose-in-vllm", "cold", 60, 1000),
    ]
    bars = {bar["name"]: bar for bar in start_up_bars(rows)}
    assert bars["warm start, later than vLLM"]["value"] == pytest.approx(2.0)
    assert bars["cold start, later than vLLM"]["value"] == pytest.approx(-30.0)
    assert [bar["met"] for bar in bars.values()] == [True, True, True, False]
    assert start_up_bars(rows[:3]) == []


def test_engines_choose_their_cache_where_no_size_is_given(tmp_path: Path) -> None:
    sized, free = (
        EngineOptions("vllm", "model", "float16", "cuda", 8, tokens, 10 * tokens, {}) for tokens in (64, 0)
    )
    assert rose_options(sized)["num_blocks"] == 5 and "num_blocks" not in rose_options(free)
    assert vllm_options(sized)["kv_cache_memory_bytes"] == 640
    assert not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & vllm_options(free).keys()


def test_a_start_is_measured_to_the_first_token(tmp_path: Path) -> None:
    options = start_up.parse_options(["--quick", "--repeats", "1", "--backends", "rose"])
    assert isinstance(options, argparse.Namespace)
    found = start_up.measure(options, options.model, tmp_path)
    assert found["failed"] == {}
    cold, warm = found["rows"]
    assert (cold["caches"], warm["caches"]) == ("cold", "warm")
    # 16 requests of at most 1,024 tokens.
    assert cold["kv_cache_tokens"] == 16 * 1024
    assert 0 < cold["ready_s"] < cold["first_token_s"]
    assert found["backends"]["rose"]["version"]
