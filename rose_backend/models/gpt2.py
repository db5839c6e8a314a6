"""GPT-2: learned positions, LayerNorm before attention and MLP, GELU, biases everywhere."""

from __future__ import annotations

from typing import Self

from rose_backend.layers.linear import DecoderLayer, Mlp
from rose_backend.models.base import CausalLM, DecoderWeights, LoadOptions
from rose_backend.models.config import ModelConfig, check_supported, choose_dtype
from rose_backend.models.streaming import WeightReader, load_weights
from rose_backend.models.weights import Checkpoint

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


class GPT2(CausalLM):
    """GPT-2."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: LoadOptions) -> Self:
        """Read a checkpoint; see ``CausalLM``."""
        check_supported(checkpoint.config, _SUPPORTED)
        prefix = "transformer." if "transformer.wte.weight" in checkpoint.tensors else ""
        dtype = choose_dtype(options.dtype, options.device, checkpoint.dtype_of(f"{prefix}wte.weight"))
        config = ModelConfig.from_hf(checkpoint.config, names=_HF_NAMES, dtype=dtype, device=options.device)
        options.check_sizes(config)
        width, inner = config.hidden_size, config.intermediate_size

        def build(reader: WeightReader) -> DecoderWeights:
            layers = [
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
            ]
            embedding, head = reader.embedding_and_head("wte.weight")
            return DecoderWeights(
                token_embedding=embedding,
                position_embedding=reader.tensor("wpe.weight", config.max_position_embeddings, width),
                layers=layers,
                final_norm=reader.norm("ln_f"),
                padded_lm_head=head,
            )

        return cls(config, load_weights(checkpoint, config, prefix, build), options.switches)
