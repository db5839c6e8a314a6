"""What ``benchmarks/kernels.py`` times: families of kernels and their cases."""

from __future__ import annotations

from typing import Any

FAMILIES = {
    "decode": "tests/kernels/test_attention_decode.py",
    "prefill": "tests/kernels/test_attention_prefill.py",
    "clone": "tests/kernels/test_kv.py",
    "linear": "tests/kernels/test_linear.py",
    "float8": "tests/kernels/test_linear.py",
    "int4": "tests/kernels/test_linear.py",
    "sampler": "tests/kernels/test_sampling.py",
}
"""Family -> the tests that have to pass on the device before its figures are compared with those of peers."""


def cases_of(family: str) -> list[Any]:
    """Return the cases of a family that the table shows, each a ``KernelCase``."""
    from benchmarks.kernel_cases import kv_cache, layer, quantized, sampler

    return (kv_cache.CASES | layer.CASES | quantized.CASES | sampler.CASES)[family]
