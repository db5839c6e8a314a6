"""Products of many rows with a quantized weight on a GPU.

They take as long as their multiplications. So the matrix is written in the type of ``x``, a part at a time that fits
the L2 cache, and a library multiplies it.
"""

from __future__ import annotations

import torch

from rose_backend.kernels.arguments import SCALED_BLOCK, Float8Weight, QuantizedWeight
from rose_backend.kernels.gpu_properties import current_workspace
from rose_backend.kernels.linear.float8 import dequantize_float8
from rose_backend.kernels.linear.int4 import dequantize_int4
from rose_backend.kernels.tuning.measured import constants

_PART_BYTES = constants("quantized products")["bytes"]
"""That are written in the type of ``x`` at a time."""
_MIN_ROWS = 8
"""Of a part, whose rows are a multiple of them."""


def quantized_linear(
    x: torch.Tensor,  # [T, E]
    weight: QuantizedWeight,  # [O, E]
    bias: torch.Tensor | None,  # [O]
) -> torch.Tensor:
    """Launch kernels and products; arguments as checked by ``rose_backend.kernels.linear.ops``."""
    num_rows, depth = weight.shape
    out = x.new_empty((x.shape[0], num_rows))
    scratch = _scratch(x)
    rows_at_once = _rows_at_once(num_rows, scratch.numel() // depth)
    for first in range(0, num_rows, rows_at_once):
        count = min(rows_at_once, num_rows - first)
        part = scratch[: count * depth].view(count, depth)
        if isinstance(weight, Float8Weight):
            dequantize_float8(weight, first, part)
        else:
            dequantize_int4(weight, first, part)
        columns = slice(first, first + count)
        if bias is None:
            torch.mm(x, part.t(), out=out[:, columns])
        else:
            torch.addmm(bias[columns], x, part.t(), out=out[:, columns])
    return out


def _rows_at_once(num_rows: int, most: int) -> int:
    """Return the rows of each part but the last: parts that are about equal, as products of a few columns are slow."""
    unit = SCALED_BLOCK if most >= SCALED_BLOCK else _MIN_ROWS
    num_parts = -(-num_rows // (most // unit * unit))
    return -(-num_rows // (num_parts * unit)) * unit


def _scratch(x: torch.Tensor) -> torch.Tensor:
    def make() -> tuple[torch.Tensor, ...]:
        return (torch.empty(_PART_BYTES // x.element_size(), dtype=x.dtype, device=x.device),)

    (scratch,) = current_workspace().tensors("quantized_linear", x.device, x.dtype, make)
    return scratch
