"""vLLM's schedulers over Rose's block manager: what requests find of each other, and what they are told of it.

``test_batched_scheduling.py`` has random traffic; here drafts are checked that way.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from rose_backend import scheduling as in_flight_prefixes
from rose_backend.conformance.block_manager.pretended_model import VOCAB_SIZE, expected_output
from rose_backend.scheduling import MIN_TOKENS_WORTH_WAITING
from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from tests.support.vllm_plugin import managers
from tests.support.vllm_plugin.configs import MakeConfig, n_grams, rose
from tests.support.vllm_plugin.fake_worker import STATE
from tests.support.vllm_plugin.managers import begin, state_of
from tests.support.vllm_plugin.simulation import MAX_MODEL_LEN, Simulation, make_request, make_simulation
from tests.support.vllm_plugin.traffic import Traffic, make_hasher


def simulate(make_config: MakeConfig, **options: Any) -> Simulation:
    return make_simulation(make_config, **{"num_blocks": 40, "block_size": 16, "max_num_seqs": 8, **options})


def test_equal_prompts_of_one_step_do_not_share_before_the_step_is_over(make_config: MakeConfig) -> None:
    simulation = simulate(make_config, max_num_batched_tokens=160)
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


def test_a_pool_for_one_sequence_serves_many_requests_one_after_the_other(make_config: MakeConfig) -> None:
    # A hit inside a block would want source and copy at once; with all blocks needed there is room for neither.
    simulation = simulate(make_config, num_blocks=11, max_num_seqs=4)
    rng = random.Random(3)
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(150)]
    prompts = [[*stem[: rng.randrange(20, 150)], 1] for _ in range(30)]
    for index, prompt in enumerate(prompts):
        simulation.scheduler.add_request(make_request(f"r{index}", prompt, 8))
    simulation.run()
    got = [simulation.outputs[f"r{index}"] for index in range(len(prompts))]
    assert got == [expected_output(prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("is_batched", [True, False], ids=["batched", "one_by_one"])
@pytest.mark.parametrize("has_cache", [True, False], ids=["cache", "no_cache"])
def test_a_pool_with_room_for_windows_only_serves_the_longest_sequence(
    make_config: MakeConfig, is_batched: bool, has_cache: bool
) -> None:
    """Ten blocks for what is kept; of three groups 19 tokens before 16 new ones, which may begin inside a block."""
    simulation = simulate(
        make_config,
        num_blocks=1 + 10 + 3 * 4,
        max_num_seqs=4,
        windows=(None, 20, 20, 20),
        max_num_batched_tokens=16,
        enable_prefix_caching=has_cache,
        **rose(batched_scheduling=is_batched),
    )
    prompts = [[index] * 90 + [7] * index for index in range(3)]
    for index, prompt in enumerate(prompts):
        simulation.scheduler.add_request(make_request(f"r{index}", prompt, 160 - len(prompt)))
    most = 0
    while simulation.is_busy:
        simulation.checked_step()
        manager = simulation.manager
        most = max(most, int((manager.num_row_blocks - manager.table.group_types[1].first_block).max()))
    assert [len(simulation.outputs[f"r{index}"]) for index in range(3)] == [70, 69, 68]
    assert simulation.outputs["r1"] == expected_output(prompts[1], 69)
    assert most == 3, "of 35 tokens"


@pytest.mark.parametrize(
    ("length", "depth", "windows"),
    # A length of 29 ends at the end of a block.
    [(37, 1, (None,)), (29, 2, (None,)), (37, 2, (None, 2)), (29, 1, (None, 2)), (37, 2, (None, 17))],
    ids=str,
)
def test_a_streaming_session_goes_on_from_its_own_blocks(
    make_config: MakeConfig, length: int, depth: int, windows: tuple[int | None, ...]
) -> None:
    simulation = simulate(make_config, max_num_seqs=4, depth=depth, windows=windows)

    def turn(tokens: list[int]) -> None:
        simulation.scheduler.add_request(make_request("session", tokens, 20, resumable=True))
        # Others look the cache up meanwhile, which publishes what the session has written.
        simulation.scheduler.add_request(make_request(f"other{len(simulation.outputs)}", tokens, 3))
        simulation.run()

    turn(list(range(length)))
    first = list(simulation.outputs["session"])
    turn([5, 6, 7])
    # The last token of a turn was never written, and the session goes on without it.
    history = [*range(length), *first[:-1], 5, 6, 7]
    assert first == expected_output(list(range(length)), 20)
    assert simulation.outputs["session"][20:] == expected_output(history, 20)


def test_a_checkpoint_is_copied_in_a_step_without_tokens(make_config: MakeConfig) -> None:
    simulation = simulate(
        make_config, depth=3, is_async=False, windows=(STATE, None), max_num_batched_tokens=96
    )
    prompt = list(range(70))
    simulation.scheduler.add_request(make_request("first", prompt, 9))
    simulation.step()
    # Its first token is in flight, and without asynchronous scheduling it waits for it.
    output = simulation.scheduler.schedule()
    assert output.total_num_scheduled_tokens == 0 and len(output.kv_cache_block_copies) > 0
    assert simulation.execute(output) is None
    second = make_request("second", [*prompt, 1, 2], 5)
    simulation.scheduler.add_request(second)
    simulation.step()
    # The worker compares the state that it starts from with what must be there.
    assert second.prefill_stats.num_cached_tokens == 64
    assert second.num_in_flight_tokens == 2
    simulation.run()
    assert simulation.outputs["second"] == expected_output([*prompt, 1, 2], 5)


@pytest.mark.parametrize(
    ("manager", "fate"),
    [
        ("rose", "goes on"),
        ("rose", "is aborted before"),
        ("rose", "is preempted before"),
        ("rose", "is aborted after"),
        # vLLM publishes when it schedules a request. Whoever has gone before that is not found.
        ("stock", "goes on"),
        ("stock", "is aborted after"),
    ],
)
def test_tokens_of_a_step_in_flight_are_found_whatever_becomes_of_it(
    make_config: MakeConfig, manager: str, fate: str
) -> None:
    stock = {"scheduler_class": AsyncScheduler} if manager == "stock" else {}
    simulation = simulate(make_config, max_num_seqs=4, depth=2, **stock)
    scheduler, hasher = simulation.scheduler, make_hasher(hash_function=sha256_cbor)
    first = make_request("first", list(range(15)), 9, block_hasher=hasher)
    scheduler.add_request(first)
    simulation.step()
    simulation.step()
    # Its first token is known. The step that reads it in, and so fills the block, is in flight.
    assert len(simulation.in_flight) == 1 and first.num_in_flight_tokens == 1
    assert first.num_tokens == first.num_computed_tokens == 16
    prompt = [*first.all_token_ids, 1, 2]
    second = make_request("second", prompt, 5, block_hasher=hasher)
    scheduler.add_request(second)
    if fate == "is aborted before":
        scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    elif fate == "is preempted before":
        scheduler.running.remove(first)
        scheduler._preempt_request(first, 0.0)
    simulation.step()
    # The worker compares what it reads with what must be there.
    assert second.num_computed_tokens == len(prompt)
    assert second.prefill_stats.num_cached_tokens == 16
    if fate == "is aborted after":
        scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    while scheduler.has_requests() or simulation.in_flight:
        simulation.step()
    assert simulation.outputs["second"] == expected_output(prompt, 5)
    if "aborted" not in fate:
        assert simulation.outputs["first"] == expected_output(list(range(15)), 9)


# Requests that share a long prefix and come in together compute it once.
STEM = list(range(MIN_TOKENS_WORTH_WAITING + 12))


def a_manager(**options: Any) -> RoseKVCacheManager:
    manager = managers.make_manager(60, max_model_len=400, **options)
    manager.new_step_starts()
    return manager


def test_the_second_waits_for_the_first_and_finds_all_of_it() -> None:
    manager = a_manager()
    assert begin(manager, managers.make_request("first", [*STEM, 500])) == 0
    others = [managers.make_request(f"{more}", [*STEM, *more]) for more in ([600, 601], [700])]
    before = state_of(manager)
    assert [begin(manager, other) for other in others] == [None, None]
    assert state_of(manager) == before
    manager.new_step_starts()
    assert [begin(manager, other) for other in others] == [len(STEM)] * 2
    manager.manager.check_integrity()


@pytest.mark.parametrize(
    ("num_more", "waits"), [(MIN_TOKENS_WORTH_WAITING, True), (MIN_TOKENS_WORTH_WAITING - 1, False)]
)
def test_what_was_found_before_does_not_count(num_more: int, waits: bool) -> None:
    manager = a_manager()
    assert begin(manager, managers.make_request("old", STEM)) == 0
    manager.new_step_starts()
    longer = [*STEM, *range(1000, 1000 + num_more)]
    assert begin(manager, managers.make_request("a", [*longer, 1])) == len(STEM)
    assert begin(manager, managers.make_request("b", [*longer, 2])) == (None if waits else len(STEM))


@pytest.mark.parametrize(
    ("options", "chunk", "other", "salt"),
    [
        ({}, None, STEM[: MIN_TOKENS_WORTH_WAITING - 1] + [9] * 40, None),
        ({}, None, [*STEM, 600], "another tenant"),
        ({}, MIN_TOKENS_WORTH_WAITING - 1, [*STEM, 600], None),
        ({"enable_caching": False}, None, [*STEM, 500], None),
    ],
    ids=["too little in common", "another tenant", "a short chunk", "no cache"],
)
def test_a_prompt_that_would_find_few_tokens_does_not_wait(
    options: dict[str, Any], chunk: int | None, other: list[int], salt: str | None
) -> None:
    manager = a_manager(**options)
    assert begin(manager, managers.make_request("first", [*STEM, 500]), chunk) == 0
    assert begin(manager, managers.make_request("second", other, salt)) == 0


def test_a_prompt_that_shares_few_tokens_waits_if_the_threshold_is_low(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_flight_prefixes, "MIN_TOKENS_WORTH_WAITING", 10)
    manager = a_manager()
    assert begin(manager, managers.make_request("first", [*STEM[:13], 500])) == 0
    assert begin(manager, managers.make_request("other", [*STEM[:9], 600, 601])) == 0
    second = managers.make_request("second", [*STEM[:13], 700])
    assert begin(manager, second) is None
    manager.new_step_starts()
    assert begin(manager, second) == 13


@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_behind_one_that_waits_do_not_wait(make_config: MakeConfig, depth: int) -> None:
    simulation = simulate(make_config, num_blocks=100, depth=depth, max_num_batched_tokens=4000)
    steps = simulation.serve([*STEM, 900], [*STEM, 901], [*STEM, 902], [7] * 30, [8] * 20)
    assert steps[0] == {"r0": len(STEM) + 1, "r3": 30, "r4": 20}
    assert steps[1].items() >= {"r1": 1, "r2": 1}.items()


@pytest.mark.parametrize("depth", [1, 2])
def test_no_half_prompt_overtakes_a_deferred_one(make_config: MakeConfig, depth: int) -> None:
    budget = len(STEM) + 50
    simulation = simulate(make_config, num_blocks=100, depth=depth, max_num_batched_tokens=budget)
    steps = simulation.serve([*STEM, 900], [*STEM, 901], [7] * (budget + 20))
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
    simulation = simulate(make_config, **{"num_blocks": 100, "max_num_batched_tokens": 4000, **limits})
    steps = simulation.serve([*STEM, 900], [*STEM, 901], [7] * 60)
    assert set(steps[0]) == first_step
    assert steps[1]["r1"] == 1
    assert len(simulation.outputs) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_a_burst_computes_each_prefix_once(make_config: MakeConfig, depth: int) -> None:
    simulation = simulate(
        make_config, num_blocks=900, max_num_seqs=64, depth=depth, max_num_batched_tokens=4000
    )
    rng = random.Random(5)
    stems = [[rng.randrange(1000) for _ in STEM] for _ in range(4)]
    simulation.serve(*([*stems[index % 4], 1000 + index] for index in range(48)))
    stats = simulation.manager.stats
    assert len(simulation.outputs) == 48
    assert stats.query_tokens - stats.hit_tokens == 4 * len(STEM) + 48


# What clients and metrics are told of a prefix hit, while the scheduler goes by what was really found.
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
    (result,) = scheduler.update_from_output(
        output, simulation.worker.run(output, scheduler.requests)
    ).values()
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
    simulation = simulate(make_config, num_blocks=60, block_size=block_size, **rose(**switches))
    assert visit(simulation, "first", PROMPT) == (40, (0, 40), (40, 0))
    told = (num_told, 40 - num_told), (40, num_told)
    assert visit(simulation, "like it", LIKE_IT) == (40 - num_found, *told)
    # Another tenant's requests are as if there were no others.
    assert visit(simulation, "another", LIKE_IT, "salt") == (40, (0, 40), (40, 0))
    assert visit(simulation, "once more", LIKE_IT, "salt").num_scheduled < 40


def test_guesses_inside_a_block_are_told_alike(make_config: MakeConfig) -> None:
    simulation = simulate(make_config, num_blocks=60)
    visit(simulation, "secret", PROMPT)
    told = {visit(simulation, f"guess {guess}", [*PROMPT[:20], guess, 60])[1:] for guess in range(1, 50)}
    assert told == {((16, 6), (22, 16))}


# Drafts are written, kept or rejected, and never shared unverified.
NUM_DRAFTS = 4
# What the fake worker's drafter does; the engine's own drafters do not run here.
DRAFTERS: dict[str, dict[str, Any]] = {
    "without a cache": {},
    "with a cache": {"num_lookahead": NUM_DRAFTS},
    "that reads a token ahead": {"num_lookahead": NUM_DRAFTS, "drafter_reads_ahead": True},
}


@pytest.mark.parametrize(
    ("depth", "drafter", "pool"),
    [
        (1, "without a cache", (16, 26, 8)),
        (2, "without a cache", (32, 10, 4)),
        (1, "with a cache", (32, 10, 4)),
        (2, "with a cache", (16, 26, 8)),
        (1, "that reads a token ahead", (16, 26, 8)),
        (2, "that reads a token ahead", (32, 10, 4)),
    ],
)
def test_drafts_change_no_output_and_are_never_found(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    drafter: str,
    pool: tuple[int, int, int],
) -> None:
    options = DRAFTERS[drafter]
    monkeypatch.setattr(VllmConfig, "num_lookahead_tokens", options.get("num_lookahead", 0))
    reads_ahead = int(options.get("drafter_reads_ahead", False))
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", reads_ahead)
    block_size, num_blocks, max_num_seqs = pool
    simulation = simulate(
        make_config,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        depth=depth,
        speculative_config=n_grams(NUM_DRAFTS),
        max_num_batched_tokens=64,
        worker_options={"num_drafts": NUM_DRAFTS, **options},
    )
    Traffic().run(simulation)
    worker, stats = simulation.worker, simulation.manager.stats
    assert min(worker.num_accepted, worker.num_rejected) > 500 and simulation.num_preemptions > 5
    assert min(stats.hit_tokens, stats.partial_hits, stats.clones, stats.evictions) > 0, stats


def test_speculation_reaches_the_longest_sequence(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmConfig, "num_lookahead_tokens", NUM_DRAFTS)
    simulation = simulate(
        make_config,
        num_blocks=1 + MAX_MODEL_LEN // 16,
        max_num_seqs=2,
        speculative_config=n_grams(NUM_DRAFTS),
        max_num_batched_tokens=64,
        worker_options={"num_drafts": NUM_DRAFTS, "num_lookahead": NUM_DRAFTS},
    )
    simulation.scheduler.add_request(make_request("a", list(range(100)), MAX_MODEL_LEN))
    simulation.run()
    assert len(simulation.outputs["a"]) == MAX_MODEL_LEN - 100


def test_a_drafted_decode_inside_its_blocks_asks_the_block_manager_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate(
        make_config,
        num_blocks=20,
        block_size=128,
        max_num_seqs=2,
        speculative_config=n_grams(NUM_DRAFTS),
        max_num_batched_tokens=64,
        worker_options={"num_drafts": NUM_DRAFTS},
    )
    simulation.scheduler.add_request(make_request("a", list(range(20)), 100))
    simulation.step()

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the block manager was asked")

    for name in ("reserve", "commit", "match", "add"):
        monkeypatch.setattr(simulation.manager, name, fail)
    for _ in range(10):
        simulation.step()
    assert simulation.worker.num_accepted > 5 and len(simulation.outputs["a"]) > 15
