"""What ``benchmarks/kernels.py`` times: each family of kernels has a function that yields its cases."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

FAMILIES: dict[str, tuple[str, ...]] = {
    "decode": ("tests/kernels/test_decode_on_gpu.py",),
    "prefill": ("tests/kernels/test_prefill_on_gpu.py",),
    "clone": ("tests/kernels/test_elementwise_on_gpu.py",),
    "linear": ("tests/kernels/test_small_batch_linear_on_gpu.py",),
    "sampler": ("tests/kernels/test_sampler_on_gpu.py",),
    "lm_head": ("tests/kernels/test_lm_head_on_gpu.py",),
}
"""Family -> the tests that have to pass on the device before its figures are compared with those of peers."""
_MODULES = {
    "decode": "kv_cache",
    "prefill": "kv_cache",
    "clone": "kv_cache",
    "lm_head": "sampler",
    "linear": "layer",
}


def cases_of(family: str) -> Iterator[Any]:
    """Return the cases of a family, each a ``KernelCase``."""
    module = importlib.import_module(f"benchmarks.kernel_cases.{_MODULES.get(family, family)}")
    found: Iterator[Any] = getattr(module, f"{family}_cases")()
    return found


MISSING: dict[str, str] = {}
"""Peer -> why it is left out."""


def load_peer(peer: str, *modules: str) -> list[ModuleType] | None:
    """Import what ``peer`` needs; where that is not installed, note why and return None."""
    try:
        return [importlib.import_module(module) for module in modules]
    except ImportError as error:
        MISSING[peer] = str(error)
        return None
