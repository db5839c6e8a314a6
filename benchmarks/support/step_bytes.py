"""The bytes that a decode step of a model has to read, counted from its configuration: no weight is made or loaded.

torch and transformers are imported late, as in ``checkpoint``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.support.checkpoint import GPT2_124M, QUANTIZED_FORMATS, QWEN3_VL_4B, config_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class StepBytes:
    """What a decode step of a model reads."""

    weights: int
    """Of the layers but their experts, of the last norm and of the head, as they are stored, with scales and zeros."""
    experts: int
    """Of all experts of all layers."""
    num_experts: int
    """Of a layer; 0 where there are none."""
    experts_per_token: int
    windows: tuple[int | None, ...]
    """Of each layer with keys and values: how many tokens it sees; None: all."""
    token_bytes: int
    """Keys and values of one token in one layer."""
    state_bytes: int
    """Of a request, over all layers that keep a state instead."""

    def of(self, batch: int, context: float) -> float:
        """Return the bytes of a step of ``batch`` requests with ``context`` tokens each; states are written, too."""
        tokens = sum(context if window is None else min(context, window) for window in self.windows)
        share = expert_share(self.num_experts, self.experts_per_token, batch) if self.num_experts else 0
        requests = batch * (tokens * self.token_bytes + 2 * self.state_bytes)
        return self.weights + share * self.experts + requests


def expert_share(num_experts: int, experts_per_token: int, batch: int) -> float:
    """Return the share of a layer's experts that a step reads on average, if each token draws its own evenly."""
    return float(1 - (1 - experts_per_token / num_experts) ** batch)


@functools.cache
def bytes_of_shape(shape: str, dtype: str) -> StepBytes:
    """Return what a step reads of one of ``SHAPES`` whose weights are in ``dtype`` where they are not quantized."""
    from transformers import GPT2Config

    config = GPT2Config() if shape == GPT2_124M else config_of(shape)
    return bytes_of_config(config, dtype, QUANTIZED_FORMATS.get(shape), has_images=shape == QWEN3_VL_4B)


def bytes_of_config(
    config: PreTrainedConfig, dtype: str, form: str | None, *, has_images: bool = False
) -> StepBytes:
    """Return what a step reads of a model of random weights.

    Args:
        form: of quantized weights, one of those of ``QUANTIZED_FORMATS``; None: none are.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    factory = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config, dtype=getattr(torch, dtype))
    head = model.get_output_embeddings().weight
    # A step reads a row of them for each request.
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    weights, experts = 0, 0
    for name, tensor in model.named_parameters():
        if ".experts." in name:
            experts += len(tensor) * _stored_bytes(name, tensor[0], form)
        elif tensor is head or (".visual." not in name and not any(tensor is table for table in tables)):
            weights += _stored_bytes(name, tensor, form)
    text = config.get_text_config()
    return StepBytes(weights, experts, **_experts(text), **_cache(text, getattr(torch, dtype).itemsize))


def _stored_bytes(name: str, tensor: Any, form: str | None) -> int:
    """Return the bytes of a parameter, as the checkpoint has it that ``write_checkpoint`` writes."""
    from tests.support.quantized_checkpoints import quantized

    if form is None or tensor.ndim == 1:
        return int(tensor.nbytes)
    stored, _ = quantized({name.removesuffix(".weight") + ".weight": tensor}, form)
    # Shapes, which are not on the device of the weights, are read while a model is loaded only.
    return sum(each.nbytes for each in stored.values() if each.is_meta)


def _experts(config: PreTrainedConfig) -> dict[str, int]:
    number = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    return {"num_experts": number, "experts_per_token": config.num_experts_per_tok if number else 0}


def _cache(config: PreTrainedConfig, itemsize: int) -> dict[str, Any]:
    """Return what layers keep of tokens, or of a request, in numbers of ``itemsize`` bytes."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    state, num_states = 0, kinds.count("linear_attention")
    if num_states:
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
        convolved = 2 * keys * key_size + values * value_size
        state = values * key_size * value_size + (config.linear_conv_kernel_dim - 1) * convolved
    return {
        "windows": tuple(windows[kind] for kind in kinds if kind != "linear_attention"),
        "token_bytes": 2 * heads * head_size * itemsize,
        "state_bytes": num_states * state * itemsize,
    }
