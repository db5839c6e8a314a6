"""benchmarks/kv_append.py end to end, and that its own check of the variants catches wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import kv_append
from benchmarks.kv_append import AppendCase, InKernelAppend, LoopedAppend, ReservedAppend, check_variant
from benchmarks.reports.parts import OURS, variant_losses

CASE = AppendCase(3, context=7, repeats=3, block_size=4, num_layers=2, num_heads=2, head_size=16)
SMALL = ["--layers", "2", "--heads", "2", "--head-size", "16", "--context", "20"]


def check(make: Any) -> None:
    torch.manual_seed(0)
    check_variant(CASE, "this one", make)


def test_a_quick_run_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new folder" / "append.json"
    assert kv_append.main(["--quick", *SMALL, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "kv_append"
    assert [row["batch"] for row in report["rows"]] == [1, 4]
    for row in report["rows"]:
        assert list(row["variants"]) == ["append", "reserve_write", "reserve_fused"]
        for figures in row["variants"].values():
            assert list(figures) == ["bookkeeping", "append", "attention", "total"]
            assert all(figure["samples"] == 3 and figure["min"] >= 0 for figure in figures.values())
    assert report["losses"] == variant_losses(report["rows"], OURS["kv_append"])
    assert "stored by attention" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(kv_append.VARIANTS))
def test_each_variant_attends_over_old_and_new_tokens(name: str) -> None:
    check(kv_append.VARIANTS[name])


class _Forgetful(ReservedAppend):
    """Stores nothing."""

    def append(self, projections: torch.Tensor) -> None:
        pass


class _Behind(InKernelAppend):
    """Stores one token too early."""

    def attend(self, projections: torch.Tensor) -> None:
        self._lengths -= 1
        super().attend(projections)


class _Stingy(LoopedAppend):
    """Gives two sequences one block."""

    def make_room(self) -> np.ndarray:
        table = super().make_room()
        self._tables[1][-1] = self._tables[0][-1]
        return table


@pytest.mark.parametrize("broken", [_Forgetful, _Behind, _Stingy])
def test_a_wrong_variant_is_caught(broken: Any) -> None:
    with pytest.raises(AssertionError, match=r"this one, step [01]: attention is off by"):
        check(broken)
