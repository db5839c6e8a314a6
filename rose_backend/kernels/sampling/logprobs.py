"""Log-probabilities of chosen tokens, their ranks, and the most likely tokens, in two launches that never sort.

For tokens that were chosen elsewhere; ``sampler.py`` reports those that it chooses itself. The vocabulary is cut as
there. One program per row and slice reads the logits once: the largest of each group, the slice's share of the
normalizer, and how many tokens are at least as likely as the chosen one. One program per row puts them together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import LogprobReport
from rose_backend.kernels.sampling.choose_token import (
    MINUS_INFINITY,
    largest_of_groups,
    ordered_key,
    report_top_logits,
    tile_tokens,
)
from rose_backend.kernels.sampling.sampler import load_logsumexp, store_mass, vocabulary_slices
from rose_backend.kernels.tuning.measured import constants

_WARPS = constants("sampler")["scan_warps"]
_REPORT_WARPS = constants("sampler")["choose_warps"]


@triton.jit(do_not_specialize=["logits_stride", "vocab_size", "num_slices"])
def _summarize_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    token_ids_ptr,  # [R]
    num_logprobs_ptr,  # [R]
    maxima_ptr,  # [R, num_slices * COLUMNS]  written: largest logit of each group
    masses_ptr,  # [R, 2, num_slices]  written: see store_mass
    counts_ptr,  # [R, num_slices]  written: tokens at least as likely as the chosen one
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) // num_slices).to(tl.int64)
    slice_index = tl.program_id(0) % num_slices
    if tl.load(num_logprobs_ptr + row) >= 0:
        logits_ptr += row * logits_stride
        tokens = tile_tokens(slice_index, GROUP, COLUMNS)
        valid = tokens < vocab_size
        logits = tl.load(logits_ptr + tokens, mask=valid, other=MINUS_INFINITY).to(tl.float32)
        chosen = tl.load(logits_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
        groups = (row * num_slices + slice_index) * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(maxima_ptr + groups, largest_of_groups(logits))
        store_mass(logits, masses_ptr + row * (2 * num_slices) + slice_index, num_slices)
        is_as_likely = ((logits >= chosen) & valid).to(tl.int32)
        tl.store(counts_ptr + row * num_slices + slice_index, tl.sum(is_as_likely))


@triton.jit(
    do_not_specialize=[
        "logits_stride",
        "ids_stride",
        "logprobs_stride",
        "ranks_stride",
        "vocab_size",
        "num_slices",
        "max_num_logprobs",
    ]
)
def _report_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    token_ids_ptr,  # [R]
    num_logprobs_ptr,  # [R]
    maxima_ptr,  # [R, num_slices * COLUMNS]
    masses_ptr,  # [R, 2, num_slices]
    counts_ptr,  # [R, num_slices]
    reported_ids_ptr,  # [R, 1 + K]  written
    ids_stride,
    logprobs_ptr,  # [R, 1 + K]  written
    logprobs_stride,
    ranks_ptr,  # [R]  written
    ranks_stride,
    vocab_size,
    num_slices,
    max_num_logprobs,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    REPORT_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_logprobs = tl.minimum(tl.load(num_logprobs_ptr + row), max_num_logprobs)
    if num_logprobs >= 0:
        logits_ptr += row * logits_stride
        reported_ids_ptr += row * ids_stride
        logprobs_ptr += row * logprobs_stride
        slice_tile: tl.constexpr = GROUP_TILE // COLUMNS
        normalizer = load_logsumexp(masses_ptr, row, num_slices, slice_tile)
        token = tl.load(token_ids_ptr + row)
        slices = tl.arange(0, slice_tile)
        counts = tl.load(counts_ptr + row * num_slices + slices, mask=slices < num_slices, other=0)
        tl.store(ranks_ptr + row * ranks_stride, tl.sum(counts).to(tl.int64))
        # Columns that a row has not asked for hold a token, too: front ends look all of them up.
        columns = tl.arange(0, REPORT_TILE)
        is_unused = (columns > num_logprobs) & (columns <= max_num_logprobs)
        tl.store(reported_ids_ptr + columns, tl.zeros_like(columns).to(tl.int64), mask=is_unused)
        tl.store(logprobs_ptr + columns, tl.zeros_like(columns) + MINUS_INFINITY, mask=is_unused)
        tl.store(reported_ids_ptr, token)
        tl.store(logprobs_ptr, tl.load(logits_ptr + token).to(tl.float32) - normalizer)
        groups = tl.arange(0, GROUP_TILE)
        maxima = tl.load(
            maxima_ptr + row * (num_slices * COLUMNS) + groups,
            mask=groups < num_slices * COLUMNS,
            other=MINUS_INFINITY,
        )
        report_top_logits(
            ordered_key(maxima), logits_ptr, normalizer, logprobs_ptr + 1, reported_ids_ptr + 1,
            num_logprobs, vocab_size, GROUP, COLUMNS,
        )  # fmt: skip


def report_logprobs(
    logits: torch.Tensor,  # [R, V]
    token_ids: torch.Tensor,  # [R] int64
    num_logprobs: torch.Tensor,  # [R] int32
    report: LogprobReport,  # written
) -> None:
    """``rose_backend.kernels.sampling.ops.report_logprobs`` on a GPU."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    cut = vocabulary_slices(vocab_size)

    def scratch(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=logits.device)

    inputs = (
        logits,
        logits.stride(0),
        token_ids,
        num_logprobs,
        scratch(cut.num_groups),
        scratch(2 * cut.num_slices),
        scratch(cut.num_slices, torch.int32),
    )
    options = {
        "vocab_size": vocab_size,
        "num_slices": cut.num_slices,
        "GROUP": cut.group,
        "COLUMNS": cut.columns,
    }
    _summarize_kernel[(num_rows * cut.num_slices,)](*inputs, **options, num_warps=_WARPS)
    max_num_logprobs = report.token_ids.shape[1] - 1
    _report_kernel[(num_rows,)](
        *inputs,
        report.token_ids,
        report.token_ids.stride(0),
        report.logprobs,
        report.logprobs.stride(0),
        report.ranks,
        report.ranks.stride(0),
        max_num_logprobs=max_num_logprobs,
        **options,
        GROUP_TILE=triton.next_power_of_2(cut.num_groups),
        REPORT_TILE=triton.next_power_of_2(max_num_logprobs + 1),
        num_warps=_REPORT_WARPS,
    )
