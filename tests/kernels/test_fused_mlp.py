"""The element-wise parts of MLPs, against float64, within twice plain torch's own error."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels import bias_gelu, bias_residual, silu_mul
from tests.support.error_budget import assert_within_budget

SHAPES = [(1, 512), (3, 7), (65, 129), (0, 16)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(num_tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens + width)
    x, residual = (torch.randn(num_tokens, width, generator=generator).to(dtype) for _ in range(2))
    return x, torch.randn(width, generator=generator).to(dtype), residual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_gelu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, bias, _ = make(*shape, dtype)
    summed = x.double() + bias.double()
    exact = 0.5 * summed * (1 + torch.tanh(math.sqrt(2 / math.pi) * (summed + 0.044715 * summed**3)))
    torch_result = F.gelu(x + bias, approximate="tanh")
    bias_before = bias.clone()
    actual = bias_gelu(x, bias)
    assert actual is x
    assert_within_budget(actual, exact, torch_result)
    assert torch.equal(bias, bias_before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_residual(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, bias, residual = make(*shape, dtype)
    exact = x.double() + bias.double() + residual.double()
    torch_result = x + bias + residual
    others = (bias.clone(), residual.clone())
    actual = bias_residual(x, bias, residual)
    assert actual is x
    assert_within_budget(actual, exact, torch_result)
    assert torch.equal(bias, others[0])
    assert torch.equal(residual, others[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 1)], ids=str)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_tokens, width = shape
    wide = make(num_tokens, 2 * width + 3, dtype)[0]
    gate_up = wide[:, : 2 * width]
    gate, up = gate_up.double().split(width, 1)
    exact = gate / (1 + torch.exp(-gate)) * up
    torch_result = F.silu(gate_up[:, :width]) * gate_up[:, width:]
    before = wide.clone()
    actual = silu_mul(gate_up)
    assert actual.dtype == dtype
    assert_within_budget(actual, exact, torch_result)
    assert torch.equal(wide, before)
    assert torch.equal(actual, silu_mul(gate_up.contiguous()))
    pairs = torch.stack((gate_up[:, :width], gate_up[:, width:]), 2).flatten(1)
    assert_within_budget(silu_mul(pairs, alternating=True), exact, torch_result)


def test_half_types_round_once() -> None:
    x = torch.tensor([[256.0]], dtype=torch.bfloat16)
    ones = torch.ones(1, 1, dtype=torch.bfloat16)
    # 256 + 1 rounds back to 256 in bfloat16, 256 + 2 does not.
    assert bias_residual(x, ones[0], ones).item() == 258.0


def test_mismatches_are_named() -> None:
    x, bias, residual = make(4, 16, torch.float32)
    with pytest.raises(ShapeError, match=r"bias: expected I=16, got 15"):
        bias_gelu(x, bias[:-1])
    with pytest.raises(ShapeError, match=r"residual: expected T=4, got 3"):
        bias_residual(x, bias, residual[:-1])
    with pytest.raises(ShapeError, match=r"gate_up: expected an even number of columns, got 15"):
        silu_mul(x[:, 1:])
    with pytest.raises(ShapeError, match=r"residual: expected dtype torch.float32 as x, got torch.float16"):
        bias_residual(x, bias, residual.half())
