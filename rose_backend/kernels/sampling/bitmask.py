"""Which tokens each row's next draw allows: allowed tokens, stop tokens before ``min_tokens``, and bad words.

One program writes an entry's bitmask, then sets and clears the bits of single tokens. A bad word is compared from its
end backwards with what the row has drawn, all words of a row at once; most differ in the first token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import TokenLimits

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_bitmask_words"])
def _bitmask_kernel(
    bitmask_ptr,  # [N, num_bitmask_words]  written
    entries_ptr,  # [R]
    position_ptr,  # [R]
    limits,  # pointers to the tables of TokenLimits
    num_bitmask_words,
    NUM_STOPS: tl.constexpr,
    NUM_ALLOWED: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    NUM_WORD_TOKENS: tl.constexpr,
    STOPS_TILE: tl.constexpr,
    ALLOWED_TILE: tl.constexpr,
    WORDS_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lengths_ptr, stops_ptr, allowed_ptr, ends_ptr, word_tokens_ptr, drawn_ptr = limits
    entry = tl.load(entries_ptr + tl.program_id(0)).to(tl.int64)
    if entry >= 0:
        bitmask_ptr += entry * num_bitmask_words
        position = tl.load(position_ptr + tl.program_id(0))
        places = tl.arange(0, ALLOWED_TILE)
        allowed = tl.load(allowed_ptr + entry * NUM_ALLOWED + places, mask=places < NUM_ALLOWED, other=-1)
        fill = tl.where(tl.max(allowed) >= 0, 0, -1)
        for start in range(0, num_bitmask_words, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            tl.store(bitmask_ptr + offsets, tl.zeros_like(offsets) + fill, mask=offsets < num_bitmask_words)
        # Other threads set bits of what this one has stored.
        tl.debug_barrier()
        tl.atomic_or(bitmask_ptr + allowed // 32, 1 << (allowed & 31), mask=allowed >= 0)
        tl.debug_barrier()
        if position < tl.load(lengths_ptr + entry * 2 + 1):
            columns = tl.arange(0, STOPS_TILE)
            stops = tl.load(stops_ptr + entry * NUM_STOPS + columns, mask=columns < NUM_STOPS, other=-1)
            _forbid(bitmask_ptr, stops, stops >= 0)
        words = tl.arange(0, WORDS_TILE)
        ends = tl.load(ends_ptr + entry * NUM_WORDS + words, mask=words < NUM_WORDS, other=-1)
        starts = tl.load(
            ends_ptr + entry * NUM_WORDS + words - 1, mask=(words > 0) & (words < NUM_WORDS), other=0
        )
        last_ptrs = word_tokens_ptr + entry * NUM_WORD_TOKENS + ends - 1
        follows = _follows(
            last_ptrs,
            ends - starts - 1,
            drawn_ptr + entry * NUM_WORD_TOKENS,
            position,
            position - tl.load(lengths_ptr + entry * 2),
            ends > 0,
            NUM_WORD_TOKENS,
        )
        _forbid(bitmask_ptr, tl.load(last_ptrs, mask=follows, other=0), follows)


@triton.jit
def _follows(last_ptrs, num_before, drawn_ptr, position, num_drawn, is_word, NUM_WORD_TOKENS: tl.constexpr):
    """Return of each bad word whether all of its tokens but the last, ``num_before``, have been drawn last."""
    follows = is_word & (num_before <= num_drawn)
    longest, back = tl.max(tl.where(follows, num_before, 0)), 1
    while back <= longest:
        drawn = tl.load(drawn_ptr + (position - back) % NUM_WORD_TOKENS)
        is_compared = follows & (back <= num_before)
        expected = tl.load(last_ptrs - back, mask=is_compared, other=-1)
        follows = follows & ((expected == drawn) | (back > num_before))
        longest, back = tl.max(tl.where(follows, num_before, 0)), back + 1
    return follows


@triton.jit
def _forbid(bitmask_ptr, tokens, mask):
    tl.atomic_and(bitmask_ptr + tokens // 32, ~(1 << (tokens & 31)), mask=mask)


def write_bitmask(
    bitmask: torch.Tensor,  # [N, V / 32] int32  written
    entries: torch.Tensor,  # [R] int32
    position: torch.Tensor,  # [R] int64
    limits: TokenLimits,
) -> None:
    """``rose_backend.kernels.sampling.ops.write_bitmask`` on a GPU."""
    if not len(entries):
        return
    num_stops, num_allowed, num_words, num_word_tokens = (table.shape[1] for table in limits[1:5])
    _bitmask_kernel[(len(entries),)](
        bitmask,
        entries,
        position,
        tuple(limits),
        bitmask.shape[1],
        NUM_STOPS=num_stops,
        NUM_ALLOWED=num_allowed,
        NUM_WORDS=num_words,
        NUM_WORD_TOKENS=num_word_tokens,
        STOPS_TILE=triton.next_power_of_2(num_stops),
        ALLOWED_TILE=triton.next_power_of_2(num_allowed),
        WORDS_TILE=triton.next_power_of_2(num_words),
        BLOCK=_BLOCK,
    )
