"""Philox4x32-10, a counter-based random number generator (Salmon et al., SC 2011), in torch integer arithmetic.

Words are int64 tensors that hold 32-bit values: torch cannot multiply unsigned 32-bit numbers into 64 bits, and the
bits of a wrapped int64 product are those of the unsigned one. The result equals ``tl.philox`` word for word.
"""

from __future__ import annotations

import torch

# Tensors without dimensions, which work with tensors on any device: a Python number would be wrapped into one at each
# of some hundred operations.
WORD_MASK = torch.tensor(0xFFFFFFFF)
_HALF = torch.tensor(32)
_MULTIPLIERS = (torch.tensor(0xD2511F53), torch.tensor(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Key = tuple[torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: Key) -> Words:
    """Return four random words per (counter, key).

    Args:
        counter, key: int64 with values below 2**32, in shapes that broadcast with one another.
    """
    *words, key_0, key_1 = torch.broadcast_tensors(*counter, *key)
    word_0, word_1, word_2, word_3 = _run_rounds(
        (words[0], words[1], words[2], words[3]), _round_keys((key_0, key_1))
    )
    return word_0, word_1 & WORD_MASK, word_2, word_3 & WORD_MASK


def _round_keys(key: Key) -> list[Key]:
    rounds = torch.arange(_NUM_ROUNDS, device=key[0].device).view(-1, *[1] * key[0].ndim)
    keys_0, keys_1 = ((word + rounds * step) & WORD_MASK for word, step in zip(key, _KEY_STEPS, strict=True))
    return list(zip(keys_0.unbind(0), keys_1.unbind(0), strict=True))


def _run_rounds(counter: Words, keys: list[Key]) -> Words:
    """Return the words after one round per key. Words 1 and 3 have anything in their upper halves."""
    word_0, word_1, word_2, word_3 = counter
    for index, (key_0, key_1) in enumerate(keys):
        if index < 2:
            # The words may still have smaller shapes, and the first ones are the caller's.
            product_0, product_1 = word_0 * _MULTIPLIERS[0], word_2 * _MULTIPLIERS[1]
            word_0 = ((product_1 >> _HALF) ^ word_1 ^ key_0).bitwise_and_(WORD_MASK)
            word_2 = ((product_0 >> _HALF) ^ word_3 ^ key_1).bitwise_and_(WORD_MASK)
        else:
            product_0, product_1 = word_0.mul_(_MULTIPLIERS[0]), word_2.mul_(_MULTIPLIERS[1])
            word_0 = _mix(product_1, word_1, key_0)
            word_2 = _mix(product_0, word_3, key_1)
        # A product's lower half is the next word; its upper half stays in place until it is masked.
        word_1, word_3 = product_1, product_0
    return word_0, word_1, word_2, word_3


def _mix(product: torch.Tensor, word: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return ``upper half of product ^ word ^ key`` as a 32-bit word; all in one new tensor."""
    return (product >> _HALF).bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(WORD_MASK)


def token_bits(
    token_ids: torch.Tensor,  # [1, C] or [R, C] int64
    seed: torch.Tensor,  # [R] int64
    position: torch.Tensor,  # [R] int64
) -> torch.Tensor:
    """Return the 32 random bits of each (row, token) as int64 [R, C].

    Key: lower and upper half of the seed. Counter: (token id // 4, position, 0, 0); the token's bits are word
    ``token id % 4`` of the four. They depend on nothing else, so a row draws the same in any batch.
    """
    words = torch.stack(_token_words(token_ids >> 2, seed, position), dim=-1)
    which = (token_ids & 3).unsqueeze(-1)
    return words.gather(-1, which.expand(*words.shape[:-1], 1)).squeeze(-1)


def vocabulary_bits(
    vocab_size: int,
    seed: torch.Tensor,  # [R] int64
    position: torch.Tensor,  # [R] int64
) -> torch.Tensor:
    """Return ``token_bits`` of all tokens, int64 [R, V], for a quarter of the work."""
    quads = torch.arange((vocab_size + 3) // 4, device=seed.device).unsqueeze(0)
    words = torch.stack(_token_words(quads, seed, position), dim=-1)
    return words.flatten(1)[:, :vocab_size]


def _token_words(
    quads: torch.Tensor,  # [1, C] or [R, C] int64
    seed: torch.Tensor,  # [R] int64
    position: torch.Tensor,  # [R] int64
) -> Words:
    """Return the four words of each counter (quad, position, 0, 0), [R, C].

    What is the same for a whole row or column stays that small for two rounds.
    """
    seed = seed.unsqueeze(1)
    zero = torch.zeros((1, 1), dtype=torch.int64, device=quads.device)
    keys = _round_keys((seed & WORD_MASK, (seed >> _HALF) & WORD_MASK))
    word_0, word_1, word_2, word_3 = _run_rounds((quads, position.unsqueeze(1) & WORD_MASK, zero, zero), keys)
    return word_0, word_1 & WORD_MASK, word_2, word_3 & WORD_MASK


def exponential_noise(bits: torch.Tensor) -> torch.Tensor:
    """Map 32 random bits to a standard exponential number, float64, never 0 and never infinite.

    ``-log((bits + 0.5) / 2**32)``: the argument lies strictly between 0 and 1. Float64, because a draw is decided by
    the smallest numbers, whose arguments lie so close to 1 that float32 would round them to it.
    """
    return bits.double().add_(0.5).mul_(2.0**-32).log_().neg_()
