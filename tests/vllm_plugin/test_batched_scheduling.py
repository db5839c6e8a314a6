"""Batched scheduling beside vLLM's own loops: the same random traffic, every step and every output field by field."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from rose_backend.vllm_plugin.scheduler.decode_batch import FastOutputs
from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.fake_worker import STATE, VOCAB_SIZE
from tests.support.vllm_plugin.lockstep import Pair, batching
from tests.support.vllm_plugin.simulation import ITEM_PLACES, items_of, make_request, make_simulation

init_none_hash(sha256)
HASHER = get_request_block_hasher(16, sha256)
EVENTS = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


class SomeGrammar:
    """Accepts 15 tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.num_tokens += len(tokens)
        return self.num_tokens < 15


OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 120, "block_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 200},
    "tight": {"num_blocks": 24, "block_size": 16, "max_num_seqs": 8},
    "wide blocks": {"num_blocks": 12, "block_size": 32, "max_num_seqs": 5, "max_num_batched_tokens": 37},
    "no cache": {"num_blocks": 60, "block_size": 16, "max_num_seqs": 12, "enable_prefix_caching": False},
    "events": {"num_blocks": 40, "block_size": 16, "max_num_seqs": 8, "kv_events_config": EVENTS},
    "priority": {"num_blocks": 22, "block_size": 16, "max_num_seqs": 6, "scheduling_policy": "priority"},
    "watermark": {"num_blocks": 30, "block_size": 16, "max_num_seqs": 6, "watermark": 0.2},
    # Far more requests than rows, or than blocks: a request waits in nearly every step.
    "crowd": {"num_blocks": 120, "block_size": 16, "max_num_seqs": 10, "max_num_batched_tokens": 300},
    "crowd without room": {"num_blocks": 30, "block_size": 16, "max_num_seqs": 40},
    "images": {"num_blocks": 40, "block_size": 16, "max_num_seqs": 8, "encoder_budget": 50},
    "states": {"num_blocks": 60, "block_size": 16, "max_num_seqs": 8, "windows": (STATE, None, STATE)},
}
DEPTHS = {"sync": (1, False), "async": (2, True), "async deep": (3, True), "pipelined": (3, False)}
VARIANTS: dict[str, dict[str, Any]] = {
    "async, runner V2": {"use_v2_model_runner": True},
    "async, no stats": {"log_stats": False},
}
CASES = [
    *(("roomy", depth) for depth in DEPTHS),
    *(
        (options, depth)
        for options in ("tight", "events", "priority", "images", "states")
        for depth in ("sync", "async")
    ),
    *((options, "async") for options in ("watermark", "wide blocks", "no cache")),
    *((options, "async, runner V2") for options in ("tight", "images")),
    ("priority", "async, no stats"),
    *(("crowd", depth) for depth in ("sync", "async, runner V2")),
    ("crowd without room", "async"),
]


@pytest.mark.parametrize(("options", "depth"), CASES)
def test_every_step_and_output_is_vllms(make_config: MakeConfig, options: str, depth: str) -> None:
    num_in_flight, is_async = DEPTHS[depth.partition(",")[0]]
    pair = Pair(make_config, depth=num_in_flight, is_async=is_async, **OPTIONS[options])
    for side in pair.sides:
        # Whatever this vLLM takes by itself.
        for name, value in {"use_v2_model_runner": False, **VARIANTS.get(depth, {})}.items():
            setattr(side.scheduler, name, value)
    is_crowd = options.startswith("crowd")
    # While a crowd waits without room, steps are split; those behind its last arrival are batched, so it comes twice.
    for seed in (11, 12) if is_crowd else (11,):
        run_random_traffic(
            pair,
            seed,
            is_priority=options == "priority",
            has_items=options == "images",
            # A turn's end takes back a token in flight, which a state has seen: refused.
            has_sessions=options != "states" or not is_async,
            num_requests=80 if is_crowd else 45,
            arrival_rate=1.0 if is_crowd else 0.12,
        )
    if is_crowd:
        assert pair.num_steps_with_waiting > 150
    if options == "crowd":
        assert pair.num_batched_with_waiting > 0.8 * pair.num_steps_with_waiting
    if options in ("tight", "priority", "watermark"):
        assert pair.stock.num_preemptions > 0
    if options == "images":
        assert pair.stock.worker.num_encoded > 20
    if options == "states":
        assert min(side.manager.stats.checkpoints for side in pair.sides) > 5
    if options == "events":
        assert len(pair.published[0]) > 20
    # Without placeholders a request waits for its token before it can be scheduled again.
    assert depth == "pipelined" or pair.num_batched_steps > 30
    may_split = depth != "pipelined" and options not in ("priority", "watermark")
    assert (pair.num_split_steps > 15) == may_split
    assert pair.num_batched_tokens > pair.num_tokens // 3


def run_random_traffic(
    pair: Pair,
    seed: int,
    *,
    is_priority: bool,
    has_items: bool = False,
    has_sessions: bool = True,
    num_requests: int,
    arrival_rate: float,
) -> None:
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(3)]
    num_added = 0
    while num_added < num_requests or pair.is_busy():
        # Bursts, with time to decode between them.
        if num_added < num_requests and rng.random() < arrival_rate:
            for _ in range(rng.randrange(1, 6)):
                prompt = [*rng.choice(stems)[: rng.randrange(1, 90)], *([rng.randrange(VOCAB_SIZE)] * 2)]
                # One that is found to its last token starts with a single token.
                prompts.append(rng.choice(prompts) if prompts and rng.random() < 0.2 else prompt)
                name = f"r{num_added}"
                pair.add(*random_request(rng, name, prompts[-1], is_priority, has_items, has_sessions))
                num_added += 1
        if rng.random() < 0.04 and pair.stock.scheduler.running:
            victim = rng.choice(pair.stock.scheduler.running).request_id
            pair.for_both(lambda s, v=victim: s.finish_requests(v, RequestStatus.FINISHED_ABORTED))
        # vLLM resets nothing while a session waits for more input or its turn, and says so by an error.
        scheduler = pair.stock.scheduler
        if rng.random() < 0.01 and not scheduler.deferred_waiting and not scheduler.kv_holding_waiting:
            pair.for_both(lambda s: s.reset_prefix_cache(reset_running_requests=True))
        if rng.random() < 0.01:
            pair.for_both(lambda s: s.set_pause_state(PauseState.PAUSED_ALL))
            pair.step()
            pair.for_both(lambda s: s.set_pause_state(PauseState.UNPAUSED))
        pair.step()
    pair.step()
    assert pair.batched.manager.usage == pair.stock.manager.usage == 0.0


def random_request(
    rng: random.Random,
    request_id: str,
    prompt: list[int],
    is_priority: bool,
    has_items: bool = False,
    has_sessions: bool = True,
) -> list[Callable[[], Request]]:
    """Return functions that build the same request each time, most of them plain; a session is several in a row."""
    kinds = ["logprobs", "grammar", "stop", "eos", "repetition", "trace", "session", "other client"]
    kind = rng.choice([*["plain"] * 8, *kinds])
    kind = "plain" if kind == "session" and not has_sessions else kind
    params: dict[str, Any] = {"max_tokens": rng.randrange(1, 60), "temperature": 0.0}
    if kind == "logprobs":
        params["logprobs"] = 0
    if kind == "grammar":
        params["structured_outputs"] = StructuredOutputsParams(regex="a*")
    if kind == "stop":
        params["stop_token_ids"] = rng.sample(range(VOCAB_SIZE), 4)
    if kind == "repetition":
        params["repetition_detection"] = RepetitionDetectionParams(1, 1, 2)
    priority, eos = rng.randrange(3) if is_priority else 0, rng.randrange(VOCAB_SIZE)
    choice = rng.randrange(8) if has_items else 0
    if has_items and rng.random() < 0.5:
        # To the end of an item.
        prompt = prompt[: sum(rng.choice(ITEM_PLACES))]

    def make(prompt_len: int | None = None, **session: Any) -> Request:
        sampling_params = SamplingParams(**params | session)
        if kind == "eos":
            sampling_params._eos_token_id = eos
        request = Request(
            request_id,
            prompt[:prompt_len],
            sampling_params,
            None,
            priority=priority,
            arrival_time=float(request_id[1:]),
            trace_headers={"traceparent": "x"} if kind == "trace" else None,
            client_index=int(kind == "other client"),
            block_hasher=HASHER,
            resumable=bool(session),
            mm_features=items_of(prompt[:prompt_len], choice) if has_items else [],
        )
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = SomeGrammar()  # type: ignore[assignment]
            request.structured_output_request.reasoning_ended = True
        return request

    if kind != "session":
        return [make]
    # It stops early, goes on with a much lower limit, and is closed.
    stops = list(range(0, VOCAB_SIZE, 5))
    first, second = (
        {"prompt_len": 30, "max_tokens": 30, "stop_token_ids": stops},
        {"prompt_len": 1, "max_tokens": 4},
    )
    return [lambda: make(**first), lambda: make(**second), make]


def test_more_requests_than_a_step_has_tokens_take_turns_as_in_vllm(make_config: MakeConfig) -> None:
    pair = Pair(make_config, depth=2, **OPTIONS["roomy"])
    pair.add(*(lambda i=i: make_request(f"r{i}", [i] * (20 + i), 60) for i in range(6)))
    for limit in (200, 4, 200):
        for side in pair.sides:
            side.scheduler.max_num_scheduled_tokens = limit
        for _ in range(12):
            pair.step()
    assert pair.num_batched_steps > 12


def test_requests_wait_for_their_tokens_where_nothing_stands_for_them(make_config: MakeConfig) -> None:
    pair = Pair(make_config, depth=2, is_async=False, **OPTIONS["roomy"])
    for side in pair.sides:
        # With runner V1 a request that was not in the step before is left to vLLM.
        side.scheduler.use_v2_model_runner = True
    pair.add(*(lambda i=i: make_request(f"r{i}", [i] * 20, 30) for i in range(3)))
    while pair.is_busy():
        pair.step()
    assert pair.num_batched_steps > 20


def test_a_steady_step_asks_nothing_request_by_request(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = make_simulation(
        make_config, num_blocks=60, block_size=16, max_num_seqs=8, depth=2, max_num_batched_tokens=200
    )
    for first, last in ((0, 4), (4, 6)):
        for index in range(first, last):
            simulation.scheduler.add_request(make_request(f"r{index}", [index] * (20 + index), 60))
        for _ in range(4):
            simulation.step()

    def refuse(*args: Any) -> None:
        raise AssertionError("a steady step looks at each request")

    monkeypatch.setattr(Scheduler, "schedule", refuse)
    monkeypatch.setattr(Scheduler, "update_from_output", refuse)
    monkeypatch.setattr(FastOutputs, "_which_are_usual", refuse)
    for _ in range(40):
        simulation.step()
    assert [len(simulation.outputs[f"r{index}"]) for index in range(6)] == [47] * 4 + [43] * 2


def test_the_fast_path_of_a_step_is_kept_until_its_output_or_a_later_one(make_config: MakeConfig) -> None:
    scheduler = make_simulation(make_config, num_blocks=60, block_size=16, max_num_seqs=8, depth=2).scheduler
    scheduler.add_request(make_request("a", [1] * 20, 60))
    steps = [scheduler.schedule() for _ in range(4)]
    assert scheduler._fast_outputs_of(SchedulerOutput.make_empty()) is None
    assert scheduler._fast_outputs_of(steps[2]) is not None
    assert scheduler._fast_outputs_of(steps[1]) is None
    assert scheduler._fast_outputs_of(steps[3]) is not None


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("num_logprobs", [None, 1])
def test_first_tokens_are_sent_before_the_tokens_of_running_requests(
    make_config: MakeConfig, is_on: bool, num_logprobs: int | None
) -> None:
    simulation = make_simulation(
        make_config, num_blocks=60, block_size=16, max_num_seqs=8, additional_config=batching(is_on)
    )
    scheduler, orders = simulation.scheduler, list[list[str]]()
    update = scheduler.update_from_output

    def note_order(*step: Any) -> Any:
        results = update(*step)
        orders.extend([output.request_id for output in result.outputs] for result in results.values())
        return results

    scheduler.update_from_output = note_order
    for request_id, prompt in (("a", [1] * 20), ("b", [2] * 20)):
        request = make_request(request_id, prompt, 30)
        # Log-probabilities take vLLM's own code for each request.
        request.sampling_params.logprobs = num_logprobs
        scheduler.add_request(request)
    for _ in range(3):
        simulation.step()
    assert orders[-1] == ["a", "b"]
    for request_id, prompt in (("c", [3] * 20), ("d", [4] * 20)):
        scheduler.add_request(make_request(request_id, prompt, 30))
    simulation.step()
    assert orders[-1] == ["c", "d", "a", "b"]
    simulation.step()
    assert sorted(orders[-1]) == ["a", "b", "c", "d"]
