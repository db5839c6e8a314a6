"""Choosing the next token of every row in two launches that never sort.

The vocabulary is cut into slices of ``GROUP`` x ``COLUMNS`` tokens; a group is the ``GROUP`` tokens of one column.

1. One program per row and slice reads the logits once. It writes the largest score of each group, and for rows that may
   need it the winner of the slice's race (see ``race.py``).
2. One program per row. What is among the ``k`` largest scores is in one of the ``k`` groups with the largest maxima, so
   with a small top-k it searches a few thousand candidates in registers. Rows without one take the winner of all
   slices, ask whether top-p keeps it, and if not let those race again that come before it: each round rejects the loser
   and everything behind it. With top-p 0.9 nine of ten rows need no second round.

Slices, tiles and the order of every sum depend on the vocabulary only, so a row's token does not depend on its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu.choose_token import (
    choose_among_candidates,
    choose_by_rejection,
    choose_first_maximum,
    report_top_logits,
    tile_tokens,
)
from rose_backend.kernels.gpu.race import (
    GREEDY_TEMPERATURE,
    MINUS_INFINITY,
    NO_TOKEN,
    race,
    scores_of,
    tile_bits,
)
from rose_backend.kernels.sampling_tensors import SampleOutput, SamplingTensors

MAX_CANDIDATE_GROUPS = 128
"""Largest top-k that is searched among candidates, and groups that those may come from; at most ``_COLUMNS``."""

# On an H200 with 50,257 tokens; 256 columns with 8 warps: 22 us for one row and 53 us for 256, now 21 us and 50 us.
_COLUMNS = 128
_MIN_GROUP = 16
# With larger vocabularies groups grow, so that the second launch can hold all their maxima.
_MAX_GROUPS = 8192
_SCAN_WARPS = 4
_CHOOSE_WARPS = 8


@triton.jit(do_not_specialize=["vocab_size", "num_slices", "logits_stride"])
def _scan_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    filters,  # temperature, top_k, top_p, min_p: [R]
    draws,  # seed, position: [R]
    penalties,  # see scores_of
    maxima_ptr,  # [R, num_slices * COLUMNS]  written: largest score of each group
    winners_ptr,  # [R, num_slices]  written for rows that are neither greedy nor have a small top-k
    raw,  # pointers to the largest logit of each group and of each slice, and to the slices' weight sums; or None
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = (tl.program_id(0) // num_slices).to(tl.int64)
    slice_index = tl.program_id(0) % num_slices
    temperature, top_k = tl.load(filters[0] + row), tl.load(filters[1] + row)
    tokens = tile_tokens(slice_index, GROUP, COLUMNS)
    valid = tokens < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + tokens, mask=valid, other=MINUS_INFINITY)
    scores = scores_of(logits, tokens, valid, penalties, temperature, row, vocab_size)
    slice_offset = row * num_slices + slice_index
    groups = slice_offset * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(maxima_ptr + groups, tl.max(scores, axis=0))
    if raw is not None:
        raw_maxima = tl.max(logits, axis=0)
        tl.store(raw[0] + groups, raw_maxima)
        largest = tl.max(raw_maxima)
        tl.store(raw[1] + slice_offset, largest)
        # All minus infinity: the weights are 0, not NaN.
        weights = tl.exp(logits - tl.where(largest == MINUS_INFINITY, 0.0, largest))
        tl.store(raw[2] + slice_offset, tl.sum(weights))
    if (temperature >= GREEDY_TEMPERATURE) & (_is_small_top_k(top_k, vocab_size, CANDIDATES) == 0):
        seed, position = tl.load(draws[0] + row), tl.load(draws[1] + row).to(tl.int32)
        bits = tile_bits(slice_index * (GROUP * COLUMNS), seed, position, GROUP, COLUMNS)
        arrival, winner = tl.full([], MINUS_INFINITY, tl.float64), tl.full([], 0, tl.int32)
        arrival, winner = race(
            scores, tokens, bits, scores > MINUS_INFINITY, arrival, winner, seed, position, False
        )
        tl.store(winners_ptr + slice_offset, winner)


@triton.jit(do_not_specialize=["vocab_size", "num_slices", "logits_stride", "num_logprobs"])
def _choose_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    filters,  # temperature, top_k, top_p, min_p: [R]
    draws,  # seed, position: [R]
    penalties,  # see scores_of
    maxima_ptr,  # [R, num_slices * COLUMNS]
    winners_ptr,  # [R, num_slices]
    raw,  # see _scan_kernel
    groups_ptr,  # [R, CANDIDATES]  scratch
    token_ids_ptr,  # [R]  written
    logprobs,  # pointers to logprob [R], top_logprobs [R, K] and top_token_ids [R, K], written; or None
    num_logprobs,
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GROUP_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    groups = tl.arange(0, GROUP_TILE)
    is_group = groups < num_slices * COLUMNS
    group_offsets = row * (num_slices * COLUMNS) + groups
    if tl.program_id(1) == 0:
        temperature, top_k = tl.load(filters[0] + row), tl.load(filters[1] + row)
        row_filters = (top_k, tl.load(filters[2] + row), tl.load(filters[3] + row))
        row_draws = (tl.load(draws[0] + row), tl.load(draws[1] + row).to(tl.int32))
        source = (logits_ptr, penalties, temperature, row)
        maxima = tl.load(maxima_ptr + group_offsets, mask=is_group, other=MINUS_INFINITY)
        # With an infinite maximum there are no weights: the first such token is taken, as in the reference.
        if (temperature < GREEDY_TEMPERATURE) | (tl.abs(tl.max(maxima)) == float("inf")):
            token = choose_first_maximum(maxima, source, vocab_size, GROUP, COLUMNS)
        else:
            token = tl.full([], NO_TOKEN, tl.int32)
            has_small_top_k = _is_small_top_k(top_k, vocab_size, CANDIDATES)
            if has_small_top_k:
                scratch = groups_ptr + row * CANDIDATES
                token = choose_among_candidates(
                    maxima, source, row_filters, row_draws, scratch, vocab_size, GROUP, COLUMNS, CANDIDATES
                )
            if token == NO_TOKEN:
                winners = winners_ptr + row * num_slices
                token = choose_by_rejection(
                    maxima, source, row_filters, row_draws, winners, has_small_top_k == 0,
                    vocab_size, num_slices, GROUP, COLUMNS,
                )  # fmt: skip
        # Only scores that are NaN can leave nobody.
        token = tl.where(token < vocab_size, token, 0)
        tl.store(token_ids_ptr + row, token.to(tl.int64))
        if logprobs is not None:
            tl.store(
                logprobs[0] + row,
                tl.load(logits_ptr + token) - _logsumexp(raw, row, num_slices, GROUP_TILE // COLUMNS),
            )
    elif logprobs is not None:
        raw_maxima = tl.load(raw[0] + group_offsets, mask=is_group, other=MINUS_INFINITY)
        offset = row * num_logprobs
        normaliser = _logsumexp(raw, row, num_slices, GROUP_TILE // COLUMNS)
        report_top_logits(
            raw_maxima, logits_ptr, normaliser, logprobs[1] + offset, logprobs[2] + offset,
            num_logprobs, vocab_size, GROUP, COLUMNS,
        )  # fmt: skip


@triton.jit
def _is_small_top_k(top_k, vocab_size, CANDIDATES: tl.constexpr):
    return (top_k > 0) & (top_k <= CANDIDATES) & (top_k < vocab_size)


@triton.jit
def _logsumexp(raw, row, num_slices, SLICE_TILE: tl.constexpr):
    slices = tl.arange(0, SLICE_TILE)
    mask = slices < num_slices
    largest = tl.load(raw[1] + row * num_slices + slices, mask=mask, other=MINUS_INFINITY)
    sums = tl.load(raw[2] + row * num_slices + slices, mask=mask, other=0.0)
    row_max = tl.max(largest)
    return row_max + tl.log(tl.sum(tl.where(sums > 0, sums * tl.exp(largest - row_max), 0.0)))


def sample(
    logits: torch.Tensor,  # [R, V] float32
    params: SamplingTensors,
) -> SampleOutput:
    """Twin of ``rose_backend.kernels.sample``."""
    num_rows, num_logprobs = len(logits), params.num_logprobs
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_logprobs < 0:
        _launch(logits, params, token_ids, None)
        return SampleOutput(token_ids, None, None, None)
    logprobs = (
        torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        torch.empty(num_rows, num_logprobs, dtype=torch.float32, device=logits.device),
        torch.empty(num_rows, num_logprobs, dtype=torch.int64, device=logits.device),
    )
    _launch(logits, params, token_ids, logprobs)
    return SampleOutput(token_ids, *logprobs)


def _launch(
    logits: torch.Tensor,
    params: SamplingTensors,
    token_ids: torch.Tensor,
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    group = _MIN_GROUP
    while vocab_size > group * _MAX_GROUPS:
        group *= 2
    num_slices = triton.cdiv(vocab_size, group * _COLUMNS)
    num_groups = num_slices * _COLUMNS

    def scratch(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=logits.device)

    maxima, winners = scratch(num_groups), scratch(num_slices, torch.int32)
    raw = None if logprobs is None else (scratch(num_groups), scratch(num_slices), scratch(num_slices))
    groups = scratch(MAX_CANDIDATE_GROUPS, torch.int32)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    mask, counts = params.prompt_mask, params.output_counts
    inputs = (
        logits,
        logits.stride(0),
        (params.temperature, params.top_k, params.top_p, params.min_p),
        (params.seed, params.position),
        (
            None if mask is None else mask.contiguous().view(torch.uint8),
            None if counts is None else counts.contiguous(),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ),
        maxima,
        winners,
        raw,
    )
    options = {
        "vocab_size": vocab_size,
        "num_slices": num_slices,
        "GROUP": group,
        "COLUMNS": _COLUMNS,
        "CANDIDATES": MAX_CANDIDATE_GROUPS,
        # Fused products would round penalties differently from the reference.
        "enable_fp_fusion": False,
    }
    _scan_kernel[(num_rows * num_slices,)](*inputs, **options, num_warps=_SCAN_WARPS)
    num_logprobs = max(params.num_logprobs, 0)
    grid = (num_rows, 2 if num_logprobs else 1)
    _choose_kernel[grid](
        *inputs,
        groups,
        token_ids,
        logprobs,
        num_logprobs,
        **options,
        GROUP_TILE=triton.next_power_of_2(num_groups),
        num_warps=_CHOOSE_WARPS,
    )
