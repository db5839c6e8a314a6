"""GPT-2's operations as torch sees them: schemas, fake implementations, and values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rose_backend.vllm_plugin.models import gpt2


def inputs(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) for shape in shapes]


CASES = {
    "bias_gelu": (gpt2.bias_gelu, [(5, 32), (32,)], ()),
    "bias_residual": (gpt2.bias_residual, [(5, 32), (32,), (5, 32)], ()),
    "layer_norm": (gpt2.layer_norm, [(5, 32), (32,), (32,)], (1e-5,)),
    "add_layer_norm": (gpt2.add_layer_norm, [(5, 32), (5, 32), (32,), (32,)], (1e-5,)),
}


@pytest.mark.parametrize("name", CASES)
def test_torch_accepts_schema_and_fake_implementation(name: str) -> None:
    operation, shapes, scalars = CASES[name]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operation.default, (*inputs(*shapes), *scalars), test_utils=checks)


def test_values() -> None:
    x, bias = inputs((5, 32), (32,))
    expected = F.gelu(x + bias, approximate="tanh")
    gpt2.bias_gelu(x, bias)
    torch.testing.assert_close(x, expected)
    x, bias, residual = inputs((5, 32), (32,), (5, 32))
    expected = x + bias + residual
    gpt2.bias_residual(x, bias, residual)
    torch.testing.assert_close(x, expected)
    x, residual, weight, bias = inputs((5, 32), (5, 32), (32,), (32,))
    normed, total = gpt2.add_layer_norm(x, residual, weight, bias, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, F.layer_norm(x + residual, (32,), weight, bias, 1e-5))
    torch.testing.assert_close(gpt2.layer_norm(total, weight, bias, 1e-5), normed)


def test_compiled_code_calls_them_in_order() -> None:
    x, bias, residual = inputs((5, 32), (32,), (5, 32))

    def run(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        wide = x * 2
        gpt2.bias_gelu(wide, bias)
        gpt2.bias_residual(wide, bias, residual)
        return wide

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, bias, residual), run(x, bias, residual))
