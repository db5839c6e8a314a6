"""What the engine may ask of a model, how it loads one, and what model families have in common."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from rose_backend.config import Switches
from rose_backend.errors import ModelError
from rose_backend.kernels import (
    AttentionOptions,
    Float8Weight,
    HeadRotation,
    Int4Weight,
    adapter_rows,
    embed_tokens,
)
from rose_backend.kernels.gpu_properties import gpu_properties
from rose_backend.layers.attention import AttentionMetadata, PagedAttention
from rose_backend.layers.decoder import Decoder, max_packed_float8_rows, max_packed_int4_rows, run_layers
from rose_backend.layers.linear import (
    DecoderLayer,
    Norm,
    ResidualStream,
    compute_logits,
    pack_layer,
    packs_layers,
)
from rose_backend.models.adapters import AdapterSlots
from rose_backend.models.config import ModelConfig
from rose_backend.models.weights import Checkpoint, ProgressCallback


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a checkpoint; see ``load_model``."""

    dtype: str
    device: str
    switches: Switches
    max_model_len: int | None
    check_sizes: Callable[[ModelConfig], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All tensors of a decoder."""

    token_embedding: torch.Tensor  # [V, E]
    position_embedding: torch.Tensor | None = None  # [P, E]: learned positions
    rotary_table: torch.Tensor | None = None  # [P, D] float32, see ``rotary_table`` of ``models.rope``
    layers: list[DecoderLayer]
    final_norm: Norm
    padded_lm_head: torch.Tensor  # [V', E], see ``WeightReader.embedding_and_head``


class CausalLM(ABC):
    """A decoder-only language model over a paged KV cache. Shape letters: ``rose_backend.kernels``.

    Args:
        rotations: of each layer's queries and keys; None: none.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        switches: Switches,
        rotations: Sequence[HeadRotation | None] | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.switches = switches
        self._attention_options = AttentionOptions(scale=config.head_size**-0.5)
        self._decoder = Decoder(
            layers=weights.layers,
            final_norm=weights.final_norm,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            switches=switches,
            mlp=ResidualStream.silu_mlp if config.gated_mlp else ResidualStream.gelu_mlp,
            rotations=rotations,
            max_packed_rows=_max_packed_rows(weights.layers[0], config.dtype),
        )
        if packs_layers(switches, config.device):
            self.pack_for_small_batches()

    @classmethod
    @abstractmethod
    def load(cls, checkpoint: Checkpoint, options: LoadOptions) -> Self:
        """Read config.json and the weights; errors are those of ``load_model``."""

    def forward(
        self,
        input_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        kv_cache: torch.Tensor,  # [L, 2, NB, BS, HKV, D]  written
        metadata: AttentionMetadata,
        held: list[torch.Tensor] | None = None,  # written
        lora_slots: torch.Tensor | None = None,  # [T] int64
    ) -> torch.Tensor:
        """Run all layers over one step's tokens and return the final hidden states, [T, E].

        With ``metadata.last_tokens_only`` they are [R, E]: the last layer computes only each request's last token.
        Keys and values of all tokens are stored in ``kv_cache``, whose strides may be any with an innermost one of 1.

        Args:
            kv_cache: may have further layers after the model's.
            held: gets the hidden states, [T, E] each, of the layers that ``hold_layers`` was given.
            lora_slots: of each token's adapter, negative for none; None: no token has one. See ``add_lora_slots``.
        """
        attention = PagedAttention(
            metadata,
            kv_cache,
            self._attention_options,
            num_tokens=len(input_ids),
            num_heads=self.config.num_attention_heads,
            fused_kv_append=self.switches.fused_kv_append,
        )
        weights = self.weights
        embedded = embed_tokens(
            input_ids,
            positions,
            weights.token_embedding,
            weights.position_embedding,
            next_norm=self._decoder.first_norm(len(input_ids), attention),
        )
        decoder = self._decoder
        if lora_slots is not None:
            decoder = replace(decoder, adapter_rows=adapter_rows(lora_slots))
        return run_layers(decoder, *embedded, positions, attention, held)

    def add_lora_slots(self, num_slots: int, max_rank: int) -> AdapterSlots:
        """Give the layers slots for adapters; ``why_no_adapters`` finds nothing."""
        return AdapterSlots(self.weights.layers, self.config, num_slots, max_rank)

    def hold_layers(self, layers: Sequence[int]) -> None:
        """Let ``forward`` hand out the hidden states that come into these layers, in ascending order."""
        self._decoder = replace(self._decoder, held_layers=tuple(layers))

    def compute_logits(
        self,
        hidden: torch.Tensor,  # [R, E]
    ) -> torch.Tensor:
        """Return float32 logits [R, V] of hidden states that ``forward`` returned; rows may be further apart."""
        return compute_logits(hidden, self.weights.padded_lm_head, self.config.vocab_size)

    def pack_for_small_batches(self) -> None:
        """Prepare the layers for a few decodes at once, where a step is as long as its weights take to read."""
        layers = self.weights.layers
        for index, layer in enumerate(layers):
            # In place and one by one: matrices that change are there twice while that is done.
            layers[index] = pack_layer(layer)


def _max_packed_rows(layer: DecoderLayer, dtype: torch.dtype) -> int | None:
    """Return ``Decoder.max_packed_rows``. A library multiplies many rows faster in 8 bits than in 16."""
    weight = layer.qkv.weight
    if isinstance(weight, Int4Weight):
        return max_packed_int4_rows()
    if layer.qkv.quantization is None or not isinstance(weight, Float8Weight):
        return None
    # Later GPUs split activations, too, but the kernel was not measured there.
    splits = dtype is torch.bfloat16 and gpu_properties(weight.device).capability[0] == 9
    return max_packed_float8_rows(has_blocks=weight.has_blocks, splits=splits)


MODEL_CLASSES = {
    "GPT2LMHeadModel": "rose_backend.models.gpt2:GPT2",
    "LlamaForCausalLM": "rose_backend.models.llama:Llama",
    "MistralForCausalLM": "rose_backend.models.llama:Mistral",
    "Qwen2ForCausalLM": "rose_backend.models.llama:Qwen2",
    "Qwen3ForCausalLM": "rose_backend.models.llama:Qwen3",
    "Qwen3MoeForCausalLM": "rose_backend.models.llama:Qwen3Moe",
    "SmolLM3ForCausalLM": "rose_backend.models.llama:SmolLM3",
}
"""Architecture as in config.json, and ``module:class`` of its ``CausalLM``, which is imported when it is used."""


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    switches: Switches | None = None,
    max_model_len: int | None = None,
    on_progress: ProgressCallback | None = None,
    check_sizes: Callable[[ModelConfig], None] = lambda sizes: None,
) -> CausalLM:
    """Load the model that a checkpoint's config.json asks for.

    Args:
        path: local directory or Hugging Face id.
        dtype: ``auto`` is float32 on a CPU, the checkpoint's own type elsewhere; for float32 bfloat16, as in vLLM.
        device: ``cpu`` or ``cuda``; or ``meta`` for a model without memory, where config.json is enough.
        switches: None has everything on.
        max_model_len: no request is longer, in tokens: a sliding window of that length is none. None: the model's.
        on_progress: told of the bytes of weights that were read.
        check_sizes: called before weights are read; what it raises ends the loading.

    Raises:
        ModelError: the checkpoint is missing, damaged, or of an architecture that is not supported.
    """
    checkpoint = Checkpoint(path, on_progress, may_lack_weights=device == "meta")
    architectures = checkpoint.config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"config.json: architectures must be a list of names, got {architectures!r}")
    for name in architectures:
        if name in MODEL_CLASSES:
            module, _, class_name = MODEL_CLASSES[name].partition(":")
            model_class: type[CausalLM] = getattr(importlib.import_module(module), class_name)
            options = LoadOptions(
                dtype=dtype,
                device=device,
                switches=switches or Switches(),
                max_model_len=max_model_len,
                check_sizes=check_sizes,
            )
            return model_class.load(checkpoint, options)
    raise ModelError(
        f"model: {str(path)!r} is of architecture {', '.join(map(str, architectures)) or 'unknown'},"
        f" supported are {', '.join(MODEL_CLASSES)}"
    )
