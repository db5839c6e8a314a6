"""Split every row's context over programs, as many as its length asks for, and combine what they found.

The split follows from all rows' lengths, which only the device reads: one captured launch serves any lengths. A row of
``n`` tokens out of ``N`` gets at most ``ceil(n / chunk)`` splits where ``chunk = N / EXTRA``. So there are at most
``R + EXTRA`` pieces of work per head, and the pieces of rows that are really split are at most ``2 * EXTRA``: so many
slots of scratch memory are enough for any batch.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu.softmax import NO_LOGIT


@triton.jit
def find_split(
    num_computed_ptr,
    num_rows,
    window,
    work,
    ROWS_TILE: tl.constexpr,
    EXTRA: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return what piece ``work`` is: row, length, split, number of splits, first slot, begin, end.

    The row is ``num_rows`` or more if there is no such piece. Positions ``begin .. end - 1`` are read from the cache.
    """
    rows = tl.arange(0, ROWS_TILE)
    computed = tl.load(num_computed_ptr + rows, mask=rows < num_rows, other=-1)
    ends = computed if HAS_NEW else computed + 1
    begins = tl.maximum(computed + 1 - window, 0) if HAS_WINDOW else tl.zeros_like(computed)
    num_tokens = tl.maximum(ends - begins, 0)
    chunk = tl.maximum(tl.cdiv(tl.sum(num_tokens), EXTRA), MIN_SPLIT)
    # Splits of one row are equally long, in whole tiles.
    wanted = tl.maximum(tl.cdiv(num_tokens, chunk), 1)
    sizes = tl.maximum(tl.cdiv(tl.cdiv(num_tokens, wanted), TILE), 1) * TILE
    counts = tl.where(computed >= 0, tl.maximum(tl.cdiv(num_tokens, sizes), 1), 0)
    row = tl.sum((tl.cumsum(counts, 0) <= work).to(tl.int32))
    split = work - tl.sum(tl.where(rows < row, counts, 0))
    first_slot = tl.sum(tl.where((rows < row) & (counts > 1), counts, 0))
    is_row = rows == row
    size = tl.sum(tl.where(is_row, sizes, 0))
    begin = tl.sum(tl.where(is_row, begins, 0)) + split * size
    end = tl.minimum(begin + size, tl.sum(tl.where(is_row, ends, 0)))
    length = tl.sum(tl.where(is_row, computed, 0))
    num_splits = tl.sum(tl.where(is_row, counts, 0))
    return row, length, split, num_splits, first_slot, begin, end


@triton.jit
def combine_splits(
    out_ptr,
    out_head_stride,
    partial_ptr,
    num_splits,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    RECORD: tl.constexpr,
    COMBINE_TILE: tl.constexpr,
):
    """Add up a row's splits in their order, whoever came last, and store the row's output.

    A split's record holds what ``GROUP`` heads attended, then their maxima, then their sums of weights.
    """
    group = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, HEAD_TILE)
    is_head = group < GROUP
    is_element = is_head[:, None] & (dims < HEAD_SIZE)[None, :]
    elements = group[:, None] * HEAD_SIZE + dims[None, :]
    top = tl.full([GROUP_TILE], NO_LOGIT, tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    attended = tl.zeros([GROUP_TILE, HEAD_TILE], tl.float32)
    for start in tl.range(0, num_splits, COMBINE_TILE, num_stages=1):
        splits = start + tl.arange(0, COMBINE_TILE)
        is_split = splits < num_splits
        records = partial_ptr + splits * RECORD
        # Past the first-level cache, which other processors' stores do not reach.
        parts = tl.load(
            records[:, None, None] + elements[None, :, :],
            mask=is_split[:, None, None] & is_element[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        mask = is_split[:, None] & is_head[None, :]
        top_ptrs = records[:, None] + GROUP * HEAD_SIZE + group[None, :]
        tops = tl.load(top_ptrs, mask=mask, other=NO_LOGIT, cache_modifier=".cg")
        totals = tl.load(top_ptrs + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, 0))
        weights = tl.exp2(tops - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(totals * weights, 0)
        attended = attended * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        top = new_top
    out_rows = (out_ptr + group * out_head_stride)[:, None]
    tl.store(
        out_rows + dims[None, :], (attended / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_element
    )


def record_size(group: int, head_size: int) -> int:
    """Return the float32 numbers of one record, a whole number of 16-byte words."""
    return -(-group * (head_size + 2) // 4) * 4


@functools.cache
def split_scratch(device: torch.device, num_slots: int, record: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for the records of split rows, and counters that every launch finds and leaves at zero.

    Sizes follow from the model's shape and the device alone. Never freed: captured graphs hold the addresses.

    Raises:
        RuntimeError: asked for first while a graph is being captured, where memory would be the graph's own.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("paged_decode: call it once with these shapes before capturing it in a CUDA graph")
    partial = torch.empty((num_slots, record), dtype=torch.float32, device=device)
    return partial, torch.zeros(num_slots, dtype=torch.int32, device=device)
