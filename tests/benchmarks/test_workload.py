"""All engines are asked for the same, and never twice for the same."""

from __future__ import annotations

import json

import numpy as np

from benchmarks.support.workload import RandomRequests

MIXED = RandomRequests(200, (16, 64), (1, 8), "greedy", seed=5)


def test_lengths_and_tokens_are_in_their_ranges() -> None:
    prompts, output_lens = MIXED.prompts(50), MIXED.output_lens()
    assert len(prompts) == len(output_lens) == 200
    assert {min(map(len, prompts)), max(map(len, prompts))} == {16, 64}
    assert set(output_lens) == set(range(1, 9))
    tokens = {token for prompt in prompts for token in prompt}
    assert tokens == set(range(1, 50))


def test_another_process_makes_the_same_requests() -> None:
    other = RandomRequests.from_json(json.loads(json.dumps(MIXED.as_json())))
    assert other == MIXED
    assert other.prompts(50) == MIXED.prompts(50)
    assert other.arrivals(7.0) == MIXED.arrivals(7.0)


def test_no_prompt_of_another_seed_has_a_known_beginning() -> None:
    known = {tuple(prompt[:8]) for prompt in MIXED.prompts(50_257)}
    later = RandomRequests(200, (16, 64), (1, 8), "greedy", seed=6).prompts(50_257)
    assert not known & {tuple(prompt[:8]) for prompt in later}
    assert len(known) == 200


def test_arrivals_are_poisson() -> None:
    many = RandomRequests(20_000, (1, 1), (1, 1), "greedy", seed=0)
    gaps = np.diff([0.0, *many.arrivals(40.0)])
    assert abs(gaps.mean() * 40 - 1) < 0.03
    assert abs(gaps.std() * 40 - 1) < 0.03  # as large as the mean: exponential
    assert np.allclose(gaps, 2 * np.diff([0.0, *many.arrivals(80.0)]))


def test_warming_up_takes_fewer_and_shorter_requests() -> None:
    short = MIXED.shortened(10, 4)
    assert (short.num_requests, short.input_len, short.output_len) == (10, (16, 64), (1, 4))
    assert RandomRequests(2, (1, 1), (9, 9), "greedy", 0).shortened(10, 4).output_lens() == [4, 4]
