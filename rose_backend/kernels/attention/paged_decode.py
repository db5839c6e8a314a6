"""Decode attention in one launch: every row's context is split over programs, and the last to arrive combines them.

A program attends a few query heads of a row's new tokens, which share a KV head. Where each has one of its own, that is
done lane by lane, not on the matrix units. The program of a row's last split also stores the new tokens' keys and
values, which it takes from the projection.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import AttentionOptions, HeadRotation
from rose_backend.kernels.attention.decode_tile import (
    DecodeLoops,
    PageSizes,
    add_new_token,
    add_sinks,
    attend_cached,
    attend_tile,
    empty_state,
    head_columns,
    load_block_ids,
    load_new_tokens,
    load_tile,
    load_tiles_block_ids,
    store_tokens,
    sum_lanes,
    tile_places,
)
from rose_backend.kernels.attention.softmax import attention_strides, logit_factors
from rose_backend.kernels.attention.split_context import (
    CombineSizes,
    SplitSizes,
    combine_splits,
    find_split,
    query_offsets,
    record_size,
    split_scratch,
    store_output,
    store_record,
)
from rose_backend.kernels.kv.float8 import load_scale, scale_to_half, to_cache
from rose_backend.kernels.pointwise.rotary import inside_another_kernel, load_angles, load_head_norm, rotated
from rose_backend.kernels.tuning.attention_decode import (
    DecodeTuning,
    decode_tuning,
    heads_per_program,
    num_processors,
    rows_tile,
)

_COMBINE_TILE = 8
"""Partial results that are loaded at once."""
_COMBINE_ELEMENTS = 1024
"""Numbers that a warp loads at once, unless one query's are more."""


class DecodeWork(NamedTuple):
    """Which heads and tokens of a row a program attends."""

    SHARES: int
    """Programs of a row's split, over all heads."""
    SHARERS: int
    """Programs that read the same KV head."""
    KV_HEADS: int
    GROUP: int
    """Query heads of a program."""
    TOKENS: int
    """New tokens of a program."""
    MAX_QUERY_LEN: int
    QUERY_TILE: int
    NEW_TILE: int


@triton.jit(
    do_not_specialize=["num_rows", "extra", "window", "table_stride", "table_width"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "num_computed_ptr",
        "query_start_ptr",
        "order_ptr",
        "slopes_ptr",
        "sinks_ptr",
        "key_scale_ptr",
        "value_scale_ptr",
    ],
)
def _paged_decode_kernel(
    out_ptr,
    query_ptr,
    new_key_ptr,  # None where the tokens were stored before
    new_value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    num_computed_ptr,
    query_start_ptr,  # None with one token per row
    order_ptr,  # None where rows begin in their own order
    slopes_ptr,  # each None where the option is off
    sinks_ptr,
    key_scale_ptr,
    value_scale_ptr,
    rotation,  # RotationTensors, None where the heads are not rotated here
    scratch,  # records [slots, RECORD] float32, counters [slots] int32
    num_rows,
    extra,  # pieces of work per head beyond one per row
    window,
    factors,
    strides,  # AttentionStrides
    table_stride,
    table_width,
    WORK: tl.constexpr,  # DecodeWork
    SPLITS: tl.constexpr,  # SplitSizes
    COMBINE: tl.constexpr,  # CombineSizes
    LOOPS: tl.constexpr,  # DecodeLoops
    ROTATION: tl.constexpr,  # RotationSizes, None as above
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    PAGES: tl.constexpr,  # PageSizes
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    HAS_NEW: tl.constexpr = new_key_ptr is not None
    HAS_ALIBI: tl.constexpr = slopes_ptr is not None
    GROUP: tl.constexpr = WORK.GROUP
    TOKENS: tl.constexpr = WORK.TOKENS
    MAX_QUERY_LEN: tl.constexpr = WORK.MAX_QUERY_LEN
    QUERY_TILE: tl.constexpr = WORK.QUERY_TILE
    TILE: tl.constexpr = SPLITS.TILE
    USE_DOT: tl.constexpr = LOOPS.USE_DOT
    BY_ASSEMBLER: tl.constexpr = LOOPS.BY_ASSEMBLER
    OVERLAP: tl.constexpr = LOOPS.OVERLAP
    MASK_WINDOW: tl.constexpr = HAS_WINDOW and MAX_QUERY_LEN > 1
    # Tiles loaded before anything waits for the query; the block ids of one more are loaded, too.
    EARLY: tl.constexpr = LOOPS.EARLY_TILES
    if OVERLAP and LOOPS.EARLY_DEPENDENTS:
        tl.extra.cuda.gdc_launch_dependents()
    # Neighbouring programs read neighbouring heads of the same tokens. ``SHARERS`` programs read the same KV head:
    # each has ``GROUP`` of its query heads and ``TOKENS`` of the row's new tokens. Or a program has ``KV_HEADS`` heads
    # of the cache and the one query head of each.
    share = tl.program_id(0) % WORK.SHARES
    kv_head = (share // WORK.SHARERS * WORK.KV_HEADS).to(tl.int64)
    first_head = share // (MAX_QUERY_LEN // TOKENS) * GROUP
    own_token = share % (MAX_QUERY_LEN // TOKENS)
    work = tl.program_id(0) // WORK.SHARES
    tokens = tl.arange(0, TILE)
    own_row = work
    if order_ptr is not None:
        own_row = tl.load(order_ptr + work, mask=work < num_rows, other=0)
    # Most rows begin at their first token: that is read before the length is known, as far as the table goes.
    table_ptr = block_table_ptr + own_row.to(tl.int64) * table_stride
    table_end = tl.where(work < num_rows, table_width * PAGES.BLOCK_SIZE, 0)
    first = tile_places(work * 0, tokens, PAGES.IN_BLOCK)
    block_ids = load_tiles_block_ids(table_ptr, first, table_end, EARLY + 1, TILE, PAGES.BLOCK_SIZE)
    row, length, first_token, query_len, split, num_splits, slot, begin, end = find_split(
        num_computed_ptr, query_start_ptr, num_rows, window, work, own_row, extra, SPLITS,
        MAX_QUERY_LEN, HAS_NEW, HAS_WINDOW,
    )  # fmt: skip
    if (row >= num_rows) | (length < 0) | (own_token >= query_len):
        # What waits for this kernel waits for those in front of it, too, also if no row has anything to do.
        if OVERLAP and tl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()
        return
    first_token = first_token.to(tl.int64)
    table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
    is_last_split = split == num_splits - 1
    key_scale, value_scale = load_scale(key_scale_ptr), load_scale(value_scale_ptr)

    dims = tl.arange(0, HEAD_TILE)
    is_dim = dims < HEAD_SIZE
    columns = head_columns(strides.key[2], strides.value[2], WORK.KV_HEADS, HEAD_TILE, HEAD_SIZE)
    # Queries: ``GROUP`` heads of the first token, then of the next.
    queries = tl.arange(0, QUERY_TILE)
    num_queries = GROUP if TOKENS == 1 else GROUP * query_len
    is_query = queries < num_queries
    heads = first_head + (queries if TOKENS == 1 else queries % GROUP)
    query_mask = is_query[:, None] & is_dim[None, :]
    cache = (
        key_cache_ptr + kv_head * strides.key[2], value_cache_ptr + kv_head * strides.value[2], table_ptr,
        strides.key[0], strides.key[1], strides.value[0], strides.value[1],
    )  # fmt: skip
    places = tile_places(begin, tokens, PAGES.IN_BLOCK)
    if begin > 0:
        block_ids = load_tiles_block_ids(table_ptr, places, end, EARLY + 1, TILE, PAGES.BLOCK_SIZE)
    early = ()
    for nth in tl.static_range(EARLY):
        early += load_tile(cache, columns, block_ids[nth], places + nth * TILE, tokens, end, PAGES)
    if HAS_NEW:
        new_tokens = tl.arange(0, WORK.NEW_TILE)
        new_heads = (new_tokens * 0).to(tl.int64)
        if WORK.KV_HEADS > 1:
            new_heads, new_tokens = new_tokens.to(tl.int64), new_tokens * 0
        is_new = new_tokens < query_len
        new_block_ids = load_block_ids(table_ptr, length + new_tokens, length + query_len, PAGES.BLOCK_SIZE)
    if ROTATION is not None:
        tl.static_assert(HAS_NEW and MAX_QUERY_LEN == 1, "all heads have the new token's position")
        angles = load_angles(rotation, length, HEAD_TILE, ROTATION)
        query_norm = load_head_norm(rotation.query_norm, angles, HEAD_SIZE, ROTATION.NORM)
        key_norm = load_head_norm(rotation.key_norm, angles, HEAD_SIZE, ROTATION.NORM)
    if OVERLAP:
        # Until here nothing was read that the kernel in front makes, and nothing was written.
        tl.extra.cuda.gdc_wait()
    query_ptr += (first_token + own_token) * strides.query[0] + first_head * strides.query[1]
    query_rows = query_ptr + query_offsets(queries, strides.query, GROUP, TOKENS)
    query = tl.load(query_rows[:, None] + dims[None, :], mask=query_mask, other=0.0)
    if ROTATION is not None:
        query = rotated(
            query, query_rows, query_mask, angles, query_norm, rotation.eps, HEAD_SIZE, ROTATION.NORM
        )
    slopes = tl.zeros([QUERY_TILE], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads, mask=is_query, other=0.0).to(tl.float32)
    query_positions = length + own_token if TOKENS == 1 else (length + queries // GROUP)[:, None]
    query_limits = (query_positions, slopes[:, None] if USE_DOT else slopes[None, :], window)
    product_factor = factors[0] * key_scale
    logit_factor = factors[1]
    factors = (product_factor, logit_factor)
    tile_factors = factors
    if USE_DOT and tl.float8e4nv == key_cache_ptr.dtype.element_ty and query.dtype == tl.bfloat16:
        # Float8 becomes float16 in one instruction, bfloat16 in several.
        query, query_factors = scale_to_half(query)
        factors = (product_factor * query_factors, logit_factor)
        tile_factors = ((product_factor * query_factors)[:, None], logit_factor)
    if HAS_NEW:
        new_mask = is_new[:, None] & is_dim[None, :]
        new_key, new_value = load_new_tokens(
            new_key_ptr, new_value_ptr, strides, first_token + new_tokens, kv_head + new_heads, new_mask
        )  # fmt: skip
        if ROTATION is not None:
            key_rows = (
                new_key_ptr + first_token * strides.new_key[0] + (kv_head + new_heads) * strides.new_key[1]
            )
            new_key = rotated(
                new_key, key_rows, new_mask, angles, key_norm, rotation.eps, HEAD_SIZE, ROTATION.NORM
            )
        new_key = to_cache(new_key, key_scale, key_cache_ptr.dtype.element_ty)
        new_value = to_cache(new_value, value_scale, value_cache_ptr.dtype.element_ty)

    state = empty_state(QUERY_TILE, HEAD_TILE, TILE, USE_DOT)
    if HAS_NEW and MAX_QUERY_LEN > 1:
        state = attend_tile(
            state, query, new_key, new_value, length + new_tokens, is_new & is_last_split, query_limits, tile_factors,
            True, MASK_WINDOW, HAS_CAP, HAS_ALIBI, USE_DOT, BY_ASSEMBLER,
        )  # fmt: skip
    # A row's own new tokens are among the cached ones when they were stored before.
    state = attend_cached(
        state, query, early, cache, columns, block_ids[EARLY], begin, end, query_limits, tile_factors,
        TILE, PAGES, LOOPS.STAGES, MAX_QUERY_LEN > 1 and not HAS_NEW, MASK_WINDOW, HAS_CAP, HAS_ALIBI,
        USE_DOT, BY_ASSEMBLER,
    )  # fmt: skip
    if OVERLAP and not LOOPS.EARLY_DEPENDENTS:
        tl.extra.cuda.gdc_launch_dependents()
    # Only now: nothing in front had to wait for the new tokens.
    if HAS_NEW and is_last_split & (share % WORK.SHARERS == 0):
        store_tokens(
            cache, new_key, new_value, new_block_ids, length + new_tokens, strides, new_heads, new_mask,
            PAGES.BLOCK_SIZE,
        )  # fmt: skip
    if not USE_DOT:
        state = sum_lanes(state, HEAD_TILE)
    if HAS_NEW and MAX_QUERY_LEN == 1:
        state = add_new_token(
            state, query, new_key, new_value, slopes, factors, is_last_split, HAS_CAP, HAS_ALIBI
        )
    if sinks_ptr is not None:
        state = add_sinks(state, sinks_ptr, heads, is_query, is_last_split)

    out_ptr += (first_token + own_token) * strides.out[0] + first_head * strides.out[1]
    if num_splits == 1:
        store_output(
            out_ptr, strides.out, state[1], state[2], value_scale, queries, query_mask, GROUP, TOKENS
        )
        return
    slot += share * (2 * extra)
    records_ptr = scratch[0] + slot.to(tl.int64) * COMBINE.RECORD
    record_ptr = records_ptr + split * COMBINE.RECORD
    store_record(record_ptr, state, queries, (is_query, query_mask), GROUP * TOKENS, HEAD_SIZE)
    combine_splits(
        out_ptr, strides.out, records_ptr, scratch[1] + slot, split, num_splits, num_queries, value_scale,
        GROUP, TOKENS, HEAD_SIZE, HEAD_TILE, COMBINE,
    )  # fmt: skip


def paged_decode(
    query: torch.Tensor,  # [T, HQ, D]
    new_key: torch.Tensor | None,  # [T, HKV, D]
    new_value: torch.Tensor | None,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    block_table: torch.Tensor,  # [R, MB] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    *,
    options: AttentionOptions,
    out: torch.Tensor,  # [T, HQ, D]  written
    query_start_loc: torch.Tensor | None = None,  # [R + 1] int32
    max_query_len: int = 1,
    order: torch.Tensor | None = None,  # [R] int32, each row once
    overlap: bool = False,
    rotation: HeadRotation | None = None,
    tuning: DecodeTuning | None = None,
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.paged_decode``; with ``overlap`` the device has to be able to."""
    num_query_heads, head_size = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_rows = num_computed_tokens.shape[0]
    if num_rows == 0 or query.shape[0] == 0:
        return out
    head_tile = max(triton.next_power_of_2(head_size), 16)
    tokens, group = max_query_len, num_query_heads // num_kv_heads
    group = heads_per_program(group, tokens, head_tile)
    if tuning is None:
        tuning = decode_tuning(
            head_size,
            query.dtype,
            num_processors(query.device),
            cache_dtype=key_cache.dtype,
            num_rows=num_rows,
            num_queries=group * tokens,
            num_kv_heads=num_kv_heads,
            norms_heads=rotation is not None and rotation.query_norm is not None,
        )
    if not tuning.use_dot:
        # Each query has programs of its own; those that share a KV head find it in the L2 cache.
        tokens = group = 1
    if not tuning.use_dot and max_query_len == 1 and num_query_heads == num_kv_heads:
        group = math.gcd(num_kv_heads, tuning.kv_heads)
    kv_heads = 1 if tuning.use_dot else group
    shares = num_query_heads // group * (max_query_len // tokens)
    sharers = max(shares // num_kv_heads, 1)
    # Where there is room for more programs than rows, none has to wait for another.
    places = max(tuning.num_programs // shares, 1)
    extra = max(places - triton.next_power_of_2(num_rows), places // 2, 1)
    record = record_size(group * tokens, head_size)
    query_tile = triton.next_power_of_2(group * tokens)
    padded_tile = max(query_tile, 16) if tuning.use_dot else query_tile
    new_tile = kv_heads if max_query_len == 1 else 16 if tuning.use_dot else tuning.tile
    rotation_tensors, rotation_sizes = (None, None) if rotation is None else inside_another_kernel(rotation)
    in_block = options.sliding_window is None and block_size % tuning.tile == 0
    combined_queries = _COMBINE_ELEMENTS * tuning.num_warps // (_COMBINE_TILE * head_tile)
    _paged_decode_kernel[(shares * (num_rows + extra),)](
        out,
        query,
        new_key,
        new_value,
        key_cache,
        value_cache,
        block_table,
        num_computed_tokens,
        query_start_loc,
        order,
        options.alibi_slopes,
        options.sinks,
        options.key_scale,
        options.value_scale,
        rotation_tensors,
        split_scratch(query.device, shares * 2 * places, record),
        num_rows,
        extra,
        options.sliding_window or 0,
        logit_factors(options.scale, options.logits_soft_cap),
        attention_strides(out, query, new_key, new_value, key_cache, value_cache),
        block_table.stride(0),
        block_table.shape[1],
        WORK=DecodeWork(shares, sharers, kv_heads, group, tokens, max_query_len, padded_tile, new_tile),
        SPLITS=SplitSizes(
            1 if num_rows == 1 else rows_tile(num_rows), tuning.max_whole, tuning.min_split, tuning.tile
        ),
        COMBINE=CombineSizes(record, tuning.fan_in, max(min(query_tile, combined_queries), 1), _COMBINE_TILE),
        LOOPS=DecodeLoops(
            tuning.num_stages,
            tuning.use_dot,
            not triton.knobs.runtime.interpret,
            overlap,
            tuning.early_dependents,
            tuning.early_tiles if tuning.use_dot else tuning.num_stages,
        ),
        ROTATION=rotation_sizes,
        HEAD_SIZE=head_size,
        HEAD_TILE=head_tile,
        PAGES=PageSizes(
            block_size,
            # Without a window rows begin with their first token, and their splits with a tile.
            in_block,
            in_block and key_cache.stride() == value_cache.stride(),
        ),
        HAS_WINDOW=options.sliding_window is not None,
        HAS_CAP=options.logits_soft_cap is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        launch_pdl=overlap,
    )
    return out
