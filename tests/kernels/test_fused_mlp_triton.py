"""The Triton kernels of MLPs' element-wise parts, interpreted on small shapes and compiled for three GPUs.

The interpreter truncates bfloat16 where GPUs round it, so that type is compared on a GPU only.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.aot import compile_launch, compiles, record_launches
from tests.support.error_budget import assert_within_budget
from tests.support.interpreter import run_interpreted

SHAPES = [(1, 512), (3, 7), (5, 1029), (0, 16)]
DTYPES = [torch.float32, torch.float16]


def call(name: str, *args: Any) -> torch.Tensor:
    """Run in place; return what was written and require that it is what the function returns."""
    from rose_backend.kernels.pointwise import elementwise as gpu

    assert getattr(gpu, name)(*args) is args[0]
    return args[0]


def silu_mul(gate_up: torch.Tensor, *, alternating: bool = False) -> torch.Tensor:
    from rose_backend.kernels.pointwise import elementwise as gpu

    return gpu.silu_mul(gate_up, alternating=alternating)


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
    assert_within_budget(run_interpreted(call, "bias_gelu", x, bias), exact, torch_result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_residual(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, bias, residual = make(*shape, dtype)
    exact = x.double() + bias.double() + residual.double()
    torch_result = x + bias + residual
    before = residual.clone()
    actual = run_interpreted(call, "bias_residual", x, bias, residual)
    assert_within_budget(actual, exact, torch_result)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 1)], ids=str)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_tokens, width = shape
    wide = make(num_tokens, 2 * width + 3, dtype)[0]
    gate_up = wide[:, : 2 * width]
    gate, up = gate_up.double().split(width, 1)
    torch_result = F.silu(gate_up[:, :width]) * gate_up[:, width:]
    before = wide.clone()
    actual = run_interpreted(silu_mul, gate_up)
    assert actual.dtype == dtype
    assert_within_budget(actual, gate / (1 + torch.exp(-gate)) * up, torch_result)
    assert torch.equal(wide, before)
    apart = gate_up.t().contiguous().t()
    assert torch.equal(run_interpreted(silu_mul, apart), actual)
    pairs = wide.clone()
    pairs[:, : 2 * width] = torch.stack((gate_up[:, :width], gate_up[:, width:]), 2).flatten(1)
    assert torch.equal(run_interpreted(silu_mul, pairs[:, : 2 * width], alternating=True), actual)


def test_half_types_round_once() -> None:
    x, ones = torch.tensor([[2048.0]]).half(), torch.ones(1, 1).half()
    # 2048 + 1 rounds back to 2048 in float16, 2048 + 2 does not.
    assert run_interpreted(call, "bias_residual", x, ones[0], ones).item() == 2050.0


def test_large_values_stay_finite() -> None:
    x = torch.tensor([[-3e4, -20.0, 20.0, 3e4]])
    actual = run_interpreted(call, "bias_gelu", x, torch.zeros(4))
    assert actual.tolist() == [[0.0, 0.0, 20.0, 3e4]]
    gate_up = torch.tensor([[-3e4, -200.0, 200.0, 3e4, 2.0, 3.0, 0.5, 1.0]])
    assert run_interpreted(silu_mul, gate_up).tolist() == [[0.0, 0.0, 100.0, 3e4]]


def test_writes_only_its_view() -> None:
    x, bias, residual = make(4, 64, torch.float16)
    rest = x[:, 32:].clone()
    expected = run_interpreted(
        call, "bias_residual", x[:, :32].clone(), bias[:32], residual[:, ::2].contiguous()
    )
    actual = run_interpreted(call, "bias_residual", x[:, :32], bias[:32], residual[:, ::2])
    assert torch.equal(actual, expected)
    assert torch.equal(x[:, :32], expected)
    assert torch.equal(x[:, 32:], rest)


@compiles("_bias_kernel", "_silu_mul_kernel")
def test_compiles_without_spills(capability: int) -> None:
    from rose_backend.kernels.pointwise import elementwise as gpu

    with record_launches(gpu, "_bias_kernel", "_silu_mul_kernel") as launches:
        for dtype in (torch.float16, torch.bfloat16):
            x, bias, residual = make(4, 3072, dtype)
            gpu.bias_gelu(x, bias)
            gpu.bias_residual(x, bias, residual)
            gpu.silu_mul(x)
            gpu.silu_mul(x, alternating=True)
    assert len(launches) == 8
    for recorded in launches:
        resources = compile_launch(recorded, capability)
        assert "ld.global.v4.b32" in resources.ptx and "st.global.v4.b32" in resources.ptx
