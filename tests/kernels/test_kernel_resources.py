"""No kernel goes without a look at what it takes on each generation of GPUs."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from triton.runtime.jit import JITFunction

from rose_backend.compile_ahead.recorded_launches import kernel_modules
from tests.conftest import ROOT
from tests.support import aot, resource_report
from tests.support.aot import (
    COMPILED,
    COMPILING_TESTS,
    Launch,
    Resources,
    compile_launch,
    compiles,
    record_launches,
)
from tests.support.resource_table import resource_rows, resource_table

KERNELS = sorted(
    name
    for module in kernel_modules()
    for name, value in vars(importlib.import_module(module)).items()
    if isinstance(value, JITFunction) and name.endswith("_kernel")
)


def test_every_kernel_has_a_test_that_compiles_it_for_every_capability() -> None:
    for path in (ROOT / "tests" / "kernels").glob("test_*.py"):
        importlib.import_module(f"tests.kernels.{path.stem}")
    assert sorted(COMPILING_TESTS) == KERNELS


def test_a_kernel_that_was_not_compiled_or_spills_fails_its_test() -> None:
    launch = norm_launch(16_384)
    spilling = replace(launch, options={**launch.options, "maxnreg": 32})

    def run(kernel: str, launches: list[Launch]) -> None:
        @compiles(kernel)
        def compile_all(capability: int) -> None:
            for each in launches:
                compile_launch(each, capability)

        compile_all(capability=90)

    known = dict(COMPILING_TESTS)
    try:
        with pytest.raises(AssertionError, match="not compiled"):
            run("_bias_kernel", [launch])
        with pytest.raises(AssertionError, match=r"_norm_kernel: .* bytes spilled"):
            run("_norm_kernel", [launch, spilling])
    finally:
        COMPILING_TESTS.clear()
        COMPILING_TESTS.update(known)
        # Not for the table of this run.
        del COMPILED[-3:]


def norm_launch(width: int) -> Launch:
    from rose_backend.kernels.pointwise import elementwise as norms

    x, weight = torch.zeros(2, width), torch.zeros(width)
    with record_launches(norms, "_norm_kernel") as launches:
        norms.rms_norm(x, weight, 1e-5)
    return launches[0]


def test_a_spill_is_seen_and_named() -> None:
    launch = norm_launch(16_384)
    resources = compile_launch(launch, 90)
    assert resources.spill_bytes == 0
    launch.options["maxnreg"] = 32
    spilling = compile_launch(launch, 90)
    assert spilling.spill_bytes > 0 and spilling.registers <= 32
    # Not for the table of this run, which is one of defaults.
    del COMPILED[-2:]


def test_the_table_names_what_differs() -> None:
    resources = Resources(registers=40, shared_bytes=2048, spill_bytes=0, stack_bytes=0, ptx="")
    spilling = Resources(registers=255, shared_bytes=0, spill_bytes=8, stack_bytes=8, ptx="")
    narrow, wide = norm_launch(768), norm_launch(1024)
    console = Console(width=150, no_color=True)
    with console.capture() as capture:
        console.print(
            resource_table(
                resource_rows([(narrow, 80, resources), (narrow, 90, resources), (wide, 90, spilling)])
            )
        )
    text = capture.get()
    assert text.count("_norm_kernel") == 1
    first, second = [line for line in text.splitlines() if "WIDTH" in line]
    assert "WIDTH 768" in first and first.count("40 regs, 2.0 KiB") == 2
    assert "WIDTH 1024" in second and "255 regs, 0.0 KiB, 8 B SPILLED" in second
    assert "CENTRE" not in text


def test_what_workers_compiled_is_printed_by_the_process_that_started_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = (norm_launch(768), 90, Resources(40, 2048, 0, 0, ""))
    worker: Any = SimpleNamespace(config=SimpleNamespace(workeroutput={}))
    monkeypatch.setattr(resource_report, "_ROWS", [])
    monkeypatch.setattr(aot, "COMPILED", [compiled])
    resource_report.pytest_sessionfinish(worker)
    # Only plain values travel.
    sent = json.loads(json.dumps(worker.config.workeroutput))

    lines: list[str] = []
    terminal: Any = SimpleNamespace(write_line=lines.append)
    monkeypatch.setattr(resource_report, "_ROWS", [])
    resource_report.pytest_terminal_summary(terminal)
    assert lines == []
    resource_report.pytest_testnodedown(SimpleNamespace())  # of one that crashed nothing came
    resource_report.pytest_testnodedown(SimpleNamespace(workeroutput=sent))
    resource_report.pytest_terminal_summary(terminal)
    assert "_norm_kernel" in lines[0] and "40 regs, 2.0 KiB" in lines[0]
