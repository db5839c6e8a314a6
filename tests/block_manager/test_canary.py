"""What the canary may expect of each block, from step to step."""

from __future__ import annotations

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager, GroupType
from rose_backend.block_manager.canary import CHECK_INTERVAL, CanaryPlan, CanaryPlanner
from rose_backend.errors import ConfigError

NO_COPIES = np.zeros(0, np.int64)
SIZES = {"num_blocks": 8, "block_size": 4, "max_num_seqs": 2, "max_model_len": 16}


def run(planner: CanaryPlanner) -> CanaryPlan:
    """Plan steps in which nothing happens up to the next check, and return that."""
    for _ in range(CHECK_INTERVAL):
        plan = planner.plan(NO_COPIES)
        if plan.num_settled is not None:
            return plan
    raise AssertionError("no check")


def start(manager: BlockManager, tokens: list[int]) -> int:
    """Add a row and compute all its tokens; return it."""
    added = manager.add(np.array(tokens, np.int32))
    assert added is not None
    rows = np.array([added.row])
    count = len(tokens) - added.num_cached_tokens
    assert manager.reserve(rows, np.array([count])).ok
    manager.commit(rows, np.array([count]), np.array(tokens[added.num_cached_tokens :], np.int32))
    return added.row


def test_committed_tokens_are_settled_from_one_check_to_the_next() -> None:
    manager = BlockManager(**SIZES)
    planner = CanaryPlanner(manager)
    row = start(manager, [1, 2, 3, 4, 5, 6])
    first, second = manager.block_table[row, :2]
    assert not run(planner).num_settled.any()
    settled = run(planner).num_settled
    assert (settled[first], settled[second]) == (4, 2)
    # A copy to a block replaces what it had.
    planner.plan(np.array([second]))
    settled = run(planner).num_settled
    assert (settled[first], settled[second]) == (4, 0)


def test_a_block_that_had_another_owner_meanwhile_is_not_settled() -> None:
    manager = BlockManager(**SIZES, prefix_cache=False)
    planner = CanaryPlanner(manager)
    row = start(manager, [1, 2, 3, 4])
    block = manager.block_table[row, 0]
    run(planner)
    manager.free(np.array([row]))
    added = manager.add(np.array([5, 6, 7, 8], np.int32))
    assert added is not None and manager.reserve(np.array([added.row]), np.array([4])).ok
    assert manager.block_table[added.row, 0] == block
    planner.plan(NO_COPIES)
    manager.commit(np.array([added.row]), np.array([4]), np.array([5, 6, 7, 8], np.int32))
    assert run(planner).num_settled[block] == 0
    assert run(planner).num_settled[block] == 4


def test_free_blocks_are_poisoned_once_and_cleared_before_they_are_used() -> None:
    manager = BlockManager(**SIZES)
    planner = CanaryPlanner(manager)
    plan = run(planner)
    assert sorted(plan.poison) == list(range(1, 8))
    row = start(manager, [1, 2, 3, 4, 5])
    held = sorted(manager.block_table[row, :2])
    assert sorted(planner.plan(NO_COPIES).clear) == held
    plan = run(planner)
    assert not len(plan.clear) and not len(plan.poison)
    assert np.flatnonzero(plan.num_settled == -1).tolist() == sorted({*range(1, 8)} - {*held})


def test_several_groups_are_refused() -> None:
    manager = BlockManager(**SIZES, group_types=(GroupType(None, 2),))
    with pytest.raises(ConfigError, match="kv_canary: got a model with several KV cache groups"):
        CanaryPlanner(manager)
