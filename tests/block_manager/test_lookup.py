"""What a lookup finds, and what it costs, with few children of a parent and with many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager, reservation
from rose_backend.block_manager.prefix_index import ChildIndex, PrefixHasher
from rose_backend.errors import RowError
from tests.block_manager.test_block_manager import admit, compute, make, table


def prompt_of(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.int32)


def test_hashes_known_before_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make()
    prompt = np.arange(19, dtype=np.int32)
    hashes = manager.hash_blocks(prompt)
    assert len(hashes) == 1 + 4 and [*manager.hash_blocks(prompt, known=hashes[:3])] == [*hashes]
    assert manager.cache is not None
    hashed: list[bytes] = []
    chain_digest = manager.cache.hasher.chain_digest
    monkeypatch.setattr(
        manager.cache.hasher,
        "chain_digest",
        lambda parent, tokens: hashed.append(tokens) or chain_digest(parent, tokens),
    )
    assert manager.hash_blocks(prompt, known=hashes[:4])[4] == hashes[4]
    assert len(hashed) == 1
    assert [*manager.hash_blocks(prompt, known=hashes)] == [*hashes] and len(hashed) == 1


def test_a_block_is_hashed_when_a_lookup_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make()
    admit(manager, list(range(9)))
    prompt = np.array([*range(8), *range(50, 63)], np.int32)
    hashed: list[int] = []
    chain_digest = PrefixHasher.chain_digest
    monkeypatch.setattr(PrefixHasher, "chain_digest", lambda *args: hashed.append(1) or chain_digest(*args))
    hashes = manager.hash_blocks(prompt)
    assert not hashed and len(hashes) == 1 + 5
    for _ in range(3):
        # Two blocks are found, the third is not.
        assert manager.match(prompt, block_hashes=hashes).num_tokens == 8
        assert len(hashed) == 3
    # A longer prompt goes on with what is known.
    longer = manager.hash_blocks(np.append(prompt, prompt), known=hashes)
    assert longer[5] == [*hashes][5] and len(hashed) == 3 + 2 + 2


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
    hashes = manager.hash_blocks(prompt, namespace=b"tenant")
    assert len([*hashes]) == 1 + 4
    monkeypatch.setattr("hashlib.blake2b", None)
    hashed = manager.match(prompt, namespace=b"tenant", block_hashes=hashes)
    assert hashed.num_tokens == plain.num_tokens == 17
    assert hashed.block_ids.tolist() == plain.block_ids.tolist()
    assert hashed.chain_digest == plain.chain_digest == hashes[4]


def test_hashes_of_another_namespace_find_nothing() -> None:
    manager = make()
    admit(manager, list(range(18)), b"tenant")
    prompt = np.arange(18, dtype=np.int32)
    assert manager.match(prompt, block_hashes=manager.hash_blocks(prompt)).num_tokens == 0


def test_too_few_hashes_are_refused() -> None:
    manager = make()
    with pytest.raises(RowError, match="block_hashes: got 2 for 8 tokens, expected 3"):
        manager.match(np.arange(8, dtype=np.int32), block_hashes=[b"", b""])


def test_without_prefix_cache_there_is_nothing_to_hash() -> None:
    manager = make(prefix_cache=False)
    prompt = np.arange(8, dtype=np.int32)
    assert manager.hash_blocks(prompt) == []
    assert manager.match(prompt, block_hashes=[]).num_tokens == 0


def longest_common_run(prompt: list[int], known: list[list[int]]) -> int:
    runs = [0]
    for tokens in known:
        same = [a == b for a, b in zip(prompt, tokens, strict=False)]
        runs.append(same.index(False) if False in same else len(same))
    return max(runs)


@pytest.mark.parametrize("num_symbols", [2, 5, 40])
def test_the_longest_prefix_is_found_among_many_growing_and_closed_children(num_symbols: int) -> None:
    """All blocks are first blocks, so they have one parent; rows grow, end, continue a tail, and are evicted."""
    rng = np.random.default_rng(num_symbols)
    size = 6
    manager = BlockManager(num_blocks=120, block_size=size, max_num_seqs=40, max_model_len=size)
    running: dict[int, list[int]] = {}
    largest = num_evictions = 0
    for _ in range(600):
        if len(running) < 40 and rng.random() < 0.6:
            prompt = rng.integers(0, num_symbols, rng.integers(1, size + 1)).tolist()
            admission = manager.add(np.array(prompt, np.int32))
            assert admission is not None
            if manager.reserve(np.array([admission.row]), size - admission.num_cached_tokens).ok:
                running[admission.row] = prompt[: admission.num_cached_tokens]
            else:
                manager.free(np.array([admission.row]))
        elif running:
            row = int(rng.choice(list(running)))
            count = int(rng.integers(0, size - len(running[row]) + 1))
            tokens = rng.integers(0, num_symbols, count).tolist()
            manager.commit(np.array([row]), count, np.array(tokens, np.int32))
            running[row] += tokens
            if rng.random() < 0.5:
                manager.free(np.array([row]))
                del running[row]
        plan = manager.take_clone_plan()
        if plan is not None:
            manager.finish_clone_plan(plan)
        assert manager.cache is not None
        findable = manager.cache.cached_blocks().tolist()
        known = [manager.cache.tokens_of(block).tolist() for block in findable]
        prompt = rng.integers(0, num_symbols, size).tolist()
        match = manager.match(np.array([*prompt, 0], np.int32))
        assert match.num_tokens == longest_common_run(prompt, known)
        for block in match.block_ids.tolist():
            assert manager.cache.tokens_of(block).tolist()[: match.num_tokens] == prompt[: match.num_tokens]
        largest = max(largest, len(findable))
        num_evictions = manager.stats.evictions
        manager.check_integrity()
    assert largest > 30 and (num_evictions > 40 or num_symbols == 2)


@pytest.mark.parametrize("num_children", [1, 3, 5])
def test_tokens_are_compared_whole(num_children: int) -> None:
    manager = make(block_size=4, num_blocks=30)
    # Some differ in their highest byte only.
    prompts = [[1 << 24, 2, (3 + child) << 24, 4] for child in range(num_children)]
    for prompt in prompts:
        admit(manager, prompt)
    for prompt in prompts:
        assert manager.match(prompt_of(*prompt, 9)).num_tokens == 4
        assert manager.match(prompt_of(*prompt[:3], 5 << 24)).num_tokens == 3
        assert manager.match(prompt_of(*prompt[:3])).num_tokens == 2  # not the last one
    assert manager.match(prompt_of(1 << 24, 2, 2 << 24, 4)).num_tokens == 2
    assert manager.match(prompt_of(2 << 24, 2, 3 << 24, 4)).num_tokens == 0


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
    for wanted in tokens[::490]:
        match = manager.match(np.append(wanted[:5], [2000, 2000]).astype(np.int32))
        assert match.num_tokens == 5
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
    assert manager.match(np.array([1, 2, 3, *range(12), 9], np.int32)).num_tokens == 15


def test_a_match_whose_block_turned_out_to_be_a_copy_is_looked_up_again() -> None:
    manager = make(num_blocks=8)
    rows = [manager.add(prompt_of(1, 2, 3, 4, 5)).row for _ in range(2)]
    compute(manager, rows[1], [1, 2, 3])
    match = manager.match(prompt_of(1, 2, 3, 9))
    assert match.num_tokens == 3
    compute(manager, rows[0], [1, 2, 3, 4])
    compute(manager, rows[1], [4])  # equal to the block of the other row: this one is unfindable from here on
    manager.free(np.array([rows[1]]))
    admission = manager.add(prompt_of(1, 2, 3, 9), match=match)
    assert admission is not None and admission.num_cached_tokens == 3
    assert table(manager, admission.row) == table(manager, rows[0])
    manager.check_integrity()


def test_blocks_of_running_requests_are_never_evicted() -> None:
    manager = make(num_blocks=5)
    running, _ = admit(manager, [1] * 7)
    for symbol in range(2, 9):
        row, _ = admit(manager, [symbol] * 8)
        manager.free(np.array([row]))
    assert manager.stats.evictions > 6
    assert not manager.reserve(np.array([manager.add(prompt_of(99)).row]), 12).ok
    assert manager.match(prompt_of(*[1] * 8)).num_tokens == 7
    assert table(manager, running) == manager.match(prompt_of(*[1] * 8)).block_ids.tolist()


def test_a_shared_head_outlives_the_tails_of_older_requests() -> None:
    manager = make(num_blocks=7)
    head = [1, 1, 1, 1]
    older, _ = admit(manager, [*head, 2, 2, 2, 2])
    younger, cached = admit(manager, [*head, 3, 3, 3, 3])
    assert cached == 4
    manager.free(np.array([younger]))
    manager.free(np.array([older]))
    again, cached = admit(manager, [*head, 4, 4, 4, 4])
    assert cached == 4
    manager.free(np.array([again]))
    evicted_first = [int(manager.cache.tokens_of(block)[0]) for block in manager.pool.cached_blocks()]
    assert evicted_first == [3, 2, 4, 1]


def test_a_match_takes_its_blocks_out_of_the_middle_of_the_eviction_order() -> None:
    manager = make(num_blocks=16)
    heads = [1, 1, 1, 1], [2, 2, 2, 2]
    rows = [admit(manager, [*head, symbol, 9, 9, 9])[0] for head in heads for symbol in (3, 4, 5)]
    blocks = [table(manager, row) for row in rows]
    for row in rows:
        manager.free(np.array([row]))
    tails = [tail for _, tail in blocks]
    # Each head is released with the last of its tails.
    assert manager.pool.cached_blocks().tolist() == [*tails[:3], blocks[2][0], *tails[3:], blocks[5][0]]
    admission = manager.add(prompt_of(*heads[0], 4, 9, 9, 9, 9))
    assert admission is not None and table(manager, admission.row) == blocks[1]
    assert manager.pool.cached_blocks().tolist() == [tails[0], tails[2], *tails[3:], blocks[5][0]]
    manager.check_integrity()


def test_full_blocks_only_indexes_no_partial_block() -> None:
    manager = make(full_blocks_only=True)
    row, _ = admit(manager, [1, 2, 3, 4, 5, 6])
    assert manager.cache.cached_blocks().tolist() == table(manager, row)[:1]
    manager.free(np.array([row]))
    assert manager.pool.num_cached_blocks == 1


def test_full_blocks_only_forgets_a_full_block_that_is_overwritten() -> None:
    manager = BlockManager(num_blocks=2, block_size=4, max_num_seqs=2, max_model_len=4, full_blocks_only=True)
    row, _ = admit(manager, [1, 2])
    (child,) = manager.fork(row, 1).tolist()
    compute(manager, row, [3, 4])
    manager.free(np.array([row]))
    compute(manager, child, [5])
    assert manager.stats.overwrites == 1 and manager.cache.cached_blocks().tolist() == []


def test_namespaces_do_not_see_each_other() -> None:
    manager = make()
    prompt = [1, 2, 3, 4, 5, 6]
    admit(manager, prompt, b"tenant-a")
    assert admit(manager, prompt, b"tenant-b")[1] == 0
    assert admit(manager, prompt, b"tenant-a")[1] == 5


def test_generated_tokens_become_shareable() -> None:
    manager = make()
    row, _ = admit(manager, [1, 2, 3])
    compute(manager, row, [7])
    compute(manager, row, [8])
    assert admit(manager, [1, 2, 3, 7, 8, 9])[1] == 5


def test_full_blocks_only_hits_at_block_boundaries() -> None:
    manager = make(full_blocks_only=True)
    admit(manager, [1, 2, 3, 4, 5, 6, 7])
    assert admit(manager, [1, 2, 3, 4, 5, 6, 7])[1] == 4
    assert manager.stats.clones == 0


def test_eviction_takes_the_least_recently_used_and_tails_first() -> None:
    manager = make(num_blocks=7)
    old, _ = admit(manager, [1] * 8)
    new, _ = admit(manager, [2] * 8)
    manager.free(np.array([old]))
    manager.free(np.array([new]))
    admit(manager, [3] * 12)  # two free blocks, then one eviction: the tail of the older sequence
    assert manager.stats.evictions == 1
    assert manager.match(np.array([1] * 9, np.int32)).num_tokens == 4
    assert manager.match(np.array([2] * 9, np.int32)).num_tokens == 8


def test_equal_tails_of_finished_rows_are_kept_once() -> None:
    manager = make()
    rows = np.array([admit(manager, [1, 2])[0] for _ in range(1)])
    more = manager.fork(int(rows[0]), 3)
    assert more is not None
    rows = np.append(rows, more)
    assert manager.reserve(rows, 1).ok
    manager.commit(rows, 1, np.array([5, 5, 5, 5], np.int32))
    manager.free(rows)
    assert manager.pool.num_cached_blocks == 1
    manager.check_integrity()


def test_stale_match_is_looked_up_again() -> None:
    manager = make(num_blocks=4)
    row, _ = admit(manager, [1] * 8)
    manager.free(np.array([row]))
    prompt = np.array([1] * 9, np.int32)
    match = manager.match(prompt)
    other, _ = admit(manager, [2] * 12)
    manager.free(np.array([other]))
    admission = manager.add(prompt, match=match)
    assert match.num_tokens == 8 and admission is not None and admission.num_cached_tokens == 0
