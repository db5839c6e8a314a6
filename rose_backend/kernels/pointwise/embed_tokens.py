"""Token and, where there is one, position embedding, and their moments, in one launch: one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu_properties import has_dependent_launch


@triton.jit
def _embed_tokens_kernel(
    input_ids_ptr,  # [T] contiguous
    positions_ptr,  # [T] contiguous
    token_embedding_ptr,  # [V, E]
    position_embedding_ptr,  # [P, E], with ADD
    out_ptr,  # [T, E] contiguous, written
    moments_ptr,  # [T, 2] float32, contiguous, written
    token_stride,
    position_stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Args: ADD: the position embedding."""
    if PDL:
        # Launched in the ordinary way: all kernels in front have ended. The one behind may fetch its weights.
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    mask = columns < WIDTH
    token_id = tl.maximum(tl.load(input_ids_ptr + token), 0).to(tl.int64)
    if ADD:
        position = tl.load(positions_ptr + token)
    of_token = token_embedding_ptr + token_id * token_stride + columns
    embedded = tl.load(of_token, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        positional = position_embedding_ptr + position * position_stride + columns
        embedded += tl.load(positional, mask=mask, other=0.0).to(tl.float32)
    rounded = embedded.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * WIDTH + columns, rounded, mask=mask)
    wide = rounded.to(tl.float32)
    tl.store(moments_ptr + token * 2, tl.sum(wide, 0))
    tl.store(moments_ptr + token * 2 + 1, tl.sum(wide * wide, 0))


def embed_tokens(
    input_ids: torch.Tensor,  # [T] int64 or int32
    positions: torch.Tensor,  # [T] int64
    token_embedding: torch.Tensor,  # [V, E], innermost stride 1
    position_embedding: torch.Tensor | None,  # [P, E], innermost stride 1
    out: torch.Tensor,  # [T, E] contiguous, written
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.embed_tokens``; returns the moments of ``out``."""
    num_tokens, width = len(input_ids), token_embedding.shape[1]
    moments = token_embedding.new_empty((num_tokens, 2, 1), dtype=torch.float32)
    if num_tokens:
        tile = triton.next_power_of_2(width)
        _embed_tokens_kernel[(num_tokens,)](
            input_ids.contiguous(),
            positions.contiguous(),
            token_embedding,
            token_embedding if position_embedding is None else position_embedding,
            out,
            moments,
            token_embedding.stride(0),
            0 if position_embedding is None else position_embedding.stride(0),
            WIDTH=width,
            TILE=tile,
            ADD=position_embedding is not None,
            PDL=has_dependent_launch(out.device),
            num_warps=min(max(tile // 256, 1), 8),
        )
    return moments
