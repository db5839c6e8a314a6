"""Token and position embedding in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embed_tokens(
    input_ids: torch.Tensor,  # [T] int64
    positions: torch.Tensor,  # [T] int64
    token_embedding: torch.Tensor,  # [V, E]
    position_embedding: torch.Tensor,  # [P, E]
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.embed_tokens``."""
    return F.embedding(input_ids, token_embedding) + F.embedding(positions, position_embedding)
