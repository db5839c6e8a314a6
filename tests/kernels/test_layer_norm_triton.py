"""The Triton kernel of the norms, interpreted on small shapes and compiled for three generations of GPUs.

The interpreter truncates bfloat16 where GPUs round it, so that type is compared on a GPU only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rose_backend import kernels as twin
from rose_backend.errors import ShapeError
from tests.support.aot import compile_launch, compiles, overlapped, record_launches
from tests.support.error_budget import assert_within_budget
from tests.support.interpreter import run_interpreted

EPS = 1e-5
SHAPES = [(1, 128), (3, 7), (5, 768), (0, 16), (2, 1500)]
DTYPES = [torch.float32, torch.float16]


def call(name: str, *args: Any) -> Any:
    from rose_backend.kernels.pointwise import elementwise as gpu

    return getattr(gpu, name)(*args)


def make(num_tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens + width)
    x, residual = (torch.randn(num_tokens, width, generator=generator).to(dtype) * 2 + 1 for _ in range(2))
    weight, bias = (torch.randn(width, generator=generator).to(dtype) for _ in range(2))
    return x, residual, weight, bias


def exact_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + EPS).sqrt() * weight.double() + bias.double()


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, _, weight, bias = make(*shape, dtype)
    before = x.clone()
    normed = run_interpreted(call, "layer_norm", x, weight, bias, EPS)
    torch_result = F.layer_norm(x, weight.shape, weight, bias, EPS)
    assert_within_budget(normed, exact_layer_norm(x.double(), weight, bias), torch_result)
    normed = run_interpreted(call, "rms_norm", x, weight, EPS)
    assert_within_budget(normed, exact_rms_norm(x.double(), weight), F.rms_norm(x, weight.shape, weight, EPS))
    assert normed.dtype == dtype
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_of_sums(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight, bias = make(*shape, dtype)
    before = (x.clone(), residual.clone())
    exact_sum = x.double() + residual.double()
    normed, total = run_interpreted(call, "add_layer_norm", x, residual, weight, bias, EPS)
    torch_result = F.layer_norm(x + residual, weight.shape, weight, bias, EPS)
    assert_within_budget(normed, exact_layer_norm(exact_sum, weight, bias), torch_result)
    assert torch.equal(total, x + residual)
    # The same as in two steps.
    assert torch.equal(normed, run_interpreted(call, "layer_norm", total, weight, bias, EPS))
    normed, total = run_interpreted(call, "add_rms_norm", x, residual, weight, EPS)
    torch_result = F.rms_norm(x + residual, weight.shape, weight, EPS)
    assert_within_budget(normed, exact_rms_norm(exact_sum, weight), torch_result)
    assert torch.equal(total, x + residual)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_added_may_come_in_parts(shape: tuple[int, int], dtype: torch.dtype, num_parts: int) -> None:
    x, residual, weight, bias = make(*shape, dtype)
    # A part next to the other in memory, as products of two halves may be.
    parts = torch.stack([x * (0.3 + part) for part in range(num_parts)], 1).transpose(0, 1)
    before = parts.clone()
    exact_sum = parts.double().sum(0) + residual.double()
    rounded = (parts.float().sum(0) + residual).to(dtype)
    for name, arguments, exact, torch_norm in (
        ("add_layer_norm", (weight, bias, EPS), exact_layer_norm(exact_sum, weight, bias), F.layer_norm),
        ("add_rms_norm", (weight, EPS), exact_rms_norm(exact_sum, weight), F.rms_norm),
    ):
        torch_result = torch_norm(rounded, weight.shape, *arguments)
        for normed, total in (
            run_interpreted(call, name, parts, residual, *arguments),
            getattr(twin, name)(parts, residual, *arguments),
        ):
            assert normed.shape == total.shape == residual.shape
            assert_within_budget(normed, exact, torch_result)
            assert_within_budget(total, exact_sum, rounded)
    assert torch.equal(parts, before)


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_parts_are_of_the_residuals_shape(name: str) -> None:
    x, residual, weight, bias = make(3, 7, torch.float32)
    rest = (weight, bias, EPS) if name == "add_layer_norm" else (weight, EPS)
    with pytest.raises(ShapeError, match="residual"):
        getattr(twin, name)(torch.stack((x, x))[:, :2], residual, *rest)


def test_eps_counts() -> None:
    x, _, weight, bias = make(4, 16, torch.float32)
    for name, args in (("layer_norm", (x, weight, bias, 0.5)), ("rms_norm", (x, weight, 0.5))):
        expected = getattr(twin, name)(*args)
        torch.testing.assert_close(run_interpreted(call, name, *args), expected, rtol=0, atol=1e-5)


def test_views_of_wider_tensors() -> None:
    x, residual, weight, bias = make(3, 64, torch.float16)
    arguments = (x[:, ::2], residual[:, 1::2], weight[::2], bias[1::2])
    expected = run_interpreted(call, "add_layer_norm", *(value.contiguous() for value in arguments), EPS)
    actual = run_interpreted(call, "add_layer_norm", *arguments, EPS)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@compiles("_norm_kernel")
def test_compiles_without_spills(capability: int) -> None:
    from rose_backend.kernels.pointwise import elementwise as gpu

    with record_launches(gpu, "_norm_kernel") as launches:
        for width in (768, 16_384):
            for dtype in (torch.float16, torch.bfloat16):
                x, residual, weight, bias = make(4, width, dtype)
                gpu.add_layer_norm(x, residual, weight, bias, EPS)
        gpu.rms_norm(x, weight, EPS)
        x, residual, weight, _ = make(4, 4096, torch.bfloat16)
        gpu.add_rms_norm(torch.stack((x, x)), residual, weight, EPS)
    assert len(launches) == 6
    for recorded in launches:
        resources = compile_launch(overlapped(recorded, capability), capability)
        assert "ld.global.v4.b32" in resources.ptx and "st.global.v4.b32" in resources.ptx
