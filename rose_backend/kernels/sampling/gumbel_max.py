"""Parts of both launches of the sampler: scores, random bits, the Gumbel-max draw, and searches without sorting.

The Gumbel-max trick: the token with the largest ``score_i - log(E_i)``, ``E_i`` exponential noise, is a draw from
``softmax(score)``. Float32 finds the tokens that may have the largest one, float64 decides among them, so the token is
the one that float64 throughout would give.

A slice of the vocabulary is ``GROUP`` x ``COLUMNS`` tokens, read as ``GROUP / 4`` rows of ``COLUMNS`` quads of
neighbors; group ``g`` is the quads in column ``g % COLUMNS`` of slice ``g // COLUMNS``. ``source`` is what a row's
scores are made of: its logits [V], adjustments as in ``scores_of``, temperature, row.
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
        most: ``k``; or more, and any key that at least ``k`` and at most so many reach is as good.
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
