"""KV cache events: a subscriber knows exactly the full blocks that lookups find, under vLLM's own hashes."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, hash_block_tokens, init_none_hash

from rose_backend.errors import IntegrityError
from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.simulation import (
    Simulation,
    items_of,
    make_request,
    make_simulation,
    run_random_traffic,
)

BLOCK_SIZE = 16
EVENTS_ON = KVEventsConfig(enable_kv_cache_events=True, publisher="null")


class Subscriber:
    """Keeps what a router would keep: hash -> (parent's hash, tokens, extra keys) of every block it can count on."""

    def __init__(self, simulation: Simulation) -> None:
        self.blocks: dict[Any, tuple[Any, tuple[int, ...], Any]] = {}
        self.num_removed = 0
        self.num_cleared = 0
        self._ever: dict[Any, tuple[Any, tuple[int, ...], Any]] = {}
        self._simulation = simulation
        simulation.scheduler.kv_event_publisher.publish = lambda batch: self.follow(batch.events)

    def follow(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.blocks[block_hash]
                    self.num_removed += 1
            else:
                assert isinstance(event, AllBlocksCleared)
                self.blocks.clear()
                self.num_cleared += 1

    def _store(self, event: BlockStored) -> None:
        assert event.block_size == BLOCK_SIZE and len(event.token_ids) == BLOCK_SIZE * len(event.block_hashes)
        assert (event.medium, event.group_idx, event.kv_cache_spec_kind) == ("GPU", 0, "full_attention")
        assert event.extra_keys is not None and len(event.extra_keys) == len(event.block_hashes)
        parent = event.parent_block_hash
        for index, (block_hash, keys) in enumerate(zip(event.block_hashes, event.extra_keys, strict=True)):
            tokens = tuple(event.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            assert block_hash not in self.blocks, "stored twice"
            assert block_hash == hash_block_tokens(
                sha256_cbor, parent, tokens, keys and (("cache_salt", keys[0]),)
            )
            self.blocks[block_hash] = self._ever[block_hash] = (parent, tokens, keys)
            parent = block_hash

    def check(self) -> None:
        """Compare with the block manager's own index, by content."""
        digests = set()
        for block_hash in self.blocks:
            tokens: tuple[int, ...] = ()
            link, keys = block_hash, None
            while link is not None:
                link, block_tokens, keys = self._ever[link]
                tokens = block_tokens + tokens
            namespace = b"" if keys is None else repr((("cache_salt", keys[0]),)).encode()
            digests.add(self._simulation.manager.hash_blocks(tokens, namespace=namespace)[-1])
        assert digests == set(self._simulation.manager.cache.full_index())


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hashes published as they are; vLLM's default is their last 64 bits as a number."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


@pytest.fixture(scope="module")
def block_hasher() -> Any:
    init_none_hash(sha256_cbor)
    return get_request_block_hasher(BLOCK_SIZE, sha256_cbor)


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_a_subscriber_knows_the_findable_blocks_after_every_step(
    make_config: MakeConfig, block_hasher: Any, depth: int
) -> None:
    simulation = make_simulation(
        make_config,
        num_blocks=24,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        depth=depth,
        kv_events_config=EVENTS_ON,
    )
    subscriber = Subscriber(simulation)

    def follow_and_check() -> None:
        # What a step without a result has changed is published with the next one.
        subscriber.follow(simulation.scheduler.kv_cache_manager.take_events())
        subscriber.check()

    run_random_traffic(simulation, after_step=follow_and_check, block_hasher=block_hasher)
    assert min(subscriber.num_removed, len(subscriber.blocks)) > 5 and subscriber.num_cleared > 0
    assert simulation.manager.stats.overwrites > 0, "no block was truncated"


def run_to_the_end(simulation: Simulation, request: Any) -> None:
    simulation.scheduler.add_request(request)
    while simulation.scheduler.has_unfinished_requests():
        simulation.step()


def test_a_running_request_announces_each_block_when_it_is_full(
    make_config: MakeConfig, block_hasher: Any
) -> None:
    simulation = make_simulation(
        make_config, num_blocks=24, block_size=BLOCK_SIZE, max_num_seqs=8, kv_events_config=EVENTS_ON
    )
    subscriber = Subscriber(simulation)
    simulation.scheduler.add_request(make_request("a", list(range(40)), 30, block_hasher=block_hasher))
    counts = []
    for _ in range(11):
        simulation.step()
        counts.append(len(subscriber.blocks))
    # 40 tokens are two full blocks; the ninth step writes the 48th.
    assert counts == [2] * 8 + [3] * 3


def test_reuse_is_reported_for_requests_that_ask_for_it(make_config: MakeConfig, block_hasher: Any) -> None:
    simulation = make_simulation(
        make_config, num_blocks=24, block_size=BLOCK_SIZE, max_num_seqs=8, kv_events_config=EVENTS_ON
    )
    batches: list[list[Any]] = []
    simulation.scheduler.kv_event_publisher.publish = lambda batch: batches.append(batch.events)
    run_to_the_end(simulation, make_request("first", list(range(40)), 2, block_hasher=block_hasher))
    ((stored,),) = batches
    batches.clear()
    silent = make_request("silent", list(range(40)), 2, block_hasher=block_hasher)
    run_to_the_end(simulation, silent)
    assert batches == []
    asking = make_request("asking", list(range(40)), 2, block_hasher=block_hasher, session_id="s")
    asking.kv_cache_report_mode = "full"
    run_to_the_end(simulation, asking)
    ((reused,),) = batches
    assert reused.session_id == "s" and stored.session_id is None
    for name in ("block_hashes", "parent_block_hash", "token_ids", "extra_keys"):
        assert getattr(reused, name) == getattr(stored, name), name


def test_adapters_are_named(make_config: MakeConfig, block_hasher: Any) -> None:
    simulation = make_simulation(
        make_config, num_blocks=24, block_size=BLOCK_SIZE, max_num_seqs=8, kv_events_config=EVENTS_ON
    )
    batches: list[list[Any]] = []
    simulation.scheduler.kv_event_publisher.publish = lambda batch: batches.append(batch.events)
    adapter = LoRARequest("poet", 3, "/adapters/poet")
    options = {"block_hasher": block_hasher, "lora_request": adapter}
    run_to_the_end(simulation, make_request("a", list(range(40)), 2, "salt", **options))
    ((stored,),) = batches
    assert (stored.lora_id, stored.lora_name) == (3, "poet")
    assert stored.extra_keys == [("poet", "salt"), ("poet",)]


def test_blocks_of_images_have_vllms_hashes_and_keys(make_config: MakeConfig, block_hasher: Any) -> None:
    simulation = make_simulation(
        make_config,
        num_blocks=24,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        encoder_budget=60,
        kv_events_config=EVENTS_ON,
    )
    batches: list[list[Any]] = []
    simulation.scheduler.kv_event_publisher.publish = lambda batch: batches.append(batch.events)
    prompt = list(range(70))
    for choice in (0, 1):
        items = items_of(prompt, choice)
        request = make_request(f"r{choice}", prompt, 2, block_hasher=block_hasher, mm_features=items)
        run_to_the_end(simulation, request)
        first, second, third = (item.identifier for item in items)
        stored = [event for batch in batches for event in batch]
        batches.clear()
        assert [each for event in stored for each in event.block_hashes] == request.block_hashes[:4]
        assert [each for event in stored for each in event.extra_keys] == [
            ((first, 10),),
            ((first, -6),),
            ((first, -22), (second, 8)),
            ((second, -8), (third, 1)),
        ]


def test_hashes_are_numbers_where_vllm_publishes_numbers(
    make_config: MakeConfig, block_hasher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    simulation = make_simulation(
        make_config, num_blocks=24, block_size=BLOCK_SIZE, max_num_seqs=8, kv_events_config=EVENTS_ON
    )
    batches: list[list[Any]] = []
    simulation.scheduler.kv_event_publisher.publish = lambda batch: batches.append(batch.events)
    request = make_request("a", list(range(40)), 2, block_hasher=block_hasher)
    run_to_the_end(simulation, request)
    ((stored,),) = batches
    assert stored.block_hashes == [int.from_bytes(whole[-8:], "big") for whole in request.block_hashes]


def test_nothing_is_recorded_unless_events_are_on(make_config: MakeConfig) -> None:
    simulation = make_simulation(make_config, num_blocks=24, block_size=BLOCK_SIZE, max_num_seqs=8)
    run_to_the_end(simulation, make_request("a", list(range(40)), 20))
    assert simulation.manager.take_events() == []
    assert simulation.scheduler.kv_cache_manager.take_events() == []


def test_an_event_of_a_block_without_a_committed_row_is_a_bug(
    make_config: MakeConfig, block_hasher: Any
) -> None:
    simulation = make_simulation(
        make_config, num_blocks=24, block_size=BLOCK_SIZE, max_num_seqs=8, kv_events_config=EVENTS_ON
    )
    manager = simulation.scheduler.kv_cache_manager
    simulation.scheduler.add_request(make_request("a", list(range(40)), 20, block_hasher=block_hasher))
    simulation.scheduler.schedule()
    manager.manager.commit([0], 32, list(range(32)))
    with pytest.raises(IntegrityError, match="stored by no committed row"):
        manager.take_events()
