"""A prompt waits for the next step exactly if that step finds enough more of it in the cache."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rose_backend import scheduling as in_flight_prefixes
from rose_backend.block_manager import BlockManager
from rose_backend.scheduling import InFlightPrefixes

NUM_TOKENS = 60


def make_manager(block_size: int, **options: Any) -> BlockManager:
    return BlockManager(num_blocks=200, block_size=block_size, max_num_seqs=8, max_model_len=256, **options)


def compute(manager: BlockManager, tokens: np.ndarray, num_new_tokens: int, namespace: bytes = b"") -> None:
    """Add a prompt, and compute ``num_new_tokens`` behind its cached prefix."""
    match = manager.match(tokens, namespace=namespace)
    added = manager.add(tokens, namespace=namespace, match=match)
    assert added is not None
    row = np.array([added.row])
    assert manager.reserve(row, np.array([num_new_tokens])).ok
    start = match.num_tokens
    manager.commit(row, np.array([num_new_tokens]), tokens[start : start + num_new_tokens])


def two_prompts(num_shared: int) -> tuple[np.ndarray, np.ndarray]:
    first = np.arange(1, NUM_TOKENS + 1, dtype=np.int32)
    second = first.copy()
    second[num_shared:] += 1000
    return first, second


@pytest.mark.parametrize("full_blocks_only", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
@pytest.mark.parametrize("min_tokens", [1, 5, 16, 20, 33])
def test_a_prompt_waits_exactly_if_the_next_step_finds_enough_more_of_it(
    monkeypatch: pytest.MonkeyPatch, min_tokens: int, block_size: int, full_blocks_only: bool
) -> None:
    monkeypatch.setattr(in_flight_prefixes, "MIN_TOKENS_WORTH_WAITING", min_tokens)
    num_waiting = 0
    spans = itertools.product((0, 3, 16, 21), (0, 1, 8, 16, 22, 40, 59, 60), (4, 20, 39, 60))
    for num_known, num_shared, chunk in spans:
        manager = make_manager(block_size, full_blocks_only=full_blocks_only)
        first, second = two_prompts(num_shared)
        if num_known:
            compute(manager, first[:num_known], num_known)
        in_flight = InFlightPrefixes(manager)
        in_flight.new_step_starts()
        match, found_now = manager.match(first), manager.match(second)
        assert not in_flight.cover(second, found_now)
        num_new_tokens = min(chunk, NUM_TOKENS - match.num_tokens)
        in_flight.add(first, match, num_new_tokens)
        waits = in_flight.cover(second, found_now)
        compute(manager, first, num_new_tokens)
        gain = manager.match(second).num_tokens - found_now.num_tokens
        case = (num_known, num_shared, chunk)
        assert waits == (gain >= min_tokens), case
        num_waiting += waits
        in_flight.new_step_starts()
        assert not in_flight and not in_flight.cover(second, found_now)
    assert num_waiting or (full_blocks_only and block_size == 128)


def test_no_prompt_waits_for_another_namespace_or_without_a_prefix_cache() -> None:
    first, _ = two_prompts(NUM_TOKENS)
    tokens = np.tile(first, 4)
    manager = make_manager(16)
    in_flight = InFlightPrefixes(manager)
    in_flight.add(tokens, manager.match(tokens, namespace=b"a"), len(tokens))
    assert in_flight.cover(tokens, manager.match(tokens, namespace=b"a"))
    assert not in_flight.cover(tokens, manager.match(tokens, namespace=b"b"))
    manager = make_manager(16, prefix_cache=False)
    in_flight = InFlightPrefixes(manager)
    in_flight.add(tokens, manager.match(tokens), len(tokens))
    assert not in_flight
