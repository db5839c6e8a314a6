"""Drafts of a decode step, looked up before it and accepted or not after it.

A lookup takes a program per row and part of its tokens, and one per row for the best of what they find. What follows
the draws is one program for all rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import NOT_DRAWN, DraftedRows

_TOKENS_TILE, _MAX_PARTS = 1024, 32


# A lookup of other n-grams, or in longer requests, is the same kernel.
@triton.jit(do_not_specialize=["token_ids_stride", "min_n", "max_n"])
def _look_up_kernel(
    slots_ptr,  # [R] int64
    token_ids_ptr,  # [MR, S] int32
    token_ids_stride,
    num_computed_ptr,  # [R] int32
    found_ptr,  # [R, PARTS] int64  written: length << 32 | end of the best n-gram; 0: none
    min_n,
    max_n,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    length = tl.load(num_computed_ptr + row) + 1
    tokens_ptr = token_ids_ptr + tl.load(slots_ptr + row) * token_ids_stride
    best = tl.zeros((TILE,), tl.int64)
    # Where an n-gram ends that may equal the last one; padding rows have length 0.
    for start in range(1 + part * TILE, length, PARTS * TILE):
        ends = start + tl.arange(0, TILE)
        goes_on = ends < length
        num_matched = tl.zeros((TILE,), tl.int32)
        for n in range(max_n):
            goes_on = goes_on & (ends > n)
            own = tl.load(tokens_ptr + tl.maximum(length - 1 - n, 0))
            others = tl.load(tokens_ptr + ends - 1 - n, mask=goes_on, other=0)
            goes_on = goes_on & (others == own)
            num_matched += goes_on.to(tl.int32)
        found = (num_matched.to(tl.int64) << 32) + ends
        best = tl.maximum(best, tl.where(num_matched >= min_n, found, 0))
    tl.store(found_ptr + row.to(tl.int64) * PARTS + part, tl.max(best, 0))


@triton.jit(do_not_specialize=["token_ids_stride"])
def _draft_kernel(
    slots_ptr,  # [R] int64
    token_ids_ptr,  # [MR, S] int32
    token_ids_stride,
    num_computed_ptr,  # [R] int32
    found_ptr,  # [R, PARTS] int64
    drafts_ptr,  # [R, DRAFTS] int64  written
    PARTS: tl.constexpr,
    PARTS_TILE: tl.constexpr,
    DRAFTS: tl.constexpr,
    DRAFTS_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(num_computed_ptr + row) + 1
    tokens_ptr = token_ids_ptr + tl.load(slots_ptr + row) * token_ids_stride
    parts = tl.arange(0, PARTS_TILE)
    best = tl.max(tl.load(found_ptr + row * PARTS + parts, mask=parts < PARTS, other=0), 0)
    start = tl.where(best > 0, best - ((best >> 32) << 32), length.to(tl.int64))
    drafts = tl.arange(0, DRAFTS_TILE)
    places = start + drafts
    newest = tl.load(tokens_ptr + tl.maximum(length - 1, 0)).to(tl.int64)
    followed = tl.load(tokens_ptr + places, mask=places < length, other=0).to(tl.int64)
    followed = tl.where(places < length, followed, newest)
    tl.store(drafts_ptr + row * DRAFTS + drafts, followed, mask=drafts < DRAFTS)


@triton.jit(do_not_specialize=["num_rows", "num_places", "token_ids_stride", "history_stride"])
def _accept_kernel(
    drawn_ptr,  # [R, COLUMNS] int64
    drafts_ptr,  # [R, COLUMNS - 1] int64
    slots_ptr,  # [R] int64
    token_ids_ptr,  # [MR, S] int32  written
    token_ids_stride,
    num_places,  # S
    input_ids_ptr,  # [R] int64  written
    num_computed_ptr,  # [R] int32  written
    positions_ptr,  # [R] int64  written
    draw_positions_ptr,  # [R] int64  written
    history_ptr,  # [HISTORY, C, MR] int64  written
    history_stride,
    column_stride,
    step_index_ptr,  # [1] int64  written
    num_rows,
    NOTHING: tl.constexpr,
    HISTORY: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
):
    rows = tl.arange(0, ROWS_TILE)
    mask = rows < num_rows
    step_index = tl.load(step_index_ptr)
    history_ptr += (step_index % HISTORY) * history_stride
    computed = tl.load(num_computed_ptr + rows, mask=mask, other=-1)
    is_row = mask & (computed >= 0)
    tokens_ptr = token_ids_ptr + tl.load(slots_ptr + rows, mask=mask, other=0) * token_ids_stride
    goes_on = mask
    num_new = tl.zeros((ROWS_TILE,), tl.int32)
    newest = tl.zeros((ROWS_TILE,), tl.int64)
    for column in tl.static_range(COLUMNS):
        token = tl.load(drawn_ptr + rows * COLUMNS + column, mask=mask, other=0)
        place = computed + 1 + column
        is_kept = is_row & goes_on & (place < num_places)
        tl.store(tokens_ptr + place, token.to(tl.int32), mask=is_kept)
        tl.store(history_ptr + column * column_stride + rows, tl.where(goes_on, token, NOTHING), mask=mask)
        newest = tl.where(goes_on, token, newest)
        num_new += goes_on.to(tl.int32)
        if column + 1 < COLUMNS:
            draft = tl.load(drafts_ptr + rows * (COLUMNS - 1) + column, mask=mask, other=-1)
            goes_on = goes_on & (draft == token) & (draft >= 0)
    num_new = tl.minimum(num_new, num_places - 1 - computed)
    positions = tl.load(positions_ptr + rows, mask=mask)
    draw_positions = tl.load(draw_positions_ptr + rows, mask=mask)
    tl.store(input_ids_ptr + rows, newest, mask=mask)
    tl.store(num_computed_ptr + rows, computed + num_new, mask=is_row)
    tl.store(positions_ptr + rows, positions + num_new, mask=is_row)
    tl.store(draw_positions_ptr + rows, draw_positions + num_new, mask=is_row)
    # Every thread has read the old number before one writes the new one.
    tl.debug_barrier()
    tl.store(step_index_ptr, step_index + 1)


def look_up_drafts(rows: DraftedRows, num_drafts: int, min_n: int, max_n: int) -> torch.Tensor:
    """``rose_backend.kernels.decode_step.ops.look_up_drafts`` on a GPU."""
    num_rows, num_places = len(rows.slots), rows.token_ids.shape[1]
    drafts = rows.input_ids.new_empty((num_rows, num_drafts))
    if num_rows == 0:
        return drafts
    parts = min(triton.cdiv(num_places, _TOKENS_TILE), _MAX_PARTS)
    found = rows.input_ids.new_empty((num_rows, parts))
    tokens = (rows.slots, rows.token_ids, rows.token_ids.stride(0), rows.num_computed_tokens)
    _look_up_kernel[(num_rows, parts)](
        *tokens, found, min_n, max_n, PARTS=parts, TILE=min(_TOKENS_TILE, triton.next_power_of_2(num_places))
    )
    _draft_kernel[(num_rows,)](
        *tokens,
        found,
        drafts,
        PARTS=parts,
        PARTS_TILE=triton.next_power_of_2(parts),
        DRAFTS=num_drafts,
        DRAFTS_TILE=triton.next_power_of_2(num_drafts),
        num_warps=1,
    )
    return drafts


def accept_drafts(
    drawn: torch.Tensor,  # [R, N + 1] int64
    drafts: torch.Tensor,  # [R, N] int64
    rows: DraftedRows,  # written
    history: torch.Tensor,  # [steps, C, MR] int64  written
    step_index: torch.Tensor,  # [1] int64  written
) -> None:
    """``rose_backend.kernels.decode_step.ops.accept_drafts`` on a GPU."""
    num_rows, num_columns = drawn.shape
    if num_rows == 0:
        return
    tile = triton.next_power_of_2(num_rows)
    _accept_kernel[(1,)](
        drawn,
        drafts,
        rows.slots,
        rows.token_ids,
        rows.token_ids.stride(0),
        rows.token_ids.shape[1],
        rows.input_ids,
        rows.num_computed_tokens,
        rows.positions,
        rows.draw_positions,
        history,
        history.stride(0),
        history.stride(1),
        step_index,
        num_rows,
        NOTHING=NOT_DRAWN,
        HISTORY=len(history),
        COLUMNS=num_columns,
        ROWS_TILE=tile,
        num_warps=min(max(tile // 128, 1), 8),
    )
