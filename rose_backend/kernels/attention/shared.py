"""What decode and prefill attention share on a GPU: logits in base 2, places in a paged cache, and split contexts.

Every row's context is split over programs in proportion to its length, and the results are combined. The split follows
from all rows' lengths, which only the device reads: one captured launch serves any lengths. A row of ``n`` tokens out
of ``N`` gets at most ``ceil(n / chunk)`` splits where ``chunk = N / extra``. So there are at most ``R + extra`` pieces
of work per head, and the pieces of rows that are really split are at most ``2 * extra``: that many slots of scratch
memory are enough for any batch.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu_properties import current_workspace

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


class SplitSizes(NamedTuple):
    """How contexts are split."""

    ROWS_TILE: int
    """Rows that are looked at, see ``rows_tile``."""
    MAX_WHOLE: int
    """Tokens up to which a row is never split."""
    MIN_SPLIT: int
    """Tokens below which a row is not split further."""
    TILE: int


class CombineSizes(NamedTuple):
    """How the splits' records are added up."""

    RECORD: int
    """float32 numbers of one record."""
    FAN_IN: int
    """Neighbouring records that are added up first."""
    QUERY_TILE: int
    """Queries that are added up at once."""
    RECORD_TILE: int
    """Records that are loaded at once."""


@triton.jit
def _find_rows(
    num_computed_ptr,
    query_start_ptr,
    rows,
    num_rows,
    window,
    MAX_QUERY_LEN: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return of one row or several: length, first token, number of tokens, begin and end of the cached positions.

    The length is negative where there is nothing to do.
    """
    is_row = rows < num_rows
    lengths = tl.load(num_computed_ptr + rows, mask=is_row, other=-1)
    if query_start_ptr is not None:
        first_tokens = tl.load(query_start_ptr + rows, mask=is_row, other=0)
        stops = tl.load(query_start_ptr + rows + 1, mask=is_row, other=0)
        query_lens = tl.minimum(stops - first_tokens, MAX_QUERY_LEN)
        lengths = tl.where(query_lens > 0, lengths, -1)
    else:
        first_tokens = rows
        query_lens = rows * 0 + 1
    begins = tl.maximum(lengths + 1 - window, 0) if HAS_WINDOW else rows * 0
    ends = lengths if HAS_NEW else lengths + query_lens
    return lengths, first_tokens, query_lens, begins, tl.where(lengths >= 0, ends, begins)


@triton.jit
def _split_rows(num_tokens, chunk, MAX_WHOLE: tl.constexpr, TILE: tl.constexpr):
    """Return the length of a row's splits, which are equally long, in whole tiles; and their number."""
    wanted = tl.where(num_tokens > MAX_WHOLE, tl.cdiv(num_tokens, chunk), 1)
    size = tl.maximum(tl.cdiv(tl.cdiv(num_tokens, wanted), TILE), 1) * TILE
    return size, tl.maximum(tl.cdiv(num_tokens, size), 1)


@triton.jit
def find_split(
    num_computed_ptr,
    query_start_ptr,
    num_rows,
    window,
    work,
    own_row,
    extra,
    SPLITS: tl.constexpr,  # SplitSizes
    MAX_QUERY_LEN: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return what piece ``work`` is: row, length, first token, number of tokens, split, number of splits, first slot,
    begin, end.

    Piece ``work`` below ``num_rows`` is the first of ``own_row``. The row is ``num_rows`` or more, or its length
    negative, if there is no such piece. Positions ``begin .. end - 1`` are read from the cache.
    """
    ROWS_TILE: tl.constexpr = SPLITS.ROWS_TILE
    MAX_WHOLE: tl.constexpr = SPLITS.MAX_WHOLE
    TILE: tl.constexpr = SPLITS.TILE
    # The first pieces are the rows' first splits, so that a short row looks at nothing but its own length.
    row = own_row
    split, num_splits, first_slot, size = work * 0, work * 0 + 1, work * 0, work * 0
    length, first_token, query_len, begin, end = _find_rows(
        num_computed_ptr, query_start_ptr, row, num_rows, window, MAX_QUERY_LEN, HAS_NEW, HAS_WINDOW
    )  # fmt: skip
    if MAX_WHOLE == 0 or (work >= num_rows) | (end - begin > MAX_WHOLE):
        rows = tl.arange(0, ROWS_TILE)
        _, _, _, begins, ends = _find_rows(
            num_computed_ptr, query_start_ptr, rows, num_rows, window, MAX_QUERY_LEN, HAS_NEW, HAS_WINDOW
        )  # fmt: skip
        num_tokens = ends - begins
        chunk = tl.maximum(tl.cdiv(tl.sum(num_tokens), extra), SPLITS.MIN_SPLIT)
        if work >= num_rows:
            row = num_rows
            if tl.max(num_tokens) > MAX_WHOLE:
                sizes, splits = _split_rows(num_tokens, chunk, MAX_WHOLE, TILE)
                row = tl.sum((tl.cumsum(splits - 1, 0) <= work - num_rows).to(tl.int32))
                split = work - num_rows + 1 - tl.sum(tl.where(rows < row, splits - 1, 0))
                first_slot = tl.sum(tl.where((rows < row) & (splits > 1), splits, 0))
                size = tl.sum(tl.where(rows == row, sizes, 0))
                num_splits = tl.sum(tl.where(rows == row, splits, 0))
            length, first_token, query_len, begin, end = _find_rows(
                num_computed_ptr, query_start_ptr, row, num_rows, window,
                MAX_QUERY_LEN, HAS_NEW, HAS_WINDOW,
            )  # fmt: skip
        else:
            # Nothing is reduced over all rows that only this one asks for.
            size, num_splits = _split_rows(end - begin, chunk, MAX_WHOLE, TILE)
            if ROWS_TILE > 1 and num_splits > 1:
                _, splits = _split_rows(num_tokens, chunk, MAX_WHOLE, TILE)
                first_slot = tl.sum(tl.where((rows < row) & (splits > 1), splits, 0))
        if num_splits > 1:
            begin += split * size
            end = tl.minimum(begin + size, end)
    return row, length, first_token, query_len, split, num_splits, first_slot, begin, end


@triton.jit
def query_offsets(queries, strides, GROUP: tl.constexpr, TOKENS: tl.constexpr):
    """Return where a program's ``queries`` lie, which are ``GROUP`` heads of the first token, then of the next."""
    if TOKENS == 1:
        offsets = queries.to(tl.int64) * strides[1]
    else:
        offsets = (queries // GROUP).to(tl.int64) * strides[0] + queries % GROUP * strides[1]
    return offsets


@triton.jit
def store_record(record_ptr, state, queries, mask, QUERIES: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Store what some of a record's ``QUERIES`` queries attended, their maxima and their sums of weights.

    ``state`` is (maxima, sums, attended), ``mask`` (queries, elements).
    """
    HEAD_TILE: tl.constexpr = state[2].shape[1]
    elements = queries[:, None] * HEAD_SIZE + tl.arange(0, HEAD_TILE)[None, :]
    tl.store(record_ptr + elements, state[2], mask=mask[1])
    tl.store(record_ptr + QUERIES * HEAD_SIZE + queries, state[0], mask=mask[0])
    tl.store(record_ptr + QUERIES * (HEAD_SIZE + 1) + queries, state[1], mask=mask[0])


@triton.jit
def _add_records(
    record_ptr,
    step,
    count,
    queries,
    mask,
    QUERIES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    COMBINE_TILE: tl.constexpr,
):
    """Add up ``count`` records, ``step`` numbers apart, in their order; ``COMBINE_TILE`` are loaded at once."""
    QUERY_TILE: tl.constexpr = queries.shape[0]
    top_ptrs = record_ptr + QUERIES * HEAD_SIZE + queries
    part_ptrs = record_ptr + queries[:, None] * HEAD_SIZE + tl.arange(0, HEAD_TILE)[None, :]
    counts = tl.zeros_like(queries) + count
    top = tl.full([QUERY_TILE], NO_LOGIT, tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    attended = tl.zeros([QUERY_TILE, HEAD_TILE], tl.float32)
    for start in tl.range(0, count, COMBINE_TILE, num_stages=1):
        tops, totals, parts = (), (), ()
        new_top = top
        for nth in tl.static_range(COMBINE_TILE):
            offset = (start + nth) * step
            is_record = start + nth < counts
            # Past the first-level cache, which other processors' stores do not reach.
            part = tl.load(
                part_ptrs + offset, mask=mask[1] & is_record[:, None], other=0.0, cache_modifier=".cg"
            )
            record_top = tl.load(
                top_ptrs + offset, mask=mask[0] & is_record, other=NO_LOGIT, cache_modifier=".cg"
            )
            record_total = tl.load(
                top_ptrs + QUERIES + offset, mask=mask[0] & is_record, other=0.0, cache_modifier=".cg"
            )
            tops += (record_top,)  # type: ignore[assignment]
            totals += (record_total,)  # type: ignore[assignment]
            parts += (part,)  # type: ignore[assignment]
        for nth in tl.static_range(COMBINE_TILE):
            new_top = tl.maximum(new_top, tops[nth])
        shrink = tl.exp2(top - new_top)
        total *= shrink
        attended *= shrink[:, None]
        for nth in tl.static_range(COMBINE_TILE):
            weights = tl.exp2(tops[nth] - new_top)
            total += totals[nth] * weights
            attended += parts[nth] * weights[:, None]
        top = new_top
    return top, total, attended


@triton.jit
def _some_queries(
    first_query,
    num_queries,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
):
    """Return ``QUERY_TILE`` queries from ``first_query`` on, and which of them and of their elements there are."""
    queries = first_query + tl.arange(0, QUERY_TILE)
    is_query = queries < num_queries
    return queries, (is_query, is_query[:, None] & (tl.arange(0, HEAD_TILE) < HEAD_SIZE)[None, :])


@triton.jit
def combine_splits(
    out_ptr,
    out_strides,
    records_ptr,
    arrived_ptr,
    split,
    num_splits,
    num_queries,
    value_scale,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    COMBINE: tl.constexpr,  # CombineSizes
):
    """Count in the program that has stored record ``split``; the last one adds up and stores the row's output.

    Whichever is last, records are added up in the same order: first those of ``FAN_IN`` neighbouring splits by the last
    of them, then these sums by the last of all.
    """
    RECORD: tl.constexpr = COMBINE.RECORD
    FAN_IN: tl.constexpr = COMBINE.FAN_IN
    QUERY_TILE: tl.constexpr = COMBINE.QUERY_TILE
    COMBINE_TILE: tl.constexpr = COMBINE.RECORD_TILE
    # Every thread's part of the record comes before the one thread that counts the program in.
    tl.debug_barrier()
    first = split // FAN_IN * FAN_IN
    num_sums = tl.cdiv(num_splits, FAN_IN)
    num_members = tl.minimum(num_splits - first, FAN_IN)
    if tl.atomic_add(arrived_ptr + first, 1, sem="acq_rel", scope="gpu") == num_members - 1:
        tl.store(arrived_ptr + first, 0)
        QUERIES: tl.constexpr = GROUP * TOKENS
        is_last = num_sums == 1
        step, count = RECORD, num_members
        if num_sums > 1:
            record_ptr = records_ptr + first * RECORD
            for first_query in tl.range(0, QUERIES, QUERY_TILE, num_stages=1):
                queries, mask = _some_queries(first_query, num_queries, HEAD_SIZE, HEAD_TILE, QUERY_TILE)
                state = _add_records(
                    record_ptr,
                    RECORD,
                    num_members,
                    queries,
                    mask,
                    QUERIES,
                    HEAD_SIZE,
                    HEAD_TILE,
                    COMBINE_TILE,
                )
                # The sum takes the place of its first record, which every thread has read.
                tl.debug_barrier()
                store_record(record_ptr, state, queries, mask, QUERIES, HEAD_SIZE)
            tl.debug_barrier()
            # Groups count at their first split's place, so the row's second place is free to count the groups.
            is_last = tl.atomic_add(arrived_ptr + 1, 1, sem="acq_rel", scope="gpu") == num_sums - 1
            if is_last:
                tl.store(arrived_ptr + 1, 0)
            step, count = FAN_IN * RECORD, num_sums
        if is_last:
            for first_query in tl.range(0, QUERIES, QUERY_TILE, num_stages=1):
                queries, mask = _some_queries(first_query, num_queries, HEAD_SIZE, HEAD_TILE, QUERY_TILE)
                _, total, attended = _add_records(
                    records_ptr, step, count, queries, mask, QUERIES, HEAD_SIZE, HEAD_TILE, COMBINE_TILE
                )
                store_output(
                    out_ptr, out_strides, total, attended, value_scale, queries, mask[1], GROUP, TOKENS
                )  # fmt: skip


@triton.jit
def store_output(
    out_ptr,
    strides,
    total,
    attended,
    value_scale,
    queries,
    mask,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Store what ``queries`` attended, of which ``total`` are the sums of weights."""
    dims = tl.arange(0, attended.shape[1])[None, :]
    rows = out_ptr + query_offsets(queries, strides, GROUP, TOKENS)
    attended *= (value_scale / total)[:, None]
    tl.store(rows[:, None] + dims, attended.to(out_ptr.dtype.element_ty), mask=mask)


def record_size(num_queries: int, head_size: int) -> int:
    """Return the float32 numbers of one record, a whole number of 16-byte words."""
    return -(-num_queries * (head_size + 2) // 4) * 4


def split_scratch(device: torch.device, num_slots: int, record: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the workspace's room for records of split rows, and counters that every launch finds and leaves at zero.

    Sizes follow from the model's shape, the tokens per row and the device alone.

    Raises:
        RuntimeError: asked for first while a graph is being captured.
    """

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        partial = torch.empty((num_slots, record), dtype=torch.float32, device=device)
        return partial, torch.zeros(num_slots, dtype=torch.int32, device=device)

    records, counters = current_workspace().tensors("paged_decode", device, (num_slots, record), make)
    return records, counters


LOG2_E = tl.constexpr(1.4426950408889634)
NO_LOGIT = tl.constexpr(-1e30)
"""Initial maximum: finite, so that the difference of two of them is not NaN."""
HIDDEN = tl.constexpr(-2e30)
"""Logit of what may not be seen: has weight 0 even where all keys are masked."""


@cache
def padded_head_size(head_size: int) -> int:
    """Return the width of tiles of keys: a power of two of at least 16."""
    return max(triton.next_power_of_2(head_size), 16)


def logit_factors(scale: float, logits_soft_cap: float | None) -> tuple[float, float]:
    """Fold scale, cap and the change to base 2 into the two factors of ``to_logits``."""
    if logits_soft_cap is None:
        return scale * LOG2_E.value, 1.0
    return scale / logits_soft_cap, logits_soft_cap * LOG2_E.value


@triton.jit
def to_logits(products, distance, slope, factors, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr):
    """Return base-2 logits of query-key products. ``distance`` is key position minus query position."""
    logits = products * factors[0]
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); right at both infinities.
        logits = factors[1] * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2_E)) + 1.0))
    if HAS_ALIBI:
        logits += slope * LOG2_E * distance
    return logits


@triton.jit
def cached_offsets(block_ids, positions, block_stride, token_stride, BLOCK_SIZE: tl.constexpr):
    """Return where tokens at ``positions`` lie in a cache, for the blocks that they are in. 64 bits."""
    # Neither is negative: as unsigned numbers they take half as many instructions.
    places = positions.to(tl.uint32) % BLOCK_SIZE
    return block_ids.to(tl.uint32).to(tl.int64) * block_stride + places.to(tl.int64) * token_stride
