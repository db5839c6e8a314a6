"""Attention in one order of operations for each token, in prompts and decodes alike: one kernel for both.

What a query attends to is cut into splits of ``SPLIT`` positions, counted from position 0 and not from where a step or
a chunk begins. A split is attended in tiles of ``TILE`` positions, in their order, and the results of splits are merged
in theirs (``_merge``). A program attends ``QUERY_TILE`` queries, filled up where there are fewer, with one
configuration of tiles and warps: a decode takes the same instructions as a prompt. On Hopper that is ``wgmma`` for 64
rows. Each row of its result is made of one query, and so is each number of the softmax.

How much of a row a program does is free, as that changes no sum: all splits of a tile of queries, or, of a row with one
new token, some splits, whose results it stores as they are. The last of the row's programs merges them. What lies after
a query, in its own tile of keys or in tiles that only other queries reach, has weight 0, which adds nothing to a sum;
nor does it scale one, as no maximum is found there.

New keys and values are stored first, by a launch of their own, and read back: they are rounded as those of earlier
steps. Products are not fused with sums, which would round merges differently from one compiled variant to the next.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import AttentionOptions, NewTokens, PagedKV, attention_strides
from rose_backend.kernels.attention.paged_prefill import load_rows, store_chunk
from rose_backend.kernels.attention.shared import (
    HIDDEN,
    LOG2_E,
    NO_LOGIT,
    cached_offsets,
    logit_factors,
    padded_head_size,
    record_size,
    store_output,
    store_record,
    to_logits,
)
from rose_backend.kernels.gpu_properties import current_workspace, has_dependent_launch
from rose_backend.kernels.kv.cache_writes import load_scale
from rose_backend.kernels.tuning.choices import num_processors, rows_tile

_QUERY_TILE = 64
_TILE = 64
_SPLIT = 256
_MAX_RECORDS = 4096
"""Splits that are stored at once: of more, each row is one program's."""
_PROGRAMS_PER_PROCESSOR = 2
_RECORDS_AT_ONCE = 8
"""Loaded together, and merged one after the other."""


class Work(NamedTuple):
    """What programs attend, as the kernel is compiled for it."""

    KV_HEADS: int
    GROUP: int
    """Query heads of a KV head, which one program attends."""
    TOKENS: int
    """Tokens of a tile of queries."""
    QUERY_TILE: int
    TILE: int
    SPLIT: int
    ROWS_TILE: int
    HEAD_SIZE: int
    HEAD_TILE: int
    BLOCK_SIZE: int


class Logits(NamedTuple):
    """What becomes of products."""

    HAS_WINDOW: bool
    HAS_CAP: bool
    HAS_ALIBI: bool


class Records(NamedTuple):
    """How results of splits are stored and merged."""

    SIZE: int
    """float32 numbers of one."""
    QUERY_TILE: int
    AT_ONCE: int


@triton.jit
def _lengths(
    query_start_ptr,
    num_computed_ptr,
    rows,
    num_rows,
    window,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return of some rows: first token, number of tokens, tokens before them, first split, number of splits."""
    is_row = rows < num_rows
    computed = tl.load(num_computed_ptr + rows, mask=is_row, other=-1)
    if query_start_ptr is None:
        starts = rows
        counts = rows * 0 + 1
    else:
        starts = tl.load(query_start_ptr + rows, mask=is_row, other=0)
        counts = tl.load(query_start_ptr + rows + 1, mask=is_row, other=0) - starts
    counts = tl.where(computed >= 0, tl.maximum(counts, 0), 0)
    first = tl.maximum(computed + 1 - window, 0) // SPLIT if HAS_WINDOW else rows * 0
    return starts, counts, computed, first, tl.where(counts > 0, tl.cdiv(computed + counts, SPLIT) - first, 0)


@triton.jit
def _find_piece(
    query_start_ptr, num_computed_ptr, num_rows, window, nth, extra, max_records, WORK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Return row, piece within the row, splits of a piece, pieces of the row, first record. Row ``num_rows``: no piece.

    A piece is a tile of queries with all its splits, or, of a row with one new token, so many splits of that; a row of
    one piece stores no records. Pieces are taken from the last one on: a prompt's later tiles take longer.
    """
    rows = tl.arange(0, WORK.ROWS_TILE)
    _, counts, _, _, splits = _lengths(
        query_start_ptr, num_computed_ptr, rows, num_rows, window, WORK.SPLIT, HAS_WINDOW
    )
    own_splits = tl.where(counts == 1, splits, 0)
    total = tl.sum(own_splits)
    per_piece = tl.maximum(tl.cdiv(total, extra), 1)
    if total > max_records:
        per_piece = total
    pieces = tl.where(counts == 1, tl.cdiv(splits, per_piece), tl.cdiv(counts, WORK.TOKENS))
    work = tl.sum(pieces) - 1 - nth
    row = tl.sum((tl.cumsum(pieces, 0) <= work).to(tl.int32))
    piece = work - tl.sum(tl.where(rows < row, pieces, 0))
    stored = tl.where((counts == 1) & (pieces > 1), splits, 0)
    first_record = tl.sum(tl.where(rows < row, stored, 0))
    own_pieces = tl.sum(tl.where((rows == row) & (counts == 1), pieces, 0))
    return tl.where(work < 0, num_rows, row), piece, per_piece, own_pieces, first_record


@triton.jit
def _merge(state, part):
    """Return ``state`` and then ``part``: maxima, sums of weights, weighted values."""
    top = tl.maximum(state[0], part[0])
    kept, added = tl.exp2(state[0] - top), tl.exp2(part[0] - top)
    total = state[1] * kept + part[1] * added
    return top, total, state[2] * kept[:, None] + part[2] * added[:, None]


@triton.jit
def _attend_split(
    query,
    positions,  # of the queries
    source,  # keys, values, the row's block table; strides of blocks and tokens of both
    begin,
    end,
    limits,  # ALiBi slopes of the queries, window, factors of ``to_logits``
    WORK: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """Return what the queries attend to in positions ``begin .. end - 1`` of one split; ``begin`` begins a tile."""
    QUERY_TILE: tl.constexpr = WORK.QUERY_TILE
    HEAD_TILE: tl.constexpr = WORK.HEAD_TILE
    tokens = tl.arange(0, WORK.TILE)
    dims = tl.arange(0, HEAD_TILE)[None, :]
    top = tl.full([QUERY_TILE], NO_LOGIT, tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    attended = tl.zeros([QUERY_TILE, HEAD_TILE], tl.float32)
    block_ids = tl.load(source[2] + (begin + tokens) // WORK.BLOCK_SIZE, mask=begin + tokens < end, other=0)
    for start in tl.range(begin, end, WORK.TILE):
        places = start + tokens
        is_token = places < end
        key_rows = source[0] + cached_offsets(block_ids, places, source[3], source[4], WORK.BLOCK_SIZE)
        value_rows = source[1] + cached_offsets(block_ids, places, source[5], source[6], WORK.BLOCK_SIZE)
        key = load_rows(key_rows[:, None], is_token, dims, WORK.HEAD_SIZE, True)
        value = load_rows(value_rows[:, None], is_token, dims, WORK.HEAD_SIZE, True)
        # Of the next tile, a turn before they are used.
        after = places + WORK.TILE
        block_ids = tl.load(source[2] + after // WORK.BLOCK_SIZE, mask=after < end, other=0)
        products = tl.dot(query, tl.trans(key.to(query.dtype)))
        distance = places[None, :] - positions[:, None]
        logits = to_logits(
            products, distance.to(tl.float32), limits[0][:, None], limits[2], LOGITS.HAS_CAP, LOGITS.HAS_ALIBI
        )
        is_visible = distance <= 0
        if LOGITS.HAS_WINDOW:
            is_visible &= distance > -limits[1]
        logits = tl.where(is_visible, logits, HIDDEN)
        new_top = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        attended = tl.dot(weights.to(query.dtype), value.to(query.dtype), attended * shrink[:, None])
        top = new_top
    return top, total, attended


@triton.jit
def _merge_records(state, record_ptr, num_records, queries, mask, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
                   RECORDS: tl.constexpr):  # fmt: skip
    """Return ``state`` and then each of a row's records, in their order."""
    HEAD_TILE: tl.constexpr = state[2].shape[1]
    AT_ONCE: tl.constexpr = RECORDS.AT_ONCE
    top, total, attended = state
    top_ptrs = record_ptr + GROUP * HEAD_SIZE + queries
    part_ptrs = record_ptr + queries[:, None] * HEAD_SIZE + tl.arange(0, HEAD_TILE)[None, :]
    for first in tl.range(0, num_records, AT_ONCE, num_stages=1):
        tops, totals, parts = (), (), ()
        for nth in tl.static_range(AT_ONCE):
            offset = (first + nth) * RECORDS.SIZE
            is_record = queries * 0 + first + nth < num_records
            in_head = mask[0] & is_record
            # Past the first-level cache, which other processors' stores do not reach.
            tops += (tl.load(top_ptrs + offset, mask=in_head, other=NO_LOGIT, cache_modifier=".cg"),)  # type: ignore[assignment]
            totals += (tl.load(top_ptrs + GROUP + offset, mask=in_head, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
            in_part = mask[1] & is_record[:, None]
            parts += (tl.load(part_ptrs + offset, mask=in_part, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
        for nth in tl.static_range(AT_ONCE):
            top, total, attended = _merge((top, total, attended), (tops[nth], totals[nth], parts[nth]))
    return top, total, attended


@triton.jit
def _first_state(sinks_ptr, heads, is_query, QUERY_TILE: tl.constexpr, HEAD_TILE: tl.constexpr):
    """Return the state of queries that have attended to nothing but their heads' sinks."""
    top = tl.full([QUERY_TILE], NO_LOGIT, tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sinks)
        total = tl.exp2(sinks - top)
    return top, total, tl.zeros([QUERY_TILE, HEAD_TILE], tl.float32)


@triton.jit(
    do_not_specialize=["num_rows", "extra", "max_records", "window", "table_stride"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "query_start_ptr",
        "num_computed_ptr",
        "slopes_ptr",
        "sinks_ptr",
        "key_scale_ptr",
        "value_scale_ptr",
    ],
)
def _batch_invariant_attention_kernel(
    out_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    query_start_ptr,  # None with one token per row
    num_computed_ptr,
    slopes_ptr,  # each None where the option is off
    sinks_ptr,
    key_scale_ptr,
    value_scale_ptr,
    scratch,  # records [slots, SIZE] float32, counters [slots] int32, of each KV head
    num_rows,
    extra,  # pieces beyond one for each row and tile of queries
    max_records,  # of a KV head
    window,
    factors,
    strides,  # AttentionStrides
    table_stride,
    WORK: tl.constexpr,
    LOGITS: tl.constexpr,
    RECORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = WORK.GROUP
    HEAD_SIZE: tl.constexpr = WORK.HEAD_SIZE
    if PDL:
        tl.extra.cuda.gdc_wait()
    kv_head = (tl.program_id(0) % WORK.KV_HEADS).to(tl.int64)
    row, piece, per_piece, pieces, first_record = _find_piece(
        query_start_ptr, num_computed_ptr, num_rows, window, tl.program_id(0) // WORK.KV_HEADS, extra,
        max_records, WORK, LOGITS.HAS_WINDOW,
    )  # fmt: skip
    if row >= num_rows:
        return
    first_token, count, computed, first_split, num_splits = _lengths(
        query_start_ptr, num_computed_ptr, row, num_rows, window, WORK.SPLIT, LOGITS.HAS_WINDOW
    )
    tile = piece if count > 1 else 0
    queries = tl.arange(0, WORK.QUERY_TILE)
    tokens = tile * WORK.TOKENS + queries // GROUP
    is_query = (queries < WORK.TOKENS * GROUP) & (tokens < count)
    heads = kv_head * GROUP + queries % GROUP
    dims = tl.arange(0, WORK.HEAD_TILE)[None, :]
    query_ptr += first_token.to(tl.int64) * strides.query[0]
    query_rows = query_ptr + tokens.to(tl.int64) * strides.query[0] + heads * strides.query[1]
    query = load_rows(query_rows[:, None], is_query, dims, HEAD_SIZE, True)
    source = (
        key_cache_ptr + kv_head * strides.key[2],
        value_cache_ptr + kv_head * strides.value[2],
        block_table_ptr + row.to(tl.int64) * table_stride,
        strides.key[0],
        strides.key[1],
        strides.value[0],
        strides.value[1],
    )
    slopes = tl.full([WORK.QUERY_TILE], 0.0, tl.float32)
    if LOGITS.HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads, mask=is_query, other=0.0).to(tl.float32)
    limits = (slopes, window, (factors[0] * load_scale(key_scale_ptr), factors[1]))
    value_scale = load_scale(value_scale_ptr)

    first_position = computed + tile * WORK.TOKENS
    end = computed + tl.minimum((tile + 1) * WORK.TOKENS, count)
    begin = 0
    if LOGITS.HAS_WINDOW:
        begin = tl.maximum(first_position + 1 - window, 0) // WORK.TILE * WORK.TILE
    split, split_end = begin // WORK.SPLIT, tl.cdiv(end, WORK.SPLIT)
    if count == 1:
        split = first_split + piece * per_piece
        split_end = tl.minimum(split + per_piece, split_end)
    # Slots of records and counters: those of a KV head are side by side.
    slot = kv_head * max_records + first_record
    records_ptr = scratch[0] + slot * RECORDS.SIZE
    positions = computed + tokens
    query_mask = is_query[:, None] & (dims < HEAD_SIZE)
    top, total, attended = _first_state(sinks_ptr, heads, is_query, WORK.QUERY_TILE, WORK.HEAD_TILE)
    for index in tl.range(split, split_end, num_stages=1):
        part = _attend_split(
            query, positions, source, tl.maximum(index * WORK.SPLIT, begin),
            tl.minimum((index + 1) * WORK.SPLIT, end), limits, WORK, LOGITS,
        )  # fmt: skip
        if pieces > 1:
            record_ptr = records_ptr + (index - first_split) * RECORDS.SIZE
            store_record(record_ptr, part, queries, (is_query, query_mask), GROUP, HEAD_SIZE)
        else:
            top, total, attended = _merge((top, total, attended), part)
    out_ptr += first_token.to(tl.int64) * strides.out[0] + kv_head * GROUP * strides.out[1]
    if pieces <= 1:
        out_ptr += (tile * WORK.TOKENS).to(tl.int64) * strides.out[0]
        store_output(
            out_ptr, strides.out, total, attended, value_scale, queries, query_mask, GROUP, WORK.TOKENS
        )
        return
    # Every thread's part of the records comes before the one thread that counts the program in.
    tl.debug_barrier()
    arrived_ptr = scratch[1] + slot
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == pieces - 1:
        tl.store(arrived_ptr, 0)
        own = tl.arange(0, RECORDS.QUERY_TILE)
        is_own = own < GROUP
        own_mask = is_own[:, None] & (dims < HEAD_SIZE)
        state = _first_state(sinks_ptr, kv_head * GROUP + own, is_own, RECORDS.QUERY_TILE, WORK.HEAD_TILE)
        state = _merge_records(
            state, records_ptr, num_splits, own, (is_own, own_mask), GROUP, HEAD_SIZE, RECORDS
        )
        store_output(out_ptr, strides.out, state[1], state[2], value_scale, own, own_mask, GROUP, 1)


@lru_cache(maxsize=1024)
def _work(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, num_rows: int
) -> tuple[Work, Records]:
    group = num_heads // num_kv_heads
    work = Work(
        num_kv_heads,
        group,
        max(_QUERY_TILE // group, 1),
        max(triton.next_power_of_2(group), _QUERY_TILE),
        _TILE,
        _SPLIT,
        rows_tile(num_rows),
        head_size,
        padded_head_size(head_size),
        block_size,
    )
    return work, Records(record_size(group, head_size), triton.next_power_of_2(group), _RECORDS_AT_ONCE)


def batch_invariant_attention(
    query: torch.Tensor,  # [T, HQ, D]
    new: NewTokens | None,
    kv: PagedKV,  # the caches are written
    *,
    options: AttentionOptions,
    out: torch.Tensor,  # [T, HQ, D]  written
) -> torch.Tensor:
    """As ``paged_decode`` and ``paged_prefill`` of ``rose_backend.kernels``, with ``options.batch_invariant``."""
    num_tokens, num_heads, head_size = query.shape
    block_size, num_kv_heads = kv.key_cache.shape[1:3]
    num_rows = kv.num_computed_tokens.shape[0]
    if num_rows == 0 or num_tokens == 0:
        return out
    if new is not None:
        store_chunk(new, kv, options)
    work, records = _work(num_heads, num_kv_heads, head_size, block_size, num_rows)
    extra = max(_PROGRAMS_PER_PROCESSOR * num_processors(query.device) // num_kv_heads, 1)
    use_pdl = has_dependent_launch(query.device)
    # A tile of each row may be part of one, and so may a piece of each row that is split.
    num_pieces = num_tokens // work.TOKENS + num_rows + extra
    _batch_invariant_attention_kernel[(num_pieces * num_kv_heads,)](
        out,
        query,
        kv.key_cache,
        kv.value_cache,
        kv.block_table,
        kv.query_start_loc,
        kv.num_computed_tokens,
        options.alibi_slopes,
        options.sinks,
        options.key_scale,
        options.value_scale,
        _scratch(query.device, num_kv_heads, records.SIZE),
        num_rows,
        extra,
        _MAX_RECORDS,
        options.sliding_window or 0,
        logit_factors(options.scale, options.logits_soft_cap),
        attention_strides(out, query, None, kv),
        kv.block_table.stride(0),
        WORK=work,
        LOGITS=Logits(
            options.sliding_window is not None,
            options.logits_soft_cap is not None,
            options.alibi_slopes is not None,
        ),
        RECORDS=records,
        PDL=use_pdl,
        launch_pdl=use_pdl,
        enable_fp_fusion=False,
        num_warps=8,
        num_stages=2,
        # All that there are: the assembler spills to make room for a second program.
        maxnreg=255,
    )
    return out


def _scratch(device: torch.device, num_kv_heads: int, record: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for the records of split rows, and counters that every launch finds and leaves at zero.

    Raises:
        RuntimeError: asked for first while a graph is being captured.
    """
    num_slots = num_kv_heads * _MAX_RECORDS

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        partial = torch.empty((num_slots, record), dtype=torch.float32, device=device)
        return partial, torch.zeros(num_slots, dtype=torch.int32, device=device)

    sizes = (num_slots, record)
    records, counters = current_workspace().tensors("batch_invariant_attention", device, sizes, make)
    return records, counters
