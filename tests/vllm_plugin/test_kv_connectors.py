"""KV connectors behind Rose's block manager: what is loaded is found once it has arrived, what is sent stays."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import RequestStatus

from rose_backend.errors import IntegrityError
from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.fake_connector import FakeConnector, FakeOffloading
from tests.support.vllm_plugin.fake_worker import VOCAB_SIZE, expected_output
from tests.support.vllm_plugin.simulation import Simulation, make_request, make_simulation

init_none_hash(sha256)
HASHER = get_request_block_hasher(16, sha256)
EXAMPLE = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
DEPTHS = {"sync": (1, False), "async": (2, True), "async deep": (3, True)}


def simulate(make_config: MakeConfig, depth: str = "sync", **options: Any) -> Simulation:
    num_in_flight, is_async = DEPTHS[depth]
    connector = options.pop("connector", None) or FakeConnector()
    defaults = {"num_blocks": 40, "block_size": 16, "max_num_seqs": 8, "kv_transfer_config": EXAMPLE}
    return make_simulation(
        make_config, depth=num_in_flight, is_async=is_async, connector=connector, **{**defaults, **options}
    )


def run_traffic(
    simulation: Simulation, *, num_requests: int = 200, num_stems: int = 25, arrivals: int = 1
) -> dict[str, str]:
    """Serve requests that share beginnings, some of which are aborted; return how each that was cut short ended."""
    draw, scheduler = random.Random(11), simulation.scheduler
    stems = [[draw.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(num_stems)]
    expected: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    requests: dict[str, Any] = {}
    while len(expected) < num_requests or scheduler.has_unfinished_requests() or simulation.in_flight:
        if len(expected) < num_requests and draw.random() < 0.5 / arrivals:
            stem = draw.choice(stems)
            for _ in range(arrivals):
                prompt = [*stem[: draw.randrange(1, 100)], draw.randrange(VOCAB_SIZE)]
                name, max_tokens = f"r{len(expected)}", draw.randrange(1, 30)
                expected[name] = expected_output(prompt, max_tokens)
                requests[name] = make_request(name, prompt, max_tokens, block_hasher=HASHER)
                scheduler.add_request(requests[name])
        if draw.random() < 0.15 and scheduler.requests:
            loading = getattr(simulation.worker.connector, "loading", [])
            victim = draw.choice(loading or list(scheduler.requests))
            if not requests[victim].is_finished():
                scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
                ended[victim] = "aborted"
        simulation.step()
        simulation.manager.check_integrity()
    while simulation.worker.connector.is_busy or simulation.in_flight:
        simulation.step()
    for name, tokens in expected.items():
        got = simulation.outputs.get(name, [])
        if requests[name].status == RequestStatus.FINISHED_ERROR:
            ended[name] = "failed"
        assert got == (tokens[: len(got)] if name in ended else tokens), name
    simulation.step()
    assert simulation.manager.usage == 0.0
    assert not len(simulation.manager.clones.held_sources())
    return ended


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_blocks", [100, 24], ids=["roomy", "tight"])
def test_what_is_loaded_is_used_and_what_is_sent_stays(
    make_config: MakeConfig, depth: str, num_blocks: int
) -> None:
    simulation = simulate(make_config, depth, num_blocks=num_blocks)
    ended = run_traffic(simulation)
    connector = simulation.worker.connector
    assert min(count for name, count in connector.counts.items() if name != "failed") > 0, connector.counts
    assert "aborted" in ended.values()
    stats = simulation.manager.stats
    assert min(stats.hit_tokens, stats.partial_hits, stats.clones, stats.evictions) > 0, stats
    assert simulation.num_preemptions > 0 or num_blocks > 24


@pytest.mark.parametrize("depth", DEPTHS)
def test_events_do_not_publish_what_has_not_arrived(make_config: MakeConfig, depth: str) -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    connector = FakeConnector(share_failing=0.5, share_sent=0.0)
    simulation = simulate(make_config, depth, connector=connector, kv_events_config=events)
    run_traffic(simulation, num_stems=6, arrivals=4)
    assert connector.counts["failed"] > 10 and simulation.manager.stats.hit_tokens > 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_blocks_that_were_offloaded_come_back(make_config: MakeConfig, depth: str) -> None:
    offloading = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": 1 << 20},
    )
    worker = FakeOffloading()
    simulation = simulate(make_config, depth, connector=worker, num_blocks=24, kv_transfer_config=offloading)
    run_traffic(simulation, num_requests=300, num_stems=8)
    assert min(worker.num_stored, worker.num_loaded, worker.num_waited_for) > 0, vars(worker)
    stats = simulation.manager.stats
    assert min(stats.hit_tokens, stats.partial_hits, stats.clones, stats.evictions) > 0, stats
    assert simulation.num_preemptions > 0


@pytest.mark.parametrize("is_async", [False, True], ids=["waited for", "meanwhile"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_load_that_fails_ends_its_request_alone(
    make_config: MakeConfig, depth: str, is_async: bool
) -> None:
    connector = FakeConnector(share_failing=0.5, share_sent=0.0, is_async=is_async)
    simulation = simulate(make_config, depth, connector=connector, max_num_batched_tokens=200)
    # Many at once begin alike: each would find what another one's load has left.
    ended = run_traffic(simulation, num_stems=6, arrivals=4)
    assert connector.counts["failed"] > 10
    assert list(ended.values()).count("failed") > 10


@pytest.mark.parametrize("is_async", [False, True], ids=["waited for", "meanwhile"])
def test_what_failed_to_load_is_computed_where_the_user_wants_that(
    make_config: MakeConfig, is_async: bool
) -> None:
    connector = FakeConnector(share_failing=0.5, share_sent=0.0, is_async=is_async)
    simulation = simulate(make_config, connector=connector, max_num_batched_tokens=200)
    simulation.scheduler.recompute_kv_load_failures = True
    ended = run_traffic(simulation, num_stems=6, arrivals=4)
    assert connector.counts["failed"] > 10
    assert "failed" not in ended.values()


def test_what_was_loaded_meanwhile_is_found(make_config: MakeConfig) -> None:
    simulation = simulate(make_config, connector=FakeConnector(share_sent=0.0, is_async=True))
    prompt = list(range(60))
    # One whose whole prompt is there.
    name = next(
        name
        for name in map("loaded{}".format, range(100))
        if simulation.worker.connector.get_num_new_matched_tokens(make_request(name, prompt, 1), 0)[0] > 47
    )
    scheduler = simulation.scheduler
    scheduler.add_request(make_request(name, prompt, 20))
    while not simulation.outputs:
        simulation.step()
    request = make_request("again", prompt, 1)
    scheduler.kv_cache_manager.new_step_starts()
    assert scheduler.kv_cache_manager.get_computed_blocks(request)[1] == 59


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("ends", "num_hits"),
    # vLLM has taken back the last token of what has arrived, to compute it.
    [("with its first token", 64), ("when it has arrived", 63), ("while it is loaded", 0), ("not", 64)],
)
def test_a_prompt_that_was_loaded_to_its_end_is_found_by_one_that_continues_it(
    make_config: MakeConfig, depth: str, ends: str, num_hits: int
) -> None:
    connector = FakeConnector(share_sent=0.0, is_async=True)
    simulation = simulate(make_config, depth, connector=connector)
    scheduler, prompt = simulation.scheduler, list(range(64))
    name = next(
        name
        for name in map("loaded{}".format, range(1000))
        if connector.get_num_new_matched_tokens(make_request(name, prompt, 1), 0)[0] == 64
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
    while connector.is_busy or simulation.in_flight or not (request.is_finished() or simulation.outputs):
        simulation.step()
    scheduler.kv_cache_manager.new_step_starts()
    continued = make_request("continued", [*prompt, 5, 6, 7], 1)
    assert scheduler.kv_cache_manager.get_computed_blocks(continued)[1] == num_hits


def test_a_connector_gets_no_hit_inside_a_block(make_config: MakeConfig) -> None:
    manager = simulate(make_config).scheduler.kv_cache_manager
    first, second = (make_request(name, list(range(60)), 5) for name in ("first", "second"))
    manager.new_step_starts()
    manager.allocate_slots(first, 60)
    first.num_computed_tokens = 60
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
    connector = FakeConnector(share_sent=1.0, num_send_steps=60)
    simulation = simulate(make_config, connector=connector, max_num_seqs=1)
    for index in range(4):
        simulation.scheduler.add_request(make_request(f"r{index}", [index] * 20, 3))
    for _ in range(30):
        simulation.step()
    assert {name: len(tokens) for name, tokens in simulation.outputs.items()} == dict.fromkeys(
        ("r0", "r1", "r2", "r3"), 3
    )


def test_blocks_of_a_load_that_failed_are_forgotten(make_config: MakeConfig) -> None:
    manager = simulate(make_config).scheduler.kv_cache_manager
    prompt = list(range(60))
    request = make_request("first", prompt, 5)
    manager.new_step_starts()
    manager.allocate_slots(request, 60)
    request.num_computed_tokens = 60
    manager.new_step_starts()
    assert manager.get_computed_blocks(make_request("second", prompt, 5))[1] == 59
    (block_ids,) = manager.get_block_ids("first")
    manager.evict_blocks(set(block_ids[1:]))
    manager.new_step_starts()
    assert manager.get_computed_blocks(make_request("third", prompt, 5))[1] == 16
    manager.manager.check_integrity()
    manager.free(request)
    manager.new_step_starts()
    manager.manager.check_integrity()
