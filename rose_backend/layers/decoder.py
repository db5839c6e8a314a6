"""The layers of a dense decoder in one step: attention and MLP, each after a norm, added to a residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rose_backend.config import Switches
from rose_backend.kernels import HeadRotation, rotate_query_key
from rose_backend.kernels.arguments import MAX_ROWS
from rose_backend.kernels.tuning.measured import constants
from rose_backend.layers.attention import StepAttention
from rose_backend.layers.linear import DecoderLayer, Mlp, Norm, ResidualStream, SparseMlp

MAX_ROTATED_ROWS = constants("rotation inside attention")["max_rows"]
"""Largest decode batch for which attention applies RoPE itself."""
ALWAYS_ROTATED = constants("rotation inside attention")["always_with_head_size"]
"""Head size for which it always does."""


def max_packed_rows(hidden_size: int) -> int:
    """Return the decodes of a step up to which packed products, which take norms in, are faster than the library's.

    ``benchmarks.tune_decode_layer`` times both.
    """
    return min(constants("packed products", hidden_size=hidden_size)["max_rows"], MAX_ROWS)


def rotates_inside(num_decodes: int, head_size: int) -> bool:
    """Return whether attention applies RoPE itself in a step that only decodes, in place of a separate launch.

    Each program then does for itself what one launch does for all.
    """
    return head_size == ALWAYS_ROTATED or num_decodes <= MAX_ROTATED_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The layers of a dense decoder on one rank, and how they are computed in every step."""

    layers: Sequence[DecoderLayer]
    final_norm: Norm
    num_heads: int
    """Of this rank, as ``num_kv_heads``."""
    num_kv_heads: int
    head_size: int
    switches: Switches
    mlp: Callable[[ResidualStream, Norm, Mlp], None]
    """``ResidualStream.gelu_mlp`` or ``ResidualStream.silu_mlp``, for layers that are not sparse."""
    rotations: Sequence[HeadRotation | None] | None = None
    """Of queries and keys, by layer; None: none."""
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Sums over ranks what attention and MLPs add to the hidden states; None: there is one rank. Layers are not packed
    otherwise."""


def run_layers(
    decoder: Decoder,
    hidden: torch.Tensor,  # [T, E]  written where the batch is small
    moments: torch.Tensor | None,  # [T, 2, 1] float32
    positions: torch.Tensor,  # [T] int64
    attention: StepAttention,
) -> torch.Tensor:
    """Return the normed final hidden states: [T, E], or [R, E] where ``attention`` wants last tokens only.

    Args:
        hidden, moments: as from ``embed_tokens``, and launched in the ordinary way; moments may be None.
    """
    layers, rotations, head_size = decoder.layers, decoder.rotations, decoder.head_size
    heads = [decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads]
    num_tokens = hidden.shape[0]
    is_packed = layers[0].qkv.packed is not None
    is_small_batch = is_packed and attention.decodes_only and num_tokens <= max_packed_rows(hidden.shape[1])
    stream = ResidualStream(
        hidden, decoder.switches, moments, is_small_batch=is_small_batch, all_reduce=decoder.all_reduce
    )
    fuses_rotation = attention.appends and attention.decodes_only and rotates_inside(num_tokens, head_size)
    for index, layer in enumerate(layers):
        qkv = stream.project(layer.attn_norm, layer.qkv).view(num_tokens, -1, head_size)
        query, key, value = qkv.split(heads, dim=1)
        rotation = None if rotations is None else rotations[index]
        if rotation is not None and not fuses_rotation:
            rotate_query_key(query, key, positions, rotation)
            rotation = None
        # The embedding was launched in the ordinary way: all but the projection and its rotation is complete.
        overlap = is_small_batch and attention.appends
        attended = attention(index, query, key, value, overlap=overlap, rotation=rotation)
        if attention.last_tokens is not None and index + 1 == len(layers):
            attended = attended[attention.last_tokens]
            stream.keep(attention.last_tokens)
        stream.add(attended, layer.attn_out)
        if isinstance(layer.mlp, SparseMlp):
            stream.sparse_mlp(layer.mlp_norm, layer.mlp)
        else:
            decoder.mlp(stream, layer.mlp_norm, layer.mlp)
    return stream.normed(decoder.final_norm)
