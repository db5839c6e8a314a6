"""Batched scheduling with a KV connector beside vLLM's own loops: every step, transfer and output field by field."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.fake_connector import FakeConnector, FakeOffloading
from tests.support.vllm_plugin.fake_worker import VOCAB_SIZE
from tests.support.vllm_plugin.lockstep import Pair
from tests.support.vllm_plugin.simulation import make_request

init_none_hash(sha256)
HASHER = get_request_block_hasher(16, sha256)
DEPTHS = {"sync": (1, False), "async": (2, True), "async deep": (3, True)}
CONNECTORS: dict[str, Callable[[], Any]] = {
    "all kinds": FakeConnector,
    "failing": lambda: FakeConnector(share_failing=0.5),
    "computed again": lambda: FakeConnector(share_failing=0.5, share_sent=0.0),
    "offloading": FakeOffloading,
}


def transfer_config(name: str) -> KVTransferConfig:
    extra = {"cpu_bytes_to_use": 1 << 20} if name == "offloading" else {}
    return KVTransferConfig(
        kv_connector="OffloadingConnector" if name == "offloading" else "ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )


def run_traffic(pair: Pair, num_requests: int) -> None:
    """Serve requests that share beginnings; abort some, while they are loaded, too."""
    draw, added = random.Random(11), list[tuple[str, list[int], int]]()
    stems = [[draw.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(40)]
    connector, aborted = pair.stock.worker.connector, set[str]()
    while len(added) < num_requests or pair.is_busy() or connector.is_busy:
        if len(added) < num_requests and draw.random() < 0.4:
            prompt = [*draw.choice(stems)[: draw.randrange(1, 100)], draw.randrange(VOCAB_SIZE)]
            name, max_tokens = f"r{len(added)}", draw.randrange(1, 40)
            added.append((name, prompt, max_tokens))

            def make(name: str = name, prompt: list[int] = prompt, max_tokens: int = max_tokens) -> Request:
                return make_request(name, list(prompt), max_tokens, block_hasher=HASHER)

            pair.add(make)
        if draw.random() < 0.05 and pair.stock.scheduler.requests:
            requests = pair.stock.scheduler.requests
            victim = draw.choice(getattr(connector, "loading", []) or list(requests))
            if not requests[victim].is_finished():
                aborted.add(victim)
                pair.for_both(lambda s, v=victim: s.finish_requests(v, RequestStatus.FINISHED_ABORTED))
        pair.step()
    pair.step()
    assert aborted
    for side in pair.sides:
        assert side.manager.usage == 0.0 and not len(side.manager.clones.held_sources())


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_blocks", [100, 24], ids=["roomy", "tight"])
@pytest.mark.parametrize("name", CONNECTORS)
def test_steps_with_a_connector_are_vllms(
    make_config: MakeConfig, name: str, num_blocks: int, depth: str
) -> None:
    num_in_flight, is_async = DEPTHS[depth]
    pair = Pair(
        make_config,
        CONNECTORS[name],
        depth=num_in_flight,
        is_async=is_async,
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=8,
        kv_transfer_config=transfer_config(name),
    )
    assert pair.batched.scheduler.defer_block_free == is_async
    for side in pair.sides:
        side.scheduler.recompute_kv_load_failures = name == "computed again"
    run_traffic(pair, 150)
    assert min(pair.num_batched_steps, pair.num_split_steps) > 15
    # Failed loads are vLLM's code.
    assert pair.num_batched_tokens > pair.num_tokens * 0.4
    assert pair.stock.num_preemptions > 0 or num_blocks > 24
    batched, stock = (side.worker.connector for side in pair.sides)
    counts = [
        getattr(each, "counts", None) or (each.num_stored, each.num_loaded) for each in (batched, stock)
    ]
    assert counts[0] == counts[1]
    assert sum(counts[0].values() if isinstance(counts[0], dict) else counts[0]) > 40
