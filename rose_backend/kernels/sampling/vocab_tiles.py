"""How a row's tokens lie in slices, groups and tiles, and where their scores come from.

A slice is ``GROUP`` x ``COLUMNS`` tokens, read as ``GROUP / 4`` rows of ``COLUMNS`` quads of neighbours; group ``g`` is
the quads in column ``g % COLUMNS`` of slice ``g // COLUMNS``. ``source`` is what a row's scores are made of: its logits
[V], adjustments as in ``scores_of``, temperature, row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rose_backend.kernels.sampling.gumbel_max import MINUS_INFINITY, scores_of


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
