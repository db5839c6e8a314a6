"""The timed cases, small and on a CPU: all sides do the same work, and one that does not is found out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.kernel_cases import FAMILIES, kv_cache, sampler, small
from benchmarks.kernel_cases.case import ROSE, KernelCase
from benchmarks.kernel_cases.kv_cache import make_steps
from benchmarks.kernel_cases.small import HEADS


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with small.on_cpu():
        yield


def small_cases() -> Iterator[KernelCase]:
    for family in FAMILIES:
        yield from small.small_cases(family)


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_sides_agree(case: KernelCase) -> None:
    contest = case.make(2)
    assert next(iter(contest.sides)) == ROSE
    for side, launches in contest.sides.items():
        assert len(launches) == 2
        assert contest.disagreement(side) is None, side


NUMERIC = [case for case in small_cases() if "sample" not in case.name]


@pytest.mark.parametrize("case", NUMERIC, ids=lambda case: case.name)
def test_a_side_that_does_nothing_for_these_inputs_is_found_out(case: KernelCase) -> None:
    contest = case.make(2)
    result = contest.sides[ROSE][1]()
    contest.sides["idle"] = [lambda: result]
    assert "differs from Rose by" in (contest.disagreement("idle") or "")


@pytest.mark.parametrize("name", ["greedy", "top-k 50, top-p 0.9", "min-p 0.05"])
def test_a_forbidden_token_is_found_out(name: str) -> None:
    contest = sampler.sampler_case(name, 3).make(2)
    contest.sides["wrong"] = [lambda: torch.full((3,), 17)]
    assert contest.disagreement("wrong") == "the peer drew 3 of 3 tokens that the filters forbid"


def test_a_peer_that_stores_nothing_is_found_out() -> None:
    contest = kv_cache.decode_case(HEADS, 3, 40).make(2)
    out = contest.sides[ROSE][0]().clone()
    contest.sides["forgetful"] = [lambda: out]
    assert "differs from Rose by nan" in (contest.disagreement("forgetful") or "")


def test_a_larger_block_size_keeps_the_content() -> None:
    (step,) = make_steps(HEADS, 2, 40, 24, 1)
    large = step.with_block_size(32)
    assert large.storage.shape == (4, 32, 2, 32)
    assert torch.equal(large.stored(), step.stored())
    tokens, blocks = torch.arange(64), large.block_table[1].long()
    for cache, wanted in ((large.key_cache, step.key_cache), (large.value_cache, step.value_cache)):
        actual = cache[blocks[tokens // 32], tokens % 32]
        assert torch.equal(actual, wanted[step.block_table[1].long()[tokens // 16], tokens % 16])
