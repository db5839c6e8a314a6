"""The start of a GPT-2 step: token and position embedding of every token, added."""

from __future__ import annotations

import torch

from rose_backend.kernels.reference import embed_tokens as reference
from rose_backend.kernels.tensor_checks import check_same_dtype, check_tensors


def embed_tokens(
    input_ids: torch.Tensor,  # [T] int64
    positions: torch.Tensor,  # [T] int64
    token_embedding: torch.Tensor,  # [V, E]
    position_embedding: torch.Tensor,  # [P, E]
) -> torch.Tensor:
    """Return ``token_embedding[input_ids] + position_embedding[positions]``, [T, E], rounded once.

    Args:
        input_ids, positions: inside their tables; a GPU does not check that.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    check_tensors(
        input_ids=(input_ids, "T", torch.int64),
        positions=(positions, "T", torch.int64),
        token_embedding=(token_embedding, "V E"),
        position_embedding=(position_embedding, "P E"),
    )
    check_same_dtype(token_embedding=token_embedding, position_embedding=position_embedding)
    if input_ids.is_cuda:
        from rose_backend.kernels.gpu import embed_tokens as gpu

        return gpu.embed_tokens(input_ids, positions, token_embedding, position_embedding)
    return reference.embed_tokens(input_ids, positions, token_embedding, position_embedding)
