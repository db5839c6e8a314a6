"""A prompt waits for the next step exactly if it finds enough more in it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager, PrefixesUnderWay, prefixes_under_way

NUM_TOKENS = 60


def make_manager(block_size: int, **options: Any) -> BlockManager:
    return BlockManager(num_blocks=200, block_size=block_size, max_num_seqs=8, max_model_len=256, **options)


def compute(manager: BlockManager, tokens: np.ndarray, num_new_tokens: int, namespace: bytes = b"") -> None:
    """Add a prompt, and compute so many tokens behind what is found of it."""
    match = manager.match(tokens, namespace=namespace)
    admission = manager.add(tokens, namespace=namespace, match=match)
    assert admission is not None
    row = np.array([admission.row])
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
def test_who_waits_finds_as_much_as_it_waits_for_and_others_would_not(
    monkeypatch: pytest.MonkeyPatch, min_tokens: int, block_size: int, full_blocks_only: bool
) -> None:
    monkeypatch.setattr(prefixes_under_way, "MIN_TOKENS_WORTH_WAITING", min_tokens)
    num_waiting = 0
    spans = itertools.product((0, 3, 16, 21), (0, 1, 8, 16, 22, 40, 59, 60), (4, 20, 39, 60))
    for num_known, num_shared, chunk in spans:
        manager = make_manager(block_size, full_blocks_only=full_blocks_only)
        first, second = two_prompts(num_shared)
        if num_known:
            compute(manager, first[:num_known], num_known)
        under_way = PrefixesUnderWay(manager)
        under_way.new_step_starts()
        match, found_now = manager.match(first), manager.match(second)
        assert not under_way.is_under_way(second, found_now)
        num_new_tokens = min(chunk, NUM_TOKENS - match.num_tokens)
        under_way.begin(first, match, num_new_tokens)
        waits = under_way.is_under_way(second, found_now)
        compute(manager, first, num_new_tokens)
        gain = manager.match(second).num_tokens - found_now.num_tokens
        case = (num_known, num_shared, chunk)
        assert waits == (gain >= min_tokens), case
        num_waiting += waits
        under_way.new_step_starts()
        assert not under_way.has_begun and not under_way.is_under_way(second, found_now)
    assert num_waiting or (full_blocks_only and block_size == 128)


def test_nobody_waits_for_another_namespace_or_without_a_cache() -> None:
    first, _ = two_prompts(NUM_TOKENS)
    tokens = np.tile(first, 4)
    manager = make_manager(16)
    under_way = PrefixesUnderWay(manager)
    under_way.begin(tokens, manager.match(tokens, namespace=b"a"), len(tokens))
    assert under_way.is_under_way(tokens, manager.match(tokens, namespace=b"a"))
    assert not under_way.is_under_way(tokens, manager.match(tokens, namespace=b"b"))
    manager = make_manager(16, prefix_cache=False)
    under_way = PrefixesUnderWay(manager)
    under_way.begin(tokens, manager.match(tokens), len(tokens))
    assert not under_way.has_begun
