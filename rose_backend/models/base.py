"""What the engine may ask of a model."""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch

from rose_backend.config import Switches
from rose_backend.layers.attention import AttentionMetadata
from rose_backend.models.config import ModelConfig
from rose_backend.models.weights import Checkpoint


class CausalLM(Protocol):
    """A decoder-only language model over a paged KV cache. Shape letters: ``rose_backend.kernels``."""

    config: ModelConfig
    weights: Any
    """All tensors, in dataclasses, mappings and sequences."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        device: str,
        switches: Switches,
        max_model_len: int | None = None,
    ) -> Self:
        """Read the weights; arguments and errors are those of ``load_model``."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        kv_cache: torch.Tensor,  # [L, 2, NB, BS, HKV, D]  written
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run all layers over one step's tokens and return the final hidden states, [T, E].

        With ``metadata.last_tokens_only`` they are [R, E]: the last layer computes only each request's last token.
        Keys and values of all tokens are stored in ``kv_cache``, whose strides may be any with an innermost one of 1.
        """
        ...

    def compute_logits(
        self,
        hidden: torch.Tensor,  # [R, E]
    ) -> torch.Tensor:
        """Return float32 logits [R, V] of hidden states that ``forward`` returned; rows may be further apart."""
        ...
