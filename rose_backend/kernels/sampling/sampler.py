"""Choosing the next token of every row in two launches that never sort.

The vocabulary is cut into slices, and slices into groups of ``GROUP`` tokens (see ``choose_token.py``).

1. One program per row and slice reads the logits once. It writes the largest score of each group; for rows without
   top-k and min-p the slice's winner, a Gumbel-max draw (see ``choose_token.py``), and if they have top-p its weight.
2. One program per row. Without filters the best of the slices' winners is the token. Else a lowest score is known: the
   ``k`` largest scores reach the ``k``-th largest maximum of a group; min-p is one; top-p alone keeps the best of the
   winners, or nothing after it. Groups whose maximum reaches that are read once more. A few tokens that reach it for a
   top-k are compared with each other (see ``choose_token.py``), no more than ``MAX_CANDIDATES`` are searched in
   registers. Else top-p is asked whether it keeps the drawn token, and if not one before it is drawn: each round
   rejects a token and everything after it. With top-p 0.9 nine of ten rows need no second round.

Slices, tiles and the order of every sum depend on the vocabulary only, so a row's token does not depend on its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import SampleOutput, SamplingTensors
from rose_backend.kernels.gpu_properties import has_dependent_launch
from rose_backend.kernels.sampling.choose_token import (
    GREEDY_TEMPERATURE,
    LARGEST_FACTOR,
    MINUS_INFINITY,
    NO_TOKEN,
    choose_filtered,
    choose_first_maximum,
    choose_winner,
    gumbel_max,
    largest_of_groups,
    ordered_key,
    report_top_logits,
    scores_of,
    tile_bits,
    tile_tokens,
)
from rose_backend.kernels.tuning.measured import constants

MAX_CANDIDATES = 2048
"""Tokens of a row that are searched in registers."""
_FEW_CANDIDATES = 128
"""Tokens of a row that are compared with each other."""

_TUNED = constants("sampler")
_COLUMNS = _TUNED["columns"]
_MIN_GROUP = 16
# With larger vocabularies groups grow, so that the second launch can hold all their maxima.
_MAX_GROUPS = 8192
_SCAN_WARPS = _TUNED["scan_warps"]
_LEAST_TOP_P = tl.constexpr(1e-30)
_CHOOSE_WARPS = _TUNED["choose_warps"]


@triton.jit(do_not_specialize=["vocab_size", "num_slices", "bias_width"])
def _scan_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    filters,  # temperature, top_k, top_p, min_p: [R]
    draws,  # seed, position: [R]
    penalties,  # see scores_of
    biases,  # see scores_of
    bias_width,
    maxima_ptr,  # [R, num_slices * COLUMNS]  written: largest score of each group
    masses_ptr,  # [R, 2, num_slices]  written for rows with nothing but top-p: see store_mass
    winners_ptr,  # [R, num_slices]  written for rows without top-k and min-p
    raw,  # pointers to the largest logit of each group, and to masses of the logits themselves, written; or None
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) // num_slices).to(tl.int64)
    slice_index = tl.program_id(0) % num_slices
    temperature = tl.minimum(tl.load(filters[0] + row), LARGEST_FACTOR)
    top_k, top_p, min_p = _load_filters(filters, row, vocab_size)
    tokens = tile_tokens(slice_index, GROUP, COLUMNS)
    valid = tokens < vocab_size
    # Where it is not masked, and the rows are aligned, a thread loads four logits at once.
    if (slice_index + 1) * (GROUP * COLUMNS) <= vocab_size:
        logits = tl.load(logits_ptr + row * logits_stride + tokens)
    else:
        logits = tl.load(logits_ptr + row * logits_stride + tokens, mask=valid, other=MINUS_INFINITY)
    scores = scores_of(logits, tokens, valid, (penalties, biases, bias_width), temperature, row, vocab_size)
    groups = (row * num_slices + slice_index) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(maxima_ptr + groups, largest_of_groups(scores))
    masses = row * (2 * num_slices) + slice_index
    if raw is not None:
        tl.store(raw[0] + groups, largest_of_groups(logits))
        store_mass(logits, raw[1] + masses, num_slices)
    if (temperature >= GREEDY_TEMPERATURE) & (top_k == 0) & (min_p == 0):
        if top_p < 1:
            store_mass(scores, masses_ptr + masses, num_slices)
        seed, position = tl.load(draws[0] + row), tl.load(draws[1] + row).to(tl.int32)
        bits = tile_bits(slice_index * (GROUP * COLUMNS), seed, position, GROUP // 4, COLUMNS)
        winner = gumbel_max(scores, tokens, bits, scores > MINUS_INFINITY, seed, position)
        tl.store(winners_ptr + row * num_slices + slice_index, winner)


@triton.jit(
    do_not_specialize=[
        "vocab_size", "num_slices", "logits_stride", "bias_width", "num_logprobs", "invalid_token_id"
    ]
)  # fmt: skip
def _choose_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    filters,  # temperature, top_k, top_p, min_p: [R]
    draws,  # seed, position: [R]
    penalties,  # see scores_of
    biases,  # see scores_of
    bias_width,
    maxima_ptr,  # [R, num_slices * COLUMNS]
    masses_ptr,  # [R, 2, num_slices]
    winners_ptr,  # [R, num_slices]
    raw,  # see _scan_kernel
    groups_ptr,  # [R, num_slices * COLUMNS] int32  scratch
    tokens_ptr,  # [R, CANDIDATES] int32  scratch
    scores_ptr,  # [R, CANDIDATES]  scratch
    token_ids_ptr,  # [R]  written
    logprobs,  # pointers to logprob [R], top_logprobs [R, K] and top_token_ids [R, K], written; or None
    num_logprobs,
    invalid_token_id,
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    groups = tl.arange(0, GROUP_TILE)
    is_group = groups < num_slices * COLUMNS
    group_offsets = row * (num_slices * COLUMNS) + groups
    slice_tile: tl.constexpr = GROUP_TILE // COLUMNS
    temperature = tl.minimum(tl.load(filters[0] + row), LARGEST_FACTOR)
    row_filters = _load_filters(filters, row, vocab_size)
    row_draws = (tl.load(draws[0] + row), tl.load(draws[1] + row).to(tl.int32))
    if PDL:
        # The scan before has waited for everything else before it let this kernel start.
        tl.extra.cuda.gdc_wait()
    if tl.program_id(1) == 0:
        source = (logits_ptr, (penalties, biases, bias_width), temperature, row)
        maxima = tl.load(maxima_ptr + group_offsets, mask=is_group, other=MINUS_INFINITY)
        row_max, group_keys = tl.max(maxima), ordered_key(maxima)
        winners = winners_ptr + row * num_slices
        token = _choose(
            group_keys, row_max, source, row_filters, row_draws, masses_ptr,
            (winners, groups_ptr, tokens_ptr, scores_ptr), vocab_size, num_slices,
            GROUP, COLUMNS, CANDIDATES, FEW, TILE, slice_tile,
        )  # fmt: skip
        # Whatever the filters are, it is one of the vocabulary.
        token = tl.where(token < vocab_size, token, 0)
        reported = tl.where(row_max == MINUS_INFINITY, invalid_token_id, token)
        tl.store(token_ids_ptr + row, reported.to(tl.int64))
        if logprobs is not None:
            normaliser = load_logsumexp(raw[1], row, num_slices, slice_tile)
            tl.store(logprobs[0] + row, tl.load(logits_ptr + token) - normaliser)
    elif logprobs is not None:
        raw_maxima = tl.load(raw[0] + group_offsets, mask=is_group, other=MINUS_INFINITY)
        offset = row * num_logprobs
        normaliser = load_logsumexp(raw[1], row, num_slices, slice_tile)
        report_top_logits(
            ordered_key(raw_maxima), logits_ptr, normaliser, logprobs[1] + offset, logprobs[2] + offset,
            num_logprobs, vocab_size, GROUP, COLUMNS,
        )  # fmt: skip


@triton.jit
def _choose(
    group_keys,
    row_max,
    source,
    filters,
    draws,
    masses_ptr,
    scratch,  # winners of the row; of all rows groups, tokens and scores
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
    SLICE_TILE: tl.constexpr,
):
    """Return a row's token; see ``choose_token.py`` for what it is chosen from."""
    top_k, top_p, min_p = filters
    temperature, row = source[2], source[3]
    winners, groups_ptr, tokens_ptr, scores_ptr = scratch
    # With an infinite maximum there are no weights: the first such token is taken, as in the reference.
    if (temperature < GREEDY_TEMPERATURE) | (tl.abs(row_max) == float("inf")):
        token = choose_first_maximum(group_keys, row_max, source, vocab_size, GROUP, COLUMNS)
    else:
        token, total = tl.full([], NO_TOKEN, tl.int32), tl.full([], 0.0, tl.float64)
        has_winners = (top_k == 0) & (min_p == 0)
        if has_winners:
            token = choose_winner(source, draws, winners, vocab_size, num_slices, SLICE_TILE)
            if top_p < 1:
                total = _total_mass(masses_ptr, row, row_max, num_slices, SLICE_TILE)
        if (has_winners == 0) | (top_p < 1):
            groups_ptr += row * (num_slices * COLUMNS)
            row_scratch = (winners, groups_ptr, tokens_ptr + row * CANDIDATES, scores_ptr + row * CANDIDATES)
            token = choose_filtered(
                group_keys, row_max, source, filters, draws, token, total, row_scratch, vocab_size,
                num_slices, GROUP, COLUMNS, CANDIDATES, FEW, TILE,
            )  # fmt: skip
    return token


@triton.jit
def _load_filters(filters, row, vocab_size):
    """Return the row's (top_k, top_p, min_p), top_k as 0 where it keeps everything."""
    top_k = tl.load(filters[1] + row)
    top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, 0)
    return top_k, tl.maximum(tl.load(filters[2] + row), _LEAST_TOP_P), tl.load(filters[3] + row)


@triton.jit
def store_mass(values, mass_ptr, num_slices):
    """Write a slice's largest value, and ``num_slices`` further its sum of exp(value - largest)."""
    largest = tl.max(values)
    # All minus infinity: the weights are 0, not NaN.
    weights = tl.exp(values - tl.where(largest == MINUS_INFINITY, 0.0, largest))
    tl.store(mass_ptr, largest)
    tl.store(mass_ptr + num_slices, tl.sum(weights))


@triton.jit
def _total_mass(masses_ptr, row, row_max, num_slices, SLICE_TILE: tl.constexpr):
    """Return the row's sum of exp(value - row_max), float64."""
    slices = tl.arange(0, SLICE_TILE)
    mask = slices < num_slices
    offsets = row * (2 * num_slices) + slices
    largest = tl.load(masses_ptr + offsets, mask=mask, other=MINUS_INFINITY)
    sums = tl.load(masses_ptr + offsets + num_slices, mask=mask, other=0.0)
    return tl.sum(tl.where(sums > 0, sums * tl.exp(largest - row_max), 0.0).to(tl.float64))


@triton.jit
def load_logsumexp(masses_ptr, row, num_slices, SLICE_TILE: tl.constexpr):
    """Return the row's log of the sum of exp(value), float32, from what ``store_mass`` has written."""
    slices = tl.arange(0, SLICE_TILE)
    largest = tl.load(
        masses_ptr + row * (2 * num_slices) + slices, mask=slices < num_slices, other=MINUS_INFINITY
    )
    row_max = tl.max(largest)
    total = _total_mass(masses_ptr, row, row_max, num_slices, SLICE_TILE)
    return row_max + tl.log(total.to(tl.float32))


class VocabularySlices(NamedTuple):
    """How a vocabulary is cut."""

    group: int
    """Tokens of a group."""
    columns: int
    """Groups of a slice."""
    num_slices: int

    @property
    def num_groups(self) -> int:
        """Of all slices."""
        return self.num_slices * self.columns


def vocabulary_slices(vocab_size: int) -> VocabularySlices:
    """Return how a vocabulary is cut: as few tokens to a group as programs can hold the maxima of."""
    group = _MIN_GROUP
    while vocab_size > group * _MAX_GROUPS:
        group *= 2
    return VocabularySlices(group, _COLUMNS, triton.cdiv(vocab_size, group * _COLUMNS))


def sample(
    logits: torch.Tensor,  # [R, V] float32
    params: SamplingTensors,
) -> SampleOutput:
    """``rose_backend.kernels.sample`` on a GPU."""
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
    cut = vocabulary_slices(vocab_size)
    num_slices, num_groups = cut.num_slices, cut.num_groups

    def scratch(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=logits.device)

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    is_plain = params.prompt_mask is None and params.output_counts is None
    penalties, biases = _adjustments(params)
    inputs = (
        logits,
        logits.stride(0),
        (params.temperature, params.top_k, params.top_p, params.min_p),
        (params.seed, params.position),
        penalties,
        biases,
        0 if biases is None else biases[0].shape[1],
        scratch(num_groups),
        scratch(2 * num_slices),
        scratch(num_slices, torch.int32),
        None if logprobs is None else (scratch(num_groups), scratch(2 * num_slices)),
    )
    options = {
        "vocab_size": vocab_size,
        "num_slices": num_slices,
        "GROUP": cut.group,
        "COLUMNS": cut.columns,
        "PDL": has_dependent_launch(logits.device),
        "launch_pdl": has_dependent_launch(logits.device),
        # Fused products would round penalties differently from the reference.
        "enable_fp_fusion": False,
    }
    _scan_kernel[(num_rows * num_slices,)](*inputs, **options, num_warps=_SCAN_WARPS)
    num_logprobs = max(params.num_logprobs, 0)
    grid = (num_rows, 2 if num_logprobs else 1)
    _choose_kernel[grid](
        *inputs,
        scratch(num_groups, torch.int32),
        scratch(MAX_CANDIDATES, torch.int32),
        scratch(MAX_CANDIDATES),
        token_ids,
        logprobs,
        num_logprobs,
        params.invalid_token_id,
        **options,
        CANDIDATES=MAX_CANDIDATES,
        FEW=min(_FEW_CANDIDATES, MAX_CANDIDATES),
        # Penalties take further registers.
        TILE=MAX_CANDIDATES if is_plain else MAX_CANDIDATES // 2,
        GROUP_TILE=triton.next_power_of_2(num_groups),
        num_warps=_CHOOSE_WARPS if is_plain else 2 * _CHOOSE_WARPS,
        # Two programs of 8 warps fit a multiprocessor.
        maxnreg=128,
    )


def _adjustments(
    params: SamplingTensors,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor, ...] | None]:
    """Return penalties and biases as ``scores_of`` takes them."""
    mask, counts, biases = params.prompt_mask, params.output_counts, None
    if params.bias_token_ids is not None and params.bias is not None:
        biases = (params.bias_token_ids.contiguous(), params.bias.contiguous())
    penalties = (
        None if mask is None else mask.contiguous().view(torch.uint8),
        None if counts is None else counts.contiguous(),
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    return penalties, biases
