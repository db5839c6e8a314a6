"""The state machine of ``test_state_machine`` over block managers with windows and states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from rose_backend.block_manager import GroupKind
from tests.block_manager import test_state_machine as one_kind
from tests.block_manager.kinds_simulation import KindsSimulation
from tests.block_manager.states_simulation import StatesSimulation
from tests.block_manager.test_state_machine import BlockManagerMachine, picks

FULL, STATE = GroupKind(), GroupKind(is_state=True)
KINDS: list[Sequence[GroupKind]] = [
    (GroupKind(None, 2),),
    (FULL, GroupKind(3)),
    (FULL, GroupKind(5, 2), GroupKind(2)),
    (FULL, STATE),
    (FULL, GroupKind(None, 2, True)),
    (FULL, GroupKind(3), STATE),
]


class KindsMachine(BlockManagerMachine):
    """Each rule is one call of the simulation, which compares and checks everything after it."""

    @initialize(
        kinds=st.sampled_from(KINDS),
        num_blocks=st.integers(8, 30),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        options=st.sampled_from([{}, {}, {"full_blocks_only": True}, {"prefix_cache": False}]),
    )
    def start(  # type: ignore[override]
        self,
        kinds: Sequence[GroupKind],
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        options: dict[str, Any],
    ) -> None:
        make: Any = StatesSimulation if kinds[-1].is_state else KindsSimulation
        self.simulation = make(
            kinds=kinds,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=13,
            **options,
        )

    @precondition(lambda self: self.simulation.sequences and isinstance(self.simulation, StatesSimulation))
    @rule(chosen=picks)
    def checkpoint(self, chosen: list[tuple[int, int]]) -> None:
        simulation: Any = self.simulation
        rows = list(self.rows(chosen))
        simulation.commit(rows, [0] * len(rows))
        simulation.checkpoint(rows)

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        simulation: Any = self.simulation
        # Checkpoints are held until their copies are planned.
        simulation.take_clone_plan()
        simulation.free(list(simulation.sequences))
        while simulation.plans:
            simulation.finish_clone_plan(0)
        assert simulation.manager.num_free_blocks == simulation.manager.num_usable_blocks


TestKindsStateMachine = KindsMachine.TestCase
TestKindsStateMachine.settings = settings(one_kind.TestStateMachine.settings)
