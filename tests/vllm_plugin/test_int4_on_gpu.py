"""Int4 weights that vLLM's methods have loaded on a GPU: what Rose's kernel and the library make of them, no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from rose_backend.kernels import Int4Weight, quantized_linear, small_batch_linear
from rose_backend.layers.linear import Linear
from tests.support.quantized_checkpoints import GPU_SIZES, INT4_FORMATS, write_pair
from tests.support.quantized_engines import error, linears_of, meant
from tests.support.vllm_plugin.configs import LoadModel

pytestmark = pytest.mark.gpu

FEW, MANY = (1, 7, 8, 16, 33, 64, 129, 256), (1, 257, 2048, 8192)
ONE_ROUNDING = {torch.bfloat16: 1 / 256, torch.float16: 1 / 2048}
"""Of the largest number of a product, by which a type may change one of its numbers."""
FORMS = [
    form
    for form in INT4_FORMATS
    # What vLLM does not take.
    if not (form.startswith("gptq") and "zeros" in form)
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_products(load_model: LoadModel, tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    path, dense = write_pair(tmp_path, "qwen3", form, **GPU_SIZES)
    model: Any = load_model(path, dtype=str(dtype).removeprefix("torch."))
    assert model._max_packed_rows == 64
    tensors, found = load_file(dense / "model.safetensors"), []
    for name, module, linear in linears_of(model):
        if not isinstance(linear.weight, Int4Weight):
            continue
        found.append(name)
        matrix = linear.weight.dequantized(torch.float64)
        assert torch.equal(matrix.cpu(), meant(tensors, module)), name
        kept = sum(each.nbytes for each in module.parameters(recurse=False))
        # Codes, a scale and perhaps a zero for 32 numbers.
        assert kept < matrix.numel() * (1 / 2 + 3 / 32) + 64, name
        check_products(name, linear, matrix, dtype)
    # One matrix is not quantized.
    assert len(found) == 7


def check_products(name: str, linear: Linear, matrix: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare both products of a layer with its matrix, [O, E] float64, and torch's in the same type."""
    assert linear.packed is not None and isinstance(linear.weight, Int4Weight)
    torch.manual_seed(0)
    rounded = matrix.to(dtype)
    for num_rows in sorted({*FEW, *MANY}):
        x = torch.randn(num_rows, matrix.shape[1], dtype=dtype, device=matrix.device)
        exact = x.double() @ matrix.t()
        bound = error(x @ rounded.t(), exact) + ONE_ROUNDING[dtype]
        if num_rows in MANY:
            assert error(quantized_linear(x, linear.weight, linear.bias), exact) < bound, (name, num_rows)
        if num_rows not in FEW:
            continue
        if linear.packed.is_gated:
            gate, up = exact.chunk(2, 1)
            exact = F.silu(gate) * up
        assert error(small_batch_linear(x, linear.packed), exact) < 2 * bound, (name, num_rows)
