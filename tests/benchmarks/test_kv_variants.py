"""benchmarks/kv_cow_clone.py and kv_append.py end to end, and that their own checks of variants catch wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import kv_append, kv_cow_clone
from benchmarks.kv_append import AppendCase, InKernelAppend, LoopedAppend, ReservedAppend
from benchmarks.kv_cow_clone import BatchedClone, CloneCase, LoopedClone
from benchmarks.reports.parts import OURS, variant_losses

CLONE = CloneCase(3, old_len=5, block_size=8, num_layers=2, num_heads=2, head_size=4)
APPEND = AppendCase(3, context=7, repeats=3, block_size=4, num_layers=2, num_heads=2, head_size=16)


@pytest.mark.parametrize(
    ("program", "batches", "variants", "parts", "last"),
    [
        (
            kv_cow_clone,
            [1, 16],
            ["loop", "batched_torch", "batched"],
            ["bookkeeping", "copy", "append", "free", "total"],
            "one plan, one launch",
        ),
        (
            kv_append,
            [1, 4],
            ["append", "reserve_write", "reserve_fused"],
            ["bookkeeping", "append", "attention", "total"],
            "stored by attention",
        ),
    ],
    ids=["kv_cow_clone", "kv_append"],
)
def test_a_quick_run_writes_what_it_promises(
    program: Any,
    batches: list[int],
    variants: list[str],
    parts: list[str],
    last: str,
    run_benchmark: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = program.__name__.rpartition(".")[2]
    context = "--context 20" if program is kv_append else ""
    report = run_benchmark(program.main, f"--quick --layers 2 --heads 2 --head-size 16 {context}")
    assert report["benchmark"] == name and report["command"].startswith("python -m benchmarks.")
    assert {"cpu", "cores", "device", "torch_threads"} <= report["machine"].keys()
    assert {"python", "torch", "numpy"} <= report["versions"].keys()
    assert [row["batch"] for row in report["rows"]] == batches
    for row in report["rows"]:
        assert list(row["variants"]) == variants
        for figures in row["variants"].values():
            assert list(figures) == parts
            for figure in figures.values():
                assert figure["samples"] == 3
                assert 0 <= figure["min"] <= figure["p10"] <= figure["median"] <= figure["p90"]
    assert report["losses"] == variant_losses(report["rows"], OURS[name])
    assert last in capsys.readouterr().out


@pytest.mark.parametrize("old_len", [1, 5, 13])
@pytest.mark.parametrize("name", list(kv_cow_clone.VARIANTS))
def test_each_clone_is_right_and_leaves_its_books_as_they_were(name: str, old_len: int) -> None:
    case = CloneCase(3, old_len=old_len, block_size=8, num_layers=2, num_heads=2, head_size=4)
    cache = case.make_cache()
    variant = kv_cow_clone.VARIANTS[name](case, cache)
    # More runs than there are blocks to lose.
    for _ in range(5):
        kv_cow_clone.check_variant(case, variant, cache)


class _NoCopy(BatchedClone):
    """Plans, and copies nothing."""

    def run(self, new_kv: torch.Tensor) -> Iterator[str]:
        self._cache = self._cache.clone()
        return super().run(new_kv)


class _Careless(LoopedClone):
    """Writes the new token into the shared block, too."""

    def run(self, new_kv: torch.Tensor) -> Iterator[str]:
        self._cache[:, :, 1, self._case.old_len] = new_kv[:, :, 0]
        return super().run(new_kv)


class _OneBlockForTwo(LoopedClone):
    """Gives two requests one block."""

    def own_blocks(self) -> list[int]:
        first, _, last = super().own_blocks()
        return [first, first, last]


@pytest.mark.parametrize(
    ("broken", "message"),
    [(_NoCopy, "wrong copy"), (_Careless, "base has changed"), (_OneBlockForTwo, "own blocks")],
)
def test_a_wrong_clone_is_caught(broken: Any, message: str) -> None:
    cache = CLONE.make_cache()
    with pytest.raises(AssertionError, match=message):
        kv_cow_clone.check_variant(CLONE, broken(CLONE, cache), cache)


class _NoStore(ReservedAppend):
    """Stores nothing."""

    def append(self, projections: torch.Tensor) -> None:
        pass


class _Behind(InKernelAppend):
    """Stores one token too early."""

    def attend(self, projections: torch.Tensor) -> None:
        self._lengths -= 1
        super().attend(projections)


class _OneBlockForTwoSequences(LoopedAppend):
    """Gives two sequences one block."""

    def make_room(self) -> np.ndarray:
        table = super().make_room()
        self._tables[1][-1] = self._tables[0][-1]
        return table


@pytest.mark.parametrize("name", list(kv_append.VARIANTS))
def test_each_way_to_append_attends_over_old_and_new_tokens(name: str) -> None:
    kv_append.check_variant(APPEND, name, kv_append.VARIANTS[name])


@pytest.mark.parametrize("broken", [_NoStore, _Behind, _OneBlockForTwoSequences])
def test_a_wrong_way_to_append_is_caught(broken: Any) -> None:
    with pytest.raises(AssertionError, match=r"this one, step [01]: attention is off by"):
        kv_append.check_variant(APPEND, "this one", broken)
