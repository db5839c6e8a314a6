"""LayerNorm with and without the residual add, against float64, within twice plain torch's own error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels import add_layer_norm, layer_norm
from tests.support.error_budget import assert_within_budget

EPS = 1e-5
SHAPES = [(1, 128), (3, 7), (65, 768), (0, 16)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(num_tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens + width)
    x, residual = (torch.randn(num_tokens, width, generator=generator).to(dtype) * 2 + 1 for _ in range(2))
    weight, bias = (torch.randn(width, generator=generator).to(dtype) for _ in range(2))
    return x, residual, weight, bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, _, weight, bias = make(*shape, dtype)
    before = x.clone()
    actual = layer_norm(x, weight, bias, EPS)
    exact = _by_definition(x.double(), weight.double(), bias.double())
    assert_within_budget(actual, exact, F.layer_norm(x, (shape[1],), weight, bias, EPS))
    assert actual.dtype == dtype
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_layer_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight, bias = make(*shape, dtype)
    before = (x.clone(), residual.clone())
    normed, new_residual = add_layer_norm(x, residual, weight, bias, EPS)
    assert torch.equal(new_residual, x + residual)
    exact = _by_definition(x.double() + residual.double(), weight.double(), bias.double())
    assert_within_budget(normed, exact, F.layer_norm(x + residual, (shape[1],), weight, bias, EPS))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_eps_counts() -> None:
    x, _, weight, bias = make(4, 16, torch.float32)
    exact = _by_definition(x.double(), weight.double(), bias.double(), eps=0.5)
    torch.testing.assert_close(layer_norm(x, weight, bias, 0.5).double(), exact, rtol=0, atol=1e-5)


def test_mismatches_are_named() -> None:
    x, residual, weight, bias = make(4, 16, torch.float32)
    with pytest.raises(ShapeError, match=r"weight: expected E=16, got 15"):
        layer_norm(x, weight[:-1], bias, EPS)
    with pytest.raises(ShapeError, match=r"residual: expected T=4, got 3"):
        add_layer_norm(x, residual[:-1], weight, bias, EPS)
    with pytest.raises(ShapeError, match=r"bias: expected dtype torch.float32 as x, got torch.bfloat16"):
        layer_norm(x, weight, bias.bfloat16(), EPS)


def _by_definition(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = EPS
) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias
