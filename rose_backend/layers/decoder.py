"""The layers of a dense decoder in one step: attention and MLP behind a norm each, added to a residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rose_backend.config import Switches
from rose_backend.kernels import AttentionOptions, HeadRotation, rotate_query_key
from rose_backend.kernels.small_batch_linear import MAX_ROWS
from rose_backend.layers.attention import AttentionMetadata, PagedAttention
from rose_backend.layers.linear import DecoderLayer, Linear, Norm, ResidualStream

MAX_ROTATED_ROWS = 64
"""Decodes of a step up to which attention rotates on its way. On an H200 a step of Qwen3 0.6B was shorter by 70 us with
32 of them, and longer by 20 to 40 us with 256, where each program rotates for itself what one launch does for all."""


def run_layers(
    hidden: torch.Tensor,  # [T, E]  written where the batch is small
    moments: torch.Tensor,  # [T, 2, 1] float32
    layers: Sequence[DecoderLayer],
    final_norm: Norm,
    kv_cache: torch.Tensor,  # [L, 2, NB, BS, HKV, D]  written
    metadata: AttentionMetadata,
    *,
    num_heads: int,
    options: AttentionOptions,
    switches: Switches,
    mlp: Callable[[ResidualStream, Norm, Linear, Linear], None],
    positions: torch.Tensor,  # [T] int64
    rotations: Sequence[HeadRotation | None] | None = None,
) -> torch.Tensor:
    """Return the hidden states behind ``final_norm``: [T, E], or [R, E] with ``last_tokens_only``.

    Args:
        hidden, moments: from ``embed_tokens``, which was launched in the ordinary way.
        mlp: ``ResidualStream.gelu_mlp`` or ``ResidualStream.silu_mlp``.
        rotations: of queries and keys, by layer; None: none.
    """
    num_tokens, num_kv_heads, head_size = hidden.shape[0], kv_cache.shape[-2], kv_cache.shape[-1]
    attention = PagedAttention(
        metadata,
        kv_cache,
        options,
        num_tokens=num_tokens,
        num_heads=num_heads,
        fused_kv_append=switches.fused_kv_append,
    )
    is_packed = layers[0].qkv.packed is not None
    is_small_batch = is_packed and num_tokens == metadata.num_decodes <= MAX_ROWS
    stream = ResidualStream(hidden, switches, moments, is_small_batch=is_small_batch)
    fuses_rotation = switches.fused_kv_append and num_tokens == metadata.num_decodes <= MAX_ROTATED_ROWS
    for index, layer in enumerate(layers):
        qkv = stream.project(layer.attn_norm, layer.qkv).view(num_tokens, -1, head_size)
        query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        rotation = None if rotations is None else rotations[index]
        if rotation is not None and not fuses_rotation:
            rotate_query_key(query, key, positions, rotation)
            rotation = None
        # The embedding was launched in the ordinary way: all but the projection and its rotation is complete.
        attended = attention(index, query, key, value, overlap=stream.is_small_batch, rotation=rotation)
        if attention.last_tokens is not None and index + 1 == len(layers):
            attended = attended[attention.last_tokens]
            stream.keep(attention.last_tokens)
        stream.add(attended, layer.attn_out)
        mlp(stream, layer.mlp_norm, layer.mlp_in, layer.mlp_out)
    return stream.normed(final_norm)
