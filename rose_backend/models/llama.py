"""Llama and its relatives: rotary positions, grouped K/V heads, a gated MLP, RMSNorm before both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch

from rose_backend.errors import ModelError
from rose_backend.kernels import Experts, HeadRotation
from rose_backend.layers.linear import DecoderLayer, Mlp, SparseMlp
from rose_backend.models.base import CausalLM, DecoderWeights, LoadOptions
from rose_backend.models.config import (
    MAX_SIZE,
    ExpertsConfig,
    ModelConfig,
    check_supported,
    check_window,
    choose_dtype,
    read_experts,
)
from rose_backend.models.rope import read_rotary_options, rotary_table
from rose_backend.models.streaming import WeightReader, load_weights
from rose_backend.models.weights import Checkpoint

_PREFIX = "model."
_EMBEDDING = "embed_tokens.weight"
_UNUSED = ("rotary_emb.inv_freq",)
"""Old checkpoints store what config.json says already."""
_COMMON: Mapping[str, bool | tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "is_causal": True,
    "rope_interleaved": False,
    "use_mrope": False,
    "dual_chunk_attention_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
}
_DENSE: dict[str, bool | tuple[Any, ...]] = {"num_experts": (None, 0), "num_local_experts": (None, 0)}
_ROTATES_ALL: dict[str, bool | tuple[Any, ...]] = {
    "no_rope_layers": (None,),
    "no_rope_layer_interval": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What checkpoints of one architecture have in common beyond what config.json says."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for fields that config.json leaves out."""
    supported: Mapping[str, bool | tuple[Any, ...]] = field(default_factory=dict)
    """See ``check_supported``."""
    rotates_all: bool = True
    """No layer may be without rotation."""
    qkv_bias: bool | None = None
    """Queries, keys and values have a bias; None: as ``attention_bias`` says, and then the output projection too."""
    norms_heads: bool = False
    """An RMSNorm of each query and key head before the rotation."""
    read_experts: Callable[[Mapping[str, Any], int], ExpertsConfig] | None = None
    """Reads from config.json which layers have experts, given their number, and what they are; None: none may have."""


class Llama(CausalLM):
    """Llama, the base of its relatives, which say what differs."""

    family: ClassVar[Family] = Family()

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: LoadOptions) -> Self:
        """Read a checkpoint; see ``CausalLM``."""
        fields = {**cls.family.defaults, **checkpoint.config}
        read_experts = cls.family.read_experts
        supported = {**_COMMON, **cls.family.supported}
        supported |= ({} if read_experts else _DENSE) | (_ROTATES_ALL if cls.family.rotates_all else {})
        check_supported(fields, supported)
        config = ModelConfig.from_hf(
            fields,
            names={"norm_eps": "rms_norm_eps"},
            dtype=torch.float32,
            device=options.device,
            gated_mlp=True,
            norm_eps=1e-6,
            tie_word_embeddings=False,
        )
        if read_experts is not None:
            config = replace(config, experts=read_experts(fields, config.num_layers))
        rotary = read_rotary_options(fields, max_position_embeddings=config.max_position_embeddings)
        if rotary.rope_type == "linear":
            # As in vLLM: config.json has the window before it was stretched.
            window = min(int(config.max_position_embeddings * rotary.factor), MAX_SIZE)
            config = replace(config, max_position_embeddings=window)
        num_positions = min(
            options.max_model_len or config.max_position_embeddings, config.max_position_embeddings
        )
        check_window(fields, num_positions, config.num_layers)
        rotates = _rotating_layers(fields, config.num_layers)
        # The first look at the weights.
        stored = checkpoint.dtype_of(_PREFIX + _EMBEDDING)
        config = replace(config, dtype=choose_dtype(options.dtype, options.device, stored))
        table = rotary_table(rotary, config.head_size, num_positions, config.device)

        def build(reader: WeightReader) -> DecoderWeights:
            layers = [cls._read_layer(reader, fields, index) for index in range(config.num_layers)]
            embedding, head = reader.embedding_and_head(_EMBEDDING)
            weights = DecoderWeights(
                token_embedding=embedding,
                rotary_table=table,
                layers=layers,
                final_norm=reader.rms_norm("norm"),
                padded_lm_head=head,
            )
            reader.check_all_read(_UNUSED)
            return weights

        options.check_sizes(config)
        weights = load_weights(checkpoint, config, _PREFIX, build)
        rotations = [
            HeadRotation(table, layer.query_norm, layer.key_norm, config.norm_eps) if rotates_heads else None
            for layer, rotates_heads in zip(weights.layers, rotates, strict=True)
        ]
        return cls(config, weights, options.switches, rotations)

    @classmethod
    def _read_layer(cls, reader: WeightReader, fields: Mapping[str, Any], index: int) -> DecoderLayer:
        config, attention = reader.config, f"layers.{index}.self_attn"
        width, size = config.hidden_size, config.head_size
        query_width, kv_width = config.num_attention_heads * size, config.num_kv_heads * size
        attention_bias = bool(fields.get("attention_bias"))
        widths = {"q_proj": query_width, "k_proj": kv_width, "v_proj": kv_width}
        qkv_bias, has_norms = cls.family.qkv_bias, cls.family.norms_heads
        return DecoderLayer(
            attn_norm=reader.rms_norm(f"layers.{index}.input_layernorm"),
            qkv=reader.joined(
                width,
                {f"{attention}.{name}": fan_out for name, fan_out in widths.items()},
                has_bias=attention_bias if qkv_bias is None else qkv_bias,
            ),
            attn_out=reader.joined(
                query_width, {f"{attention}.o_proj": width}, has_bias=attention_bias and qkv_bias is None
            ),
            mlp_norm=reader.rms_norm(f"layers.{index}.post_attention_layernorm"),
            mlp=_read_mlp(reader, fields, index),
            query_norm=reader.tensor(f"{attention}.q_norm.weight", size) if has_norms else None,
            key_norm=reader.tensor(f"{attention}.k_norm.weight", size) if has_norms else None,
        )


def _read_mlp(reader: WeightReader, fields: Mapping[str, Any], index: int) -> Mlp | SparseMlp:
    config, name, has_bias = reader.config, f"layers.{index}.mlp", bool(fields.get("mlp_bias"))
    width, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    if experts is not None and experts.sparse_layers[index]:
        count, inner = experts.num_experts, experts.intermediate_size
        return SparseMlp(
            router=reader.joined(width, {f"{name}.gate": count}),
            experts=Experts(
                gate_up=reader.stacked(name, ("gate_proj", "up_proj"), inner, width, num_experts=count),
                down=reader.stacked(name, ("down_proj",), width, inner, num_experts=count),
                top_k=experts.top_k,
                renormalize=experts.renormalize,
            ),
        )
    return Mlp(
        reader.joined(width, {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, has_bias=has_bias),
        reader.joined(inner, {f"{name}.down_proj": width}, has_bias=has_bias),
    )


_NO_BIASES = {"attention_bias": False, "mlp_bias": False}


class Mistral(Llama):
    """Llama without biases, and with a sliding window unless config.json says that there is none."""

    family = Family(defaults={"num_key_value_heads": 8, "sliding_window": 4096}, supported=_NO_BIASES)


class Qwen2(Llama):
    """Llama with biases of queries, keys and values."""

    family = Family(
        defaults={"num_key_value_heads": 32, "use_sliding_window": False},
        supported=_NO_BIASES,
        qkv_bias=True,
    )


class Qwen3(Llama):
    """Llama with an RMSNorm of each query and key head before the rotation."""

    family = Family(
        defaults={"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
        supported={"mlp_bias": False},
        norms_heads=True,
    )


class Qwen3Moe(Llama):
    """Qwen3 with a mixture of experts in some or all layers."""

    family = Family(
        defaults={"num_key_value_heads": 4, "intermediate_size": 6144, "use_sliding_window": False},
        supported={"mlp_bias": False},
        norms_heads=True,
        read_experts=read_experts,
    )


class SmolLM3(Llama):
    """Llama with layers that see no positions, every fourth one unless config.json says which."""

    family = Family(
        defaults={
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        rotates_all=False,
    )


def _rotating_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return which layers rotate queries and keys."""
    listed, interval = fields.get("no_rope_layers"), fields.get("no_rope_layer_interval")
    if listed is None:
        if interval is not None and (type(interval) is not int or interval < 1):
            raise ModelError(f"config.json: no_rope_layer_interval must be at least 1, got {interval!r}")
        return tuple(interval is None or (index + 1) % interval != 0 for index in range(num_layers))
    if not isinstance(listed, list) or len(listed) < num_layers or any(each not in (0, 1) for each in listed):
        raise ModelError(f"config.json: no_rope_layers must be {num_layers} times 0 or 1, got {listed!r}")
    return tuple(bool(each) for each in listed[:num_layers])
