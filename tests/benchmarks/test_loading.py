"""Loading of weights beside reading of files: what is read, what is told, and what is a goal."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import loading
from benchmarks.reports.engines import loading_bars


def test_a_quick_run_measures_both_sides(
    run_benchmark: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    forgotten: list[list[str]] = []
    monkeypatch.setattr(
        loading, "forget_files", lambda paths: forgotten.append([path.name for path in paths])
    )
    report = run_benchmark(loading.main, "--quick --repeats 2")
    cold, warm = report["rows"]
    # Two repeats of both sides, cold only.
    assert forgotten == [["model.safetensors"]] * 4
    for row, caches in ((cold, "cold"), (warm, "warm")):
        assert row["caches"] == caches
        assert row["num_bytes"] == Path("models/tiny-gpt2/model.safetensors").stat().st_size
        for side in ("read_bytes_per_s", "load_bytes_per_s"):
            assert row[side]["samples"] == 2 and row[side]["min"] > 0
    assert report["bars"] == [] and report["settings"]["model"] == "models/tiny-gpt2"


def test_every_byte_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "BUFFER_BYTES", 1000)
    seen: list[int] = []
    paths = [tmp_path / name for name in ("one", "two", "none")]
    for path, size in zip(paths, (2500, 1000, 0), strict=True):
        path.write_bytes(bytes(size))

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            seen.append(super().readinto(buffer) or 0)
            return seen[-1]

    monkeypatch.setattr(Path, "open", lambda path, *args, **kwargs: Counting(path))
    loading.read_files(paths)
    assert sorted(seen) == [500, 1000, 1000, 1000]


def test_memory_that_grows_is_seen() -> None:
    taken = []
    with loading.MemoryWatch() as watch:
        # It looks on its own; the block ends when it has seen this, whatever else of the process is freed meanwhile.
        while watch.growth_bytes < 60 << 20:
            assert len(taken) < 250, f"{len(taken)} pieces of 8 MiB, {watch.growth_bytes} bytes were seen"
            taken.append(bytearray(8 << 20))
            taken[-1][::4096] = bytes(len(taken[-1][::4096]))
            time.sleep(0.02)
    assert watch.growth_bytes >= 60 << 20


def test_goals_are_shares_of_the_rate_of_reading() -> None:
    rows = [
        {
            "caches": caches,
            "read_bytes_per_s": {"median": 10e9},
            "load_bytes_per_s": {"median": load},
            "memory_growth_max_bytes": growth,
        }
        for caches, load, growth in (("cold", 9e9, 1e9), ("warm", 7e9, 3e9))
    ]
    bars = loading_bars(rows)
    assert [bar["value"] for bar in bars] == pytest.approx([0.9, 0.7, 3.0])
    assert [bar["met"] for bar in bars] == [True, False, False]
