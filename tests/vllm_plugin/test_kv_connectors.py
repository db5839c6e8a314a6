"""KV connectors: what is loaded is found once it has arrived. Traffic with them is in test_batched_scheduling.py."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from rose_backend.errors import IntegrityError
from tests.support.vllm_plugin.configs import MakeConfig, connector
from tests.support.vllm_plugin.fake_connector import FakeConnector
from tests.support.vllm_plugin.fake_nixl import make_engines, run_traffic
from tests.support.vllm_plugin.managers import begin, look_up
from tests.support.vllm_plugin.simulation import Simulation, make_request, make_simulation

PROMPT = list(range(60))


def simulate(make_config: MakeConfig, depth: int = 1, max_num_seqs: int = 8, **options: Any) -> Simulation:
    return make_simulation(
        make_config,
        depth=depth,
        connector=FakeConnector(**options),
        num_blocks=40,
        block_size=16,
        max_num_seqs=max_num_seqs,
        **connector("ExampleConnector"),
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("ends", "num_hits"),
    # vLLM has taken back the last token of what has arrived, to compute it.
    [("with its first token", 64), ("when it has arrived", 63), ("while it is loaded", 0), ("not", 64)],
)
def test_a_prompt_that_was_loaded_to_its_end_is_found_by_one_that_continues_it(
    make_config: MakeConfig, depth: int, ends: str, num_hits: int
) -> None:
    simulation = simulate(make_config, depth, share_sent=0.0, is_async=True)
    scheduler, prompt, loads = simulation.scheduler, list(range(64)), simulation.worker.connector
    name = next(
        name
        for name in map("loaded{}".format, range(1000))
        if loads.get_num_new_matched_tokens(make_request(name, prompt, 1), 0)[0] == 64
    )
    request = make_request(name, prompt, 1 if ends == "with its first token" else 20)
    scheduler.add_request(request)
    simulation.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    if ends == "when it has arrived":
        while not scheduler.finished_recving_kv_req_ids:
            simulation.step()
        # The next step would do this, and compute the last token.
        scheduler._update_waiting_for_remote_kv(request)
        request.status = RequestStatus.WAITING
    if ends in ("when it has arrived", "while it is loaded"):
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    while loads.is_busy or simulation.in_flight or not (request.is_finished() or simulation.outputs):
        simulation.step()
    continued = make_request("continued", [*prompt, 5, 6, 7], 1)
    assert look_up(scheduler.kv_cache_manager, continued) == num_hits


def test_a_connector_gets_no_hit_inside_a_block(make_config: MakeConfig) -> None:
    manager = simulate(make_config).scheduler.kv_cache_manager
    first, second = (make_request(name, PROMPT, 5) for name in ("first", "second"))
    manager.new_step_starts()
    begin(manager, first)
    manager.new_step_starts()
    blocks, num_tokens, _ = manager.get_computed_blocks(second)
    assert num_tokens == 59 and len(blocks.block_ids) == 4
    cut = manager.truncate_computed_blocks(blocks, 48)
    assert cut.block_ids.tolist() == blocks.block_ids[:3].tolist()
    with pytest.raises(
        IntegrityError, match="got 32 tokens of a hit of 59, expected those of its full blocks, 48"
    ):
        manager.truncate_computed_blocks(blocks, 32)
    assert manager.allocate_slots(
        second, 0, 48, cut, num_external_computed_tokens=12, delay_cache_blocks=True
    )
    (tables,) = zip(manager.get_block_ids("first"), manager.get_block_ids("second"), strict=True)
    assert tables[0][:3] == tables[1][:3] and tables[0][3] != tables[1][3]
    # Not even the part of the last block that is known from the first request is written to a shared block.
    assert manager.get_blocks("second").get_unhashed_block_ids() == tables[1][3:]


def test_requests_that_are_being_sent_take_no_place_of_running_ones(make_config: MakeConfig) -> None:
    simulation = simulate(make_config, max_num_seqs=1, share_sent=1.0, num_send_steps=60)
    for index in range(4):
        simulation.scheduler.add_request(make_request(f"r{index}", [index] * 20, 3))
    for _ in range(30):
        simulation.step()
    assert {name: len(tokens) for name, tokens in simulation.outputs.items()} == dict.fromkeys(
        ("r0", "r1", "r2", "r3"), 3
    )


def test_blocks_of_a_load_that_failed_are_forgotten(make_config: MakeConfig) -> None:
    manager = simulate(make_config).scheduler.kv_cache_manager
    request = make_request("first", PROMPT, 5)
    manager.new_step_starts()
    begin(manager, request)
    assert look_up(manager, make_request("second", PROMPT, 5)) == 59
    (block_ids,) = manager.get_block_ids("first")
    manager.evict_blocks(set(block_ids[1:]))
    assert look_up(manager, make_request("third", PROMPT, 5)) == 16
    manager.manager.check_integrity()
    manager.free(request)
    manager.new_step_starts()
    manager.manager.check_integrity()


@pytest.mark.parametrize(
    ("policy", "num_blocks", "depth", "is_batched"),
    [
        ("fail", 22, 1, True),
        ("fail", 100, 2, True),
        ("fail", 22, 2, False),
        ("recompute", 100, 1, True),
        ("recompute", 22, 2, True),
        ("recompute", 22, 1, False),
        (None, 22, 1, True),
        (None, 22, 2, True),
        (None, 100, 2, False),
    ],
)
def test_one_engine_goes_on_from_what_another_computed(
    make_config: MakeConfig, policy: str | None, num_blocks: int, depth: int, is_batched: bool
) -> None:
    engines = make_engines(make_config, depth, is_batched, num_blocks, 0.3 if policy else 0.0)
    engines.decode.scheduler.recompute_kv_load_failures = policy == "recompute"
    for name, tokens in run_traffic(engines).items():
        if engines.requests[name].status == RequestStatus.FINISHED_ERROR:
            engines.ended[name] = "failed"
        got = engines.decode.outputs.get(name, [])
        assert got == (tokens[: len(got)] if name in engines.ended else tokens), name
    assert set(engines.ended.values()) >= {"aborted", "aborted while it was read"}
    assert ("failed" in engines.ended.values()) == (policy == "fail")
    counts = engines.receiver.counts
    assert min(count for what, count in counts.items() if what != "failed") > 0, counts
    assert (counts["failed"] > 0) == (policy is not None)
    assert engines.decode.num_preemptions > 0 or num_blocks > 22
    for side in (engines.prefill, engines.decode):
        side.step()
        assert side.manager.usage == 0.0 and not len(side.manager.clones.held_sources())
    assert not engines.sender.kept
