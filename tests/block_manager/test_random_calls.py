"""Random calls of the block manager, each checked by the simulation, over group types, pools and blocks of many sizes.

``ROSE_RANDOM_OPERATIONS=1000000`` makes more calls than the 100,000 of every run, ``ROSE_RANDOM_SEED=1`` others. A
failure names its setting and seed, and the same two variables repeat it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from rose_backend.block_manager import GroupType
from tests.support.block_manager.kv_memory import TensorMemory
from tests.support.block_manager.random_driver import RandomDriver
from tests.support.block_manager.simulation import Simulation

NUM_OPERATIONS = int(os.environ.get("ROSE_RANDOM_OPERATIONS", "100000"))
FIRST_SEED = int(os.environ.get("ROSE_RANDOM_SEED", "0"))

pytestmark = pytest.mark.timeout(1800 + NUM_OPERATIONS // 200)


@dataclass(frozen=True)
class Setting:
    """A block manager to try, and how much of all calls it gets."""

    num_blocks: int
    block_size: int
    weight: int = 10
    blocks_per_row: int = 4
    max_num_seqs: int = 6
    group_types: tuple[GroupType, ...] = (GroupType(),)
    symbols: Sequence[int] = (0, 1)
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        group_types = [
            f"{'state' if one.is_state else one.window or 'full'}x{one.num_groups}"
            for one in self.group_types
        ]
        return "-".join([f"{self.num_blocks}x{self.block_size}", *group_types, *self.options])


FULL, TWO, STATE = GroupType(), GroupType(None, 2), GroupType(is_state=True)
EVENTS, FULL_BLOCKS, NO_CACHE = {"record_events": True}, {"full_blocks_only": True}, {"prefix_cache": False}
SIZES = (1, 2, 16, 64)
# Few first blocks differ in their highest byte only.
SPARSE = (0, 1 << 24, 2 << 24)
ONE_TYPE = [
    *(Setting(num_blocks, size, 3, 2, 3) for num_blocks in (2, 3) for size in SIZES),
    *(Setting(num_blocks, size) for num_blocks in (5, 9, 17) for size in SIZES),
    *(Setting(4, size) for size in (16, 64)),  # room for one sequence, so that tails are overwritten
    *(Setting(num_blocks, size, 12, 6, 10) for num_blocks in (40, 150) for size in SIZES),
    *(Setting(2000, size, 6, 130, 16) for size in SIZES),
    # One block a row, so that many blocks begin alike and grow side by side.
    Setting(24, 32, 20, 0, 12),
    Setting(24, 6, 10, 0, 12, symbols=range(5)),
    Setting(80, 32, 50, 0, 12),  # many calls until it is full
    Setting(80, 6, 10, 0, 12, symbols=SPARSE),
    *(Setting(num_blocks, 4, options=EVENTS) for num_blocks in (6, 40)),
    *(Setting(num_blocks, 4, options=FULL_BLOCKS) for num_blocks in (6, 40)),
    Setting(2, 4, 3, 1, 2, options=FULL_BLOCKS),
    *(Setting(num_blocks, 4, options=NO_CACHE) for num_blocks in (6, 40)),
    Setting(6, 4, 3, options={**NO_CACHE, **EVENTS}),
    *(Setting(20, size, options={"memory": TensorMemory}) for size in (1, 4, 16)),
]
WINDOWS = [
    Setting(num_blocks, size, blocks_per_row=5, group_types=group_types, options=options)
    for num_blocks, size, group_types, options in (
        (40, 4, (FULL, GroupType(5)), EVENTS),
        (16, 4, (FULL, GroupType(5)), {}),
        (60, 1, (FULL, GroupType(2)), {}),
        (60, 2, (FULL, GroupType(7, 3)), {}),
        (40, 16, (FULL, GroupType(40)), {}),
        (60, 4, (TWO, GroupType(9)), {}),
        (80, 3, (FULL, GroupType(3), GroupType(10, 2)), {}),
        (400, 4, (FULL, GroupType(12, 2)), {}),
        (40, 4, (TWO,), {}),
        (40, 4, (FULL, GroupType(6)), FULL_BLOCKS),
        (50, 4, (FULL, GroupType(5, 2)), NO_CACHE),
    )
]
STATES = [
    Setting(num_blocks, size, blocks_per_row=5, group_types=group_types, options=options)
    for num_blocks, size, group_types, options in (
        (40, 4, (FULL, STATE), EVENTS),
        (16, 4, (FULL, STATE), {}),
        (80, 4, (FULL, GroupType(None, 3, True)), {}),
        (60, 1, (FULL, STATE), {}),
        (30, 16, (FULL, GroupType(None, 2, True)), {}),
        (60, 4, (FULL, GroupType(7, 2), STATE), {}),
        (400, 4, (TWO, STATE), {}),
        (40, 4, (FULL, STATE), FULL_BLOCKS),
        (50, 4, (FULL, STATE), NO_CACHE),
    )
]
# At least this often in 100,000 calls: about a third of what is usual, so that no path can silently go untested.
ONE_TYPE_PATHS = {
    "reserve": 8000,
    "reserve_next_blocks": 500,
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
    "step: preempt": 400,
    "reset": 100,
    "reset refused": 120,
}
WINDOWS_PATHS = {
    "hit cut by a window": 50,
    "no hit because of a window": 50,
    "partial hit": 500,
    "tails of different blocks": 50,
    "block passed": 500,
    "window of a hit spared": 50,
    "reserve_next_blocks": 500,
    "clones": 500,
    "chain of clones": 50,
    "clone called off": 50,
    "shortage": 500,
    "step: preempt": 500,
    "evictions": 5,
    "claims": 5,
    "overwrites": 5,
    "forks": 5,
}
STATES_PATHS = {
    "hit at a checkpoint": 500,
    "checkpoint inside a block": 500,
    "no hit because of a state": 500,
    "checkpoints": 500,
    "no checkpoint for lack of blocks": 50,
    "state handed over": 500,
    "checkpoint evicted": 500,
    "chain of clones": 15,
    "clone called off": 50,
    "shortage": 500,
    "step: preempt": 500,
}
# Settings, their share of all calls, the paths, and the number of mistakes that can be made.
GROUPS = {
    "one group type": (ONE_TYPE, 1.0, ONE_TYPE_PATHS, 23),
    "windows": (WINDOWS, 0.2, WINDOWS_PATHS, 24),
    "states": (STATES, 0.2, STATES_PATHS, 25),
}


def share_of(group: str, setting: Setting) -> int:
    """Return how many calls a setting gets."""
    settings, share, _, _ = GROUPS[group]
    return int(-(-NUM_OPERATIONS * share * setting.weight // sum(each.weight for each in settings)))


@cache
def run(group: str, setting: Setting) -> Counter[str]:
    """Make a setting's calls, on a fresh block manager every 1,000; return how often each call and path was taken."""
    taken, num_calls, seed = Counter[str](), 0, FIRST_SEED
    while num_calls < share_of(group, setting):
        simulation = Simulation(
            num_blocks=setting.num_blocks,
            block_size=setting.block_size,
            group_types=setting.group_types,
            max_num_seqs=setting.max_num_seqs,
            # Not a whole number of blocks, and more than a small pool can hold.
            max_model_len=setting.blocks_per_row * setting.block_size + setting.block_size // 2 + 1,
            **setting.options,
        )
        driver = RandomDriver(simulation, seed, setting.symbols)
        try:
            driver.run(min(1000, share_of(group, setting) - num_calls))
        except BaseException as error:
            error.add_note(f"setting {setting}, seed {seed}")
            raise
        num_calls += simulation.calls.total()
        taken += simulation.calls + simulation.paths + driver.steps
        seed += 1
    return taken


@pytest.mark.parametrize(
    ("group", "setting"),
    [
        pytest.param(group, setting, id=f"{group}-{setting}")
        for group, (settings, *_) in GROUPS.items()
        for setting in settings
    ],
)
def test_every_call_is_right(group: str, setting: Setting) -> None:
    run(group, setting)


@pytest.mark.parametrize("group", GROUPS)
def test_the_random_calls_took_every_path(group: str) -> None:
    settings, share, required, num_mistakes = GROUPS[group]
    taken = sum((run(group, setting) for setting in settings), Counter[str]())
    rare = {
        name: (taken[name], wanted)
        for name, per_100_000 in required.items()
        if taken[name] < (wanted := max(1, int(per_100_000 * NUM_OPERATIONS * share // 100_000)))
    }
    assert not rare, f"taken less often than required: {rare}"
    mistakes = sorted(name for name in taken if name.startswith("mistake: "))
    assert len(mistakes) == num_mistakes, f"{len(mistakes)} kinds of mistakes were tried: {mistakes}"


@pytest.mark.parametrize("num_blocks", sorted({setting.num_blocks for setting in ONE_TYPE}))
def test_blocks_were_evicted_in_pools_of_every_size(num_blocks: int) -> None:
    runs = [run("one group type", setting) for setting in ONE_TYPE if setting.num_blocks == num_blocks]
    assert sum(taken["evictions"] for taken in runs) >= 10
