"""The record of what became findable and what went: replayed, it is the index of full blocks."""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager import BlockManager, BlockRemoved, BlockStored, CacheCleared
from tests.block_manager.test_block_manager import admit, compute, make, table


def test_a_full_block_is_announced_with_its_parent_and_tokens() -> None:
    manager = make(record_events=True)
    row, _ = admit(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9], b"tenant")
    _, first, second = manager.hash_blocks(np.arange(1, 10, dtype=np.int32), namespace=b"tenant")
    blocks = table(manager, row)
    assert manager.take_events() == [
        BlockStored(first, None, (1, 2, 3, 4), b"tenant", blocks[0]),
        BlockStored(second, first, (5, 6, 7, 8), b"tenant", blocks[1]),
    ]
    assert manager.take_events() == []


def test_a_partial_block_is_announced_when_it_is_full() -> None:
    manager = make(record_events=True)
    row, _ = admit(manager, [1, 2, 3])
    assert manager.take_events() == []
    compute(manager, row, [4])
    (event,) = manager.take_events()
    assert isinstance(event, BlockStored) and event.token_ids == (1, 2, 3, 4)


def test_a_block_that_is_known_already_is_not_announced_again() -> None:
    manager = make(record_events=True)
    rows = [manager.add(np.array([1, 2, 3, 4, 5], np.int32)) for _ in range(2)]
    manager.take_events()
    for admission in rows:
        assert admission is not None and admission.num_cached_tokens == 0
        compute(manager, admission.row, [1, 2, 3, 4, 5])
    assert len(manager.take_events()) == 1


def test_eviction_and_overwriting_announce_the_end() -> None:
    manager = make(num_blocks=3, record_events=True)
    row, _ = admit(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    first, second = manager.take_events()
    manager.free(np.array([row]))
    other, cached = admit(manager, [1, 2, 3, 4, 5, 6, 9])  # no third block: the second is overwritten
    assert cached == 6 and manager.stats.overwrites == 1
    assert manager.take_events() == [BlockRemoved(second.block_hash)]
    manager.free(np.array([other]))
    admit(manager, [7] * 8)
    removed, *stored = manager.take_events()
    assert removed == BlockRemoved(first.block_hash)
    assert [event.token_ids for event in stored] == [(7,) * 4] * 2


def test_reset_is_one_event() -> None:
    manager = make(record_events=True)
    row, _ = admit(manager, list(range(12)))
    manager.free(np.array([row]))
    manager.take_events()
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [CacheCleared()]


def test_nothing_is_recorded_unless_asked_for() -> None:
    manager = make()
    admit(manager, list(range(12)))
    assert manager.take_events() == []
    assert (
        BlockManager(
            num_blocks=4,
            block_size=4,
            max_num_seqs=1,
            max_model_len=8,
            prefix_cache=False,
            record_events=True,
        ).take_events()
        == []
    )


def test_events_replayed_are_the_index() -> None:
    rng = np.random.default_rng(0)
    manager = make(num_blocks=12, record_events=True)
    index: dict[bytes, int] = {}
    num_removed = 0
    for turn in range(300):
        row, _ = admit(manager, rng.integers(0, 2, rng.integers(1, 20)).tolist())
        manager.free(np.array([row]))
        if turn == 150:
            assert manager.reset_prefix_cache()
        for event in manager.take_events():
            if isinstance(event, BlockStored):
                assert event.block_hash not in index
                assert event.parent_hash is None or event.parent_hash in index
                index[event.block_hash] = event.block_id
            elif isinstance(event, BlockRemoved):
                del index[event.block_hash]
                num_removed += 1
            else:
                index.clear()
        assert manager.cache is not None and index == manager.cache.full_index()
    assert num_removed > 50
