"""GPT-2's layers for a few tokens at once, where a step is as long as its weights take: five launches each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    """One layer's products, each with the LayerNorm in front of it folded in."""

    qkv: PackedLinear
    attn_proj: PackedLinear
    fc: PackedLinear
    fc_proj: PackedLinear


def pack_layers(weights: GPT2Weights, eps: float) -> tuple[GPT2Weights, tuple[PackedLayer, ...]]:
    """Prepare all layers, once.

    Returns:
        The weights with matrices that are views of the packed ones, and with norms that neither scale nor shift: other
        ways through the layers take these, so that no matrix is there twice. And the packed layers.
    """
    packed = tuple(_pack_layer(layer, eps) for layer in weights.layers)
    folded = tuple(_fold_layer(layer, parts) for layer, parts in zip(weights.layers, packed, strict=True))
    return replace(weights, layers=folded), packed


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


def _fold_layer(layer: LayerWeights, packed: PackedLayer) -> LayerWeights:
    ones, zeros = torch.ones_like(layer.ln_1_weight), torch.zeros_like(layer.ln_1_bias)
    return replace(
        layer,
        ln_1_weight=ones,
        ln_1_bias=zeros,
        qkv_weight=packed.qkv.weight.t(),
        qkv_bias=packed.qkv.bias.to(layer.qkv_bias.dtype),
        attn_proj_weight=packed.attn_proj.weight.t(),
        ln_2_weight=ones,
        ln_2_bias=zeros,
        fc_weight=packed.fc.weight.t(),
        fc_bias=packed.fc.bias.to(layer.fc_bias.dtype),
        fc_proj_weight=packed.fc_proj.weight.t(),
    )
