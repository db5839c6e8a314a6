"""Decode attention in one launch: every row's context is split over programs, and the last to arrive combines them.

A program attends a few query heads of a row's new tokens, which share a KV head. Where each has one of its own, that is
done lane by lane, not on the matrix units. The program of a row's last split also stores the new tokens' keys and
values, which it takes from the projection.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu.decode_tile import (
    add_logit,
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
)
from rose_backend.kernels.gpu.decode_tuning import (
    DecodeTuning,
    decode_tuning,
    heads_per_program,
    num_processors,
)
from rose_backend.kernels.gpu.float8 import load_scale, scale_to_half, to_cache
from rose_backend.kernels.gpu.softmax import HIDDEN, LOG2_E, logit_factors, to_logits
from rose_backend.kernels.gpu.split_context import (
    combine_splits,
    find_split,
    query_offsets,
    record_size,
    split_scratch,
    store_output,
    store_record,
)

_COMBINE_TILE = 8
"""Partial results that are loaded at once."""
_COMBINE_ELEMENTS = 1024
"""Numbers that a warp loads at once, unless one query's are more."""


@triton.jit(
    do_not_specialize=["num_rows", "window", "table_stride", "table_width"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "num_computed_ptr",
        "query_start_ptr",
        "slopes_ptr",
        "sinks_ptr",
        "key_scale_ptr",
        "value_scale_ptr",
    ],
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
    query_start_ptr,
    slopes_ptr,
    sinks_ptr,
    key_scale_ptr,
    value_scale_ptr,
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
    table_width,
    SHARES: tl.constexpr,
    SHARERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    MAX_QUERY_LEN: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    EXTRA: tl.constexpr,
    MAX_WHOLE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    NEW_TILE: tl.constexpr,
    RECORD: tl.constexpr,
    FAN_IN: tl.constexpr,
    COMBINE_QUERIES: tl.constexpr,
    COMBINE_TILE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_KEY_SCALE: tl.constexpr,
    HAS_VALUE_SCALE: tl.constexpr,
    USE_DOT: tl.constexpr,
    BY_ASSEMBLER: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY_DEPENDENTS: tl.constexpr,
):
    if OVERLAP and EARLY_DEPENDENTS:
        tl.extra.cuda.gdc_launch_dependents()
    # Neighbouring programs read neighbouring heads of the same tokens. ``SHARERS`` programs read the same KV head:
    # each has ``GROUP`` of its query heads and ``TOKENS`` of the row's new tokens. Or a program has ``KV_HEADS`` heads
    # of the cache and the one query head of each.
    share = tl.program_id(0) % SHARES
    kv_head = (share // SHARERS * KV_HEADS).to(tl.int64)
    first_head = share // (MAX_QUERY_LEN // TOKENS) * GROUP
    own_token = share % (MAX_QUERY_LEN // TOKENS)
    work = tl.program_id(0) // SHARES
    tokens = tl.arange(0, TILE)
    # As many tiles are on their way before anything waits for the query, and the blocks of one more are known.
    EARLY: tl.constexpr = 0 if USE_DOT else STAGES
    # Most rows begin at their first token: that is read before the length is known, as far as the table goes.
    table_ptr = block_table_ptr + work.to(tl.int64) * table_stride
    table_end = tl.where(work < num_rows, table_width * BLOCK_SIZE, 0)
    block_ids = load_tiles_block_ids(table_ptr, tokens, table_end, EARLY + 1, BLOCK_SIZE)
    row, length, first_token, query_len, split, num_splits, slot, begin, end = find_split(
        num_computed_ptr, query_start_ptr, num_rows, window, work,
        ROWS_TILE, EXTRA, MAX_WHOLE, MIN_SPLIT, TILE, MAX_QUERY_LEN, HAS_STARTS, HAS_NEW, HAS_WINDOW,
    )  # fmt: skip
    if (row >= num_rows) | (length < 0) | (own_token >= query_len):
        # Who waits for this kernel waits for those in front of it, too, also if no row has anything to do.
        if OVERLAP and tl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()
        return
    first_token = first_token.to(tl.int64)
    table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
    key_ptr = key_cache_ptr + kv_head * key_head_stride
    value_ptr = value_cache_ptr + kv_head * value_head_stride
    is_last_split = split == num_splits - 1
    key_scale = load_scale(key_scale_ptr, HAS_KEY_SCALE)
    value_scale = load_scale(value_scale_ptr, HAS_VALUE_SCALE)

    dims = tl.arange(0, HEAD_TILE)
    is_dim = dims < HEAD_SIZE
    columns = head_columns(key_head_stride, value_head_stride, KV_HEADS, HEAD_TILE, HEAD_SIZE)
    # Queries: ``GROUP`` heads of the first token, then of the next.
    queries = tl.arange(0, QUERY_TILE)
    num_queries = GROUP if TOKENS == 1 else GROUP * query_len
    is_query = queries < num_queries
    heads = first_head + (queries if TOKENS == 1 else queries % GROUP)
    query_mask = is_query[:, None] & is_dim[None, :]
    cache = (
        key_ptr, value_ptr, table_ptr, key_block_stride, key_token_stride, value_block_stride, value_token_stride
    )  # fmt: skip
    if begin > 0:
        block_ids = load_tiles_block_ids(table_ptr, begin + tokens, end, EARLY + 1, BLOCK_SIZE)
    early = ()
    for nth in tl.static_range(EARLY):
        early += load_tile(cache, columns, block_ids[nth], begin + nth * TILE + tokens, end, BLOCK_SIZE)
    if HAS_NEW:
        new_tokens = tl.arange(0, NEW_TILE)
        new_heads = (new_tokens * 0).to(tl.int64)
        if KV_HEADS > 1:
            new_heads, new_tokens = new_tokens.to(tl.int64), new_tokens * 0
        is_new = new_tokens < query_len
        new_block_ids = load_block_ids(table_ptr, length + new_tokens, length + query_len, BLOCK_SIZE)
    if OVERLAP:
        # Until here nothing was read that the kernel in front makes, and nothing was written.
        tl.extra.cuda.gdc_wait()
    query_ptr += (first_token + own_token) * query_row_stride + first_head * query_head_stride
    query_rows = query_ptr + query_offsets(queries, query_row_stride, query_head_stride, GROUP, TOKENS)
    query = tl.load(query_rows[:, None] + dims[None, :], mask=query_mask, other=0.0)
    slopes = tl.zeros([QUERY_TILE], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads, mask=is_query, other=0.0).to(tl.float32)
    query_positions = length + own_token if TOKENS == 1 else (length + queries // GROUP)[:, None]
    query_limits = (query_positions, slopes[:, None] if USE_DOT else slopes[None, :], window)
    product_factor *= key_scale
    factors = (product_factor, logit_factor)
    tile_factors = factors
    if USE_DOT and tl.float8e4nv == key_cache_ptr.dtype.element_ty and query.dtype == tl.bfloat16:
        # Float8 becomes float16 in one instruction, bfloat16 in several.
        query, query_factors = scale_to_half(query)
        factors = (product_factor * query_factors, logit_factor)
        tile_factors = ((product_factor * query_factors)[:, None], logit_factor)
    MASK_WINDOW: tl.constexpr = HAS_WINDOW and MAX_QUERY_LEN > 1
    if HAS_NEW:
        new_mask = is_new[:, None] & is_dim[None, :]
        new_key, new_value = load_new_tokens(
            (new_key_ptr, new_key_row_stride, new_key_head_stride),
            (new_value_ptr, new_value_row_stride, new_value_head_stride),
            first_token + new_tokens, kv_head + new_heads, new_mask,
        )  # fmt: skip
        new_key = to_cache(new_key, key_scale, key_cache_ptr.dtype.element_ty)
        new_value = to_cache(new_value, value_scale, value_cache_ptr.dtype.element_ty)

    top, total, attended = empty_state(QUERY_TILE, HEAD_TILE, TILE, USE_DOT)
    if HAS_NEW and MAX_QUERY_LEN > 1:
        top, total, attended = attend_tile(
            (top, total, attended), query, new_key, new_value, length + new_tokens, is_new & is_last_split,
            query_limits, tile_factors, True, MASK_WINDOW, HAS_CAP, HAS_ALIBI, USE_DOT, BY_ASSEMBLER,
        )  # fmt: skip
    # A row's own new tokens are among the cached ones when they were stored before.
    top, total, attended = attend_cached(
        (top, total, attended), query, early, cache, columns, block_ids[EARLY], begin, end, query_limits, tile_factors,
        TILE, BLOCK_SIZE, STAGES, MAX_QUERY_LEN > 1 and not HAS_NEW, MASK_WINDOW, HAS_CAP, HAS_ALIBI,
        USE_DOT, BY_ASSEMBLER,
    )  # fmt: skip
    if OVERLAP and not EARLY_DEPENDENTS:
        tl.extra.cuda.gdc_launch_dependents()
    # Only now: nothing in front had to wait for the new tokens.
    if HAS_NEW and is_last_split & (share % SHARERS == 0):
        store_tokens(
            cache, new_key, new_value, new_block_ids, length + new_tokens, (key_head_stride, value_head_stride),
            new_heads, new_mask, BLOCK_SIZE,
        )  # fmt: skip
    if not USE_DOT:
        top, total, attended = sum_lanes((top, total, attended), HEAD_TILE)
    if HAS_NEW and MAX_QUERY_LEN == 1:
        products = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1)
        logits = to_logits(products, 0.0, slopes, factors, HAS_CAP, HAS_ALIBI)
        logits = tl.where(is_last_split, logits, HIDDEN)
        top, total, attended, weights = add_logit((top, total, attended), logits)
        attended += weights[:, None] * new_value.to(tl.float32)
    if HAS_SINKS:
        logits = tl.load(sinks_ptr + heads, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        logits = tl.where(is_last_split, logits, HIDDEN)
        top, total, attended, weights = add_logit((top, total, attended), logits)

    out_ptr += (first_token + own_token) * out_row_stride + first_head * out_head_stride
    if num_splits == 1:
        store_output(
            out_ptr, out_row_stride, out_head_stride, total, attended, value_scale, queries, query_mask, GROUP, TOKENS
        )  # fmt: skip
        return
    slot += share * (2 * EXTRA)
    records_ptr = partial_ptr + slot.to(tl.int64) * RECORD
    store_record(
        records_ptr + split * RECORD, (top, total, attended), queries, (is_query, query_mask), GROUP * TOKENS, HEAD_SIZE
    )  # fmt: skip
    combine_splits(
        out_ptr, out_row_stride, out_head_stride, records_ptr, arrived_ptr + slot, split, num_splits, num_queries,
        value_scale, GROUP, TOKENS, HEAD_SIZE, HEAD_TILE, RECORD, FAN_IN, COMBINE_QUERIES, COMBINE_TILE,
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
    scale: float,
    out: torch.Tensor,  # [T, HQ, D]  written
    query_start_loc: torch.Tensor | None = None,  # [R + 1] int32
    max_query_len: int = 1,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,  # [HQ]
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [HQ]
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    overlap: bool = False,
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
        )
    if not tuning.use_dot:
        # Each query has programs of its own; those that share a KV head find it in the L2 cache.
        tokens = group = 1
    if not tuning.use_dot and max_query_len == 1 and num_query_heads == num_kv_heads:
        group = math.gcd(num_kv_heads, tuning.kv_heads)
    kv_heads = 1 if tuning.use_dot else group
    shares = num_query_heads // group * (max_query_len // tokens)
    # Where there is room for more programs than rows, none has to wait for another. Each ``extra`` is one more kernel.
    places = max(tuning.num_programs // shares, 1)
    rows_tile = triton.next_power_of_2(num_rows)
    extra = max(places - rows_tile, places // 2, 1)
    record = record_size(group * tokens, head_size)
    query_tile = triton.next_power_of_2(group * tokens)
    partial, arrived = split_scratch(query.device, shares * 2 * places, record)
    stored_key = query if new_key is None else new_key
    stored_value = query if new_value is None else new_value
    new_tile = kv_heads if max_query_len == 1 else 16 if tuning.use_dot else tuning.tile
    _paged_decode_kernel[(shares * (num_rows + extra),)](
        out,
        query,
        stored_key,
        stored_value,
        key_cache,
        value_cache,
        block_table,
        num_computed_tokens,
        num_computed_tokens if query_start_loc is None else query_start_loc,
        query if alibi_slopes is None else alibi_slopes,
        query if sinks is None else sinks,
        query if key_scale is None else key_scale,
        query if value_scale is None else value_scale,
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
        block_table.shape[1],
        SHARES=shares,
        SHARERS=max(shares // num_kv_heads, 1),
        KV_HEADS=kv_heads,
        GROUP=group,
        TOKENS=tokens,
        MAX_QUERY_LEN=max_query_len,
        QUERY_TILE=max(query_tile, 16) if tuning.use_dot else query_tile,
        HEAD_SIZE=head_size,
        HEAD_TILE=head_tile,
        BLOCK_SIZE=block_size,
        ROWS_TILE=rows_tile,
        EXTRA=extra,
        MAX_WHOLE=tuning.max_whole,
        MIN_SPLIT=tuning.min_split,
        TILE=tuning.tile,
        NEW_TILE=new_tile,
        RECORD=record,
        FAN_IN=tuning.fan_in,
        COMBINE_QUERIES=max(
            min(query_tile, _COMBINE_ELEMENTS * tuning.num_warps // (_COMBINE_TILE * head_tile)), 1
        ),
        COMBINE_TILE=_COMBINE_TILE,
        HAS_STARTS=query_start_loc is not None,
        HAS_NEW=new_key is not None,
        HAS_WINDOW=sliding_window is not None,
        HAS_CAP=logits_soft_cap is not None,
        HAS_ALIBI=alibi_slopes is not None,
        HAS_SINKS=sinks is not None,
        HAS_KEY_SCALE=key_scale is not None,
        HAS_VALUE_SCALE=value_scale is not None,
        USE_DOT=tuning.use_dot,
        BY_ASSEMBLER=not triton.knobs.runtime.interpret,
        STAGES=tuning.num_stages,
        OVERLAP=overlap,
        EARLY_DEPENDENTS=tuning.early_dependents,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        launch_pdl=overlap,
    )
    return out
