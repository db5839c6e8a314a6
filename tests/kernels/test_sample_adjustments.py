"""What the sampler does to logits before it draws: bias and penalties, by definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rose_backend.kernels import sample, sample_unfused
from rose_backend.kernels.sampling import reference as twin
from tests.kernels.test_sample import (
    NUM_DRAWS,
    SIGMAS,
    exact_distribution,
    heavy_tailed_logits,
    make_params,
    random_case,
)


@pytest.mark.parametrize("draw", [sample, sample_unfused])
def test_bias_by_definition(draw: Any) -> None:
    # Named twice, token 1 gets both; token 4 is forbidden; what follows a row's first -1 does not count.
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.5, 9.0]]).expand(2, -1).contiguous()
    before = logits.clone()
    bias_token_ids = torch.tensor([[1, 4, 1, 0], [4, -1, 0, 0]], dtype=torch.int32)
    bias = torch.tensor([[1.5, -math.inf, 1.0, -2.0], [-8.0, 99.0, 99.0, 99.0]])
    adjusted = twin.add_bias(logits, make_params(2, bias_token_ids=bias_token_ids, bias=bias))
    assert adjusted.tolist() == [[-2.0, 3.5, 3.0, 2.5, -math.inf], [0.0, 1.0, 3.0, 2.5, 1.0]]
    greedy = make_params(
        2, temperature=0.0, bias_token_ids=bias_token_ids, bias=bias, num_logprobs=1, repetition_penalty=2.0,
        prompt_mask=torch.tensor([[False, True, False, False, False]]).expand(2, -1),
    )  # fmt: skip
    output = draw(logits, greedy)
    # The penalty comes after the bias: token 1 is at 3.5 / 2. Log-probabilities know of neither.
    assert output.token_ids.tolist() == [2, 2]
    assert output.top_token_ids.tolist() == [[4], [4]]
    torch.testing.assert_close(output.logprob, before.log_softmax(-1)[:, 2])
    assert torch.equal(logits, before)


def test_no_bias_costs_no_copy() -> None:
    logits = torch.zeros(1, 3)
    assert twin.add_bias(logits, make_params(1)) is logits


@pytest.mark.parametrize("draw", [sample, sample_unfused])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.4}], ids=str)
def test_frequencies_with_bias(draw: Any, filters: dict[str, Any]) -> None:
    logits = heavy_tailed_logits()
    bias_token_ids = torch.tensor([[3, 60, 3, 7]], dtype=torch.int32)
    bias = torch.tensor([[1.0, 2.0, 1.5, -math.inf]])
    shifted = logits.clone()
    shifted[3] += 2.5
    shifted[60] += 2.0
    shifted[7] = -math.inf
    expected = exact_distribution(shifted, **filters)
    params = make_params(
        NUM_DRAWS,
        bias_token_ids=bias_token_ids.expand(NUM_DRAWS, -1),
        bias=bias.expand(NUM_DRAWS, -1),
        **filters,
    )
    token_ids = draw(logits.expand(NUM_DRAWS, -1), params).token_ids
    counts = torch.bincount(token_ids, minlength=len(logits)).tolist()
    for token, probability in enumerate(expected):
        band = SIGMAS * math.sqrt(NUM_DRAWS * probability * (1 - probability))
        assert abs(counts[token] - NUM_DRAWS * probability) <= band, f"token {token}"


def test_penalties_by_definition() -> None:
    logits, params = random_case(40, 67, seed=2)
    actual = twin.apply_penalties(logits, params)
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
    assert twin.apply_penalties(logits, params).tolist() == [[1.0, -4.0, 1.0]]
    counts = torch.tensor([[2, 0, 0]], dtype=torch.int32)
    params = make_params(1, presence_penalty=1.0, frequency_penalty=0.5, output_counts=counts)
    assert twin.apply_penalties(logits, params).tolist() == [[0.0, -2.0, 1.0]]
    assert twin.apply_penalties(logits, make_params(1, prompt_mask=mask)) is logits
