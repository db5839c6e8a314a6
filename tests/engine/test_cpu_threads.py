"""The threads of a step on a CPU: one for small models, chosen without a clock, in force during steps only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_backend import LLM
from rose_backend import config as engine_config
from rose_backend.cli import main
from rose_backend.config import EngineConfig, num_usable_cores
from rose_backend.engine.process_settings import (
    SMALL_MODEL,
    CpuThreads,
    check_num_threads,
    choose_cpu_threads,
)
from rose_backend.errors import ConfigError
from tests.engine.conftest import GREEDY

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def eight_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch say that it uses eight threads, as on a machine of eight cores; nobody has chosen another number."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(engine_config, "_CPU_MAX", Path("/nowhere"))
    torch.set_num_threads(8)
    yield


def choose(num_weights: int, **options: Any) -> int:
    chosen = choose_cpu_threads(EngineConfig(model="m", **options), CPU, num_weights)
    assert chosen is not None
    return chosen.count


@pytest.mark.parametrize(
    ("num_weights", "count"),
    [(0, 1), (1_300_000, 1), (SMALL_MODEL - 1, 1), (SMALL_MODEL, 4), (124_000_000, 4), (1 << 40, 4)],
)
def test_threads_grow_with_the_model(num_weights: int, count: int) -> None:
    assert choose(num_weights) == count


def test_no_more_threads_than_cores_and_than_torch_uses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert choose(1 << 40) == 4
    torch.set_num_threads(6)
    assert choose(1 << 40) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 9, 11}, raising=False)
    assert (choose(1 << 40), num_usable_cores()) == (2, 4)
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(engine_config, "_CPU_MAX", quota)
    for text, count in (("250000 100000", 2), ("20000 100000", 1), ("900000 100000", 4), ("max 100000", 4)):
        quota.write_text(text + "\n")
        assert (choose(1 << 40), num_usable_cores()) == (max(count // 2, 1), count), text


def test_an_option_comes_before_the_environment_and_that_before_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")  # as torch has read it
    assert choose(1000) == 8
    assert choose(1000, num_threads=3) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert choose(1000) == 1


def test_other_devices_leave_torch_alone_and_refuse_the_option() -> None:
    config = EngineConfig(model="m", num_threads=2)
    assert choose_cpu_threads(config, CUDA, 1 << 40) is None
    check_num_threads(config, CPU)
    check_num_threads(EngineConfig(model="m"), CUDA)
    with pytest.raises(ConfigError, match=r"^num_threads: got 2 while device is cuda, allowed is"):
        check_num_threads(config, CUDA)


@pytest.mark.parametrize("value", [0, -1, 1025, 1.5, True, "2"])
def test_bad_numbers_are_refused(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"^num_threads: got {value!r}, allowed is an integer from 1 to 1024"
    ):
        EngineConfig(model="m", num_threads=value)


@pytest.mark.parametrize(("options", "count"), [({}, 1), ({"num_threads": 2}, 2)])
def test_steps_run_with_them_and_nothing_else_does(
    tiny_model_path: Path, options: dict[str, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(3)
    with LLM(str(tiny_model_path), device="cpu", max_num_seqs=4, **options) as llm:
        counts: list[int] = []
        advance = llm.core._pipeline.advance

        def spy(num_unchecked: int) -> Any:
            counts.append(torch.get_num_threads())
            # Not what this is about, and too many for the machine perhaps.
            torch.set_num_threads(1)
            return advance(num_unchecked)

        monkeypatch.setattr(llm.core._pipeline, "advance", spy)
        for _ in llm.stream("The rose", GREEDY):
            assert torch.get_num_threads() == 3
        assert set(counts) == {count} and len(counts) >= GREEDY.max_tokens
        reason = "num_threads" if options else "for 1 M weights on 3 cores"
        assert dict(llm.core.start_up.lines())["CPU threads"] == f"{count} ({reason})"


def test_they_are_given_back_after_a_failure() -> None:
    for count in (2, 8):
        with pytest.raises(RuntimeError, match="step"), CpuThreads(count, "").in_force():
            assert torch.get_num_threads() == count
            raise RuntimeError("step")
        assert torch.get_num_threads() == 8


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_both_commands_take_the_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "--num-threads N" in capsys.readouterr().out
    arguments = ["--model", "m", *(("--prompt", "a") if command == "generate" else ())]
    assert main([command, *arguments, "--num-threads", "0"]) == 2
    assert "num_threads: got 0, allowed is" in capsys.readouterr().err
