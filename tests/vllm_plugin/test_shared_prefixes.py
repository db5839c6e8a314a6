"""Requests that share a long prefix and come in together compute it once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rose_backend.vllm_plugin.kv_cache_manager import RoseKVCacheManager
from rose_backend.vllm_plugin.prompt_hashes import MIN_TOKENS_WORTH_WAITING
from tests.vllm_plugin import simulation as simulated
from tests.vllm_plugin.conftest import MakeConfig
from tests.vllm_plugin.simulation import make_simulation
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


@pytest.mark.parametrize(("num_more", "waits"), [(MIN_TOKENS_WORTH_WAITING + 16, True), (20, False)])
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
def test_who_would_find_little_does_not_wait(other: list[int], options: dict[str, Any]) -> None:
    manager = a_manager()
    assert begin(manager, make_request("first", [*STEM, 500])) == 0
    request = make_request("second", other)
    request.cache_salt = options.get("cache_salt")
    assert begin(manager, request) == 0


def test_a_short_chunk_is_not_waited_for() -> None:
    manager = a_manager()
    assert begin(manager, make_request("first", [*STEM, 500]), MIN_TOKENS_WORTH_WAITING - 1) == 0
    assert begin(manager, make_request("second", [*STEM, 600])) == 0


def test_without_a_cache_nobody_waits() -> None:
    manager = a_manager(enable_caching=False)
    for name in ("first", "second"):
        assert begin(manager, make_request(name, STEM)) == 0


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
