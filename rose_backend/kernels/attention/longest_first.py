"""Rows by falling length, in one launch: each program counts for a few rows how many others come first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS_TILE = 16
_OTHERS_TILE = 256


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["lengths_ptr"])
def _longest_first_kernel(
    order_ptr,  # [R] int32  written
    lengths_ptr,  # [R] int32
    num_rows,
    ROWS_TILE: tl.constexpr,
    OTHERS_TILE: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    is_row = rows < num_rows
    lengths = tl.load(lengths_ptr + rows, mask=is_row, other=0)
    num_before = tl.zeros([ROWS_TILE], tl.int32)
    for start in range(0, num_rows, OTHERS_TILE):
        others = start + tl.arange(0, OTHERS_TILE)
        other_lengths = tl.load(lengths_ptr + others, mask=others < num_rows, other=0)
        is_longer = other_lengths[None, :] > lengths[:, None]
        # Among equals the order of rows decides: no place is taken twice.
        is_tie = (other_lengths[None, :] == lengths[:, None]) & (others[None, :] < rows[:, None])
        num_before += tl.sum(((is_longer | is_tie) & (others < num_rows)[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + num_before, rows, mask=is_row)


def longest_first(
    lengths: torch.Tensor,  # [R] int32
) -> torch.Tensor:
    """Return the rows ``[R]`` int32 by falling length, rows of one length in their own order."""
    order, num_rows = torch.empty_like(lengths), len(lengths)
    if num_rows:
        _longest_first_kernel[(triton.cdiv(num_rows, _ROWS_TILE),)](
            order, lengths, num_rows, ROWS_TILE=_ROWS_TILE, OTHERS_TILE=_OTHERS_TILE
        )
    return order
