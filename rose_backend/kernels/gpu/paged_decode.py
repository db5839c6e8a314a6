"""Decode attention in one launch: every row's context is split over programs, and the last to arrive combines them.

The program of a row's last split also stores the new token's keys and values, which it takes from the projection.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu.softmax import HIDDEN, NO_LOGIT, cached_offsets, logit_factors, to_logits
from rose_backend.kernels.gpu.split_context import combine_splits, find_split, record_size, split_scratch

_COMBINE_ELEMENTS = 1024
"""Numbers of partial results that each warp of the last program loads at once."""


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """What decides speed only."""

    tile: int
    """Cached tokens per iteration, a power of two."""
    min_split: int
    """Tokens below which a row is not split further."""
    num_programs: int
    """Pieces of work wanted over all heads, beyond one per row and head."""
    use_dot: bool
    """Multiply on the matrix units, which needs a 16-bit type to be exact; otherwise lane by lane."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Per thread. The assembler's own choice may be a few too few."""


@triton.jit
def _attend_with_dot(
    state,
    query,
    key,
    value,
    is_token,
    distance,
    slopes,
    factors,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Add one tile of keys and values to ``state``: maximum, sum of weights, weighted values, of each query head."""
    top, total, attended = state
    products = tl.dot(query, tl.trans(key))
    logits = to_logits(products, distance[None, :], slopes[:, None], factors, HAS_CAP, HAS_ALIBI)
    logits = tl.where(is_token[None, :], logits, HIDDEN)
    new_top = tl.maximum(top, tl.max(logits, 1))
    weights = tl.exp2(logits - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    attended = tl.dot(weights.to(value.dtype), value, attended * shrink[:, None])
    return new_top, total, attended


@triton.jit
def _attend_by_lanes(
    state,
    query,
    key,
    value,
    is_token,
    distance,
    slopes,
    factors,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """As above for one query head, but ``state`` is of each token of a tile: nothing is reduced over tokens here."""
    top, total, attended = state
    products = tl.sum(tl.sum(query.to(tl.float32), 0)[None, :] * key.to(tl.float32), 1)
    logits = to_logits(products, distance, tl.sum(slopes), factors, HAS_CAP, HAS_ALIBI)
    logits = tl.where(is_token, logits, HIDDEN)
    new_top = tl.maximum(top, logits)
    weights = tl.exp2(logits - new_top)
    shrink = tl.exp2(top - new_top)
    total = total * shrink + weights
    attended = attended * shrink[:, None] + weights[:, None] * value.to(tl.float32)
    return new_top, total, attended


@triton.jit(
    do_not_specialize=["num_rows", "window", "table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "num_computed_ptr", "slopes_ptr"],
)
def _paged_decode_kernel(
    out_ptr,
    query_ptr,
    new_key_ptr,
    new_value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    num_computed_ptr,
    slopes_ptr,
    partial_ptr,  # [slots, RECORD] float32
    arrived_ptr,  # [slots] int32
    num_rows,
    window,
    product_factor,
    logit_factor,
    out_row_stride,
    out_head_stride,
    query_row_stride,
    query_head_stride,
    new_key_row_stride,
    new_key_head_stride,
    new_value_row_stride,
    new_value_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    SHARERS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    EXTRA: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    RECORD: tl.constexpr,
    RECORD_TILE: tl.constexpr,
    COMBINE_TILE: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    USE_DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Neighbouring programs read neighbouring heads of the same tokens. ``SHARERS`` programs read the same KV head.
    head = tl.program_id(0) % NUM_HEADS
    kv_head = (head // SHARERS).to(tl.int64)
    row, length, split, num_splits, slot, begin, end = find_split(
        num_computed_ptr, num_rows, window, tl.program_id(0) // NUM_HEADS,
        ROWS_TILE, EXTRA, MIN_SPLIT, TILE, HAS_NEW, HAS_WINDOW,
    )  # fmt: skip
    if row >= num_rows:
        return
    row64 = row.to(tl.int64)
    table_ptr = block_table_ptr + row64 * table_stride
    key_ptr = key_cache_ptr + kv_head * key_head_stride
    value_ptr = value_cache_ptr + kv_head * value_head_stride
    is_last_split = split == num_splits - 1

    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_TILE)
    is_dim = dims < HEAD_SIZE
    group = tl.arange(0, GROUP_TILE)
    is_head = group < GROUP
    heads = head * GROUP + group
    head_mask = is_head[:, None] & is_dim[None, :]
    block_ids = tl.load(table_ptr + (begin + tokens) // BLOCK_SIZE, mask=begin + tokens < end, other=0)
    query_offsets = row64 * query_row_stride + heads * query_head_stride
    query = tl.load((query_ptr + query_offsets)[:, None] + dims[None, :], mask=head_mask, other=0.0)
    slopes = tl.zeros([GROUP_TILE], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads, mask=is_head, other=0.0).to(tl.float32)
    factors = (product_factor, logit_factor)
    if HAS_NEW:
        new_key_ptr += row64 * new_key_row_stride + kv_head * new_key_head_stride
        new_value_ptr += row64 * new_value_row_stride + kv_head * new_value_head_stride
        new_key = tl.load(new_key_ptr + dims, mask=is_dim, other=0.0)
        new_value = tl.load(new_value_ptr + dims, mask=is_dim, other=0.0)
        if is_last_split & (head % SHARERS == 0):
            block_id = tl.load(table_ptr + length // BLOCK_SIZE)
            key_slot = cached_offsets(block_id, length, key_block_stride, key_token_stride, BLOCK_SIZE)
            value_slot = cached_offsets(block_id, length, value_block_stride, value_token_stride, BLOCK_SIZE)
            tl.store(key_ptr + key_slot + dims, new_key, mask=is_dim)
            tl.store(value_ptr + value_slot + dims, new_value, mask=is_dim)

    STATES: tl.constexpr = GROUP_TILE if USE_DOT else TILE
    top = tl.full([STATES], NO_LOGIT, tl.float32)
    total = tl.zeros([STATES], tl.float32)
    attended = tl.zeros([STATES, HEAD_TILE], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        positions = start + tokens
        is_token = positions < end
        mask = is_token[:, None] & is_dim[None, :]
        key_offsets = cached_offsets(block_ids, positions, key_block_stride, key_token_stride, BLOCK_SIZE)
        key = tl.load((key_ptr + key_offsets)[:, None] + dims[None, :], mask=mask, other=0.0)
        value_offsets = cached_offsets(
            block_ids, positions, value_block_stride, value_token_stride, BLOCK_SIZE
        )
        value = tl.load((value_ptr + value_offsets)[:, None] + dims[None, :], mask=mask, other=0.0)
        following = positions + TILE
        block_ids = tl.load(table_ptr + following // BLOCK_SIZE, mask=following < end, other=0)
        distance = (positions - length).to(tl.float32)
        state = (top, total, attended)
        if USE_DOT:
            top, total, attended = _attend_with_dot(
                state, query, key, value, is_token, distance, slopes, factors, HAS_CAP, HAS_ALIBI
            )
        else:
            top, total, attended = _attend_by_lanes(
                state, query, key, value, is_token, distance, slopes, factors, HAS_CAP, HAS_ALIBI
            )
    if not USE_DOT:
        lane_weights = tl.exp2(top - tl.max(top))
        attended = tl.sum(attended * lane_weights[:, None], 0)[None, :]
        total = tl.zeros([GROUP_TILE], tl.float32) + tl.sum(total * lane_weights)
        top = tl.zeros([GROUP_TILE], tl.float32) + tl.max(top)

    if HAS_NEW:
        products = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], 1)
        logits = to_logits(products, 0.0, slopes, factors, HAS_CAP, HAS_ALIBI)
        logits = tl.where(is_last_split, logits, HIDDEN)
        new_top = tl.maximum(top, logits)
        weights = tl.exp2(logits - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + weights
        attended = attended * shrink[:, None] + weights[:, None] * new_value.to(tl.float32)[None, :]
        top = new_top

    out_ptr += row64 * out_row_stride + head * GROUP * out_head_stride
    if num_splits == 1:
        attended = attended / total[:, None]
        out_rows = (out_ptr + group * out_head_stride)[:, None]
        tl.store(out_rows + dims[None, :], attended.to(out_ptr.dtype.element_ty), mask=head_mask)
        return
    slot += head * (2 * EXTRA)
    partial_ptr += slot.to(tl.int64) * RECORD
    record_ptr = partial_ptr + split * RECORD
    tl.store((record_ptr + group * HEAD_SIZE)[:, None] + dims[None, :], attended, mask=head_mask)
    tl.store(record_ptr + GROUP * HEAD_SIZE + group, top, mask=is_head)
    tl.store(record_ptr + GROUP * (HEAD_SIZE + 1) + group, total, mask=is_head)
    # Every thread's part of the record comes before the one thread that counts the program in.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + slot, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
        tl.store(arrived_ptr + slot, 0)
        combine_splits(
            out_ptr, out_head_stride, partial_ptr, num_splits,
            GROUP, RECORD_TILE, HEAD_SIZE, HEAD_TILE, RECORD, COMBINE_TILE,
        )  # fmt: skip


def paged_decode(
    query: torch.Tensor,  # [R, HQ, D]
    new_key: torch.Tensor | None,  # [R, HKV, D]
    new_value: torch.Tensor | None,  # [R, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    block_table: torch.Tensor,  # [R, MB] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    *,
    scale: float,
    out: torch.Tensor,  # [R, HQ, D]  written
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,  # [HQ]
    logits_soft_cap: float | None = None,
    tuning: DecodeTuning | None = None,
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.paged_decode``."""
    num_rows, num_query_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    if num_rows == 0:
        return out
    tuning = tuning or decode_tuning(head_size, query.dtype, _num_processors(query.device))
    # Lane by lane, each query head has programs of its own; those that share a KV head find it in the L2 cache.
    group = num_query_heads // num_kv_heads if tuning.use_dot else 1
    num_heads = num_query_heads // group
    extra = max(tuning.num_programs // num_heads, 1)
    record = record_size(group, head_size)
    head_tile = max(triton.next_power_of_2(head_size), 16)
    group_tile = triton.next_power_of_2(group)
    partial, arrived = split_scratch(query.device, num_heads * 2 * extra, record)
    stored_key = query if new_key is None else new_key
    stored_value = query if new_value is None else new_value
    _paged_decode_kernel[(num_heads * (num_rows + extra),)](
        out,
        query,
        stored_key,
        stored_value,
        key_cache,
        value_cache,
        block_table,
        num_computed_tokens,
        query if alibi_slopes is None else alibi_slopes,
        partial,
        arrived,
        num_rows,
        sliding_window or 0,
        *logit_factors(scale, logits_soft_cap),
        *out.stride()[:2],
        *query.stride()[:2],
        *stored_key.stride()[:2],
        *stored_value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        NUM_HEADS=num_heads,
        SHARERS=num_heads // num_kv_heads,
        GROUP=group,
        GROUP_TILE=max(group_tile, 16) if tuning.use_dot else 1,
        HEAD_SIZE=head_size,
        HEAD_TILE=head_tile,
        BLOCK_SIZE=block_size,
        ROWS_TILE=triton.next_power_of_2(num_rows),
        EXTRA=extra,
        MIN_SPLIT=tuning.min_split,
        TILE=tuning.tile,
        RECORD=record,
        RECORD_TILE=group_tile,
        COMBINE_TILE=max(_COMBINE_ELEMENTS * tuning.num_warps // (group_tile * head_tile), 1),
        HAS_NEW=new_key is not None,
        HAS_WINDOW=sliding_window is not None,
        HAS_CAP=logits_soft_cap is not None,
        HAS_ALIBI=alibi_slopes is not None,
        USE_DOT=tuning.use_dot,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
    )
    return out


def decode_tuning(head_size: int, dtype: torch.dtype, num_processors: int) -> DecodeTuning:
    """Return what was fastest on an H200 for this shape."""
    head_tile = max(triton.next_power_of_2(head_size), 16)
    if dtype.itemsize == 4:
        return DecodeTuning(
            tile=max(2048 // head_tile, 16),
            min_split=64,
            num_programs=4 * num_processors,
            use_dot=False,
            num_warps=4,
            num_stages=1,
        )
    if head_tile <= 64:
        return DecodeTuning(
            tile=64, min_split=128, num_programs=4 * num_processors, use_dot=True, num_warps=2, num_stages=3
        )
    return DecodeTuning(
        tile=4096 // head_tile,
        min_split=128,
        num_programs=3 * num_processors,
        use_dot=True,
        num_warps=4,
        num_stages=4,
        max_registers=128 if head_tile == 128 else None,
    )


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
