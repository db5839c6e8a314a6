"""KV cache events: a subscriber knows exactly the full blocks that lookups find, under vLLM's own hashes."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import hash_block_tokens

from rose_backend.conformance.block_manager.pretended_model import items_of
from rose_backend.errors import IntegrityError
from tests.support.vllm_plugin.configs import EVENTS, MakeConfig
from tests.support.vllm_plugin.simulation import Simulation, make_request, make_simulation
from tests.support.vllm_plugin.traffic import Traffic, make_hasher

BLOCK_SIZE = 16
PROMPT = list(range(40))


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
    return make_hasher(hash_function=sha256_cbor)


class Publisher:
    """An engine that publishes what it stores and forgets, and the events since they were taken last."""

    def __init__(self, make_config: MakeConfig, block_hasher: Any, **options: Any) -> None:
        self.simulation = simulate(make_config, **options)
        self._block_hasher = block_hasher
        self._events: list[Any] = []
        self.simulation.scheduler.kv_event_publisher.publish = lambda batch: self._events.extend(batch.events)

    def serve(
        self, prompt: list[int], salt: str | None = None, reports: bool = False, **options: Any
    ) -> tuple[Any, list[Any]]:
        """Generate two tokens; return the request and its events."""
        request = make_request("a", prompt, 2, salt, block_hasher=self._block_hasher, **options)
        if reports:
            request.kv_cache_report_mode = "full"
        self.simulation.scheduler.add_request(request)
        while self.simulation.scheduler.has_unfinished_requests():
            self.simulation.step()
        events, self._events[:] = list(self._events), []
        return request, events


def simulate(make_config: MakeConfig, **options: Any) -> Simulation:
    options = {"kv_events_config": EVENTS, **options}
    return make_simulation(make_config, num_blocks=24, block_size=BLOCK_SIZE, max_num_seqs=8, **options)


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_a_subscriber_knows_the_findable_blocks_after_every_step(
    make_config: MakeConfig, block_hasher: Any, depth: int
) -> None:
    simulation = simulate(make_config, depth=depth)
    subscriber = Subscriber(simulation)

    def follow_and_check() -> None:
        # What a step without a result has changed is published with the next one.
        subscriber.follow(simulation.scheduler.kv_cache_manager.take_events())
        subscriber.check()

    Traffic(5, num_requests=100, block_hasher=block_hasher).run(simulation, after_step=follow_and_check)
    assert min(subscriber.num_removed, len(subscriber.blocks)) > 5 and subscriber.num_cleared > 0
    assert simulation.manager.stats.overwrites > 0, "no block was truncated"


def test_a_running_request_announces_each_block_when_it_is_full(
    make_config: MakeConfig, block_hasher: Any
) -> None:
    simulation = simulate(make_config)
    subscriber = Subscriber(simulation)
    simulation.scheduler.add_request(make_request("a", PROMPT, 30, block_hasher=block_hasher))
    counts = []
    for _ in range(11):
        simulation.step()
        counts.append(len(subscriber.blocks))
    # 40 tokens are two full blocks; the ninth step writes the 48th.
    assert counts == [2] * 8 + [3] * 3


def test_reuse_is_reported_for_requests_that_ask_for_it(make_config: MakeConfig, block_hasher: Any) -> None:
    publisher = Publisher(make_config, block_hasher)
    _, (stored,) = publisher.serve(PROMPT)
    assert publisher.serve(PROMPT)[1] == []
    _, (reused,) = publisher.serve(PROMPT, session_id="s", reports=True)
    assert reused.session_id == "s" and stored.session_id is None
    for name in ("block_hashes", "parent_block_hash", "token_ids", "extra_keys"):
        assert getattr(reused, name) == getattr(stored, name), name


def test_adapters_are_named(make_config: MakeConfig, block_hasher: Any) -> None:
    adapter = LoRARequest("poet", 3, "/adapters/poet")
    _, (stored,) = Publisher(make_config, block_hasher).serve(PROMPT, "salt", lora_request=adapter)
    assert (stored.lora_id, stored.lora_name) == (3, "poet")
    assert stored.extra_keys == [("poet", "salt"), ("poet",)]


def test_blocks_of_images_have_vllms_hashes_and_keys(make_config: MakeConfig, block_hasher: Any) -> None:
    publisher, prompt = Publisher(make_config, block_hasher, encoder_budget=60), list(range(70))
    for choice in (0, 1):
        items = items_of(prompt, choice)
        request, stored = publisher.serve(prompt, mm_features=items)
        first, second, third = (item.identifier for item in items)
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
    request, (stored,) = Publisher(make_config, block_hasher).serve(PROMPT)
    assert stored.block_hashes == [int.from_bytes(whole[-8:], "big") for whole in request.block_hashes]


def test_nothing_is_recorded_unless_events_are_on(make_config: MakeConfig) -> None:
    publisher = Publisher(make_config, None, kv_events_config=None)
    assert publisher.serve(PROMPT)[1] == publisher.simulation.manager.take_events() == []
    assert publisher.simulation.scheduler.kv_cache_manager.take_events() == []


def test_an_event_of_a_block_without_a_committed_row_is_a_bug(
    make_config: MakeConfig, block_hasher: Any
) -> None:
    simulation = simulate(make_config)
    manager = simulation.scheduler.kv_cache_manager
    simulation.scheduler.add_request(make_request("a", PROMPT, 20, block_hasher=block_hasher))
    simulation.scheduler.schedule()
    manager.manager.commit([0], 32, list(range(32)))
    with pytest.raises(IntegrityError, match="stored by no committed row"):
        manager.take_events()
