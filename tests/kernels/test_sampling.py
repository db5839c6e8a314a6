"""The sampler: exact distributions, exact agreement of its forms, and draws that do not depend on the batch."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from rose_backend import kernels
from rose_backend.errors import ShapeError
from rose_backend.kernels import SampleOutput, SamplingTensors, sample_unfused
from rose_backend.kernels.arguments import LogprobReport, TokenLimits
from rose_backend.kernels.sampling import reference
from rose_backend.kernels.sampling import sampler as gpu
from rose_backend.kernels.sampling.ops import mask_logits, report_logprobs, write_bitmask
from rose_backend.kernels.sampling.reference import (
    GREEDY_TEMPERATURE,
    exponential_noise,
    philox4x32,
    token_bits,
    vocabulary_bits,
)
from tests.support.implementations import (
    GPU,
    INTERPRETER,
    REFERENCE,
    Implementation,
    each_dtype,
    kernels_only,
)
from tests.support.sampling_cases import (
    Limited,
    beyond_every_range,
    chosen_rows,
    exact_distribution,
    fields_of,
    heavy_tailed_logits,
    make_limits,
    make_params,
    make_processors,
    new_report,
    random_case,
    range_ends,
    rows_without_a_token,
)

SIGMAS = 6
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50},
    {"top_p": 0.7},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 60, "top_p": 0.99},
    {"top_p": 0.95, "min_p": 0.01},
    {"top_k": 61},
    {"top_k": 1_000_000, "top_p": 0.95},
]


def sample_in_small_slices(
    logits: torch.Tensor,
    fields: dict[str, Any],
    columns: int = 16,
    group: int = 4,
    candidates: int = 64,
    few: int = 16,
) -> tuple[torch.Tensor | None, ...]:
    """Sample with slices of ``group`` x ``columns`` tokens, ``few`` of which are compared with each other."""
    gpu._COLUMNS, gpu._MIN_GROUP = columns, group
    gpu.MAX_CANDIDATES, gpu._FEW_CANDIDATES = candidates, few
    output = kernels.sample(logits, SamplingTensors(**fields))
    return output.token_ids, output.logprob, output.top_logprobs, output.top_token_ids


def sample(call: Implementation, logits: torch.Tensor, params: SamplingTensors, **shape: int) -> SampleOutput:
    """Return what is chosen, on the CPU; ``shape`` is of the interpreter's slices."""
    if call is INTERPRETER:
        return SampleOutput(*call(sample_in_small_slices, logits, fields_of(params), **shape))
    if len(logits) and logits.stride(0) == 0:
        logits = logits[:1].to(call.device).expand(logits.shape)
    output = kernels.sample(logits.to(call.device), chosen_rows(params, device=call.device))
    values = (getattr(output, name) for name in SampleOutput.__dataclass_fields__)
    return SampleOutput(*(None if value is None else value.cpu() for value in values))


def check_draws(
    call: Implementation, logits: torch.Tensor, params: SamplingTensors, **shape: int
) -> torch.Tensor:
    """Require the tokens that separate operations over the whole vocabulary choose, and return them."""
    before = logits.clone()
    drawn = sample(call, logits, params, **shape).token_ids
    expected = sample_unfused(logits, params).token_ids
    different = (drawn != expected).nonzero()[:, 0].tolist()
    assert not different, {row: (drawn[row].item(), expected[row].item()) for row in different}
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    return drawn


def check_frequencies(token_ids: torch.Tensor, expected: list[float]) -> None:
    """Require no forbidden token, and each other one as often as its probability says, within six sigmas."""
    exact = torch.tensor(expected, dtype=torch.float64)
    num_draws = len(token_ids)
    counts = torch.bincount(token_ids, minlength=len(exact)).double()
    assert counts[exact == 0].sum() == 0, "a forbidden token was drawn"
    # Of large vocabularies rare tokens are counted together: bands by the normal distribution need some draws.
    common = exact * num_draws >= (100 if len(exact) > 100 else 0)
    checked = torch.cat([exact[common], exact[~common].sum()[None]])
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    band = SIGMAS * (num_draws * checked * (1 - checked)).clamp(min=0).sqrt() + 1e-6
    assert ((seen - num_draws * checked).abs() <= band).all()


def num_draws_of(call: Implementation) -> int:
    return 200_000 if call is GPU else 20_000


# Frequencies, which take too many draws for the interpreter. There each draw is compared with plain torch's.
FREQUENCIES = pytest.mark.parametrize(
    "implementation", [REFERENCE, pytest.param(GPU, marks=pytest.mark.gpu)], ids=str
)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@FREQUENCIES
def test_frequencies(implementation: Implementation, filters: dict[str, Any]) -> None:
    num_draws = num_draws_of(implementation)
    for vocab_size in (61, 5003) if implementation is GPU else (61,):
        logits = heavy_tailed_logits(vocab_size)
        top_k = min(filters.get("top_k", 0), vocab_size)
        expected = exact_distribution(logits, **{**filters, "top_k": top_k})
        rows, params = logits.expand(num_draws, -1), make_params(num_draws, **filters)
        check_frequencies(sample(implementation, rows, params).token_ids, expected)
        if implementation is REFERENCE:
            check_frequencies(sample_unfused(rows, params).token_ids, expected)


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.4}], ids=str)
@FREQUENCIES
def test_frequencies_with_bias(implementation: Implementation, filters: dict[str, Any]) -> None:
    logits, num_draws = heavy_tailed_logits(), num_draws_of(implementation)
    processors = make_processors(61, *[{60: 2.0, 3: 2.5, 7: -math.inf}] * num_draws)
    shifted = logits.clone()
    shifted[3] += 2.5
    shifted[60] += 2.0
    shifted[7] = -math.inf
    rows = logits.expand(num_draws, -1)
    params = make_params(num_draws, processors=processors, **filters)
    expected = exact_distribution(shifted, **filters)
    check_frequencies(sample(implementation, rows, params).token_ids, expected)
    if implementation is REFERENCE:
        check_frequencies(sample_unfused(rows, params).token_ids, expected)


def test_draws_over_positions_of_one_seed_are_independent() -> None:
    logits = torch.zeros(20_000, 2)
    params = make_params(20_000, seed=torch.tensor(11), position=torch.arange(20_000))
    token_ids = kernels.sample(logits, params).token_ids
    same_as_next = (token_ids[1:] == token_ids[:-1]).double().mean().item()
    assert abs(same_as_next - 0.5) < SIGMAS * 0.5 / math.sqrt(20_000)


def sizes(call: Implementation) -> list[tuple[int, int, int, dict[str, int]]]:
    """Return rows, tokens, how many cases of these, and the interpreter's slices."""
    if call is REFERENCE:
        return [*((256, tokens, 2, {}) for tokens in (1, 2, 67, 300, 1009)), (64, 5003, 2, {})]
    if call is INTERPRETER:
        # One slice and several; the last with groups of two tokens and few places for candidates: ties overflow.
        overflow = {"columns": 64, "group": 8, "candidates": 16, "few": 4}
        return [(24, 3, 1, {}), (24, 67, 1, {}), (24, 301, 1, {"few": 64}), (24, 301, 1, overflow)]
    # Common vocabularies, and sizes around them; groups of 16, 32 and 64 tokens.
    few = [(128, tokens, 4, {}) for tokens in (3, 67, 1009, 4096, 32_000, 50_257)]
    return few + [(48, tokens, 2, {}) for tokens in (128_256, 140_001, 151_936, 300_001)]


def test_draws_and_logprobs_are_those_of_separate_operations(implementation: Implementation) -> None:
    for num_rows, vocab_size, num_cases, shape in sizes(implementation):
        for seed in range(num_cases):
            logits, params = random_case(num_rows, vocab_size, seed)
            num_logprobs = min(3, vocab_size)
            params = SamplingTensors(**{**fields_of(params), "num_logprobs": num_logprobs})
            actual, expected = sample(implementation, logits, params, **shape), sample_unfused(logits, params)
            assert torch.equal(actual.token_ids, expected.token_ids)
            tolerance = {"rtol": 0, "atol": 0 if implementation is REFERENCE else 1e-5}
            torch.testing.assert_close(actual.logprob, expected.logprob, **tolerance)
            torch.testing.assert_close(actual.top_logprobs, expected.top_logprobs, **tolerance)
            assert torch.equal(logits.gather(1, actual.top_token_ids), logits.topk(num_logprobs).values)
            assert all(len(set(row)) == num_logprobs for row in actual.top_token_ids.tolist())


def test_logprobs_are_the_models_own() -> None:
    logits, params = random_case(32, 500, seed=4)
    expected = logits.double().log_softmax(-1)
    for output in (kernels.sample(logits, params), sample_unfused(logits, params)):
        chosen = expected.gather(1, output.token_ids.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(output.logprob.double(), chosen, rtol=0, atol=1e-5)
        assert output.top_logprobs.shape == output.top_token_ids.shape == (32, 3)
        for exact in (expected.sort(descending=True).values[:, :3], expected.gather(1, output.top_token_ids)):
            torch.testing.assert_close(output.top_logprobs.double(), exact, rtol=0, atol=1e-5)
        assert (output.top_logprobs.diff(dim=1) <= 0).all()


def report_of_interpreter(*args: Any, columns: int, group: int) -> LogprobReport:
    gpu._COLUMNS, gpu._MIN_GROUP = columns, group
    *inputs, num_logprobs = args
    report = new_report(len(inputs[0]), num_logprobs, "cpu")
    report_logprobs(*inputs, report)
    return report


def report(
    call: Implementation, logits: torch.Tensor, tokens: torch.Tensor, counts: list[int], num_logprobs: int
) -> LogprobReport:
    inputs = [each.to(call.device) for each in (logits, tokens, torch.tensor(counts, dtype=torch.int32))]
    if call is INTERPRETER:
        return call(report_of_interpreter, *inputs, num_logprobs, columns=16, group=4)
    written = new_report(len(logits), num_logprobs, call.device)
    report_logprobs(*inputs, written)
    return LogprobReport(*(each.cpu() for each in written))


@each_dtype
@pytest.mark.parametrize(("vocab_size", "num_logprobs"), [(67, 0), (67, 20), (1009, 5), (21, 20)])
def test_reports_of_tokens_chosen_elsewhere(
    implementation: Implementation, dtype: torch.dtype, vocab_size: int, num_logprobs: int
) -> None:
    generator = torch.Generator().manual_seed(vocab_size + num_logprobs)
    # Coarse values: many ties. Masked tokens, of which one is the chosen one in row 1.
    logits = (torch.randn(7, vocab_size, generator=generator) * 4).round().to(dtype) / 2
    logits[1:3, ::2] = float("-inf")
    wide = torch.full((7, vocab_size + 13), float("nan"), dtype=dtype)
    wide[:, :vocab_size] = logits
    tokens = torch.tensor([0, 2, 3, vocab_size - 1, int(logits[4].argmax()), 5, 6])
    counts = [num_logprobs, num_logprobs, min(1, num_logprobs), 0, num_logprobs, -1, num_logprobs]
    written = report(implementation, wide[:, :vocab_size], tokens, counts, num_logprobs)
    exact = logits.double().log_softmax(-1)
    for row, count in enumerate(counts):
        ids, logprobs, rank = (each[row] for each in written)
        if count < 0:
            assert bool((ids == -77).all()) and int(rank) == -77
            continue
        assert int(ids[0]) == int(tokens[row]) and not ids[count + 1 :].any()
        most_likely = ids[1 : count + 1]
        assert torch.equal(logits[row, most_likely], logits[row].float().topk(count).values.to(dtype))
        assert len(set(most_likely.tolist())) == count
        asked = exact[row, ids[: count + 1]].float()
        torch.testing.assert_close(logprobs[: count + 1], asked, rtol=0, atol=2e-6)
        assert bool((logprobs[count + 1 :] == float("-inf")).all())
        assert int(rank) == int((logits[row] >= logits[row, tokens[row]]).sum())


@pytest.mark.gpu
def test_reports_of_large_vocabularies_and_of_rows_past_two_to_the_31() -> None:
    for vocab_size in (50_257, 151_936, 300_001):
        num_rows = 33
        logits = (torch.randn(num_rows, vocab_size) * 5).bfloat16()
        tokens = torch.randint(vocab_size, (num_rows,))
        actual, expected = (report(call, logits, tokens, [20] * num_rows, 20) for call in (GPU, REFERENCE))
        assert torch.equal(*(logits.gather(1, each.token_ids) for each in (actual, expected)))
        assert torch.equal(actual.ranks, expected.ranks)
        assert all(len(set(row)) == 20 for row in actual.token_ids[:, 1:].tolist())
        torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    vocab_size, num_rows = 151_936, 14_200
    logits = torch.zeros(num_rows, vocab_size, dtype=torch.float16, device="cuda")
    logits[-1] = torch.arange(vocab_size, device="cuda") % 1000
    written = new_report(num_rows, 2, "cuda")
    counts = torch.full((num_rows,), -1, dtype=torch.int32, device="cuda")
    counts[-1] = 2
    report_logprobs(logits, torch.full((num_rows,), 5, device="cuda"), counts, written)
    assert (written.token_ids[-1] % 1000).tolist() == [5, 999, 999]
    assert int(written.ranks[-1]) == int((logits[-1] >= 5).sum())


def test_reports_of_the_wrong_shape_are_named() -> None:
    logits, tokens, counts = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), torch.zeros(2).int()
    with pytest.raises(ShapeError, match="expected 1 to V \\+ 1=6 columns, got 8"):
        report_logprobs(logits, tokens, counts, new_report(2, 7, "cpu"))
    with pytest.raises(ShapeError, match="logits: expected dtype"):
        report_logprobs(logits.double(), tokens, counts, new_report(2, 2, "cpu"))
    report_logprobs(logits[:0], tokens[:0], counts[:0], new_report(0, 2, "cpu"))


@each_dtype
@pytest.mark.parametrize("vocab_size", [31, 67, 5000])
def test_masks_leave_allowed_tokens_and_other_rows(
    implementation: Implementation, dtype: torch.dtype, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    wide = torch.randn(5, vocab_size + 3, generator=generator).to(dtype)
    allowed = torch.rand(3, vocab_size, generator=generator) < 0.3
    words = torch.zeros(3, -(-vocab_size // 32), dtype=torch.int64)
    for mask, token in allowed.nonzero().tolist():
        words[mask, token // 32] |= 1 << token % 32
    bitmask = ((words + (1 << 31)) % (1 << 32) - (1 << 31)).int()  # the highest bit is the sign
    mask_rows, expected = torch.tensor([2, -1, 0, 2, 1], dtype=torch.int32), wide.clone()
    for row, mask in enumerate(mask_rows.tolist()):
        if mask >= 0:
            expected[row, :vocab_size][~allowed[mask]] = float("-inf")
    device = implementation.device
    written = wide.to(device)
    implementation(mask_logits, written[:, :vocab_size], bitmask.to(device), mask_rows.to(device))
    assert torch.equal(written.cpu(), expected)


def test_masks_of_the_wrong_shape_are_named() -> None:
    logits, mask_rows = torch.zeros(2, 65), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ShapeError, match="bitmask: expected 3 words for V=65, got 2"):
        mask_logits(logits, torch.zeros(2, 2, dtype=torch.int32), mask_rows)
    with pytest.raises(ShapeError, match="expected a last stride of 1"):
        mask_logits(torch.zeros(65, 2).T, torch.zeros(2, 3, dtype=torch.int32), mask_rows)


def test_logprobs_on_request_only(implementation: Implementation) -> None:
    logits = torch.randn(3, 9)
    none = sample(implementation, logits, make_params(3))
    assert (none.logprob, none.top_logprobs, none.top_token_ids) == (None, None, None)
    only_chosen = sample(implementation, logits, make_params(3, num_logprobs=0))
    assert only_chosen.logprob.shape == (3,)
    assert only_chosen.top_logprobs.shape == (3, 0)


def test_rows_do_not_depend_on_their_batch(implementation: Implementation) -> None:
    for vocab_size in {"reference": (67, 1009), "interpreter": (301,), "gpu": (1009, 50_257)}[
        implementation.name
    ]:
        num_rows = 12 if implementation is INTERPRETER else 64
        logits, params = random_case(num_rows, vocab_size, seed=9)
        whole = sample(implementation, logits, params)
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
        few = [torch.tensor([7, 3, 3, 11])]
        for rows in few if implementation is INTERPRETER else [*few, order, order[:7], *order[:16].split(1)]:
            part = sample(implementation, logits[rows], chosen_rows(params, rows))
            for name in SampleOutput.__dataclass_fields__:
                assert torch.equal(getattr(part, name), getattr(whole, name)[rows])


def test_rows_of_a_wider_tensor(implementation: Implementation) -> None:
    logits, params = random_case(4, 67, seed=8)
    wide = torch.full((4, 80), float("nan"), device=implementation.device)
    wide[:, :67] = logits
    drawn = sample(implementation, wide[:, :67], params).token_ids
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_rows(implementation: Implementation, temperature: float) -> None:
    params = make_params(0, temperature=temperature, top_k=3, num_logprobs=2)
    for output in (
        sample(implementation, torch.zeros(0, 67), params),
        sample_unfused(torch.zeros(0, 67), params),
    ):
        assert output.token_ids.shape == (0,)
        assert output.top_logprobs.shape == output.top_token_ids.shape == (0, 2)


# Filters, ties and numbers at the ends of their ranges.


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_k": 40},
        {"top_p": 0.5},
        {"top_k": 9, "top_p": 0.8},
        {"min_p": 0.2},
    ],
    ids=str,
)
def test_infinite_and_equal_logits(implementation: Implementation, filters: dict[str, Any]) -> None:
    for vocab_size in (150, 5003) if implementation is GPU else (150,):
        logits = torch.zeros(6, vocab_size)
        logits[1] = logits[4] = -math.inf
        logits[2, 1::2] = -math.inf
        logits[3, vocab_size - 20] = math.inf
        logits[4, [70, vocab_size - 10]] = 2.0
        # More ties than places for candidates.
        logits[5, 20:120] = 1.0
        drawn = check_draws(implementation, logits, make_params(6, **filters))
        assert drawn[1] == 0 and drawn[2] % 2 == 0 and drawn[3] == vocab_size - 20
        assert drawn[4] in (70, vocab_size - 10)


def test_greedy_rows_take_the_first_maximum(implementation: Implementation) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [9.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    params = make_params(3, temperature=0.0, top_k=2, top_p=0.5)
    assert check_draws(implementation, logits, params).tolist() == [1, 0, 0]


@pytest.mark.parametrize("filters", [{}, {"top_k": 500}, {"top_p": 0.9999}, {"min_p": 1e-6}], ids=str)
def test_minus_infinity_is_never_drawn(filters: dict[str, Any]) -> None:
    logits = torch.zeros(2000, 600)
    logits[:, ::2] = -math.inf
    assert (check_draws(REFERENCE, logits, make_params(2000, **filters)) % 2 == 1).all()


def test_top_k_keeps_ties() -> None:
    logits = torch.tensor([5.0, 4.0, 4.0, 4.0, 1.0]).expand(4000, -1)
    assert set(check_draws(REFERENCE, logits, make_params(4000, top_k=2)).tolist()) == {0, 1, 2, 3}


def test_top_p_takes_the_fewest_and_the_lower_ids_first() -> None:
    logits = torch.tensor([0.1, 0.3, 0.3, 0.3]).log().expand(4000, -1)
    for top_p, kept in ((0.59, {1, 2}), (0.61, {1, 2, 3}), (1e-6, {1})):
        assert set(check_draws(REFERENCE, logits, make_params(4000, top_p=top_p)).tolist()) == kept


def test_top_k_of_nearly_all_tokens(implementation: Implementation) -> None:
    # More than there are groups, so that the groups' maxima say nothing about the k-th largest score.
    logits = torch.randn(20, 67, generator=torch.Generator().manual_seed(2)) * 0.1
    params = make_params(20, top_k=[60, 66] * 10, top_p=[1.0, 1.0, 0.99, 0.99] * 5)
    check_draws(implementation, logits, params)


def test_flat_rows_keep_more_than_there_are_places_for_candidates(implementation: Implementation) -> None:
    logits = torch.randn(12, 150, generator=torch.Generator().manual_seed(3)) * 0.1
    params = make_params(12, top_k=[0, 40, 100] * 4, min_p=[0.0, 0.0, 0.0, 0.9] * 3, top_p=0.5)
    check_draws(implementation, logits, params, candidates=16)


def test_a_small_top_k_and_top_p_of_what_it_keeps(implementation: Implementation) -> None:
    # Two chunks of those that are compared with each other, more of them than top-k keeps, and top-p down to one token.
    logits = torch.randn(24, 301, generator=torch.Generator().manual_seed(4))
    logits = (logits * 8).round() / 8
    params = make_params(24, top_k=[5, 40, 12] * 8, top_p=[0.7, 0.8, 0.05, 1.0] * 6)
    check_draws(implementation, logits, params, candidates=256, few=64)


def test_half_of_eight_equal_tokens_is_four(implementation: Implementation) -> None:
    logits = torch.zeros(32, 301)
    logits[:, 100:132:4] = 9.0
    drawn = check_draws(implementation, logits, make_params(32, top_k=8, top_p=0.5), few=64)
    assert sorted(set(drawn.tolist())) == [100, 104, 108, 112]


# The ties are compared with each other, are searched, or have no places as candidates.
@pytest.mark.parametrize(("candidates", "few"), [(64, 64), (32, 16), (16, 16)])
@kernels_only
def test_top_p_at_the_exact_edge_of_ties(implementation: Implementation, candidates: int, few: int) -> None:
    # 0.3 in float32 is a little more than 0.3: of twenty equal tokens it takes seven, not six.
    logits = torch.full((24, 67), -math.inf)
    logits[:, 10:30] = 1.0
    params = make_params(24, top_p=0.3, top_k=[0, 5, 0, 0] * 6)
    drawn = check_draws(implementation, logits, params, candidates=candidates, few=few, columns=32)
    assert drawn.min() >= 10 and drawn.max() == 16


def test_min_p_at_the_edge_among_large_logits(implementation: Implementation) -> None:
    # 0.5 is 0.3068528 below 10,000. The next lower float32 number is 0.3068548 above, and rounding goes there.
    for num_rows, vocab_size in ((8, 67), (512, 5003)) if implementation is GPU else ((8, 67),):
        logits = torch.full((num_rows, vocab_size), 9999.306640625)
        logits[:, 33] = 1e4
        assert (check_draws(implementation, logits, make_params(num_rows, min_p=0.5)) == 33).all()


# One slice and several, all candidates compared with each other or too many.
@pytest.mark.parametrize(("vocab_size", "shape"), [(67, {"few": 64}), (131, {"candidates": 16})], ids=str)
def test_ends_of_every_range(implementation: Implementation, vocab_size: int, shape: dict[str, int]) -> None:
    num_rows = 32 if implementation is INTERPRETER else 2000
    for num_tokens in (vocab_size, 700, 50_257) if implementation is GPU else (vocab_size,):
        logits, params = range_ends(num_rows if num_tokens < 5000 else 96, num_tokens)
        assert check_draws(implementation, logits, params, **shape).max() < 3 * num_tokens // 4
        if implementation is GPU:
            drawn = sample_unfused(logits.cuda(), chosen_rows(params, device="cuda")).token_ids.cpu()
            assert torch.equal(drawn, sample_unfused(logits, params).token_ids)


@pytest.mark.parametrize("vocab_size", [67, 700])
def test_scores_stay_finite_at_the_ends_of_every_range(vocab_size: int) -> None:
    logits, params = range_ends(2000, vocab_size)
    allowed = 3 * vocab_size // 4
    scores = reference.apply_penalties(reference.apply_processors(logits, params), params)
    scaled = scores / params.temperature.clamp(min=GREEDY_TEMPERATURE).unsqueeze(1)
    for values in (scores, scaled):
        assert values[:, :allowed].isfinite().all()
        assert (values[:, allowed:] == -math.inf).all()


def test_no_number_makes_a_forbidden_token(implementation: Implementation) -> None:
    for vocab_size in (67,) if implementation is INTERPRETER else (67, 700, 5003):
        drawn = check_draws(implementation, *beyond_every_range(vocab_size))
        assert drawn.min() >= 5 and drawn.max() <= 7


def test_an_infinite_temperature_draws_any_allowed_token() -> None:
    logits = torch.tensor([-1e4, 3.0, -math.inf, 1e4]).repeat(20_000, 1)
    drawn = kernels.sample(logits, make_params(20_000, temperature=math.inf)).token_ids
    check_frequencies(drawn, [1 / 3, 1 / 3, 0.0, 1 / 3])


def test_not_a_number_ends_and_stays_in_the_vocabulary(implementation: Implementation) -> None:
    logits = torch.full((4, 67), math.nan)
    logits[2:, 5] = 1.0
    drawn = sample(implementation, logits, make_params(4, top_k=[3, 0, 3, 0], top_p=0.5)).token_ids
    assert ((drawn >= 0) & (drawn < 67)).all()


@pytest.mark.parametrize("num_logprobs", [-1, 2])
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.0},
        *FILTERS[:1],
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"top_k": 5, "top_p": 0.5},
    ],
    ids=str,
)
def test_rows_without_a_token_are_told(
    implementation: Implementation, filters: dict[str, Any], num_logprobs: int
) -> None:
    for vocab_size in (67, 50_257, 151_936) if implementation is GPU else (67,):
        logits, expected = rows_without_a_token(vocab_size)
        for invalid in (-1, 0):
            options = {**filters, "num_logprobs": num_logprobs, "invalid_token_id": invalid}
            params = make_params(len(logits), **options)
            wanted = [invalid if token is None else token for token in expected]
            assert check_draws(implementation, logits, params).tolist() == wanted
    # What the request asks for counts, too: all tokens but those with NaN are forbidden.
    logits = torch.full((2, 67), math.nan)
    logits[:, :3] = 1.0
    processors = make_processors(67, *(dict.fromkeys(range(end), -math.inf) for end in (3, 2)))
    params = make_params(2, **filters, processors=processors, invalid_token_id=-1)
    assert check_draws(implementation, logits, params).tolist() == [-1, 2]


# How plain torch chooses, and what it refuses.


def test_candidate_path_is_taken_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    full_sorts: list[int] = []
    original = reference._draw_by_full_sort

    def counted(scaled: torch.Tensor, *rest: Any) -> torch.Tensor:
        full_sorts.append(scaled.shape[0])
        return original(scaled, *rest)

    monkeypatch.setattr(reference, "_draw_by_full_sort", counted)
    logits = torch.randn(4, 5003, generator=torch.Generator().manual_seed(0))
    logits[:3] *= 6
    # Row 3 is nearly flat: top-p needs more than the candidates. Row 1 ties over more tokens than there are candidates.
    logits[1] = torch.where(logits[1] > 2, 2.0, logits[1])
    params = make_params(4, top_p=[0.9, 1.0, 0.9, 0.9], top_k=[0, 20, 0, 0])
    expected = sample_unfused(logits, params).token_ids
    assert torch.equal(kernels.sample(logits, params).token_ids, expected)
    assert full_sorts == [2]


def test_top_p_counts_ties_of_top_k_beyond_the_candidates() -> None:
    # Of weights 10, 9 and a thousand times 0.02, all within top-k, 30 % is more than the first holds. Of the candidates
    # alone it would be less.
    weights = torch.full((5003,), 1e-4)
    weights[:1002] = 0.02
    weights[500], weights[700] = 10.0, 9.0
    token_ids = kernels.sample(weights.log().expand(400, -1), make_params(400, top_k=20, top_p=0.3)).token_ids
    assert set(token_ids.tolist()) == {500, 700}


def test_unfiltered_rows_draw_the_same_across_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 101, generator=torch.Generator().manual_seed(0))
    params = make_params(50)
    expected = kernels.sample(logits, params).token_ids
    monkeypatch.setattr(reference, "NOISE_TILE", 300)
    assert torch.equal(kernels.sample(logits, params).token_ids, expected)


def test_seed_and_position_matter() -> None:
    logits = torch.zeros(200, 1000)
    base = kernels.sample(logits, make_params(200)).token_ids
    assert (base == kernels.sample(logits, make_params(200)).token_ids).all()
    other_seed = kernels.sample(logits, make_params(200, seed=torch.arange(200) + 10**12)).token_ids
    other_position = kernels.sample(logits, make_params(200, position=torch.arange(200) + 99)).token_ids
    high_half_only = kernels.sample(
        logits, make_params(200, seed=torch.arange(200) * 7919 - 5 + (1 << 40))
    ).token_ids
    for other in (other_seed, other_position, high_half_only):
        assert (base == other).sum() < 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": torch.ones(3)}, "temperature: expected R=2, got 3"),
        ({"top_k": torch.ones(2)}, "top_k: expected dtype torch.int32, got torch.float32"),
        ({"output_counts": torch.ones(2, 6, dtype=torch.int32)}, "output_counts: expected V=5, got 6"),
        ({"prompt_mask": torch.ones(2, 5)}, "prompt_mask: expected dtype torch.bool, got torch.float32"),
        ({"processors": make_processors(5, {})}, "entries: expected R=2, got 1"),
        ({"processors": make_processors(33, {}, {})}, "bitmask: expected 1 words for V=5, got 2"),
        ({"processors": make_processors(5, {}, {}, width=3)}, "expected a power of two for M, got 3"),
        (
            {"processors": make_processors(5, {}, {})._replace(bias=torch.zeros(4, 3).t())},
            "processors: expected contiguous tensors",
        ),
        ({"num_logprobs": 6}, "num_logprobs: expected at most V=5, got 6"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mismatches_are_named(change: dict[str, Any], message: str) -> None:
    params = SamplingTensors(**{**fields_of(make_params(2)), **change})
    for draw in (kernels.sample, sample_unfused):
        with pytest.raises(ShapeError, match=message):
            draw(torch.zeros(2, 5), params)


# What is done to logits before a token is drawn: bias and penalties.


@pytest.mark.parametrize("draw", [kernels.sample, sample_unfused])
def test_bias_by_definition(draw: Any) -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.5, 9.0]]).expand(2, -1).contiguous()
    before = logits.clone()
    processors = make_processors(5, {1: 2.5, 4: -math.inf, 0: -2.0}, {4: -8.0})
    adjusted = reference.apply_processors(logits, make_params(2, processors=processors))
    assert adjusted.tolist() == [[-2.0, 3.5, 3.0, 2.5, -math.inf], [0.0, 1.0, 3.0, 2.5, 1.0]]
    greedy = make_params(
        2, temperature=0.0, processors=processors, num_logprobs=1, repetition_penalty=2.0,
        prompt_mask=torch.tensor([[False, True, False, False, False]]).expand(2, -1),
    )  # fmt: skip
    output = draw(logits, greedy)
    # The penalty comes after the bias: token 1 is at 3.5 / 2. Log-probabilities know of neither.
    assert output.token_ids.tolist() == [2, 2]
    assert output.top_token_ids.tolist() == [[4], [4]]
    torch.testing.assert_close(output.logprob, before.log_softmax(-1)[:, 2])
    assert torch.equal(logits, before)


def random_limits(num_rows: int, vocab_size: int, seed: int) -> list[Limited]:
    """Return rows whose bad words often begin with what was drawn last, some of them with the prompt's end."""
    choose = random.Random(seed)

    def tokens(most: int, least: int = 0) -> list[int]:
        return choose.choices(range(vocab_size), k=choose.randint(least, most))

    rows = []
    for _ in range(num_rows):
        known, words = tokens(30), []
        for _ in range(choose.randrange(7)):
            start = choose.choice([known[len(known) - choose.randrange(3) :], tokens(2), []])
            words.append([*start, choose.randrange(vocab_size)])
        stops, allowed = tokens(5), choose.choice([[], tokens(8)])
        num_prompt_tokens = choose.randint(0, len(known))
        rows.append(Limited(known, choose.randrange(9), stops, allowed, words, num_prompt_tokens))
    return rows


@pytest.mark.parametrize("vocab_size", [3, 67, 5003])
def test_bitmasks_by_definition(implementation: Implementation, vocab_size: int) -> None:
    rows = random_limits(24, vocab_size, seed=vocab_size)
    assert {all(map(row.is_allowed, range(vocab_size))) for row in rows} == {True, False}
    limits = make_limits(rows)
    # The last rows' entries are written first; one row has none, and its entry stays as it is.
    entries = torch.arange(len(rows)).flip(0).int()
    entries[3] = -1
    position = torch.tensor([len(row.tokens) for row in rows]).flip(0)
    device = implementation.device
    bitmask = torch.full((len(rows), -(-vocab_size // 32)), 77, dtype=torch.int32, device=device)
    on_device = TokenLimits(*(table.to(device) for table in limits))
    implementation(write_bitmask, bitmask, entries.to(device), position.to(device), on_device)
    bits = (bitmask.cpu().unsqueeze(2) >> torch.arange(32) & 1).flatten(1)[:, :vocab_size]
    for entry, row in enumerate(rows):
        if entry in entries.tolist():
            assert bits[entry].tolist() == [row.is_allowed(token) for token in range(vocab_size)], row
        else:
            assert (bitmask[entry] == 77).all()


def test_limits_of_the_wrong_shape_are_named() -> None:
    limits = make_limits([Limited([1], 0, [], [], [])])
    rows = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    bitmask = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ShapeError, match="bad_word_token_ids: expected N=1, got 2"):
        write_bitmask(bitmask, *rows, limits._replace(bad_word_token_ids=torch.zeros(2, 20).int()))
    with pytest.raises(ShapeError, match="drawn_token_ids: expected P=20, got 19"):
        write_bitmask(bitmask, *rows, limits._replace(drawn_token_ids=torch.zeros(2, 19).long()))
    with pytest.raises(ShapeError, match="expected contiguous tensors"):
        write_bitmask(bitmask, *rows, limits._replace(drawn_token_ids=torch.zeros(20, 2).long().t()))


def test_no_bias_costs_no_copy() -> None:
    logits = torch.zeros(1, 3)
    for processors in (None, make_processors(3, None)):
        assert reference.apply_processors(logits, make_params(1, processors=processors)) is logits


def test_penalties_by_definition() -> None:
    logits, params = random_case(40, 67, seed=2)
    actual = reference.apply_penalties(logits, params)
    assert params.prompt_mask is not None
    assert params.output_counts is not None
    for row in range(40):
        for token in range(67):
            value = logits[row, token].item()
            count = int(params.output_counts[row, token])
            repetition = params.repetition_penalty[row].item()
            if count > 0 or bool(params.prompt_mask[row, token]):
                value = value / repetition if value > 0 else value * repetition
            value -= params.frequency_penalty[row].item() * count
            value -= params.presence_penalty[row].item() * (count > 0)
            assert actual[row, token].item() == pytest.approx(value, abs=1e-5)


def test_penalties_without_counts_or_mask() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    mask = torch.tensor([[True, True, False]])
    params = make_params(1, repetition_penalty=2.0, presence_penalty=1.0, prompt_mask=mask)
    assert reference.apply_penalties(logits, params).tolist() == [[1.0, -4.0, 1.0]]
    counts = torch.tensor([[2, 0, 0]], dtype=torch.int32)
    params = make_params(1, presence_penalty=1.0, frequency_penalty=0.5, output_counts=counts)
    assert reference.apply_penalties(logits, params).tolist() == [[0.0, -2.0, 1.0]]
    assert reference.apply_penalties(logits, make_params(1, prompt_mask=mask)) is logits


# Random bits: published known answers, Triton's generator word for word, and noise that never leaves (0, inf).

ALL_ONES = 0xFFFFFFFF
# (counter, key, result): the vectors published with Random123 for philox4x32-10.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0]
POSITIONS = [0, 1, 1023, 2**31 - 1, 7, 65_536]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox4x32(
        tuple(torch.tensor([[word]]) for word in counter), tuple(torch.tensor([[word]]) for word in key)
    )
    assert tuple(word.item() for word in words) == expected


def test_four_tokens_share_a_counter() -> None:
    tokens = torch.arange(50).unsqueeze(0)
    bits = token_bits(tokens, torch.tensor(SEEDS), torch.tensor(POSITIONS))
    quads = torch.arange(13).unsqueeze(0)
    zero = torch.zeros_like(quads)
    for row, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        key = (torch.tensor([[seed & ALL_ONES]]), torch.tensor([[(seed >> 32) & ALL_ONES]]))
        words = philox4x32((quads, zero + position, zero, zero), key)
        for word in range(4):
            assert torch.equal(bits[row, word::4], words[word][0, : len(bits[row, word::4])])


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 50])
def test_vocabulary_bits_are_those_of_its_tokens(vocab_size: int) -> None:
    seed, position = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    expected = token_bits(torch.arange(vocab_size).unsqueeze(0), seed, position)
    assert torch.equal(vocabulary_bits(vocab_size, seed, position), expected)


def test_token_bits_by_row_and_by_column_agree() -> None:
    seed, position = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    whole = token_bits(torch.arange(90).unsqueeze(0), seed, position)
    chosen = torch.randint(0, 90, (len(SEEDS), 7), generator=torch.Generator().manual_seed(0))
    chosen_before = chosen.clone()
    assert torch.equal(token_bits(chosen, seed, position), whole.gather(1, chosen))
    assert torch.equal(chosen, chosen_before)
    assert torch.equal(token_bits(chosen[2:3], seed[2:3], position[2:3]), whole[2:3].gather(1, chosen[2:3]))


@triton.jit
def _bits_kernel(out_ptr, seed_ptr, position_ptr, num_tokens, TILE: tl.constexpr):
    row = tl.program_id(0)
    tokens = tl.arange(0, TILE)
    zero = tokens * 0
    position = tl.load(position_ptr + row).to(tl.int32)
    first, second, third, fourth = tl.philox(
        tl.load(seed_ptr + row), tokens // 4, zero + position, zero, zero
    )
    later = tl.where(tokens % 4 == 2, third, fourth)
    word = tl.where(tokens % 4 == 0, first, tl.where(tokens % 4 == 1, second, later))
    tl.store(out_ptr + row * num_tokens + tokens, word.to(tl.int64), mask=tokens < num_tokens)


def bits_by_triton(out: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> None:
    _bits_kernel[(len(seeds),)](out, seeds, positions, out.shape[1], TILE=128)


@kernels_only
def test_bits_are_those_of_triton(implementation: Implementation) -> None:
    out = torch.zeros(len(SEEDS), 100, dtype=torch.int64, device=implementation.device)
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    implementation(bits_by_triton, out, seeds.to(out.device), positions.to(out.device))
    assert torch.equal(out.cpu() & ALL_ONES, token_bits(torch.arange(100).unsqueeze(0), seeds, positions))


def test_noise_is_positive_and_finite() -> None:
    bits = torch.tensor([0, 1, 2**31, ALL_ONES - 1, ALL_ONES])
    before = bits.clone()
    noise = exponential_noise(bits)
    assert torch.equal(bits, before)
    assert torch.isfinite(noise).all()
    assert (noise > 0).all()
    # Exponential: -log of a number half a step away from the ends of (0, 1).
    assert noise[0].item() == pytest.approx(33 * 0.6931471805599453)
    assert noise[-1].item() == pytest.approx(2.0**-33, rel=1e-6)
    assert noise[-2].item() == pytest.approx(3 * 2.0**-33, rel=1e-6)


def test_noise_is_exponential() -> None:
    bits = token_bits(torch.arange(50_000).unsqueeze(0), torch.tensor([5]), torch.tensor([9]))
    noise = exponential_noise(bits)
    # Six standard errors of mean 1, and of the share above 1 (which is 1/e).
    assert abs(noise.mean().item() - 1.0) < 6 / 50_000**0.5
    assert abs((noise > 1).double().mean().item() - 0.36787944) < 6 * (0.3679 * 0.6321 / 50_000) ** 0.5


# On a GPU at the sizes of models: repetition, graphs, far addresses.


def assert_same(left: SampleOutput, right: SampleOutput) -> None:
    for name in SampleOutput.__dataclass_fields__:
        assert torch.equal(getattr(left, name), getattr(right, name)), name


# Flat: top-p keeps thousands of tokens, more than there are places for candidates.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"top_p": 0.5}, {"top_k": 5000, "top_p": 0.9}, {"min_p": 0.02}], ids=str
)
def test_draws_from_flat_distributions(filters: dict[str, Any]) -> None:
    num_rows, vocab_size = 512, 20_011
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(8))
    params = make_params(num_rows, **filters)
    check_draws(GPU, logits, params)


@pytest.mark.gpu
def test_a_thousand_runs_agree_bit_for_bit() -> None:
    logits, params = random_case(192, 50_257, seed=5)
    logits, params = logits.cuda(), chosen_rows(params, device="cuda")
    first = kernels.sample(logits, params)
    for _ in range(1000):
        again = kernels.sample(logits, params)
        assert_same(first, again)


@pytest.mark.gpu
def test_replayed_graphs_read_their_inputs_anew() -> None:
    logits, params = random_case(64, 50_257, seed=6)
    other_logits, other_params = random_case(64, 50_257, seed=7)
    static_logits, static = logits.cuda(), chosen_rows(params, device="cuda")
    kernels.sample(static_logits, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = kernels.sample(static_logits, static)
    for case_logits, case in ((logits, params), (other_logits, other_params)):
        static_logits.copy_(case_logits)
        for name in SamplingTensors.__dataclass_fields__:
            if isinstance(getattr(static, name), torch.Tensor):
                getattr(static, name).copy_(getattr(case, name))
        assert static.processors is not None and case.processors is not None
        for table, given in zip(static.processors, case.processors, strict=True):
            table.copy_(given)
        graph.replay()
        assert_same(output, kernels.sample(case_logits.cuda(), chosen_rows(case, device="cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.9}], ids=str)
def test_logits_past_two_to_the_31(filters: dict[str, Any]) -> None:
    vocab_size, num_rows = 50_257, 43_000
    assert num_rows * vocab_size > 2**31
    logits = torch.randn(num_rows, vocab_size, device="cuda") * 3
    params = chosen_rows(make_params(num_rows, **filters), device="cuda")
    whole = kernels.sample(logits, params).token_ids
    last = slice(num_rows - 40, None)
    assert torch.equal(kernels.sample(logits[last].clone(), params.select(last)).token_ids, whole[last])


@pytest.mark.gpu
def test_many_equal_logits_under_every_filter() -> None:
    # More ties than there are places for candidates: top-k keeps them all, top-p the lowest ones.
    logits = torch.zeros(2000, 5003)
    logits[:, 100:4000] = 1.0
    for filters in ({"top_k": 20}, {"top_k": 20, "top_p": 0.5}, {"top_p": 0.25}, {"min_p": 0.9}):
        params = make_params(2000, **filters)
        drawn = sample(GPU, logits, params).token_ids
        allowed = range(100, 4000)
        if filters.get("top_p") == 0.5:
            allowed = range(100, 100 + 1950)
        if filters.get("top_p") == 0.25:
            weight = 3900 * math.e + 1103
            allowed = range(100, 100 + math.ceil(0.25 * weight / math.e))
        assert drawn.min() >= allowed.start and drawn.max() < allowed.stop
        assert drawn.max() > allowed.stop - 60
        assert torch.equal(drawn[:200], sample_unfused(logits[:200], params.select(slice(0, 200))).token_ids)
