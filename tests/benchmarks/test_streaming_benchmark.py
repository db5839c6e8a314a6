"""benchmarks/streaming.py end to end, its check of the scenes, and block management one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import streaming
from benchmarks.support import one_by_one
from benchmarks.support.one_by_one import OneByOneManager, block_management, copy_one_by_one
from rose_backend import kernels
from rose_backend.block_manager import BlockManager
from rose_backend.engine import core

QUICK = ["--quick", "--device", "cpu", "--num-requests", "5", "--warmup-runs", "0", "--repeat-runs", "1"]


def test_a_quick_run_writes_what_it_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new folder" / "streaming.json"
    sides: list[bool] = []
    copies: list[tuple[bool, int]] = []

    def watching(*, one_by_one: bool) -> Any:
        sides.append(one_by_one)
        return block_management(one_by_one=one_by_one)

    def counting(cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, *, block_dim: int) -> None:
        copies.append((sides[-1], len(src)))
        copy_one_by_one(cache, src, dst, block_dim=block_dim)

    monkeypatch.setattr(one_by_one, "copy_one_by_one", counting)
    monkeypatch.setattr(streaming, "block_management", watching)
    assert streaming.main([*QUICK, "--warmup-runs", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "streaming"
    sides = [(row["scene"], row["side"]) for row in report["rows"]]
    assert sides == [(scene, side) for scene in streaming.SCENES for side in ("one by one", "at once")]
    for row in report["rows"]:
        tokens = {"prefix_hit": 1, "shared_tail": 2 * 4, "rollover": 24}[row["scene"]]
        assert (row["completed"], row["total_output_tokens"]) == (5, 5 * tokens)
        assert len(row["runs"]) == 1 and 0 < row["p50_ttft_ms"] <= row["p99_latency_ms"]
    assert "shared_tail, one by one" in capsys.readouterr().out
    # Two runs; one clone for each request, three for each request of four texts.
    assert sum(count for _, count in copies) == 2 * (5 * 1 + 5 * 3)
    assert all(is_one_by_one for is_one_by_one, _ in copies)


def test_only_one_of_the_engines_manages_blocks_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[type] = []
    monkeypatch.setattr(one_by_one, "AsyncEngine", lambda *_, **__: made.append(core.BlockManager))
    for side in streaming.SIDES.values():
        one_by_one.make_engine("model", one_by_one=side)
    assert made == [OneByOneManager, BlockManager]


def test_prompts_share_only_what_their_scene_says() -> None:
    # 256 requests, some turns and 50,257 tokens: firsts drawn at random would meet dozens of times.
    prompts = {
        name: [prompt for turn in range(8) for prompt in scene.prompts(turn, 256, 50_257)]
        for name, scene in streaming.SCENES.items()
    }
    firsts = [prompt[0] for name in ("shared_tail", "rollover") for prompt in prompts[name]]
    assert len(set(firsts)) == len(firsts) and max(firsts) < 50_257
    continued = {tuple(prompt[: streaming.SHARED_TOKENS]) for prompt in prompts["prefix_hit"]}
    following = [prompt[streaming.SHARED_TOKENS] for prompt in prompts["prefix_hit"]]
    assert len(continued) == 1 and len(set(following)) == len(following)
    assert continued.pop()[0] not in firsts


def test_a_scene_that_is_not_what_it_says_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = replace(streaming.SCENES["prefix_hit"], cached_tokens_per_request=64)
    monkeypatch.setitem(streaming.SCENES, "prefix_hit", scene)
    with pytest.raises(RuntimeError, match=r"prefix_hit, one by one: got .*'cached_tokens': 500"):
        streaming.main([*QUICK, "--scenes", "prefix_hit"])


def make_managers() -> list[BlockManager]:
    limits: dict[str, Any] = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 6, "max_model_len": 40}
    return [make(**limits, hash_key=b"key") for make in (BlockManager, OneByOneManager)]


def test_one_by_one_decides_as_at_once() -> None:
    managers = make_managers()
    rng = np.random.default_rng(0)
    prompts = [np.array([1, 2, 3, 4, 5, 6, *tail], np.int32) for tail in ([7], [7, 8], [9, 9, 9])]
    for _ in range(6):
        rows = [[manager.add(prompt) for prompt in prompts] for manager in managers]
        assert rows[0] == rows[1]
        indices = np.array([admission.row for admission in rows[0]])  # type: ignore[union-attr]
        counts = np.array([len(p) - a.num_cached_tokens for p, a in zip(prompts, rows[0], strict=True)])  # type: ignore[union-attr]
        new = rng.integers(1, 9, 3).astype(np.int32)
        for manager in managers:
            assert manager.reserve(indices, counts).ok
            pieces = [prompt[-count:] for prompt, count in zip(prompts, counts, strict=True)]
            manager.commit(indices, counts, np.concatenate(pieces))
            assert manager.reserve(indices, 1).ok
            manager.commit(indices, 1, new)
            plan = manager.take_clone_plan()
            if plan is not None:
                manager.finish_clone_plan(plan)
        assert np.array_equal(managers[0].num_computed_tokens, managers[1].num_computed_tokens)
        assert managers[0].stats.hit_tokens == managers[1].stats.hit_tokens
        for manager in managers:
            manager.check_integrity()
            manager.free(indices)
            manager.check_integrity()
    assert managers[0].stats.hit_tokens > 0


def test_a_shortage_leaves_nothing_behind() -> None:
    for manager in make_managers():
        rows = np.array([manager.add(np.ones(1, np.int32)).row for _ in range(4)])  # type: ignore[union-attr]
        assert not manager.reserve(rows, 30).ok
        assert manager.num_free_blocks == manager.num_usable_blocks
        manager.check_integrity()


def test_one_by_one_copies_the_same() -> None:
    before = torch.randn(2, 2, 6, 4, 1, 8)
    sources, destinations = torch.tensor([1, 1, 4]), torch.tensor([2, 5, 3])
    caches = [before.clone(), before.clone()]
    for copy, cache in zip((kernels.block_clone, copy_one_by_one), caches, strict=True):
        copy(cache, sources, destinations, block_dim=2)
    assert torch.equal(*caches) and not torch.equal(caches[0], before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenes", "nothing"], "invalid choice: 'nothing'"),
        (["--max-batch-size", "3"], "--max-batch-size: got 3, shared_tail needs 4"),
        (["--repeat-runs", "0"], "--repeat-runs: got 0, at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        streaming.parse_options(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
