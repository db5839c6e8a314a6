"""The end of a decode step in one launch of one program: there is too little to do for a second one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu_properties import has_dependent_launch


@triton.jit(do_not_specialize=["num_rows", "history_stride"])
def _advance_rows_kernel(
    token_ids_ptr,  # [R]
    input_ids_ptr,  # [R]  written
    num_computed_ptr,  # [R]  written
    positions_ptr,  # [R]  written
    draw_positions_ptr,  # [R]  written
    history_ptr,  # [N, MR]  written
    step_index_ptr,  # [1]  written
    num_rows,
    history_stride,
    HISTORY: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    rows = tl.arange(0, ROWS_TILE)
    mask = rows < num_rows
    token_ids = tl.load(token_ids_ptr + rows, mask=mask)
    num_computed = tl.load(num_computed_ptr + rows, mask=mask, other=-1)
    positions = tl.load(positions_ptr + rows, mask=mask)
    draw_positions = tl.load(draw_positions_ptr + rows, mask=mask)
    step_index = tl.load(step_index_ptr)
    is_row = mask & (num_computed >= 0)
    tl.store(input_ids_ptr + rows, token_ids, mask=mask)
    tl.store(num_computed_ptr + rows, num_computed + 1, mask=is_row)
    tl.store(positions_ptr + rows, positions + 1, mask=is_row)
    tl.store(draw_positions_ptr + rows, draw_positions + 1, mask=is_row)
    tl.store(history_ptr + (step_index % HISTORY) * history_stride + rows, token_ids, mask=mask)
    # Every thread has read the old number before one writes the new one.
    tl.debug_barrier()
    tl.store(step_index_ptr, step_index + 1)


def advance_rows(
    token_ids: torch.Tensor,  # [R] int64
    input_ids: torch.Tensor,  # [R] int64  written
    num_computed_tokens: torch.Tensor,  # [R] int32  written
    positions: torch.Tensor,  # [R] int64  written
    draw_positions: torch.Tensor,  # [R] int64  written
    history: torch.Tensor,  # [N, MR] int64  written
    step_index: torch.Tensor,  # [1] int64  written
) -> None:
    """Twin of ``rose_backend.kernels.advance_rows``."""
    num_rows = len(token_ids)
    if num_rows == 0:
        return
    tile = triton.next_power_of_2(num_rows)
    _advance_rows_kernel[(1,)](
        token_ids,
        input_ids,
        num_computed_tokens,
        positions,
        draw_positions,
        history,
        step_index,
        num_rows,
        history.stride(0),
        HISTORY=len(history),
        ROWS_TILE=tile,
        PDL=has_dependent_launch(token_ids.device),
        launch_pdl=has_dependent_launch(token_ids.device),
        num_warps=min(max(tile // 128, 1), 8),
    )
