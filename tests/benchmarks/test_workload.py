"""All engines are asked for the same, and never twice for the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.support.workload import NanoVllmRequests, RandomRequests

MIXED = RandomRequests(200, (16, 64), (1, 8), seed=5)


def test_lengths_and_tokens_are_in_their_ranges() -> None:
    requests = MIXED.requests(50)
    assert len(requests.prompts) == len(requests.output_lens) == 200
    assert {min(map(len, requests.prompts)), max(map(len, requests.prompts))} == {16, 64}
    assert set(requests.output_lens) == set(range(1, 9))
    assert {token for prompt in requests.prompts for token in prompt} == set(range(1, 50))
    assert requests.due == [0.0] * 200
    assert MIXED.requests(50) == requests


def test_no_prompt_of_another_seed_has_a_known_beginning() -> None:
    known = {tuple(prompt[:8]) for prompt in MIXED.requests(50_257).prompts}
    later = replace(MIXED, seed=6).requests(50_257).prompts
    assert not known & {tuple(prompt[:8]) for prompt in later}
    assert len(known) == 200


def test_arrivals_are_poisson() -> None:
    many = RandomRequests(20_000, (1, 1), (1, 1), seed=0)
    gaps = np.diff([0.0, *many.requests(9, 40.0).due])
    assert abs(gaps.mean() * 40 - 1) < 0.03
    assert abs(gaps.std() * 40 - 1) < 0.03  # as large as the mean: exponential
    assert np.allclose(gaps, 2 * np.diff([0.0, *many.requests(9, 80.0).due]))


def test_warming_up_takes_fewer_and_shorter_requests() -> None:
    short = MIXED.shortened(10, 4)
    assert (short.num_requests, short.input_len, short.output_len) == (10, (16, 64), (1, 4))
    assert RandomRequests(2, (1, 1), (9, 9), 0).shortened(10, 4).requests(9).output_lens == [4, 4]


def test_the_workload_of_nano_vllm() -> None:
    requests = NanoVllmRequests(256).requests(151_936)
    assert (sum(map(len, requests.prompts)), sum(requests.output_lens)) == (142_827, 133_966)
    assert requests.prompts[0][:5] == [6311, 6890, 663, 4242, 8376]
    later = NanoVllmRequests(256, seed=2).requests(151_936)
    assert later.output_lens == requests.output_lens
    assert not {tuple(prompt[:8]) for prompt in later.prompts} & {
        tuple(each[:8]) for each in requests.prompts
    }
    few = NanoVllmRequests(256, seed=3).shortened(10, 8).requests(50)
    assert {len(prompt) for prompt in few.prompts} == {*few.output_lens} == {8}
    assert len(few.prompts) == 10
    assert max(token for prompt in few.prompts for token in prompt) < 50
