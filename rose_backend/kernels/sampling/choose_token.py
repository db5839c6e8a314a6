"""Choosing one row's token: the first maximum, a draw among candidates, a draw by rejection, and the top logits.

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

import triton
import triton.language as tl
from triton.language.extra import libdevice


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
    """Return logits after bias, penalties and temperature, each operation rounded as in the reference, but no NaN.

    Args:
        adjustments: (penalties, biases, bias_width). ``penalties`` are pointers to prompt mask and output counts
            [R, V], each or None, and to the repetition, presence and frequency penalty [R]. ``biases`` is None or
            pointers to token ids and bias [R, bias_width].
    """
    penalties, biases, bias_width = adjustments
    if biases is not None:
        logits = _add_bias(
            logits, tokens, biases[0] + row * bias_width, biases[1] + row * bias_width, bias_width
        )
    scores = _add_penalties(logits, tokens, valid, penalties, row, vocab_size)
    if (temperature >= GREEDY_TEMPERATURE) & (temperature != 1.0):
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
    # The larger one of NaN and a number is the number.
    return tl.maximum(scores, MINUS_INFINITY)


@triton.jit
def _add_bias(logits, tokens, token_ids_ptr, bias_ptr, bias_width):
    token = tl.load(token_ids_ptr, mask=bias_width > 0, other=-1)
    if token >= 0:
        lowest, highest, index = tl.min(tokens), tl.max(tokens), 0
        while token >= 0:
            if (token >= lowest) & (token <= highest):
                logits = tl.where(tokens == token, logits + tl.load(bias_ptr + index), logits)
            index += 1
            token = tl.load(token_ids_ptr + index, mask=index < bias_width, other=-1)
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
