"""Random calls of block managers with states; see ``test_random_operations``."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from typing import Any

import pytest

from rose_backend.block_manager import GroupKind
from tests.block_manager.states_simulation import StatesDriver, StatesSimulation

NUM_OPERATIONS = int(os.environ.get("ROSE_RANDOM_OPERATIONS", "100000")) // 5
FIRST_SEED = int(os.environ.get("ROSE_RANDOM_SEED", "0"))

pytestmark = pytest.mark.timeout(1800 + NUM_OPERATIONS // 200)

FULL, STATE = GroupKind(), GroupKind(is_state=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "one group": {"kinds": [FULL, STATE], "num_blocks": 40, "block_size": 4},
    "small pool": {"kinds": [FULL, STATE], "num_blocks": 16, "block_size": 4},
    "three groups": {"kinds": [FULL, GroupKind(None, 3, True)], "num_blocks": 80, "block_size": 4},
    "blocks of one": {"kinds": [FULL, STATE], "num_blocks": 60, "block_size": 1},
    "wide blocks": {"kinds": [FULL, GroupKind(None, 2, True)], "num_blocks": 30, "block_size": 16},
    "beside a window": {"kinds": [FULL, GroupKind(7, 2), STATE], "num_blocks": 60, "block_size": 4},
    "large pool": {"kinds": [GroupKind(None, 2), STATE], "num_blocks": 400, "block_size": 4},
    "full blocks only": {"kinds": [FULL, STATE], "num_blocks": 40, "block_size": 4, "full_blocks_only": True},
    "no cache": {"kinds": [FULL, STATE], "num_blocks": 50, "block_size": 4, "prefix_cache": False},
}
# At least this often in all settings together, of 20,000 calls: about a third of what is usual.
REQUIRED_PATHS = {
    "hit at a checkpoint": 100,
    "checkpoint inside a block": 100,
    "no hit because of a state": 100,
    "checkpoints": 100,
    "no checkpoint for lack of blocks": 10,
    "state handed over": 100,
    "checkpoint evicted": 100,
    "copy of a copy": 3,
    "clone called off": 10,
    "shortage": 100,
    "preemption": 100,
}


@cache
def run(name: str) -> tuple[Counter[str], Counter[str]]:
    """Make this setting's share of all calls; return the calls and the paths."""
    setting = SETTINGS[name]
    share = -(-NUM_OPERATIONS // len(SETTINGS))
    calls, paths, seed = Counter[str](), Counter[str](), FIRST_SEED
    while calls.total() < share:
        simulation = StatesSimulation(max_num_seqs=6, max_model_len=5 * setting["block_size"] + 3, **setting)
        try:
            StatesDriver(simulation, seed).run(min(1000, share - calls.total()))
        except BaseException as error:
            error.add_note(f"setting {name}, seed {seed}")
            raise
        calls += simulation.calls
        paths += simulation.paths
        seed += 1
    return calls, paths


@pytest.mark.parametrize("name", SETTINGS)
def test_every_call_agrees(name: str) -> None:
    calls, _ = run(name)
    assert calls.total() >= NUM_OPERATIONS // len(SETTINGS)


def test_the_random_calls_took_every_path() -> None:
    paths = sum((run(name)[1] for name in SETTINGS), Counter[str]())
    rare = {
        name: paths[name]
        for name, count in REQUIRED_PATHS.items()
        if paths[name] < count * NUM_OPERATIONS // 20_000
    }
    assert not rare, f"taken less often than required: {rare}"
