"""GPT-2 as plain functions over ``rose_backend.kernels``.

The linear weights are [in, out] as in the checkpoint, which ``addmm`` takes as it is, however they lie in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from rose_backend.config import SWITCH_NAMES, Switches
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
from rose_backend.kernels.embed_tokens import embed_tokens
from rose_backend.models.attention_metadata import AttentionMetadata
from rose_backend.models.gpt2_checkpoint import GPT2Config, GPT2Weights, read_gpt2
from rose_backend.models.gpt2_small_batch import MAX_ROWS, PackedLayer, forward_layers, pack_layers
from rose_backend.models.weight_loading import resolve_model_path

LayerCaches = list[tuple[torch.Tensor, ...]]
"""Key and value cache of each layer."""

_SMALL_BATCH_SWITCHES = {"fused_kv_append", "fused_mlp", "fused_add_layernorm"}
"""The small-batch layers are all of these at once."""


@dataclass(frozen=True, slots=True)
class _StepPlan:
    """The parts of a step's attention that all layers share."""

    metadata: AttentionMetadata
    decode: DecodePlan | None
    prefill: PrefillPlan | None
    prefill_start_loc: torch.Tensor | None
    attended: torch.Tensor
    """[T, HQ, D]: attention's output, overwritten by each layer."""
    wanted_tokens: torch.Tensor | None
    """[R] int64: tokens whose final hidden states are asked for; None: all."""


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
        self._packed_layers: tuple[PackedLayer, ...] = ()
        if config.device.type == "cuda" and _switches_on(switches) >= _SMALL_BATCH_SWITCHES:
            self.pack_for_small_batches()

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
            dtype: ``auto`` is float32 on a CPU, the checkpoint's own type elsewhere; for float32 bfloat16, as in vLLM.
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

        With ``metadata.last_tokens_only`` they are [R, E], one of each request. The last layer then stores keys and
        values of all tokens and goes on with the last ones alone.

        Keys and values of all tokens are stored in ``kv_cache``, whose strides may be any with an innermost one of 1.
        """
        caches = [layer_cache.unbind(0) for layer_cache in kv_cache.unbind(0)]
        num_tokens = input_ids.shape[0]
        step = self._plan_step(num_tokens, caches[0][0], metadata)
        weights = self.weights
        residual = embed_tokens(input_ids, positions, weights.token_embedding, weights.position_embedding)
        if self._packed_layers and num_tokens == metadata.num_decodes and num_tokens <= MAX_ROWS:
            return self._small_batch(residual, caches, step)
        return self._any_batch(residual, caches, step)

    def compute_logits(
        self,
        hidden: torch.Tensor,  # [R, E]
    ) -> torch.Tensor:
        """Return float32 logits [R, V] of hidden states that ``forward`` returned; rows may be further apart."""
        head = self.weights.padded_lm_head
        if hidden.is_cuda and hidden.dtype is not torch.float32:
            logits = torch.mm(hidden, head.t(), out_dtype=torch.float32)
        else:
            logits = F.linear(hidden, head).float()
        return logits[:, : self.config.vocab_size]

    def pack_for_small_batches(self) -> None:
        """Prepare another way through the layers for a few decodes at once, with the same matrices in memory."""
        self.weights, self._packed_layers = pack_layers(self.weights, self.config.layer_norm_epsilon)

    def _small_batch(self, residual: torch.Tensor, caches: LayerCaches, step: _StepPlan) -> torch.Tensor:
        def attend(index: int, qkv: torch.Tensor) -> torch.Tensor:
            # Launched in the ordinary way, embed_tokens has made sure that all but qkv is complete.
            return self._attend(qkv, caches[index], step, overlap=True)

        forward_layers(residual, self._packed_layers, attend)
        weights, eps = self.weights, self.config.layer_norm_epsilon
        return layer_norm(residual, weights.final_norm_weight, weights.final_norm_bias, eps)

    def _any_batch(self, residual: torch.Tensor, caches: LayerCaches, step: _StepPlan) -> torch.Tensor:
        weights, eps = self.weights, self.config.layer_norm_epsilon
        layers = weights.layers
        normed = layer_norm(residual, layers[0].ln_1_weight, layers[0].ln_1_bias, eps)
        for index, layer in enumerate(layers):
            qkv = torch.addmm(layer.qkv_bias, normed, layer.qkv_weight)
            attended = self._attend(qkv, caches[index], step)
            if index + 1 == len(layers) and (wanted := step.wanted_tokens) is not None:
                attended, residual = attended[wanted], residual[wanted]
            delta = torch.addmm(layer.attn_proj_bias, attended, layer.attn_proj_weight)
            normed, residual = self._add_norm(delta, residual, layer.ln_2_weight, layer.ln_2_bias)
            if index + 1 < len(layers):
                next_weight, next_bias = layers[index + 1].ln_1_weight, layers[index + 1].ln_1_bias
            else:
                next_weight, next_bias = weights.final_norm_weight, weights.final_norm_bias
            if self.switches.fused_mlp and not normed.is_cuda:
                widened = bias_gelu(normed @ layer.fc_weight, layer.fc_bias)
                residual = bias_residual(widened @ layer.fc_proj_weight, layer.fc_proj_bias, residual)
                normed = layer_norm(residual, next_weight, next_bias, eps)
                continue
            if self.switches.fused_mlp:
                # The library's product carries bias and GELU (tanh form) itself: no pass over what lies between.
                widened = torch._addmm_activation(layer.fc_bias, normed, layer.fc_weight, use_gelu=True)
            else:
                widened = F.gelu(torch.addmm(layer.fc_bias, normed, layer.fc_weight), approximate="tanh")
            delta = torch.addmm(layer.fc_proj_bias, widened, layer.fc_proj_weight)
            normed, residual = self._add_norm(delta, residual, next_weight, next_bias)
        return normed

    def _plan_step(self, num_tokens: int, key_cache: torch.Tensor, metadata: AttentionMetadata) -> _StepPlan:
        num_decodes = metadata.num_decodes
        num_prefills = metadata.num_computed_tokens.shape[0] - num_decodes
        decode = prefill = None
        prefill_start_loc = None
        if num_decodes:
            decode = plan_paged_decode(
                metadata.block_table[:num_decodes], metadata.num_computed_tokens[:num_decodes], key_cache
            )
        if num_prefills:
            assert metadata.query_start_loc is not None, "rows of several tokens need their places"
            prefill_start_loc = metadata.query_start_loc[num_decodes:] - num_decodes
            prefill = plan_paged_prefill(
                metadata.block_table[num_decodes:],
                prefill_start_loc,
                metadata.num_computed_tokens[num_decodes:],
                key_cache,
                num_step_tokens=num_tokens - num_decodes,
            )
        attended = key_cache.new_empty((num_tokens, self.config.n_head, self.config.head_size))
        wanted = None
        if metadata.last_tokens_only and prefill_start_loc is not None:
            # -1 for padding in front of all others: some token, nobody looks at it.
            wanted = prefill_start_loc[1:].long() - 1
        return _StepPlan(metadata, decode, prefill, prefill_start_loc, attended, wanted)

    def _attend(
        self,
        qkv: torch.Tensor,  # [T, 3 * E]
        caches: tuple[torch.Tensor, ...],  # keys and values, [NB, BS, H, D]  written
        step: _StepPlan,
        *,
        overlap: bool = False,
    ) -> torch.Tensor:
        config, metadata, attended = self.config, step.metadata, step.attended
        key_cache, value_cache = caches
        query, key, value = qkv.view(-1, 3, config.n_head, config.head_size).unbind(1)
        new_key: torch.Tensor | None = key
        new_value: torch.Tensor | None = value
        if not self.switches.fused_kv_append:
            assert metadata.slot_mapping is not None, "a separate write needs the tokens' slots"
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
                overlap=overlap,
            )
        if step.prefill_start_loc is not None:
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
                mean_query_len=metadata.mean_query_len,
            )
        return attended.view(-1, config.n_embd)

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


def _switches_on(switches: Switches) -> set[str]:
    return {name for name in SWITCH_NAMES if getattr(switches, name)}
