"""Scratch memory belongs to an engine's launches, stays where it is, and is not made inside a captured graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.engine.model_runner import ModelRunner
from rose_backend.kernels.attention import shared
from rose_backend.kernels.experts import expert_mlp
from rose_backend.kernels.gpu_properties import Workspace, current_workspace, refuse_first_use_in_capture
from rose_backend.kernels.linear import small_batch_linear

CPU = torch.device("cpu")
# What each kernel with scratch memory asks for.
SCRATCH: dict[str, Callable[[torch.device], Any]] = {
    "paged_decode": lambda device: shared.split_scratch(device, 8, 4),
    "small_batch_linear": small_batch_linear.scratch_on,
    "expert_mlp": lambda device: [expert_mlp._counts_on(device)],
}


@pytest.mark.parametrize("operation", SCRATCH)
def test_each_workspace_has_its_own_and_keeps_it(operation: str) -> None:
    def addresses() -> list[int]:
        return [tensor.data_ptr() for tensor in SCRATCH[operation](CPU)]

    first, second = Workspace(), Workspace()
    outside = addresses()
    with first:
        of_first = addresses()
        with second:
            of_second = addresses()
            with first:
                assert addresses() == of_first
        assert addresses() == of_first
    assert addresses() == outside
    assert not {*of_first} & {*of_second} and not {*outside} & {*of_first, *of_second}


@pytest.mark.parametrize("operation", SCRATCH)
def test_a_first_use_inside_a_capture_is_refused(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with Workspace(), pytest.raises(RuntimeError, match=f"^{operation}: call it once .* before capturing"):
        SCRATCH[operation](torch.device("cuda", 0))
    refuse_first_use_in_capture(operation, CPU)


def test_a_thread_enters_for_itself() -> None:
    seen: list[Workspace] = []
    outer = current_workspace()
    with Workspace():
        thread = threading.Thread(target=lambda: seen.append(current_workspace()))
        thread.start()
        thread.join()
        assert current_workspace() is not outer
    assert seen == [outer]


def test_an_engine_launches_in_its_own(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Workspace] = []
    forward = ModelRunner.forward

    def noting(self: ModelRunner, *args: Any) -> Any:
        used.append(current_workspace())
        return forward(self, *args)

    monkeypatch.setattr(ModelRunner, "forward", noting)
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 70}
    with LLM(str(tiny_model_path), **options) as one, LLM(str(tiny_model_path), **options) as other:
        for llm in (one, other, one):
            llm.generate([[5]], SamplingParams(max_tokens=1))
    first, second, third = used
    assert first is third and first is not second and current_workspace() not in used


def test_a_start_captures_in_the_engines_own(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rose_backend.engine import core

    used: list[Workspace] = []
    warm_up = core.warm_up

    def noting(*args: Any) -> Any:
        used.append(current_workspace())
        return warm_up(*args)

    monkeypatch.setattr(core, "warm_up", noting)
    with LLM(str(tiny_model_path), device="cpu", num_blocks=70) as llm:
        assert used == [llm.core._workspace]
