"""Masks of allowed tokens, a bit for each, applied to logits in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.sampling.choose_token import MINUS_INFINITY

_BLOCK = 4096
_WORD_BITS = tl.constexpr(32)


@triton.jit(do_not_specialize=["logits_stride", "bitmask_stride", "vocab_size"])
def _mask_kernel(
    logits_ptr,  # [R, V]  written
    logits_stride,
    bitmask_ptr,  # [N, V / 32]
    bitmask_stride,
    mask_rows_ptr,  # [R]
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(mask_rows_ptr + row).to(tl.int64)
    if mask_row >= 0:
        words = tl.program_id(1) * (BLOCK // _WORD_BITS) + tl.arange(0, BLOCK // _WORD_BITS)
        bits = tl.arange(0, _WORD_BITS)
        is_word = words * _WORD_BITS < vocab_size
        word = tl.load(bitmask_ptr + mask_row * bitmask_stride + words, mask=is_word, other=0)
        tokens = words[:, None] * _WORD_BITS + bits[None, :]
        is_forbidden = ((word[:, None] >> bits[None, :]) & 1) == 0
        tl.store(
            logits_ptr + row * logits_stride + tokens,
            MINUS_INFINITY,
            mask=is_forbidden & (tokens < vocab_size),
        )


def mask_logits(
    logits: torch.Tensor,  # [R, V]  written
    bitmask: torch.Tensor,  # [N, V / 32] int32
    mask_rows: torch.Tensor,  # [R] int32
) -> None:
    """``rose_backend.kernels.sampling.ops.mask_logits`` on a GPU."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    _mask_kernel[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
        logits, logits.stride(0), bitmask, bitmask.stride(0), mask_rows, vocab_size, BLOCK=_BLOCK
    )
