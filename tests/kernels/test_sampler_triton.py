"""The Triton sampler, interpreted with small slices and compiled for three generations of GPUs.

The interpreter takes a tenth of a second per row, so frequencies are compared on a GPU. Here every draw is compared
with that of the reference, whose frequencies are tested.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend import kernels
from rose_backend.kernels import SampleOutput, SamplingTensors, sample_unfused
from tests.kernels.test_sample import (
    beyond_every_range,
    make_params,
    random_case,
    range_ends,
    rows_without_a_token,
)
from tests.support.aot import CAPABILITIES, compile_launch, compiles, overlapped, record_launches
from tests.support.interpreter import run_interpreted

INFINITY = float("inf")


def call(
    logits: torch.Tensor,
    fields: dict[str, Any],
    columns: int = 16,
    group: int = 4,
    candidates: int = 64,
    few: int = 16,
) -> tuple[torch.Tensor | None, ...]:
    """Sample with slices of ``group`` x ``columns`` tokens, ``few`` of which are compared with each other."""
    from rose_backend.kernels.sampling import sampler as gpu

    gpu._COLUMNS, gpu._MIN_GROUP = columns, group
    gpu.MAX_CANDIDATES, gpu._FEW_CANDIDATES = candidates, few
    output = gpu.sample(logits, SamplingTensors(**fields))
    return output.token_ids, output.logprob, output.top_logprobs, output.top_token_ids


def fields_of(params: SamplingTensors) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingTensors.__dataclass_fields__}


def sample(logits: torch.Tensor, params: SamplingTensors, **shape: int) -> SampleOutput:
    return SampleOutput(*run_interpreted(call, logits, fields_of(params), **shape))


# One slice and several; the last with groups of two tokens and few places for candidates, so that ties overflow.
@pytest.mark.parametrize(
    ("vocab_size", "shape"),
    [(3, {}), (67, {}), (301, {"few": 64}), (301, {"columns": 64, "group": 8, "candidates": 16, "few": 4})],
    ids=str,
)
def test_draws_and_logprobs_are_those_of_the_reference(vocab_size: int, shape: dict[str, int]) -> None:
    logits, params = random_case(24, vocab_size, seed=vocab_size)
    expected = sample_unfused(logits, params)
    actual = sample(logits, params, **shape)
    assert torch.equal(actual.token_ids, expected.token_ids)
    torch.testing.assert_close(actual.logprob, expected.logprob, rtol=0, atol=1e-5)
    torch.testing.assert_close(actual.top_logprobs, expected.top_logprobs, rtol=0, atol=1e-5)
    assert torch.equal(logits.gather(1, actual.top_token_ids), logits.topk(3).values)
    assert all(len(set(row)) == 3 for row in actual.top_token_ids.tolist())


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 3}, {"top_k": 40}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.8}, {"min_p": 0.2}],
    ids=str,
)
def test_infinite_and_equal_logits(filters: dict[str, Any]) -> None:
    logits = torch.zeros(6, 150)
    logits[1] = -INFINITY
    logits[2, 1::2] = -INFINITY
    logits[3, 130] = INFINITY
    logits[4] = -INFINITY
    logits[4, [70, 140]] = 2.0
    # More ties than places for candidates.
    logits[5, 20:120] = 1.0
    params = make_params(6, **filters)
    drawn = sample(logits, params).token_ids
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)
    assert drawn[1] == 0 and drawn[2] % 2 == 0 and drawn[3] == 130 and drawn[4] in (70, 140)


def test_top_k_of_nearly_all_tokens() -> None:
    # More than there are groups, so that the groups' maxima say nothing about the k-th largest score.
    logits = torch.randn(20, 67, generator=torch.Generator().manual_seed(2)) * 0.1
    params = make_params(20, top_k=[60, 66] * 10, top_p=[1.0, 1.0, 0.99, 0.99] * 5)
    drawn = sample(logits, params).token_ids
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)


def test_flat_rows_keep_more_than_there_are_places_for_candidates() -> None:
    logits = torch.randn(12, 150, generator=torch.Generator().manual_seed(3)) * 0.1
    params = make_params(12, top_k=[0, 40, 100] * 4, min_p=[0.0, 0.0, 0.0, 0.9] * 3, top_p=0.5)
    drawn = sample(logits, params, candidates=16).token_ids
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)


def test_a_small_top_k_and_top_p_of_what_it_keeps() -> None:
    # Two chunks of those that are compared with each other, more of them than top-k keeps, and top-p down to one token.
    logits = torch.randn(24, 301, generator=torch.Generator().manual_seed(4))
    logits = (logits * 8).round() / 8
    params = make_params(24, top_k=[5, 40, 12] * 8, top_p=[0.7, 0.8, 0.05, 1.0] * 6)
    drawn = sample(logits, params, candidates=256, few=64).token_ids
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)


def test_half_of_eight_equal_tokens_is_four() -> None:
    logits = torch.zeros(32, 301)
    logits[:, 100:132:4] = 9.0
    drawn = sample(logits, make_params(32, top_k=8, top_p=0.5), few=64).token_ids
    assert sorted(set(drawn.tolist())) == [100, 104, 108, 112]


# The ties are compared with each other, are searched, or have no places as candidates.
@pytest.mark.parametrize(("candidates", "few"), [(64, 64), (32, 16), (16, 16)])
def test_top_p_at_the_exact_edge_of_ties(candidates: int, few: int) -> None:
    # 0.3 in float32 is a little more than 0.3: of twenty equal tokens it takes seven, not six.
    logits = torch.full((24, 67), -INFINITY)
    logits[:, 10:30] = 1.0
    params = make_params(24, top_p=0.3, top_k=[0, 5, 0, 0] * 6)
    drawn = sample(logits, params, candidates=candidates, few=few, columns=32).token_ids
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)
    assert drawn.min() >= 10 and drawn.max() == 16


def test_rows_do_not_depend_on_their_batch() -> None:
    logits, params = random_case(12, 301, seed=1)
    whole = sample(logits, params)
    rows = torch.tensor([7, 3, 3, 11])
    part = {
        name: value[rows] if isinstance(value, torch.Tensor) else value
        for name, value in fields_of(params).items()
    }
    output = SampleOutput(*run_interpreted(call, logits[rows], part))
    for name in SampleOutput.__dataclass_fields__:
        assert torch.equal(getattr(output, name), getattr(whole, name)[rows])


def test_padded_rows_and_no_rows() -> None:
    logits, params = random_case(4, 67, seed=8)
    wide = torch.full((4, 80), float("nan"))
    wide[:, :67] = logits
    assert torch.equal(sample(wide[:, :67], params).token_ids, sample_unfused(logits, params).token_ids)
    empty = sample(torch.zeros(0, 67), make_params(0, num_logprobs=2))
    assert empty.token_ids.shape == (0,) and empty.top_token_ids.shape == (0, 2)


# One slice and several, all candidates compared with each other or too many.
@pytest.mark.parametrize(("vocab_size", "shape"), [(67, {"few": 64}), (131, {"candidates": 16})], ids=str)
def test_ends_of_every_range(vocab_size: int, shape: dict[str, int]) -> None:
    logits, params = range_ends(32, vocab_size)
    drawn = sample(logits, params, **shape).token_ids
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)
    assert drawn.max() < 3 * vocab_size // 4


def test_no_number_makes_a_forbidden_token() -> None:
    logits, params = beyond_every_range(67)
    drawn = sample(logits, params).token_ids
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)
    assert drawn.min() >= 5 and drawn.max() <= 7


def test_min_p_at_the_edge_among_large_logits() -> None:
    # 0.5 is 0.3068528 below 10,000. The next lower float32 number is 0.3068548 above, and rounding goes there.
    logits = torch.full((8, 67), 9999.306640625)
    logits[:, 33] = 1e4
    params = make_params(8, min_p=0.5)
    drawn = sample(logits, params).token_ids
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)
    assert (drawn == 33).all()


def test_not_a_number_ends_and_stays_in_the_vocabulary() -> None:
    logits = torch.full((4, 67), float("nan"))
    logits[2:, 5] = 1.0
    params = make_params(4, top_k=[3, 0, 3, 0], top_p=0.5)
    drawn = sample(logits, params).token_ids
    assert ((drawn >= 0) & (drawn < 67)).all()


@pytest.mark.parametrize("num_logprobs", [-1, 2])
@pytest.mark.parametrize(
    "filters",
    [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.5}],
    ids=str,
)
def test_rows_without_a_token_are_told(filters: dict[str, Any], num_logprobs: int) -> None:
    logits, expected = rows_without_a_token(67)
    for invalid in (-1, 0):
        params = make_params(len(logits), **filters, num_logprobs=num_logprobs, invalid_token_id=invalid)
        wanted = [invalid if token is None else token for token in expected]
        for output in (
            sample(logits, params),
            sample_unfused(logits, params),
            kernels.sample(logits, params),
        ):
            assert output.token_ids.tolist() == wanted
    # What the request asks for counts, too: all tokens but those with NaN are forbidden.
    logits = torch.full((2, 67), float("nan"))
    logits[:, :3] = 1.0
    forbidden = {
        "bias_token_ids": torch.tensor([[0, 1, 2], [0, 1, -1]]).int(),
        "bias": torch.full((2, 3), -INFINITY),
    }
    params = make_params(2, **filters, **forbidden, invalid_token_id=-1)
    for output in (sample(logits, params), sample_unfused(logits, params), kernels.sample(logits, params)):
        assert output.token_ids.tolist() == [-1, 2]


@compiles("_scan_kernel", "_choose_kernel")
def test_compiles_without_spills(capability: int) -> None:
    from rose_backend.kernels.sampling import sampler as gpu

    logits = torch.zeros(1, 50_257)
    everything = make_params(
        1,
        prompt_mask=torch.zeros(1, 50_257, dtype=torch.bool),
        output_counts=torch.zeros(1, 50_257, dtype=torch.int32),
        bias_token_ids=torch.zeros(1, 3, dtype=torch.int32),
        bias=torch.zeros(1, 3),
        num_logprobs=3,
    )
    with record_launches(gpu, "_scan_kernel", "_choose_kernel") as launches:
        gpu.sample(logits, everything)
    assert len(launches) == 2
    for recorded in launches:
        compile_launch(overlapped(recorded, capability), capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("stride", "is_aligned"), [(50_304, True), (50_257, False)])
def test_aligned_logits_are_loaded_four_at_a_time(capability: int, stride: int, is_aligned: bool) -> None:
    from rose_backend.kernels.sampling import sampler as gpu

    logits = torch.zeros(2, stride)[:, :50_257]
    with record_launches(gpu, "_scan_kernel", "_choose_kernel") as launches:
        gpu.sample(logits, make_params(2))
    resources = compile_launch(overlapped(launches[0], capability), capability)
    assert resources.spill_bytes == 0
    assert ("ld.global.v4" in resources.ptx) == is_aligned
