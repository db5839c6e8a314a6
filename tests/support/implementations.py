"""The implementations of an operation, which one suite tests: plain torch, Triton's interpreter, and a GPU.

A test with an argument ``implementation`` runs once for each of them (``tests/kernels/conftest.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rose_backend.kernels import gpu_properties
from rose_backend.kernels.gpu_properties import GpuProperties
from tests.support.interpreter import run_interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Implementation:
    """Who computes what a public function of ``rose_backend.kernels`` returns."""

    name: str
    device: str = "cpu"

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module-level ``function``, whose tensors are on ``device``.

        In the interpreter tensors pass for a GPU's, so that public functions launch their kernels.
        """
        if self is not INTERPRETER:
            return function(*args, **kwargs)
        return run_interpreted(_call_as_on_gpu, function, args, kwargs)

    @property
    def has_kernels(self) -> bool:
        """Whether kernels compute, not plain torch."""
        return self is not REFERENCE

    def __str__(self) -> str:
        return self.name


REFERENCE, INTERPRETER = Implementation("reference"), Implementation("interpreter")
GPU = Implementation("gpu", "cuda")
ON_GPU = pytest.param(GPU, marks=pytest.mark.gpu)

kernels_only = pytest.mark.parametrize("implementation", [INTERPRETER, ON_GPU], ids=str)
"""Runs a test for the Triton kernels, not for plain torch."""

each_dtype = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        pytest.param(each, dtype, marks=[pytest.mark.gpu] if each is GPU else [], id=f"{each}-{dtype}")
        for each in (REFERENCE, INTERPRETER, GPU)
        for dtype in DTYPES
        # The interpreter truncates bfloat16 where GPUs round it.
        if each is not INTERPRETER or dtype != torch.bfloat16
    ],
)
"""Runs a test for each implementation and each dtype that it computes as it should."""


class _CpuAsGpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func == _IS_CUDA else func(*args, **(kwargs or {}))


_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def _call_as_on_gpu(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with (
        _CpuAsGpu(),
        mock.patch.object(gpu_properties, "_cuda_properties", lambda device: GpuProperties((9, 0), 132)),
    ):
        return function(*args, **kwargs)
