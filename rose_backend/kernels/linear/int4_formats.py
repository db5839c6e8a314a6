"""How AWQ, GPTQ and compressed-tensors checkpoints store 4-bit matrices, and their conversion to ``Int4Weight``.

To support another packing, add an ``Int4Format``. Both engines read it: ``models/quantization.py`` for the standalone
engine, ``vllm_plugin/models/int4_weights.py`` for vLLM's configurations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from rose_backend.errors import ModelError
from rose_backend.kernels.arguments import INT4_ZERO, Int4Weight


class Packing(NamedTuple):
    """How a matrix of codes is stored: eight codes per int32, the first in the lowest bits."""

    name: str
    """Name of the tensor within its layer."""
    is_transposed: bool
    """Whether the stored matrix is [inputs or groups, outputs]; else it is [outputs, inputs or groups]."""
    axis: int
    """Axis of the stored matrix along which eight codes share an int32."""
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    """For each of the eight codes, which four bits of the int32 hold it, 0 being the lowest."""

    def shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape of the stored tensor."""
        sizes = [inputs, outputs] if self.is_transposed else [outputs, inputs]
        sizes[self.axis] = -(-sizes[self.axis] // 8)
        return sizes[0], sizes[1]

    def unpack(self, packed: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
        """Return the codes, uint8 [outputs, inputs], of a contiguous tensor of ``shape``."""
        words = packed.movedim(self.axis, -1).contiguous().view(torch.uint8)
        places = torch.stack([words & 15, words >> 4], -1).flatten(-2).unflatten(-1, (-1, 8))
        codes = (
            torch.stack([places[..., place] for place in self.order], -1).flatten(-2).movedim(-1, self.axis)
        )
        return (codes.t() if self.is_transposed else codes)[:outputs, :inputs]


class Int4Format(NamedTuple):
    """How a 4-bit format stores a matrix [O, E] with N groups of columns."""

    codes: Packing
    """Of the codes, [O, E]."""
    zeros: Packing
    """Of the zeros, [O, N]."""
    scales_name: str
    """Name of the tensor of scales, [O, N], which is transposed if the zeros are."""
    zero_shift: int = 0
    """To be added to a stored zero: some formats store zero - 1."""
    order_name: str | None = None
    """Name of an optional tensor, [E] int32: the group of each column."""


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
AWQ = Int4Format(Packing("qweight", True, 1, _AWQ_ORDER), Packing("qzeros", True, 1, _AWQ_ORDER), "scales")
"""AutoAWQ's ``gemm``."""
GPTQ_V2 = Int4Format(Packing("qweight", True, 0), Packing("qzeros", True, 1), "scales", order_name="g_idx")
GPTQ = GPTQ_V2._replace(zero_shift=1)
COMPRESSED_TENSORS = Int4Format(
    Packing("weight_packed", False, 1), Packing("weight_zero_point", False, 0), "weight_scale"
)
"""``pack-quantized``."""


class StoredInt4(NamedTuple):
    """The tensors that a checkpoint has for a matrix [O, E], in its format; None: it has no such tensor."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None


def store_int4(
    weight: Int4Weight,  # written
    rows: slice,
    form: Int4Format,
    stored: StoredInt4,
    name: str,
) -> None:
    """Convert a stored matrix into some rows of an ``Int4Weight``.

    ``stored.codes`` may share memory with the words of these rows, so that loading needs no second copy.

    Args:
        rows: of ``weight``, those of the stored matrix.
        name: name of the matrix, for errors.

    Raises:
        ModelError: the weight has no zeros but the stored ones differ from ``INT4_ZERO``, or columns are reordered.
    """
    words = weight.words[rows]
    num_rows, num_groups = words.shape[0], weight.scales.shape[0]
    order = torch.arange(weight.num_columns) // weight.group_size
    if stored.order is not None and not torch.equal(stored.order.cpu(), order.int()):
        raise ModelError(
            f"model: {name} has its columns in another order ({form.order_name}), which is not supported"
        )
    if stored.zeros is not None:
        zeros = form.zeros.unpack(stored.zeros, num_rows, num_groups) + form.zero_shift
        if weight.zeros is not None:
            weight.zeros[:, rows] = zeros.t()
        elif bool((zeros != INT4_ZERO).any()):
            raise ModelError(
                f"model: {name} is symmetric by config.json, and has other zeros than {INT4_ZERO}"
            )
    weight.scales[:, rows] = stored.scales if form.zeros.is_transposed else stored.scales.t()
    codes = form.codes.unpack(stored.codes, num_rows, weight.num_columns)
    padded = F.pad(codes, (0, 4 * words.shape[1] - weight.num_columns))
    first, second, third, fourth = padded.unflatten(1, (-1, 4, weight.step)).unbind(2)
    # The two bytes of each word, the lower one first.
    halves = torch.stack([first | second << 4, third | fourth << 4], -1)
    words.copy_(halves.flatten(1).view(torch.int16))
