"""Requests that share a long prefix and come in together compute it once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rose_backend import scheduling as in_flight_prefixes
from rose_backend.scheduling import MIN_TOKENS_WORTH_WAITING
from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from tests.support.vllm_plugin import simulation as simulated
from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.simulation import make_simulation
from tests.vllm_plugin.test_kv_cache_manager import make_manager, make_request, state_of

STEM = list(range(MIN_TOKENS_WORTH_WAITING + 12))


def begin(manager: RoseKVCacheManager, request: Any, num_tokens: int | None = None) -> int | None:
    """Look up and allocate ``request`` in the present step; return what it found, None if it has to wait."""
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hits if num_tokens is None else num_tokens
    allocated = manager.allocate_slots(
        request, num_new, num_new_computed_tokens=num_hits, new_computed_blocks=blocks
    )
    if allocated is None:
        return None
    request.num_computed_tokens = num_hits + num_new
    return num_hits


def a_manager(**options: Any) -> RoseKVCacheManager:
    manager = make_manager(60, max_model_len=400, **options)
    manager.new_step_starts()
    return manager


def test_the_second_waits_for_the_first_and_finds_all_of_it() -> None:
    manager = a_manager()
    assert begin(manager, make_request("first", [*STEM, 500])) == 0
    second, third = make_request("second", [*STEM, 600, 601]), make_request("third", [*STEM, 700])
    before = state_of(manager)
    assert begin(manager, second) is None and begin(manager, third) is None
    assert state_of(manager) == before
    manager.new_step_starts()
    assert begin(manager, second) == len(STEM) and begin(manager, third) == len(STEM)
    manager.manager.check_integrity()


@pytest.mark.parametrize(
    ("num_more", "waits"), [(MIN_TOKENS_WORTH_WAITING, True), (MIN_TOKENS_WORTH_WAITING - 1, False)]
)
def test_what_was_found_before_does_not_count(num_more: int, waits: bool) -> None:
    manager = a_manager()
    assert begin(manager, make_request("old", STEM)) == 0
    manager.new_step_starts()
    longer = [*STEM, *range(1000, 1000 + num_more)]
    assert begin(manager, make_request("a", [*longer, 1])) == len(STEM)
    assert begin(manager, make_request("b", [*longer, 2])) == (None if waits else len(STEM))


@pytest.mark.parametrize(
    ("other", "options"),
    [
        (STEM[: MIN_TOKENS_WORTH_WAITING - 1] + [9] * 40, {}),
        ([*STEM, 600], {"cache_salt": "another tenant"}),
    ],
    ids=["too short", "another tenant"],
)
def test_a_prompt_that_would_find_few_tokens_does_not_wait(other: list[int], options: dict[str, Any]) -> None:
    manager = a_manager()
    assert begin(manager, make_request("first", [*STEM, 500])) == 0
    request = make_request("second", other)
    request.cache_salt = options.get("cache_salt")
    assert begin(manager, request) == 0


def test_a_short_chunk_is_not_waited_for() -> None:
    manager = a_manager()
    assert begin(manager, make_request("first", [*STEM, 500]), MIN_TOKENS_WORTH_WAITING - 1) == 0
    assert begin(manager, make_request("second", [*STEM, 600])) == 0


def test_without_a_prefix_cache_no_prompt_waits() -> None:
    manager = a_manager(enable_caching=False)
    for name in ("first", "second"):
        assert begin(manager, make_request(name, STEM)) == 0


def test_a_prompt_that_shares_few_tokens_waits_if_the_threshold_is_low(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_flight_prefixes, "MIN_TOKENS_WORTH_WAITING", 10)
    manager = a_manager()
    assert begin(manager, make_request("first", [*STEM[:13], 500])) == 0
    assert begin(manager, make_request("other", [*STEM[:9], 600, 601])) == 0
    second = make_request("second", [*STEM[:13], 700])
    assert begin(manager, second) is None
    manager.new_step_starts()
    assert begin(manager, second) == 13


def scheduled(simulation: Any, *prompts: list[int], max_tokens: int = 3) -> list[dict[str, int]]:
    """Return how many tokens of which request each step computes, to the end of all of them."""
    for index, prompt in enumerate(prompts):
        simulation.scheduler.add_request(simulated.make_request(f"r{index}", prompt, max_tokens))
    steps: list[dict[str, int]] = []
    run = simulation.worker.run

    def noting(output: Any, requests: Any) -> Any:
        steps.append(dict(output.num_scheduled_tokens))
        return run(output, requests)

    simulation.worker.run = noting
    while simulation.scheduler.has_requests() or simulation.in_flight:
        simulation.step()
        simulation.manager.check_integrity()
    return steps


@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_behind_one_that_waits_do_not_wait(make_config: MakeConfig, depth: int) -> None:
    simulation = make_simulation(
        make_config, num_blocks=100, block_size=16, max_num_seqs=8, depth=depth, max_num_batched_tokens=4000
    )
    steps = scheduled(simulation, [*STEM, 900], [*STEM, 901], [*STEM, 902], [7] * 30, [8] * 20)
    assert steps[0] == {"r0": len(STEM) + 1, "r3": 30, "r4": 20}
    assert steps[1].items() >= {"r1": 1, "r2": 1}.items()


@pytest.mark.parametrize("depth", [1, 2])
def test_no_half_prompt_overtakes_a_deferred_one(make_config: MakeConfig, depth: int) -> None:
    budget = len(STEM) + 50
    simulation = make_simulation(
        make_config, num_blocks=100, block_size=16, max_num_seqs=8, depth=depth, max_num_batched_tokens=budget
    )
    steps = scheduled(simulation, [*STEM, 900], [*STEM, 901], [7] * (budget + 20))
    assert steps[0] == {"r0": len(STEM) + 1}
    assert steps[1]["r1"] == 1 and "r2" in steps[1]


@pytest.mark.parametrize(
    ("limits", "first_step"),
    [({"max_num_seqs": 2}, {"r0"}), ({"max_num_seqs": 3}, {"r0", "r2"}), ({"num_blocks": 12}, {"r0"})],
    ids=["no row to spare", "a row to spare", "no blocks to spare"],
)
def test_rows_and_blocks_of_a_deferred_prompt_are_kept(
    make_config: MakeConfig, limits: dict[str, int], first_step: set[str]
) -> None:
    options = {"num_blocks": 100, "max_num_seqs": 8, **limits}
    simulation = make_simulation(make_config, block_size=16, max_num_batched_tokens=4000, **options)
    steps = scheduled(simulation, [*STEM, 900], [*STEM, 901], [7] * 60, max_tokens=3)
    assert set(steps[0]) == first_step
    assert steps[1]["r1"] == 1
    assert len(simulation.outputs) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_a_burst_computes_each_prefix_once(make_config: MakeConfig, depth: int) -> None:
    simulation = make_simulation(
        make_config, num_blocks=900, block_size=16, max_num_seqs=64, depth=depth, max_num_batched_tokens=4000
    )
    rng = random.Random(5)
    stems = [[rng.randrange(1000) for _ in STEM] for _ in range(4)]
    for index in range(48):
        simulation.scheduler.add_request(
            simulated.make_request(f"r{index}", [*stems[index % 4], 1000 + index], 3)
        )
    while simulation.scheduler.has_requests() or simulation.in_flight:
        simulation.step()
    stats = simulation.manager.stats
    assert len(simulation.outputs) == 48
    computed = stats.query_tokens - stats.hit_tokens
    assert computed == 4 * len(STEM) + 48
    simulation.manager.check_integrity()
