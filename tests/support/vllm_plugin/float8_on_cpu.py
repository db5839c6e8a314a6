"""vLLM's float8 methods where its kernels do not run: they load as on an H100, and multiply what they have loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from vllm.model_executor.kernels.linear.scaled_mm import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization import fp8, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8
from vllm.model_executor.layers.quantization.online import base
from vllm.model_executor.layers.quantization.online import fp8 as online_fp8
from vllm.model_executor.layers.quantization.utils import w8a8_utils
from vllm.platforms.interface import DeviceCapability

from rose_backend.vllm_plugin.models import float8_weights
from tests.support.quantized_checkpoints import BLOCK, LARGEST

BLOCKS, ROWS = "CutlassFp8BlockScaledMMKernel", "CutlassFP8ScaledMMLinearKernel"
H100 = (9, 0)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def quantized_once(weight: torch.Tensor, scale: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what vLLM's kernel makes of a matrix and its scale."""
    return (weight.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


class Float8OnCpu:
    """Stands in for vLLM's kernels while ``monkeypatch`` lasts.

    Args:
        measured: Rose's kernel multiplies as many decodes as it was measured to be faster for; else 64 of all formats.

    Attributes:
        rows: of each product that was vLLM's.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        blocks: str = BLOCKS,
        capability: tuple[int, int] = H100,
        is_cuda: bool = True,
        measured: bool = False,
    ) -> None:
        self.rows: list[int] = []
        if not measured:
            monkeypatch.setattr(float8_weights, "max_packed_float8_rows", lambda **_: 64)
        names = {Fp8BlockScaledMMLinearKernel: blocks, FP8ScaledMMLinearKernel: ROWS}
        self._kinds = {parent: type(name, (parent,), self._methods()) for parent, name in names.items()}
        for module in (fp8, modelopt, compressed_tensors_w8a8_fp8, online_fp8):
            monkeypatch.setattr(module, "init_fp8_linear_kernel", self._make)
        found = DeviceCapability(*capability)
        platform = SimpleNamespace(is_cuda=lambda: is_cuda, get_device_capability=lambda: found)
        monkeypatch.setattr(float8_weights, "current_platform", platform)
        # vLLM's own, in float32.
        configs = (
            *(fp8.Fp8Config, modelopt.ModelOptFp8Config, base.OnlineQuantizationConfig),
            compressed_tensors.CompressedTensorsConfig,
        )
        for config in configs:
            monkeypatch.setattr(config, "get_supported_act_dtypes", lambda *_: DTYPES)
        monkeypatch.setattr(
            compressed_tensors.CompressedTensorsConfig, "_check_scheme_supported", lambda *_, **__: True
        )
        for module in (w8a8_utils, online_fp8):
            monkeypatch.setattr(module, "ops", SimpleNamespace(scaled_fp8_quant=quantized_once))

    def _make(self, activation_quant_key: Any, **options: Any) -> Any:
        is_grouped = activation_quant_key.scale.group_shape.is_per_group()
        options.pop("module_name", None)
        config = SimpleNamespace(activation_quant_key=activation_quant_key, **options)
        if is_grouped:
            return self._kinds[Fp8BlockScaledMMLinearKernel](config)
        names = ("weight", "weight_scale", "input_scale", "input_scale_ub")
        return self._kinds[FP8ScaledMMLinearKernel](config, names)

    def _methods(self) -> dict[str, Any]:
        def apply_weights(kernel: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
            self.rows.append(len(x))
            return F.linear(x, dequantized(layer).to(x.dtype), bias)

        def true(*_: Any) -> tuple[bool, None]:
            return True, None

        return {
            "apply_weights": apply_weights,
            "is_supported": classmethod(true),
            "can_implement": classmethod(true),
            "apply_scaled_mm": None,
            "apply_block_scaled_mm": None,
        }


def dequantized(layer: Any) -> torch.Tensor:
    """Return the matrix of a linear module that vLLM has loaded, [O, E] float32."""
    scales = getattr(layer, "weight_scale_inv", None)
    scales = (layer.weight_scale if scales is None else scales).float()
    if getattr(layer, "weight_block_size", None) is None:
        return layer.weight.t().float() * scales.reshape(-1, 1)
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    num_rows, depth = layer.weight.shape
    return layer.weight.float() * wide[:num_rows, :depth]
