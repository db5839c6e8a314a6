"""The two ends of a decode step whose requests live in slots: one program per row, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.decode_state import DecodeInputs, DecodeState

_TABLE_TILE = 1024
_ROWS_TILE = 128


# What differs by rows makes no variant: there is a graph of each of dozens of sizes.
@triton.jit(do_not_specialize=["num_rows", "padding_slot"])
def _begin_kernel(
    slots_ptr,  # [R] int64
    state_computed_ptr,  # [MR] int32
    last_tokens_ptr,  # [MR] int64
    state_table_ptr,  # [MR, MB] int32
    input_ids_ptr,  # [T] int32  written
    positions_ptr,  # [T] int64  written
    seq_lens_ptr,  # [T] int32  written
    computed_ptr,  # [T] int32  written
    query_start_ptr,  # [T + 1] int32  written
    is_padding_ptr,  # [T] bool  written
    table_ptr,  # [T, MB] int32  written
    slot_mapping_ptr,  # [T] int64  written
    request_slots_ptr,  # [T] int32  written
    num_rows,
    width,  # MB
    state_table_stride,
    table_stride,
    block_size,
    padding_slot,
    ROWS_TILE: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):
    row = tl.program_id(0)
    far_row = row.to(tl.int64)
    slot = tl.load(slots_ptr + row)
    is_real = slot >= 0
    known = tl.maximum(slot, 0)
    # Without a request, slot 0 is read and not used.
    computed = tl.where(is_real, tl.load(state_computed_ptr + known), -1)
    token = tl.where(is_real, tl.load(last_tokens_ptr + known), 0)
    position = tl.maximum(computed, 0)
    column = position // block_size
    source = state_table_ptr + known * state_table_stride
    block = tl.load(source + column).to(tl.int64)
    kv_slot = tl.where(is_real, block * block_size + position % block_size, -1)
    # Rows with a request come first, so only those behind them count.
    num_before = row + 1
    if slot < 0:
        num_before = 0
        for start in range(0, num_rows, ROWS_TILE):
            rows = start + tl.arange(0, ROWS_TILE)
            others = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
            num_before += tl.sum((others >= 0).to(tl.int32))

    tl.store(input_ids_ptr + row, token.to(tl.int32))
    tl.store(positions_ptr + row, position.to(tl.int64))
    tl.store(seq_lens_ptr + row, computed + 1)
    tl.store(computed_ptr + row, computed)
    tl.store(query_start_ptr + row + 1, num_before)
    tl.store(is_padding_ptr + row, slot < 0)
    tl.store(slot_mapping_ptr + row, kv_slot)
    tl.store(request_slots_ptr + row, tl.where(is_real, slot, padding_slot).to(tl.int32))
    num_columns = tl.where(is_real, column + 1, width)
    destination = table_ptr + far_row * table_stride
    for start in range(0, num_columns, TABLE_TILE):
        columns = start + tl.arange(0, TABLE_TILE)
        is_copied = columns < num_columns
        blocks = tl.load(source + columns, mask=is_copied, other=0)
        tl.store(destination + columns, tl.where(is_real, blocks, 0), mask=is_copied)


@triton.jit
def _end_kernel(
    slots_ptr,  # [R] int64
    tokens_ptr,  # [R] int64
    computed_ptr,  # [MR] int32  written
    last_tokens_ptr,  # [MR] int64  written
    total_lens_ptr,  # [MR] int32  written
    token_ids_ptr,  # [MR, S] int32  written
    counts_ptr,  # [MR, V] int32  written, with COUNTS
    token_ids_stride,
    counts_stride,
    COUNTS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        token = tl.load(tokens_ptr + row)
        total = tl.load(total_lens_ptr + slot)
        computed = tl.load(computed_ptr + slot)
        tl.store(last_tokens_ptr + slot, token)
        tl.store(token_ids_ptr + slot * token_ids_stride + total, token.to(tl.int32))
        tl.store(total_lens_ptr + slot, total + 1)
        tl.store(computed_ptr + slot, computed + 1)
        if COUNTS:
            count_ptr = counts_ptr + slot * counts_stride + token
            tl.store(count_ptr, tl.load(count_ptr) + 1)


def begin_steady_decode(
    slots: torch.Tensor,  # [R] int64
    state: DecodeState,
    inputs: DecodeInputs,  # written
    block_size: int,
    padding_slot: int,
) -> None:
    """Twin of ``rose_backend.kernels.steady_decode.begin_steady_decode``."""
    num_rows = len(slots)
    if num_rows == 0:
        return
    _begin_kernel[(num_rows,)](
        slots,
        state.num_computed_tokens,
        state.last_tokens,
        state.block_table,
        inputs.input_ids,
        inputs.positions,
        inputs.seq_lens,
        inputs.num_computed_tokens,
        inputs.query_start_loc,
        inputs.is_padding,
        inputs.block_table,
        inputs.slot_mapping,
        inputs.request_slots,
        num_rows,
        inputs.block_table.shape[1],
        state.block_table.stride(0),
        inputs.block_table.stride(0),
        block_size,
        padding_slot,
        ROWS_TILE=_ROWS_TILE,
        TABLE_TILE=_TABLE_TILE,
    )


def end_steady_decode(
    slots: torch.Tensor,  # [R] int64
    tokens: torch.Tensor,  # [R] int64
    state: DecodeState,  # written
) -> None:
    """Twin of ``rose_backend.kernels.steady_decode.end_steady_decode``."""
    counts = state.output_counts
    if len(slots) == 0:
        return
    _end_kernel[(len(slots),)](
        slots,
        tokens,
        state.num_computed_tokens,
        state.last_tokens,
        state.total_lens,
        state.token_ids,
        state.token_ids if counts is None else counts,
        state.token_ids.stride(0),
        0 if counts is None else counts.stride(0),
        COUNTS=counts is not None,
        num_warps=1,
    )
