"""A few cases by name; the simulation checks every call of the random ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rose_backend.errors import ConfigError
from tests.support.block_manager.managers import add, admit, compute, free, make, table
from tests.support.block_manager.simulation import Simulation


def test_hit_ends_inside_a_block_and_costs_one_clone() -> None:
    manager = make(block_size=128, max_model_len=1024)
    shared = list(range(100))
    first, _ = admit(manager, shared + [500] * 20)
    before = table(manager, first)
    second, num_cached = add(manager, shared + [600] * 20)
    assert num_cached == 100 and table(manager, second) == before
    assert manager.reserve(np.array([second]), 20).ok
    plan = manager.take_clone_plan()
    assert plan is not None and plan.src_block_ids.tolist() == before
    assert plan.dst_block_ids.tolist() == table(manager, second) != before
    assert plan.num_tokens.tolist() == [100] and manager.stats.clones == 1
    assert table(manager, first) == before


def test_source_is_held_until_the_copy_was_issued() -> None:
    manager = make(num_blocks=4)
    first, _ = admit(manager, [1, 2, 3])
    (source,) = table(manager, first)
    second, _ = add(manager, [1, 2, 9])
    assert manager.reserve(np.array([second]), 1).ok
    plan = manager.take_clone_plan()
    manager.free(np.array([first, second]))
    assert plan is not None and manager.pool.ref_counts[source] == 1 and manager.num_free_blocks == 2
    manager.finish_clone_plan(plan)
    assert manager.num_free_blocks == 3


def test_a_pool_of_one_sequence_serves_it_again_after_a_partial_hit() -> None:
    manager = make(num_blocks=5, max_model_len=16)
    free(manager, admit(manager, [1] * 15)[0])
    match = manager.match(np.array([1] * 14 + [2], np.int32))
    assert match.num_tokens == 14 and manager.blocks_needed(match, 16) == manager.num_free_blocks == 4
    row, num_cached = admit(manager, [1] * 14 + [2])
    compute(manager, row, [3])
    assert num_cached == 14 and manager.stats.clones == 0 and manager.stats.overwrites == 1


@pytest.mark.parametrize("field", ["num_blocks", "block_size", "max_num_seqs", "max_model_len"])
def test_bad_sizes_are_named(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make(**{field: 0})
    with pytest.raises(ConfigError, match="num_blocks"):
        make(num_blocks=1)


# What random calls have found before


def run(simulation: Simulation, row: int, count: int, symbol: int = 0) -> None:
    """Reserve, write and commit ``count`` tokens; those after the prompt are ``symbol``."""
    assert simulation.reserve([row], [count]) == [row]
    simulation.write([row], [count], itertools.repeat(symbol))
    simulation.commit([row], [count])


def start(simulation: Simulation, prompt: list[int]) -> int:
    row = simulation.add(prompt, b"")
    assert row is not None
    return row


def test_a_match_of_a_block_that_became_a_duplicate_is_looked_up_again() -> None:
    simulation = Simulation(num_blocks=16, block_size=4)
    first, second = start(simulation, [1, 2, 3, 4, 5]), start(simulation, [1, 2, 3, 4, 5])
    run(simulation, first, 2)
    run(simulation, second, 3)
    lookup = simulation.match([1, 2, 3, 9], b"")
    assert [lookup.match.block_ids.tolist()] == simulation.blocks_by_group_type(second)
    run(simulation, first, 2)
    run(simulation, second, 1)
    simulation.free([second])
    simulation.add(lookup.prompt, b"", lookup.match)
    assert simulation.paths["stale match"] == 1


@pytest.mark.parametrize("order", [1, -1])
def test_the_claimant_that_needs_least_is_servable_when_blocks_are_short(order: int) -> None:
    simulation = Simulation(num_blocks=2, block_size=4)
    parent = start(simulation, [1, 2])
    run(simulation, parent, 2)
    greedy, modest = simulation.fork(parent, 2)
    simulation.free([parent])
    assert simulation.reserve([greedy, modest][::order], [9, 1][::order]) == [modest]
    assert simulation.reserve([modest], [1]) == [modest]


def test_an_overwritten_tail_counts_as_shorter_without_prefix_cache_too() -> None:
    simulation = Simulation(num_blocks=3, block_size=4, prefix_cache=False)
    parent = start(simulation, [1])
    run(simulation, parent, 1)
    (child,) = simulation.fork(parent, 1)
    run(simulation, parent, 2)
    simulation.free([parent])
    other = start(simulation, [2])
    run(simulation, other, 1)
    assert simulation.reserve([child], [1]) == [child]
    assert simulation.paths["overwrites"] == 1
    (grandchild,) = simulation.fork(child, 1)
    simulation.free([child, other])
    assert simulation.reserve([grandchild], [1]) == [grandchild]
    assert simulation.paths["claims"] == 1 and simulation.paths["clones"] == 0
