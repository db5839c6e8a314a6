"""The block manager's cases by name."""

from __future__ import annotations

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager
from rose_backend.errors import ConfigError, IntegrityError, RowError


def make(num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, **options: object) -> BlockManager:
    return BlockManager(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, max_model_len=64, **options
    )


def compute(manager: BlockManager, row: int, tokens: list[int]) -> None:
    """Reserve, copy, write and commit ``tokens`` for one row."""
    assert manager.reserve(np.array([row]), len(tokens)).ok
    plan = manager.take_clone_plan()
    if plan is not None:
        manager.finish_clone_plan(plan)
    manager.commit(np.array([row]), len(tokens), np.array(tokens, np.int32))
    manager.check_integrity()


def admit(manager: BlockManager, tokens: list[int], namespace: bytes = b"") -> tuple[int, int]:
    """Add a prompt and compute all of it; return (row, cached tokens)."""
    admission = manager.add(np.array(tokens, np.int32), namespace=namespace)
    assert admission is not None
    compute(manager, admission.row, tokens[admission.num_cached_tokens :])
    return admission.row, admission.num_cached_tokens


def table(manager: BlockManager, row: int) -> list[int]:
    return manager.block_table[row, : manager.num_row_blocks[row]].tolist()


def test_append_within_a_private_tail_takes_no_block() -> None:
    manager = make()
    row, _ = admit(manager, [1, 2])
    free = manager.num_free_blocks
    reservation = manager.reserve(np.array([row]), 2)
    assert reservation.ok and reservation.num_new_blocks == 0
    assert manager.num_free_blocks == free


def test_one_call_allocates_one_block_for_each_full_row() -> None:
    manager = make()
    rows = np.array(
        [admit(manager, [symbol, 2, 3, 4])[0] for symbol in range(3)] + [admit(manager, [9, 9])[0]]
    )
    reservation = manager.reserve(rows, 1)
    assert reservation.num_new_blocks == 3
    assert manager.num_row_blocks[rows].tolist() == [2, 2, 2, 1]
    assert manager.take_clone_plan() is None


def test_hit_ends_inside_a_block_and_costs_one_clone() -> None:
    manager = BlockManager(num_blocks=16, block_size=128, max_num_seqs=4, max_model_len=1024)
    shared = list(range(100))
    first, _ = admit(manager, shared + [500] * 20)
    before = table(manager, first)
    second = manager.add(np.array(shared + [600] * 20, np.int32))
    assert second is not None and second.num_cached_tokens == 100
    assert table(manager, second.row) == before
    assert manager.reserve(np.array([second.row]), 20).ok
    plan = manager.take_clone_plan()
    assert plan is not None and len(plan) == 1
    assert plan.src_block_ids.tolist() == before
    assert plan.dst_block_ids.tolist() == table(manager, second.row) != before
    assert plan.num_tokens.tolist() == [100]
    assert table(manager, first) == before
    assert manager.stats.clones == 1


def test_two_rows_sharing_a_full_block_each_get_a_new_block_and_no_clone() -> None:
    manager = make()
    parent, _ = admit(manager, [1, 2, 3, 4])
    children = manager.fork(parent, 1)
    assert children is not None
    rows = np.array([parent, children[0]])
    reservation = manager.reserve(rows, 1)
    assert reservation.num_new_blocks == 2
    assert manager.take_clone_plan() is None
    left, right = table(manager, parent), table(manager, int(children[0]))
    assert left[0] == right[0] and left[1] != right[1]


def test_a_partial_block_shared_by_the_cache_and_two_rows() -> None:
    manager = make()
    finished, _ = admit(manager, [1, 2, 3, 4, 5, 6])
    tail = table(manager, finished)[1]
    manager.free(np.array([finished]))
    left = manager.add(np.array([1, 2, 3, 4, 5, 6, 7], np.int32))
    right = manager.add(np.array([1, 2, 3, 4, 5, 6, 8], np.int32))
    assert left is not None and right is not None
    assert left.num_cached_tokens == right.num_cached_tokens == 6
    assert manager.reserve(np.array([left.row, right.row]), 1).ok
    plan = manager.take_clone_plan()
    # No row has written behind token 6: one row continues in place, the other gets a copy.
    assert plan is not None and plan.src_block_ids.tolist() == [tail]
    assert {table(manager, left.row)[1], table(manager, right.row)[1]} == {tail, int(plan.dst_block_ids[0])}
    manager.check_integrity()


def test_fork_of_a_partial_tail_gives_each_child_a_private_copy() -> None:
    manager = make()
    parent, _ = admit(manager, [1, 2, 3, 4, 5])
    children = manager.fork(parent, 3)
    assert children is not None
    rows = np.array([parent, *children])
    assert manager.reserve(rows, 1).num_new_blocks == 3
    plan = manager.take_clone_plan()
    assert plan is not None and len(plan) == 3
    assert set(plan.src_block_ids.tolist()) == {table(manager, parent)[1]}
    tails = [table(manager, int(row))[1] for row in rows]
    assert len(set(tails)) == 4
    assert len({table(manager, int(row))[0] for row in rows}) == 1


def test_copied_bytes_are_counted() -> None:
    manager = make(bytes_per_block=1000)
    parent, _ = admit(manager, [1, 2, 3, 4, 5])
    assert manager.fork(parent, 3) is not None
    assert manager.reserve(np.arange(4), 1).ok
    assert manager.stats.as_dict()["bytes_cloned"] == 3000


def test_fork_of_a_row_with_a_pending_clone_copies_from_the_root() -> None:
    manager = make()
    first, _ = admit(manager, [1, 2, 3])
    root = table(manager, first)[0]
    second = manager.add(np.array([1, 2, 9], np.int32))
    assert second is not None and manager.reserve(np.array([second.row]), 1).ok
    child = manager.fork(second.row, 1)
    assert child is not None and manager.reserve(child, 1).ok
    plan = manager.take_clone_plan()
    assert plan is not None and plan.src_block_ids.tolist() == [root, root]
    manager.finish_clone_plan(plan)
    manager.check_integrity()


def test_source_is_held_until_the_copy_was_issued() -> None:
    manager = make(num_blocks=4)
    first, _ = admit(manager, [1, 2, 3])
    source = table(manager, first)[0]
    second = manager.add(np.array([1, 2, 9], np.int32))
    assert second is not None and manager.reserve(np.array([second.row]), 1).ok
    plan = manager.take_clone_plan()
    manager.free(np.array([first, second.row]))
    assert plan is not None and manager.pool.ref_counts[source] == 1
    assert manager.num_free_blocks == 2
    manager.finish_clone_plan(plan)
    assert manager.num_free_blocks == 3
    with pytest.raises(RowError, match="finished before"):
        manager.finish_clone_plan(plan)


def test_free_during_a_pending_clone_calls_the_copy_off() -> None:
    manager = make()
    first, _ = admit(manager, [1, 2, 3])
    second = manager.add(np.array([1, 2, 9], np.int32))
    assert second is not None and manager.reserve(np.array([second.row]), 1).ok
    manager.free(np.array([second.row]))
    assert manager.take_clone_plan() is None
    assert manager.pool.ref_counts[table(manager, first)[0]] == 1
    manager.check_integrity()


def test_the_copies_left_when_one_is_called_off_lie_side_by_side() -> None:
    manager = make()
    parent, _ = admit(manager, [1, 2])
    children = manager.fork(parent, 4)
    assert children is not None and manager.reserve(children, 1).ok
    manager.free(children[1:2])
    plan = manager.take_clone_plan()
    assert plan is not None and len(plan) == 3
    arrays = (plan.src_block_ids, plan.dst_block_ids, plan.num_tokens)
    # They travel to a device as they are.
    assert all(array.flags.c_contiguous for array in arrays)
    manager.finish_clone_plan(plan)
    manager.check_integrity()


def test_nothing_is_findable_before_commit() -> None:
    manager = make()
    row = manager.add(np.array([1, 2, 3, 4, 5], np.int32))
    assert row is not None and manager.reserve(np.array([row.row]), 5).ok
    assert manager.match(np.array([1, 2, 3, 4, 5], np.int32)).num_tokens == 0
    manager.commit(np.array([row.row]), 2, np.array([1, 2], np.int32))
    assert manager.match(np.array([1, 2, 3, 4, 5], np.int32)).num_tokens == 2


def test_a_pool_of_one_sequence_serves_it_again_after_a_partial_hit() -> None:
    manager = BlockManager(num_blocks=5, block_size=4, max_num_seqs=2, max_model_len=16)
    row, _ = admit(manager, [1] * 15)
    manager.free(np.array([row]))
    prompt = np.array([1] * 14 + [2], np.int32)
    match = manager.match(prompt)
    assert match.num_tokens == 14 and manager.blocks_needed(match, 16) == manager.num_free_blocks == 4
    row, cached = admit(manager, prompt.tolist())
    assert cached == 14
    compute(manager, row, [3])
    assert manager.stats.clones == 0 and manager.stats.overwrites == 1
    assert manager.match(np.array([1] * 16, np.int32)).num_tokens == 14


def test_reset_forgets_all_but_not_while_in_use() -> None:
    manager = make()
    row, _ = admit(manager, [1, 2, 3, 4, 5])
    assert not manager.reset_prefix_cache()
    manager.free(np.array([row]))
    assert manager.reset_prefix_cache()
    assert manager.match(np.array([1, 2, 3, 4, 5], np.int32)).num_tokens == 0
    manager.check_integrity()


def test_rows_run_out_as_an_answer() -> None:
    manager = make(max_num_seqs=1)
    row, _ = admit(manager, [1])
    assert manager.add(np.array([1], np.int32)) is None
    assert manager.fork(row, 1) is None


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_blocks": 1}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_bad_sizes_are_named(options: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make(**options)


def test_caller_mistakes_are_typed_errors_that_change_nothing() -> None:
    manager = make()
    row, _ = admit(manager, [1, 2])
    free = manager.num_free_blocks
    with pytest.raises(RowError, match="not in use"):
        manager.reserve(np.array([row + 1]), 1)
    with pytest.raises(RowError, match="duplicate row"):
        manager.reserve(np.array([row, row]), 10)
    with pytest.raises(RowError, match="max_model_len"):
        manager.reserve(np.array([row]), 63)
    with pytest.raises(RowError, match="has not reserved"):
        manager.commit(np.array([row]), 10, np.arange(10))
    with pytest.raises(RowError, match="2 token ids for 1"):
        manager.commit(np.array([row]), 1, np.arange(2))
    with pytest.raises(RowError, match="got 0 tokens"):
        manager.add(np.zeros(0, np.int32))
    with pytest.raises(RowError, match="not in use"):
        manager.free(np.array([row + 1]))
    manager.check_integrity()
    assert manager.num_free_blocks == free


@pytest.mark.parametrize("damage", ["ref_count", "writer", "table", "flag", "length"])
def test_integrity_check_sees_damage(damage: str) -> None:
    manager = make()
    row, _ = admit(manager, [1, 2, 3, 4, 5])
    block = table(manager, row)[1]
    if damage == "ref_count":
        manager.pool.ref_counts[block] += 1
    elif damage == "writer":
        manager.pool.writers[block] = row + 1
    elif damage == "table":
        manager.block_table[row, 1] = table(manager, row)[0]
    elif damage == "flag":
        manager.pool.is_cached[block] = False
    else:
        manager.num_computed_tokens[row] = 40
    with pytest.raises(IntegrityError):
        manager.check_integrity()


def test_prefix_cache_off_finds_nothing_and_still_forks() -> None:
    manager = make(prefix_cache=False)
    row, _ = admit(manager, [1, 2, 3, 4, 5])
    assert admit(manager, [1, 2, 3, 4, 5])[1] == 0
    children = manager.fork(row, 2)
    assert children is not None and manager.reserve(children, 1).num_new_blocks == 2
    manager.check_integrity()


@pytest.mark.parametrize(("block_size", "told"), [(1, 32), (4, 32), (8, 32), (16, 32), (32, 32), (48, 0)])
def test_hits_are_reported_in_blocks_of_no_less_than_16_tokens(block_size: int, told: int) -> None:
    manager = BlockManager(num_blocks=90, block_size=block_size, max_num_seqs=2, max_model_len=64)
    tokens, row = np.arange(40, dtype=np.int32), np.zeros(1, np.int64)
    assert manager.add(tokens) is not None and manager.reserve(row, 40).ok
    manager.commit(row, 40, tokens)
    other = np.append(tokens[:37], [90, 91]).astype(np.int32)
    assert manager.add(other) is not None
    assert (manager.stats.hit_tokens, manager.stats.reported_hit_tokens) == (37, told)
