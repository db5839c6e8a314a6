"""Head and sampler in two launches without logits in memory.

1. One program per tile of tokens and block of rows multiplies, and adds Gumbel noise (see ``gumbel_max.py``) for each
   of its rows in float32. Per row and tile it writes the two largest tokens with their scores: two, because the
   second may be so close that float32 cannot tell. Greedy rows have no noise and need only one.
2. One program per row compares those of all tiles in float64; of equal ones it takes the lowest token.

Few rows are the right factor, for which tensor cores have narrower tiles; many are the left one, so that a row's tokens
lie in few threads. Each logit is summed up in the same order either way: a row's token does not depend on its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.gpu.gumbel_max import (
    GREEDY_TEMPERATURE,
    MINUS_INFINITY,
    NO_TOKEN,
    gumbel,
    perturbed_score,
)

_MIN_BLOCK_R = 16
_MAX_BLOCK_R = 128
# Tokens of a tile, its depth, warps, stages, and whether rows are the left factor; by rows of a block.
_TILE_OF_ROWS = {
    16: (128, 64, 4, 4, False),
    32: (128, 64, 4, 4, False),
    64: (128, 64, 8, 4, True),
    128: (64, 64, 8, 4, True),
}


@triton.jit(do_not_specialize=["num_rows", "vocab_size", "num_tiles", "num_row_blocks"])
def _draw_from_tiles_kernel(
    hidden_ptr,  # [R, E]
    hidden_stride,
    weight_ptr,  # [V, E]
    weight_stride,
    temperature_ptr,  # [R]
    seed_ptr,  # [R]
    position_ptr,  # [R]
    tokens_ptr,  # [R, 2, num_tiles] int32  written
    scores_ptr,  # [R, 2, num_tiles] float32  written
    num_rows,
    vocab_size,
    num_tiles,
    num_row_blocks,
    DEPTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOKEN_AXIS: tl.constexpr,
    EXACT: tl.constexpr,
):
    # Programs that share weights have adjacent ids, so weights are read from memory once.
    tile = tl.program_id(0) // num_row_blocks
    rows = tl.program_id(0) % num_row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = rows < num_rows
    rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    known_tokens = tl.minimum(tokens, vocab_size - 1).to(tl.int64)
    logits = _logits(
        hidden_ptr + rows * hidden_stride, weight_ptr + known_tokens * weight_stride,
        DEPTH, BLOCK_E, TOKEN_AXIS, EXACT,
    )  # fmt: skip
    temperature, seed = tl.load(temperature_ptr + rows), tl.load(seed_ptr + rows)
    position = tl.load(position_ptr + rows).to(tl.int32)
    is_drawn = temperature >= GREEDY_TEMPERATURE
    scores = tl.where(_across_rows(tokens < vocab_size, TOKEN_AXIS), logits, MINUS_INFINITY)
    perturbed = scores
    has_draws = tl.max(is_drawn.to(tl.int32)) > 0
    if has_draws:
        divisor = _across_tokens(tl.where(is_drawn, temperature, 1.0), TOKEN_AXIS)
        scores = tl.div_rn(scores, tl.zeros_like(scores) + divisor)
        bits = _tile_bits(tile * BLOCK_V, seed, position, BLOCK_V, BLOCK_R, TOKEN_AXIS)
        perturbed = tl.where(_across_tokens(is_drawn, TOKEN_AXIS), scores + gumbel(bits), scores)
    entries = rows * (2 * num_tiles) + tile
    is_first = _store_first(
        perturbed, scores, tokens, tokens_ptr + entries, scores_ptr + entries, is_row, vocab_size, TOKEN_AXIS
    )
    if has_draws:
        perturbed = tl.where(is_first, MINUS_INFINITY, perturbed)
        entries += num_tiles
        _store_first(
            perturbed,
            scores,
            tokens,
            tokens_ptr + entries,
            scores_ptr + entries,
            is_row,
            vocab_size,
            TOKEN_AXIS,
        )


@triton.jit
def _across_rows(values, TOKEN_AXIS: tl.constexpr):
    """Return one value per token in a shape that broadcasts over rows."""
    return tl.expand_dims(values, 1 - TOKEN_AXIS)


@triton.jit
def _across_tokens(values, TOKEN_AXIS: tl.constexpr):
    """Return one value per row in a shape that broadcasts over tokens."""
    return tl.expand_dims(values, TOKEN_AXIS)


@triton.jit
def _store_first(
    perturbed, scores, tokens, token_ptrs, score_ptrs, is_row, vocab_size, TOKEN_AXIS: tl.constexpr
):
    """Write token and score of each row's largest perturbed score, of equal ones the lowest; return where they are."""
    place = tl.argmax(perturbed, axis=TOKEN_AXIS)
    token = tl.min(tokens) + place
    is_first = _across_rows(tokens, TOKEN_AXIS) == _across_tokens(token, TOKEN_AXIS)
    # Where logits are NaN the place may be one beyond the vocabulary.
    tl.store(token_ptrs, tl.minimum(token, vocab_size - 1), mask=is_row)
    tl.store(score_ptrs, tl.max(tl.where(is_first, scores, MINUS_INFINITY), axis=TOKEN_AXIS), mask=is_row)
    return is_first


@triton.jit
def _logits(
    hidden_ptrs,  # [BLOCK_R]
    weight_ptrs,  # [BLOCK_V]
    DEPTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOKEN_AXIS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Return logits as float32, rounded to the weights' dtype: [BLOCK_V, BLOCK_R], with ``TOKEN_AXIS`` 1 transposed."""
    depth = tl.arange(0, BLOCK_E)
    if TOKEN_AXIS == 0:
        left_ptrs, right_ptrs = weight_ptrs[:, None] + depth[None, :], hidden_ptrs[None, :] + depth[:, None]
    else:
        left_ptrs, right_ptrs = hidden_ptrs[:, None] + depth[None, :], weight_ptrs[None, :] + depth[:, None]
    logits = tl.zeros([left_ptrs.shape[0], right_ptrs.shape[1]], tl.float32)
    for start in range(0, DEPTH, BLOCK_E):
        if DEPTH % BLOCK_E == 0:
            left, right = tl.load(left_ptrs + start), tl.load(right_ptrs + start)
        else:
            inside = depth < DEPTH - start
            left = tl.load(left_ptrs + start, mask=inside[None, :], other=0.0)
            right = tl.load(right_ptrs + start, mask=inside[:, None], other=0.0)
        logits = tl.dot(left, right, logits, input_precision="ieee" if EXACT else "tf32")
    return logits.to(weight_ptrs.dtype.element_ty).to(tl.float32)


@triton.jit
def _tile_bits(
    first_token, seed, position, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, TOKEN_AXIS: tl.constexpr
):
    """Return the random bits of tokens ``first_token + arange(BLOCK_V)`` for each row, uint32 shaped as logits."""
    quads = _across_rows(first_token // 4 + tl.arange(0, BLOCK_V // 4), TOKEN_AXIS)
    quads += _across_tokens(tl.zeros([BLOCK_R], tl.int32), TOKEN_AXIS)
    zero = quads * 0
    word_0, word_1, word_2, word_3 = tl.philox(
        _across_tokens(seed, TOKEN_AXIS), quads, zero + _across_tokens(position, TOKEN_AXIS), zero, zero
    )
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    if TOKEN_AXIS == 0:
        bits = words.permute((0, 2, 3, 1)).reshape([BLOCK_V, BLOCK_R])
    else:
        bits = words.reshape([BLOCK_R, BLOCK_V])
    return bits


@triton.jit(do_not_specialize=["num_tiles"])
def _draw_from_all_kernel(
    temperature_ptr,  # [R]
    seed_ptr,  # [R]
    position_ptr,  # [R]
    tokens_ptr,  # [R, 2, num_tiles]
    scores_ptr,  # [R, 2, num_tiles]
    token_ids_ptr,  # [R]  written
    num_tiles,
    TILES: tl.constexpr,  # 2 * num_tiles or more
):
    row = tl.program_id(0).to(tl.int64)
    is_drawn = tl.load(temperature_ptr + row) >= GREEDY_TEMPERATURE
    entries = tl.arange(0, TILES)
    # Tiles of greedy rows only store no second token.
    mask = entries < tl.where(is_drawn, 2 * num_tiles, num_tiles)
    tokens = tl.load(tokens_ptr + row * (2 * num_tiles) + entries, mask=mask, other=NO_TOKEN)
    scores = tl.load(scores_ptr + row * (2 * num_tiles) + entries, mask=mask, other=MINUS_INFINITY)
    perturbed = scores.to(tl.float64)
    if is_drawn:
        position = tl.load(position_ptr + row).to(tl.int32)
        perturbed = perturbed_score(scores, tokens, tl.load(seed_ptr + row), position)
    token = tl.min(tl.where(perturbed == tl.max(perturbed), tokens, NO_TOKEN))
    # Only logits that are NaN can leave no token.
    tl.store(token_ids_ptr + row, tl.where(token == NO_TOKEN, 0, token).to(tl.int64))


def lm_head_sample(
    hidden: torch.Tensor,  # [R, E]
    lm_head: torch.Tensor,  # [V, E]
    temperature: torch.Tensor,  # [R]
    seed: torch.Tensor,  # [R]
    position: torch.Tensor,  # [R]
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.lm_head_sample``."""
    num_rows, depth = hidden.shape
    vocab_size = lm_head.shape[0]
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=hidden.device)
    if num_rows == 0:
        return token_ids
    block_r = min(max(triton.next_power_of_2(num_rows), _MIN_BLOCK_R), _MAX_BLOCK_R)
    block_v, block_e, num_warps, num_stages, rows_first = _TILE_OF_ROWS[block_r]
    num_tiles = triton.cdiv(vocab_size, block_v)
    num_row_blocks = triton.cdiv(num_rows, block_r)
    tokens = torch.empty(num_rows, 2 * num_tiles, dtype=torch.int32, device=hidden.device)
    scores = torch.empty(num_rows, 2 * num_tiles, dtype=torch.float32, device=hidden.device)
    exact = hidden.dtype == torch.float32
    _draw_from_tiles_kernel[(num_tiles * num_row_blocks,)](
        hidden,
        hidden.stride(0),
        lm_head,
        lm_head.stride(0),
        temperature,
        seed,
        position,
        tokens,
        scores,
        num_rows,
        vocab_size,
        num_tiles,
        num_row_blocks,
        DEPTH=depth,
        BLOCK_R=block_r,
        BLOCK_V=block_v,
        BLOCK_E=block_e // 2 if exact else block_e,
        TOKEN_AXIS=1 if rows_first else 0,
        EXACT=exact,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    _draw_from_all_kernel[(num_rows,)](
        temperature,
        seed,
        position,
        tokens,
        scores,
        token_ids,
        num_tiles,
        TILES=triton.next_power_of_2(2 * num_tiles),
        num_warps=4,
    )
    return token_ids
