"""Which float8 weights of vLLM's modules Rose's kernel reads, by how vLLM's methods have left them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose_backend.config import Switches
from rose_backend.kernels import (
    Adapters,
    InputQuantization,
    QuantizedActivations,
    adapter_rows,
    silu_mul,
    silu_mul_quantized,
    small_batch_linear,
)
from rose_backend.layers.linear import DecoderLayer, Linear, Mlp, Norm, ResidualStream
from rose_backend.vllm_plugin.models.float8_weights import LoadedFloat8
from tests.support.quantized_activations import quantized_as_vllm

ROWS, DEPTH = 256, 192
BLOCKS, CHANNELS = "CutlassFp8BlockScaledMMKernel", "CutlassFP8ScaledMMLinearKernel"


def made(name: str, **attributes: Any) -> Any:
    return type(name, (SimpleNamespace,), {})(**attributes)


def module_of(
    values: torch.Tensor, scales: torch.Tensor, kernel: str, method: str = "Fp8LinearMethod"
) -> Any:
    """Return a module of ``ROWS`` outputs whose method has such a kernel."""
    config = SimpleNamespace(out_dtype=torch.float32)
    owner = made("owner", fp8_linear=made(kernel, config=config, quant_fp8=quantizes("compiled")))
    return SimpleNamespace(
        weight=SimpleNamespace(data=values),
        weight_scale=SimpleNamespace(data=scales),
        bias=None,
        output_size_per_partition=ROWS,
        input_size_per_partition=DEPTH,
        scheme=owner,
        quant_method=made(method, fp8_linear=owner.fp8_linear),
    )


def quantizes(by: str = "cuda", **attributes: Any) -> Any:
    """Return vLLM's operation that quantizes activations, each row apart."""
    defaults = {"static": False, "group_shape": (1, -1), "num_token_padding": None}
    return made("QuantFP8", forward_cuda="cuda", _forward_method=by, **{**defaults, **attributes})


def values_of(num_rows: int = ROWS, depth: int = DEPTH) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, num_rows * depth).view(num_rows, depth).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("scales", "kernel", "method"),
    [
        (torch.rand(2, 2), BLOCKS, "Fp8LinearMethod"),
        (torch.rand(2, 2).t(), BLOCKS, "Fp8PerBlockOnlineLinearMethod"),
        (torch.rand(ROWS, 1), CHANNELS, "CompressedTensorsLinearMethod"),
        (torch.rand(ROWS), CHANNELS, "ModelOptLinearMethod"),
        (torch.tensor(0.5), CHANNELS, "Fp8LinearMethod"),
        (torch.tensor([0.5]), CHANNELS, "Fp8PerTensorOnlineLinearMethod"),
    ],
)
def test_vllms_memory_is_read(scales: torch.Tensor, kernel: str, method: str) -> None:
    values = values_of()
    module = module_of(values if kernel == BLOCKS else values.t(), scales, kernel, method)
    loaded = LoadedFloat8(module, packs=True, gated=False)
    linear = loaded.read()
    assert linear.packed is not None and linear.packed.weight is linear.weight and loaded.unread is None
    assert linear.weight.values.data_ptr() == values.data_ptr()  # type: ignore[union-attr]
    assert linear.weight.scales.data_ptr() == scales.data_ptr()  # type: ignore[union-attr]
    x = torch.randn(3, DEPTH)
    wide = scales.reshape(-1, 1).clone()
    if kernel == BLOCKS:
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :DEPTH]
    assert torch.allclose(small_batch_linear(x, linear.packed), x @ (values.float() * wide).t(), atol=1e-4)
    # Numbers that are loaded later are read, too.
    scales.mul_(2)
    assert torch.allclose(
        small_batch_linear(x, linear.packed), x @ (values.float() * wide).t() * 2, atol=1e-4
    )


@pytest.mark.parametrize(
    ("module", "gated", "reason"),
    [
        (
            module_of(values_of(), torch.rand(2, 2), BLOCKS, "QuarkLinearMethod"),
            False,
            f"QuarkLinearMethod with {BLOCKS}",
        ),
        (
            module_of(values_of(), torch.rand(2, 2), "MarlinFP8ScaledMMLinearKernel"),
            False,
            "Fp8LinearMethod with MarlinFP8ScaledMMLinearKernel",
        ),
        # As CUTLASS pads.
        (
            module_of(values_of(ROWS + 16).t(), torch.rand(ROWS + 16, 1), CHANNELS),
            False,
            "values [272, 192] with scales [272, 1]",
        ),
        (
            module_of(values_of().t().contiguous(), torch.rand(ROWS, 1), CHANNELS),
            False,
            "expected a contiguous tensor",
        ),
        # As DeepGEMM packs them on newer GPUs.
        (
            module_of(values_of(), torch.zeros(2, 1, dtype=torch.int32), BLOCKS),
            False,
            "scales: expected dtype torch.float32",
        ),
        (
            module_of(values_of(), torch.rand(ROWS, 1), BLOCKS),
            False,
            "values [256, 192] with scales [256, 1]",
        ),
        (
            module_of(values_of().t(), torch.rand(2, 2), CHANNELS),
            False,
            "values [256, 192] with scales [2, 2]",
        ),
        (module_of(values_of().view(torch.uint8), torch.rand(2, 2), BLOCKS), False, "values: expected dtype"),
    ],
)
def test_other_memory_is_left_to_vllm(module: Any, gated: bool, reason: str) -> None:
    loaded = LoadedFloat8(module, packs=True, gated=gated)
    linear = loaded.read()
    assert linear.packed is None and linear.many_rows is not None and loaded.has_nan is None
    assert reason in str(loaded.unread)
    # Nobody asks what is in a weight that is not packed.
    assert LoadedFloat8(module, packs=False, gated=gated).read().packed is None


def test_blocks_with_rows_of_gate_and_factor() -> None:
    module = module_of(values_of(384), torch.rand(3, 2), BLOCKS)
    module.output_size_per_partition = 384
    loaded = LoadedFloat8(module, packs=True, gated=True)
    assert loaded.read().packed is None and "whole blocks of 128 rows of a gate" in str(loaded.unread)
    module.weight_scale.data = torch.rand(3, 2)
    assert LoadedFloat8(module, packs=True, gated=False).read().packed is not None


@pytest.mark.parametrize("code", [0x7F, 0xFF, 0x7E, 0x00])
def test_codes_that_are_no_numbers_are_found(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # In the last of several parts.
    monkeypatch.setattr("rose_backend.vllm_plugin.models.float8_weights._CHECKED_BYTES", 1000)
    values = values_of()
    values.view(torch.uint8)[-1, -1] = code
    loaded = LoadedFloat8(module_of(values, torch.rand(2, 2), BLOCKS), packs=True, gated=False)
    loaded.read()
    assert loaded.has_nan is not None and bool(loaded.has_nan) is (code & 0x7F == 0x7F)


GROUPS = {"group_shape": (1, 128), "use_ue8m0": False, "tma_aligned_scales": False}


@pytest.mark.parametrize(
    ("kernel", "quantize", "expected"),
    [
        (CHANNELS, quantizes(), InputQuantization()),
        (BLOCKS, quantizes(**GROUPS), InputQuantization(by_group=True)),
        (
            BLOCKS,
            quantizes(**{**GROUPS, "use_ue8m0": True, "tma_aligned_scales": True}),
            InputQuantization(by_group=True, powers_of_two=True, aligned_scales=True),
        ),
        # That which vLLM compiles rounds otherwise.
        (CHANNELS, quantizes("compiled"), None),
        (BLOCKS, quantizes("compiled", **GROUPS), None),
        (CHANNELS, quantizes(static=True), None),
        (CHANNELS, quantizes(num_token_padding=17), None),
        (CHANNELS, quantizes(group_shape=(-1, -1)), None),
        (BLOCKS, quantizes(**{**GROUPS, "group_shape": (1, 64)}), None),
        (CHANNELS, made("RocmQuantFP8", **vars(quantizes())), None),
        ("ChannelWiseTorchFP8ScaledMMLinearKernel", quantizes(), None),
        ("TritonFp8BlockScaledMMKernel", quantizes(**GROUPS), None),
        # Never run on what Rose's kernels make.
        ("DeepGemmFp8BlockScaledMMKernel", quantizes(**GROUPS), None),
        ("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", quantizes(**GROUPS), None),
    ],
)
def test_input_is_quantized_as_vllms_kernel_does(
    kernel: str, quantize: Any, expected: InputQuantization | None
) -> None:
    module = module_of(values_of(depth=256), torch.rand(2, 2), kernel)
    module.input_size_per_partition = 256
    module.quant_method.fp8_linear.quant_fp8 = quantize
    linear = LoadedFloat8(module, packs=False, gated=False).read()
    assert linear.quantization == expected
    by_group = expected is not None and expected.by_group
    for change in (
        {"input_scale_ub": 1.0},
        {"input_size_per_partition": 192},
        {"quant_method": made("QuarkLinearMethod", fp8_linear=module.quant_method.fp8_linear)},
    ):
        changed = SimpleNamespace(**{**vars(module), **change})
        still = LoadedFloat8(changed, packs=False, gated=False).read().quantization
        assert still == (expected if "input_size_per_partition" in change and not by_group else None)


class Multiplies:
    """vLLM's products of quantized activations, as its kernels are asked for them."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def apply_scaled_mm(self, **asked: Any) -> torch.Tensor:
        self.asked.append(asked)
        factors = [asked["A"].float() * asked["As"], asked["B"].float() * asked["Bs"].view(1, -1)]
        product = factors[0] @ factors[1] + (0 if asked["bias"] is None else asked["bias"])
        return product.to(asked["out_dtype"]).view(asked["output_shape"])

    def apply_block_scaled_mm(self, **asked: Any) -> torch.Tensor:
        self.asked.append(asked)
        scales = asked["Bs"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (asked["A"].float() * asked["As"].repeat_interleave(128, 1)) @ (
            asked["B"].float() * scales
        ).t()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kernel", [CHANNELS, BLOCKS])
def test_quantized_rows_are_multiplied_below_the_method(kernel: str, has_bias: bool) -> None:
    by_group, multiplies = kernel != CHANNELS, Multiplies()
    values, scales = values_of(depth=256), torch.rand((2, 2) if by_group else (ROWS, 1))
    bias = torch.randn(ROWS) if has_bias else None
    module = module_of(values if by_group else values.t(), scales, kernel)
    module.weight, module.weight_scale = module.weight.data, module.weight_scale.data
    module.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    found = module.quant_method.fp8_linear
    found.apply_scaled_mm, found.apply_block_scaled_mm = (
        multiplies.apply_scaled_mm,
        multiplies.apply_block_scaled_mm,
    )
    found.config.out_dtype = torch.float64
    x = torch.randn(5, 2 * 256)
    quantized = silu_mul_quantized(x, InputQuantization(by_group=by_group))
    module.input_size_per_partition = 256
    product = LoadedFloat8(module, packs=False, gated=False)._multiply(quantized)
    assert product.shape == (5, ROWS) and product.dtype is torch.float64
    (asked,) = multiplies.asked
    assert asked["A"] is quantized.values and asked["As"] is quantized.scales
    assert asked["B"] is module.weight and asked["Bs"] is module.weight_scale
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1) if by_group else scales
    expected = silu_mul(x) @ (values.float() * wide).t() + (0 if bias is None else bias)
    assert float((product - expected).norm() / expected.norm()) < 0.05


def random_layer(quantization: InputQuantization | None, seen: list[torch.Tensor]) -> DecoderLayer:
    """Return a decoder layer whose products quantize their input themselves, if it does not come quantized."""
    generator = torch.Generator().manual_seed(0)

    def linear(fan_in: int, fan_out: int) -> Linear:
        weight = torch.randn(fan_out, fan_in, generator=generator) / fan_in**0.5

        def multiply(x: torch.Tensor | QuantizedActivations) -> torch.Tensor:
            if isinstance(x, QuantizedActivations):
                seen.append(x.values)
                values, scales = x.values, x.scales
            else:
                codes, bits = quantized_as_vllm(x.bfloat16(), InputQuantization())
                values, scales = codes.view(torch.float8_e4m3fn), bits.view(torch.float32)
            return (values.float() * scales @ weight.t()).bfloat16()

        return Linear(weight.t(), None, many_rows=multiply, quantization=quantization)

    norm = Norm(torch.rand(256, generator=generator).bfloat16(), None, 1e-6)
    mlp = Mlp(linear(256, 2 * 384), linear(384, 256))
    return DecoderLayer(norm, linear(256, 512), linear(512, 256), norm, mlp)


def run_stream(layer: Any, hidden: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    stream = ResidualStream(hidden, **{"switches": Switches(), **options})
    outputs = []
    for _ in range(2):
        outputs.append(stream.project(layer.attn_norm, layer.qkv))
        stream.add(outputs[-1], layer.attn_out)
        stream.silu_mlp(layer.mlp_norm, layer.mlp, layer.attn_norm)
    return [*outputs, stream.normed(layer.attn_norm)]


def test_layers_compute_the_same_with_input_that_comes_quantized() -> None:
    hidden, seen = torch.randn(40, 256, generator=torch.Generator().manual_seed(1)).bfloat16(), []
    layers = [random_layer(each, seen) for each in (None, InputQuantization())]
    plain, quantized = (run_stream(layer, hidden) for layer in layers)
    assert all(torch.equal(*pair) for pair in zip(plain, quantized, strict=True))
    assert [tuple(each.shape) for each in seen] == [(40, 256), (40, 256), (40, 384)] * 2
    seen.clear()
    for switch in ("fused_mlp", "fused_add_layernorm"):
        run_stream(layers[1], hidden, switches=replace(Switches(), **{switch: False}))
    assert not seen


def test_adapters_read_what_is_not_quantized() -> None:
    seen: list[torch.Tensor] = []
    adapters = Adapters((torch.zeros(2, 8, 256).bfloat16(),), (torch.zeros(2, 512, 8).bfloat16(),))
    layer, hidden = random_layer(InputQuantization(), seen), torch.randn(4, 256).bfloat16()
    linear = replace(layer.qkv, adapters=adapters)
    for slots, expected in ((None, 1), (torch.zeros(4, dtype=torch.int64), 0)):
        seen.clear()
        rows = None if slots is None else adapter_rows(slots)
        ResidualStream(hidden, Switches(), adapter_rows=rows).project(layer.attn_norm, linear)
        assert len(seen) == expected
