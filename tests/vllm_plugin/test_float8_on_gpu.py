"""Float8 weights as vLLM's methods leave them on a GPU: what Rose's kernel and vLLM's make of them, no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.model_loader import get_model

from rose_backend.kernels import Float8Weight, small_batch_linear
from rose_backend.layers.linear import Linear
from rose_backend.vllm_plugin.models.decoder import RoseDecoder
from tests.support.quantized_checkpoints import FORMATS, GPU_SIZES, write_pair
from tests.support.vllm_plugin.configs import MakeConfig

pytestmark = pytest.mark.gpu

ROSES_ROWS = (1, 7, 8, 16, 33, 64, 256)
VLLMS_ROWS = (1, 16, 31, 32, 100, 512)
ROUNDED, ONE_ROUNDING = 1 / 100, 1 / 256
"""Of the largest number of a product, by which bfloat16 may change one of its numbers."""
QUANTIZED = 1 / 10
"""The same of activations in 8 bits."""
REQUANTIZED = 1 / 8
"""Of a weight's largest number: vLLM may have rounded it to e4m3 once more, to another scale."""
ONLINE = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
Load = Callable[..., Any]


@pytest.fixture
def load(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Return a function that loads a model as vLLM's workers do."""
    # No kernels are compiled in other processes.
    monkeypatch.setattr("rose_backend.vllm_plugin.attention.backend.begin_to_compile", lambda *_: None)
    monkeypatch.setattr("rose_backend.vllm_plugin.models.decoder.wait_for_kernels", lambda *_: None)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def load(path: Path, **options: Any) -> RoseDecoder:
        options |= {"additional_config": {"rose": {"max_quantized_rows": 64}}}
        config = make_config(**{"model": str(path), "dtype": "bfloat16", "enforce_eager": False, **options})
        with set_current_vllm_config(config):
            backend = {"cuda": "nccl", "cpu": "gloo"}[device]
            init_distributed_environment(1, 0, f"file://{tmp_path}/ranks", 0, backend)
            initialize_model_parallel(1, 1)
            model = get_model(vllm_config=config)
        assert isinstance(model, RoseDecoder)
        return model

    yield load
    cleanup_dist_env_and_memory()


def linears(model: Any) -> Iterator[tuple[str, Any, Linear]]:
    for index, (layer, module) in enumerate(zip(model._layers, model.model.layers, strict=True)):
        attention, mlp = module.self_attn, module.mlp
        yield f"{index} qkv", attention.qkv_proj, layer.qkv
        yield f"{index} o", attention.o_proj, layer.attn_out
        yield f"{index} gate_up", mlp.gate_up_proj, layer.mlp.gate_up
        yield f"{index} down", mlp.down_proj, layer.mlp.down


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def check_products(name: str, linear: Linear, matrix: torch.Tensor) -> None:
    """Compare both products of a layer with its matrix, [O, E] float64."""
    assert linear.packed is not None and linear.many_rows is not None
    torch.manual_seed(0)
    for num_rows in sorted({*ROSES_ROWS, *VLLMS_ROWS}):
        x = torch.randn(num_rows, matrix.shape[1], dtype=torch.bfloat16, device=matrix.device)
        exact = x.double() @ matrix.t()
        vllms = linear.many_rows(x)
        assert vllms.shape == exact.shape and vllms.dtype is x.dtype
        # That is of the same numbers: the layout is the one that vLLM's kernel reads.
        assert error(vllms, exact) < QUANTIZED, (name, num_rows)
        if num_rows not in ROSES_ROWS:
            continue
        if linear.packed.is_gated:
            gate, up = exact.chunk(2, 1)
            exact = F.silu(gate) * up
            gate, up = vllms.double().chunk(2, 1)
            vllms = F.silu(gate) * up
        roses = small_batch_linear(x, linear.packed)
        assert error(roses, exact) < min(ROUNDED, error(vllms, exact) + ONE_ROUNDING), (name, num_rows)


def meant(tensors: dict[str, torch.Tensor], module: Any) -> torch.Tensor:
    """Return the matrix of a module in a dense checkpoint, [O, E] float64."""
    prefix, _, name = module.prefix.rpartition(".")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    names = parts.get(name, (name,))
    return torch.cat([tensors[f"{prefix}.{part}.weight"] for part in names]).double()


@pytest.mark.parametrize("form", [*FORMATS, *ONLINE])
def test_both_kernels_read_the_same_numbers(load: Load, tmp_path: Path, form: str) -> None:
    is_online = form in ONLINE
    path, dense = write_pair(tmp_path, "qwen3", "fp8 blocks" if is_online else form, **GPU_SIZES)
    model = load(dense, quantization=form) if is_online else load(path)
    assert model._max_packed_rows
    tensors, num_float8 = load_file(dense / "model.safetensors"), 0
    for name, module, linear in linears(model):
        if not isinstance(linear.weight, Float8Weight):
            continue
        num_float8 += 1
        values, scales = linear.weight.values, linear.weight.scales
        assert values.data_ptr() == module.weight.data_ptr(), "a second copy"
        assert linear.weight.has_blocks == ("block" in form)
        print(form, name, type(module.quant_method).__name__, tuple(scales.shape), scales.dtype)
        matrix = linear.weight.dequantized(torch.float64)
        stored = meant(tensors, module).to(matrix.device)
        assert error(matrix, stored) < REQUANTIZED, name
        check_products(name, linear, matrix)
    # One matrix is not quantized, unless vLLM quantizes all.
    assert num_float8 == (8 if is_online else 7)
