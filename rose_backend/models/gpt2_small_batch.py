"""GPT-2's layers for a few tokens at once, where a step is as long as its weights take: five launches each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rose_backend.kernels import (
    PackedLinear,
    pack_linear,
    small_batch_linear,
    small_batch_linear_and_moments,
)
from rose_backend.models.gpt2_checkpoint import GPT2Weights, LayerWeights

MAX_ROWS = 256
"""On an H200, more rows are faster through a library's products."""


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer's products, each with the LayerNorm in front of it folded in. A copy of the layer's matrices."""

    qkv: PackedLinear
    attn_proj: PackedLinear
    fc: PackedLinear
    fc_proj: PackedLinear


def pack_layers(weights: GPT2Weights, eps: float) -> tuple[PackedLayer, ...]:
    """Prepare all layers, once."""
    return tuple(_pack_layer(layer, eps) for layer in weights.layers)


def forward_layers(
    residual: torch.Tensor,  # [R, E]  written
    layers: tuple[PackedLayer, ...],
    attend: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run all layers over at most ``MAX_ROWS`` tokens and return ``residual``, updated in place.

    Args:
        attend: given the number of a layer and its QKV projection ``[R, 3 * E]``, returns what was attended, [R, E].
    """
    moments: torch.Tensor | None = None
    for index, layer in enumerate(layers):
        attended = attend(index, small_batch_linear(residual, layer.qkv, x_moments=moments))
        _, moments = small_batch_linear_and_moments(
            attended, layer.attn_proj, residual=residual, out=residual
        )
        widened = small_batch_linear(residual, layer.fc, gelu=True, x_moments=moments)
        _, moments = small_batch_linear_and_moments(widened, layer.fc_proj, residual=residual, out=residual)
    return residual


def _pack_layer(layer: LayerWeights, eps: float) -> PackedLayer:
    return PackedLayer(
        qkv=pack_linear(
            layer.qkv_weight.t(),
            layer.qkv_bias,
            norm_weight=layer.ln_1_weight,
            norm_bias=layer.ln_1_bias,
            eps=eps,
        ),
        attn_proj=pack_linear(layer.attn_proj_weight.t(), layer.attn_proj_bias),
        fc=pack_linear(
            layer.fc_weight.t(),
            layer.fc_bias,
            norm_weight=layer.ln_2_weight,
            norm_bias=layer.ln_2_bias,
            eps=eps,
        ),
        fc_proj=pack_linear(layer.fc_proj_weight.t(), layer.fc_proj_bias),
    )
