"""Choosing one row's token: the first maximum, a draw among candidates, a draw by rejection, and the top logits.

``source`` is what a row's scores are made of: (its logits [V], penalties as in ``scores_of``, temperature, row index).
``filters`` is (top_k, top_p, min_p) and ``draws`` is (seed, position), numbers of this row. ``maxima`` are the largest
scores of its groups: group ``g`` is column ``g % COLUMNS`` of slice ``g // COLUMNS``, and a slice is ``GROUP`` x
``COLUMNS`` tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rose_backend.kernels.gpu.race import (
    MINUS_INFINITY,
    NO_TOKEN,
    bits_of,
    exact_arrival,
    keep_top_p,
    kth_largest_key,
    ordered_key,
    race,
    scores_of,
    tile_bits,
)


@triton.jit
def tile_tokens(slice_index, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tokens of one slice, [GROUP, COLUMNS]; the last slice's go beyond the vocabulary."""
    rows = tl.arange(0, GROUP)[:, None] * COLUMNS
    return slice_index * (GROUP * COLUMNS) + rows + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load_scores(source, tokens, mask, vocab_size):
    """Return the scores of any tokens; minus infinity where masked."""
    logits_ptr, penalties, temperature, row = source
    logits = tl.load(logits_ptr + tokens, mask=mask, other=MINUS_INFINITY)
    return scores_of(logits, tokens, mask, penalties, temperature, row, vocab_size)


@triton.jit
def load_tile(source, slice_index, vocab_size, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return tokens and scores of one slice, [GROUP, COLUMNS]; minus infinity beyond the vocabulary."""
    tokens = tile_tokens(slice_index, GROUP, COLUMNS)
    return tokens, load_scores(source, tokens, tokens < vocab_size, vocab_size)


@triton.jit
def choose_first_maximum(maxima, source, vocab_size, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the lowest token with the row's largest score."""
    row_max = tl.max(maxima)
    groups = tl.arange(0, maxima.shape[0])
    slice_index = tl.min(tl.where(maxima == row_max, groups // COLUMNS, NO_TOKEN))
    # Scores that are all NaN have no maximum.
    slice_index = tl.where(slice_index == NO_TOKEN, 0, slice_index)
    tokens, scores = load_tile(source, slice_index, vocab_size, GROUP, COLUMNS)
    return tl.min(tl.where((scores == row_max) & (tokens < vocab_size), tokens, NO_TOKEN))


@triton.jit
def choose_among_candidates(
    maxima,
    source,
    filters,
    draws,
    groups_ptr,  # [CANDIDATES]  scratch
    vocab_size,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Draw a token of a row with a top-k of at most ``CANDIDATES``; return NO_TOKEN if too many groups tie."""
    top_k, top_p, min_p = filters
    seed, position = draws
    row_max = tl.max(maxima)
    highest = ordered_key(row_max)
    group_keys = ordered_key(maxima)
    lowest = ordered_key(tl.full([], MINUS_INFINITY, tl.float32)) + 1
    lowest = kth_largest_key(group_keys, top_k, lowest, highest)
    is_chosen = group_keys >= lowest
    num_chosen = tl.sum(is_chosen.to(tl.int32))
    token = tl.full([], NO_TOKEN, tl.int32)
    if num_chosen <= CANDIDATES:
        slots = tl.cumsum(is_chosen.to(tl.int32)) - 1
        tl.store(groups_ptr + slots, tl.arange(0, maxima.shape[0]), mask=is_chosen)
        tl.debug_barrier()
        members = tl.arange(0, CANDIDATES * GROUP)
        valid = members // GROUP < num_chosen
        groups = tl.load(groups_ptr + members // GROUP, mask=valid, other=0)
        tokens = groups // COLUMNS * (GROUP * COLUMNS) + members % GROUP * COLUMNS + groups % COLUMNS
        scores = load_scores(source, tokens, valid & (tokens < vocab_size), vocab_size)
        keys = ordered_key(scores)
        lowest = kth_largest_key(keys, top_k, lowest, highest)
        lowest = tl.maximum(lowest, ordered_key(row_max + tl.log(min_p)))
        kept = keys >= lowest
        if top_p < 1:
            kept = keep_top_p(scores, keys, tokens, kept, row_max, lowest, top_p, vocab_size)
        arrival, bits = tl.full([], MINUS_INFINITY, tl.float64), bits_of(tokens, seed, position)
        arrival, token = race(scores, tokens, bits, kept, arrival, token, seed, position, False)
    return token


@triton.jit
def choose_by_rejection(
    maxima,
    source,
    filters,
    draws,
    winners_ptr,  # [num_slices]
    has_winners,
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Draw a token of a row with any filters.

    Min-p and top-k are a lowest key. Top-p is asked about one winner after the other: it keeps a token if less than
    enough weight comes before it (higher keys, then lower tokens), and if not, nothing behind that token is kept.
    """
    top_k, top_p, min_p = filters
    row_max = tl.max(maxima)
    lowest = ordered_key(tl.full([], MINUS_INFINITY, tl.float32)) + 1
    lowest = tl.maximum(lowest, ordered_key(row_max + tl.log(min_p)))
    if (top_k > 0) & (top_k < vocab_size):
        lowest = _kth_largest_key_of_row(
            maxima, source, top_k, lowest, vocab_size, num_slices, GROUP, COLUMNS
        )
    token = tl.full([], NO_TOKEN, tl.int32)
    has_token = has_winners
    if has_winners:
        slice_tile: tl.constexpr = maxima.shape[0] // COLUMNS
        token = _winner_of_slices(source, draws, winners_ptr, vocab_size, num_slices, slice_tile)
        has_token = _key_of(source, token, vocab_size) >= lowest
    end_key, end_token = lowest, tl.full([], 0, tl.int32) + vocab_size
    is_searching = row_max == row_max
    while is_searching:
        if has_token == 0:
            token = _race_before(source, draws, end_key, end_token, vocab_size, num_slices, GROUP, COLUMNS)
        is_searching = top_p < 1
        if is_searching:
            key = _key_of(source, token, vocab_size)
            before, total = _weights(
                source, row_max, lowest, key, token, vocab_size, num_slices, GROUP, COLUMNS
            )
            # The most likely token is always kept.
            is_searching = (before.to(tl.float64) >= top_p.to(tl.float64) * total.to(tl.float64)) & (
                before > 0
            )
            end_key, end_token = key, token
            has_token = has_token & (before < 0)
    return token


@triton.jit
def _kth_largest_key_of_row(
    maxima,
    source,
    k,
    lowest,
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """As ``kth_largest_key``, for all scores of a row."""
    highest = ordered_key(tl.max(maxima))
    # The k groups with the largest maxima hold at least one score each that reaches the k-th of those.
    low = kth_largest_key(ordered_key(maxima), k, lowest, highest).to(tl.int64)
    high = highest.to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        counts = tl.zeros([GROUP, COLUMNS], tl.int32)
        for slice_index in range(num_slices):
            tokens = tile_tokens(slice_index, GROUP, COLUMNS)
            scores = load_scores(source, tokens, tokens < vocab_size, vocab_size)
            counts += (ordered_key(scores) >= middle.to(tl.int32)).to(tl.int32)
        count = tl.sum(counts)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle + 1, middle))
    return low.to(tl.int32)


@triton.jit
def _weights(
    source,
    row_max,
    lowest,
    key,
    token,
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the weight before ``token``, whose key is ``key``, and that of all keys from ``lowest`` up."""
    before = tl.zeros([GROUP, COLUMNS], tl.float32)
    total = tl.zeros([GROUP, COLUMNS], tl.float32)
    for slice_index in range(num_slices):
        tokens, scores = load_tile(source, slice_index, vocab_size, GROUP, COLUMNS)
        keys = ordered_key(scores)
        weights = tl.where(keys >= lowest, tl.exp(scores - row_max), 0.0)
        total += weights
        before += tl.where((keys > key) | ((keys == key) & (tokens < token)), weights, 0.0)
    return tl.sum(before), tl.sum(total)


@triton.jit
def _race_before(
    source,
    draws,
    key,
    token,
    vocab_size,
    num_slices,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the winner among higher keys than ``key``, and of equal ones lower tokens than ``token``."""
    seed, position = draws
    best_arrival, best_token = tl.full([], MINUS_INFINITY, tl.float64), tl.full([], NO_TOKEN, tl.int32)
    for slice_index in range(num_slices):
        tokens, scores = load_tile(source, slice_index, vocab_size, GROUP, COLUMNS)
        keys = ordered_key(scores)
        running = (keys > key) | ((keys == key) & (tokens < token))
        bits = tile_bits(slice_index * (GROUP * COLUMNS), seed, position, GROUP, COLUMNS)
        best_arrival, best_token = race(
            scores, tokens, bits, running, best_arrival, best_token, seed, position, True
        )
    return best_token


@triton.jit
def _key_of(source, token, vocab_size):
    token = tl.minimum(token, vocab_size - 1)
    return ordered_key(load_scores(source, token, token >= 0, vocab_size))


@triton.jit
def _winner_of_slices(source, draws, winners_ptr, vocab_size, num_slices, SLICE_TILE: tl.constexpr):
    seed, position = draws
    slices = tl.arange(0, SLICE_TILE)
    mask = slices < num_slices
    tokens = tl.load(winners_ptr + slices, mask=mask, other=0)
    arrivals = exact_arrival(load_scores(source, tokens, mask, vocab_size), tokens, seed, position)
    return tl.min(tl.where(mask & (arrivals == tl.max(arrivals)), tokens, NO_TOKEN))


@triton.jit
def report_top_logits(
    maxima,
    logits_ptr,  # [V]
    normaliser,
    logprobs_ptr,  # [K]  written
    tokens_ptr,  # [K]  written
    num_logprobs,
    vocab_size,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the largest logits, falling: take one from the group with the largest maximum, lower that, repeat."""
    groups = tl.arange(0, maxima.shape[0])
    gone = -NO_TOKEN - 1  # less than any key
    first_tokens = groups // COLUMNS * (GROUP * COLUMNS) + groups % COLUMNS
    keys = tl.where(first_tokens < vocab_size, ordered_key(maxima), gone)
    last_key, last_token = tl.full([], NO_TOKEN, tl.int32), tl.full([], 0, tl.int32)
    last_group = last_token
    for index in range(num_logprobs):
        key = tl.max(keys)
        group = tl.min(tl.where(keys == key, groups, NO_TOKEN))
        tokens = group // COLUMNS * (GROUP * COLUMNS) + group % COLUMNS + tl.arange(0, GROUP) * COLUMNS
        logits = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=MINUS_INFINITY)
        members = tl.where(tokens < vocab_size, ordered_key(logits), gone)
        is_new = (group != last_group) | (key != last_key) | (tokens > last_token)
        token = tl.min(tl.where((members == key) & is_new, tokens, NO_TOKEN))
        is_left = (members < key) | ((members == key) & (tokens > token))
        keys = tl.where(groups == group, tl.max(tl.where(is_left, members, gone)), keys)
        logit = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(logprobs_ptr + index, logit - normaliser)
        tl.store(tokens_ptr + index, token.to(tl.int64))
        last_key, last_token, last_group = key, token, group
