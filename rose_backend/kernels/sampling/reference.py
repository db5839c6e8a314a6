"""Choosing the next token of every row, in plain torch.

A token is drawn by the Gumbel-max trick: the one with the largest ``log(p_i) - log(E_i)``, where ``E_i`` is exponential
noise made from (seed, position, i). That is an exact draw from ``p``, needs no sum over the vocabulary, and lets
``sample`` make noise for those tokens only that its filters keep. ``sample_unfused`` is the textbook sequence
of operations over the whole vocabulary; both choose the same tokens.

Random bits are those of Philox4x32-10, a counter-based generator (Salmon et al., SC 2011). Words are int64 tensors that
hold 32-bit values: torch cannot multiply unsigned 32-bit numbers into 64 bits, and the bits of a wrapped int64 product
are those of the unsigned one. The result equals ``tl.philox`` word for word.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rose_backend.kernels.arguments import LogprobReport, SampleOutput, SamplingTensors, TokenLimits

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


GREEDY_TEMPERATURE = 1e-5
"""Below this a row is greedy; vLLM draws the same line."""

MIN_CANDIDATES = 256
"""Most likely tokens that the filters look at first. Nearly always enough; other rows sort the whole vocabulary."""

LARGEST_FACTOR = 1e20
"""Higher temperatures, repetition penalties and inverses of those are clamped to this: infinities in float32,
tokens would tie or become NaN."""

LEAST_TOP_P = 1e-30
"""Lower ones count as this, which keeps one token; 0, which a float64 may be in float32, would keep none."""

NOISE_TILE = 1 << 15
"""Noise is made for about this many tokens at once, so that its intermediate words stay in cache."""

_MINUS_INFINITY = float("-inf")


def sample(
    logits: torch.Tensor,  # [R, V] float32
    params: SamplingTensors,
) -> SampleOutput:
    """Reference of ``rose_backend.kernels.sample``."""
    scores = apply_penalties(apply_processors(logits, params), params)
    return _report(logits, scores, _choose_number(_choose, scores, params), params)


def _choose_number(
    choose: Callable[[torch.Tensor, SamplingTensors], torch.Tensor],
    scores: torch.Tensor,  # [R, V]
    params: SamplingTensors,
) -> torch.Tensor:
    """Return ``choose(scores, params)``, [R], with NaN as minus infinity."""
    token_ids = choose(scores, params)
    # Sorting, topk and argmax all take NaN for the largest: where a row has any, it was chosen.
    is_nan = scores.gather(1, token_ids.unsqueeze(1)).squeeze(1).isnan()
    if bool(is_nan.any()):
        rows = is_nan.nonzero().squeeze(1)
        numbers = scores[rows]
        numbers.masked_fill_(numbers.isnan(), _MINUS_INFINITY)
        token_ids[rows] = choose(numbers, params.select(rows))
    return token_ids


def _choose(
    scores: torch.Tensor,  # [R, V]
    params: SamplingTensors,
) -> torch.Tensor:
    is_greedy = params.temperature < GREEDY_TEMPERATURE
    num_greedy = int(is_greedy.sum())
    if num_greedy == scores.shape[0]:
        return scores.argmax(dim=-1)
    if num_greedy == 0:
        return _draw(scores, params)
    greedy_rows, drawn_rows = is_greedy.nonzero().squeeze(1), (~is_greedy).nonzero().squeeze(1)
    token_ids = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    token_ids[greedy_rows] = scores[greedy_rows].argmax(dim=-1)
    token_ids[drawn_rows] = _draw(scores[drawn_rows], params.select(drawn_rows))
    return token_ids


def apply_processors(
    logits: torch.Tensor,  # [R, V]
    params: SamplingTensors,
) -> torch.Tensor:
    """Return logits after each row's bitmask and bias: a new tensor, or ``logits`` itself where no row has any."""
    processors = params.processors
    if processors is None or not bool((processors.entries >= 0).any()):
        return logits
    rows = (processors.entries >= 0).nonzero().squeeze(1)
    entries = processors.entries[rows].to(torch.int64)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_allowed = (processors.bitmask[entries].unsqueeze(2) >> bits & 1).flatten(1)[:, : logits.shape[1]] != 0
    token_ids, bias = processors.bias_token_ids[entries], processors.bias[entries]
    is_listed = token_ids < logits.shape[1]
    scores = logits[rows].masked_fill_(~is_allowed, _MINUS_INFINITY)
    scores.scatter_add_(1, token_ids.where(is_listed, 0).to(torch.int64), bias.where(is_listed, 0.0))
    return logits.index_copy(0, rows, scores)


def apply_penalties(
    logits: torch.Tensor,  # [R, V]
    params: SamplingTensors,
) -> torch.Tensor:
    """Return logits with each row's penalties: a new tensor, or ``logits`` itself where no row has any."""
    needed = (
        (params.repetition_penalty != 1) | (params.presence_penalty != 0) | (params.frequency_penalty != 0)
    )
    if not bool(needed.any()):
        return logits
    rows = needed.nonzero().squeeze(1)
    scores = logits[rows]
    counts = None if params.output_counts is None else params.output_counts[rows]
    seen = torch.zeros_like(scores, dtype=torch.bool) if counts is None else counts > 0
    repeated = seen if params.prompt_mask is None else seen | params.prompt_mask[rows]
    repetition = params.repetition_penalty[rows].clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR).unsqueeze(1)
    scaled = scores * torch.where(scores > 0, 1.0 / repetition, repetition)
    scores = torch.where(repeated, scaled, scores)
    if counts is not None:
        scores -= params.frequency_penalty[rows].unsqueeze(1) * counts
        scores -= params.presence_penalty[rows].unsqueeze(1) * seen
    return logits.index_copy(0, rows, scores)


def _draw(
    scores: torch.Tensor,  # [R, V]
    params: SamplingTensors,
) -> torch.Tensor:
    """Draw one token per row, [R]; no row is greedy."""
    scaled = scores / params.temperature.clamp(max=LARGEST_FACTOR).unsqueeze(1)
    is_filtered = (_active_top_k(params, scaled.shape[1]) > 0) | (params.top_p < 1) | (params.min_p > 0)
    num_filtered = int(is_filtered.sum())
    if num_filtered == 0:
        return _draw_from_vocabulary(scaled, params)
    if num_filtered == scaled.shape[0]:
        return _draw_filtered(scaled, params)
    token_ids = torch.empty(scaled.shape[0], dtype=torch.int64, device=scaled.device)
    filtered_rows, other_rows = is_filtered.nonzero().squeeze(1), (~is_filtered).nonzero().squeeze(1)
    token_ids[filtered_rows] = _draw_filtered(scaled[filtered_rows], params.select(filtered_rows))
    token_ids[other_rows] = _draw_from_vocabulary(scaled[other_rows], params.select(other_rows))
    return token_ids


def _top_p(params: SamplingTensors) -> torch.Tensor:
    """Return [R] float64."""
    return params.top_p.clamp(min=LEAST_TOP_P).double()


def _active_top_k(params: SamplingTensors, vocab_size: int) -> torch.Tensor:
    """Return [R] int64, 0 where top-k is off or keeps everything."""
    top_k = params.top_k.to(torch.int64)
    return torch.where(top_k < vocab_size, top_k, 0)


def _draw_filtered(
    scaled: torch.Tensor,  # [R, V]
    params: SamplingTensors,
) -> torch.Tensor:
    """Draw one token per row, [R], from what min-p, top-k and top-p leave."""
    vocab_size = scaled.shape[1]
    top_k = _active_top_k(params, vocab_size)
    total = _total_weight(scaled, params)
    num_candidates = max(MIN_CANDIDATES, int(top_k.max()) + 1)
    if 2 * num_candidates >= vocab_size:
        return _draw_by_full_sort(scaled, total, params)
    values, token_ids = _rank_candidates(scaled, num_candidates)
    kept = _keep(values, top_k, total, params)
    lowest_kept = values.masked_fill(~kept, float("inf")).amin(dim=-1)
    # Beyond the candidates there may be more to keep unless the last one is dropped and ties with none that is kept,
    # and more to count for top-p unless the last one is below top-k's threshold.
    last_value = values[:, -1]
    incomplete = kept[:, -1] | (last_value >= lowest_kept)
    incomplete |= (top_k > 0) & (last_value >= _kth_value(values, top_k))
    chosen = _draw_from(values.masked_fill_(~kept, _MINUS_INFINITY), token_ids, params)
    if bool(incomplete.any()):
        rows = incomplete.nonzero().squeeze(1)
        chosen[rows] = _draw_by_full_sort(scaled[rows], total[rows], params.select(rows))
    return chosen


def _draw_by_full_sort(
    scaled: torch.Tensor,  # [R, V]
    total: torch.Tensor,  # [R]
    params: SamplingTensors,
) -> torch.Tensor:
    values, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    kept = _keep(values, _active_top_k(params, scaled.shape[1]), total, params)
    # Only columns that some row keeps take part in the draw.
    width = max(int(kept.sum(dim=-1).max()), 1)
    values = values[:, :width].masked_fill(~kept[:, :width], _MINUS_INFINITY)
    return _draw_from(values, token_ids[:, :width], params)


def _rank_candidates(
    scaled: torch.Tensor,  # [R, V]
    num_candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values and their tokens, both [R, C], falling; equal values in order of token id."""
    token_ids = scaled.topk(num_candidates, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = scaled.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _total_weight(
    scaled: torch.Tensor,  # [R, V]
    params: SamplingTensors,
) -> torch.Tensor:
    """Return sum(exp(scaled - max)) of what min-p keeps, as float64 [R]; zeros where no row has a top-p."""
    total = torch.zeros(scaled.shape[0], dtype=torch.float64, device=scaled.device)
    if not bool((params.top_p < 1).any()):
        return total
    for rows in _row_tiles(*scaled.shape):
        tile = scaled[rows]
        # Float64 all the way: with rounded sums the last token that top-p keeps would depend on the batch.
        weights = (tile - tile.amax(dim=-1, keepdim=True)).double().exp_()
        total[rows] = weights.mul_(weights >= params.min_p[rows].double().unsqueeze(1)).sum(dim=-1)
    return total


def _keep(
    values: torch.Tensor,  # [R, C]
    top_k: torch.Tensor,  # [R]
    total: torch.Tensor,  # [R]
    params: SamplingTensors,
) -> torch.Tensor:
    """Return which of the candidates min-p, top-k and top-p keep, bool [R, C].

    Args:
        values: scaled logits, falling; at least ``top_k`` of them.
        top_k: 0 is off.
        total: weight of everything that min-p keeps, used by rows without top-k.
    """
    weights = (values - values[:, :1]).double().exp_()
    kept = (weights > 0) & (weights >= params.min_p.double().unsqueeze(1))
    kept &= values >= _kth_value(values, top_k).unsqueeze(1)
    has_top_p = params.top_p < 1
    if bool(has_top_p.any()):
        weights.masked_fill_(~kept, 0.0)
        total = torch.where(top_k > 0, weights.sum(dim=-1), total)
        weight_before = weights.cumsum(dim=-1) - weights
        kept &= (weight_before < (_top_p(params) * total).unsqueeze(1)) | ~has_top_p.unsqueeze(1)
    return kept


def _kth_value(
    values: torch.Tensor,  # [R, C]
    top_k: torch.Tensor,  # [R]
) -> torch.Tensor:
    """Return the ``top_k``-th of falling values, [R]; the last one where top-k is off."""
    last = torch.where(top_k > 0, top_k, values.shape[1]) - 1
    return values.gather(1, last.unsqueeze(1)).squeeze(1)


def _draw_from(
    values: torch.Tensor,  # [R, C]
    token_ids: torch.Tensor,  # [R, C]
    params: SamplingTensors,
) -> torch.Tensor:
    """Return a draw from ``softmax(values)``, [R]."""
    column = _gumbel_argmax(values, token_bits(token_ids, params.seed, params.position))
    return token_ids.gather(1, column.unsqueeze(1)).squeeze(1)


def _draw_from_vocabulary(
    scaled: torch.Tensor,  # [R, V]
    params: SamplingTensors,
) -> torch.Tensor:
    vocab_size = scaled.shape[1]
    chosen = torch.empty(scaled.shape[0], dtype=torch.int64, device=scaled.device)
    for rows in _row_tiles(*scaled.shape):
        bits = vocabulary_bits(vocab_size, params.seed[rows], params.position[rows])
        chosen[rows] = _gumbel_argmax(scaled[rows], bits)
    return chosen


def _gumbel_argmax(
    values: torch.Tensor,  # [R, C]
    bits: torch.Tensor,  # [R, C]
) -> torch.Tensor:
    """Return the column whose value plus Gumbel noise is largest, [R]."""
    return (values.double() - exponential_noise(bits).log_()).argmax(dim=-1)


def _row_tiles(num_rows: int, vocab_size: int) -> list[slice]:
    rows_per_tile = max(NOISE_TILE // vocab_size, 1)
    return [slice(start, start + rows_per_tile) for start in range(0, num_rows, rows_per_tile)]


def _report(
    logits: torch.Tensor,  # [R, V]
    scores: torch.Tensor,  # [R, V], after processors and penalties
    token_ids: torch.Tensor,  # [R], where there is a token to choose
    params: SamplingTensors,
) -> SampleOutput:
    has_token = scores.gather(1, token_ids.unsqueeze(1)).squeeze(1) > _MINUS_INFINITY
    reported = token_ids.where(has_token, params.invalid_token_id)
    if params.num_logprobs < 0:
        return SampleOutput(reported, None, None, None)
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    top = logits.topk(params.num_logprobs, dim=-1)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - normaliser
    return SampleOutput(reported, chosen.squeeze(1), top.values - normaliser, top.indices)


def report_logprobs(
    logits: torch.Tensor,  # [R, V]
    token_ids: torch.Tensor,  # [R] int64
    num_logprobs: torch.Tensor,  # [R] int32
    report: LogprobReport,  # written
) -> None:
    """Reference of ``rose_backend.kernels.sampling.ops.report_logprobs``."""
    for row in (num_logprobs >= 0).nonzero()[:, 0].tolist():
        values = logits[row].float()
        token_id, count = token_ids[row], min(int(num_logprobs[row]), report.token_ids.shape[1] - 1)
        most_likely = values.topk(count).indices
        columns = torch.cat((token_id[None], most_likely))
        report.token_ids[row], report.logprobs[row] = 0, _MINUS_INFINITY
        report.token_ids[row, : count + 1] = columns
        report.logprobs[row, : count + 1] = values[columns] - values.logsumexp(dim=-1)
        report.ranks[row] = (values >= values[token_id]).sum()


def mask_logits(
    logits: torch.Tensor,  # [R, V]  written
    bitmask: torch.Tensor,  # [N, V / 32] int32
    mask_rows: torch.Tensor,  # [R] int32
) -> None:
    """Reference of ``rose_backend.kernels.sampling.ops.mask_logits``."""
    tokens = torch.arange(logits.shape[1])
    for row in (mask_rows >= 0).nonzero()[:, 0].tolist():
        is_allowed = bitmask[mask_rows[row], tokens // 32] >> (tokens % 32) & 1
        logits[row].masked_fill_(is_allowed == 0, _MINUS_INFINITY)


def write_bitmask(
    bitmask: torch.Tensor,  # [N, V / 32] int32  written
    entries: torch.Tensor,  # [R] int32
    position: torch.Tensor,  # [R] int64
    limits: TokenLimits,
) -> None:
    """Reference of ``rose_backend.kernels.sampling.ops.write_bitmask``."""
    bits = torch.arange(32, dtype=torch.int32)
    for entry, end in zip(entries.tolist(), position.tolist(), strict=True):
        if entry < 0:
            continue
        lengths, stops, allowed, word_ends = (
            [each for each in table[entry].tolist() if each >= 0] for table in limits[:4]
        )
        word_tokens, drawn = limits.bad_word_token_ids[entry].tolist(), limits.drawn_token_ids[entry]
        forbidden = stops if end < lengths[1] else []
        for first, last in zip([0, *word_ends], (each - 1 for each in word_ends), strict=False):
            before = torch.arange(end - (last - first), end)
            follows = len(before) <= end - lengths[0]
            if follows and drawn[before % len(drawn)].tolist() == word_tokens[first:last]:
                forbidden.append(word_tokens[last])
        is_allowed = torch.full((bitmask.shape[1] * 32,), not allowed)
        is_allowed[allowed] = True
        is_allowed[forbidden] = False
        # The highest bit is the sign: the sum wraps.
        bitmask[entry] = (is_allowed.view(-1, 32) << bits).sum(1, dtype=torch.int32)


def sample_unfused(
    logits: torch.Tensor,  # [R, V] float32
    params: SamplingTensors,
) -> SampleOutput:
    """Reference of ``rose_backend.kernels.sample_unfused``."""
    if logits.is_meta:
        # The rest reads values, and launches none of our kernels.
        return _report(logits, logits, logits.argmax(dim=-1), params)
    scores = apply_penalties(apply_processors(logits, params), params)
    return _report(logits, scores, _choose_number(_choose_unfused, scores, params), params)


def _choose_unfused(
    scores: torch.Tensor,  # [R, V]
    params: SamplingTensors,
) -> torch.Tensor:
    token_ids = scores.argmax(dim=-1)
    is_greedy = params.temperature < GREEDY_TEMPERATURE
    if not bool(is_greedy.all()):
        temperature = torch.where(is_greedy, 1.0, params.temperature.clamp(max=LARGEST_FACTOR))
        scaled = scores / temperature.unsqueeze(1)
        if bool((params.min_p > 0).any()):
            scaled = _mask_min_p(scaled, params)
        if bool(((params.top_k > 0) | (params.top_p < 1)).any()):
            scaled = _mask_top_k_top_p(scaled, params)
        drawn = _gumbel_argmax(scaled, vocabulary_bits(scaled.shape[1], params.seed, params.position))
        token_ids = torch.where(is_greedy, token_ids, drawn)
    return token_ids


def _mask_min_p(
    scaled: torch.Tensor,  # [R, V]
    params: SamplingTensors,
) -> torch.Tensor:
    probabilities = scaled.double().softmax(dim=-1)
    threshold = params.min_p.double().unsqueeze(1) * probabilities.amax(dim=-1, keepdim=True)
    return scaled.masked_fill(probabilities < threshold, _MINUS_INFINITY)


def _mask_top_k_top_p(
    scaled: torch.Tensor,  # [R, V]
    params: SamplingTensors,
) -> torch.Tensor:
    vocab_size = scaled.shape[1]
    values, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    top_k = torch.where(params.top_k > 0, params.top_k, vocab_size).clamp(max=vocab_size).to(torch.int64)
    threshold = values.gather(1, top_k.unsqueeze(1) - 1)
    values = values.masked_fill(values < threshold, _MINUS_INFINITY)
    probabilities = values.double().softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    top_p = _top_p(params).unsqueeze(1)
    values = values.masked_fill((mass_before >= top_p) & (top_p < 1), _MINUS_INFINITY)
    return torch.empty_like(scaled).scatter_(1, token_ids, values)
