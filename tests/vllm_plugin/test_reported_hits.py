"""What clients and metrics are told of a prefix hit, while the scheduler goes by what was really found."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.simulation import Simulation, make_request, make_simulation
from tests.vllm_plugin.test_kv_cache_manager import admit, make_manager
from tests.vllm_plugin.test_kv_cache_manager import make_request as make_plain_request

PROMPT = [3 * index % 50 + 1 for index in range(40)]
LIKE_IT = [*PROMPT[:37], 60, 61, 62]


class Visit(NamedTuple):
    num_scheduled: int
    """Prompt tokens that were computed."""
    told_client: tuple[int, int]
    """Cached tokens, and those that were computed for it."""
    told_metrics: tuple[int, int]
    """Tokens looked up, and found."""


def visit(simulation: Simulation, name: str, prompt: list[int], salt: str | None = None) -> Visit:
    """Let a request for one token come and go."""
    scheduler = simulation.scheduler
    scheduler.add_request(make_request(name, prompt, 1, salt))
    output = scheduler.schedule()
    results = scheduler.update_from_output(output, simulation.worker.run(output, scheduler.requests))
    (result,) = results.values()
    (entry,) = result.outputs
    client, metrics = entry.prefill_stats, result.scheduler_stats.prefix_cache_stats
    assert client.num_prompt_tokens == len(prompt) and not simulation.scheduler.requests
    return Visit(
        output.total_num_scheduled_tokens,
        (client.num_cached_tokens, client.num_computed_tokens),
        (metrics.queries, metrics.hits),
    )


@pytest.mark.parametrize(
    ("block_size", "switches", "num_found", "num_told"),
    [
        (16, {}, 37, 32),
        (16, {"exact_cached_tokens": True}, 37, 37),
        (16, {"token_granular_hits": False}, 32, 32),
        (16, {"token_granular_hits": False, "exact_cached_tokens": True}, 32, 32),
        (32, {}, 37, 32),
        (48, {}, 37, 0),
        (48, {"exact_cached_tokens": True}, 37, 37),
    ],
)
def test_hits_are_told_in_whole_blocks_unless_asked_otherwise(
    make_config: MakeConfig, block_size: int, switches: dict[str, bool], num_found: int, num_told: int
) -> None:
    simulation = make_simulation(
        make_config,
        num_blocks=60,
        block_size=block_size,
        max_num_seqs=4,
        additional_config={"rose": switches},
    )
    assert visit(simulation, "first", PROMPT) == (40, (0, 40), (40, 0))
    assert visit(simulation, "like it", LIKE_IT) == (
        40 - num_found,
        (num_told, 40 - num_told),
        (40, num_told),
    )
    # Another tenant's requests are as if there were no others.
    assert visit(simulation, "another", LIKE_IT, "salt") == (40, (0, 40), (40, 0))
    assert visit(simulation, "once more", LIKE_IT, "salt").num_scheduled < 40


def test_guesses_inside_a_block_are_told_alike(make_config: MakeConfig) -> None:
    simulation = make_simulation(make_config, num_blocks=60, block_size=16, max_num_seqs=4)
    visit(simulation, "secret", PROMPT)
    told = {visit(simulation, f"guess {guess}", [*PROMPT[:20], guess, 60])[1:] for guess in range(1, 50)}
    assert told == {((16, 6), (22, 16))}


@pytest.mark.parametrize("num_lookahead", [0, 1, 3])
@pytest.mark.parametrize(("full_blocks_only", "num_found"), [(False, 37), (True, 32)])
def test_where_hits_end_beside_a_drafter(full_blocks_only: bool, num_found: int, num_lookahead: int) -> None:
    manager = make_manager(
        30, full_blocks_only=full_blocks_only, num_prefill_lookahead=num_lookahead, max_num_seqs=8
    )
    admit(manager, make_plain_request("first", PROMPT))
    manager.new_step_starts()
    expected = num_found - num_lookahead
    if full_blocks_only:
        expected -= expected % 16
    assert manager.get_computed_blocks(make_plain_request("like it", LIKE_IT))[1] == expected


def test_a_preempted_request_keeps_what_its_client_is_told() -> None:
    manager = make_manager()
    request: Any = make_plain_request("a", LIKE_IT)
    request.prefill_stats.set(40, 37, 0)
    manager.record_prefix_cache_stats(request, 37)
    request.num_preemptions = 1
    manager.record_prefix_cache_stats(request, 39)
    assert (request.prefill_stats.num_cached_tokens, request.prefill_stats.num_computed_tokens) == (32, 8)
    stats = manager.make_prefix_cache_stats()
    assert stats is not None and (stats.hits, stats.preempted_hits) == (32, 32)
    request.take_prefill_stats()
    manager.record_prefix_cache_stats(request, 39)
