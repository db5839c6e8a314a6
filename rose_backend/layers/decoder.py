"""The layers of a dense decoder in one step: attention and MLP, each after a norm, added to a residual stream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from rose_backend.config import Switches
from rose_backend.kernels import (
    AdapterRows,
    HeadRotation,
    NormInput,
    PackedNorm,
    norm_input_of,
    rotate_query_key,
)
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


def max_packed_float8_rows(*, has_blocks: bool, splits: bool) -> int:
    """Return the same of float8 weights, beside a host's product of activations in 8 bits.

    Args:
        has_blocks: scales are of blocks.
        splits: activations are sums of two float8 numbers (``kernels.linear.float8``).
    """
    return min(constants("packed float8 products", blocks=has_blocks, split=splits)["max_rows"], MAX_ROWS)


def max_packed_int4_rows() -> int:
    """Return the same of int4 weights, beside a library's product with the weight in half precision."""
    return min(constants("packed int4 products")["max_rows"], MAX_ROWS)


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
    mlp: Callable[[ResidualStream, Norm, Mlp, Norm], None]
    """``ResidualStream.gelu_mlp`` or ``ResidualStream.silu_mlp``, for layers that are not sparse."""
    rotations: Sequence[HeadRotation | None] | None = None
    """Of queries and keys, by layer; None: none."""
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Sums over ranks what attention and MLPs add to the hidden states; None: there is one rank. Layers are not packed
    otherwise."""
    adapter_rows: AdapterRows | None = None
    """Of the layers' ``Adapters``; None: no token of the step has an adapter."""
    max_packed_rows: int | None = None
    """Largest small batch; None: as large as ``max_packed_rows`` says."""
    deepstack: Sequence[torch.Tensor] = ()
    """[T, E] each: added to the hidden states after the first layers, one after each; not of small batches."""
    held_layers: Collection[int] = ()
    """Layers whose input ``run_layers`` hands out, with all residual adds; the number of layers: the last one's output.
    Not where ``attention`` wants last tokens only."""

    def first_norm(self, num_tokens: int, attention: StepAttention) -> PackedNorm | None:
        """Return the norm that ``embed_tokens`` leaves a step's hidden states to; None unless the batch is small."""
        norm = self.layers[0].attn_norm
        most = self.max_packed_rows
        if most is None:
            most = max_packed_rows(norm.weight.shape[0])
        is_small = attention.decodes_only and num_tokens <= most and not self.deepstack
        return norm.packed if is_small else None


def run_layers(
    decoder: Decoder,
    hidden: torch.Tensor,  # [T, E]  written where the batch is small
    norm_input: NormInput | None,
    positions: torch.Tensor,  # [T] int64; 0 .. T - 1 with rotations by token
    attention: StepAttention,
    held: list[torch.Tensor] | None = None,  # written
) -> torch.Tensor:
    """Return the normed final hidden states: [T, E], or [R, E] where ``attention`` wants last tokens only.

    Args:
        held: gets the hidden states, [T, E] each, of ``decoder.held_layers`` in ascending order.
        hidden, norm_input: as from ``embed_tokens``, and launched in the ordinary way; of a small batch, too,
            ``norm_input`` may be None.
    """
    layers, rotations, head_size = decoder.layers, decoder.rotations, decoder.head_size
    heads = [decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads]
    num_tokens = hidden.shape[0]
    first_norm = decoder.first_norm(num_tokens, attention)
    is_small_batch = first_norm is not None
    if first_norm is not None and norm_input is None:
        norm_input = norm_input_of(hidden, first_norm)
    stream = ResidualStream(
        hidden,
        decoder.switches,
        norm_input,
        is_small_batch=is_small_batch,
        all_reduce=decoder.all_reduce,
        adapter_rows=decoder.adapter_rows,
    )
    fuses_rotation = attention.rotates and rotates_inside(num_tokens, head_size)
    for index, layer in enumerate(layers):
        qkv = stream.project(layer.attn_norm, layer.qkv).view(num_tokens, -1, head_size)
        if held is not None and index in decoder.held_layers:
            held.append(stream.hold())
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
        stream.add(attended, layer.attn_out, layer.mlp_norm)
        # The final norm is launched separately and reads the hidden states themselves. The last product still writes
        # for a norm, as a variant that does not would be one more kernel to compile.
        next_norm = layers[min(index + 1, len(layers) - 1)].attn_norm
        if isinstance(layer.mlp, SparseMlp):
            stream.sparse_mlp(layer.mlp_norm, layer.mlp, next_norm)
        else:
            decoder.mlp(stream, layer.mlp_norm, layer.mlp, next_norm)
        if index < len(decoder.deepstack):
            stream.add_given(decoder.deepstack[index])
    normed = stream.normed(decoder.final_norm)
    if held is not None and len(layers) in decoder.held_layers:
        held.append(stream.hold())
    return normed
