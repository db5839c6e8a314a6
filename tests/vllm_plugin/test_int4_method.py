"""What Rose's method for int4 weights refuses, and what it leaves to vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose_backend.errors import IntegrityError, ModelError, ShapeError
from rose_backend.kernels.linear.int4_formats import AWQ
from rose_backend.layers import linear as linear_layers
from rose_backend.vllm_plugin.models.int4_method import METHODS, RoseInt4Method
from rose_backend.vllm_plugin.models.int4_weights import Int4Scheme

SCHEME = Int4Scheme(AWQ, 128, has_zeros=True)


def made(name: str, **attributes: Any) -> Any:
    return type(name, (SimpleNamespace,), {})(**attributes)


def module_of(method: str, scheme: str = "CompressedTensorsWNA16", *, depth: int = 256) -> Any:
    """Return a module of 16 outputs with such a method of vLLM's, and with what AWQ stores."""
    module: Any = torch.nn.Module()
    module.prefix, module.bias = "model.layers.0.mlp.down_proj", None
    module.output_size_per_partition, module.input_size_per_partition = 16, depth
    module.quant_method = made(method, create_weights=lambda *args, **options: (args, options))
    module.scheme = made(scheme)
    tensors = {
        "qweight": torch.zeros(depth, 2, dtype=torch.int32),
        "qzeros": torch.zeros(depth // 128, 2, dtype=torch.int32),
        "scales": torch.ones(depth // 128, 16),
    }
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


@pytest.mark.parametrize("method", METHODS)
def test_vllms_method_makes_parameters(method: str) -> None:
    module = module_of(method)
    rose = RoseInt4Method(module, SCHEME, max_rows=64, packs=True, gated=False)
    assert module.quant_method is rose
    assert rose.create_weights(module, 3, params_dtype=4) is None
    with pytest.raises(IntegrityError, match="down_proj: a linear module of Rose's layers was called"):
        rose.apply(module, torch.zeros(1, 256))


@pytest.mark.parametrize(
    ("method", "scheme", "named"),
    [
        ("AutoGPTQMarlinLinearMethod", "", "AutoGPTQMarlinLinearMethod"),
        (
            "CompressedTensorsLinearMethod",
            "CompressedTensorsWNA8Int",
            "CompressedTensorsLinearMethod with CompressedTensorsWNA8Int",
        ),
    ],
)
def test_methods_that_are_not_known_are_refused(method: str, scheme: str, named: str) -> None:
    module = module_of(method, scheme)
    kept = module.quant_method
    with pytest.raises(ModelError, match=f"down_proj: Rose's layers do not take int4 weights of {named}$"):
        RoseInt4Method(module, SCHEME, max_rows=64, packs=True, gated=False)
    assert module.quant_method is kept


def test_depths_that_groups_do_not_divide_are_refused() -> None:
    module = module_of(METHODS[-1], depth=300)
    rose = RoseInt4Method(module, SCHEME, max_rows=64, packs=True, gated=False)
    with pytest.raises(ShapeError, match="scales: expected one for"):
        rose.process_weights_after_loading(module)
    # Nothing was replaced.
    assert module.qweight.dtype is torch.int32


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(("num_tokens", "kernel"), [(64, "small_batch_linear"), (65, "quantized_linear")])
def test_prompts_of_few_tokens_are_multiplied_by_roses_kernel(
    packs: bool, num_tokens: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, launched = module_of(METHODS[-1]), []
    rose = RoseInt4Method(module, SCHEME, max_rows=64, packs=packs, gated=False)
    rose.process_weights_after_loading(module)
    for name in ("small_batch_linear", "quantized_linear"):
        monkeypatch.setattr(linear_layers, name, lambda *_, name=name: launched.append(name))
    linear = rose.read()
    assert (linear.packed is not None) == packs and linear.many_rows is not None
    linear.many_rows(torch.zeros(num_tokens, 256))
    assert launched == [kernel]
