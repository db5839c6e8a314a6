"""Random calls of the block manager, each compared with the oracle, over pools and blocks of many sizes.

``ROSE_RANDOM_OPERATIONS=1000000`` makes more calls than the 100,000 of every run, ``ROSE_RANDOM_SEED=1`` others. A
failure names its setting and seed, and the same two variables repeat it.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from tests.block_manager.kv_memory import TensorMemory
from tests.block_manager.random_driver import RandomDriver
from tests.block_manager.simulation import Simulation

NUM_OPERATIONS = int(os.environ.get("ROSE_RANDOM_OPERATIONS", "100000"))
FIRST_SEED = int(os.environ.get("ROSE_RANDOM_SEED", "0"))

pytestmark = pytest.mark.timeout(1800 + NUM_OPERATIONS // 1000)


@dataclass(frozen=True)
class Setting:
    """A block manager to try, and how much of all calls it gets."""

    num_blocks: int
    block_size: int
    weight: int = 10
    blocks_per_row: int = 4
    max_num_seqs: int = 6
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return "-".join([f"{self.num_blocks}x{self.block_size}", *self.options])


SETTINGS = [
    *(Setting(num_blocks, size, 3, 2, 3) for num_blocks in (2, 3) for size in (1, 2, 16, 64)),
    *(Setting(num_blocks, size) for num_blocks in (5, 9, 17) for size in (1, 2, 16, 64)),
    *(Setting(4, size) for size in (16, 64)),  # room for one sequence, so that tails are overwritten
    *(Setting(num_blocks, size, 12, 6, 10) for num_blocks in (40, 150) for size in (1, 2, 16, 64)),
    *(Setting(2000, size, 6, 130, 16) for size in (1, 2, 16, 64)),
    # One block a row, so that many blocks begin alike and grow side by side.
    Setting(24, 32, 30, 0, 12),
    Setting(80, 32, 60, 0, 12),  # many calls until it is full
    *(Setting(num_blocks, 4, options={"record_events": True}) for num_blocks in (6, 40)),
    *(Setting(num_blocks, 4, options={"full_blocks_only": True}) for num_blocks in (6, 40)),
    *(Setting(num_blocks, 4, options={"prefix_cache": False}) for num_blocks in (6, 40)),
    *(Setting(20, size, options={"memory": TensorMemory}) for size in (1, 4, 16)),
]
# At least this often in 100,000 calls: about a third of what is usual, so that no path can silently go untested.
REQUIRED_CALLS = {
    "reserve": 8000,
    "add": 6000,
    "commit": 4000,
    "free": 4000,
    "match": 3000,
    "blocks_needed": 1500,
    "fork": 1500,
    "take_clone_plan": 1200,
    "mistake": 1000,
    "finish_clone_plan": 600,
    "take_changed_rows": 500,
    "reset_prefix_cache": 200,
}
REQUIRED_PATHS = {
    "miss": 2000,
    "full hit": 400,
    "partial hit": 1000,
    "partial hit among many blocks": 60,
    "match still valid": 2000,
    "stale match": 60,
    "no free row": 1000,
    "claims": 200,
    "overwrites": 30,
    "overwrite of a full block": 12,
    "clones": 1200,
    "chain of clones": 120,
    "several rows want one tail": 60,
    "clone called off": 300,
    "several plans in flight": 400,
    "plan finished out of order": 250,
    "free while a clone is pending": 250,
    "free while a plan is in flight": 1000,
    "free of several rows": 1300,
    "evictions": 3000,
    "eviction of several blocks, others staying": 300,
    "shortage": 1000,
    "some rows servable": 400,
    "commit of fewer than written": 500,
    "full block known already": 450,
    "redundant tail dropped": 150,
    "fork of a partial tail": 400,
    "preemption": 400,
    "reset": 100,
    "reset refused": 120,
}
NUM_MISTAKES = 20

TOTAL_WEIGHT = sum(setting.weight for setting in SETTINGS)


@cache
def run(setting: Setting) -> tuple[Counter[str], Counter[str]]:
    """Make this setting's share of all calls, on a fresh block manager every 1,000; return the calls and the paths."""
    share = -(-NUM_OPERATIONS * setting.weight // TOTAL_WEIGHT)
    calls, paths, seed = Counter[str](), Counter[str](), FIRST_SEED
    while calls.total() < share:
        simulation = Simulation(
            num_blocks=setting.num_blocks,
            block_size=setting.block_size,
            max_num_seqs=setting.max_num_seqs,
            # Not a whole number of blocks, and more than a small pool can hold.
            max_model_len=setting.blocks_per_row * setting.block_size + setting.block_size // 2 + 1,
            **setting.options,
        )
        try:
            RandomDriver(simulation, seed).run(min(1000, share - calls.total()))
        except BaseException as error:
            error.add_note(f"setting {setting}, seed {seed}")
            raise
        calls += simulation.calls
        paths += simulation.paths
        seed += 1
    return calls, paths


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_call_agrees_with_the_oracle(setting: Setting) -> None:
    calls, _ = run(setting)
    assert calls.total() >= NUM_OPERATIONS * setting.weight // TOTAL_WEIGHT


def test_the_random_calls_took_every_path() -> None:
    calls, paths = Counter[str](), Counter[str]()
    for setting in SETTINGS:
        more_calls, more_paths = run(setting)
        calls += more_calls
        paths += more_paths
    assert calls.total() >= NUM_OPERATIONS
    rare = {
        name: (taken[name], wanted)
        for taken, required in ((calls, REQUIRED_CALLS), (paths, REQUIRED_PATHS))
        for name, per_100_000 in required.items()
        if taken[name] < (wanted := max(1, per_100_000 * NUM_OPERATIONS // 100_000))
    }
    assert not rare, f"taken less often than required: {rare}"
    mistakes = [name for name in paths if name.startswith("mistake: ")]
    assert len(mistakes) == NUM_MISTAKES, f"{len(mistakes)} kinds of mistakes were tried: {sorted(mistakes)}"


@pytest.mark.parametrize("num_blocks", sorted({setting.num_blocks for setting in SETTINGS}))
def test_blocks_were_evicted_in_pools_of_every_size(num_blocks: int) -> None:
    runs = [run(setting) for setting in SETTINGS if setting.num_blocks == num_blocks]
    assert sum(paths["evictions"] for _, paths in runs) >= 10
