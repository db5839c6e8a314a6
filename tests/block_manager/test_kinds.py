"""Several kinds of KV cache groups in one pool, case by case."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager, GroupKind, PrefixMatch
from rose_backend.errors import ConfigError, RowError

FULL = GroupKind()


def make(*kinds: GroupKind, num_blocks: int = 60) -> BlockManager:
    return BlockManager(num_blocks=num_blocks, block_size=4, max_num_seqs=4, max_model_len=64, kinds=kinds)


def compute(manager: BlockManager, tokens: Sequence[int], at_once: int = 64) -> int:
    """Add a prompt and compute it, so many tokens at once; return its row."""
    added = manager.add(np.array(tokens, np.int32))
    assert added is not None
    row = np.array([added.row])
    for start in range(added.num_cached_tokens, len(tokens), at_once):
        count = min(at_once, len(tokens) - start)
        assert manager.reserve(row, count).ok
        manager.commit(row, count, np.array(tokens[start : start + count], np.int32))
    manager.take_clone_plan()
    manager.check_integrity()
    return added.row


@pytest.mark.parametrize("windows", [(), (4,), (None, None), (None, 4, None), (None, 4, 4)], ids=str)
def test_kinds_that_the_manager_does_not_serve_are_refused(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(ConfigError, match=r"kinds: got windows .* None for the first kind"):
        make(*map(GroupKind, windows))


@pytest.mark.parametrize("arguments", [{"window": 1}, {"num_groups": 0}], ids=str)
def test_numbers_out_of_range_are_named(arguments: dict[str, int]) -> None:
    (name,) = arguments
    with pytest.raises(ConfigError, match=name):
        GroupKind(**arguments)


def test_a_long_row_holds_a_window_only() -> None:
    manager = make(FULL, GroupKind(6, 2))
    row = compute(manager, range(60), at_once=4)
    # 15 columns of the first kind; of each other group what token 59 attends to, and the column before the last step.
    held = manager.num_usable_blocks - manager.num_free_blocks
    assert held == 15 + 2 * 3
    manager.let_go_of_passed(np.array([row]))
    assert manager.num_usable_blocks - manager.num_free_blocks == 15 + 2 * 2
    assert manager.group_block_ids(row, slice(0, 15))[1][:, :13].tolist() == [[0] * 13] * 2
    with pytest.raises(RowError):
        manager.let_go_of_passed(np.array([3]))


def test_what_a_window_has_passed_is_found_until_it_is_taken() -> None:
    manager = make(FULL, GroupKind(6))
    row = compute(manager, range(40), at_once=4)
    wanted = np.array([*range(22), 99, 98], np.int32)
    assert manager.match(wanted).num_tokens == 22
    # The free blocks, then those that the window passed first: all that a hit in the middle needs.
    other = compute(manager, range(100, 100 + 60), at_once=60)
    assert manager.stats.evictions == 0 and manager.match(wanted).num_tokens == 22
    assert manager.reserve(np.array([other]), 4).ok
    manager.free(np.array([other]))
    assert manager.match(np.array([*range(39), 99], np.int32)).num_tokens == 39
    third = compute(manager, range(200, 200 + 64), at_once=64)
    assert manager.stats.evictions > 0
    assert manager.match(wanted).num_tokens == 0
    # The row still holds its window.
    assert manager.match(np.array([*range(40), 99], np.int32)).num_tokens == 40
    manager.free(np.array([row, third]))


def test_the_end_of_a_row_goes_before_its_beginning_and_a_window_before_the_rest() -> None:
    manager = make(FULL, GroupKind(6))
    row = compute(manager, range(16))
    full, window = (kind.block_table[row, :4].tolist() for kind in manager.table.kinds)
    manager.free(np.array([row]))
    order = [block for pair in zip(window[::-1], full[::-1], strict=True) for block in pair]
    assert manager.pool.cached_blocks().tolist() == order


def test_a_hit_inside_a_block_copies_the_tail_of_each_kind_by_one_plan() -> None:
    manager = make(FULL, GroupKind(6, 3))
    compute(manager, range(15))
    added = manager.add(np.array([*range(14), 99, 98], np.int32))
    assert added is not None and added.num_cached_tokens == 14
    free = manager.num_free_blocks
    assert manager.reserve(np.array([added.row]), 2).ok
    plan = manager.take_clone_plan()
    assert plan is not None and len(plan) == 1 + 3 and set(plan.num_tokens.tolist()) == {2}
    assert free - manager.num_free_blocks == 4
    copies = [blocks[:, 0].tolist() for blocks in manager.group_block_ids(added.row, slice(3, 4))]
    assert sorted(plan.dst_block_ids.tolist()) == sorted(copies[0] + copies[1])
    assert (manager.stats.clones, plan.num_held) == (2, 2)
    manager.finish_clone_plan(plan)
    manager.check_integrity()


def test_a_long_prompt_in_steps_needs_the_windows_of_a_step() -> None:
    manager = make(FULL, GroupKind(6, 2))
    nothing = PrefixMatch(np.zeros(0, np.int32), 0, b"", 0)
    assert manager.blocks_needed(nothing, 64) == 16 + 2 * 16
    # Five tokens before eight new ones, which may begin inside a block.
    assert manager.blocks_needed(nothing, 64, 8) == 16 + 2 * 5
    assert manager.blocks_to_grow(None, 64, 8) == 16 + 2 * 5
    row = compute(manager, range(24), at_once=8)
    assert manager.blocks_to_grow(row, 64, 8) == 10 + 2 * (5 - (6 - 2))
    assert manager.blocks_to_grow(row, 24, 8) == 0


def test_what_is_computed_again_because_of_a_window_takes_the_place_of_what_was_there() -> None:
    manager = make(FULL, GroupKind(6))
    assert manager.cache is not None
    manager.free(np.array([compute(manager, range(16))]))
    manager.free(np.array([compute(manager, range(100, 116))]))
    older = manager.match(np.array([*range(16), 99], np.int32))
    assert older.num_tokens == 16
    gone = older.window_block_ids[0].astype(np.int64)
    manager.pool.share(gone)
    manager.uncache(gone)
    manager.clones.release_blocks(gone)
    assert manager.match(np.array([*range(16), 99], np.int32)).num_tokens < 16
    row = compute(manager, range(16))
    full = manager.block_table[row, :4].tolist()
    # The window of the first half was still there.
    assert full[:2] == older.block_ids[:2].tolist()
    assert not set(full[2:]) & set(older.block_ids.tolist())
    # One copy of each, and the new one, which is evicted last.
    assert len(manager.cache.full_index()) == 4 + 4
    manager.free(np.array([row]))
    assert set(manager.pool.cached_blocks()[-8:].tolist()) >= set(full)
    # While a row holds it, the older one stays.
    rows = [compute(manager, range(200, 216)) for _ in range(2)]
    assert manager.block_table[rows[0], :3].tolist() == manager.block_table[rows[1], :3].tolist()
    manager.check_integrity()


def evict_all_but(manager: BlockManager, num_cached: int) -> None:
    """Let rows take blocks until so many are cached, then give them back."""
    rows: list[int] = []
    while manager.pool.num_cached_blocks > num_cached:
        if not rows or manager.num_row_blocks[rows[-1]] == 16:
            added = manager.add(np.array([7] * 60, np.int32), namespace=b"another")
            assert added is not None
            rows.append(added.row)
        count = 4 * (1 + int(manager.num_row_blocks[rows[-1]]))
        assert manager.reserve(np.array(rows[-1:]), count).ok
    manager.free(np.array(rows))


def go_on_from_a_hit(manager: BlockManager, rest: range) -> np.ndarray:
    """Return the row of a sequence that finds 20 tokens and computes the rest, one by one."""
    added = manager.add(np.array([*range(20), *rest], np.int32))
    assert added is not None and added.num_cached_tokens == 20
    row = np.array([added.row])
    for token in rest:
        assert manager.reserve(row, 1).ok
        manager.commit(row, 1, np.array([token], np.int32))
    return row


def test_the_window_at_the_end_of_a_shared_prefix_is_released_with_the_prefix() -> None:
    manager = make(FULL, GroupKind(6), num_blocks=80)
    manager.free(np.array([compute(manager, range(20))]))
    # Another goes on from there, and its window passes the end of what both share.
    row = go_on_from_a_hit(manager, range(50, 70))
    shared = manager.match(np.array([*range(20), 99], np.int32)).window_block_ids[0].tolist()
    manager.free(row)
    order = manager.pool.cached_blocks().tolist()
    prefix = manager.match(np.array([*range(20), 99], np.int32)).block_ids.tolist()
    # Behind the row's own end; column 4's block before the prefix' last one, column 3's before the one in front.
    assert order[-7:] == [shared[1], prefix[4], shared[0], prefix[3], prefix[2], prefix[1], prefix[0]]


def test_the_window_of_a_hit_outlives_others_while_its_prefix_is_held() -> None:
    manager = make(FULL, GroupKind(6), num_blocks=60)
    manager.free(np.array([compute(manager, range(20))]))
    go_on_from_a_hit(manager, range(50, 90))
    # What its window passed first is what others need to go on from the shared prefix.
    wanted = np.array([*range(20), 99], np.int32)
    assert manager.match(wanted).num_tokens == 20
    evict_all_but(manager, 3)
    assert manager.match(wanted).num_tokens == 20
    evict_all_but(manager, 1)
    assert manager.match(wanted).num_tokens == 0
    manager.check_integrity()
