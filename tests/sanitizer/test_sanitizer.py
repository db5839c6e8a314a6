"""What the sanitizer runs need no GPU for: the command, the comparison of results, and the planted mistakes compile."""

from __future__ import annotations

import shutil
import subprocess
import types
from typing import Any

import pytest
import torch

from tests.sanitizer import __main__ as program
from tests.sanitizer import planted, runs
from tests.support import aot


def test_without_the_tool_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert program.main(["memcheck"]) == 2
    assert "compute-sanitizer: not found" in capsys.readouterr().err


@pytest.mark.parametrize("tool", program.TOOLS)
def test_a_finding_is_the_status_and_allocations_are_exact(
    tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def run(command: list[str], **options: Any) -> Any:
        seen.update(command=command, **options)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", run)
    assert program.main([tool, "--match", "decode", "--planted"]) == 1
    text = " ".join(seen["command"])
    assert text.startswith(f"compute-sanitizer --tool {tool} --error-exitcode 1 ")
    assert text.endswith(f"-m tests.sanitizer none --match decode --planted {tool}")
    assert seen["env"]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


def run_with(monkeypatch: pytest.MonkeyPatch, on_gpu: list[torch.Tensor], launched: set[str]) -> int:
    """Run one made-up case that returns [1, 2] on a CPU and ``on_gpu`` on a device."""

    class Recorded:
        def __init__(self, names: set[str]) -> None:
            names.update(launched)

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(runs, "recorded_launches", Recorded)
    case = {"case": lambda device: [torch.tensor([1.0, 2.0])] if device == "cpu" else on_gpu}
    monkeypatch.setattr(runs, "CASES", case)
    return runs.run_cases("", None)


def test_wrong_results_and_kernels_left_out_are_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = runs.package_kernels()
    assert {"_paged_decode_kernel", "_block_clone_kernel", "small_batch_linear_kernel"} <= everything
    assert run_with(monkeypatch, [torch.tensor([1.0, 2.0])], everything) == 0
    assert run_with(monkeypatch, [torch.tensor([1.0, 2.1])], everything) == 1
    assert "case: result 0: off by 1.00e-01" in capsys.readouterr().err
    assert run_with(monkeypatch, [torch.tensor([1.0, 2.0])], everything - {"_norm_kernel"}) == 1
    assert capsys.readouterr().err == "never launched: _norm_kernel\n"


@pytest.mark.parametrize("name", runs.CASES)
def test_every_case_runs_and_is_the_same_as_itself(name: str) -> None:
    results = runs.CASES[name]("cpu")
    assert results
    for result in results:
        assert result.numel() and runs.difference(result.clone(), result) is None


@pytest.mark.parametrize("name", ["_store_past_the_end", "_race_for_a_word", "_copy"])
def test_the_planted_mistakes_compile(name: str) -> None:
    out = torch.zeros(128, dtype=torch.int32)
    arguments = {"_store_past_the_end": (out, 128), "_race_for_a_word": (out,), "_copy": (out, out)}[name]
    module = types.SimpleNamespace(**{name: getattr(planted, name)})
    with aot.record_launches(module, name) as launches:  # type: ignore[arg-type]
        getattr(module, name)[(1,)](*arguments, num_warps=4)
    ptx = aot.compile_launch(launches[0], 90).ptx
    del aot.COMPILED[-1]
    assert ("st.shared" in ptx) == (name == "_race_for_a_word")
    assert "st.global" in ptx
