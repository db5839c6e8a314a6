"""Each invariant by itself: one kind of damage, and the message that names it with its counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager, GroupType
from rose_backend.errors import IntegrityError
from tests.support.block_manager.managers import admit, free


def damaged_manager() -> BlockManager:
    """Row 0 holds blocks 1 (full) and 2 (one token), row 1 holds 1 and 4 (to be copied from 2); 3 is cached."""
    manager = BlockManager(num_blocks=10, block_size=4, max_num_seqs=3, max_model_len=32)
    first, _ = admit(manager, [1, 2, 3, 4, 5])
    free(manager, admit(manager, [9, 9])[0])
    assert manager.reserve(manager.fork(first, 1), 1).ok
    manager.check_integrity()
    assert manager.block_table[:2, :3].tolist() == [[1, 2, 0], [1, 4, 0]]
    assert manager.pool.cached_blocks().tolist() == [3]
    return manager


def set_item(name: str, index: object, value: object) -> Callable[[BlockManager], None]:
    """Return a function that stores ``value`` in an array of the manager, or in its ``window``'s."""

    def damage(manager: BlockManager) -> None:
        *owner, attribute = name.split(".")
        owners = {"pool": manager.pool, "window": manager.table.group_types[-1]}
        getattr(owners[owner[0]] if owner else manager, attribute)[index] = value

    return damage


def lose_a_free_row(manager: BlockManager) -> None:
    manager.table.take_rows(1, [np.zeros(0, np.int32)], 0, b"", b"")
    manager.table.capacity[2] = -1


def point_a_second_digest_to_a_block(manager: BlockManager) -> None:
    assert manager.cache is not None
    manager.cache.full_index()[b"another"] = 1


def damaged_group_types() -> BlockManager:
    """Row 0 holds 1 to 4, and of the groups with a window 11 (followed by 12) in its last column; 13 tokens."""
    group_types = [GroupType(), GroupType(4, 2)]
    manager = BlockManager(
        num_blocks=20, block_size=4, max_num_seqs=2, max_model_len=32, group_types=group_types
    )
    row, _ = admit(manager, range(13))
    manager.release_passed_blocks(np.array([row]))
    manager.check_integrity()
    assert manager.table.group_types[1].block_table[0, :5].tolist() == [0, 0, 7, 8, 0]
    assert manager.pool.followers[0, [7, 8]].tolist() == [11, 12]
    return manager


DAMAGES = [
    (set_item("block_table", (0, 5), 6), r"row 0 has an entry after its last block"),
    (set_item("num_computed_tokens", 0, 9), r"row 0: 9 computed tokens in 2 blocks"),
    (set_item("num_row_blocks", 2, 1), r"row 2 is not in use but holds 1 blocks"),
    (lose_a_free_row, r"rows: 2 in use \+ 0 free, expected 3 in all"),
    (set_item("block_table", (0, 1), 1), r"row 0 lists block 1 twice"),
    (set_item("block_table", (0, 1), 0), r"the null block is held 1 times, expected 0"),
    (set_item("pool.ref_counts", 1, 3), r"block 1: reference count is 3, 2 holders were counted"),
    (set_item("pool.ref_counts", 2, 1), r"block 2: reference count is 1, 2 holders were counted"),
    (set_item("pool.ref_counts", 7, 1), r"block 7: reference count is 1, 0 holders were counted"),
    (lambda manager: manager.pool.take(1), r"block 5: reference count is 1, 0 holders"),
    (
        lambda manager: manager.pool.recycle(np.array([1])),
        r"block 1 is in 2 states, expected 1: free 6",
    ),
    (
        lambda manager: manager.pool._queue.push(np.array([6])),
        r"block 6 is in 2 states, expected 1: free 5",
    ),
    (set_item("pool.is_cached", 6, True), r"block 6 is free but can still be found"),
    (set_item("pool.is_cached", 3, False), r"block 3 waits for eviction but cannot be found"),
    (set_item("pool.writers", 1, 2), r"block 1: writer is row 2, which does not list it"),
    (set_item("pool.writers", 3, 0), r"block 3: writer is row 0, which does not list it"),
    (set_item("pool.writers", 2, -1), r"block 2: row 0 may write it, but its writer is -1"),
    (set_item("pool.num_written_tokens", 1, 3), r"block 1: row 0 reads 4 tokens, 3 are written"),
    (set_item("pool.num_written_tokens", 8, 1), r"block 8 is free but counts 1 written tokens"),
    (
        set_item("pool.num_written_tokens", 2, 2),
        r"block 2: 2 tokens are written, its writer, row 0, has computed 1",
    ),
    (set_item("pool.num_written_tokens", 3, 5), r"block 3: 5 written tokens, 4 fit"),
    (set_item("pool.is_cached", 2, False), r"blocks \[2\] are in the index or flagged, not both"),
    (set_item("pool.num_written_tokens", 3, 0), r"block 3 can be found but holds 0 tokens"),
    (point_a_second_digest_to_a_block, r"2 digests lead to 1 full blocks, expected one each"),
]
DAMAGES_OF_TYPES = [
    (set_item("window.block_table", (0, 4), 9), r"row 0 has an entry after its last block"),
    (set_item("window.block_table", (0, 1), 9), r"row 0 has an entry before its first block, 2"),
    (
        set_item("window.first_block", 0, 3),
        r"row 0 has an entry before its first block, 3",
    ),
    (set_item("window.block_table", (0, 3), 0), r"the null block is held 1 times"),
    (set_item("pool.followers", (0, 8), 11), r"block 11 follows several blocks"),
    (set_item("pool.followers", (0, 8), 0), r"block 8 has 0 followers, expected 1"),
    (set_item("pool.followers", (0, 1), 15), r"block 1 has 1 followers, expected 0"),
    (set_item("pool.followers", (0, 15), 16), r"block 15 is free but has followers"),
    (set_item("pool.num_written_tokens", 12, 1), r"block 12 follows another and has a state itself"),
    (set_item("pool.ends_hit", 15, True), r"block 15 is free but marked as the end of a hit"),
    (set_item("pool.group_type_of", 3, 1), r"block 3 has 0 followers, expected 1"),
]


@pytest.mark.parametrize(
    ("make", "damage", "message"),
    [
        *((damaged_manager, *damage) for damage in DAMAGES),
        *((damaged_group_types, *damage) for damage in DAMAGES_OF_TYPES),
    ],
)
def test_damage_is_named(
    make: Callable[[], BlockManager], damage: Callable[[BlockManager], object], message: str
) -> None:
    manager = make()
    damage(manager)
    with pytest.raises(IntegrityError, match=message):
        manager.check_integrity()


def test_a_window_that_the_next_token_needs_is_not_passed() -> None:
    manager = damaged_group_types()
    group_type = manager.table.group_types[1]
    group_type.block_table[0, 2], group_type.first_block[0] = 0, 3
    manager.clones.release_blocks(np.array([7]))
    with pytest.raises(IntegrityError, match=r"row 0: the first block is that of column 3, .* position 10"):
        manager.check_integrity()
