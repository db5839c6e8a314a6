"""The steps of the random driver over the same simulation, chosen by hypothesis, which makes failures short.

A failure prints the steps as a few lines of Python, and the calls that they made. The examples are the same in every
run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from rose_backend.block_manager import GroupType
from tests.support.block_manager.random_driver import WEIGHTS, RandomDriver
from tests.support.block_manager.simulation import Simulation

NUM_EXAMPLES = max(1, int(os.environ.get("ROSE_RANDOM_OPERATIONS", "100000")) // 400)

FULL, STATE = GroupType(), GroupType(is_state=True)
OTHER_GROUP_TYPES: list[Sequence[GroupType]] = [
    (GroupType(None, 2),),
    (FULL, GroupType(3)),
    (FULL, GroupType(5, 2), GroupType(2)),
    (FULL, STATE),
    (FULL, GroupType(None, 2, True)),
    (FULL, GroupType(3), STATE),
]


class BlockManagerMachine(RuleBasedStateMachine):
    """Each rule is a step of the driver; the simulation checks everything after each of its calls."""

    @initialize(
        group_types=st.just([FULL]) | st.sampled_from(OTHER_GROUP_TYPES),
        num_blocks=st.integers(2, 10),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        options=st.sampled_from([{}, {}, {"full_blocks_only": True}, {"prefix_cache": False}]),
    )
    def start(
        self,
        group_types: Sequence[GroupType],
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        options: dict[str, Any],
    ) -> None:
        simulation = Simulation(
            group_types=group_types,
            num_blocks=num_blocks if len(group_types) == 1 else num_blocks * 3,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=13,
            record_events=True,
            **options,
        )
        self.driver = RandomDriver(simulation, 0)

    @rule(names=st.lists(st.sampled_from(sorted(WEIGHTS)), min_size=1, max_size=3), seed=st.integers(0, 999))
    def step(self, names: list[str], seed: int) -> None:
        self.driver.rng = random.Random(seed)
        for name in names:
            if name in self.driver.weights:
                getattr(self.driver, name)()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            manager = self.driver.simulation.manager
            self.driver.let_go_of_everything()
            assert manager.num_free_blocks == manager.num_usable_blocks


TestStateMachine = BlockManagerMachine.TestCase
TestStateMachine.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
