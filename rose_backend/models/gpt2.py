"""GPT-2: learned positions, LayerNorm in front of attention and MLP, GELU, biases everywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rose_backend.config import Switches
from rose_backend.kernels import AttentionOptions, embed_tokens
from rose_backend.layers.attention import AttentionMetadata, PagedAttention
from rose_backend.layers.decoder import run_layers
from rose_backend.layers.linear import (
    DecoderLayer,
    Mlp,
    Norm,
    ResidualStream,
    compute_logits,
    pack_layer,
    packs_layers,
)
from rose_backend.models.config import ModelConfig, check_supported, choose_dtype
from rose_backend.models.weights import Checkpoint, WeightReader

_HF_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_SUPPORTED: dict[str, bool | tuple[str, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


@dataclass(frozen=True, slots=True)
class GPT2Weights:
    """All tensors of a GPT-2."""

    token_embedding: torch.Tensor  # [V, E]
    position_embedding: torch.Tensor  # [P, E]
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    padded_lm_head: torch.Tensor  # [V', E], see ``WeightReader.embedding_and_head``


class GPT2:
    """A ``CausalLM``."""

    def __init__(self, config: ModelConfig, weights: GPT2Weights, switches: Switches) -> None:
        self.config = config
        self.weights = weights
        self.switches = switches
        self._attention_options = AttentionOptions(scale=config.head_size**-0.5)
        if packs_layers(switches, config.device):
            self.pack_for_small_batches()

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        device: str,
        switches: Switches,
        max_model_len: int | None = None,
    ) -> GPT2:
        """Read a checkpoint; see ``CausalLM``."""
        check_supported(checkpoint.config, _SUPPORTED)
        prefix = "transformer." if "transformer.wte.weight" in checkpoint else ""
        chosen = choose_dtype(dtype, device, checkpoint.dtype_of(f"{prefix}wte.weight"))
        config = ModelConfig.from_hf(checkpoint.config, names=_HF_NAMES, dtype=chosen, device=device)
        width, inner = config.hidden_size, config.intermediate_size

        def build(reader: WeightReader) -> GPT2Weights:
            layers = tuple(
                DecoderLayer(
                    attn_norm=reader.norm(f"h.{i}.ln_1"),
                    qkv=reader.linear(f"h.{i}.attn.c_attn", width, 3 * width),
                    attn_out=reader.linear(f"h.{i}.attn.c_proj", width, width),
                    mlp_norm=reader.norm(f"h.{i}.ln_2"),
                    mlp=Mlp(
                        reader.linear(f"h.{i}.mlp.c_fc", width, inner),
                        reader.linear(f"h.{i}.mlp.c_proj", inner, width),
                    ),
                )
                for i in range(config.num_layers)
            )
            embedding, head = reader.embedding_and_head("wte.weight")
            positions = reader.tensor("wpe.weight", config.max_position_embeddings, width)
            return GPT2Weights(embedding, positions, layers, reader.norm("ln_f"), head)

        return cls(config, WeightReader(checkpoint, config, prefix).load(build), switches)

    def forward(
        self,
        input_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        kv_cache: torch.Tensor,  # [L, 2, NB, BS, HKV, D]  written
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run all layers; see ``CausalLM``."""
        config, weights = self.config, self.weights
        attention = PagedAttention(
            metadata,
            kv_cache,
            self._attention_options,
            num_tokens=len(input_ids),
            num_heads=config.num_attention_heads,
            fused_kv_append=self.switches.fused_kv_append,
        )
        return run_layers(
            *embed_tokens(input_ids, positions, weights.token_embedding, weights.position_embedding),
            weights.layers,
            weights.final_norm,
            attention,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            switches=self.switches,
            mlp=ResidualStream.gelu_mlp,
            positions=positions,
        )

    def compute_logits(
        self,
        hidden: torch.Tensor,  # [R, E]
    ) -> torch.Tensor:
        """Return float32 logits [R, V]; see ``CausalLM``."""
        return compute_logits(hidden, self.weights.padded_lm_head, self.config.vocab_size)

    def pack_for_small_batches(self) -> None:
        """Prepare the layers for a few decodes at once, where a step is as long as its weights take to read."""
        self.weights = replace(self.weights, layers=tuple(map(pack_layer, self.weights.layers)))
