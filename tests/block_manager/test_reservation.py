"""``reserve`` and ``commit`` with several tokens, several steps ahead, and too few blocks."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager
from rose_backend.errors import RowError
from tests.block_manager.deep_state import state_of
from tests.block_manager.test_block_manager import admit, compute, make, table


def scarce_manager(seed: int, num_more_blocks: int = 0) -> tuple[BlockManager, np.ndarray, np.ndarray]:
    """Return a manager with rows that share tails in every way, few free blocks, and what the rows ask for."""
    rng = np.random.default_rng(seed)
    manager = make(
        num_blocks=int(rng.integers(6, 11)) + num_more_blocks, block_size=4, max_num_seqs=7, hash_key=b"key"
    )
    known = [[symbol] * int(rng.integers(2, 8)) for symbol in range(3)]
    for prompt in known[: int(rng.integers(1, 4))]:
        row, _ = admit(manager, prompt)
        manager.free(np.array([row]))
    rows: list[int] = []
    while manager.num_free_rows:
        if rows and rng.random() < 0.3:
            children = manager.fork(int(rng.choice(rows)), 1)
            assert children is not None
            rows += children.tolist()
            continue
        start = known[int(rng.integers(3))]
        prompt = [*start[: int(rng.integers(1, len(start) + 1))], 9]
        admission = manager.add(np.array(prompt, np.int32))
        assert admission is not None
        rows.append(admission.row)
        if rng.random() < 0.2 and manager.reserve(np.array([admission.row]), 1).ok:
            compute(manager, admission.row, [9])
    return manager, np.array(rows), rng.integers(0, 6, len(rows))


@pytest.mark.parametrize("seed", range(60))
def test_the_servable_rows_are_as_many_as_can_be_served_together(seed: int) -> None:
    manager, rows, counts = scarce_manager(seed)
    answer = manager.reserve(rows, counts)
    if answer.ok:
        return
    num_servable = int(answer.servable.sum())
    chosen = np.flatnonzero(answer.servable)
    assert manager.reserve(rows[chosen], counts[chosen]).ok
    for subset in combinations(range(len(rows)), num_servable + 1):
        fresh, _, _ = scarce_manager(seed)
        index = np.array(subset)
        assert not fresh.reserve(rows[index], counts[index]).ok, f"rows {subset} could have been served"


def test_next_blocks_are_reserved_as_by_reserve() -> None:
    num_reserved = num_short = 0
    for seed in range(60):
        (one, rows, _), (other, _, _) = scarce_manager(seed, 9), scarce_manager(seed, 9)
        has_own = [one.reserve(rows[[index]], 1).ok for index in range(len(rows))]
        assert has_own == [other.reserve(rows[[index]], 1).ok for index in range(len(rows))]
        rows = rows[has_own]
        for num_rows in (1, 1, 2, 3, 1, 2, 5):
            some = rows[:num_rows]
            wanted = (one.num_row_blocks[some] + 1) * 4 - one.num_computed_tokens[some]
            is_ok = one.reserve_next_blocks(some)
            assert other.reserve(some, wanted).ok == is_ok
            assert state_of(one) == state_of(other)
            one.check_integrity()
            num_reserved += is_ok
            num_short += not is_ok
    assert min(num_reserved, num_short) > 20, (num_reserved, num_short)


def test_no_row_gets_a_block_behind_one_that_it_reads_or_beyond_its_length() -> None:
    manager = make(num_blocks=30, block_size=4)
    row, _ = admit(manager, [1, 2])
    manager.free(np.array([row]))
    reads = manager.add(np.array([1, 2, 3], np.int32)).row
    before = state_of(manager)
    with pytest.raises(RowError, match="cannot get a block after its own"):
        manager.reserve_next_blocks(np.array([reads]))
    assert state_of(manager) == before
    assert manager.reserve(np.array([reads]), manager.max_model_len - 2).ok
    before = state_of(manager)
    with pytest.raises(RowError, match="cannot get a block after its own"):
        manager.reserve_next_blocks(np.array([reads]))
    assert state_of(manager) == before


def test_the_scarce_managers_are_short_of_blocks_in_every_way() -> None:
    claims = overwrites = clones = num_short = 0
    for seed in range(60):
        manager, rows, counts = scarce_manager(seed)
        answer = manager.reserve(rows, counts)
        num_short += not answer.ok
        before = manager.stats.as_dict()
        manager.reserve(rows[answer.servable], counts[answer.servable])
        after = manager.stats.as_dict()
        claims += after["claims"] - before["claims"]
        overwrites += after["overwrites"] - before["overwrites"]
        clones += after["clones"] - before["clones"]
    assert num_short > 15 and min(claims, overwrites, clones) > 3, (num_short, claims, overwrites, clones)


@pytest.mark.parametrize("cheap", [0, 1])
def test_a_tail_that_two_may_claim_goes_to_the_row_that_needs_less(cheap: int) -> None:
    manager = make(num_blocks=2)
    row, _ = admit(manager, [1, 2])
    manager.free(np.array([row]))
    rows = np.array([manager.add(np.array([1, 2, 3], np.int32)).row for _ in range(2)])
    counts = np.array([14, 14])  # three new blocks; none are left
    counts[cheap] = 1  # no block if the tail is claimed, one if it is copied
    answer = manager.reserve(rows, counts)
    assert not answer.ok and np.flatnonzero(answer.servable).tolist() == [cheap]


def test_speculation_may_keep_the_rest_for_the_next_step() -> None:
    manager = make()
    row, _ = admit(manager, [1, 2, 3])
    manager.reserve(np.array([row]), 6)
    before = table(manager, row)
    manager.commit(np.array([row]), 1, np.array([4], np.int32))
    assert manager.reserve(np.array([row]), 8).num_new_blocks == 0
    assert manager.reserve(np.array([row]), 9).num_new_blocks == 1
    assert table(manager, row)[: len(before)] == before
    manager.check_integrity()


def test_rows_of_one_step_take_different_numbers_of_tokens() -> None:
    manager = make()
    rows = np.array([manager.add(np.array([symbol, 0], np.int32)).row for symbol in range(4)])
    counts = np.array([1, 0, 5, 9])
    assert manager.reserve(rows, counts).num_new_blocks == 1 + 0 + 2 + 3
    manager.commit(rows, counts, np.arange(15, dtype=np.int32))
    assert manager.num_computed_tokens[rows].tolist() == counts.tolist()
    assert manager.match(np.array([6, 7, 8, 9, 10, 11, 12, 13, 14, 0], np.int32)).num_tokens == 9
    manager.check_integrity()


def test_fork_shares_what_is_computed_and_not_what_is_reserved() -> None:
    manager = make()
    row, _ = admit(manager, [1, 2, 3, 4, 5])
    manager.reserve(np.array([row]), 8)
    (child,) = manager.fork(row, 1).tolist()
    assert table(manager, child) == table(manager, row)[:2]
    assert manager.reserve(np.array([child]), 1).num_new_blocks == 1
    plan = manager.take_clone_plan()
    assert plan is not None and plan.num_tokens.tolist() == [1]
    manager.commit(np.array([row]), 8, np.arange(8, dtype=np.int32))
    manager.finish_clone_plan(plan)
    manager.check_integrity()


def test_fork_at_a_block_boundary_shares_no_reserved_block() -> None:
    manager = make()
    row, _ = admit(manager, [1, 2, 3, 4])
    manager.reserve(np.array([row]), 8)
    (child,) = manager.fork(row, 1).tolist()
    assert table(manager, child) == table(manager, row)[:1]
    assert manager.reserve(np.array([child]), 1).num_new_blocks == 1 and manager.take_clone_plan() is None


@pytest.mark.parametrize("moment", ["before the copies", "pending", "in flight", "finished"])
def test_a_fork_family_is_freed_in_any_order(moment: str) -> None:
    for order in permutations(range(4)):
        manager = make()
        row, _ = admit(manager, [1, 2, 3, 4, 5])
        family = [row, *manager.fork(row, 2).tolist()]
        plan = None
        if moment != "before the copies":
            assert manager.reserve(np.array(family), 1).num_new_blocks == 2
        if moment in ("in flight", "finished"):
            plan = manager.take_clone_plan()
        family += manager.fork(family[1], 1).tolist()
        if moment == "finished":
            manager.finish_clone_plan(plan)
        for index in order:
            manager.free(np.array([family[index]]))
            manager.check_integrity()
        if moment == "in flight":
            assert manager.num_free_blocks == manager.num_usable_blocks - 1
            manager.finish_clone_plan(plan)
        assert manager.take_clone_plan() is None
        assert manager.num_free_blocks == manager.num_usable_blocks
        manager.check_integrity()


def test_no_rows_and_no_tokens_change_nothing() -> None:
    manager = make()
    row, _ = admit(manager, [1, 2, 3])
    (child,) = manager.fork(row, 1).tolist()
    manager.take_changed_rows()
    none = np.zeros(0, np.int64)
    assert manager.reserve(none, 1).ok and manager.reserve(np.array([row, child]), 0).ok
    manager.commit(none, 1, none)
    manager.commit(np.array([row, child]), 0, none)
    manager.free(none)
    assert manager.fork(row, 0).tolist() == []
    assert not len(manager.take_changed_rows()) and manager.take_clone_plan() is None
    manager.check_integrity()


def test_an_empty_sequence_forks_and_ends() -> None:
    manager = make()
    admission = manager.add(np.array([1, 2], np.int32))
    assert admission is not None
    children = manager.fork(admission.row, 2)
    assert children is not None and manager.num_row_blocks[children].tolist() == [0, 0]
    assert manager.reserve(children, 1).num_new_blocks == 2
    manager.free(np.array([admission.row, *children]))
    assert manager.num_free_blocks == manager.num_usable_blocks
    manager.check_integrity()


@pytest.mark.parametrize(
    "call",
    [
        lambda m, row: m.reserve(np.array([row]), -1),
        lambda m, row: m.reserve(np.array([row]), 1 << 40),
        lambda m, row: m.reserve(np.array([row, row]), np.array([0, 0])),
        lambda m, row: m.reserve(np.array([-1]), 1),
        lambda m, row: m.commit(np.array([row]), np.array([-1]), np.zeros(0, np.int32)),
        lambda m, row: m.commit(np.array([row, row]), 1, np.zeros(2, np.int32)),
        lambda m, row: m.commit(np.array([-8]), 1, np.zeros(1, np.int32)),
        lambda m, row: m.fork(row, -1),
        lambda m, row: m.fork(row + 100, 1),
        lambda m, row: m.free(np.array([row, row])),
    ],
)
def test_mistakes_are_refused_and_change_nothing(call) -> None:
    manager = make()
    row, _ = admit(manager, [1, 2, 3])
    manager.reserve(np.array([row]), 3)
    before = (manager.block_table.copy(), manager.num_computed_tokens.copy(), manager.pool.ref_counts.copy())
    with pytest.raises(RowError):
        call(manager, row)
    after = (manager.block_table, manager.num_computed_tokens, manager.pool.ref_counts)
    assert all((old == new).all() for old, new in zip(before, after, strict=True))
    manager.check_integrity()


def test_a_row_ends_at_max_model_len_though_its_last_block_has_room() -> None:
    manager = BlockManager(num_blocks=8, block_size=4, max_num_seqs=2, max_model_len=6)
    row, _ = admit(manager, [1, 2, 3, 4, 5])
    assert manager.reserve(np.array([row]), 1).ok
    with pytest.raises(RowError, match="max_model_len is 6"):
        manager.reserve(np.array([row]), 2)


def test_shortage_changes_nothing_and_names_the_rows_that_fit() -> None:
    manager = make(num_blocks=6)
    rows = np.array([admit(manager, [symbol, 1, 1, 1])[0] for symbol in range(3)])
    manager.take_changed_rows()
    before = manager.block_table.copy()
    reservation = manager.reserve(rows, np.array([8, 1, 1]))
    assert not reservation.ok and reservation.servable.tolist() == [False, True, True]
    assert (manager.block_table == before).all()
    assert manager.num_free_blocks == 2
    assert not len(manager.take_changed_rows())


def test_reserved_ahead_steps_touch_no_pool() -> None:
    manager = make()
    row, _ = admit(manager, [1, 2, 3, 4])
    assert manager.reserve(np.array([row]), 8).num_new_blocks == 2
    manager.take_changed_rows()
    free = manager.num_free_blocks
    for token in range(8):
        assert manager.reserve(np.array([row]), 1).num_new_blocks == 0
        manager.commit(np.array([row]), 1, np.array([token], np.int32))
    assert manager.num_free_blocks == free
    assert not len(manager.take_changed_rows())
