"""vLLM's int4 methods on a CPU, where Rose's layers would not take their place: they load as on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from rose_backend.vllm_plugin.models import int4_weights

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def take_int4_on_cpu(monkeypatch: pytest.MonkeyPatch, *, is_cuda: bool = True) -> None:
    """Let Rose's layers take int4 weights while ``monkeypatch`` lasts, in float32, too."""
    monkeypatch.setattr(int4_weights, "current_platform", SimpleNamespace(is_cuda=lambda: is_cuda))
    # vLLM's own, in float32.
    for config in (AutoAWQConfig, AutoGPTQConfig, CompressedTensorsConfig):
        monkeypatch.setattr(config, "get_supported_act_dtypes", lambda *_: DTYPES)
