"""Random calls of block managers with several kinds of KV cache groups; see ``test_random_operations``."""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest

from rose_backend.block_manager import GroupKind
from tests.block_manager.kinds_simulation import KindsSimulation
from tests.block_manager.random_driver import RandomDriver

NUM_OPERATIONS = int(os.environ.get("ROSE_RANDOM_OPERATIONS", "100000")) // 5
FIRST_SEED = int(os.environ.get("ROSE_RANDOM_SEED", "0"))

pytestmark = pytest.mark.timeout(1800 + NUM_OPERATIONS // 200)

FULL = GroupKind()
SETTINGS: dict[str, dict[str, Any]] = {
    "one window": {"kinds": [FULL, GroupKind(5)], "num_blocks": 40, "block_size": 4},
    "small pool": {"kinds": [FULL, GroupKind(5)], "num_blocks": 16, "block_size": 4},
    "window of two": {"kinds": [FULL, GroupKind(2)], "num_blocks": 60, "block_size": 1},
    "three groups": {"kinds": [FULL, GroupKind(7, 3)], "num_blocks": 60, "block_size": 2},
    "wide blocks": {"kinds": [FULL, GroupKind(40)], "num_blocks": 40, "block_size": 16},
    "two full groups": {"kinds": [GroupKind(None, 2), GroupKind(9)], "num_blocks": 60, "block_size": 4},
    "two windows": {"kinds": [FULL, GroupKind(3), GroupKind(10, 2)], "num_blocks": 80, "block_size": 3},
    "large pool": {"kinds": [FULL, GroupKind(12, 2)], "num_blocks": 400, "block_size": 4},
    "groups of one kind": {"kinds": [GroupKind(None, 2)], "num_blocks": 40, "block_size": 4},
    "full blocks only": {
        "kinds": [FULL, GroupKind(6)],
        "num_blocks": 40,
        "block_size": 4,
        "full_blocks_only": True,
    },
    "no cache": {"kinds": [FULL, GroupKind(5, 2)], "num_blocks": 50, "block_size": 4, "prefix_cache": False},
}
# At least this often in all settings together, of 20,000 calls: about a third of what is usual.
REQUIRED_PATHS = {
    "hit cut by a window": 10,
    "no hit because of a window": 10,
    "partial hit": 100,
    "tails of different blocks": 10,
    "block passed": 100,
    "window of a hit spared": 10,
    "clones": 100,
    "chain of clones": 10,
    "clone called off": 10,
    "shortage": 100,
    "preemption": 100,
}


@cache
def run(name: str) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Make this setting's share of all calls; return the calls, the paths and the manager's counters."""
    setting = SETTINGS[name]
    share = -(-NUM_OPERATIONS // len(SETTINGS))
    calls, paths, stats, seed = Counter[str](), Counter[str](), Counter[str](), FIRST_SEED
    while calls.total() < share:
        simulation = KindsSimulation(max_num_seqs=6, max_model_len=5 * setting["block_size"] + 3, **setting)
        try:
            RandomDriver(simulation, seed).run(min(1000, share - calls.total()))
        except BaseException as error:
            error.add_note(f"setting {name}, seed {seed}")
            raise
        calls += simulation.calls
        paths += simulation.paths
        stats += Counter(simulation.manager.stats.as_dict())
        seed += 1
    return calls, paths, stats


@pytest.mark.parametrize("name", SETTINGS)
def test_every_call_agrees(name: str) -> None:
    calls, _, _ = run(name)
    assert calls.total() >= NUM_OPERATIONS // len(SETTINGS)


def test_the_random_calls_took_every_path() -> None:
    runs = [run(name) for name in SETTINGS]
    paths = sum((paths for _, paths, _ in runs), Counter[str]())
    rare = {
        name: paths[name]
        for name, count in REQUIRED_PATHS.items()
        if paths[name] < count * NUM_OPERATIONS // 20_000
    }
    assert not rare, f"taken less often than required: {rare}"
    stats = sum((stats for _, _, stats in runs), Counter[str]())
    assert min(stats[name] for name in ("evictions", "claims", "overwrites", "forks")) > 0


@pytest.mark.parametrize("windows", [(4, 11), (11, 4), (6,)], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_hits_among_holes(windows: tuple[int, ...], block_size: int) -> None:
    """A window's hit may end where another window has a hole: the longest prefix that all can use is found."""
    paths = Counter[str]()
    for seed in range(60):
        choose = random.Random(seed)
        kinds = [FULL, *(GroupKind(window, choose.randint(1, 2)) for window in windows)]
        simulation = KindsSimulation(kinds=kinds, num_blocks=400, block_size=block_size, max_model_len=40)
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
        for kind in range(1, len(kinds)):
            blocks = simulation.manager.cache.indexes[kind].block_ids().tolist()
            simulation.uncache(sorted(choose.sample(blocks, len(blocks) // choose.randint(2, 8))))
        for length in range(2, 41):
            simulation.match(prompt[:length], b"")
        simulation.match([*prompt, 1], b"")
        paths += simulation.paths
    assert min(paths["hit cut by a window"], paths["no hit because of a window"]) > 100, paths


def test_equal_tails_stay_once_in_each_kind() -> None:
    simulation = KindsSimulation(kinds=[FULL, GroupKind(5), GroupKind(7, 2)], num_blocks=60, block_size=4)
    rows = [simulation.add([1, 2, 3, 4, 5, 6], b"") for _ in range(3)]
    simulation.reserve(rows, [6] * 3)
    simulation.write(rows, [6] * 3, iter(()))
    simulation.commit(rows, [6] * 3)
    cache = simulation.manager.cache
    assert [len(index.block_ids()) for index in cache.indexes] == [1 + 3] * 3
    simulation.free(rows)
    assert [len(index.block_ids()) for index in cache.indexes] == [2] * 3
