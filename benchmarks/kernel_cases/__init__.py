"""What ``benchmarks/kernels.py`` times: one module per family of kernels, each with ``cases()``."""

from __future__ import annotations

FAMILIES: dict[str, tuple[str, ...]] = {
    "decode": ("tests/kernels/test_decode_on_gpu.py",),
    "prefill": ("tests/kernels/test_prefill_on_gpu.py",),
    "clone": ("tests/kernels/test_elementwise_on_gpu.py",),
    "elementwise": ("tests/kernels/test_elementwise_on_gpu.py",),
    "linear": ("tests/kernels/test_small_batch_linear_on_gpu.py",),
    "sampler": ("tests/kernels/test_sampler_on_gpu.py",),
    "lm_head": ("tests/kernels/test_lm_head_on_gpu.py",),
}
"""Module -> the tests that have to pass on the device before its figures are compared with anybody's."""
