"""The layers of a dense decoder in one step: attention and MLP behind a norm each, added to a residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rose_backend.config import Switches
from rose_backend.kernels import HeadRotation, rotate_query_key
from rose_backend.kernels.linear.ops import MAX_ROWS
from rose_backend.layers.attention import StepAttention
from rose_backend.layers.linear import DecoderLayer, Mlp, Norm, ResidualStream, SparseMlp

MAX_ROTATED_ROWS, ALWAYS_ROTATED = 128, 128
"""Decodes of a step up to which attention rotates on its way; size of heads for which it always does."""

_WIDE = 2048
_MAX_WIDE_ROWS = 128


def max_packed_rows(hidden_size: int) -> int:
    """Return the decodes of a step up to which packed products, which take norms in, are faster than the library's.

    Qwen3 0.6B's are faster for all. A layer of Llama 3.1 8B with 1, 40, 128, 144, 192 and 256 decodes took 120, 137,
    167, 221, 232 and 245 us packed on an H200, and 133, 151, 181, 189, 224 and 251 by library products
    (``benchmarks.tune_decode_layer`` times both).
    """
    return MAX_ROWS if hidden_size < _WIDE else _MAX_WIDE_ROWS


def rotates_inside(num_decodes: int, head_size: int) -> bool:
    """Return whether attention of a step that only decodes rotates on its way, in place of a launch of its own.

    Each program then does for itself what one launch does for all. Heads of 128 elements gain for any number of
    decodes: with 256, a layer's attention with Llama 3.1 8B's heads takes 43.9 us on an H200, without rotation 42.6,
    and the launch 3.4. Others were not measured with more than 128 decodes.
    """
    return head_size == ALWAYS_ROTATED or num_decodes <= MAX_ROTATED_ROWS


def run_layers(
    hidden: torch.Tensor,  # [T, E]  written where the batch is small
    moments: torch.Tensor | None,  # [T, 2, 1] float32
    layers: Sequence[DecoderLayer],
    final_norm: Norm,
    attention: StepAttention,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    switches: Switches,
    mlp: Callable[[ResidualStream, Norm, Mlp], None],
    positions: torch.Tensor,  # [T] int64
    rotations: Sequence[HeadRotation | None] | None = None,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the hidden states behind ``final_norm``: [T, E], or [R, E] where ``attention`` wants last tokens only.

    Args:
        hidden, moments: as from ``embed_tokens``, and launched in the ordinary way; moments may be None.
        layers: of this rank: ``num_heads`` and ``num_kv_heads`` are what it has of them.
        mlp: ``ResidualStream.gelu_mlp`` or ``ResidualStream.silu_mlp``, for layers that are not sparse.
        rotations: of queries and keys, by layer; None: none.
        all_reduce: sums what attention and MLPs add to the hidden states over ranks; None: there is one rank. Layers
            are not packed then.
    """
    num_tokens = hidden.shape[0]
    is_packed = layers[0].qkv.packed is not None
    is_small_batch = is_packed and attention.decodes_only and num_tokens <= max_packed_rows(hidden.shape[1])
    stream = ResidualStream(hidden, switches, moments, is_small_batch=is_small_batch, all_reduce=all_reduce)
    fuses_rotation = attention.appends and attention.decodes_only and rotates_inside(num_tokens, head_size)
    for index, layer in enumerate(layers):
        qkv = stream.project(layer.attn_norm, layer.qkv).view(num_tokens, -1, head_size)
        query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
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
            mlp(stream, layer.mlp_norm, layer.mlp)
    return stream.normed(final_norm)
