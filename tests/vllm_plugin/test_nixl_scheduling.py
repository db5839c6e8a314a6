"""Prefill and decode in two engines: the scheduler's side of vLLM's ``NixlConnector`` over Rose's block manager."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import RequestStatus

from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.fake_nixl import Receiver, Sender
from tests.support.vllm_plugin.fake_worker import VOCAB_SIZE, expected_output
from tests.support.vllm_plugin.lockstep import batching
from tests.support.vllm_plugin.simulation import Simulation, make_request, make_simulation

init_none_hash(sha256)
HASHER = get_request_block_hasher(16, sha256)
DEPTHS = {"sync": (1, False), "async": (2, True)}


@dataclass
class Engines:
    """Both engines, and what has become of requests."""

    prefill: Simulation
    decode: Simulation
    sender: Sender
    receiver: Receiver
    transfers: dict[str, Any] = field(default_factory=dict)
    """What the first engine has told of the prompts that it has computed, until the second one is asked to go on."""
    requests: dict[str, Any] = field(default_factory=dict)
    """Of the second engine."""
    ended: dict[str, str] = field(default_factory=dict)
    """How requests of the second engine ended that were cut short."""

    @property
    def is_busy(self) -> bool:
        """Whether anything is left to do."""
        is_serving = self.prefill.scheduler.requests or self.decode.scheduler.requests
        return bool(is_serving or self.sender.kept or self.receiver.loading)

    def step(self) -> None:
        """Run a step of both."""
        for side in (self.prefill, self.decode):
            side.step()
            side.manager.check_integrity()


def make_engines(
    make_config: MakeConfig, depth: str, *, is_batched: bool, num_decode_blocks: int, share_failing: float
) -> Engines:
    num_in_flight, is_async = DEPTHS[depth]
    sender = Sender()
    receiver = Receiver(sender, share_failing)
    sides = [
        make_simulation(
            make_config,
            depth=num_in_flight,
            is_async=is_async,
            connector=connector,
            num_blocks=num_blocks,
            block_size=16,
            max_num_seqs=8,
            additional_config=batching(is_batched),
            kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role=role),
        )
        for role, connector, num_blocks in (
            ("kv_producer", sender, 100),
            ("kv_consumer", receiver, num_decode_blocks),
        )
    ]
    engines = Engines(*sides, sender, receiver)
    finish = engines.prefill.scheduler.connector.request_finished_all_groups

    def keep_parameters(request: Any, block_ids: Any) -> Any:
        is_kept, parameters = finish(request, block_ids)
        if is_kept:
            engines.transfers[request.request_id] = parameters
        return is_kept, parameters

    engines.prefill.scheduler.connector.request_finished_all_groups = keep_parameters
    return engines


def run_traffic(engines: Engines, num_requests: int = 150) -> dict[str, list[int]]:
    """Have prompts that share beginnings computed here and continued there; abort some of either side."""
    draw, expected = random.Random(3), dict[str, list[int]]()
    stems = [[draw.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(12)]
    prompts: dict[str, list[int]] = {}
    while len(prompts) < num_requests or engines.is_busy or engines.transfers:
        if len(prompts) < num_requests and draw.random() < 0.4:
            name = f"r{len(prompts)}"
            prompts[name] = [*draw.choice(stems)[: draw.randrange(1, 100)], draw.randrange(VOCAB_SIZE)]
            request = make_request(name, prompts[name], 1, block_hasher=HASHER)
            request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
            engines.prefill.scheduler.add_request(request)
        for name in list(engines.transfers):
            if draw.random() < 0.5:
                continue
            max_tokens = draw.randrange(1, 30)
            request = make_request(name, prompts[name], max_tokens, block_hasher=HASHER)
            request.kv_transfer_params = engines.transfers.pop(name)
            expected[name] = expected_output(prompts[name], max_tokens)
            engines.requests[name] = request
            engines.decode.scheduler.add_request(request)
            if draw.random() < 0.1:
                # Before it was ever scheduled.
                abort(engines, name)
        if draw.random() < 0.1 and engines.decode.scheduler.requests:
            abort(engines, draw.choice(engines.receiver.loading or list(engines.decode.scheduler.requests)))
        if draw.random() < 0.02 and engines.prefill.scheduler.running:
            victim = draw.choice(engines.prefill.scheduler.running).request_id
            engines.prefill.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        engines.step()
    return expected


def abort(engines: Engines, name: str) -> None:
    request = engines.requests[name]
    if not request.is_finished():
        loading = name in engines.receiver.loading
        engines.decode.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        engines.ended[name] = "aborted while it was read" if loading else "aborted"


@pytest.mark.parametrize("is_batched", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_blocks", [100, 22], ids=["roomy", "tight"])
@pytest.mark.parametrize("policy", ["fail", "recompute", None])
def test_one_engine_goes_on_from_what_another_computed(
    make_config: MakeConfig, policy: str | None, num_blocks: int, depth: str, is_batched: bool
) -> None:
    engines = make_engines(
        make_config,
        depth,
        is_batched=is_batched,
        num_decode_blocks=num_blocks,
        share_failing=0.3 if policy else 0.0,
    )
    engines.decode.scheduler.recompute_kv_load_failures = policy == "recompute"
    expected = run_traffic(engines)
    for name, tokens in expected.items():
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
