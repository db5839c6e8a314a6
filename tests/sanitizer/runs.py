"""Run the cases, compare their results with those of a CPU, and see that no kernel was left out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from rose_backend.compile_ahead.recorded_launches import kernel_modules
from tests.sanitizer.cases import BFLOAT16, CASES, FLOAT8_DTYPE, FLOAT32, HALF, Case
from tests.sanitizer.planted import plant

TOLERANCE = {HALF: 5e-3, BFLOAT16: 4e-2, FLOAT32: 1e-4, FLOAT8_DTYPE: 0.0}


def difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Say how two results differ beyond rounding, or None. Not-a-numbers have to be in the same places."""
    actual = actual.cpu()
    if not actual.is_floating_point():
        wrong = (actual != expected).sum().item()
        return f"{wrong} of {expected.numel()} numbers differ" if wrong else None
    tolerance = TOLERANCE[expected.dtype]
    actual, expected = actual.double(), expected.double()
    if not torch.equal(actual.isnan(), expected.isnan()):
        return "not-a-numbers in other places"
    error = (actual - expected).nan_to_num(0.0).abs().max().item()
    allowed = tolerance * max(1.0, expected.nan_to_num(0.0).abs().max().item())
    return None if error <= allowed else f"off by {error:.2e}, at most {allowed:.2e} allowed"


def package_kernels() -> set[str]:
    """Return the names of all kernels that the package launches."""
    modules = kernel_modules()
    return {
        name
        for module in modules
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


def recorded_launches(names: set[str]) -> Any:
    """Return a context in which the name of every launched kernel is added to ``names``."""
    run = JITFunction.run

    def record(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        names.add(self.__name__)
        return run(self, *args, **kwargs)

    return mock.patch.object(JITFunction, "run", record)


def chosen(match: str) -> Iterator[tuple[str, Case]]:
    """Yield the cases whose name contains ``match``."""
    yield from ((name, case) for name, case in CASES.items() if match in name)


def run_cases(match: str, planted: str | None) -> int:
    """Run the cases; the status is 1 if a result is wrong or, with all cases chosen, a kernel was never launched."""
    problems = []
    launched: set[str] = set()
    with recorded_launches(launched):
        for name, case in chosen(match):
            expected = case("cpu")
            for index, (actual, wanted) in enumerate(zip(case("cuda"), expected, strict=True)):
                wrong = difference(actual, wanted)
                if wrong is not None:
                    problems.append(f"{name}: result {index}: {wrong}")
            print(f"ran {name}", flush=True)
    if planted:
        plant(planted)
    if not match:
        problems += [f"never launched: {name}" for name in sorted(package_kernels() - launched)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(launched)} kernels, {len(problems)} problems")
    return int(bool(problems))
