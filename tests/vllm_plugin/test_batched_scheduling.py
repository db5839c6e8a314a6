"""Batched scheduling beside vLLM's own loops: the same random traffic, every step and every output field by field.

Workers check every cache slot that is read on either side.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from rose_backend.conformance.block_manager.pretended_model import expected_output
from rose_backend.draft_depth import draft_depths
from rose_backend.scheduling import MAX_WAITING_LOOKED_AT
from rose_backend.vllm_plugin.scheduler.decode_batch import DecodeBatch, DecodeRequestData, FastOutputs
from rose_backend.vllm_plugin.scheduler.scheduler import StepInFlight
from tests.gpu_matrix.drafters import write_with_mtp_head
from tests.support.eagle_checkpoints import write_eagle3_drafter
from tests.support.llama_checkpoints import write_checkpoint
from tests.support.vllm_plugin.configs import EVENTS, MakeConfig, connector
from tests.support.vllm_plugin.fake_connector import FakeConnector, FakeOffloading
from tests.support.vllm_plugin.fake_worker import STATE
from tests.support.vllm_plugin.lockstep import Pair, batching
from tests.support.vllm_plugin.simulation import (
    MAX_MODEL_LEN,
    NUM_DRAFTS,
    drafting,
    make_request,
    make_simulation,
)
from tests.support.vllm_plugin.traffic import KINDS, Traffic, make_hasher

HASHER = make_hasher()
DEPTHS: dict[str, dict[str, Any]] = {
    "sync": {"depth": 1},
    "async": {"depth": 2},
    "async deep": {"depth": 3},
    "pipelined": {"depth": 3, "is_async": False},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "runner V2": {"use_v2_model_runner": True},
    "no stats": {"log_stats": False},
    "metrics of requests": {"spec_decode_metrics_level": "detailed"},
}
ROOMY = {"num_blocks": 120, "block_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 200}
PRIORITY = {"scheduling_policy": "priority"}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "roomy": (ROOMY, tuple(DEPTHS)),
    "tight": ({"num_blocks": 24}, ("sync", "async", "async, runner V2", "pipelined")),
    "wide blocks": (
        {"num_blocks": 9, "block_size": 32, "max_num_seqs": 4, "max_num_batched_tokens": 37},
        ("sync", "async deep"),
    ),
    "no cache": ({"num_blocks": 60, "max_num_seqs": 12, "enable_prefix_caching": False}, ("async", "sync")),
    "events": ({"num_blocks": 40, "kv_events_config": EVENTS}, ("sync", "async")),
    "priority": ({"num_blocks": 22, "max_num_seqs": 6, **PRIORITY}, ("sync", "async", "async, no stats")),
    "watermark": ({"num_blocks": 30, "max_num_seqs": 6, "watermark": 0.2}, ("async",)),
    "both": ({"num_blocks": 22, **PRIORITY, "watermark": 0.1}, ("async deep", "pipelined")),
    # Far more requests than rows, or than blocks: a request waits in nearly every step.
    "crowd": (
        {"num_blocks": 120, "max_num_seqs": 10, "max_num_batched_tokens": 300},
        ("sync", "async, runner V2"),
    ),
    "crowd without room": ({"num_blocks": 30, "max_num_seqs": 40}, ("async",)),
    "images": ({"num_blocks": 40, "encoder_budget": 50}, ("sync", "async", "async, runner V2")),
    "images, tight": ({"num_blocks": 22, "encoder_budget": 60}, ("async deep", "pipelined")),
    "window": ({"num_blocks": 32, "windows": (None, 20)}, ("sync", "async")),
    "windows": (
        {"num_blocks": 52, "windows": (20, None, 20, 20), "max_num_batched_tokens": 37},
        ("async", "pipelined"),
    ),
    "windows, both": (
        {"num_blocks": 36, "windows": (None, 7, 60), **PRIORITY, "watermark": 0.1},
        ("sync", "async deep"),
    ),
    "window, no cache": (
        {"num_blocks": 28, "max_num_seqs": 12, "windows": (None, 33), "enable_prefix_caching": False},
        ("async",),
    ),
    "two full groups": (
        {"num_blocks": 30, "block_size": 32, "windows": (None, None, 33)},
        ("sync", "async deep"),
    ),
    "states": ({"num_blocks": 60, "windows": (STATE, None, STATE)}, ("sync", "async deep")),
    "states, tight": (
        {"num_blocks": 34, "windows": (STATE, None, STATE, STATE), "max_num_batched_tokens": 37},
        ("sync", "pipelined"),
    ),
    "states, both": (
        {"num_blocks": 46, "windows": (STATE, None), **PRIORITY, "watermark": 0.1},
        ("sync", "async"),
    ),
}


def make_pair(make_config: MakeConfig, depth: str, *connectors: Callable[[], Any], **options: Any) -> Pair:
    return Pair(make_config, *connectors, **{"block_size": 16, "max_num_seqs": 8, **DEPTHS[depth], **options})


@pytest.mark.parametrize(
    ("name", "depth"), [(name, depth) for name, (_, depths) in CASES.items() for depth in depths]
)
def test_every_step_and_output_is_vllms(make_config: MakeConfig, name: str, depth: str) -> None:
    options = CASES[name][0]
    depth, _, variant = depth.partition(", ")
    pair = make_pair(make_config, depth, **options)
    for side in pair.sides:
        # Whatever this vLLM takes by itself.
        for attribute, value in {"use_v2_model_runner": False, **VARIANTS.get(variant, {})}.items():
            setattr(side.scheduler, attribute, value)
    is_crowd, has_states = name.startswith("crowd"), name.startswith("states")
    # With asynchronous scheduling a turn's end takes back a token in flight, which a state has seen: refused.
    serves_sessions = not (has_states and depth.startswith("async"))
    kinds = tuple(kind for kind in KINDS if kind != "session" or serves_sessions)
    amount: dict[str, Any] = (
        {"num_requests": 80, "arrival_rate": 1.0} if is_crowd else {"num_requests": 50, "arrival_rate": 0.12}
    )
    if has_states:
        amount |= {"num_requests": 80, "num_stems": 1}
    # While a crowd waits without room, steps are split; those behind its last arrival are batched, so it comes twice.
    for seed in (11, 12) if is_crowd else (11,):
        has_items = name.startswith("images")
        Traffic(seed, **amount, burst=5, kinds=kinds, has_items=has_items, block_hasher=HASHER).run(pair)
    check_what_happened(pair, name, options, has_states)
    # Without placeholders a request waits for its token before it can be scheduled again.
    # In short pools with windows some request waits for blocks in nearly every step, which is then split.
    is_short = name.startswith(("window", "both", "two full groups")) or "tight" in name
    assert depth == "pipelined" or pair.num_batched_steps > (3 if is_short else 30)
    may_split = depth != "pipelined" and not {"scheduling_policy", "watermark"} & options.keys()
    assert (pair.num_split_steps > 15) == may_split
    assert pair.num_batched_tokens > pair.num_tokens // 3


def check_what_happened(pair: Pair, name: str, options: dict[str, Any], has_states: bool) -> None:
    """Check that traffic led to what a case is for."""
    side, stats = pair.stock, pair.stock.manager.stats
    if name.startswith("crowd"):
        assert pair.num_steps_with_waiting > 150
        assert name != "crowd" or pair.num_batched_with_waiting > 0.8 * pair.num_steps_with_waiting
    assert options["num_blocks"] >= 40 or side.num_preemptions > 0
    assert (side.worker.num_encoded > 20) == ("encoder_budget" in options)
    if options.get("enable_prefix_caching", True):
        assert min(stats.hit_tokens, stats.partial_hits, stats.clones) > 0, stats
        assert stats.evictions > 0 or options["num_blocks"] > 100
        copied = side.worker.num_copies * stats.bytes_per_block
        # A request that is preempted in the step of its admission needs its state no more.
        assert copied == stats.bytes_cloned or (has_states and 0 < copied < stats.bytes_cloned)
        assert (stats.checkpoints > 0) == (side.worker.num_zeroed > 0) == has_states
    assert name != "events" or len(pair.published[0]) > 20


CONNECTORS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "all kinds": (FakeConnector, {}),
    # Many at once begin alike: each would find what another one's load has left.
    "failing": (
        lambda: FakeConnector(share_failing=0.5, share_sent=0.0),
        {"num_stems": 6, "burst": 7, "arrival_rate": 0.125},
    ),
    "computed again": (
        lambda: FakeConnector(share_failing=0.5, share_sent=0.0),
        {"num_stems": 6, "burst": 7, "arrival_rate": 0.125},
    ),
    "failing, waited for": (lambda: FakeConnector(share_failing=0.5, is_async=False), {}),
    "failing meanwhile, events": (lambda: FakeConnector(share_failing=0.5, is_async=True), {}),
    "offloading": (FakeOffloading, {"num_stems": 8}),
    "offloading, outputs": (FakeOffloading, {"num_stems": 8}),
}
OFFLOADING = {"cpu_bytes_to_use": 1 << 20}


@pytest.mark.parametrize(
    ("name", "num_blocks", "depth"),
    [
        ("all kinds", 24, "sync"),
        ("all kinds", 24, "async deep"),
        ("failing", 100, "sync"),
        ("failing", 100, "async deep"),
        ("computed again", 24, "sync"),
        ("computed again", 24, "async"),
        ("computed again", 100, "async deep"),
        ("failing, waited for", 40, "sync"),
        ("failing, waited for", 40, "async deep"),
        ("failing meanwhile, events", 40, "sync"),
        ("failing meanwhile, events", 40, "async"),
        ("offloading", 24, "sync"),
        ("offloading", 24, "async"),
        ("offloading", 100, "async deep"),
        ("offloading, outputs", 24, "sync"),
        ("offloading, outputs", 24, "async"),
        ("offloading, outputs", 100, "async"),
        ("offloading, outputs", 100, "async deep"),
    ],
)
def test_steps_with_a_connector_are_vllms(
    make_config: MakeConfig, name: str, num_blocks: int, depth: str
) -> None:
    make_connector, traffic = CONNECTORS[name]
    config = connector("ExampleConnector")
    if name.startswith("offloading"):
        options = OFFLOADING | {"offload_prompt_only": "outputs" not in name}
        config = connector("OffloadingConnector", options)
    if "events" in name:
        config["kv_events_config"] = EVENTS
    pair = make_pair(make_config, depth, make_connector, num_blocks=num_blocks, **config)
    assert pair.batched.scheduler.defer_block_free == (depth != "sync")
    for side in pair.sides:
        side.scheduler.recompute_kv_load_failures = name == "computed again"
    traffic = {"num_requests": 120, "arrival_rate": 0.4, "num_stems": 25, "share_aborted": 0.1, **traffic}
    # Where results are late, the worker does not follow what is computed again.
    traffic["has_known_outputs"] = name != "computed again" or depth == "sync"
    ended = list(Traffic(3, **traffic, is_reset=False, block_hasher=HASHER).run(pair).values())
    assert min(pair.num_batched_steps, pair.num_split_steps) > 2
    # Failed loads are vLLM's code.
    assert pair.num_batched_tokens > pair.num_tokens * 0.4
    assert pair.stock.num_preemptions > 0 or num_blocks > 24
    batched, stock = (vars(side.worker.connector) for side in pair.sides)
    if name.startswith("offloading"):
        counts = {what: count for what, count in stock.items() if what.startswith("num_")}
        assert counts == {what: batched[what] for what in counts}
        assert min(counts.values()) > 0 or num_blocks > 24, counts
    else:
        counts = stock["counts"]
        assert counts == batched["counts"] and sum(counts.values()) > 20
        assert name != "all kinds" or min(count for what, count in counts.items() if what != "failed") > 0
        assert counts["failed"] > 5 or name == "all kinds"
    assert "aborted" in ended
    assert (ended.count("failed") > 5) == name.startswith("failing")
    stats = pair.stock.manager.stats
    assert min(stats.hit_tokens, stats.partial_hits, stats.clones) > 0, stats
    assert stats.evictions > 0 or num_blocks > 24


def test_more_requests_than_a_step_has_tokens_take_turns_as_in_vllm(make_config: MakeConfig) -> None:
    pair = make_pair(make_config, "async", **ROOMY)
    pair.add(*(lambda i=i: make_request(f"r{i}", [i] * (20 + i), 60) for i in range(6)))
    for limit in (200, 4, 200):
        for side in pair.sides:
            side.scheduler.max_num_scheduled_tokens = limit
        for _ in range(12):
            pair.step()
    assert pair.num_batched_steps > 12


def test_steps_of_drafts_are_no_longer_than_workers_take(make_config: MakeConfig, draft: Drafting) -> None:
    pair = make_pair(make_config, "async", **draft(), **{**ROOMY, "max_num_batched_tokens": 40})
    for side in pair.sides:
        side.scheduler.max_num_scheduled_tokens, side.scheduler._may_split = 400, False
    pair.add(*(lambda i=i: make_request(f"r{i}", [i] * 2, 20 + 2 * i) for i in range(12)))
    pair.step()
    assert len(pair.scheduler.running) == 12
    while pair.is_busy:
        pair.step()
    # Of no more than ten requests, or eight with an input more than tokens.
    assert pair.num_batched_steps > 0


def test_requests_wait_for_their_tokens_where_nothing_stands_for_them(make_config: MakeConfig) -> None:
    pair = make_pair(make_config, "async", **ROOMY, is_async=False)
    for side in pair.sides:
        # With runner V1 a request that was not in the step before is left to vLLM.
        side.scheduler.use_v2_model_runner = True
    pair.add(*(lambda i=i: make_request(f"r{i}", [i] * 20, 30) for i in range(3)))
    while pair.is_busy:
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


def test_offloading_is_told_of_decodes_whose_blocks_change(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = connector("OffloadingConnector", OFFLOADING | {"offload_prompt_only": False})
    offloading = FakeOffloading()
    simulation = make_simulation(
        make_config,
        **{"num_blocks": 60, "block_size": 16, "max_num_seqs": 8, "depth": 2, "connector": offloading},
        **config,
    )
    for index in range(6):
        request = make_request(f"r{index}", [index] * (20 + index), 60, block_hasher=HASHER)
        simulation.scheduler.add_request(request)
    for _ in range(4):
        simulation.step()
    told: list[int] = []
    build = simulation.scheduler.connector.build_connector_meta

    def note(output: SchedulerOutput) -> Any:
        told.append(len(output.num_scheduled_tokens))
        return build(output)

    monkeypatch.setattr(simulation.scheduler.connector, "build_connector_meta", note)
    num_stored = offloading.num_stored
    for _ in range(48):
        simulation.step()
    # Each request fills three blocks, and gets the next one in the same step.
    assert sum(told) == 18 and len(told) == 48
    while offloading.is_busy or simulation.in_flight:
        simulation.step()
    assert offloading.num_stored >= num_stored + 18


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


# With drafts a decode computes all of them, and what was rejected is taken back when its output arrives.
DRAFTED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "some right": (ROOMY, ("async", "async deep", "async, no stats", "async, metrics of requests")),
    "all right": (ROOMY, ("async",)),
    "all wrong": (ROOMY, ("async",)),
    "one draft": ({"num_blocks": 40}, ("async",)),
    "15 drafts": ({"num_blocks": 60}, ("async",)),
    "tight": ({"num_blocks": 24}, ("async", "async deep")),
    "wide blocks": ({"num_blocks": 9, "block_size": 32, "max_num_seqs": 4}, ("async deep",)),
    "no cache": ({"num_blocks": 60, "max_num_seqs": 12, "enable_prefix_caching": False}, ("async",)),
    "events": ({"num_blocks": 40, "kv_events_config": EVENTS}, ("async",)),
    "both": ({"num_blocks": 30, **PRIORITY, "watermark": 0.1}, ("async", "async deep")),
    "crowd": (CASES["crowd"][0], ("async",)),
    "crowd without room": (CASES["crowd without room"][0], ("async",)),
    # Fewer than all decodes need with all their drafts.
    "few tokens": (ROOMY | {"max_num_batched_tokens": 40}, ("async",)),
}
SHARES_RIGHT = {"all right": 1.0, "all wrong": 0.0}
Drafting = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    """Return ``drafting`` of a head, which writes behind a step's tokens and reads one ahead."""
    path = write_checkpoint(tmp_path_factory.mktemp("model"), "llama", hidden_size=128)
    write_eagle3_drafter(path, NUM_DRAFTS)
    return partial(drafting, model=path, drafter={"method": "eagle3", "model": str(path / "head")})


@pytest.fixture(params=["n-grams", "EAGLE-3", "draft model"])
def draft(request: pytest.FixtureRequest, tiny_model_path: Path) -> Drafting:
    """Return ``drafting`` of each drafter: a model has one more input than tokens, and reads nothing ahead."""
    if request.param == "draft model":
        return partial(drafting, drafter={"method": "draft_model", "model": str(tiny_model_path)})
    return request.getfixturevalue("eagle3") if request.param == "EAGLE-3" else drafting


@pytest.fixture(params=["n-grams", "EAGLE-3"])
def draft_or_not(request: pytest.FixtureRequest) -> Drafting:
    """Return ``drafting`` of each drafter whose drafts may be left out."""
    return request.getfixturevalue("eagle3") if request.param == "EAGLE-3" else drafting


def is_head(drafter: dict[str, Any]) -> bool:
    return drafter["worker_options"].get("drafter_reads_ahead", False)


def skip_if_refused(name: str, drafter: dict[str, Any]) -> None:
    if name == "events" and is_head(drafter) and hasattr(VllmConfig, "num_hash_lookahead_tokens"):
        pytest.skip("refused beside a head: from 0.33 on hashes of blocks depend on tokens behind them")


@pytest.mark.parametrize(
    ("name", "depth"), [(name, depth) for name, (_, depths) in DRAFTED.items() for depth in depths]
)
def test_every_step_and_output_with_drafts_is_vllms(
    make_config: MakeConfig, draft: Drafting, name: str, depth: str
) -> None:
    run_with_drafts(make_config, draft, name, depth)


def test_every_step_and_output_with_an_mtp_module_is_vllms(make_config: MakeConfig, tmp_path: Path) -> None:
    draft = partial(drafting, model=write_with_mtp_head(tmp_path), drafter={"method": "mtp"})
    run_with_drafts(make_config, draft, "tight", "async")


def run_with_drafts(make_config: MakeConfig, draft: Drafting, name: str, depth: str) -> None:
    """Run random traffic through both schedulers, of a case of ``DRAFTED``."""
    options = {"max_num_batched_tokens": 100, **DRAFTED[name][0]}
    num_drafts = {"one draft": 1, "15 drafts": 15}.get(name, NUM_DRAFTS)
    depth, _, variant = depth.partition(", ")
    drafter = draft(num_drafts, SHARES_RIGHT.get(name, 0.7))
    skip_if_refused(name, drafter)
    pair = make_pair(make_config, depth, **drafter, **options)
    for side in pair.sides:
        for attribute, value in VARIANTS.get(variant, {}).items():
            setattr(side.scheduler, attribute, value)
    is_crowd = name.startswith("crowd")
    amount: dict[str, Any] = (
        {"num_requests": 80, "arrival_rate": 1.0} if is_crowd else {"num_requests": 60, "arrival_rate": 0.2}
    )
    for seed in (11, 12) if is_crowd else (11,):
        Traffic(seed, **amount, burst=5, kinds=KINDS, block_hasher=HASHER).run(pair)
    worker, stats = pair.stock.worker, pair.stock.manager.stats
    assert (worker.num_accepted > 400) == (name != "all wrong")
    # Drafts behind the end of a text, and of prompts that are padded with them, are wrong. A head leaves two tokens of
    # a prompt that is found. Drafters with K/V of their own need more blocks.
    has_head, has_cache = is_head(drafter), "num_lookahead" in drafter["worker_options"]
    assert worker.num_rejected > ((10 if has_head else 50) if name == "all right" else 200)
    assert options["num_blocks"] >= 40 or pair.stock.num_preemptions > 5
    if options.get("enable_prefix_caching", True):
        assert min(stats.hit_tokens, stats.partial_hits, stats.clones) > 0, stats
    assert pair.num_batched_steps > (10 if has_cache else 20)
    assert (pair.num_split_steps > 25) == (name != "both")
    # Metrics of a request are counted by vLLM's code, request by request.
    has_fast_outputs = variant != "metrics of requests"
    assert (pair.num_batched_tokens > pair.num_tokens // 2) == has_fast_outputs
    assert has_fast_outputs or pair.num_batched_tokens == 0


class ChosenDrafts:
    """Stands in for ``DraftDepth``: any number of drafts, at random and the same for all that ask in a step."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = self.chosen = num_drafts
        self.depths = draft_depths(num_drafts)
        self.accepted: list[float] = []
        self.timed: set[int] = set()
        self._rng = random.Random(5)

    def turn(self) -> None:
        if self._rng.random() < 0.15:
            self.chosen = self._rng.choice([depth for depth in self.depths if depth != self.chosen])

    def choose(self, num_requests: int) -> int:
        return self.chosen

    def note_accepted(self, shares: list[float]) -> None:
        assert len(shares) <= self.num_drafts and [1, *shares, 0] == sorted([1, *shares, 0], reverse=True)
        self.accepted.append(sum(shares))

    def note_time(self, depth: int, num_requests: int, seconds: float) -> None:
        assert depth in self.depths and num_requests > 0 and seconds > 0
        self.timed.add(depth)


@pytest.mark.parametrize(
    ("name", "depth"),
    [(name, depth) for name, (_, depths) in DRAFTED.items() for depth in depths if "," not in depth],
)
def test_drafts_come_and_go_as_in_vllm(
    make_config: MakeConfig, draft_or_not: Drafting, name: str, depth: str
) -> None:
    options = {"max_num_batched_tokens": 100, **DRAFTED[name][0]}
    num_drafts = {"one draft": 1, "15 drafts": 15}.get(name, NUM_DRAFTS)
    drafter = draft_or_not(num_drafts, SHARES_RIGHT.get(name, 0.7))
    skip_if_refused(name, drafter)
    pair = make_pair(make_config, depth, **drafter, **options)
    chosen = ChosenDrafts(num_drafts)
    batched, stock = (side.scheduler for side in pair.sides)
    batched._draft_depth = chosen
    step, depths, num_changes = pair.step, list[int](), 0

    def step_of_chosen() -> None:
        nonlocal num_changes
        last = chosen.chosen
        chosen.turn()
        num_changes += last != chosen.chosen
        for scheduler in (batched, stock):
            scheduler._draft_next(chosen.chosen)
        depths.append(batched._num_drafts)
        step()

    pair.step = pair.checked_step = step_of_chosen  # type: ignore[method-assign]
    Traffic(11, num_requests=60, arrival_rate=0.2, burst=5, kinds=KINDS, block_hasher=HASHER).run(pair)
    assert num_changes > 10 and set(depths) == set(chosen.depths)
    assert pair.stock.worker.num_accepted > (0 if name == "all wrong" else 100) - 1
    assert pair.num_batched_tokens > pair.num_tokens // 2
    assert chosen.accepted and (chosen.timed == set(chosen.depths) or chosen.timed > {0, num_drafts})


def test_a_step_whose_requests_differ_in_drafts_is_not_timed(
    make_config: MakeConfig, draft_or_not: Drafting
) -> None:
    scheduler = make_simulation(make_config, depth=2, **draft_or_not(), **ROOMY).scheduler
    scheduler._draft_depth = chosen = ChosenDrafts(NUM_DRAFTS)
    fast_outputs = FastOutputs([], [], 1)
    for counts in ({"a": 1, "b": 3}, {"a": 1, "b": 3}, {"a": 2, "b": 2}, {"a": 1, "b": 3}, {"a": 2, "b": 2}):
        output: Any = SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=4)
        scheduler._note_time(StepInFlight(output, fast_outputs, 0.0, 0))
        assert chosen.timed == set()
    scheduler._note_time(StepInFlight(output, fast_outputs, 0.0, 0))
    assert chosen.timed == {1}


def test_requests_with_a_seed_keep_their_drafts(make_config: MakeConfig, draft_or_not: Drafting) -> None:
    options = {"additional_config": {"rose": {"adaptive_drafts": True}}, **ROOMY}
    simulation = make_simulation(make_config, depth=2, **draft_or_not(), **options)
    scheduler = simulation.scheduler
    chosen = ChosenDrafts(NUM_DRAFTS)
    scheduler._draft_depth, chosen.chosen = chosen, 0
    scheduler.add_request(make_request("plain", [1] * 20, 200))
    for _ in range(8):
        simulation.step()
    assert scheduler._num_drafts == 0
    greedy, drawn = make_request("greedy", [2] * 20, 12), make_request("drawn", [3] * 20, 40)
    greedy.sampling_params.seed = drawn.sampling_params.seed = 7
    drawn.sampling_params.temperature = 0.5
    scheduler.add_request(greedy)
    for _ in range(4):
        simulation.step()
    assert scheduler._num_drafts == 0
    scheduler.add_request(drawn)
    steps, schedule = list[Any](), scheduler.schedule
    scheduler.schedule = lambda *args: steps.append(schedule(*args)) or steps[-1]
    while "drawn" in scheduler.requests:
        simulation.step()
    of_drawn = [step for step in steps if "drawn" in step.num_scheduled_tokens]
    # From the step on that computes the prompt.
    assert all(step.num_spec_tokens_to_schedule == NUM_DRAFTS for step in of_drawn)
    assert all(len(step.scheduled_spec_decode_tokens["drawn"]) == NUM_DRAFTS for step in of_drawn[1:])
    for _ in range(4):
        simulation.step()
    assert scheduler._num_drafts == 0


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize(("share_right", "expected"), [(1.0, NUM_DRAFTS), (0.0, 0)])
def test_drafts_are_made_where_they_pay(
    make_config: MakeConfig,
    draft_or_not: Drafting,
    monkeypatch: pytest.MonkeyPatch,
    share_right: float,
    expected: int,
    is_fast: bool,
) -> None:
    """With a clock by which verifying takes twice as long.

    Also where vLLM's code processes the tokens of each request, and more requests wait than there is room for.
    """
    options = {"additional_config": {"rose": {"adaptive_drafts": True}}, **ROOMY}
    simulation = make_simulation(make_config, depth=2, **draft_or_not(share_right=share_right), **options)
    scheduler, now = simulation.scheduler, 0.0
    monkeypatch.setattr("rose_backend.vllm_plugin.scheduler.scheduler.time.perf_counter", lambda: now)
    update, depths = scheduler.update_from_output, list[int]()

    def update_later(output: Any, *args: Any) -> Any:
        nonlocal now
        now += 2.0 if output.scheduled_spec_decode_tokens else 1.0
        return update(output, *args)

    scheduler.update_from_output = update_later
    scheduler.max_num_running_reqs = 256
    for index in range(3 if is_fast else 20):
        request = make_request(f"r{index}", [index] * 20, 120)
        request.trace_headers = None if is_fast else {"traceparent": "some"}
        scheduler.add_request(request)
    while simulation.is_busy:
        simulation.step()
        depths.append(scheduler._num_drafts)
    # Without a trial of the other it would not be known.
    assert set(depths) == set(draft_depths(NUM_DRAFTS))
    assert depths.count(expected) > 0.6 * len(depths)


def test_drafts_that_nobody_can_look_up_are_tried_now_and_then(
    make_config: MakeConfig, eagle3: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that is never right, and from some token on always; verifying takes twice as long."""
    options = {"additional_config": {"rose": {"adaptive_drafts": True}}, **ROOMY, "num_blocks": 500}
    simulation = make_simulation(make_config, depth=2, **eagle3(share_right=0.0), **options)
    scheduler, now, depths = simulation.scheduler, 0.0, list[int]()
    # Nobody looks n-grams up in their place.
    assert scheduler._shadow_drafts is None
    monkeypatch.setattr("rose_backend.vllm_plugin.scheduler.scheduler.time.perf_counter", lambda: now)
    update = scheduler.update_from_output

    def update_later(output: Any, *args: Any) -> Any:
        nonlocal now
        now += 2.0 if output.scheduled_spec_decode_tokens else 1.0
        return update(output, *args)

    scheduler.update_from_output = update_later
    for step in range(4000):
        if len(scheduler.requests) < 3:
            scheduler.add_request(make_request(f"r{step}", [step % 90] * 20, 120))
        if step == 2000:
            simulation.worker._share_right = 1.0
        simulation.step()
        depths.append(scheduler._num_drafts)
    wrong, right = depths[200:2000], depths[-800:]
    # What trials lose is what a step with drafts takes longer.
    assert 0 < len(wrong) - wrong.count(0) < 0.03 * len(wrong)
    assert right.count(NUM_DRAFTS) > 0.9 * len(right)


def test_heads_make_no_drafts_that_no_request_of_a_step_uses(
    make_config: MakeConfig, eagle3: Drafting
) -> None:
    """As vLLM's scheduler says from 0.33 on of what it schedules itself, here only prompts."""
    simulation = make_simulation(make_config, depth=2, **eagle3(), **ROOMY)
    scheduler, unused = simulation.scheduler, {"a", "b", "unused"}
    scheduler.can_skip_drafts, schedule = True, Scheduler.schedule
    scheduler._drafts_unused = lambda request, *counts: request.request_id in unused
    skipped: list[tuple[bool, set[str]]] = []

    def schedule_rest(*args: Any) -> SchedulerOutput:
        output: SchedulerOutput = schedule(scheduler, *args)
        output.skip_drafts = unused.issuperset(output.num_scheduled_tokens)
        return output

    run = simulation.worker.run

    def note(output: Any, requests: Any) -> Any:
        skipped.append((getattr(output, "skip_drafts", False), {*output.num_scheduled_tokens}))
        return run(output, requests)

    simulation.worker.run = note  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", lambda self, *args: schedule_rest(*args))
        for names in ({"a": 60, "b": 50}, {"used": 20}, {"unused": 20}):
            for name, max_tokens in names.items():
                scheduler.add_request(make_request(name, [len(skipped)] * 20, max_tokens))
            for _ in range(6):
                simulation.step()
        simulation.run()
    of_steps = [(is_skipped, ids) for is_skipped, ids in skipped if ids]
    assert {is_skipped for is_skipped, _ in of_steps} == {True, False}
    assert all(is_skipped == (ids <= unused) for is_skipped, ids in of_steps)


@pytest.mark.parametrize("share_right", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("num_drafts", [1, 7])
def test_drafts_reach_the_longest_sequence_as_in_vllm(
    make_config: MakeConfig, draft: Drafting, num_drafts: int, share_right: float
) -> None:
    pair = make_pair(make_config, "async", **draft(num_drafts, share_right), **ROOMY)
    lengths = range(MAX_MODEL_LEN - 50, MAX_MODEL_LEN, 5)
    pair.add(*(lambda n=n: make_request(f"r{n}", [n % 97] * n, MAX_MODEL_LEN) for n in lengths))
    while pair.is_busy:
        pair.step()
    assert [len(pair.outputs[f"r{n}"]) for n in lengths] == [MAX_MODEL_LEN - n for n in lengths]
    assert pair.num_batched_steps + pair.num_split_steps > 5


@pytest.mark.parametrize("share_right", [1.0, 0.7])
def test_a_stop_inside_drafts_ends_a_steady_batch_as_in_vllm(
    make_config: MakeConfig, draft: Drafting, share_right: float
) -> None:
    pair = make_pair(make_config, "async", **draft(share_right=share_right), **ROOMY)

    def make(index: int) -> Request:
        prompt = [index] * (20 + index)
        request = make_request(f"r{index}", prompt, 90)
        request.sampling_params.stop_token_ids = [expected_output(prompt, 90)[40 + 5 * index]]
        return request

    pair.add(*(lambda index=index: make(index) for index in range(6)))
    while pair.is_busy:
        pair.step()
    lengths = [len(pair.outputs[f"r{index}"]) for index in range(6)]
    assert lengths[0] < 60 and max(lengths) < 90 and pair.num_batched_steps > 10


def test_what_a_batch_has_rejected_is_no_other_batchs(make_config: MakeConfig, draft: Drafting) -> None:
    pair = make_pair(make_config, "async", **draft(), **ROOMY)
    pair.add(*(lambda index=index: make_request(f"r{index}", [index] * 20, 90) for index in range(4)))
    for _ in range(20):
        pair.step()
        for side in pair.sides:
            # A batch of the same requests otherwise, while a step of the one before is in flight.
            side.scheduler.running.reverse()
        pair.step()
    assert pair.num_batched_steps > 30


def test_a_part_of_a_prompt_as_long_as_a_decode_is_none(make_config: MakeConfig) -> None:
    options = {**ROOMY, "max_num_batched_tokens": 40, "enable_prefix_caching": False}
    pair = make_pair(make_config, "async", **drafting(share_right=0.0), **options)
    for side in pair.sides:
        # With statistics a request has events after a preemption, and is left to vLLM for them.
        side.scheduler.log_stats = False
    request = pair.add(lambda: make_request("a", [1] * 70, 60))
    while request.num_tokens < 80 + 1 + NUM_DRAFTS:
        pair.step()
    # All is computed again: twice 40 tokens, and as many as a decode has, which yield one.
    pair.for_all(lambda scheduler: scheduler.reset_prefix_cache(reset_running_requests=True))
    while pair.is_busy:
        pair.step()
    assert request.num_preemptions == 1 and len(pair.outputs["a"]) == 60


def test_a_decode_without_tokens_is_left_to_vllm(make_config: MakeConfig) -> None:
    pair = make_pair(make_config, "async", **drafting(), **ROOMY)
    pair.add(*(lambda index=index: make_request(f"r{index}", [index] * 20, 90) for index in range(3)))
    for _ in range(12):
        pair.step()
    for side in pair.sides:
        _, result = side.in_flight[0]
        result.sampled_token_ids[1], result.logprobs = [], None
    for side in pair.sides:
        side.execute = lambda output: None  # The worker knows nothing of it.
    num_tokens = len(pair.outputs["r1"])
    pair.step()
    assert len(pair.outputs["r1"]) == num_tokens and pair.num_batched_steps > 5


def test_prompts_of_a_single_token_are_padded_beside_decodes_as_in_vllm(make_config: MakeConfig) -> None:
    pair = make_pair(make_config, "async", **drafting(), **ROOMY)
    # A prompt without a hit beside no decode, and then beside some; and one with a hit.
    for name, prompt in (("a", [1]), ("b", [2] * 20), ("c", [3]), ("d", [2] * 20), ("e", [2] * 30)):
        pair.add(lambda name=name, prompt=prompt: make_request(name, prompt, 60))
        for _ in range(4):
            pair.step()
    while pair.is_busy:
        pair.step()
    assert pair.num_batched_steps > 20 and pair.num_split_steps > 0


def note_padded(pair: Pair) -> list[str]:
    """Return the requests that vLLM has padded with drafts as it admitted them, as they come."""
    schedule, padded = pair.scheduler.schedule, list[str]()

    def noting(*args: Any) -> Any:
        output = schedule(*args)
        new = {each.req_id for each in output.scheduled_new_reqs}
        padded.extend(new & output.scheduled_spec_decode_tokens.keys())
        return output

    pair.scheduler.schedule = noting
    return padded


@pytest.mark.parametrize("num_decodes", [1, 3, 8])
@pytest.mark.parametrize("place", [0, 4, 9, 30])
def test_waiting_prompts_of_a_single_token_are_padded_as_in_vllm(
    make_config: MakeConfig, draft: Drafting, place: int, num_decodes: int
) -> None:
    # Eight rows: some are free, or each has a decode and the prompt waits for its end.
    pair = make_pair(make_config, "async", **draft(), **{**ROOMY, "max_num_seqs": 8})
    padded = note_padded(pair)
    pair.add(
        *(lambda i=i: make_request(f"r{i}", [i] * (20 + i), 50 + 7 * (i % 3)) for i in range(num_decodes))
    )
    for _ in range(6):
        pair.step()
    others = [lambda i=i: make_request(f"w{i}", [40 + i] * (10 + i % 7), 12 + i % 5) for i in range(30)]
    pair.add(*others[:place], lambda: make_request("single", [7], 20), *others[place:])
    while pair.is_busy:
        pair.step()
    assert len(pair.outputs["single"]) == 20
    assert padded == ["single"]
    assert pair.num_batched_steps > 5 and pair.num_split_steps > 10


@pytest.mark.parametrize("depth", ["async", "async deep"])
@pytest.mark.parametrize("num_blocks", [26, 120])
def test_single_tokens_among_other_prompts_are_padded_as_in_vllm(
    make_config: MakeConfig, draft: Drafting, num_blocks: int, depth: str
) -> None:
    # In the small pool prompts wait for blocks while rows are free.
    pair = make_pair(make_config, depth, **draft(), **{**ROOMY, "num_blocks": num_blocks})
    padded, rng, num_added = note_padded(pair), random.Random(5), 0
    while pair.is_busy or num_added < 160:
        for _ in range(rng.choice([0, 0, 0, 0, 3, 12]) if num_added < 160 else 0):
            prompt = [rng.randrange(90)] * rng.choice([1, 1, 5, 40, 90])
            max_tokens, name = rng.randrange(1, 30), f"r{num_added}"
            pair.add(lambda name=name, prompt=prompt, n=max_tokens: make_request(name, prompt, n))
            num_added += 1
        pair.step()
    assert len(padded) > 20 and pair.num_split_steps > 50
    assert pair.stock.num_preemptions > 0 or num_blocks > 26


@pytest.mark.parametrize("what", ["blocked", "stale", "holding blocks"])
def test_single_tokens_behind_what_is_passed_over_are_padded_as_in_vllm(
    make_config: MakeConfig, what: str
) -> None:
    pair = make_pair(make_config, "async", **drafting(), **{**ROOMY, "max_num_seqs": 8})
    padded = note_padded(pair)
    pair.add(*(lambda i=i: make_request(f"r{i}", [i] * 20, 90) for i in range(4)))
    for _ in range(6):
        pair.step()
    pair.add(
        *(lambda i=i: make_request(f"w{i}", [9, i], 3) for i in range(100)),
        lambda: make_request("single", [7], 20),
    )
    for side in pair.sides:
        *others, single = side.scheduler.waiting
        if what == "holding blocks":
            # As one that a connector has loaded whole: its last token is computed again.
            side.scheduler.waiting.remove_request(single)
            side.scheduler.kv_holding_waiting.add_request(single)
            continue
        for request in others:
            if what == "blocked":
                request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            else:
                request.num_stale_output_tokens = 1
    pair.step()
    assert padded == ["single"] and pair.num_split_steps > 0


def test_a_single_token_beside_a_prompt_that_waits_for_its_items_is_padded_as_in_vllm(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(make_config, "async", **drafting(), **{**ROOMY, "max_num_batched_tokens": 60})
    padded = note_padded(pair)
    pair.add(*(lambda i=i: make_request(f"r{i}", [i] * 10, 90) for i in range(4)))
    for _ in range(6):
        pair.step()
    pair.add(lambda: make_request("long", [7] * 100, 20))
    pair.step()
    pair.add(lambda: make_request("single", [8], 20))
    for side in pair.sides:
        scheduler = side.scheduler
        assert scheduler.running[-1].is_prefill_chunk
        # As where the encoder has no room for another item.
        scheduler._try_schedule_encoder_inputs = lambda *args, **options: ([], 0, args[3], [], [])
    monkeypatch.setattr(Request, "has_encoder_inputs", property(lambda request: request.request_id == "long"))
    num_split_steps = pair.num_split_steps
    pair.step()
    assert padded == ["single"] and pair.num_split_steps == num_split_steps + 1


@pytest.mark.parametrize("is_blocked", [False, True])
def test_a_long_queue_is_not_looked_through(make_config: MakeConfig, is_blocked: bool) -> None:
    options = {**ROOMY, "num_blocks": 20, "max_num_batched_tokens": 100}
    simulation = make_simulation(make_config, depth=2, **drafting(share_right=0.0), **options)
    scheduler = simulation.scheduler
    for index in range(3):
        simulation.add(lambda index=index: make_request(f"r{index}", [index] * 40, 60))
    for _ in range(6):
        simulation.step()
    num_looked_at = 0

    class Queue(FCFSRequestQueue):
        def __iter__(self) -> Iterator[Request]:
            nonlocal num_looked_at
            for request in super().__iter__():
                num_looked_at += 1
                yield request

    # The first has no room beside these decodes, and rows are free.
    prompts = [[50] * 150] * 10_000 + [[7]]
    scheduler.waiting = Queue(make_request(f"w{i}", prompt, 5) for i, prompt in enumerate(prompts))
    for request in deque(scheduler.waiting):
        scheduler.requests[request.request_id] = request
        if is_blocked:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    num_looked_at, schedule_rest, leading = 0, scheduler._schedule_rest, list[int]()

    def note(batch: DecodeBatch, *args: Any) -> Any:
        leading.append(len(batch.running))
        return schedule_rest(batch, *args)

    scheduler._schedule_rest = note
    for _ in range(10):
        simulation.step()
    # Behind many that vLLM passes over it may come to the last one: a decode is left to it.
    assert leading == [2 if is_blocked else 3] * 10
    assert num_looked_at <= 10 * (1 + MAX_WAITING_LOOKED_AT if is_blocked else options["max_num_seqs"])


def test_a_steady_step_with_drafts_asks_nothing_request_by_request(
    make_config: MakeConfig, draft: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = make_simulation(make_config, depth=2, **draft(), **{**ROOMY, "block_size": 64})
    for index in range(6):
        simulation.scheduler.add_request(make_request(f"r{index}", [index] * (20 + index), 120))
    for _ in range(4):
        simulation.step()

    def refuse(*args: Any) -> None:
        raise AssertionError("a steady step looks at each request")

    monkeypatch.setattr(Scheduler, "schedule", refuse)
    monkeypatch.setattr(Scheduler, "update_from_output", refuse)
    monkeypatch.setattr(FastOutputs, "_which_are_usual", refuse)
    monkeypatch.setattr(DecodeBatch, "_read_again", refuse)
    for _ in range(20):
        simulation.step()
    counts = [len(simulation.outputs[f"r{index}"]) for index in range(6)]
    assert min(counts) > 30 and len(set(counts)) > 1
    # Drafts are counted with their step, and once.
    assert simulation.scheduler.make_stats().spec_decoding_stats is None


def test_what_a_step_says_does_not_change_when_drafts_are_rejected(make_config: MakeConfig) -> None:
    simulation = make_simulation(make_config, depth=2, **drafting(share_right=0.3), **ROOMY)
    for index in range(3):
        simulation.scheduler.add_request(make_request(f"r{index}", [index] * 20, 60))
    schedule, read_late, numbers = simulation.scheduler.schedule, list[Any](), list[Any]()

    def note(*args: Any) -> Any:
        output = schedule(*args)
        data = output.scheduled_cached_reqs
        if isinstance(data, DecodeRequestData):
            # As one that nobody has read.
            request_ids, blocks = data.req_ids, data.new_block_ids
            read_late.append(DecodeRequestData.of(request_ids, blocks, data._batch_numbers, data._num_more))
            numbers.append((list(data.num_computed_tokens), list(data.num_output_tokens)))
            # vLLM's engine core puts drafts that a grammar has looked at in their places.
            output.scheduled_spec_decode_tokens["r0"] = [-1, -1, 7]
        return output

    simulation.scheduler.schedule = note
    for _ in range(12):
        simulation.step()
    assert len(numbers) > 8 and simulation.worker.num_rejected > 20
    assert [(data.num_computed_tokens, data.num_output_tokens) for data in read_late] == numbers
    assert schedule().scheduled_spec_decode_tokens == {f"r{index}": [-1] * NUM_DRAFTS for index in range(3)}
