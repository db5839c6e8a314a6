"""Mistakes that the random operations have found, each as a short story of its own, over the same simulation."""

from __future__ import annotations

import itertools

import numpy as np

from tests.block_manager.simulation import Simulation


def compute(simulation: Simulation, row: int, count: int, symbol: int) -> None:
    """Reserve, write and commit ``count`` tokens; those behind the prompt are ``symbol``."""
    assert simulation.reserve([row], [count]) == [row]
    simulation.write([row], [count], itertools.repeat(symbol))
    simulation.commit([row], [count])


def add(simulation: Simulation, prompt: list[int]) -> int:
    row = simulation.add(prompt, b"")
    assert row is not None
    return row


def test_a_match_of_a_block_that_became_a_duplicate_is_looked_up_again() -> None:
    simulation = Simulation(num_blocks=16, block_size=4)
    first, second = add(simulation, [1, 2, 3, 4, 5]), add(simulation, [1, 2, 3, 4, 5])
    compute(simulation, first, 2, 0)
    compute(simulation, second, 3, 0)
    lookup = simulation.match([1, 2, 3, 9], b"")
    assert lookup.match.block_ids.tolist() == simulation.table(second)
    compute(simulation, first, 2, 0)
    compute(simulation, second, 1, 0)
    simulation.free([second])
    simulation.add(lookup.prompt, b"", lookup.match)
    assert simulation.paths["stale match"] == 1


def test_the_claimant_that_needs_least_is_servable_when_blocks_are_short() -> None:
    simulation = Simulation(num_blocks=2, block_size=4)
    parent = add(simulation, [1, 2])
    compute(simulation, parent, 2, 0)
    greedy, modest = simulation.fork(parent, 2)
    simulation.free([parent])
    assert simulation.reserve([greedy, modest], [9, 1]) == [modest]
    assert simulation.reserve([modest], [1]) == [modest]


def test_an_overwritten_tail_counts_as_shorter_without_prefix_cache_too() -> None:
    simulation = Simulation(num_blocks=3, block_size=4, prefix_cache=False)
    parent = add(simulation, [1])
    compute(simulation, parent, 1, 0)
    (child,) = simulation.fork(parent, 1)
    compute(simulation, parent, 2, 0)
    simulation.free([parent])
    other = add(simulation, [2])
    compute(simulation, other, 1, 0)
    assert simulation.reserve([child], [1]) == [child]
    assert simulation.paths["overwrites"] == 1
    (grandchild,) = simulation.fork(child, 1)
    simulation.free([child, other])
    assert simulation.reserve([grandchild], [1]) == [grandchild]
    assert simulation.paths["claims"] == 1 and simulation.paths["clones"] == 0


def test_no_token_is_reserved_behind_max_model_len_in_a_block_with_room() -> None:
    simulation = Simulation(num_blocks=8, block_size=16, max_model_len=53)
    row = add(simulation, [1])
    compute(simulation, row, 1, 0)
    assert simulation.reserve([row], [52]) == [row]
    simulation.mistake("one token more", lambda manager: manager.reserve(np.array([row]), 53))
