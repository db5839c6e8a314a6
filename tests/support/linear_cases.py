"""Random products of a few rows with what stands around them in a layer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F

from rose_backend.conformance.error_budget import assert_within_budget
from rose_backend.kernels import (
    Float8Weight,
    Int4Weight,
    NormInput,
    PackedLinear,
    PackedNorm,
    pack_linear,
    pack_norm,
)
from tests.support.moments import left_to

EPS = 1e-5


@dataclass
class Case:
    """Random inputs of one product; ``bias``, ``norm``, ``residual`` are None where the product has none."""

    x: torch.Tensor
    weight: torch.Tensor | Float8Weight | Int4Weight
    bias: torch.Tensor | None
    norm: tuple[torch.Tensor, torch.Tensor | None] | None
    residual: torch.Tensor | None
    gelu: bool
    gated: bool

    @property
    def layer(self) -> PackedLinear:
        """Return the packed layer, a new one each time."""
        norm_weight, norm_bias = (
            self.norm if self.norm is not None and self.norm[1] is not None else (None, None)
        )
        return pack_linear(
            self.weight, self.bias, norm_weight=norm_weight, norm_bias=norm_bias, gated=self.gated
        )

    def given(self, num_parts: int = 1) -> torch.Tensor | NormInput:
        """Return what the product takes: ``x``, or what a kernel in front leaves of it with moments in some parts."""
        if self.norm is None:
            return self.x
        weight, bias = self.norm
        return left_to(pack_norm(weight, EPS) if bias is None else PackedNorm(None, EPS), self.x, num_parts)

    @property
    def next_norm(self) -> PackedNorm:
        """Return a norm for the result: RMSNorm, or LayerNorm where the product has one in front."""
        if self.norm is not None and self.norm[1] is not None:
            return PackedNorm(None, EPS)
        generator = torch.Generator().manual_seed(self.num_outputs)
        return pack_norm((torch.rand(self.num_outputs, generator=generator) * 6 - 3).to(self.x), EPS)

    @property
    def num_outputs(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // (2 if self.gated else 1)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Compute with separate torch operations in ``dtype``."""
        x = self.x.to(dtype)
        if self.norm is not None and self.norm[1] is None:
            x = x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * self.norm[0].to(dtype)
        elif self.norm is not None:
            x = F.layer_norm(x, (x.shape[1],), self.norm[0].to(dtype), self.norm[1].to(dtype), EPS)
        weight = self.weight
        # In float32 nothing of a quantized weight is rounded; other types have it in the type of ``x``.
        wide = weight if isinstance(weight, torch.Tensor) else weight.dequantized(torch.float32)
        y = F.linear(x, wide.to(dtype), None if self.bias is None else self.bias.to(dtype))
        if self.gated:
            y = F.silu(y[:, : self.num_outputs]) * y[:, self.num_outputs :]
        if self.gelu:
            y = F.gelu(y, approximate="tanh")
        return y if self.residual is None else y + self.residual.to(dtype)

    def check(self, actual: torch.Tensor) -> None:
        """Hold a result to the budget."""
        assert_within_budget(actual, self.plain(torch.float64), self.plain(self.x.dtype))


def make_case(
    rows: int,
    depth: int,
    columns: int,
    parts: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    has_values: bool = True,
) -> Case:
    """Return random arguments, or some that were never written.

    ``parts`` names what the product carries: any of "norm" or "rms", "gelu" or "gated", "residual" and "nobias"; with
    "rows" or "blocks" the weight is float8, with scales of those; with "int4-128" it is int4, with scales of as many
    columns, with "int4-all" of all, and with "zeros" with those.
    """
    generator = torch.Generator().manual_seed(rows * 1000 + depth + columns)

    def random(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        if not has_values:
            return torch.empty(shape, dtype=dtype, device=device)
        values = torch.randn(shape, generator=generator) * scale + shift
        return values.to(device=device, dtype=dtype)

    def make_weight() -> torch.Tensor | Float8Weight | Int4Weight:
        if int4 := re.search("int4-([a-z0-9]+)", parts):
            group = depth if int4[1] == "all" else int(int4[1])
            zeros, options = "zeros" in parts, {"device": device, "has_values": has_values}
            scales = torch.float16 if dtype is torch.float32 else dtype
            return random_int4(columns, depth, generator, group, zeros=zeros, scales_dtype=scales, **options)[
                0
            ]
        if "rows" in parts or "blocks" in parts:
            blocks = "blocks" in parts
            return random_float8(
                columns, depth, generator, blocks=blocks, device=device, has_values=has_values
            )
        return random(columns, depth, scale=depth**-0.5)

    gated = "gated" in parts
    if groups := re.search("int4-([0-9]+)", parts):
        depth += -depth % int(groups[1])
    if gated:
        columns += -columns % (256 if "blocks" in parts else 2)  # blocks are whole
    return Case(
        # A mean that is not zero, and rows of a wider tensor.
        x=random(rows, depth + 3, scale=2.0, shift=0.7)[:, :depth],
        weight=make_weight(),
        bias=None if "nobias" in parts else random(columns),
        norm=(random(depth, scale=1.5), random(depth) if "norm" in parts else None)
        if "norm" in parts or "rms" in parts
        else None,
        residual=random(rows, columns + 5)[:, : columns // (2 if gated else 1)]
        if "residual" in parts
        else None,
        gelu="gelu" in parts,
        gated=gated,
    )


def random_float8(
    columns: int,
    depth: int,
    generator: torch.Generator,
    *,
    blocks: bool,
    device: str = "cpu",
    has_values: bool = True,
) -> Float8Weight:
    """Return a weight of every finite number, subnormal ones included, with scales that differ by far."""
    scales = (-(-columns // 128), -(-depth // 128)) if blocks else (columns, 1)
    if not has_values:
        values = torch.empty((columns, depth), dtype=torch.float8_e4m3fn, device=device)
        return Float8Weight(values, torch.empty(scales, device=device))
    magnitudes = torch.randint(0, 127, (columns, depth), generator=generator, dtype=torch.uint8)
    signs = torch.randint(0, 2, (columns, depth), generator=generator, dtype=torch.uint8)
    factors = 2.0 ** (torch.rand(scales, generator=generator) * 6 - 3) * (depth**-0.5 / 100)
    values = (signs * 128 + magnitudes).view(torch.float8_e4m3fn).to(device)
    # Column after column, as vLLM keeps scales for DeepGEMM, and further apart; what lies between is not a number.
    spread = torch.full((scales[1], scales[0] + 1, 2), float("nan"), device=device)[:, 1:, 1].T
    spread.copy_(factors)
    return Float8Weight(values, spread)


def random_int4(
    columns: int,
    depth: int,
    generator: torch.Generator,
    group: int,
    *,
    zeros: bool,
    scales_dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    has_values: bool = True,
) -> tuple[Int4Weight, torch.Tensor]:
    """Return a weight of all codes and, if asked, zeros of 0 to 16, with scales that differ by far; and its matrix.

    The matrix is float64 [columns, depth], of the same numbers by a formula of its own. Codes past the last column are
    random, too.
    """
    step = 32 if group == 32 else 64
    chunk = 4 * step
    wide = -(-depth // chunk) * chunk
    if not has_values:
        words = torch.empty((columns, wide // 4), dtype=torch.int16, device=device)
        scales = torch.empty((depth // group, columns), dtype=scales_dtype, device=device)
        of_zeros = torch.empty((depth // group, columns), dtype=torch.uint8, device=device)
        return Int4Weight(words, scales, of_zeros if zeros else None, depth), torch.empty(0)
    codes = torch.randint(0, 16, (columns, wide), generator=generator)
    scales = 2.0 ** (torch.rand((depth // group, columns), generator=generator) * 6 - 3) * (depth**-0.5 / 8)
    scales = scales.to(scales_dtype)
    of_zeros = torch.randint(0, 17, (depth // group, columns), generator=generator)
    words = torch.zeros((columns, wide // 4), dtype=torch.int64)
    for column in range(wide):
        place = column // chunk * step + column % step
        words[:, place] += codes[:, column] << (4 * (column % chunk // step))
    matrix = torch.empty((columns, depth), dtype=torch.float64)
    for column in range(depth):
        zero = of_zeros[column // group] if zeros else 8
        matrix[:, column] = (codes[:, column] - zero).double() * scales[column // group].double()
    weight = Int4Weight(
        torch.where(words < 1 << 15, words, words - (1 << 16)).to(device, torch.int16),
        scales.to(device),
        of_zeros.to(device, torch.uint8) if zeros else None,
        depth,
    )
    return weight, matrix


PARTS = ["", "norm", "norm gelu", "residual", "gelu residual", "norm residual"]
# Of models without LayerNorm: a bias is where Qwen2 has one.
GATED_PARTS = [
    "nobias",
    "rms",
    "rms nobias",
    "rms gated nobias",
    "nobias residual",
    "norm nobias gated residual",
]


@contextlib.contextmanager
def overlapping(use_pdl: bool | None) -> Iterator[None]:
    """Let launches overlap or not; None: where the device can."""
    from rose_backend.kernels.linear import small_batch_linear as gpu

    can = gpu.has_dependent_launch
    with mock.patch.object(gpu, "has_dependent_launch", can if use_pdl is None else lambda device: use_pdl):
        yield


FLOAT8_PARTS = [
    "rows rms",
    "rows rms gated nobias",
    "rows residual",
    "blocks rms nobias",
    "blocks rms gated",
    "blocks nobias residual",
]
"""Of float8 weights, behind an RMSNorm or before one."""

INT4_PARTS = [
    "int4-128 rms nobias",
    "int4-128 zeros rms gated nobias",
    "int4-64 residual",
    "int4-32 zeros nobias residual",
    "int4-all rms gated",
    "int4-all zeros residual",
]
"""Of int4 weights, likewise."""

SHAPES = [(768, 2304, "norm"), (768, 768, "residual"), (768, 3072, "norm gelu"), (3072, 768, "residual")]
# Qwen3 0.6B.
GATED_SHAPES = [(1024, 4096, "rms nobias"), (1024, 6144, "rms gated nobias"), (3072, 1024, "nobias residual")]
