"""The simulation finds nothing wrong over many seeds, repeats a seed exactly, and finds what is wrong at once."""

from __future__ import annotations

import itertools
import os
from importlib.util import find_spec

import pytest

from rose_backend.block_manager import BlockManager
from rose_backend.engine.step_pipeline import StepPipeline
from rose_backend.errors import EngineDeadError
from tests.simulation import __main__ as program
from tests.simulation.standalone import Settings, Simulation

NUM_STEPS = int(os.environ.get("ROSE_SIMULATION_STEPS", "200000"))
"""A fifth of them are the plug-in's scheduler's, the others the standalone engine's."""
FIRST_SEED = int(os.environ.get("ROSE_SIMULATION_SEED", "0"))
HOSTS = [
    "standalone",
    pytest.param("vllm", marks=pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")),
]


@pytest.mark.parametrize("host", HOSTS)
def test_nothing_is_wrong(host: str) -> None:
    num_steps = NUM_STEPS // 5 * (1 if host == "vllm" else 4)
    seeds = itertools.count(FIRST_SEED)
    totals, failure = program.run_seeds(host, seeds, lambda totals: totals.steps >= num_steps)
    assert failure is None, failure
    assert totals.rows > num_steps // 2
    # Ever new ones: the last seeds still reach states that no seed has reached before.
    before = len(totals.states)
    last = next(seeds)
    more, failure = program.run_seeds(host, iter(range(last, last + 8)), lambda _: False)
    assert failure is None, failure
    assert len(totals.states | more.states) > before


@pytest.mark.parametrize("host", HOSTS)
def test_a_seed_repeats_a_run(host: str) -> None:
    make = program.simulation_of(host)
    first, second = make(4), make(4)
    first.run()
    second.run()
    assert first.digest == second.digest and first.num_steps == second.num_steps > 50
    other = make(5)
    other.run()
    assert other.digest != first.digest


def test_preempted_requests_that_come_back_together_keep_within_the_tokens_of_a_step() -> None:
    # Offline, two of them decode at once beside one that decodes, in steps of two tokens.
    Simulation(9069).run()


def test_seeds_have_all_settings() -> None:
    drawn = [Simulation(seed).settings for seed in range(200)]
    for name in Settings.__dataclass_fields__:
        if name != "vocabulary":
            assert len({getattr(settings, name) for settings in drawn}) > 1, name
    assert all(settings.num_blocks > settings.max_model_len // settings.block_size for settings in drawn)


def test_a_block_that_is_used_too_early_is_named_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Copies that are forgotten: whoever was to read one reads what the block held before.
    monkeypatch.setattr(BlockManager, "take_clone_plan", lambda manager: None)
    lines: list[str] = []
    _, failure = program.run_seeds("standalone", itertools.count(), lambda _: False, lines.append)
    assert failure is not None and "python -m tests.simulation --host standalone --seed" in failure
    assert "ForeignContent" in lines[-1] and ", in block " in lines[-1]
    _, failure = program.run_in_processes("standalone", itertools.count(), lambda _: False, 2)
    assert failure is not None and "--host standalone --seed" in failure


def test_processes_run_as_many_steps() -> None:
    totals, failure = program.run_in_processes(
        "standalone", itertools.count(), lambda totals: totals.steps >= 500, 2
    )
    assert failure is None and totals.seeds % program.SEEDS_AT_ONCE == 0
    assert totals.steps >= 500 and len(totals.states) > 100


def test_what_is_read_before_the_device_has_computed_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepPipeline, "_wait", lambda pipeline, step: None)
    with pytest.raises((AssertionError, EngineDeadError)):
        for seed in range(20):
            Simulation(seed).run()
