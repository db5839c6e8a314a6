"""What ``benchmarks/kernels.py`` times: each family of kernels has a function that yields its cases."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

FAMILIES = {
    "decode": "tests/kernels/test_decode_on_gpu.py",
    "prefill": "tests/kernels/test_prefill_on_gpu.py",
    "clone": "tests/kernels/test_elementwise_on_gpu.py",
    "linear": "tests/kernels/test_small_batch_linear_on_gpu.py",
    "sampler": "tests/kernels/test_sampler_on_gpu.py",
    "lm_head": "tests/kernels/test_lm_head_on_gpu.py",
}
"""Family -> the tests that have to pass on the device before its figures are compared with those of peers."""
_MODULES = {"linear": "layer", "sampler": "sampler", "lm_head": "sampler"}


def cases_of(family: str) -> Iterator[Any]:
    """Return the cases of a family, each a ``KernelCase``."""
    module = importlib.import_module(f"benchmarks.kernel_cases.{_MODULES.get(family, 'kv_cache')}")
    found: Iterator[Any] = getattr(module, f"{family}_cases")()
    return found
