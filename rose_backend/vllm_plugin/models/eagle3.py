"""EAGLE-3 heads for vLLM with Rose's layer: the standalone engine's, on the weights that vLLM loads.

Modules, parameters, weight loading, and the products with auxiliary hidden states and with the vocabulary are vLLM's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from rose_backend.errors import IntegrityError
from rose_backend.kernels import HeadRotation, embed_tokens, empty_rows
from rose_backend.layers.eagle3 import Eagle3Layer
from rose_backend.vllm_plugin.models.decoder import LoadedLayer, ModuleAttention, RoseConstants, norm_of
from rose_backend.vllm_plugin.options import rose_options


class RoseEagle3LlamaForCausalLM(Eagle3LlamaForCausalLM):  # type: ignore[misc]
    """A head of one layer, whose weights are not quantized, on one GPU."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        (module,) = self.model.layers
        self.rose_switches = rose_options(vllm_config)
        self.rose_constants = RoseConstants(module.self_attn.rotary_emb, self.model.norm.weight.device)
        self._attention = module.self_attn.attn
        self._loaded = LoadedLayer(
            module, _refuse_quantized, packs=False, keep=partial(self.rose_constants.keep, 0)
        )
        self._layer: Eagle3Layer | None = None
        self._attention.impl.after_loading = self.take_moved_weights

    def take_moved_weights(self) -> None:
        """Use the tensors that are there now, once all are loaded or some have been put in the place of others."""
        (module,), impl = self.model.layers, self._attention.impl
        layer = self._loaded.read()
        self._layer = Eagle3Layer(
            hidden_norm=norm_of(module.hidden_norm),
            layer=layer,
            final_norm=norm_of(self.model.norm),
            rotation=HeadRotation(self.rose_constants.rotary_table, None, None, layer.attn_norm.eps),
            num_heads=impl.num_heads,
            num_kv_heads=impl.num_kv_heads,
            head_size=impl.head_size,
            adds_normed=bool(getattr(self.config, "norm_before_residual", False)),
            switches=self.rose_switches,
        )

    def forward(
        self,
        input_ids: torch.Tensor,  # [T] int32 or int64, of the token after each place
        positions: torch.Tensor,  # [T] int64
        hidden_states: torch.Tensor,  # [T, E], as from ``combine_hidden_states`` or this
        inputs_embeds: torch.Tensor | None = None,  # [T, E]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what ``compute_logits`` takes, and the hidden states to go on with, [T, E] each."""
        impl, num_tokens = self._attention.impl, len(positions)
        out = empty_rows(hidden_states, num_tokens, impl.num_heads, impl.head_size)
        attention = ModuleAttention([self._attention], out)
        if inputs_embeds is None:
            inputs_embeds = self._embed(input_ids, positions)
        with impl.workspace:
            return self._loaded_layer().forward(inputs_embeds, hidden_states, positions, attention)

    def get_top_tokens(
        self,
        hidden_states: torch.Tensor,  # [R, E]
    ) -> torch.Tensor:
        """Return the model's id of each row's likeliest token, int64 [R], by the logits that ``compute_logits`` has.

        vLLM's own method takes all rows of the product: more than the head knows, where the product is the model's.
        """
        top = self.logits_processor(self.lm_head, hidden_states).argmax(dim=-1)
        offsets = self.draft_id_to_target_id
        return top if offsets is None else top + offsets[top]

    def store(
        self,
        input_ids: torch.Tensor,  # [T] int32 or int64, of the token after each place
        positions: torch.Tensor,  # [T] int64
        hidden_states: torch.Tensor,  # [T, E], as from ``combine_hidden_states``
        slot_mapping: torch.Tensor,  # [T] int64; -1 for padding
    ) -> None:
        """Store keys and values of some places, as ``forward`` would."""
        embedded = self._embed(input_ids, positions)
        key, value = self._loaded_layer().keys_and_values(embedded, hidden_states, positions)
        module = self._attention
        module.impl.store(module, key, value, module.kv_cache, slot_mapping)

    def _loaded_layer(self) -> Eagle3Layer:
        assert self._layer is not None, "vLLM has not finished loading"
        return self._layer

    def _embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # Read here: the model's, unless the head has its own, is put in its place once both are loaded.
        embedded, _ = embed_tokens(input_ids, positions, self.model.embed_tokens.weight.data)
        return embedded


def _refuse_quantized(module: Any, **_: Any) -> Any:
    raise IntegrityError(f"{module.prefix}: a quantized head has vLLM's layer")
