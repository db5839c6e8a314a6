"""benchmarks/prefill_flash_attention.py: what it times, after which check. FlashAttention and times are made up."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import prefill_flash_attention as benchmark
from benchmarks.kernel_cases import small
from benchmarks.kernel_cases.kv_cache import Heads
from benchmarks.reports.parts import prefill_flash_attention_table
from rose_backend.kernels import AttentionOptions, PagedKV, paged_prefill, write_kv
from rose_backend.vllm_plugin.attention.flash_attention import FlashRows

HEADS = Heads("small", 4, 2, 16, torch.bfloat16)
NUM_LAYERS = 4
# Of the three graphs: Rose, FlashAttention, its schedule.
TIMES = (30.0, 14.0, 4.0)


class FakeGraph:
    """Runs every launch, as a capture does, and takes as long as its turn among three says."""

    log: list[str]

    def __init__(self, launches: Any) -> None:
        self._us = TIMES[self.log.count("graph") % 3]
        self.log.append("graph")
        for launch in launches:
            launch()

    def sample(self) -> float:
        return self._us


def fake_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: FlashRows,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Make the schedule once, store, and attend to what was stored."""
    if not rows.schedules:
        rows.schedules[query.shape[1]] = benchmark.flash_attention._schedule(rows, query, key_cache)
    write_kv(key, value, key_cache, value_cache, rows.slot_mapping)
    computed = rows.seq_lens - rows.query_start_loc.diff()
    kv = PagedKV(key_cache, value_cache, rows.block_table, computed, rows.query_start_loc)
    paged_prefill(query, None, kv, options=AttentionOptions(scale), out=out)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run small points on the CPU; return what happens, "graph" and "schedule"."""
    events: list[str] = []
    FakeGraph.log = events
    monkeypatch.setattr(benchmark, "LaunchGraph", FakeGraph)
    monkeypatch.setattr(benchmark, "NUM_LAYERS", {HEADS: NUM_LAYERS})
    monkeypatch.setattr(benchmark, "ROWS", (1, 3))
    monkeypatch.setattr(benchmark, "QUERY_LENS", (5, 32))
    monkeypatch.setattr(benchmark, "CONTEXTS", (0, 32))
    monkeypatch.setattr(benchmark, "MAX_NEW_TOKENS", 32)
    monkeypatch.setattr("benchmarks.kernel_cases.case.MAX_SETS", 2)
    monkeypatch.setattr(benchmark.flash_attention, "flash_prefill", fake_flash)
    monkeypatch.setattr(benchmark.flash_attention, "_schedule", lambda *_: events.append("schedule"))
    monkeypatch.setattr(benchmark, "missing", lambda: None)
    monkeypatch.setattr(benchmark, "device_name", lambda device: f"some {device}")
    with small.on_cpu():
        yield events


def test_every_point_that_fits_is_timed(
    log: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    assert benchmark.main(["--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "prefill_flash_attention" and report["device"] == "some cuda"
    assert report.keys() >= {"command", "date", "machine", "versions", "sources_digest", "settings"}
    points = [(row["heads"], row["rows"], row["query_len"], row["context"]) for row in report["rows"]]
    # Three rows of 32 tokens are more than a step may have.
    expected = [(rows, length) for rows, length in ((1, 5), (1, 32), (3, 5))]
    assert points == [("small", *sizes, context) for sizes in expected for context in (0, 32)]
    for row in report["rows"]:
        assert row["rose_us"] == {"p20": 30.0, "median": 30.0, "p80": 30.0}
        # One layer's share of the schedule counts.
        assert row["flash_us"] == {"p20": 15.0, "median": 15.0, "p80": 15.0}
        assert row["schedule_us"]["median"] == 4.0 and row["ratio"] == 2.0
    assert "Slower in 6 of 6 cases" in capsys.readouterr().out


def test_the_schedule_is_made_outside_of_flash_attentions_graph(log: list[str]) -> None:
    benchmark.measure(HEADS, 2, 5, 32)
    assert log == ["schedule", "schedule", "graph", "graph", "graph", "schedule", "schedule"]


@pytest.mark.parametrize("wrong", ["output", "stored", "all"])
def test_nothing_is_timed_where_the_sides_differ(
    log: list[str], wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*args: Any) -> None:
        if wrong != "all":  # nothing is written: what Rose wrote before must not count
            fake_flash(*args)
            (args[7] if wrong == "output" else args[4])[:] *= 1.1

    monkeypatch.setattr(benchmark.flash_attention, "flash_prefill", broken)
    path = tmp_path / "result.json"
    complaint = (
        r"^prefill small 1 x 5: FlashAttention 3 differs from Rose by (\d\.\de-0\d|nan), at most 1\.0e-02"
    )
    with pytest.raises(SystemExit, match=complaint):
        benchmark.main(["--json", str(path)])
    assert "graph" not in log and not path.exists()


def test_the_points_are_those_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[Any] = []
    row = {"heads": "Qwen3-0.6B", "rows": 1, "query_len": 512, "context": 0, "ratio": 1.0}
    monkeypatch.setattr(benchmark, "measure", lambda *point: points.append(point) or row)
    monkeypatch.setattr(benchmark, "missing", lambda: None)
    monkeypatch.setattr(benchmark, "device_name", str)
    assert benchmark.main([]) == 0
    assert Counter(heads.name for heads, *_ in points) == {"Qwen3-0.6B": 95, "Llama-3.1-8B": 95}
    assert max(rows * query_len for _, rows, query_len, _ in points) == 16_384


def test_the_table_has_least_and_most_over_rows() -> None:
    rows = [
        {"heads": heads, "rows": rows, "query_len": 512, "context": context, "ratio": ratio}
        for heads, rows, context, ratio in (("a", 1, 2048, 0.7), ("a", 4, 2048, 1.25), ("b", 1, 0, 1.0))
    ]
    settings = {"heads": {"a": [16, 8], "b": [32, 8]}, "dtype": "bfloat16", "block_size": 16}
    result = {"settings": settings, "device": "some GPU", "versions": {"vllm": "0.32.0"}, "rows": rows}
    header, _, first, second, _, caption, _, verdict = prefill_flash_attention_table(
        {**result, "command": "python -m benchmarks.prefill_flash_attention"}
    ).splitlines()
    assert header == "| Rose / FlashAttention 3 | cached tokens | 512 new |"
    assert first == "| a, 16 / 8 heads | 2,048 | 0.70 to 1.25x |"
    assert second == "| b, 32 / 8 heads | 0 | 1.00 to 1.00x |"
    assert caption == (
        "Medians, some GPU, bfloat16, blocks of 16, 1 / 4 rows of equal lengths; vLLM 0.32.0; "
        "`python -m benchmarks.prefill_flash_attention`."
    )
    assert verdict == "Slower in 1 of 3 cases: those above 1."


@pytest.mark.parametrize(
    ("capability", "why"),
    [
        (None, f"torch {torch.__version__} sees no CUDA device"),
        ((8, 0), "some GPU has compute capability 8.0"),
        ((10, 0), "some GPU has compute capability 10.0"),
        ((9, 0), "import of vllm"),
    ],
)
def test_without_flash_attention_3_the_error_says_what_is_missing(
    capability: tuple[int, int] | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    for module in ("vllm", "vllm.vllm_flash_attn"):
        monkeypatch.setitem(sys.modules, module, None)
    assert benchmark.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"needs compute capability 9.0 and vLLM with FlashAttention 3: {why}")
