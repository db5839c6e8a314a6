"""The two ends of a step whose requests live in slots, one launch each: a program per row, and at its beginning per row
and KV cache group; with prompts also per tile of a row's tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import MixedRows, StepGroup, StepGroups, StepInputs, StepState
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
    """``rose_backend.kernels.decode_step.ops.advance_rows`` on a GPU."""
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


_TABLE_TILE = 1024
_ROWS_TILE = 128
_WRITES_TILE = 256
_TOKENS_TILE = 128


@triton.jit
def _load_group(place):
    """Return what ``StepGroups.layout`` says of a group: the kernel's arguments from ``state_table_ptr`` on."""
    state_table_ptr = tl.load(place).to(tl.pointer_type(tl.int32))
    state_table_stride = tl.load(place + 1)
    table_ptr = tl.load(place + 2).to(tl.pointer_type(tl.int32))
    table_stride = tl.load(place + 3)
    width = tl.load(place + 4).to(tl.int32)
    slot_mapping_ptr = tl.load(place + 5).to(tl.pointer_type(tl.int64))
    computed_ptr = tl.load(place + 6).to(tl.pointer_type(tl.int32))
    block_size = tl.load(place + 7).to(tl.int32)
    return (
        state_table_ptr, state_table_stride, table_ptr, table_stride, width, slot_mapping_ptr, computed_ptr,
        block_size,
    )  # fmt: skip


@triton.jit
def _count_requests(slots_ptr, num_rows, ROWS_TILE: tl.constexpr):
    """Return how many rows have a request."""
    count = 0
    for start in range(0, num_rows, ROWS_TILE):
        rows = start + tl.arange(0, ROWS_TILE)
        others = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
        count += tl.sum((others >= 0).to(tl.int32))
    return count


@triton.jit
def _copy_blocks(source, destination, num_columns, is_real, TABLE_TILE: tl.constexpr):
    """Copy the first columns of a block table's row; zeros for a row without a request."""
    for start in range(0, num_columns, TABLE_TILE):
        columns = start + tl.arange(0, TABLE_TILE)
        is_copied = columns < num_columns
        blocks = tl.load(source + columns, mask=is_copied, other=0)
        tl.store(destination + columns, tl.where(is_real, blocks, 0), mask=is_copied)


# What differs by rows makes no variant: there is a graph of each of dozens of sizes.
@triton.jit(do_not_specialize=["num_rows", "padding_slot"])
def _begin_kernel(
    slots_ptr,  # [R] int64
    state_computed_ptr,  # [MR] int32
    last_tokens_ptr,  # [MR] int64
    input_ids_ptr,  # [T] int32  written
    positions_ptr,  # [T] int64  written
    seq_lens_ptr,  # [T] int32  written
    query_start_ptr,  # [T + 1] int32  written
    is_padding_ptr,  # [T] bool  written
    request_slots_ptr,  # [T] int32  written
    layout_ptr,  # [G, 9] int64, None with one group
    # Of the one group; None with several.
    state_table_ptr,  # [MR, MB] int32
    state_table_stride,
    table_ptr,  # [T, MB] int32  written
    table_stride,
    width,  # MB
    slot_mapping_ptr,  # [T] int64  written
    computed_ptr,  # [T] int32  written
    block_size,
    num_rows,
    padding_slot,
    ROWS_TILE: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):
    row = tl.program_id(0)
    far_row = row.to(tl.int64)
    slot = tl.load(slots_ptr + row)
    is_first_group = True
    is_state = False
    if layout_ptr is not None:
        is_first_group = tl.program_id(1) == 0
        is_state = tl.load(layout_ptr + tl.program_id(1) * 9 + 2) == 0
        (
            state_table_ptr, state_table_stride, table_ptr, table_stride, width, slot_mapping_ptr, computed_ptr,
            block_size,
        ) = _load_group(layout_ptr + tl.program_id(1) * 9)  # fmt: skip
    is_real = slot >= 0
    known = tl.maximum(slot, 0)
    # Without a request, slot 0 is read and not used.
    computed = tl.where(is_real, tl.load(state_computed_ptr + known), -1)
    position = tl.maximum(computed, 0)
    column = position // block_size
    source = state_table_ptr + known * state_table_stride
    block = tl.load(source + column).to(tl.int64)
    kv_slot = tl.where(is_real, block * block_size + position % block_size, -1)
    if is_first_group:
        token = tl.where(is_real, tl.load(last_tokens_ptr + known), 0)
        # Rows with a request come first, so only those after them count.
        num_before = row + 1
        if slot < 0:
            num_before = _count_requests(slots_ptr, num_rows, ROWS_TILE)
        tl.store(input_ids_ptr + row, token.to(tl.int32))
        tl.store(positions_ptr + row, position.to(tl.int64))
        tl.store(seq_lens_ptr + row, computed + 1)
        tl.store(query_start_ptr + row + 1, num_before)
        tl.store(is_padding_ptr + row, slot < 0)
        tl.store(request_slots_ptr + row, tl.where(is_real, slot, padding_slot).to(tl.int32))
    if is_state:
        state_blocks_ptr = slot_mapping_ptr.to(tl.pointer_type(tl.int32))
        tl.store(state_blocks_ptr + row, tl.where(is_real, block, 0).to(tl.int32))
        tl.store(computed_ptr + known, column, mask=is_real)
    else:
        tl.store(computed_ptr + row, computed)
        tl.store(slot_mapping_ptr + row, kv_slot)
        num_columns = tl.where(is_real, column + 1, width)
        _copy_blocks(source, table_ptr + far_row * table_stride, num_columns, is_real, TABLE_TILE)


@triton.jit
def _pad_tokens(
    num_real, num_tokens, slot_mapping_ptr, is_padding_ptr, is_first_group, TOKENS_TILE: tl.constexpr
):
    """Mark the tokens of no row, each tile of programs its own."""
    first = num_real + tl.program_id(1) * TOKENS_TILE
    for start in range(first, num_tokens, TOKENS_TILE * tl.num_programs(1)):
        tokens = start + tl.arange(0, TOKENS_TILE)
        mask = tokens < num_tokens
        tl.store(slot_mapping_ptr + tokens, tl.full((TOKENS_TILE,), -1, tl.int64), mask=mask)
        if is_first_group:
            tl.store(is_padding_ptr + tokens, mask, mask=mask)


@triton.jit
def _decoded_ids(last_tokens_ptr, draft_tokens_ptr, num_drafts, slot, offsets, mask):
    """Return the tokens of a row that is no prompt, by their place in the row: the last one, and drafts after it."""
    ids = tl.zeros_like(offsets) + tl.load(last_tokens_ptr + slot).to(tl.int32)
    if draft_tokens_ptr is not None:
        is_draft = mask & (offsets > 0) & (offsets <= num_drafts)
        drafts = tl.load(draft_tokens_ptr + slot * num_drafts + offsets - 1, mask=is_draft, other=0)
        ids = tl.where(is_draft, drafts.to(tl.int32), ids)
    return ids


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "padding_slot"])
def _begin_mixed_kernel(
    slots_ptr,  # [R] int64
    starts_ptr,  # [R + 1] int32
    is_prompt_ptr,  # [R] int32
    state_computed_ptr,  # [MR] int32
    last_tokens_ptr,  # [MR] int64
    token_ids_ptr,  # [MR, S] int32
    token_ids_stride,
    draft_tokens_ptr,  # [MR, N] int64; None: N is 0
    num_drafts,  # N
    input_ids_ptr,  # [T] int32  written
    positions_ptr,  # [T] int64  written
    seq_lens_ptr,  # [R] int32  written
    query_start_ptr,  # [R + 1] int32  written
    is_padding_ptr,  # [T] bool  written
    request_slots_ptr,  # [R] int32  written
    decode_computed_ptr,  # [R] int32  written
    prompt_computed_ptr,  # [R] int32  written
    layout_ptr,  # [G, 9] int64
    num_rows,
    num_tokens,
    padding_slot,
    TOKENS_TILE: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1)
    is_first_group = tl.program_id(2) == 0
    (
        state_table_ptr, state_table_stride, table_ptr, table_stride, width, slot_mapping_ptr, _, block_size,
    ) = _load_group(layout_ptr + tl.program_id(2) * 9)  # fmt: skip
    if row == num_rows:
        num_real = tl.load(starts_ptr + num_rows)
        _pad_tokens(num_real, num_tokens, slot_mapping_ptr, is_padding_ptr, is_first_group, TOKENS_TILE)
        return
    slot = tl.load(slots_ptr + row)
    is_real = slot >= 0
    known = tl.maximum(slot, 0)
    token_start = tl.load(starts_ptr + row)
    token_end = tl.load(starts_ptr + row + 1)
    count = token_end - token_start
    computed = tl.where(is_real, tl.load(state_computed_ptr + known), 0)
    source = state_table_ptr + known * state_table_stride
    offsets = tile * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    mask = offsets < count
    positions = computed + offsets
    blocks = tl.load(source + positions // block_size, mask=mask, other=0).to(tl.int64)
    tl.store(
        slot_mapping_ptr + token_start + offsets, blocks * block_size + positions % block_size, mask=mask
    )
    if is_first_group:
        ids = _decoded_ids(last_tokens_ptr, draft_tokens_ptr, num_drafts, known, offsets, mask)
        if tl.load(is_prompt_ptr + row) != 0:
            ids = tl.load(token_ids_ptr + known * token_ids_stride + positions, mask=mask, other=0)
        tl.store(input_ids_ptr + token_start + offsets, ids, mask=mask)
        tl.store(positions_ptr + token_start + offsets, positions.to(tl.int64), mask=mask)
        tl.store(is_padding_ptr + token_start + offsets, offsets >= count, mask=mask)
    if tile == 0:
        if is_first_group:
            tl.store(seq_lens_ptr + row, computed + count)
            tl.store(query_start_ptr + row + 1, token_end)
            tl.store(request_slots_ptr + row, tl.where(is_real, slot, padding_slot).to(tl.int32))
            is_decode = count <= num_drafts + 1
            tl.store(decode_computed_ptr + row, tl.where(is_real & (count > 0) & is_decode, computed, -1))
            tl.store(prompt_computed_ptr + row, tl.where(is_real & ~is_decode, computed, -1))
            if row == 0:
                tl.store(query_start_ptr, 0)
        last_column = (computed + count + num_drafts - 1) // block_size
        num_columns = tl.where(is_real, tl.minimum(last_column + 1, width), width)
        _copy_blocks(source, table_ptr + row.to(tl.int64) * table_stride, num_columns, is_real, TABLE_TILE)


@triton.jit(do_not_specialize=["num_groups", "num_writes"])
def _write_kernel(
    writes_ptr,  # [2, N] int64
    layout_ptr,  # [G, 9] int64, its block tables  written
    num_groups,
    num_writes,
    TILE: tl.constexpr,
):
    entries = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_entry = entries < num_writes
    place = tl.load(writes_ptr + entries, mask=is_entry, other=0)
    block = tl.load(writes_ptr + num_writes + entries, mask=is_entry, other=0)
    first = place * 0
    table = first + tl.load(layout_ptr)
    for group in range(1, num_groups):
        begin = tl.load(layout_ptr + group * 9 + 8)
        table = tl.where(place >= begin, tl.load(layout_ptr + group * 9), table)
        first = tl.where(place >= begin, begin, first)
    tl.store(table.to(tl.pointer_type(tl.int32)) + (place - first), block.to(tl.int32), mask=is_entry)


@triton.jit
def _end_kernel(
    slots_ptr,  # [R] int64
    tokens_ptr,  # [R, N] int64
    tokens_stride,
    num_sampled_ptr,  # [R] int32, None: one
    computed_ptr,  # [MR] int32  written
    last_tokens_ptr,  # [MR] int64  written
    total_lens_ptr,  # [MR] int32  written
    token_ids_ptr,  # [MR, S] int32  written
    counts_ptr,  # [MR, V] int32  written, with COUNTS
    starts_ptr,  # [R + 1] int32, None: a token each
    is_due_ptr,  # [R] int32, None: all are due
    token_ids_stride,
    counts_stride,
    COUNTS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        total = tl.load(total_lens_ptr + slot)
        computed = tl.load(computed_ptr + slot)
        num_new = 1
        if num_sampled_ptr is not None:
            num_new = tl.load(num_sampled_ptr + row)
        num_computed = num_new
        is_due = True
        if starts_ptr is not None:
            num_computed = tl.load(starts_ptr + row + 1) - tl.load(starts_ptr + row)
            is_due = tl.load(is_due_ptr + row) != 0
        tl.store(computed_ptr + slot, computed + num_computed)
        if is_due:
            row_tokens_ptr = tokens_ptr + row.to(tl.int64) * tokens_stride
            row_ids_ptr = token_ids_ptr + slot * token_ids_stride + total
            tl.store(last_tokens_ptr + slot, tl.load(row_tokens_ptr + num_new - 1))
            tl.store(total_lens_ptr + slot, total + num_new)
            # One after the other: the same token may come twice.
            for place in range(num_new):
                token = tl.load(row_tokens_ptr + place)
                tl.store(row_ids_ptr + place, token.to(tl.int32))
                if COUNTS:
                    count_ptr = counts_ptr + slot * counts_stride + token
                    tl.store(count_ptr, tl.load(count_ptr) + 1)


def begin_decode_step(
    slots: torch.Tensor,  # [R] int64
    state: StepState,
    inputs: StepInputs,  # written
    groups: StepGroups,  # written
    padding_slot: int,
) -> None:
    """``rose_backend.kernels.decode_step.ops.begin_decode_step`` on a GPU."""
    num_rows, first = len(slots), groups.groups[0]
    if num_rows == 0:
        return
    of_the_one: tuple[Any, ...] = (None,) * 8
    if is_one := isinstance(first, StepGroup) and len(groups.groups) == 1:
        of_the_one = (
            first.state_table,
            first.state_table.stride(0),
            first.block_table,
            first.block_table.stride(0),
            first.block_table.shape[1],
            first.slot_mapping,
            first.num_computed_tokens,
            first.block_size,
        )
    _begin_kernel[(num_rows,) if is_one else (num_rows, len(groups.groups))](
        slots,
        state.num_computed_tokens,
        state.last_tokens,
        inputs.input_ids,
        inputs.positions,
        inputs.seq_lens,
        inputs.query_start_loc,
        inputs.is_padding,
        inputs.request_slots,
        None if is_one else groups.layout,
        *of_the_one,
        num_rows,
        padding_slot,
        ROWS_TILE=_ROWS_TILE,
        TABLE_TILE=_TABLE_TILE,
    )


def begin_mixed_step(
    rows: MixedRows,
    state: StepState,
    inputs: StepInputs,  # written
    groups: StepGroups,  # written
    computed_tokens: torch.Tensor,  # [2, MR] int32  written
    sizes: tuple[int, int],
    padding_slot: int,
) -> None:
    """``rose_backend.kernels.decode_step.ops.begin_mixed_step`` on a GPU.

    Args:
        sizes: ``num_tokens`` and ``max_query_len``.
    """
    num_rows, drafts = len(rows.slots), state.draft_tokens
    num_tokens, max_query_len = sizes
    # With one more program for tokens of no row.
    grid = (num_rows + 1, max(triton.cdiv(max_query_len, _TOKENS_TILE), 1), len(groups.groups))
    _begin_mixed_kernel[grid](
        rows.slots,
        rows.query_start_loc,
        rows.is_prompt,
        state.num_computed_tokens,
        state.last_tokens,
        state.token_ids,
        state.token_ids.stride(0),
        drafts,
        0 if drafts is None else drafts.shape[1],
        inputs.input_ids,
        inputs.positions,
        inputs.seq_lens,
        inputs.query_start_loc,
        inputs.is_padding,
        inputs.request_slots,
        computed_tokens[0],
        computed_tokens[1],
        groups.layout,
        num_rows,
        num_tokens,
        padding_slot,
        TOKENS_TILE=_TOKENS_TILE,
        TABLE_TILE=_TABLE_TILE,
    )


def write_block_ids(
    writes: torch.Tensor,  # [2, N] int64
    groups: StepGroups,  # written
) -> None:
    """``rose_backend.kernels.decode_step.ops.write_block_ids`` on a GPU."""
    if len(groups.groups) == 1:
        table = groups.groups[0].state_table
        places, blocks = writes
        table.view(-1).scatter_(0, places, blocks.to(table.dtype))
        return
    num_writes = writes.shape[1]
    # Launched without entries, too: that compiles it before steps need it.
    grid = (max(triton.cdiv(num_writes, _WRITES_TILE), 1),)
    _write_kernel[grid](writes, groups.layout, len(groups.groups), num_writes, TILE=_WRITES_TILE)


def end_step(
    slots: torch.Tensor,  # [R] int64
    tokens: torch.Tensor,  # [R, N] int64
    state: StepState,  # written
    rows: MixedRows | None = None,
    num_sampled: torch.Tensor | None = None,  # [R] int32
) -> None:
    """``rose_backend.kernels.decode_step.ops.end_step`` on a GPU."""
    counts = state.output_counts
    if len(slots) == 0:
        return
    _end_kernel[(len(slots),)](
        slots,
        tokens,
        tokens.stride(0),
        num_sampled,
        state.num_computed_tokens,
        state.last_tokens,
        state.total_lens,
        state.token_ids,
        state.token_ids if counts is None else counts,
        None if rows is None else rows.query_start_loc,
        None if rows is None else rows.is_due,
        state.token_ids.stride(0),
        0 if counts is None else counts.stride(0),
        COUNTS=counts is not None,
        num_warps=1,
    )
