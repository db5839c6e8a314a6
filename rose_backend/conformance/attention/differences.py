"""Where other backends answer otherwise than the definition, as seen on real hardware. Each entry must be true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rose_backend.conformance.attention.cases import Case


@dataclass(frozen=True)
class Difference:
    """One way in which a backend differs."""

    backend: str
    concerns: Callable[[Case, str], bool]
    """Whether a case in a test, by the test's name, shows it."""
    what: str


def _lacks_flash_attention_2() -> bool:
    from vllm.v1.attention.backends.fa_utils import is_fa_version_supported

    return not is_fa_version_supported(2)


DIFFERENCES = (
    Difference(
        "FLASH_ATTN",
        lambda case, test: case.has_float8_cache,
        "float8: rounds the softmax's weights to 4 bits, too, and gives no output but bfloat16",
    ),
    Difference(
        "FLASH_ATTN",
        lambda case, test: case.sinks and case.dtype != torch.bfloat16,
        "takes sinks in bfloat16 only",
    ),
    Difference(
        "FLASH_ATTN",
        lambda case, test: case.alibi and _lacks_flash_attention_2(),
        "takes ALiBi by FlashAttention 2 only, which is not installed",
    ),
    Difference(
        "FLASH_ATTN",
        lambda case, test: test.startswith("test_replay") and case.sliding_window is not None,
        "not finite from a graph when all its requests are shorter than the sliding window",
    ),
    Difference(
        "TRITON_ATTN",
        lambda case, test: case.has_float8_cache,
        "multiplies in float8: the softmax's weights are rounded to 4 bits, too",
    ),
    Difference(
        "TRITON_ATTN",
        lambda case, test: case.dtype == torch.float32,
        "multiplies float32 with 10 bits of mantissa (TF32)",
    ),
    Difference(
        "CPU_ATTN",
        lambda case, test: case.has_float8_cache,
        "stores float8 rounded towards zero, not to the nearest: keys and values are too small",
    ),
    Difference(
        "CPU_ATTN",
        lambda case, test: test == "test_garbage_that_is_not_a_number_is_never_read",
        "multiplies masked slots of a used block by zero: NaN there reaches the output",
    ),
)


def difference(backend: str, case: Case, test: str) -> str | None:
    """Return what is known to differ, or None where the backend must conform."""
    found = (d.what for d in DIFFERENCES if d.backend == backend and d.concerns(case, test))
    return next(found, None)
