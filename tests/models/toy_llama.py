"""Llama in one file on top of rose_backend's layers, as a second family would be written. Rotation is plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rose_backend.kernels import AttentionOptions
from rose_backend.layers.attention import AttentionMetadata, PagedAttention
from rose_backend.layers.linear import DecoderLayer, Mlp, ResidualStream
from rose_backend.models.base import CausalLM, DecoderWeights, LoadOptions
from rose_backend.models.config import ModelConfig, choose_dtype
from rose_backend.models.streaming import WeightReader, load_weights
from rose_backend.models.weights import Checkpoint

ROPE_THETA = 10_000.0


class ToyLlama(CausalLM):
    """RMSNorm, rotary positions, grouped K/V heads, a SwiGLU MLP, and no biases."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: LoadOptions) -> ToyLlama:
        """Read a checkpoint."""
        chosen = choose_dtype(options.dtype, options.device, checkpoint.dtype_of("model.embed_tokens.weight"))
        config = ModelConfig.from_hf(
            checkpoint.config,
            names={"norm_eps": "rms_norm_eps"},
            dtype=chosen,
            device=options.device,
            gated_mlp=True,
        )
        return cls(config, _read_weights(checkpoint, config), options.switches)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run all layers."""
        config, weights, num_tokens = self.config, self.weights, len(input_ids)
        heads, kv_heads = config.num_attention_heads, config.num_kv_heads
        attention = PagedAttention(
            metadata,
            kv_cache,
            AttentionOptions(scale=config.head_size**-0.5),
            num_tokens=num_tokens,
            num_heads=heads,
            fused_kv_append=self.switches.fused_kv_append,
        )
        stream = ResidualStream(F.embedding(input_ids, weights.token_embedding), self.switches)
        for index, layer in enumerate(weights.layers):
            qkv = stream.project(layer.attn_norm, layer.qkv).view(num_tokens, -1, config.head_size)
            query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
            attended = attention(index, rotate(query, positions), rotate(key, positions), value)
            if attention.last_tokens is not None and index + 1 == config.num_layers:
                attended = attended[attention.last_tokens]
                stream.keep(attention.last_tokens)
            stream.add(attended, layer.attn_out)
            gate, up = stream.project(layer.mlp_norm, layer.mlp.gate_up).chunk(2, dim=-1)
            stream.add(F.silu(gate) * up, layer.mlp.down)
        return stream.normed(weights.final_norm)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [T, H, D] with rotary positions, first and second half of a head paired as Hugging Face does."""
    half = x.shape[-1] // 2
    frequencies = ROPE_THETA ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[:, None] * frequencies)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _read_weights(checkpoint: Checkpoint, config: ModelConfig) -> DecoderWeights:
    width, inner = config.hidden_size, config.intermediate_size
    query_width = config.num_attention_heads * config.head_size
    kv_width = config.num_kv_heads * config.head_size

    def layer(reader: WeightReader, stem: str) -> DecoderLayer:
        attention, mlp = f"{stem}.self_attn", f"{stem}.mlp"
        projections = {"q_proj": query_width, "k_proj": kv_width, "v_proj": kv_width}
        return DecoderLayer(
            attn_norm=reader.rms_norm(f"{stem}.input_layernorm"),
            qkv=reader.joined(width, {f"{attention}.{name}": size for name, size in projections.items()}),
            attn_out=reader.joined(query_width, {f"{attention}.o_proj": width}),
            mlp_norm=reader.rms_norm(f"{stem}.post_attention_layernorm"),
            mlp=Mlp(
                reader.joined(width, {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}),
                reader.joined(inner, {f"{mlp}.down_proj": width}),
            ),
        )

    def build(reader: WeightReader) -> DecoderWeights:
        layers = [layer(reader, f"layers.{index}") for index in range(config.num_layers)]
        embedding, head = reader.embedding_and_head("embed_tokens.weight")
        return DecoderWeights(
            token_embedding=embedding, layers=layers, final_norm=reader.rms_norm("norm"), padded_lm_head=head
        )

    return load_weights(checkpoint, config, "model.", build)
