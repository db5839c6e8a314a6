"""What vLLM's kernels make of activations, written down once more: by numpy's float32 and a table of e4m3's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from rose_backend.kernels import InputQuantization

QUANTIZATIONS = [
    InputQuantization(),
    InputQuantization(by_group=True),
    InputQuantization(by_group=True, powers_of_two=True, aligned_scales=True),
]
LARGEST = np.float32(448)
_CODES = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
"""All numbers of e4m3 that are not negative, in the order of their codes."""


def _adversarial() -> torch.Tensor:
    rows = torch.zeros(16, 256, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    # All numbers halfway between two of e4m3, which the largest magnitudes leave as they are.
    halfway = torch.from_numpy((_CODES[1:] + _CODES[:-1]) / 2)
    rows[1:4, ::128] = 448.0
    rows[1, 1:127], rows[2, 1:127] = halfway, -halfway
    rows[3, 129:255], rows[3, 1:127] = halfway, torch.from_numpy(_CODES[1:])
    for row, size in enumerate((1e-30, 1e-12, 3e-8, 1e-4, 1.0, 500.0, 6e4), 4):
        rows[row] = torch.randn(256, generator=generator, dtype=torch.float64).clamp(-1, 1) * size
    rows[11:] = torch.randn(5, 256, generator=generator, dtype=torch.float64)
    rows[11, 7], rows[12, 130], rows[13, 9], rows[13, 10] = math.nan, math.inf, -math.inf, math.nan
    rows[14], rows[15, :128] = math.nan, 7.0 * 2.0**-5
    rows[4, ::7] = -0.0
    return rows


ADVERSARIAL = _adversarial()
"""[16, 256] float64."""


def gated(numbers: torch.Tensor, *, alternating: bool) -> torch.Tensor:
    """Return gate and up whose ``silu(gate) * up`` is ``numbers``, [T, I], unless the least are rounded."""
    # SiLU of 32 is 32.
    up, gate = numbers / 32, torch.full_like(numbers, 32.0)
    return torch.stack((gate, up), 2).flatten(1) if alternating else torch.cat((gate, up), 1)


def quantized_as_vllm(x: torch.Tensor, quantization: InputQuantization) -> list[torch.Tensor]:
    """Return the codes [T, E] uint8 and the bits of the scales [T, groups] int32 of activations in 16 bits."""
    wide = x.float().cpu().numpy()
    groups = wide.reshape(len(wide), -1, 128 if quantization.by_group else wide.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        # Passes NaN over.
        largest = np.fmax.reduce(np.abs(groups), axis=2, initial=np.float32(0))
        if quantization.by_group:
            scales = np.fmax(largest, np.float32(1e-10)) / LARGEST
            if quantization.powers_of_two:
                # Mantissas of 0.5 to 1: a power of two has 0.5.
                mantissas, exponents = np.frexp(np.fmax(scales, np.float32(1e-10)))
                rounded = np.ldexp(np.float32(1), exponents - (mantissas == 0.5)).astype(np.float32)
                scales = np.where(np.isinf(scales), scales, rounded)
            divided = groups / scales[:, :, None]
            bounded = np.fmin(np.fmax(divided, -LARGEST), LARGEST)
        else:
            scales = np.fmax(largest / LARGEST, np.float32(1) / (LARGEST * np.float32(512)))
            bounded = np.fmax(np.fmin(groups / scales[:, :, None], LARGEST), -LARGEST)
    codes = torch.from_numpy(_nearest_codes(bounded).reshape(wide.shape))
    return [codes.to(x.device), torch.from_numpy(scales).view(torch.int32).to(x.device)]


def _nearest_codes(numbers: np.ndarray) -> np.ndarray:
    magnitudes = np.abs(numbers).astype(np.float64)
    above = np.searchsorted(_CODES, magnitudes).clip(1)
    to_above, to_below = _CODES[above] - magnitudes, magnitudes - _CODES[above - 1]
    # Of two as near, the even one.
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return ((above - ~takes_above) | np.signbit(numbers) << 7).astype(np.uint8)


def rounded_as_gpus(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; in Triton's interpreter, which by itself rounds wrongly, numbers are rounded as GPUs do."""
    import triton
    import triton.language as tl

    if not triton.knobs.runtime.interpret:
        return function(*args, **kwargs)
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    dtypes = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}

    def convert_rightly(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if source != tl.float32 or target not in dtypes:
            return convert(data, source, target, mode)
        size = target.primitive_bitwidth
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(dtypes[target])
        return rounded.view({8: torch.uint8, 16: torch.int16}[size]).numpy().view(f"uint{size}")

    with mock.patch.object(interpreter, "_convert_float", convert_rightly):
        return function(*args, **kwargs)
