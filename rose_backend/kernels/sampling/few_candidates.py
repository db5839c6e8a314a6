"""Drawing from the few tokens that a small top-k may keep: found in one go, then each compared with each other.

Between two such draws a step of a model runs, so a GPU reads this code anew from memory each time and is as fast as
there are few instructions: no searches, no loops that are unrolled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rose_backend.kernels.sampling.gumbel_max import (
    MINUS_INFINITY,
    NO_TOKEN,
    bits_of,
    gumbel_max,
    ordered_key,
)
from rose_backend.kernels.sampling.vocab_tiles import group_tokens, load_scores

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
    keys, weights = ordered_key(scores), _weights(scores, row_max)
    CHUNK: tl.constexpr = FEW if FEW < _CHUNK else _CHUNK
    sums = tl.zeros([CHUNK, FEW], tl.int64)
    for start in range(0, num_candidates, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_tokens, other_scores = _load_candidates(scratch, others, num_candidates)
        other_keys, other_weights = ordered_key(other_scores), _weights(other_scores, row_max)
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
def _weights(scores, row_max):
    """Return exp(scores - row_max) in units of 2**-36, int64: sums are exact."""
    return (tl.exp(scores - row_max) * 68719476736.0).to(tl.int64)
