"""The Triton sampler on a device: the reference's draws, exact distributions, no dependence on the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rose_backend.kernels import SampleOutput, SamplingTensors, sample, sample_unfused
from tests.kernels.test_sample import (
    beyond_every_range,
    exact_distribution,
    heavy_tailed_logits,
    make_params,
    random_case,
    range_ends,
    rows_without_a_token,
)

pytestmark = pytest.mark.gpu

NUM_DRAWS = 200_000
SIGMAS = 6


def on_gpu(params: SamplingTensors, rows: torch.Tensor | slice = slice(None)) -> SamplingTensors:
    fields = {name: getattr(params, name) for name in SamplingTensors.__dataclass_fields__}
    return SamplingTensors(
        **{
            name: value[rows].cuda() if isinstance(value, torch.Tensor) else value
            for name, value in fields.items()
        }
    )


def assert_same(left: SampleOutput, right: SampleOutput) -> None:
    assert torch.equal(left.token_ids, right.token_ids)
    if left.logprob is not None:
        assert torch.equal(left.logprob, right.logprob)
        assert torch.equal(left.top_logprobs, right.top_logprobs)
        assert torch.equal(left.top_token_ids, right.top_token_ids)


# Common vocabularies, and sizes around them; groups of 16, 32 and 64 tokens.
@pytest.mark.parametrize(
    "vocab_size", [3, 67, 1009, 4096, 32_000, 50_257, 128_256, 140_001, 151_936, 300_001]
)
def test_draws_are_those_of_the_reference(vocab_size: int) -> None:
    for seed in range(4 if vocab_size < 100_000 else 2):
        logits, params = random_case(128 if vocab_size < 100_000 else 48, vocab_size, seed)
        expected = sample_unfused(logits, params)
        actual = sample(logits.cuda(), on_gpu(params))
        different = (actual.token_ids.cpu() != expected.token_ids).nonzero().flatten().tolist()
        assert not different, {
            row: (actual.token_ids[row].item(), expected.token_ids[row].item()) for row in different
        }
        torch.testing.assert_close(actual.logprob.cpu(), expected.logprob, rtol=0, atol=1e-5)
        torch.testing.assert_close(actual.top_logprobs.cpu(), expected.top_logprobs, rtol=0, atol=1e-5)
        named = logits.gather(1, actual.top_token_ids.cpu())
        torch.testing.assert_close(named, logits.topk(3).values, rtol=0, atol=0)


# Flat: top-p keeps thousands of tokens, more than there are places for candidates.
@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"top_p": 0.5}, {"top_k": 5000, "top_p": 0.9}, {"min_p": 0.02}], ids=str
)
def test_draws_from_flat_distributions(filters: dict[str, Any]) -> None:
    num_rows, vocab_size = 512, 20_011
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(8))
    params = make_params(num_rows, **filters)
    drawn = sample(logits.cuda(), on_gpu(params)).token_ids.cpu()
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)


@pytest.mark.parametrize("vocab_size", [61, 5003])
@pytest.mark.parametrize(
    "filters",
    [
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
    ],
    ids=str,
)
def test_frequencies(filters: dict[str, Any], vocab_size: int) -> None:
    logits = heavy_tailed_logits(vocab_size)
    expected = torch.tensor(exact_distribution(logits, **filters), dtype=torch.float64)
    params = on_gpu(make_params(NUM_DRAWS, **filters))
    token_ids = sample(logits.cuda().expand(NUM_DRAWS, -1), params).token_ids.cpu()
    counts = torch.bincount(token_ids, minlength=vocab_size).double()
    assert counts[expected == 0].sum() == 0, "a forbidden token was drawn"
    # Bands by the normal distribution need some draws expected; the rare tokens are counted together.
    common = expected * NUM_DRAWS >= 100
    checked = torch.cat([expected[common], expected[~common].sum()[None]])
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    band = SIGMAS * (NUM_DRAWS * checked * (1 - checked)).sqrt() + 1e-6
    assert ((seen - NUM_DRAWS * checked).abs() <= band).all()


@pytest.mark.parametrize("vocab_size", [1009, 50_257])
def test_a_row_draws_the_same_in_any_batch(vocab_size: int) -> None:
    logits, params = random_case(256, vocab_size, seed=9)
    logits = logits.cuda()
    expected = sample(logits, on_gpu(params))
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    for rows in (order, order[:7], torch.tensor([5, 5, 5]), *order[:16].split(1)):
        part = sample(logits[rows.cuda()], on_gpu(params, rows))
        whole = SampleOutput(
            *(getattr(expected, name)[rows.cuda()] for name in SampleOutput.__dataclass_fields__)
        )
        assert_same(part, whole)


def test_a_thousand_runs_agree_bit_for_bit() -> None:
    logits, params = random_case(192, 50_257, seed=5)
    logits, params = logits.cuda(), on_gpu(params)
    first = sample(logits, params)
    for _ in range(1000):
        again = sample(logits, params)
        assert_same(first, again)


def test_replayed_graphs_read_their_inputs_anew() -> None:
    logits, params = random_case(64, 50_257, seed=6)
    other_logits, other_params = random_case(64, 50_257, seed=7)
    static_logits, static = logits.cuda(), on_gpu(params)
    sample(static_logits, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sample(static_logits, static)
    for case_logits, case in ((logits, params), (other_logits, other_params)):
        static_logits.copy_(case_logits)
        for name in SamplingTensors.__dataclass_fields__:
            if isinstance(getattr(static, name), torch.Tensor):
                getattr(static, name).copy_(getattr(case, name))
        graph.replay()
        assert_same(output, sample(case_logits.cuda(), on_gpu(case)))


@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.9}], ids=str)
def test_logits_past_two_to_the_31(filters: dict[str, Any]) -> None:
    vocab_size, num_rows = 50_257, 43_000
    assert num_rows * vocab_size > 2**31
    logits = torch.randn(num_rows, vocab_size, device="cuda") * 3
    params = on_gpu(make_params(num_rows, **filters))
    whole = sample(logits, params).token_ids
    last = slice(num_rows - 40, None)
    assert torch.equal(sample(logits[last].clone(), params.select(last)).token_ids, whole[last])


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 5}, {"top_k": 500}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}],
    ids=str,
)
def test_infinite_and_equal_logits(filters: dict[str, Any]) -> None:
    vocab_size = 5003
    infinity = float("inf")
    logits = torch.zeros(5, vocab_size)
    logits[1] = -infinity
    logits[2, 1::2] = -infinity
    logits[3, 4000] = infinity
    logits[4] = -infinity
    logits[4, [70, 4444]] = 2.0
    params = make_params(5, **filters)
    drawn = sample(logits.cuda(), on_gpu(params)).token_ids.cpu()
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)
    assert drawn[1] == 0 and drawn[2] % 2 == 0 and drawn[3] == 4000 and drawn[4] in (70, 4444)


@pytest.mark.parametrize("vocab_size", [67, 5003, 50_257])
def test_ends_of_every_range(vocab_size: int) -> None:
    logits, params = range_ends(512 if vocab_size < 50_000 else 96, vocab_size)
    expected = sample_unfused(logits, params).token_ids
    drawn = sample(logits.cuda(), on_gpu(params)).token_ids.cpu()
    assert torch.equal(drawn, expected)
    assert torch.equal(sample_unfused(logits.cuda(), on_gpu(params)).token_ids.cpu(), expected)
    assert drawn.max() < 3 * vocab_size // 4


@pytest.mark.parametrize("vocab_size", [67, 5003])
def test_no_number_makes_a_forbidden_token(vocab_size: int) -> None:
    logits, params = beyond_every_range(vocab_size)
    drawn = sample(logits.cuda(), on_gpu(params)).token_ids.cpu()
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)
    assert drawn.min() >= 5 and drawn.max() <= 7


def test_min_p_at_the_edge_among_large_logits() -> None:
    # 0.5 is 0.3068528 below 10,000. The next lower float32 number is 0.3068548 above, and rounding goes there.
    logits = torch.full((512, 5003), 9999.306640625)
    logits[:, 33] = 1e4
    drawn = sample(logits.cuda(), on_gpu(make_params(512, min_p=0.5))).token_ids
    assert (drawn == 33).all()


def test_many_equal_logits_under_every_filter() -> None:
    # More ties than there are places for candidates: top-k keeps them all, top-p the lowest ones.
    logits = torch.zeros(2000, 5003)
    logits[:, 100:4000] = 1.0
    for filters in ({"top_k": 20}, {"top_k": 20, "top_p": 0.5}, {"top_p": 0.25}, {"min_p": 0.9}):
        params = make_params(2000, **filters)
        drawn = sample(logits.cuda(), on_gpu(params)).token_ids.cpu()
        allowed = range(100, 4000)
        if filters.get("top_p") == 0.5:
            allowed = range(100, 100 + 1950)
        if filters.get("top_p") == 0.25:
            weight = 3900 * math.e + 1103
            allowed = range(100, 100 + math.ceil(0.25 * weight / math.e))
        assert drawn.min() >= allowed.start and drawn.max() < allowed.stop
        assert drawn.max() > allowed.stop - 60
        assert torch.equal(drawn[:200], sample_unfused(logits[:200], _first_rows(params, 200)).token_ids)


def test_rows_of_a_wider_tensor() -> None:
    logits, params = random_case(32, 1009, seed=3)
    wide = torch.full((32, 1100), float("nan"), device="cuda")
    wide[:, :1009] = logits.cuda()
    assert_same(sample(wide[:, :1009], on_gpu(params)), sample(logits.cuda(), on_gpu(params)))


@pytest.mark.parametrize(
    "filters", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str
)
@pytest.mark.parametrize("vocab_size", [67, 50_257, 151_936])
def test_rows_without_a_token_are_told(vocab_size: int, filters: dict[str, Any]) -> None:
    logits, expected = rows_without_a_token(vocab_size)
    for invalid in (-1, 0):
        params = make_params(len(logits), **filters, num_logprobs=2, invalid_token_id=invalid)
        wanted = [invalid if token is None else token for token in expected]
        assert sample(logits.cuda(), on_gpu(params)).token_ids.tolist() == wanted


def test_no_rows() -> None:
    output = sample(torch.zeros(0, 50, device="cuda"), on_gpu(make_params(0, top_k=3, num_logprobs=2)))
    assert output.token_ids.shape == (0,)
    assert output.top_logprobs.shape == (0, 2)


def _first_rows(params: SamplingTensors, num_rows: int) -> SamplingTensors:
    return params.select(slice(0, num_rows))
