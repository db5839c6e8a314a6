"""vLLM's own schedulers over Rose's block manager, thousands of random steps, every cache slot checked."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.fake_worker import STATE, VOCAB_SIZE, expected_output
from tests.support.vllm_plugin.simulation import make_request, make_simulation, run_random_traffic


@pytest.mark.parametrize(
    ("depth", "is_async"),
    [(1, False), (2, True), (3, True), (3, False)],
    ids=["sync", "async", "async_deep", "pipelined"],
)
@pytest.mark.parametrize(
    ("block_size", "num_blocks", "max_num_seqs", "options"),
    [
        (16, 24, 8, {}),
        (32, 9, 4, {"max_num_batched_tokens": 37}),
        (16, 60, 12, {"enable_prefix_caching": False}),
        (16, 22, 8, {"scheduling_policy": "priority", "watermark": 0.1}),
        (16, 22, 8, {"encoder_budget": 60}),
        (16, 32, 8, {"windows": (None, 20)}),
        (16, 52, 8, {"windows": (20, None, 20, 20), "max_num_batched_tokens": 37}),
        (16, 36, 8, {"windows": (None, 7, 60), "scheduling_policy": "priority", "watermark": 0.1}),
        (16, 28, 12, {"windows": (None, 33), "enable_prefix_caching": False}),
        (32, 30, 8, {"windows": (None, None, 33)}),
        (16, 26, 8, {"windows": (None, STATE)}),
        (16, 34, 8, {"windows": (STATE, None, STATE, STATE), "max_num_batched_tokens": 37}),
        (16, 46, 8, {"windows": (STATE, None), "scheduling_policy": "priority", "watermark": 0.1}),
    ],
    ids=[
        *("small_blocks", "tight_pool_odd_chunks", "no_prefix_cache", "priority_watermark", "images"),
        *("window", "window_groups", "two_windows_priority", "window_no_prefix_cache", "two_full_groups"),
        *("states", "state_groups", "states_priority"),
    ],
)
def test_no_step_reads_what_is_not_there(
    make_config: MakeConfig,
    depth: int,
    is_async: bool,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    options: dict[str, Any],
) -> None:
    simulation = make_simulation(
        make_config,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        depth=depth,
        is_async=is_async,
        **options,
    )
    has_items = "encoder_budget" in options
    run_random_traffic(simulation, has_items=has_items)
    assert (simulation.worker.num_encoded > 50) == has_items
    if options.get("enable_prefix_caching", True):
        stats = simulation.manager.stats
        assert min(stats.hit_tokens, stats.partial_hits, stats.clones, stats.evictions) > 0, stats
        has_states = STATE in options.get("windows", ())
        copied = simulation.worker.num_copies * stats.bytes_per_block
        # A request that is preempted in the step of its admission needs its state no more.
        assert copied == stats.bytes_cloned or (has_states and 0 < copied < stats.bytes_cloned)
        assert (stats.checkpoints > 0) == (simulation.worker.num_zeroed > 0) == has_states
    if num_blocks < 60:
        assert simulation.num_preemptions > 0


def test_equal_prompts_of_one_step_do_not_share_before_the_step_is_over(make_config: MakeConfig) -> None:
    simulation = make_simulation(
        make_config, num_blocks=40, block_size=16, max_num_seqs=8, max_num_batched_tokens=160
    )
    prompt = list(range(40))
    for index in range(3):
        simulation.scheduler.add_request(make_request(f"first{index}", prompt, 4))
    output = simulation.scheduler.schedule()
    assert list(output.num_scheduled_tokens.values()) == [40, 40, 40]
    simulation.in_flight.append((output, simulation.worker.run(output, simulation.scheduler.requests)))
    simulation.scheduler.update_from_output(*simulation.in_flight.popleft())
    simulation.scheduler.add_request(make_request("later", prompt, 4))
    output = simulation.scheduler.schedule()
    assert output.num_scheduled_tokens["later"] == 1
    # Positions 32 to 38 lie in a block that another request still appends to: a private copy.
    assert len(output.kv_cache_block_copies) == 1
    simulation.worker.run(output, simulation.scheduler.requests)


def test_other_tenants_blocks_are_not_found(make_config: MakeConfig) -> None:
    simulation = make_simulation(make_config, num_blocks=40, block_size=16, max_num_seqs=8)
    prompt = list(range(40))
    scheduled = []
    for request_id, salt in (("a", "salt"), ("b", "other"), ("c", None), ("d", "salt")):
        simulation.scheduler.add_request(make_request(request_id, prompt, 1, salt))
        output = simulation.scheduler.schedule()
        scheduled.append(output.num_scheduled_tokens[request_id])
        simulation.scheduler.update_from_output(
            output, simulation.worker.run(output, simulation.scheduler.requests)
        )
    assert scheduled == [40, 40, 40, 1]


def test_a_pool_for_one_sequence_serves_many_requests_one_after_the_other(make_config: MakeConfig) -> None:
    # A hit inside a block would want source and copy at once; with all blocks needed there is room for neither.
    simulation = make_simulation(make_config, num_blocks=11, block_size=16, max_num_seqs=4)
    rng = random.Random(3)
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(150)]
    prompts = [[*stem[: rng.randrange(20, 150)], 1] for _ in range(30)]
    for index, prompt in enumerate(prompts):
        simulation.scheduler.add_request(make_request(f"r{index}", prompt, 8))
    for _ in range(3000):
        if not simulation.scheduler.has_unfinished_requests():
            break
        simulation.step()
        simulation.manager.check_integrity()
    got = [simulation.outputs[f"r{index}"] for index in range(len(prompts))]
    assert got == [expected_output(prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("is_batched", [True, False], ids=["batched", "one_by_one"])
@pytest.mark.parametrize("has_cache", [True, False], ids=["cache", "no_cache"])
def test_a_pool_with_room_for_windows_only_serves_the_longest_sequence(
    make_config: MakeConfig, is_batched: bool, has_cache: bool
) -> None:
    """Ten blocks for what is kept; of three groups 19 tokens before 16 new ones, which may begin inside a block."""
    simulation = make_simulation(
        make_config,
        num_blocks=1 + 10 + 3 * 4,
        block_size=16,
        max_num_seqs=4,
        windows=(None, 20, 20, 20),
        max_num_batched_tokens=16,
        enable_prefix_caching=has_cache,
        additional_config={"rose": {"batched_scheduling": is_batched}},
    )
    prompts = [[index] * 90 + [7] * index for index in range(3)]
    for index, prompt in enumerate(prompts):
        simulation.scheduler.add_request(make_request(f"r{index}", prompt, 160 - len(prompt)))
    most = 0
    while simulation.scheduler.has_unfinished_requests():
        simulation.step()
        simulation.manager.check_integrity()
        manager = simulation.manager
        held = manager.num_row_blocks - manager.table.kinds[1].first_block
        most = max(most, int(held.max()))
    assert [len(simulation.outputs[f"r{index}"]) for index in range(3)] == [70, 69, 68]
    assert simulation.outputs["r1"] == expected_output(prompts[1], 69)
    assert most == 3, "of 35 tokens"


@pytest.mark.parametrize("windows", [(None,), (None, 2), (None, 17)], ids=str)
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("length", [37, 29])  # The second one ends at the end of a block.
def test_a_streaming_session_goes_on_from_its_own_blocks(
    make_config: MakeConfig, length: int, depth: int, windows: tuple[int | None, ...]
) -> None:
    simulation = make_simulation(
        make_config, num_blocks=40, block_size=16, max_num_seqs=4, depth=depth, windows=windows
    )
    scheduler = simulation.scheduler

    def turn(tokens: list[int]) -> None:
        scheduler.add_request(make_request("session", tokens, 20, resumable=True))
        # Others look the cache up meanwhile, which publishes what the session has written.
        scheduler.add_request(make_request(f"other{len(simulation.outputs)}", tokens, 3))
        while scheduler.has_unfinished_requests() or simulation.in_flight:
            simulation.step()
            simulation.manager.check_integrity()

    turn(list(range(length)))
    first = list(simulation.outputs["session"])
    turn([5, 6, 7])
    # The last token of a turn was never written, and the session goes on without it.
    history = [*range(length), *first[:-1], 5, 6, 7]
    assert first == expected_output(list(range(length)), 20)
    assert simulation.outputs["session"][20:] == expected_output(history, 20)
