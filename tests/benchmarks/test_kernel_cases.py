"""The timed cases, small and on a CPU: all sides do the same work, and one that does not is found out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.kernel_cases import clone, decode, elementwise, linear, lm_head, peers, prefill, sampler
from benchmarks.kernel_cases.case import ROSE, KernelCase
from benchmarks.kernel_cases.paged_step import Heads, make_steps
from rose_backend.kernels.reference import block_clone as twin

HEADS = Heads("small", 4, 2, 16, torch.float16)


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a CUDA device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def in_torch(cache: torch.Tensor, *pairs: torch.Tensor, block_dim: int, independent: bool) -> None:
        twin.block_clone(cache, *pairs, block_dim=block_dim)

    monkeypatch.setattr(peers, "load", lambda *_: None)
    monkeypatch.setattr(clone, "block_clone", in_torch)
    monkeypatch.setattr(clone, "NUM_BLOCKS", 20)
    monkeypatch.setattr(lm_head, "VOCAB_SIZE", 301)
    monkeypatch.setattr(sampler, "VOCAB_SIZE", 5003)
    monkeypatch.setattr(prefill, "FLASH_BLOCK_SIZE", 32)
    with OnCpu():
        yield


def small_cases() -> Iterator[KernelCase]:
    yield decode.decode_case(HEADS, 3, 40)
    yield prefill.prefill_case(HEADS, 2, 32, 32)
    yield clone.clone_case(3)
    yield linear.layer_case(3)
    yield from (lm_head.head_case(3, greedy=greedy) for greedy in (True, False))
    yield from (elementwise.operation_case(name, 5) for name in elementwise.OPERATIONS)
    yield from (sampler.sampler_case(name, 3) for name in sampler.FILTERS)


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
    contest = decode.decode_case(HEADS, 3, 40).make(2)
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
