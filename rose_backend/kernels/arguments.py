"""Arguments that several operations share, or all versions of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of the softmax, and the scales of a float8 cache."""

    scale: float
    """Factor on query-key products, usually ``D ** -0.5``."""
    sliding_window: int | None = None
    """A query sees at most this many tokens, itself included."""
    alibi_slopes: torch.Tensor | None = None
    """[HQ]: per-head slope of a linear penalty on distance."""
    logits_soft_cap: float | None = None
    """Scaled products become ``cap * tanh(product / cap)``."""
    sinks: torch.Tensor | None = None
    """[HQ] float32: per-head logit, neither scaled nor capped, that takes part in the softmax and has no value."""
    key_scale: torch.Tensor | None = None
    """One float32, only with float8 caches; None is 1. A cached number times this is the key. What is stored is divided
    by it, limited to +-448 and rounded to the nearest, ties to even; new tokens are attended as they are stored."""
    value_scale: torch.Tensor | None = None
    """As ``key_scale``, of the values."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadRotation:
    """How heads of queries and keys are rotated by their positions, each behind an RMSNorm where a model has one."""

    cos_sin: torch.Tensor
    """[P, DR] float32: ``DR / 2`` cosines and then as many sines of each position; ``DR`` is even and at most ``D``."""
    query_norm: torch.Tensor | None = None  # [D]
    key_norm: torch.Tensor | None = None  # [D]; both or neither
    eps: float = 0.0
    """Of the norms."""
