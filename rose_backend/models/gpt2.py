"""GPT-2 as plain functions over ``rose_backend.kernels``.

The linear weights stay in the checkpoint's [in, out] layout, which ``addmm`` takes as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from rose_backend.config import Switches
from rose_backend.kernels import (
    DecodePlan,
    PrefillPlan,
    add_layer_norm,
    bias_gelu,
    bias_residual,
    layer_norm,
    paged_decode,
    paged_prefill,
    plan_paged_decode,
    plan_paged_prefill,
    write_kv,
)
from rose_backend.models.attention_metadata import AttentionMetadata
from rose_backend.models.gpt2_checkpoint import GPT2Config, GPT2Weights, LayerWeights, read_gpt2
from rose_backend.models.weight_loading import resolve_model_path


@dataclass(frozen=True, slots=True)
class _StepPlan:
    """The parts of a step's attention that all layers share."""

    metadata: AttentionMetadata
    decode: DecodePlan | None
    prefill: PrefillPlan | None
    prefill_start_loc: torch.Tensor
    attended: torch.Tensor
    """[T, HQ, D]: attention's output, overwritten by each layer."""


class GPT2:
    """A GPT-2 language model; build it with ``load``.

    Attributes:
        config: sizes, dtype and device.
        weights: all tensors, in ``config.dtype`` on ``config.device``.
        switches: which fused operations are used; the results agree within rounding.
    """

    def __init__(self, config: GPT2Config, weights: GPT2Weights, switches: Switches) -> None:
        self.config = config
        self.weights = weights
        self.switches = switches
        self._scale = config.head_size**-0.5

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        switches: Switches | None = None,
    ) -> GPT2:
        """Load a checkpoint from Hugging Face files.

        Args:
            path: local directory or Hugging Face id.
            dtype: ``auto`` is float32 on a CPU and the checkpoint's own type elsewhere.
            device: ``cpu`` or ``cuda``.
            switches: None has everything on.

        Raises:
            ModelError: the checkpoint is missing, damaged, or uses a feature that is not supported.
        """
        config, weights = read_gpt2(resolve_model_path(path), dtype=dtype, device=device)
        return cls(config, weights, switches or Switches())

    def forward(
        self,
        input_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        kv_cache: torch.Tensor,  # [L, 2, NB, BS, H, D]  written
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run all layers over one step's tokens and return the final hidden states, [T, E].

        Keys and values of all tokens are stored in ``kv_cache``, whose strides may be any with an innermost one of 1.
        """
        weights = self.weights
        eps = self.config.layer_norm_epsilon
        caches = [layer_cache.unbind(0) for layer_cache in kv_cache.unbind(0)]
        step = self._plan_step(input_ids.shape[0], caches[0][0], metadata)
        residual = F.embedding(input_ids, weights.token_embedding)
        residual = residual + F.embedding(positions, weights.position_embedding)
        layers = weights.layers
        normed = layer_norm(residual, layers[0].ln_1_weight, layers[0].ln_1_bias, eps)
        for index, layer in enumerate(layers):
            key_cache, value_cache = caches[index]
            delta = self._attention(layer, normed, key_cache, value_cache, step)
            normed, residual = self._add_norm(delta, residual, layer.ln_2_weight, layer.ln_2_bias)
            if index + 1 < len(layers):
                next_weight, next_bias = layers[index + 1].ln_1_weight, layers[index + 1].ln_1_bias
            else:
                next_weight, next_bias = weights.final_norm_weight, weights.final_norm_bias
            if self.switches.fused_mlp:
                widened = bias_gelu(normed @ layer.fc_weight, layer.fc_bias)
                residual = bias_residual(widened @ layer.fc_proj_weight, layer.fc_proj_bias, residual)
                normed = layer_norm(residual, next_weight, next_bias, eps)
            else:
                widened = F.gelu(torch.addmm(layer.fc_bias, normed, layer.fc_weight), approximate="tanh")
                delta = torch.addmm(layer.fc_proj_bias, widened, layer.fc_proj_weight)
                normed, residual = self._add_norm(delta, residual, next_weight, next_bias)
        return normed

    def compute_logits(
        self,
        hidden: torch.Tensor,  # [R, E]
    ) -> torch.Tensor:
        """Return float32 logits [R, V] of hidden states that ``forward`` returned."""
        return F.linear(hidden, self.weights.lm_head).float()

    def _plan_step(self, num_tokens: int, key_cache: torch.Tensor, metadata: AttentionMetadata) -> _StepPlan:
        num_decodes = metadata.num_decodes
        num_prefills = metadata.num_computed_tokens.shape[0] - num_decodes
        decode = prefill = None
        prefill_start_loc = metadata.query_start_loc[num_decodes:] - num_decodes
        if num_decodes:
            decode = plan_paged_decode(
                metadata.block_table[:num_decodes], metadata.num_computed_tokens[:num_decodes], key_cache
            )
        if num_prefills:
            prefill = plan_paged_prefill(
                metadata.block_table[num_decodes:],
                prefill_start_loc,
                metadata.num_computed_tokens[num_decodes:],
                key_cache,
                num_step_tokens=num_tokens - num_decodes,
            )
        attended = key_cache.new_empty((num_tokens, self.config.n_head, self.config.head_size))
        return _StepPlan(metadata, decode, prefill, prefill_start_loc, attended)

    def _attention(
        self,
        layer: LayerWeights,
        normed: torch.Tensor,  # [T, E]
        key_cache: torch.Tensor,  # [NB, BS, H, D]  written
        value_cache: torch.Tensor,  # [NB, BS, H, D]  written
        step: _StepPlan,
    ) -> torch.Tensor:
        config, metadata, attended = self.config, step.metadata, step.attended
        qkv = torch.addmm(layer.qkv_bias, normed, layer.qkv_weight)
        query, key, value = qkv.view(-1, 3, config.n_head, config.head_size).unbind(1)
        new_key: torch.Tensor | None = key
        new_value: torch.Tensor | None = value
        if not self.switches.fused_kv_append:
            write_kv(key, value, key_cache, value_cache, metadata.slot_mapping)
            new_key = new_value = None
        split = metadata.num_decodes
        if split:
            paged_decode(
                query[:split],
                None if new_key is None else new_key[:split],
                None if new_value is None else new_value[:split],
                key_cache,
                value_cache,
                metadata.block_table[:split],
                metadata.num_computed_tokens[:split],
                scale=self._scale,
                out=attended[:split],
                plan=step.decode,
            )
        if split < metadata.num_computed_tokens.shape[0]:
            paged_prefill(
                query[split:],
                None if new_key is None else new_key[split:],
                None if new_value is None else new_value[split:],
                key_cache,
                value_cache,
                metadata.block_table[split:],
                step.prefill_start_loc,
                metadata.num_computed_tokens[split:],
                scale=self._scale,
                out=attended[split:],
                plan=step.prefill,
            )
        return torch.addmm(layer.attn_proj_bias, attended.view(-1, config.n_embd), layer.attn_proj_weight)

    def _add_norm(
        self,
        delta: torch.Tensor,  # [T, E]
        residual: torch.Tensor,  # [T, E]
        weight: torch.Tensor,  # [E]
        bias: torch.Tensor,  # [E]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps = self.config.layer_norm_epsilon
        if self.switches.fused_add_layernorm:
            return add_layer_norm(delta, residual, weight, bias, eps)
        new_residual = delta + residual
        return F.layer_norm(new_residual, weight.shape, weight, bias, eps), new_residual
