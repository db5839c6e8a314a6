"""Choosing one row's token: the first maximum, a draw among candidates, a draw by rejection, and the top logits.

``filters`` is (top_k or 0, top_p, min_p) and ``draws`` is (seed, position), numbers of this row. ``row_max`` is its
largest score, ``group_keys`` are the keys (see ``ordered_key``) of the largest scores of its groups. ``source``, slices
and groups: see ``gumbel_max.py``.

What few rows need is called, not inlined: a pass of Triton's compiler takes time that grows faster than a function, and
this kernel is what an engine's first start waits for.

``gather_few`` and ``choose_among_few`` draw from the few tokens that a small top-k may keep: found in one go, then each
compared with each other. Between two such draws a step of a model runs, so a GPU reads this code from memory again each
time and is as fast as there are few instructions: no searches, no unrolled loops.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rose_backend.kernels.sampling.gumbel_max import (
    MINUS_INFINITY,
    NO_TOKEN,
    bits_of,
    group_tokens,
    gumbel_max,
    keep_top_p,
    kth_largest_key,
    load_scores,
    load_tile,
    ordered_key,
    perturbed_score,
    tile_bits,
    value_of_key,
)

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
    """Return how many of the flags (int32 0 or 1) in front of each are set."""
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
        # If top-p keeps that token, no other can be drawn; if not, nothing behind it is kept.
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
    groups = tl.arange(0, group_keys.shape[0])
    gone = -NO_TOKEN - 1  # less than any key
    keys = tl.where(group_tokens(groups, 0, GROUP, COLUMNS) < vocab_size, group_keys, gone)
    last_key, last_token = tl.full([], NO_TOKEN, tl.int32), tl.full([], 0, tl.int32)
    last_group = last_token
    for index in range(num_logprobs):
        key = tl.max(keys)
        group = tl.min(tl.where(keys == key, groups, NO_TOKEN))
        tokens = group_tokens(group, tl.arange(0, GROUP), GROUP, COLUMNS)
        logits = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=MINUS_INFINITY)
        members = tl.where(tokens < vocab_size, ordered_key(logits), gone)
        is_new = (group != last_group) | (key != last_key) | (tokens > last_token)
        token = tl.min(tl.where((members == key) & is_new, tokens, NO_TOKEN))
        is_left = (members < key) | ((members == key) & (tokens > token))
        keys = tl.where(groups == group, tl.max(tl.where(is_left, members, gone)), keys)
        tl.store(logprobs_ptr + index, value_of_key(key) - normaliser)
        tl.store(tokens_ptr + index, token.to(tl.int64))
        last_key, last_token, last_group = key, token, group
