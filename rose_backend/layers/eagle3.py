"""The layer of an EAGLE-3 head, which drafts from hidden states of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rose_backend.config import Switches
from rose_backend.kernels import HeadRotation, rms_norm, rotate_query_key
from rose_backend.layers.attention import StepAttention
from rose_backend.layers.linear import DecoderLayer, Mlp, Norm, ResidualStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Layer:
    """The layer between what a head reads at each place, the embedding of the token after it and *features*, and what
    it says.

    Keys and values of a place depend on no other place: those of known tokens can be stored without attention.
    """

    hidden_norm: Norm
    layer: DecoderLayer
    """``attn_norm`` is that of the embedding; ``qkv`` is [2 * E, (HQ + 2 * HKV) * D], and not quantized."""
    final_norm: Norm
    rotation: HeadRotation
    num_heads: int
    num_kv_heads: int
    head_size: int
    adds_normed: bool
    """Attention adds to the normed features (``norm_before_residual``)."""
    switches: Switches

    def keys_and_values(
        self,
        embedded: torch.Tensor,  # [T, E]
        features: torch.Tensor,  # [T, E]
        positions: torch.Tensor,  # [T] int64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated keys and the values of some places, [T, HKV, D] each."""
        _, _, key, value = self._project(embedded, features, positions)
        return key, value

    def forward(
        self,
        embedded: torch.Tensor,  # [T, E]
        features: torch.Tensor,  # [T, E]
        positions: torch.Tensor,  # [T] int64
        attention: StepAttention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the head's product with its vocabulary takes, and the features to go on with, [T, E] each."""
        layer = self.layer
        residual, query, key, value = self._project(embedded, features, positions)
        assert isinstance(layer.mlp, Mlp), "a head has no experts"
        stream = ResidualStream(residual, self.switches)
        stream.add(attention(0, query, key, value), layer.attn_out)
        stream.silu_mlp(layer.mlp_norm, layer.mlp, layer.mlp_norm)
        normed = stream.normed(self.final_norm)
        return normed, stream.hold()

    def _project(
        self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what attention adds to, [T, E], and rotated queries, rotated keys and values, [T, heads, D] each."""
        layer = self.layer
        normed = rms_norm(features, self.hidden_norm.weight, self.hidden_norm.eps)
        of_tokens = rms_norm(embedded, layer.attn_norm.weight, layer.attn_norm.eps)
        joined, matrix = torch.cat([of_tokens, normed], dim=1), layer.qkv.weight
        assert isinstance(matrix, torch.Tensor), "heads are not quantized"
        qkv = joined @ matrix if layer.qkv.bias is None else torch.addmm(layer.qkv.bias, joined, matrix)
        query, key, value = qkv.view(len(embedded), -1, self.head_size).split(
            [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        rotate_query_key(query, key, positions, self.rotation)
        return (normed if self.adds_normed else features), query, key, value
