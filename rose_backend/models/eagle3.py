"""EAGLE-3 heads: one layer that drafts what a model will say, from hidden states of some of its layers.

At each place the head reads the token after it and what ``combine`` makes of the model's hidden states there, and says
what may come after that token. For the drafts after the first one it reads its own hidden states in place of the
model's. Its keys and values depend on no place before theirs: those of known tokens are stored without attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rose_backend.config import Switches
from rose_backend.errors import ModelError
from rose_backend.kernels import AttentionOptions, HeadRotation, embed_tokens, write_kv
from rose_backend.layers.attention import AttentionMetadata, PagedAttention
from rose_backend.layers.eagle3 import Eagle3Layer
from rose_backend.layers.linear import DecoderLayer, Linear, Mlp, Norm, compute_logits
from rose_backend.models.base import CausalLM
from rose_backend.models.config import ModelConfig, check_supported, read_size
from rose_backend.models.rope import read_rotary_options, rotary_table
from rose_backend.models.streaming import HEAD, WeightReader, load_weights
from rose_backend.models.weights import Checkpoint, resolve_model_path

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_EMBEDDING = "embed_tokens.weight"
_SUPPORTED: dict[str, bool | tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "logit_scale": (None, 1.0),
    "quantization_config": (None,),
    "sliding_window": (None,),
}
_SUPPORTED_OF_EAGLE_CONFIG: dict[str, bool | tuple[Any, ...]] = {
    "use_aux_hidden_state": True,
    "norm_before_fc": False,
}
_STORED = ("F32", "F16", "BF16", "I64", "BOOL")
_UNUSED = ("t2d", "rotary_emb.inv_freq")
"""Which tokens the head knows is said by ``d2t`` already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """All tensors of a head. ``DV`` tokens are in its vocabulary, ``A`` layers' hidden states are combined."""

    token_embedding: torch.Tensor  # [V, E]; the model's, unless the head has its own
    hidden_norm: Norm
    combine: Linear  # [A * E, E]
    layer: DecoderLayer  # ``attn_norm`` is that of the embedding, ``qkv`` [2 * E, (HQ + 2 * HKV) * D]
    final_norm: Norm
    padded_lm_head: torch.Tensor  # [DV', E]
    token_ids: torch.Tensor | None  # [DV] int64: the model's ids of the head's tokens; None: the same


class Eagle3Head:
    """A head beside a model, with its keys and values in a layer of the model's KV cache.

    Args:
        config: sizes of the head.
        num_tokens: in its vocabulary.
        rotation: of its queries and keys.
        adds_normed: as of ``Eagle3Layer``.
        switches: of the engine.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: HeadWeights,
        num_tokens: int,
        rotation: HeadRotation,
        *,
        adds_normed: bool,
        switches: Switches,
    ) -> None:
        self.config = config
        self.weights = weights
        self._num_tokens = num_tokens
        self.switches = switches
        self._attention_options = AttentionOptions(scale=config.head_size**-0.5)
        self._layer = Eagle3Layer(
            hidden_norm=weights.hidden_norm,
            layer=weights.layer,
            final_norm=weights.final_norm,
            rotation=rotation,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            adds_normed=adds_normed,
            switches=switches,
        )

    def combine(self, held: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what the head reads of hidden states, [T, E], from those of the model's layers, [T, E] each."""
        linear = self.weights.combine
        assert isinstance(linear.weight, torch.Tensor), "heads are not quantized"
        return torch.cat(list(held), dim=1) @ linear.weight

    def store(
        self,
        token_ids: torch.Tensor,  # [T] int64, of the token after each place
        features: torch.Tensor,  # [T, E], as from ``combine``
        positions: torch.Tensor,  # [T] int64
        slot_mapping: torch.Tensor,  # [T] int64, as of ``write_kv``
        kv_cache: torch.Tensor,  # [1, 2, NB, BS, HKV, D]  written
    ) -> None:
        """Store keys and values of some places."""
        key, value = self._layer.keys_and_values(self._embed(token_ids, positions), features, positions)
        key_cache, value_cache = kv_cache[0].unbind(0)
        write_kv(key, value, key_cache, value_cache, slot_mapping)

    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int64, of the token after each place
        features: torch.Tensor,  # [T, E], as from ``combine`` or this
        positions: torch.Tensor,  # [T] int64
        kv_cache: torch.Tensor,  # [1, 2, NB, BS, HKV, D]  written
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what may come after each token, int64 [T], and the features to go on with, [T, E]."""
        attention = PagedAttention(
            metadata,
            kv_cache,
            self._attention_options,
            num_tokens=len(token_ids),
            num_heads=self.config.num_attention_heads,
            fused_kv_append=self.switches.fused_kv_append,
        )
        normed, features = self._layer.forward(
            self._embed(token_ids, positions), features, positions, attention
        )
        weights = self.weights
        drafts = compute_logits(normed, weights.padded_lm_head, self._num_tokens).argmax(dim=1)
        if weights.token_ids is not None:
            drafts = weights.token_ids[drafts]
        return drafts, features

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedded, _ = embed_tokens(token_ids, positions, self.weights.token_embedding)
        return embedded


def resolve_head_path(path: str | Path) -> Path:
    """Return the local directory of a head, which may be without weights; see ``resolve_model_path``.

    Raises:
        ModelError: there is none.
    """
    with _named():
        return resolve_model_path(path, needs_weights=False)


def check_head(path: str | Path, sizes: ModelConfig) -> None:
    """Check that a checkpoint holds a head for a model of these sizes; no tensor is read.

    Raises:
        ModelError: as ``load_head``.
    """
    with _named():
        checkpoint = Checkpoint(path, None, may_lack_weights=sizes.device.type == "meta")
        config = _read_sizes(checkpoint, sizes)
        meta = replace(config, device=torch.device("meta"))
        embedding = torch.empty((config.vocab_size, config.hidden_size), dtype=config.dtype, device="meta")
        _load_weights(checkpoint, meta, sizes.num_layers, embedding)
        read_rotary_options(checkpoint.config, max_position_embeddings=config.max_position_embeddings)
        _adds_normed(checkpoint.config)


def load_head(path: str | Path, model: CausalLM, *, max_model_len: int) -> Eagle3Head:
    """Load the head that a checkpoint holds, on the model's device and in its type, and let the model hand out what it
    reads.

    Args:
        path: local directory or Hugging Face id.
        model: on ``meta``, where config.json is enough, so is the head.
        max_model_len: no request is longer, in tokens.

    Raises:
        ModelError: the checkpoint is missing, damaged, no head that is supported, or does not fit the model.
    """
    sizes = model.config
    with _named():
        checkpoint = Checkpoint(path, None, may_lack_weights=sizes.device.type == "meta")
        fields, config = checkpoint.config, _read_sizes(checkpoint, sizes)
        weights = _load_weights(checkpoint, config, sizes.num_layers, model.weights.token_embedding)
        if weights.token_ids is not None and sizes.device.type != "meta":
            _check_token_ids(weights.token_ids, config.vocab_size)
        options = read_rotary_options(fields, max_position_embeddings=config.max_position_embeddings)
        layers = _layer_ids(fields, sizes.num_layers)
    model.hold_layers(layers)
    # config.json says how long the texts of the head's training were; it drafts for texts of any length.
    table = rotary_table(options, config.head_size, max_model_len, sizes.device)
    return Eagle3Head(
        config,
        weights,
        _num_tokens(fields, config),
        HeadRotation(table, None, None, config.norm_eps),
        adds_normed=_adds_normed(fields),
        switches=model.switches,
    )


@contextmanager
def _named() -> Iterator[None]:
    """Say in errors which checkpoint they are of."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"speculative_config.model: {error}") from error


def _read_sizes(checkpoint: Checkpoint, sizes: ModelConfig) -> ModelConfig:
    """Return the head's sizes; those of its model are ``sizes``."""
    fields = checkpoint.config
    architectures = fields.get("architectures")
    if not isinstance(architectures, list) or not set(map(str, architectures)) & set(_ARCHITECTURES):
        raise ModelError(
            f"config.json: architectures is {architectures!r}, of heads supported are {', '.join(_ARCHITECTURES)}"
        )
    check_supported(fields, _SUPPORTED)
    check_supported(_eagle_config(fields), _SUPPORTED_OF_EAGLE_CONFIG)
    config = ModelConfig.from_hf(
        fields,
        names={"norm_eps": "rms_norm_eps"},
        dtype=sizes.dtype,
        device=str(sizes.device),
        gated_mlp=True,
        norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    for name, own, needed in (
        ("hidden_size", config.hidden_size, sizes.hidden_size),
        ("target_hidden_size", fields.get("target_hidden_size") or sizes.hidden_size, sizes.hidden_size),
        ("vocab_size", config.vocab_size, sizes.vocab_size),
        # Its keys and values are in a layer of the same pool.
        ("num_key_value_heads", config.num_kv_heads, sizes.num_kv_heads),
        ("head_dim", config.head_size, sizes.head_size),
    ):
        if own != needed:
            raise ModelError(f"config.json: {name} is {own}, with this model {needed} is needed")
    for stored in checkpoint.tensors.values():
        if stored.dtype not in _STORED:
            raise ModelError(
                f"model: tensor {stored.name!r} is stored as {stored.dtype}, of heads allowed are {', '.join(_STORED)}"
            )
    return config


def _num_tokens(fields: Mapping[str, Any], config: ModelConfig) -> int:
    """Return how many tokens the head knows."""
    num_tokens = read_size(fields, "draft_vocab_size", config.vocab_size)
    if num_tokens > config.vocab_size:
        raise ModelError(
            f"config.json: draft_vocab_size is {num_tokens}, allowed are at most vocab_size={config.vocab_size}"
        )
    return num_tokens


def _load_weights(
    checkpoint: Checkpoint, config: ModelConfig, num_layers: int, model_embedding: torch.Tensor
) -> HeadWeights:
    """Return the head's tensors.

    Args:
        num_layers: of the model.
        model_embedding: the model's, [V, E], for a head that has none.
    """
    fields = checkpoint.config
    num_tokens, num_held = _num_tokens(fields, config), len(_layer_ids(fields, num_layers))
    return load_weights(
        checkpoint, config, "", lambda reader: _read(reader, num_tokens, num_held, model_embedding)
    )


def _read(reader: WeightReader, num_tokens: int, num_held: int, model_embedding: torch.Tensor) -> HeadWeights:
    config, stored, fields = reader.config, reader.checkpoint.tensors, reader.checkpoint.config
    width, inner = config.hidden_size, config.intermediate_size
    query_width, kv_width = (
        heads * config.head_size for heads in (config.num_attention_heads, config.num_kv_heads)
    )
    layer = "layers.0" if "layers.0.self_attn.q_proj.weight" in stored else "midlayer"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    has_bias, has_mlp_bias = bool(fields.get("attention_bias")), bool(fields.get("mlp_bias"))
    widths = {"q_proj": query_width, "k_proj": kv_width, "v_proj": kv_width}
    embedding = model_embedding
    if _EMBEDDING in stored:
        embedding = reader.tensor(_EMBEDDING, config.vocab_size, width)
    token_ids = None
    if num_tokens != config.vocab_size or "d2t" in stored:
        token_ids = reader.ids("d2t", num_tokens)
        # What is stored is how far the model's id is from the head's.
        reader.afterwards.append(lambda: token_ids.add_(torch.arange(num_tokens, device=reader.device)))
    weights = HeadWeights(
        token_embedding=embedding,
        hidden_norm=reader.rms_norm(f"{layer}.hidden_norm"),
        combine=reader.joined(num_held * width, {"fc": width}),
        layer=DecoderLayer(
            attn_norm=reader.rms_norm(f"{layer}.input_layernorm"),
            qkv=reader.joined(
                2 * width,
                {f"{attention}.{name}": fan_out for name, fan_out in widths.items()},
                has_bias=has_bias,
            ),
            attn_out=reader.joined(query_width, {f"{attention}.o_proj": width}, has_bias=has_bias),
            mlp_norm=reader.rms_norm(f"{layer}.post_attention_layernorm"),
            mlp=Mlp(
                reader.joined(
                    width, {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, has_bias=has_mlp_bias
                ),
                reader.joined(inner, {f"{mlp}.down_proj": width}, has_bias=has_mlp_bias),
            ),
        ),
        final_norm=reader.rms_norm("norm"),
        padded_lm_head=reader.padded(HEAD, num_tokens, width),
        token_ids=token_ids,
    )
    reader.check_all_read(_UNUSED)
    return weights


def _check_token_ids(token_ids: torch.Tensor, vocab_size: int) -> None:
    least, most = token_ids.min().item(), token_ids.max().item()
    if least < 0 or most >= vocab_size:
        raise ModelError(
            f"model: tensor 'd2t' names tokens {least} to {most}, allowed are 0 to {vocab_size - 1}"
        )


def _eagle_config(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    value = fields.get("eagle_config") or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: eagle_config must be an object, got {value!r}")
    return value


def _adds_normed(fields: Mapping[str, Any]) -> bool:
    value = fields.get("norm_before_residual")
    if value not in (None, True, False):
        raise ModelError(f"config.json: norm_before_residual must be true or false, got {value!r}")
    return bool(value)


def _layer_ids(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose input the head combines, in ascending order, as its matrix has them."""
    given = fields.get(_LAYER_IDS)
    if given is None:
        given = _eagle_config(fields).get(_LAYER_IDS)
    # Those that EAGLE-3 was trained with.
    layers = [2, num_layers // 2, num_layers - 3] if given is None else given
    if (
        not isinstance(layers, list)
        or any(type(each) is not int or not 0 <= each < num_layers for each in layers)
        or len(set(layers)) < len(layers)
        or not layers
    ):
        raise ModelError(
            f"config.json: {_LAYER_IDS} must be different layers from 0 to {num_layers - 1}, got {layers!r}"
        )
    return tuple(sorted(layers))
