"""Which models with int4 weights Rose's layers take inside vLLM, and how their weights are stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from rose_backend.config import PluginConfig
from rose_backend.kernels import Int4Weight
from rose_backend.kernels.arguments import INT4_GROUPS
from rose_backend.kernels.linear.int4_formats import AWQ, COMPRESSED_TENSORS, GPTQ_V2, Int4Format
from rose_backend.kernels.tuning.measured import constants
from rose_backend.layers.decoder import max_packed_int4_rows
from rose_backend.vllm_plugin.options import first_reason


class Int4Scheme(NamedTuple):
    """How all int4 weights of a model are stored."""

    form: Int4Format
    group_size: int | None
    """Columns that share a scale; None: all of a row's."""
    has_zeros: bool
    """They are stored, and may differ; else all are ``INT4_ZERO``, whatever is stored, as for vLLM's kernels."""

    def describe(self) -> str:
        """Return it in a few words."""
        columns = "a row" if self.group_size is None else f"{self.group_size} columns"
        return f"int4 weights with a scale{' and a zero' if self.has_zeros else ''} for {columns}"

    def empty(
        self, num_rows: int, num_columns: int, scales_dtype: torch.dtype, device: torch.device
    ) -> Int4Weight:
        """Return memory for a matrix."""
        return Int4Weight.empty(
            num_rows,
            num_columns,
            self.group_size or num_columns,
            has_zeros=self.has_zeros,
            scales_dtype=scales_dtype,
            device=device,
        )


def int4_scheme(quant_config: Any) -> Int4Scheme | None:
    """Return how a model's int4 weights are stored; None if its weights are quantized otherwise.

    Args:
        quant_config: vLLM's ``QuantizationConfig``, or None.
    """
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    # Subclasses may differ.
    kind = type(quant_config)
    if kind is AutoAWQConfig:
        is_known = quant_config.weight_bits == 4 and quant_config.zero_point
        return _scheme(AWQ, quant_config.group_size, has_zeros=True) if is_known else None
    if kind is AutoGPTQConfig:
        # Rules that begin otherwise change single modules; these leave them in 16 bits.
        is_one = all(pattern.startswith("-:") for pattern in quant_config.dynamic)
        is_known = quant_config.weight_bits == 4 and quant_config.is_sym and is_one
        return _scheme(GPTQ_V2, quant_config.group_size, has_zeros=False) if is_known else None
    return _compressed_scheme(quant_config) if kind is CompressedTensorsConfig else None


def _scheme(form: Int4Format, group_size: int | None, *, has_zeros: bool) -> Int4Scheme | None:
    if group_size in (None, -1):
        return Int4Scheme(form, None, has_zeros)
    return Int4Scheme(form, group_size, has_zeros) if group_size in INT4_GROUPS else None


def _compressed_scheme(quant_config: Any) -> Int4Scheme | None:
    """Return the scheme of a compressed-tensors model, if all its groups have the same."""
    if quant_config.transform_config is not None:
        return None
    found = set()
    for scheme in quant_config.target_scheme_map.values():
        weights = scheme.get("weights")
        is_quantized = any(scheme.get(name) for name in ("input_activations", "output_activations"))
        form = scheme.get("format") or quant_config.quant_format
        is_packed = form == "pack-quantized" and weights is not None and weights.num_bits == 4
        if is_quantized or not is_packed or weights.type != "int":
            return None
        if not quant_config._is_wNa16_group_channel(weights, None):
            return None
        group_size = None if weights.strategy == "channel" else weights.group_size
        found.add(_scheme(COMPRESSED_TENSORS, group_size, has_zeros=not weights.symmetric))
    return found.pop() if len(found) == 1 else None


def why_int4_stays(vllm_config: VllmConfig, options: PluginConfig) -> str | None:
    """Return why vLLM's layers run a model with int4 weights; None if Rose's do."""
    most = vllm_config.scheduler_config.max_num_seqs * (1 + vllm_config.num_speculative_tokens)
    max_tokens = constants("packed int4 products")["max_tokens"]
    reasons = {
        "int4 weights without a CUDA device": not current_platform.is_cuda(),
        # Of many tokens vLLM's product is faster.
        "int4 weights with a large --max-num-seqs, without max_quantized_rows": most > max_tokens
        and options.max_quantized_rows is None,
        "VLLM_MARLIN_INPUT_DTYPE": envs.VLLM_MARLIN_INPUT_DTYPE is not None,
    }
    return first_reason(reasons)


def max_int4_rows(options: PluginConfig) -> int:
    """Return up to how many tokens of a step Rose's kernel multiplies by int4 weights as they are."""
    return max_packed_int4_rows() if options.max_quantized_rows is None else options.max_quantized_rows
