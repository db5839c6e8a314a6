"""Choosing the next token of every row in two launches that never sort.

The vocabulary is divided into slices, and slices into groups of ``GROUP`` tokens (see below).

1. One program per row and slice reads the logits once. It writes the largest score of each group; for rows without
   top-k and min-p the slice's winner, a Gumbel-max draw (see below), and if they have top-p its weight.
2. One program per row. Without filters the best of the slices' winners is the token. Else a lowest score is known: the
   ``k`` largest scores reach the ``k``-th largest maximum of a group; min-p is one; top-p alone keeps the best of the
   winners, or nothing after it. Groups whose maximum reaches that are read once more. A few tokens that reach it for a
   top-k are compared with each other (see below), no more than ``MAX_CANDIDATES`` are searched in
   registers. Else top-p is asked whether it keeps the drawn token, and if not one before it is drawn: each round
   rejects a token and everything after it. With top-p 0.9 nine of ten rows need no second round.

Slices, tiles and the order of every sum depend on the vocabulary only, so a row's token does not depend on its batch.

The Gumbel-max trick: the token with the largest ``score_i - log(E_i)``, ``E_i`` exponential noise, is a draw from
``softmax(score)``. Float32 finds the tokens that may have the largest one, float64 decides among them, so the token is
the one that float64 throughout would give.

A slice of the vocabulary is ``GROUP`` x ``COLUMNS`` tokens, read as ``GROUP / 4`` rows of ``COLUMNS`` quads of
neighbors; group ``g`` is the quads in column ``g % COLUMNS`` of slice ``g // COLUMNS``. ``source`` is what a row's
scores are made of: its logits [V], adjustments as in ``scores_of``, temperature, row. ``filters`` is (top_k or 0,
top_p, min_p) and ``draws`` is (seed, position), numbers of this row. ``row_max`` is its largest score, ``group_keys``
are the keys (see ``ordered_key``) of the largest scores of its groups.

What few rows need is called, not inlined: a pass of Triton's compiler takes time that grows faster than a function, and
this kernel is what an engine's first start waits for.

``gather_few`` and ``choose_among_few`` draw from the few tokens that a small top-k may keep: found in one go, then each
compared with each other. Between two such draws a step of a model runs, so a GPU reads this code from memory again each
time and is as fast as there are few instructions: no searches, no unrolled loops.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from rose_backend.kernels.arguments import LogprobReport, SampleOutput, SamplingTensors
from rose_backend.kernels.gpu_properties import has_dependent_launch
from rose_backend.kernels.tuning.measured import constants


@triton.jit
def tile_tokens(slice_index, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tokens of one slice, [GROUP / 4, COLUMNS, 4]; the last slice's go beyond the vocabulary."""
    rows = tl.arange(0, GROUP // 4)[:, None, None] * (COLUMNS * 4)
    return (
        slice_index * (GROUP * COLUMNS)
        + rows
        + tl.arange(0, COLUMNS)[None, :, None] * 4
        + tl.arange(0, 4)[None, None, :]
    )


@triton.jit
def group_tokens(groups, members, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tokens of groups; ``members`` counts those of one group, 0 to ``GROUP - 1``, in order of token id."""
    first_tokens = groups // COLUMNS * (GROUP * COLUMNS) + groups % COLUMNS * 4
    return first_tokens + members // 4 * (COLUMNS * 4) + members % 4


@triton.jit
def largest_of_groups(values):
    """Return the largest value of each group, [COLUMNS], of a slice's values [GROUP / 4, COLUMNS, 4]."""
    return tl.max(tl.max(values, axis=0), axis=1)


@triton.jit
def load_scores(source, tokens, mask, vocab_size):
    """Return the scores of any tokens; minus infinity where masked."""
    logits_ptr, adjustments, temperature, row = source
    logits = tl.load(logits_ptr + tokens, mask=mask, other=MINUS_INFINITY)
    return scores_of(logits, tokens, mask, adjustments, temperature, row, vocab_size)


@triton.jit
def load_tile(source, slice_index, vocab_size, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return tokens and scores of one slice, [GROUP / 4, COLUMNS, 4]; minus infinity beyond the vocabulary."""
    tokens = tile_tokens(slice_index, GROUP, COLUMNS)
    return tokens, load_scores(source, tokens, tokens < vocab_size, vocab_size)


NO_TOKEN = tl.constexpr(2**31 - 1)
MINUS_INFINITY = tl.constexpr(float("-inf"))
GREEDY_TEMPERATURE = tl.constexpr(1e-5)
LARGEST_FACTOR = tl.constexpr(1e20)
_LEAST_FACTOR = tl.constexpr(1e-20)
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def scores_of(logits, tokens, valid, adjustments, temperature, row, vocab_size):
    """Return logits after processors, penalties, temperature, each operation rounded as in the reference, but no NaN.

    Args:
        adjustments: (penalties, processors, bias_width). ``penalties`` are pointers to prompt mask and
            output counts [R, V], each or None, and to the repetition, presence and frequency penalty [R].
            ``processors`` is None or pointers to entries [R], bitmask [N, V / 32], token ids and bias [N, bias_width].
    """
    penalties, processors, bias_width = adjustments
    if processors is not None:
        entry = tl.load(processors[0] + row).to(tl.int64)
        if entry >= 0:
            words = tl.load(
                processors[1] + entry * ((vocab_size + 31) // 32) + tokens // 32, mask=valid, other=0
            )
            logits = tl.where(((words >> tokens % 32) & 1) != 0, logits, MINUS_INFINITY)
            bias = entry * bias_width
            logits = _add_bias(
                logits, tokens, processors[2] + bias, processors[3] + bias, vocab_size, bias_width
            )
    scores = _add_penalties(logits, tokens, valid, penalties, row, vocab_size)
    if (temperature >= GREEDY_TEMPERATURE) & (temperature != 1.0):
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
    # The larger one of NaN and a number is the number.
    return tl.maximum(scores, MINUS_INFINITY)


@triton.jit
def _add_bias(logits, tokens, token_ids_ptr, bias_ptr, vocab_size, bias_width):
    if tl.load(token_ids_ptr) < vocab_size:
        # The last place whose token is not above this one, or the first.
        place, step = tl.zeros_like(tokens), bias_width // 2
        while step > 0:
            is_above = tl.load(token_ids_ptr + place + step) > tokens
            place = tl.where(is_above, place, place + step)
            step = step // 2
        is_biased = tl.load(token_ids_ptr + place) == tokens
        logits = tl.where(is_biased, logits + tl.load(bias_ptr + place), logits)
    return logits


@triton.jit
def _add_penalties(logits, tokens, valid, penalties, row, vocab_size):
    mask_ptr, counts_ptr, repetition_ptr, presence_ptr, frequency_ptr = penalties
    scores = logits
    if mask_ptr is not None or counts_ptr is not None:
        repetition, presence = tl.load(repetition_ptr + row), tl.load(presence_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            repetition = tl.minimum(tl.maximum(repetition, _LEAST_FACTOR), LARGEST_FACTOR)
            repeated = tokens < 0
            if counts_ptr is not None:
                counts = tl.load(counts_ptr + row * vocab_size + tokens, mask=valid, other=0)
                repeated = counts > 0
            if mask_ptr is not None:
                repeated = repeated | (
                    tl.load(mask_ptr + row * vocab_size + tokens, mask=valid, other=0) != 0
                )
            factor = tl.where(logits > 0, tl.div_rn(repetition * 0.0 + 1.0, repetition), repetition)
            scores = tl.where(repeated, logits * factor, logits)
            if counts_ptr is not None:
                scores -= frequency * counts.to(tl.float32)
                scores -= tl.where(counts > 0, presence, 0.0)
    return scores


@triton.jit
def ordered_key(values):
    """Map float32 to int32 in the same order; both zeros are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_key(keys):
    """Return the float32 numbers of ``ordered_key``."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def tile_bits(first_token, seed, position, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the random bits of tokens ``first_token + arange(4 * ROWS * COLUMNS)``, uint32 [ROWS, COLUMNS, 4]."""
    quads = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :] + first_token // 4
    zero = quads * 0
    word_0, word_1, word_2, word_3 = tl.philox(seed, quads, zero + position, zero, zero)
    # join adds an innermost dimension, so that the last two count the words in order.
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    return words.reshape([ROWS, COLUMNS, 4])


@triton.jit
def bits_of(tokens, seed, position):
    """Return the random bits of any tokens, uint32."""
    zero = tokens * 0
    word_0, word_1, word_2, word_3 = tl.philox(seed, tokens >> 2, zero + position, zero, zero)
    return tl.where(
        (tokens & 2) == 0,
        tl.where((tokens & 1) == 0, word_0, word_1),
        tl.where((tokens & 1) == 0, word_2, word_3),
    )


@triton.jit
def perturbed_score(score, token, seed, position):
    """Return ``score - log(noise)`` in float64, as the reference computes it."""
    noise = -tl.log((bits_of(token, seed, position).to(tl.float64) + 0.5) * 2.3283064365386963e-10)
    return score.to(tl.float64) - tl.log(noise)


@triton.jit
def _fast_log(x):
    # One instruction, to 2**-22 of its result or, around 1, to an absolute 2**-22.6. The interpreter has no such.
    if _IS_INTERPRETED:
        log = tl.log(x)
    else:
        log = libdevice.fast_logf(x)
    return log


@triton.jit
def gumbel(bits):
    """Return ``-log(noise)`` in float32, to an absolute 1e-5."""
    # Noise is -log(u). Near 1, where the largest results are, u = 1 - rest keeps its digits only as the rest.
    is_near_one = (bits >> 28) == 15
    rest = (tl.where(is_near_one, bits ^ 0xFFFFFFFF, bits).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = rest * (1.0 + rest * (0.5 + rest * (1.0 / 3 + rest * (0.25 + rest * 0.2))))
    return -_fast_log(tl.where(is_near_one, series, -_fast_log(rest)))


@triton.jit
def gumbel_max(scores, tokens, bits, kept, seed, position):
    """Return the kept token with the largest score plus Gumbel noise, of equal ones the lowest, or NO_TOKEN."""
    perturbed = tl.where(kept, scores + gumbel(bits), MINUS_INFINITY)
    top = tl.max(perturbed)
    # Rounding of the sum is relative to its size, that of the noise is not.
    near = kept & (perturbed >= top - (4e-5 + 4e-7 * tl.abs(top)))
    token = tl.min(tl.where(near, tokens, NO_TOKEN))
    best, best_token = tl.full([], MINUS_INFINITY, tl.float64), tl.full([], NO_TOKEN, tl.int32)
    if tl.min(tl.where(near & (tokens > token), tokens, NO_TOKEN)) == NO_TOKEN:
        best_token, token = token, best_token
    while token < NO_TOKEN:
        score = tl.max(tl.where(tokens == token, scores, MINUS_INFINITY))
        exact = perturbed_score(score, token, seed, position)
        best_token = tl.where(exact > best, token, best_token)
        best = tl.maximum(exact, best)
        token = tl.min(tl.where(near & (tokens > token), tokens, NO_TOKEN))
    return best_token


@triton.jit
def kth_largest_key(keys, k, most, low, high):
    """Return a key that exactly the ``k`` largest and what ties with the last of them reach.

    If fewer than ``k`` reach ``low``, all that do reach the result.

    Args:
        most: ``k``; or more, and any key that at least ``k`` and at most that many reach is as good.
        low, high: int32; no key is above ``high``, and at least one reaches ``low``.
    """
    low = tl.min(tl.where(keys >= low, keys, high)).to(tl.int64)
    high = high.to(tl.int64) + 1
    while high - low > 1:
        third = (high - low + 2) // 3
        first, second = low + third, tl.minimum(low + 2 * third, high - 1)
        # Both counts in one sum: there are fewer than 2**15 keys.
        reached = tl.where(keys >= second.to(tl.int32), 65537, (keys >= first.to(tl.int32)).to(tl.int32))
        counts = tl.sum(reached)
        first_count, second_count = counts & 0xFFFF, counts >> 16
        high = tl.where(second_count >= k, high, tl.where(first_count >= k, second, first))
        low = tl.where(second_count >= k, second, tl.where(first_count >= k, first, low))
        # No need to know the smallest such key.
        count = tl.where(second_count >= k, second_count, first_count)
        high = tl.where((count >= k) & (count <= most), low + 1, high)
    return low.to(tl.int32)


@triton.jit
def keep_top_p(scores, keys, tokens, kept, row_max, lowest, top_p, total, vocab_size):
    """Return which of the kept tokens top-p keeps: most likely first, of equal ones the lower id; all if too few.

    Args:
        lowest: no kept token has a lower key.
        total: weight that ``top_p`` is a share of, that of ``row_max`` is 1; 0 takes that of the kept tokens.
    """
    # Weights in units of 2**-36 and, below them, a count: sums are exact, and one sum gives both.
    weights = (tl.exp(scores - row_max) * 68719476736.0).to(tl.int64)
    parts = tl.where(kept, weights * 16384 + 1, 0)
    part_below, part_above = tl.sum(parts), tl.full([], 0, tl.int64)
    total = tl.where(total > 0, total * 68719476736.0, (part_below >> 14).to(tl.float64))
    needed = top_p.to(tl.float64) * total
    if (part_below >> 14).to(tl.float64) >= needed:
        # The key at which top-p ends is above low and up to high: more than enough weight is above the one, too little
        # above the other. One token or one key in between is it.
        low, high = lowest.to(tl.int64) - 1, ordered_key(row_max).to(tl.int64)
        while (high - low > 1) & ((part_below & 16383) - (part_above & 16383) > 1):
            middle = (low + high) >> 1
            part = tl.sum(tl.where(keys > middle.to(tl.int32), parts, 0))
            is_enough = (part >> 14).to(tl.float64) >= needed
            low, part_below = tl.where(is_enough, middle, low), tl.where(is_enough, part, part_below)
            high, part_above = tl.where(is_enough, high, middle), tl.where(is_enough, part_above, part)
        edge = tl.max(tl.where(kept & (keys <= high.to(tl.int32)), keys, lowest))
        num_ties = (part_below & 16383) - (part_above & 16383)
        last_token = tl.full([], 0, tl.int32) + vocab_size
        if num_ties > 1:
            weight = ((part_below >> 14) - (part_above >> 14)).to(tl.float64) / num_ties.to(tl.float64)
            num_kept = tl.ceil((needed - (part_above >> 14).to(tl.float64)) / weight)
            num_kept = tl.minimum(tl.maximum(num_kept, 1.0), num_ties.to(tl.float64)).to(tl.int32)
            negated = tl.where(kept & (keys == edge), -tokens, -NO_TOKEN)
            last_token = -kth_largest_key(negated, num_kept, num_kept, -last_token, last_token * 0)
        kept = kept & ((keys > edge) | ((keys == edge) & (tokens <= last_token)))
    return kept


_CHUNK = tl.constexpr(32)


@triton.jit
def gather_few(
    group_keys,
    num_groups,
    source,
    bound,
    scratch,
    vocab_size,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the tokens that reach ``bound`` and their scores side by side, at most ``FEW``; return how many reach it.

    Args:
        num_groups: those that reach it, at most ``TILE / GROUP``.
    """
    is_chosen = (group_keys >= bound).to(tl.int32)
    tl.store(scratch[1] + _places_of(is_chosen), tl.arange(0, group_keys.shape[0]), mask=is_chosen > 0)
    tl.debug_barrier()
    members = tl.arange(0, TILE)
    valid = members // GROUP < num_groups
    groups = tl.load(scratch[1] + members // GROUP, mask=valid, other=0)
    tokens = group_tokens(groups, members % GROUP, GROUP, COLUMNS)
    scores = load_scores(source, tokens, valid & (tokens < vocab_size), vocab_size)
    is_candidate = (ordered_key(scores) >= bound).to(tl.int32)
    places = _places_of(is_candidate)
    has_place = (is_candidate > 0) & (places < FEW)
    tl.store(scratch[2] + places, tokens, mask=has_place)
    tl.store(scratch[3] + places, scores, mask=has_place)
    tl.debug_barrier()
    return tl.sum(is_candidate)


@triton.jit
def _places_of(flags):
    """Return how many of the flags (int32 0 or 1) before each are set."""
    QUADS: tl.constexpr = flags.shape[0] // 4
    # Four neighbours lie in one thread. Only their sums are counted across threads.
    evens, odds = tl.split(tl.reshape(flags, [QUADS, 2, 2]))
    first_pair, second_pair = tl.split(evens + odds)
    in_quad = first_pair + second_pair
    before = tl.cumsum(in_quad) - in_quad
    before_pair = tl.join(before, before + first_pair)
    return tl.reshape(tl.join(before_pair, before_pair + evens), [4 * QUADS])


@triton.jit(noinline=True)
def choose_among_few(num_candidates, row_max, top_k, top_p, draws, scratch, FEW: tl.constexpr):
    """Draw one of at most ``FEW`` candidates, which are all that the filters may keep; ``top_k`` is not 0."""
    seed, position = draws
    places = tl.arange(0, FEW)
    tokens, scores = _load_candidates(scratch, places, num_candidates)
    keys, weights = ordered_key(scores), _candidate_weights(scores, row_max)
    CHUNK: tl.constexpr = FEW if FEW < _CHUNK else _CHUNK
    sums = tl.zeros([CHUNK, FEW], tl.int64)
    for start in range(0, num_candidates, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_tokens, other_scores = _load_candidates(scratch, others, num_candidates)
        other_keys, other_weights = ordered_key(other_scores), _candidate_weights(other_scores, row_max)
        is_higher = other_keys[:, None] > keys[None, :]
        is_tie = other_keys[:, None] == keys[None, :]
        comes_before = is_higher | (is_tie & (other_tokens[:, None] < tokens[None, :]))
        # One sum of both: the weight of those that come before, and how many are higher.
        sums += tl.where(comes_before, (other_weights * 256)[:, None], 0) + is_higher.to(tl.int64)
    sums = tl.sum(sums, axis=0)
    # Equal ones are all kept by top-k, or none.
    kept = (sums & 255) < top_k
    if top_p < 1:
        needed = top_p.to(tl.float64) * tl.sum(tl.where(kept, weights, 0)).to(tl.float64)
        kept = kept & ((sums >> 8).to(tl.float64) < needed)
    bits = bits_of(tokens, seed, position)
    token = gumbel_max(scores, tokens, bits, kept, seed, position)
    return token


@triton.jit
def _load_candidates(scratch, places, num_candidates):
    valid = places < num_candidates
    tokens = tl.load(scratch[2] + places, mask=valid, other=NO_TOKEN)
    return tokens, tl.load(scratch[3] + places, mask=valid, other=MINUS_INFINITY)


@triton.jit
def _candidate_weights(scores, row_max):
    """Return exp(scores - row_max) in units of 2**-36, int64: sums are exact."""
    return (tl.exp(scores - row_max) * 68719476736.0).to(tl.int64)


@triton.jit
def choose_first_maximum(group_keys, row_max, source, vocab_size, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the lowest token with the row's largest score."""
    groups = tl.arange(0, group_keys.shape[0])
    slice_index = tl.min(tl.where(group_keys == ordered_key(row_max), groups // COLUMNS, NO_TOKEN))
    tokens, scores = load_tile(source, slice_index, vocab_size, GROUP, COLUMNS)
    return tl.min(tl.where((scores == row_max) & (tokens < vocab_size), tokens, NO_TOKEN))


@triton.jit
def choose_winner(source, draws, winners_ptr, vocab_size, num_slices, SLICE_TILE: tl.constexpr):
    """Return which of the slices' winners has the largest perturbed score; NO_TOKEN if there is none."""
    seed, position = draws
    slices = tl.arange(0, SLICE_TILE)
    tokens = tl.load(winners_ptr + slices, mask=slices < num_slices, other=NO_TOKEN)
    mask = tokens < vocab_size
    perturbed = perturbed_score(load_scores(source, tokens, mask, vocab_size), tokens, seed, position)
    return tl.min(tl.where(mask & (perturbed == tl.max(perturbed)), tokens, NO_TOKEN))


@triton.jit
def choose_filtered(
    group_keys,
    row_max,
    source,
    filters,
    draws,
    token,
    total,
    scratch,  # int32: winners [num_slices], groups [all], tokens [CANDIDATES]; float32: scores [CANDIDATES]
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Draw a token of a row with filters.

    Nothing that is kept has a lower key than ``bound``. The fewer tokens reach it, the faster is the draw.

    Args:
        token: draw from all tokens, where there is neither top-k nor min-p and slices have winners. Else NO_TOKEN.
        total: weight of all tokens, that of the largest score is 1. Without ``token`` 0.
        FEW: candidates that are compared with each other.
        TILE: tokens that are read at once.
    """
    top_k, top_p, min_p = filters
    lowest = ordered_key(tl.full([], MINUS_INFINITY, tl.float32)) + 1
    log_min_p = tl.log(min_p)
    threshold = row_max + log_min_p
    # Among large scores there are few numbers: rounded down, the threshold itself would be a score that is too low.
    is_rounded_down = threshold - row_max < log_min_p
    lowest = tl.maximum(lowest, ordered_key(threshold) + is_rounded_down.to(tl.int32))
    bound, num_candidates = lowest, tl.full([], FEW + 1, tl.int32)
    if token < vocab_size:
        # If top-p keeps that token, no other can be drawn; if not, nothing after it is kept.
        bound = _key_of(source, token, vocab_size)
    elif top_k > 0:
        # The k groups with the largest maxima hold at least one score each that reaches the k-th of those. A few groups
        # more do no harm while all that reach it are few.
        most = tl.maximum(top_k, tl.minimum(top_k + FEW // 5, FEW - FEW // 5))
        kth = kth_largest_key(group_keys, top_k, most, lowest, ordered_key(row_max))
        num_groups = tl.sum((group_keys >= kth).to(tl.int32))
        bound = tl.where(num_groups >= top_k, kth, lowest)
        if (num_groups >= top_k) & (num_groups <= TILE // GROUP):
            num_candidates = gather_few(
                group_keys, num_groups, source, bound, scratch, vocab_size, GROUP, COLUMNS, FEW, TILE
            )
    if num_candidates <= FEW:
        token = choose_among_few(num_candidates, row_max, top_k, top_p, draws, scratch, FEW)
    else:
        token = _choose_among_many(
            group_keys, row_max, source, lowest, bound, filters, draws, token, total, scratch, vocab_size,
            num_slices, GROUP, COLUMNS, CANDIDATES, TILE,
        )  # fmt: skip
    return token


@triton.jit
def _choose_among_many(
    group_keys,
    row_max,
    source,
    lowest,
    bound,
    filters,
    draws,
    token,
    total,
    scratch,
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
):
    """As ``choose_filtered``; what is kept reaches ``bound``, or ``lowest`` and comes before ``token``."""
    top_k, top_p, _ = filters
    num_candidates, before = _gather_candidates(
        group_keys, row_max, source, bound, token, scratch, vocab_size, GROUP, COLUMNS, CANDIDATES, TILE
    )
    if num_candidates <= CANDIDATES:
        token = _choose_among_candidates(
            num_candidates, row_max, bound, filters, draws, total, scratch, vocab_size, CANDIDATES
        )
    elif (token == NO_TOKEN) | (before >= top_p.to(tl.float64) * total):
        if top_k > 0:
            bound = _kth_largest_key_of_row(row_max, source, top_k, bound, vocab_size, TILE)
            lowest = bound
        token = _choose_by_rejection(
            row_max, source, lowest, top_p, draws, bound, token, scratch[0], vocab_size, num_slices,
            GROUP, COLUMNS, TILE, group_keys.shape[0] // COLUMNS,
        )  # fmt: skip
    return token


@triton.jit
def _gather_candidates(
    group_keys,
    row_max,
    source,
    bound,
    token,
    scratch,
    vocab_size,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the tokens that reach ``bound`` and their scores side by side, if there are no more than ``CANDIDATES``.

    Returns:
        Their number, and the weight (float64) of those that have a higher key, or the same and come before ``token``.
    """
    _, groups_ptr, tokens_ptr, scores_ptr = scratch
    is_chosen = group_keys >= bound
    num_groups = tl.sum(is_chosen.to(tl.int32))
    group_places = tl.cumsum(is_chosen.to(tl.int32)) - 1
    # All threads have read what an earlier round left.
    tl.debug_barrier()
    tl.store(groups_ptr + group_places, tl.arange(0, group_keys.shape[0]), mask=is_chosen)
    tl.debug_barrier()
    num_candidates, weights = tl.full([], 0, tl.int32), tl.zeros([TILE], tl.float32)
    for first_group in range(0, num_groups, TILE // GROUP):
        members = tl.arange(0, TILE)
        places = first_group + members // GROUP
        valid = places < num_groups
        groups = tl.load(groups_ptr + places, mask=valid, other=0)
        tokens = group_tokens(groups, members % GROUP, GROUP, COLUMNS)
        scores = load_scores(source, tokens, valid & (tokens < vocab_size), vocab_size)
        keys = ordered_key(scores)
        is_candidate = keys >= bound
        comes_before = (keys > bound) | (is_candidate & (tokens < token))
        weights += tl.where(comes_before, tl.exp(scores - row_max), 0.0)
        if num_candidates <= CANDIDATES:
            slots = num_candidates + tl.cumsum(is_candidate.to(tl.int32)) - 1
            tl.store(tokens_ptr + slots, tokens, mask=is_candidate & (slots < CANDIDATES))
            tl.store(scores_ptr + slots, scores, mask=is_candidate & (slots < CANDIDATES))
        num_candidates += tl.sum(is_candidate.to(tl.int32))
    tl.debug_barrier()
    return num_candidates, tl.sum(weights).to(tl.float64)


@triton.jit(noinline=True)
def _choose_among_candidates(
    num_candidates,
    row_max,
    lowest,
    filters,
    draws,
    total,
    scratch,
    vocab_size,
    CANDIDATES: tl.constexpr,
):
    """Draw one of the candidates that reach ``lowest``, which are all that the filters may keep."""
    top_k, top_p, _ = filters
    seed, position = draws
    slots = tl.arange(0, CANDIDATES)
    valid = slots < num_candidates
    tokens = tl.load(scratch[2] + slots, mask=valid, other=NO_TOKEN)
    scores = tl.load(scratch[3] + slots, mask=valid, other=MINUS_INFINITY)
    keys = ordered_key(scores)
    if top_k > 0:
        lowest = kth_largest_key(keys, top_k, top_k, lowest, ordered_key(row_max))
    kept = keys >= lowest
    if top_p < 1:
        kept = keep_top_p(scores, keys, tokens, kept, row_max, lowest, top_p, total, vocab_size)
    bits = bits_of(tokens, seed, position)
    token = gumbel_max(scores, tokens, bits, kept, seed, position)
    return token


@triton.jit(noinline=True)
def _choose_by_rejection(
    row_max,
    source,
    lowest,
    top_p,
    draws,
    end_key,
    end_token,
    winners_ptr,  # [num_slices]
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SLICE_TILE: tl.constexpr,
):
    """Draw from any number of tokens that reach ``lowest`` and come before an end, see ``_draw_before``.

    Top-p keeps a drawn token if less than enough weight comes before it (higher keys, then lower tokens).
    """
    token = tl.full([], NO_TOKEN, tl.int32)
    is_searching = row_max == row_max
    while is_searching:
        _draw_before(
            source, draws, end_key, end_token, winners_ptr, vocab_size, num_slices, GROUP, COLUMNS, SLICE_TILE
        )
        token = choose_winner(source, draws, winners_ptr, vocab_size, num_slices, SLICE_TILE)
        is_searching = (top_p < 1) & (token < vocab_size)
        if is_searching:
            end_key, end_token = _key_of(source, token, vocab_size), token
            before, total = _weights(source, row_max, lowest, end_key, token, vocab_size, 2 * TILE)
            # The most likely token is always kept.
            is_searching = (before >= top_p.to(tl.float64) * total) & (before > 0)
    return token


@triton.jit(noinline=True)
def _kth_largest_key_of_row(row_max, source, k, lowest, vocab_size, TILE: tl.constexpr):
    """As ``kth_largest_key``, for all scores of a row."""
    low, high = lowest.to(tl.int64), ordered_key(row_max).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        count = tl.full([], 0, tl.int32)
        for first_token in range(0, vocab_size, TILE):
            tokens = first_token + tl.arange(0, TILE)
            scores = load_scores(source, tokens, tokens < vocab_size, vocab_size)
            count += tl.sum((ordered_key(scores) >= middle.to(tl.int32)).to(tl.int32))
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle + 1, middle))
    return low.to(tl.int32)


@triton.jit
def _weights(source, row_max, lowest, key, token, vocab_size, TILE: tl.constexpr):
    """Return the weight before ``token``, whose key is ``key``, and that of all keys from ``lowest`` up; float64."""
    before, total = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for first_token in range(0, vocab_size, TILE):
        tokens = first_token + tl.arange(0, TILE)
        scores = load_scores(source, tokens, tokens < vocab_size, vocab_size)
        keys = ordered_key(scores)
        weights = tl.where(keys >= lowest, tl.exp(scores - row_max), 0.0)
        comes_before = (keys > key) | ((keys == key) & (tokens < token))
        total += tl.sum(weights).to(tl.float64)
        before += tl.sum(tl.where(comes_before, weights, 0.0)).to(tl.float64)
    return before, total


@triton.jit
def _draw_before(
    source,
    draws,
    key,
    token,
    winners_ptr,  # [num_slices]
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICE_TILE: tl.constexpr,
):
    """Write each slice's winner among higher keys than ``key``, and of equal ones lower tokens than ``token``.

    With NO_TOKEN no slice has a winner yet. Else all have, with a later end, and only those slices are drawn from again
    whose winner is not before this one.
    """
    seed, position = draws
    slices = tl.arange(0, SLICE_TILE)
    must_draw = slices < num_slices
    if token < vocab_size:
        winners = tl.load(winners_ptr + slices, mask=must_draw, other=NO_TOKEN)
        winner_keys = ordered_key(load_scores(source, winners, winners < vocab_size, vocab_size))
        is_behind = (winner_keys < key) | ((winner_keys == key) & (winners >= token))
        must_draw = (winners < vocab_size) & is_behind
        # All threads have read the old ones.
        tl.debug_barrier()
    slice_index = tl.min(tl.where(must_draw, slices, NO_TOKEN))
    while slice_index < num_slices:
        tokens, scores = load_tile(source, slice_index, vocab_size, GROUP, COLUMNS)
        keys = ordered_key(scores)
        kept = (keys > key) | ((keys == key) & (tokens < token))
        bits = tile_bits(slice_index * (GROUP * COLUMNS), seed, position, GROUP // 4, COLUMNS)
        winner = gumbel_max(scores, tokens, bits, kept, seed, position)
        tl.store(winners_ptr + slice_index, winner)
        slice_index = tl.min(tl.where(must_draw & (slices > slice_index), slices, NO_TOKEN))
    tl.debug_barrier()


@triton.jit
def _key_of(source, token, vocab_size):
    tokens = token + tl.arange(0, 1)
    return tl.max(ordered_key(load_scores(source, tokens, tokens < vocab_size, vocab_size)))


@triton.jit
def report_top_logits(
    group_keys,  # of logits, not of scores
    logits_ptr,  # [V], any float type
    normaliser,
    logprobs_ptr,  # [K]  written
    tokens_ptr,  # [K]  written
    num_logprobs,
    vocab_size,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the largest logits, falling: take one from the group with the largest maximum, lower that, repeat."""
    groups = tl.arange(0, group_keys.shape[0])
    gone = -NO_TOKEN - 1  # less than any key
    keys = tl.where(group_tokens(groups, 0, GROUP, COLUMNS) < vocab_size, group_keys, gone)
    last_key, last_token = tl.full([], NO_TOKEN, tl.int32), tl.full([], 0, tl.int32)
    last_group = last_token
    for index in range(num_logprobs):
        key = tl.max(keys)
        group = tl.min(tl.where(keys == key, groups, NO_TOKEN))
        tokens = group_tokens(group, tl.arange(0, GROUP), GROUP, COLUMNS)
        logits = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=MINUS_INFINITY).to(tl.float32)
        members = tl.where(tokens < vocab_size, ordered_key(logits), gone)
        is_new = (group != last_group) | (key != last_key) | (tokens > last_token)
        token = tl.min(tl.where((members == key) & is_new, tokens, NO_TOKEN))
        is_left = (members < key) | ((members == key) & (tokens > token))
        keys = tl.where(groups == group, tl.max(tl.where(is_left, members, gone)), keys)
        tl.store(logprobs_ptr + index, value_of_key(key) - normaliser)
        tl.store(tokens_ptr + index, token.to(tl.int64))
        last_key, last_token, last_group = key, token, group


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
    processors,  # see scores_of
    bias_width,
    maxima_ptr,  # [R, num_slices * COLUMNS]  written: largest score of each group
    masses_ptr,  # [R, 2, num_slices]  written for rows with nothing but top-p: see _store_mass
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
    adjustments = (penalties, processors, bias_width)
    scores = scores_of(logits, tokens, valid, adjustments, temperature, row, vocab_size)
    groups = (row * num_slices + slice_index) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(maxima_ptr + groups, largest_of_groups(scores))
    masses = row * (2 * num_slices) + slice_index
    if raw is not None:
        tl.store(raw[0] + groups, largest_of_groups(logits))
        _store_mass(logits, raw[1] + masses, num_slices)
    if (temperature >= GREEDY_TEMPERATURE) & (top_k == 0) & (min_p == 0):
        if top_p < 1:
            _store_mass(scores, masses_ptr + masses, num_slices)
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
    processors,  # see scores_of
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
        source = (logits_ptr, (penalties, processors, bias_width), temperature, row)
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
            normaliser = _logsumexp(raw[1], row, num_slices, slice_tile)
            tl.store(logprobs[0] + row, tl.load(logits_ptr + token) - normaliser)
    elif logprobs is not None:
        raw_maxima = tl.load(raw[0] + group_offsets, mask=is_group, other=MINUS_INFINITY)
        offset = row * num_logprobs
        normaliser = _logsumexp(raw[1], row, num_slices, slice_tile)
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
    """Return a row's token; see the top of this file for what it is chosen from."""
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
def _store_mass(values, mass_ptr, num_slices):
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
def _logsumexp(masses_ptr, row, num_slices, SLICE_TILE: tl.constexpr):
    """Return the row's log of the sum of exp(value), float32, from what ``_store_mass`` has written."""
    slices = tl.arange(0, SLICE_TILE)
    largest = tl.load(
        masses_ptr + row * (2 * num_slices) + slices, mask=slices < num_slices, other=MINUS_INFINITY
    )
    row_max = tl.max(largest)
    total = _total_mass(masses_ptr, row, row_max, num_slices, SLICE_TILE)
    return row_max + tl.log(total.to(tl.float32))


class _VocabularySlices(NamedTuple):
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


def _vocabulary_slices(vocab_size: int) -> _VocabularySlices:
    """Return how a vocabulary is cut: as few tokens to a group as programs can hold the maxima of."""
    group = _MIN_GROUP
    while vocab_size > group * _MAX_GROUPS:
        group *= 2
    return _VocabularySlices(group, _COLUMNS, triton.cdiv(vocab_size, group * _COLUMNS))


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
    cut = _vocabulary_slices(vocab_size)
    num_slices, num_groups = cut.num_slices, cut.num_groups

    def scratch(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=logits.device)

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    is_plain = params.prompt_mask is None and params.output_counts is None
    processors = params.processors
    inputs = (
        logits,
        logits.stride(0),
        (params.temperature, params.top_k, params.top_p, params.min_p),
        (params.seed, params.position),
        _penalties(params),
        None if processors is None else tuple(processors),
        0 if processors is None else processors.bias.shape[1],
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


def _penalties(params: SamplingTensors) -> tuple[torch.Tensor | None, ...]:
    """Return penalties as ``scores_of`` takes them."""
    mask, counts = params.prompt_mask, params.output_counts
    return (
        None if mask is None else mask.contiguous().view(torch.uint8),
        None if counts is None else counts.contiguous(),
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


# Reports of tokens that were chosen elsewhere. One program per row and slice reads the logits once: the largest of each
# group, the slice's share of the normalizer, and how many tokens are at least as likely as the chosen one. One program
# per row puts them together.


@triton.jit(do_not_specialize=["logits_stride", "vocab_size", "num_slices"])
def _summarize_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    token_ids_ptr,  # [R]
    num_logprobs_ptr,  # [R]
    maxima_ptr,  # [R, num_slices * COLUMNS]  written: largest logit of each group
    masses_ptr,  # [R, 2, num_slices]  written: see _store_mass
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
        _store_mass(logits, masses_ptr + row * (2 * num_slices) + slice_index, num_slices)
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
        normalizer = _logsumexp(masses_ptr, row, num_slices, slice_tile)
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
    cut = _vocabulary_slices(vocab_size)

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
    _summarize_kernel[(num_rows * cut.num_slices,)](*inputs, **options, num_warps=_SCAN_WARPS)
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
        num_warps=_CHOOSE_WARPS,
    )


# Masks of allowed tokens.

_MASK_BLOCK = 4096
_WORD_BITS = tl.constexpr(32)


@triton.jit(do_not_specialize=["logits_stride", "bitmask_stride", "vocab_size"])
def _mask_kernel(
    logits_ptr,  # [R, V]  written
    logits_stride,
    bitmask_ptr,  # [N, V / 32]
    bitmask_stride,
    mask_rows_ptr,  # [R]
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(mask_rows_ptr + row).to(tl.int64)
    if mask_row >= 0:
        words = tl.program_id(1) * (BLOCK // _WORD_BITS) + tl.arange(0, BLOCK // _WORD_BITS)
        bits = tl.arange(0, _WORD_BITS)
        is_word = words * _WORD_BITS < vocab_size
        word = tl.load(bitmask_ptr + mask_row * bitmask_stride + words, mask=is_word, other=0)
        tokens = words[:, None] * _WORD_BITS + bits[None, :]
        is_forbidden = ((word[:, None] >> bits[None, :]) & 1) == 0
        tl.store(
            logits_ptr + row * logits_stride + tokens,
            MINUS_INFINITY,
            mask=is_forbidden & (tokens < vocab_size),
        )


def mask_logits(
    logits: torch.Tensor,  # [R, V]  written
    bitmask: torch.Tensor,  # [N, V / 32] int32
    mask_rows: torch.Tensor,  # [R] int32
) -> None:
    """``rose_backend.kernels.sampling.ops.mask_logits`` on a GPU."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    _mask_kernel[(num_rows, triton.cdiv(vocab_size, _MASK_BLOCK))](
        logits, logits.stride(0), bitmask, bitmask.stride(0), mask_rows, vocab_size, BLOCK=_MASK_BLOCK
    )
