"""What lookups cost, with few children of a parent and with many, and which of equal blocks is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager, reservation
from rose_backend.block_manager.prefix_index import ChildIndex, PrefixHasher
from tests.support.block_manager.managers import admit, make, num_found


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the tokens of the blocks that are hashed from here on."""
    tokens_of_blocks: list[bytes] = []
    chain_digest = PrefixHasher.chain_digest

    def note(hasher: PrefixHasher, parent: bytes, tokens: bytes) -> bytes:
        tokens_of_blocks.append(tokens)
        return chain_digest(hasher, parent, tokens)

    monkeypatch.setattr(PrefixHasher, "chain_digest", note)
    return tokens_of_blocks


def test_hashes_known_before_are_not_computed_again(hashed: list[bytes]) -> None:
    manager = make()
    prompt = np.arange(19, dtype=np.int32)
    hashes = [*manager.hash_blocks(prompt)]
    assert len(hashes) == 1 + 4 and [*manager.hash_blocks(prompt, known=hashes[:3])] == hashes
    del hashed[:]
    assert manager.hash_blocks(prompt, known=hashes[:4])[4] == hashes[4]
    assert len(hashed) == 1
    assert [*manager.hash_blocks(prompt, known=hashes)] == hashes and len(hashed) == 1


def test_a_block_is_hashed_when_a_lookup_asks_for_it(hashed: list[bytes]) -> None:
    manager = make()
    admit(manager, list(range(9)))
    del hashed[:]
    prompt = np.array([*range(8), *range(50, 63)], np.int32)
    hashes = manager.hash_blocks(prompt)
    assert not hashed and len(hashes) == 1 + 5
    for _ in range(3):
        # Two blocks are found, the third is not.
        assert manager.match(prompt, block_hashes=hashes).num_tokens == 8
        assert len(hashed) == 3
    # A longer prompt goes on with what is known.
    longer = manager.hash_blocks(np.append(prompt, prompt), known=hashes)
    assert longer[5] == [*hashes][5] and len(hashed) == 3 + 2 + 2


def test_lookups_of_one_prompt_may_take_turns() -> None:
    hashes = make().hash_blocks(np.arange(16, dtype=np.int32))
    first, second = iter(hashes), iter(hashes)
    taken = [next(first), next(first)], [next(second)]
    assert [*taken[1], *second] == [*taken[0], *first] == [hashes[index] for index in range(5)]
    assert hashes[1:4] == [*hashes][1:4] and hashes[-1] == [*hashes][4]


def test_lookup_with_hashes_hashes_nothing_and_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make()
    admit(manager, list(range(18)), b"tenant")
    prompt = np.array([*range(17), 99, 99], np.int32)
    plain = manager.match(prompt, namespace=b"tenant")
    hashes, others = manager.hash_blocks(prompt, namespace=b"tenant"), manager.hash_blocks(prompt)
    assert len([*hashes]) == len([*others]) == 1 + 4
    monkeypatch.setattr("hashlib.blake2b", None)
    same = manager.match(prompt, namespace=b"tenant", block_hashes=hashes)
    assert same.num_tokens == plain.num_tokens == 17
    assert same.block_ids.tolist() == plain.block_ids.tolist()
    assert same.chain_digest == plain.chain_digest == hashes[4]
    # Those of another namespace find nothing.
    assert manager.match(prompt, block_hashes=others).num_tokens == 0


def test_blocks_with_equal_digests_are_found_for_their_own_tokens_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrefixHasher, "chain_digest", lambda hasher, parent, tokens: bytes(32))
    manager = make()
    admit(manager, list(range(4)))
    assert num_found(manager, list(range(5))) == 4
    assert num_found(manager, list(range(50, 55))) == 0


@pytest.mark.parametrize("first, second", [(7, 50), (50, 7)])
@pytest.mark.parametrize("num_others", [1, 7, 20])
def test_of_equal_growing_blocks_the_oldest_is_found_whatever_its_id(
    first: int, second: int, num_others: int
) -> None:
    """Their K/V was computed in different steps and may be rounded differently: a run with other ids says the same."""
    pool: Any = SimpleNamespace(num_written_tokens=np.full(64, 2), writers=np.zeros(64, np.int64))
    tokens = np.arange(64, dtype=np.int32)[:, None] + np.arange(4, dtype=np.int32)
    tokens[second] = tokens[first]
    index = ChildIndex(pool, tokens, [b"parent"] * 64)
    others = [10 + nth for nth in range(num_others)]
    index.add([first, second, *others])
    assert index.longest_prefix(b"parent", tokens[first]) == (first, 2)
    index.reopen(first)
    if num_others > 6:
        # A block that grows anew is the youngest.
        assert index.longest_prefix(b"parent", tokens[first]) == (second, 2)


def test_few_of_many_children_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    num_children = 5000
    manager = BlockManager(num_blocks=6000, block_size=8, max_num_seqs=1000, max_model_len=8)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, (num_children, 8)).astype(np.int32)
    for start in range(0, num_children, 1000):
        chunk = tokens[start : start + 1000]
        rows = np.array([manager.add(prompt[:1]).row for prompt in chunk])
        assert manager.reserve(rows, 8).ok
        # Some blocks are filled at once, some later, and some never.
        manager.commit(rows[:300], 8, chunk[:300].ravel())
        manager.commit(rows[300:], 6, chunk[300:, :6].ravel())
        manager.commit(rows[300:600], 2, chunk[300:600, 6:].ravel())
        manager.free(rows)
    compared: list[int] = []
    take = np.ndarray.take

    class Counting(np.ndarray):
        def take(self, indices, *args, **kwargs):
            compared.append(len(indices))
            return take(self, indices, *args, **kwargs)

    children = manager.cache.indexes[0].children
    monkeypatch.setattr(children, "_block_tokens", children._block_tokens.view(Counting))
    assert [num_found(manager, [*wanted[:5], 2000]) for wanted in tokens[::490]] == [5] * 11
    assert len(compared) == 11 and max(compared) <= 3


def test_a_published_block_that_only_grows_touches_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make(block_size=16)
    rows = np.array([admit(manager, [symbol, 2, 3])[0] for symbol in range(3)])
    assert manager.reserve(rows, 12).ok and manager.cache is not None
    for name in ("publish", "reopen", "forget"):
        monkeypatch.setattr(manager.cache, name, None)
    monkeypatch.setattr(manager.cache, "indexes", None)
    monkeypatch.setattr(reservation, "_publish", None)
    for token in range(12):
        manager.commit(rows, 1, np.full(3, token, np.int32))
    monkeypatch.undo()
    assert num_found(manager, [1, 2, 3, *range(12)]) == 15
