"""benchmarks/kv_cow_clone.py end to end, and that its own check of the variants catches wrong ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kv_cow_clone
from benchmarks.kv_cow_clone import BatchedClone, CloneCase, LoopedClone, check_variant
from benchmarks.reports.parts import OURS, variant_losses

SMALL = ["--layers", "2", "--heads", "2", "--head-size", "8"]
CASE = CloneCase(3, old_len=5, block_size=8, num_layers=2, num_heads=2, head_size=4)


def test_a_quick_run_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new folder" / "cow.json"
    assert kv_cow_clone.main(["--quick", *SMALL, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "kv_cow_clone"
    assert report["command"].startswith("python -m benchmarks.")
    assert {"cpu", "cores", "device", "torch_threads"} <= report["machine"].keys()
    assert {"python", "torch", "numpy"} <= report["versions"].keys()
    assert [row["batch"] for row in report["rows"]] == [1, 16]
    for row in report["rows"]:
        assert list(row["variants"]) == ["loop", "batched_torch", "batched"]
        for figures in row["variants"].values():
            assert list(figures) == ["bookkeeping", "copy", "append", "free", "total"]
            for figure in figures.values():
                assert figure["samples"] == 3
                assert 0 < figure["min"] <= figure["p10"] <= figure["median"] <= figure["p90"]
    assert report["losses"] == variant_losses(report["rows"], OURS["kv_cow_clone"])
    assert "one plan, one launch" in capsys.readouterr().out


@pytest.mark.parametrize("old_len", [1, 5, 13])
@pytest.mark.parametrize("name", list(kv_cow_clone.VARIANTS))
def test_each_variant_is_right_and_leaves_its_books_as_they_were(name: str, old_len: int) -> None:
    case = CloneCase(3, old_len=old_len, block_size=8, num_layers=2, num_heads=2, head_size=4)
    cache = case.make_cache()
    variant = kv_cow_clone.VARIANTS[name](case, cache)
    # More runs than there are blocks to lose.
    for _ in range(5):
        check_variant(case, variant, cache)


class _Forgetful(BatchedClone):
    """Plans, and copies nothing."""

    def run(self, new_kv: torch.Tensor) -> Iterator[str]:
        self._cache = self._cache.clone()
        return super().run(new_kv)


class _Careless(LoopedClone):
    """Writes the new token into the shared block, too."""

    def run(self, new_kv: torch.Tensor) -> Iterator[str]:
        self._cache[:, :, 1, self._case.old_len] = new_kv[:, :, 0]
        return super().run(new_kv)


class _Stingy(LoopedClone):
    """Gives two requests one block."""

    def own_blocks(self) -> list[int]:
        first, _, last = super().own_blocks()
        return [first, first, last]


@pytest.mark.parametrize(
    ("broken", "message"),
    [(_Forgetful, "wrong copy"), (_Careless, "base has changed"), (_Stingy, "own blocks")],
)
def test_a_wrong_variant_is_caught(broken: Any, message: str) -> None:
    cache = CASE.make_cache()
    with pytest.raises(AssertionError, match=message):
        check_variant(CASE, broken(CASE, cache), cache)
