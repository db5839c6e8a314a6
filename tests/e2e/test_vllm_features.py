"""What reaches deep into the block manager, in real engines: speculation, KV events, reset, pause, sleep."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from benchmarks.online.servers import free_port
from rose_backend.vllm_plugin.kv_cache.manager import MIN_TOKENS_WORTH_COPYING
from tests.e2e.conftest import MakeEngine
from tests.support.reference_generation import (
    GreedyReference,
    Prompts,
    load_reference_model,
    tie_free_case,
)
from tests.support.vllm_engines import (
    GREEDY,
    NGRAM,
    VOCAB_SIZE,
    assert_drafts_were_kept_and_rejected,
    assert_greedy,
    draft_counts,
    finish,
    first,
    generate,
    manager_of,
    scheduler_of,
    start,
)

# The drafter of n-grams is compiled in its first engine.
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def case(tiny_model_path: Path) -> tuple[Prompts, GreedyReference]:
    return first(24, tie_free_case(tiny_model_path, vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("backend", [None, "ROSE"], ids=["of its own", "ROSE"])
def test_a_draft_model_generates_what_the_model_does_alone(
    make_engine: MakeEngine, case: tuple[Prompts, GreedyReference], tiny_model_path: Path, backend: str | None
) -> None:
    prompts, reference = first(16, case)
    draft = {"method": "draft_model", "model": str(tiny_model_path), "num_speculative_tokens": 3}
    if backend:
        draft["attention_backend"] = backend
    # Prompts in several chunks; the second time they are found to the last token but one.
    options = {"max_num_batched_tokens": 300, "num_gpu_blocks_override": 120}
    with make_engine(block_size=32, disable_log_stats=False, speculative_config=draft, **options) as llm:
        num_drafted, num_accepted = draft_counts(llm)
        for _ in range(2):
            assert_greedy(generate(llm, prompts), reference)
        drafted, accepted = draft_counts(llm)
        # The drafter is the model itself: what it gets wrong, it was told wrong by its cache.
        assert accepted - num_accepted > 0.97 * (drafted - num_drafted) > 0
        manager = manager_of(llm)
        manager.check_integrity()
        assert min(manager.stats.partial_hits, manager.stats.clones) > 0, manager.stats


def test_prompt_embeddings_are_answered_as_their_tokens(
    make_engine: MakeEngine, case: tuple[Prompts, GreedyReference], tiny_model_path: Path
) -> None:
    prompts, reference = first(24, case)
    table = load_reference_model(tiny_model_path).get_input_embeddings().weight.detach().float()
    inputs = [{"prompt_embeds": table[list(prompt)]} for prompt in prompts]
    with make_engine(enable_prompt_embeds=True, max_num_batched_tokens=300) as llm:
        for _ in range(2):
            outputs = llm.generate(inputs, GREEDY, use_tqdm=False)
            assert_greedy(outputs, reference)
        assert [output.num_cached_tokens for output in outputs] == [
            len(prompt) - 1 if len(prompt) > MIN_TOKENS_WORTH_COPYING else 0 for prompt in prompts
        ]
        # The first block of one, then something else.
        head, other = next(
            (one, two)
            for one, two in itertools.permutations(prompts, 2)
            if min(len(one), len(two)) > 40 and one[16:32] != two[16:32]
        )
        mixed = table[[*head[:20], *other[20:40]]]
        (output,) = llm.generate([{"prompt_embeds": mixed}], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 16
        manager_of(llm).check_integrity()


@dataclass
class Subscriber:
    """Receives KV events as a router does, and keeps which blocks the server has."""

    connection: zmq.Socket[bytes]
    hashes: set[Any]
    num_stored: int = 0
    num_batches: int = 0

    def follow(self, *, wait_ms: int = 2000) -> None:
        """Take in what was published; done when nothing more comes."""
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while self.connection.poll(wait_ms):
            _, sequence, payload = self.connection.recv_multipart()
            assert int.from_bytes(sequence, "big") == self.num_batches, "a batch was missed"
            self.num_batches += 1
            for event in decoder.decode(payload).events:
                if isinstance(event, BlockStored):
                    self.hashes.update(event.block_hashes)
                    self.num_stored += len(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    self.hashes.difference_update(event.block_hashes)
                else:
                    self.hashes.clear()
            wait_ms = 300


@dataclass
class Speculating:
    """An engine that drafts with n-grams from the prompt and publishes KV events over ZMQ."""

    llm: Any
    subscriber: Subscriber


@pytest.fixture(scope="module")
def speculating(make_engine: MakeEngine) -> Iterator[Speculating]:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    context = zmq.Context()
    connection = context.socket(zmq.SUB)
    connection.setsockopt(zmq.SUBSCRIBE, b"")
    connection.connect(endpoint)
    # The publisher binds where the endpoint has a wildcard.
    events = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint.replace("127.0.0.1", "*")
    )
    options: dict[str, Any] = {"speculative_config": NGRAM, "kv_events_config": events}
    with make_engine(
        block_size=BLOCK_SIZE, num_gpu_blocks_override=160, disable_log_stats=False, **options
    ) as llm:
        yield Speculating(llm, Subscriber(connection, set()))
    context.destroy(linger=0)


def test_ngram_speculation_generates_what_the_model_does_alone(
    speculating: Speculating, case: tuple[Prompts, GreedyReference]
) -> None:
    prompts, reference = case
    llm, manager = speculating.llm, scheduler_of(speculating.llm).kv_cache_manager.manager
    before = draft_counts(llm)
    assert_greedy(generate(llm, prompts), reference)
    manager.check_integrity()
    assert_drafts_were_kept_and_rejected(llm, before)
    # What was drafted, kept and generated is found again: each whole answer but its last token.
    turns = [
        (*prompt, *answer)
        for prompt, answer in zip(prompts, reference.token_ids, strict=True)
        if len(prompt) < 900
    ][:8]
    short = SamplingParams(temperature=0.0, max_tokens=1)
    before_hits = generate(llm, turns, short)
    again = generate(llm, turns, short)
    assert [o.outputs[0].token_ids for o in before_hits] == [o.outputs[0].token_ids for o in again]
    assert all(o.num_cached_tokens == len(turn) - 1 for o, turn in zip(again, turns, strict=True))
    assert min(manager.stats.partial_hits, manager.stats.clones, manager.stats.evictions) > 0, manager.stats
    assert manager.stats.bytes_cloned == manager.stats.clones * manager.stats.bytes_per_block > 0


def test_a_subscriber_knows_the_full_blocks(
    speculating: Speculating, case: tuple[Prompts, GreedyReference]
) -> None:
    llm, subscriber = speculating.llm, speculating.subscriber
    cache = manager_of(llm).cache
    # More than the pool holds.
    generate(llm, case[0], SamplingParams(temperature=0.0, max_tokens=4))
    # Evictions of the last schedule travel with the next step's events.
    generate(llm, ((1, 2, 3),), SamplingParams(max_tokens=1))
    subscriber.follow()
    assert subscriber.num_stored > len(subscriber.hashes) > 50
    assert len(subscriber.hashes) == len(cache.full_index())
    assert llm.reset_prefix_cache()
    generate(llm, ((1, 2, 3),), SamplingParams(max_tokens=1))
    subscriber.follow()
    assert subscriber.hashes == set()


def test_a_reset_in_full_flight_changes_no_output(
    speculating: Speculating, case: tuple[Prompts, GreedyReference]
) -> None:
    llm, (prompts, reference) = speculating.llm, first(12, case)
    manager = manager_of(llm)
    indices = start(llm, prompts, "reset")
    assert manager.usage > 0 and not llm.reset_prefix_cache(), "running requests keep their blocks"
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert manager.usage == 0 and len(manager.cache.full_index()) == 0
    assert_greedy(finish(llm, indices), reference)
    manager.check_integrity()


@pytest.mark.parametrize("clear_cache", [False, True], ids=["keeping the cache", "clearing the cache"])
def test_a_pause_changes_no_output(
    speculating: Speculating, case: tuple[Prompts, GreedyReference], clear_cache: bool
) -> None:
    llm, (prompts, reference) = speculating.llm, first(12, case)
    core = llm.llm_engine.engine_core.engine_core
    indices = start(llm, prompts, f"pause{clear_cache}")
    core.pause_scheduler(mode="keep", clear_cache=clear_cache)
    usage = core.scheduler.kv_cache_manager.usage
    assert (usage == 0) == clear_cache
    for _ in range(3):
        assert llm.llm_engine.step() == []
    core.resume_scheduler()
    assert_greedy(finish(llm, indices), reference)


@pytest.mark.parametrize("level", [0, 1])
def test_the_cache_survives_no_sleep_that_drops_it(
    speculating: Speculating, case: tuple[Prompts, GreedyReference], level: int
) -> None:
    llm, prompts = speculating.llm, tuple(prompt for prompt in case[0] if len(prompt) == 200)[:1]
    generate(llm, prompts)
    # On a CPU the worker keeps its memory; what the engine core does is the same as on a GPU.
    llm.sleep(level=level)
    llm.wake_up(tags=["scheduling"] if level == 0 else None)
    (output,) = generate(llm, prompts)
    assert output.num_cached_tokens == (199 if level == 0 else 0)
