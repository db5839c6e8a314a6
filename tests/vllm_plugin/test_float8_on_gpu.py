"""Float8 weights as vLLM's methods leave them on a GPU: what Rose's kernel and vLLM's make of them, no engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

from rose_backend.kernels import (
    Float8Weight,
    InputQuantization,
    QuantizedActivations,
    add_rms_norm,
    rms_norm,
    rms_norm_quantized,
    silu_mul,
    silu_mul_quantized,
    small_batch_linear,
)
from rose_backend.kernels.arguments import SCALED_BLOCK
from rose_backend.layers.linear import Linear, Mlp, ResidualStream
from rose_backend.vllm_plugin.models.decoder import RoseDecoder, norm_of
from tests.support.quantized_activations import ADVERSARIAL, QUANTIZATIONS, gated
from tests.support.quantized_checkpoints import FORMATS, GPU_SIZES, write_pair
from tests.support.quantized_engines import error, linears_of, meant
from tests.support.vllm_plugin.configs import LoadModel

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


@pytest.mark.parametrize("form", [*FORMATS, *ONLINE])
def test_both_kernels_read_the_same_numbers(load_model: LoadModel, tmp_path: Path, form: str) -> None:
    is_online = form in ONLINE
    path, dense = write_pair(tmp_path, "qwen3", "fp8 blocks" if is_online else form, **GPU_SIZES)
    model = load_model(dense, quantization=form) if is_online else load_model(path)
    assert model._max_packed_rows
    tensors, num_float8 = load_file(dense / "model.safetensors"), 0
    for name, module, linear in linears_of(model):
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
def test_input_is_quantized_to_vllms_bits(quantization: InputQuantization, dtype: torch.dtype) -> None:
    """What norms and activations would have stored in 16 bits, by vLLM's own kernels."""
    generator = torch.Generator("cuda").manual_seed(0)
    numbers = [ADVERSARIAL.to("cuda", dtype)]
    for num_rows, width in ((1, 128), (33, 14_336), (130, 12_288), (1000, 384), (8200, 5120)):
        scales = torch.randn(num_rows, 1, generator=generator, device="cuda").mul(5).exp2()
        numbers.append((torch.randn(num_rows, width, generator=generator, device="cuda") * scales).to(dtype))
    for x in numbers:
        for alternating in (False, True):
            gate_up = gated(x, alternating=alternating)
            check_bits(
                silu_mul_quantized(gate_up, quantization, alternating=alternating),
                silu_mul(gate_up, alternating=alternating),
            )
        residual = torch.randn(x.shape, generator=generator, device="cuda").to(dtype)
        weight = torch.randn(x.shape[1], generator=generator, device="cuda").to(dtype)
        quantized, total = rms_norm_quantized(x, None, weight, 1e-6, quantization)
        assert total is x
        check_bits(quantized, rms_norm(x, weight, 1e-6))
        for given in (x, torch.stack((x, residual))):
            quantized, total = rms_norm_quantized(given, residual, weight, 1e-6, quantization)
            normed, expected = add_rms_norm(given, residual, weight, 1e-6)
            assert torch.equal(total.view(torch.int16), expected.view(torch.int16))
            check_bits(quantized, normed)


def check_bits(quantized: QuantizedActivations, x: torch.Tensor) -> None:
    """Compare with vLLM's values, scales and their layout."""
    quantization = quantized.quantization
    if quantization.by_group:
        values, scales = per_token_group_quant_fp8(
            x,
            SCALED_BLOCK,
            column_major_scales=True,
            tma_aligned_scales=quantization.aligned_scales,
            use_ue8m0=quantization.powers_of_two,
        )
    else:
        values, scales = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    assert quantized.values.dtype is values.dtype and quantized.scales.dtype is scales.dtype
    assert quantized.scales.shape == scales.shape and quantized.scales.stride() == scales.stride()
    assert torch.equal(quantized.scales.view(torch.int32), scales.view(torch.int32))
    assert torch.equal(quantized.values.view(torch.uint8), values.view(torch.uint8))


QUANTIZED_FORMS = [form for form in FORMATS if "block" in form or "channel" in form]


@pytest.mark.parametrize("form", [*QUANTIZED_FORMS, *ONLINE])
def test_layers_compute_what_they_do_with_vllms_quantization(
    load_model: LoadModel, tmp_path: Path, form: str
) -> None:
    is_online = form in ONLINE
    path, dense = write_pair(tmp_path, "qwen3", "fp8 blocks" if is_online else form, **GPU_SIZES)
    model = load_model(dense, quantization=form) if is_online else load_model(path)
    all_linears = [(name, module, linear) for name, module, linear in linears_of(model)]
    for name, module, linear in all_linears:
        print(name, type(module.quant_method).__name__, linear.quantization)
        assert not isinstance(linear.weight, Float8Weight) or linear.quantization is not None
    width = model.model.norm.weight.shape[0]
    for num_rows in (1, 31, 32, 33, 128, 130, 1001, 8200):
        hidden = torch.randn(num_rows, width, dtype=torch.bfloat16, device="cuda")
        found = [run_layers(model, hidden, quantizes=each) for each in (True, False)]
        for quantized, plain in zip(*found, strict=True):
            assert torch.equal(quantized.view(torch.int16), plain.view(torch.int16))


def run_layers(model: RoseDecoder, hidden: torch.Tensor, *, quantizes: bool) -> list[torch.Tensor]:
    """Return what products of layers without attention are, with or without their input quantized in front."""
    stream, outputs = ResidualStream(hidden, model.rose_switches), []

    def chosen(linear: Linear) -> Linear:
        return linear if quantizes else replace(linear, quantization=None)

    for layer in model._layers:
        assert layer is not None and isinstance(layer.mlp, Mlp)
        outputs.append(stream.project(layer.attn_norm, chosen(layer.qkv)))
        stream.add(outputs[-1][:, : layer.attn_out.num_inputs].contiguous(), layer.attn_out)
        stream.silu_mlp(
            layer.mlp_norm, Mlp(chosen(layer.mlp.gate_up), chosen(layer.mlp.down)), layer.attn_norm
        )
    return [*outputs, stream.normed(norm_of(model.model.norm))]


@pytest.mark.parametrize("form", ["fp8 blocks", "compressed-tensors channel"])
def test_quantized_input_in_a_graph(load_model: LoadModel, tmp_path: Path, form: str) -> None:
    path, _ = write_pair(tmp_path, "qwen3", form, **GPU_SIZES)
    model = load_model(path)
    static = torch.randn(128, model.model.norm.weight.shape[0], dtype=torch.bfloat16, device="cuda")
    run_layers(model, static, quantizes=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run_layers(model, static, quantizes=True)
    for _ in range(3):
        static.copy_(torch.randn_like(static) * 3)
        graph.replay()
        expected = run_layers(model, static, quantizes=False)
        assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
