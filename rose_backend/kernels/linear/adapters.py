"""Triton products of a step's rows with the LoRA adapters that their requests have, added to another product.

Two launches, as vLLM's: one shrinks rows to the adapters' rank, one expands them. A program owns a tile of rows, in
the order of their LoRA slots, and goes through the slots that these rows have, one or two of them mostly. Tiles without
an adapter stay as they are. Few rows have many slots in a tile and leave most of the GPU idle: there programs divide a
tile's slots among themselves, and the depth of the first product, whose parts the second launch adds in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import AdapterRows, Adapters, NormInput
from rose_backend.kernels.gpu_properties import has_dependent_launch
from rose_backend.kernels.linear.small_batch_linear import load_moments
from rose_backend.kernels.tuning.measured import constants

_TUNED = constants("adapters")
_BLOCK_K_EXACT = 32
"""Of float32, whose products are added up one by one, in registers."""


@triton.jit
def _wait_for_inputs(PDL: tl.constexpr):
    """Let the next kernel start, and wait for all earlier ones. Programs without rows of adapters do so, too.

    The next kernel waits for this one alone. Without this wait it could read what an earlier one has not written yet.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _load_rows(rows_ptr, slots_ptr, numbers, num_tokens, num_slots):
    """Return the rows of a tile, the LoRA slot of each, -1 where there is none, and the first and the last slot."""
    in_step = numbers < num_tokens
    rows = tl.load(rows_ptr + numbers, mask=in_step, other=0)
    slots = tl.load(slots_ptr + numbers, mask=in_step, other=-1)
    slots = tl.where((slots >= 0) & (slots < num_slots), slots, -1).to(tl.int32)
    first = tl.min(tl.where(slots < 0, num_slots, slots), 0)
    return rows, slots, first, tl.max(slots, 0)


@triton.jit
def _is_own(slots, first, programs_per_tile):
    """Return the rows of a tile whose slots a program goes through: ``first``, and each ``programs_per_tile`` on."""
    return (slots >= first) & ((slots - first) % programs_per_tile == 0)


@triton.jit
def _of_slice(values, index, SLICES: tl.constexpr):
    value = values[0]
    if SLICES > 1:
        value = tl.where(index == 1, values[1], value)
    if SLICES > 2:
        value = tl.where(index == 2, values[2], value)
    return value


@triton.jit
def _add_product(acc, x, weight, own, EXACT: tl.constexpr):
    """Return ``acc`` and ``x @ weight.T`` of a slot's own rows.

    Other rows stay apart from numbers that are not finite. And in float32 blocks are added up, where ``tl.dot`` would
    go on with the sum, one product after the other over the whole depth: that rounds more than a library's product.
    """
    product = tl.dot(x, tl.trans(weight), input_precision="ieee" if EXACT else "tf32")
    return acc + tl.where(own[:, None], product, 0.0)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "programs_per_tile"])
def _adapters_shrink_kernel(
    x_ptr,  # [T, E], rows apart by x_stride
    lora_a,  # of each slice: [U, Z, E] contiguous
    moments_ptr,  # [T, 2, X_PARTS] float32, of what is left to RMSNorm, else None
    x_scale_ptr,  # [1] float32, of RMSNorm in float16, else None
    rows_ptr,  # [T], as of AdapterRows
    slots_ptr,  # [T]
    shrunk_ptr,  # [slices, splits, T, BLOCK_R] float32, in the order of rows; written where a row has an adapter
    num_tokens,
    num_slots,
    programs_per_tile,
    x_stride,
    eps,
    X_PARTS: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``programs_per_tile`` programs per tile of rows, slice, and ``DEPTH`` columns of ``x``."""
    _wait_for_inputs(PDL)
    numbers = tl.program_id(0) // programs_per_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, slots, first, last = _load_rows(rows_ptr, slots_ptr, numbers, num_tokens, num_slots)
    first += tl.program_id(0) % programs_per_tile
    if first <= last:
        index, split = tl.program_id(1), tl.program_id(2)
        a_ptr = _of_slice(lora_a, index, SLICES)
        ranks = tl.arange(0, BLOCK_R)
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        # One loop over slots and depth: what the next slot needs is loaded ahead, too.
        BLOCKS: tl.constexpr = DEPTH // BLOCK_K
        for block in range(0, tl.cdiv(last + 1 - first, programs_per_tile) * BLOCKS):
            slot = first + block // BLOCKS * programs_per_tile
            own = slots == slot
            ks = split * DEPTH + block % BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
            in_depth = (ks < K)[None, :]
            x = tl.load(
                x_ptr + rows[:, None] * x_stride + ks[None, :], mask=own[:, None] & in_depth, other=0.0
            )
            weight = tl.load(
                a_ptr + tl.cast(slot, tl.int64) * (RANK * K) + ranks[:, None] * K + ks[None, :],
                mask=(ranks < RANK)[:, None] & in_depth,
                other=0.0,
            )
            acc = _add_product(acc, x, weight, own, EXACT)
        if moments_ptr is not None:
            _, squares = load_moments(moments_ptr, rows, num_tokens, X_PARTS)
            inverse = tl.rsqrt(tl.sum(squares, 1) / K + eps)
            if x_scale_ptr is not None:
                inverse *= tl.load(x_scale_ptr)
            acc *= inverse[:, None]
        slab = (index * tl.num_programs(2) + split).to(tl.int64) * num_tokens
        shrunk = shrunk_ptr + (slab + numbers)[:, None] * BLOCK_R + ranks[None, :]
        tl.store(shrunk, acc, mask=_is_own(slots, first, programs_per_tile)[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "programs_per_tile"])
def _adapters_expand_kernel(
    shrunk_ptr,  # [slices, splits, T, BLOCK_R] float32
    lora_b,  # of each slice: [U, O, Z] contiguous
    widths,  # of each slice: O
    rows_ptr,  # [T], as of AdapterRows
    slots_ptr,  # [T]
    out_ptr,  # [T, sum of O], written
    num_tokens,
    num_slots,
    programs_per_tile,
    out_stride,
    RANK: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    ALTERNATING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``programs_per_tile`` programs per tile of rows, slice, and ``BLOCK_N`` of its columns.

    Args:
        ALTERNATING: columns of the slices take turns; else the slices follow one another.
    """
    _wait_for_inputs(PDL)
    numbers = tl.program_id(0) // programs_per_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    index = tl.program_id(1)
    width = _of_slice(widths, index, SLICES)
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns = columns < width
    rows, slots, first, last = _load_rows(rows_ptr, slots_ptr, numbers, num_tokens, num_slots)
    first += tl.program_id(0) % programs_per_tile
    if (first <= last) & (tl.program_id(2) * BLOCK_N < width):
        own = _is_own(slots, first, programs_per_tile)[:, None]
        ranks = tl.arange(0, BLOCK_R)
        shrunk = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in tl.static_range(SPLITS):
            slab = (index * SPLITS + split).to(tl.int64) * num_tokens
            offsets = (slab + numbers)[:, None] * BLOCK_R + ranks[None, :]
            shrunk += tl.load(shrunk_ptr + offsets, mask=own, other=0.0)
        b_ptr = _of_slice(lora_b, index, SLICES)
        x = shrunk.to(b_ptr.dtype.element_ty)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for slot in range(first, last + 1, programs_per_tile):
            weight_rows = tl.cast(slot, tl.int64) * width + columns
            weight = tl.load(
                b_ptr + weight_rows[:, None] * RANK + ranks[None, :],
                mask=in_columns[:, None] & (ranks < RANK)[None, :],
                other=0.0,
            )
            acc = _add_product(acc, x, weight, slots == slot, EXACT)
        if ALTERNATING:
            out_columns = columns * SLICES + index
        else:
            out_columns = columns
            if SLICES > 1:
                out_columns += tl.where(index > 0, widths[0], 0)
            if SLICES > 2:
                out_columns += tl.where(index > 1, widths[1], 0)
        out = out_ptr + rows[:, None] * out_stride + out_columns[None, :]
        mask = own & in_columns[None, :]
        total = tl.load(out, mask=mask, other=0.0).to(tl.float32) + acc
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_adapters(
    x: torch.Tensor | NormInput,  # [T, E]
    adapters: Adapters,
    rows: AdapterRows,
    out: torch.Tensor,  # [T, O]  written
    *,
    alternating: bool = False,
) -> None:
    """``rose_backend.kernels.add_adapters`` on a GPU."""
    x, moments, norm = x if isinstance(x, NormInput) else (x, None, None)
    num_tokens, depth = x.shape
    num_slots, rank, _ = adapters.lora_a[0].shape
    widths = tuple(each.shape[1] for each in adapters.lora_b)
    has_few_rows, is_exact = num_tokens <= _TUNED["few_rows"], x.dtype is torch.float32
    block_m, block_k = 16 if has_few_rows else 32, _BLOCK_K_EXACT if is_exact else _TUNED["block_k"]
    depth_of_program = _TUNED["depth"] if has_few_rows else triton.cdiv(depth, block_k) * block_k
    num_slices, num_splits = len(widths), triton.cdiv(depth, depth_of_program)
    block_r = max(triton.next_power_of_2(rank), 16)
    shrunk = x.new_empty((num_slices, num_splits, num_tokens, block_r), dtype=torch.float32)
    use_pdl = has_dependent_launch(x.device)
    common = {
        **{"RANK": rank, "SLICES": num_slices, "BLOCK_M": block_m, "BLOCK_R": block_r},
        **{"EXACT": is_exact, "num_warps": 8 if is_exact else 4},
        **{"PDL": use_pdl, "launch_pdl": use_pdl},
    }
    programs_per_tile = min(num_slots, block_m) if num_tokens <= _TUNED["divided_rows"] else 1
    programs = triton.cdiv(num_tokens, block_m) * programs_per_tile
    _adapters_shrink_kernel[(programs, num_slices, num_splits)](
        x,
        adapters.lora_a,
        moments,
        None if norm is None else norm.scale,
        rows.rows,
        rows.slots,
        shrunk,
        num_tokens,
        num_slots,
        programs_per_tile,
        x.stride(0),
        0.0 if norm is None else norm.eps,
        X_PARTS=1 if moments is None else moments.shape[2],
        K=depth,
        DEPTH=depth_of_program,
        BLOCK_K=block_k,
        **common,
    )
    _adapters_expand_kernel[(programs, num_slices, triton.cdiv(max(widths), _TUNED["block_n"]))](
        shrunk,
        adapters.lora_b,
        widths,
        rows.rows,
        rows.slots,
        out,
        num_tokens,
        num_slots,
        programs_per_tile,
        out.stride(0),
        SPLITS=num_splits,
        ALTERNATING=alternating,
        BLOCK_N=_TUNED["block_n"],
        **common,
    )
