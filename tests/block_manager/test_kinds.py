"""Several KV cache group types in one pool: what is held, found and evicted, case by case."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager, GroupType, PrefixMatch
from rose_backend.errors import ConfigError
from tests.support.block_manager.managers import add, admit, compute, free, make, num_found, table
from tests.support.block_manager.simulation import Simulation

FULL = GroupType()


def make_types(*group_types: GroupType, num_blocks: int = 60) -> BlockManager:
    return make(num_blocks, max_num_seqs=4, group_types=group_types)


@pytest.mark.parametrize("windows", [(), (4,), (None, None), (None, 4, None), (None, 4, 4)], ids=str)
def test_group_types_that_the_manager_does_not_serve_are_refused(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(ConfigError, match=r"group_types: got windows .* None for the first"):
        make_types(*map(GroupType, windows))


@pytest.mark.parametrize("name, number", [("window", 1), ("num_groups", 0)])
def test_numbers_out_of_range_are_named(name: str, number: int) -> None:
    with pytest.raises(ConfigError, match=name):
        GroupType(**{name: number})


def test_a_long_row_holds_a_window_only() -> None:
    manager = make_types(FULL, GroupType(6, 2))
    row, _ = admit(manager, range(60), at_once=4)
    # 15 columns of the first type; of each other group what token 59 attends to, and the column before the last step.
    assert manager.num_usable_blocks - manager.num_free_blocks == 15 + 2 * 3
    manager.release_passed_blocks(np.array([row]))
    assert manager.num_usable_blocks - manager.num_free_blocks == 15 + 2 * 2
    assert manager.group_block_ids(row, slice(0, 15))[1][:, :13].tolist() == [[0] * 13] * 2


def test_what_the_windows_of_several_rows_have_passed_makes_room_for_them() -> None:
    manager = make_types(FULL, GroupType(6), num_blocks=17)
    rows = np.array([admit(manager, range(first, first + 16), at_once=4)[0] for first in (0, 100)])
    # Four columns of each row, three of its window, of which it has passed one.
    assert manager.num_free_blocks == 16 - 2 * (4 + 3)
    assert manager.reserve(rows, np.array([4, 4])).ok and manager.num_free_blocks == 0


def test_what_a_window_has_passed_is_found_until_it_is_taken() -> None:
    manager = make_types(FULL, GroupType(6))
    admit(manager, range(40), at_once=4)
    assert num_found(manager, range(22)) == 22
    # The free blocks, then those that the window passed first: all that a hit in the middle needs.
    other, _ = admit(manager, range(100, 160))
    assert manager.stats.evictions == 0 and num_found(manager, range(22)) == 22
    assert manager.reserve(np.array([other]), 4).ok
    free(manager, other)
    assert num_found(manager, range(39)) == 39
    admit(manager, range(200, 264))
    assert manager.stats.evictions > 0 and num_found(manager, range(22)) == 0
    # The row still holds its window.
    assert num_found(manager, range(40)) == 40


def test_the_end_of_a_row_goes_before_its_beginning_and_a_window_before_the_rest() -> None:
    manager = make_types(FULL, GroupType(6))
    row, _ = admit(manager, range(16))
    pairs = zip(table(manager, row, 1)[::-1], table(manager, row)[::-1], strict=True)
    free(manager, row)
    assert manager.pool.cached_blocks().tolist() == [block for pair in pairs for block in pair]


def test_a_long_prompt_in_steps_needs_the_windows_of_a_step() -> None:
    manager = make_types(FULL, GroupType(6, 2))
    nothing = PrefixMatch(np.zeros(0, np.int32), 0, b"", 0)
    assert manager.blocks_needed(nothing, 64) == 16 + 2 * 16
    # Five tokens before eight new ones, which may begin inside a block.
    assert manager.blocks_needed(nothing, 64, 8) == 16 + 2 * 5
    assert manager.blocks_to_grow(None, 64, 8) == 16 + 2 * 5
    row, _ = admit(manager, range(24), at_once=8)
    assert manager.blocks_to_grow(row, 64, 8) == 10 + 2 * (5 - (6 - 2))
    assert manager.blocks_to_grow(row, 24, 8) == 0


def test_what_is_computed_again_because_of_a_window_takes_the_place_of_what_was_there() -> None:
    manager = make_types(FULL, GroupType(6))
    assert manager.cache is not None
    for tokens in (range(16), range(100, 116)):
        free(manager, admit(manager, tokens)[0])
    older = manager.match(np.array([*range(16), 99], np.int32))
    assert older.num_tokens == 16
    gone = older.window_block_ids[0].astype(np.int64)
    manager.pool.share(gone)
    manager.uncache(gone)
    manager.clones.release_blocks(gone)
    assert num_found(manager, range(16)) < 16
    row, _ = admit(manager, range(16))
    full = table(manager, row)
    # The window of the first half was still there.
    assert full[:2] == older.block_ids[:2].tolist()
    assert not set(full[2:]) & set(older.block_ids.tolist())
    # One copy of each, and the new one, which is evicted last.
    assert len(manager.cache.full_index()) == 4 + 4
    free(manager, row)
    assert set(manager.pool.cached_blocks()[-8:].tolist()) >= set(full)
    # While a row holds it, the older one stays.
    one, other = (admit(manager, range(200, 216))[0] for _ in range(2))
    assert table(manager, one)[:3] == table(manager, other)[:3]


def evict_all_but(manager: BlockManager, num_cached: int) -> None:
    """Let rows take blocks until so many are cached, then give them back."""
    rows: list[int] = []
    while manager.pool.num_cached_blocks > num_cached:
        if not rows or manager.num_row_blocks[rows[-1]] == 16:
            rows.append(add(manager, [7] * 60, b"another")[0])
        count = 4 * (1 + int(manager.num_row_blocks[rows[-1]]))
        assert manager.reserve(np.array(rows[-1:]), count).ok
    free(manager, *rows)


def go_on_from_a_hit(manager: BlockManager, rest: range) -> int:
    """Return the row of a sequence that finds 20 tokens and computes the rest, one by one."""
    row, num_cached = admit(manager, [*range(20), *rest], at_once=1)
    assert num_cached == 20
    return row


def test_the_window_at_the_end_of_a_shared_prefix_is_released_with_the_prefix() -> None:
    manager = make_types(FULL, GroupType(6), num_blocks=80)
    free(manager, admit(manager, range(20))[0])
    # Another goes on from there, and its window passes the end of what both share.
    row = go_on_from_a_hit(manager, range(50, 70))
    match = manager.match(np.array([*range(20), 99], np.int32))
    shared, prefix = match.window_block_ids[0].tolist(), match.block_ids.tolist()
    free(manager, row)
    # After the row's own end; column 4's block before the prefix' last one, column 3's before the one in front.
    expected = [shared[1], prefix[4], shared[0], prefix[3], prefix[2], prefix[1], prefix[0]]
    assert manager.pool.cached_blocks().tolist()[-7:] == expected


def test_the_window_of_a_hit_outlives_others_while_its_prefix_is_held() -> None:
    manager = make_types(FULL, GroupType(6))
    free(manager, admit(manager, range(20))[0])
    go_on_from_a_hit(manager, range(50, 90))
    # What its window passed first is what others need to go on from the shared prefix.
    for num_cached, expected in ((60, 20), (3, 20), (1, 0)):
        evict_all_but(manager, num_cached)
        assert num_found(manager, range(20)) == expected


@pytest.mark.parametrize("windows", [(4, 11), (11, 4), (6,)], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_hits_among_holes(windows: tuple[int, ...], block_size: int) -> None:
    """A window's hit may end where another window has a hole: the longest prefix that all can use is found."""
    paths = Counter[str]()
    for seed in range(20 * block_size, 20 * block_size + 20):
        choose = random.Random(seed)
        group_types = [FULL, *(GroupType(window, choose.randint(1, 2)) for window in windows)]
        simulation = Simulation(
            group_types=group_types, num_blocks=400, block_size=block_size, max_model_len=40
        )
        prompt = [choose.randrange(3) for _ in range(40)]
        for length in (40, choose.randint(20, 39)):
            # The same tokens, then others: blocks with several continuations.
            tokens = prompt[:length] + [choose.randrange(3) for _ in range(40 - length)]
            row = simulation.add(tokens, b"")
            assert row is not None
            while simulation.room(row):
                step = min(choose.randint(1, 12), simulation.room(row))
                simulation.reserve([row], [step])
                simulation.write([row], [step], iter(()))
                simulation.commit([row], [step])
            simulation.free([row])
        for group_type in range(1, len(group_types)):
            blocks = simulation.manager.cache.indexes[group_type].block_ids().tolist()
            simulation.uncache(sorted(choose.sample(blocks, len(blocks) // choose.randint(2, 8))))
        for length in range(2, 41):
            simulation.match(prompt[:length], b"")
        simulation.match([*prompt, 1], b"")
        paths += simulation.paths
    assert min(paths["hit cut by a window"], paths["no hit because of a window"]) > 30, paths


def test_equal_tails_stay_once_in_each_group_type() -> None:
    manager = make_types(FULL, GroupType(5), GroupType(7, 2))
    assert manager.cache is not None
    rows = [add(manager, [1, 2, 3, 4, 5, 6])[0] for _ in range(3)]
    for row in rows:
        compute(manager, row, [1, 2, 3, 4, 5, 6])
    assert [len(index.block_ids()) for index in manager.cache.indexes] == [1 + 3] * 3
    free(manager, *rows)
    assert [len(index.block_ids()) for index in manager.cache.indexes] == [2] * 3
