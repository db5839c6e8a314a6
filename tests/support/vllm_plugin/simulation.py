"""vLLM's scheduler over Rose's block manager with a ``FakeWorker``, and random traffic for both."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec
from rose_backend.vllm_plugin.scheduler.scheduler import RoseAsyncScheduler, RoseScheduler
from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.fake_worker import (
    STATE,
    VOCAB_SIZE,
    FakeWorker,
    expected_output,
    with_contents,
)

MAX_MODEL_LEN = 160
ITEM_PLACES = ((10, 23), (40, 9), (49, 16))
"""First position and length of the multimodal items in a prompt that is long enough."""


@dataclass
class Simulation:
    """A scheduler and a worker, and what came of it."""

    scheduler: Any
    worker: FakeWorker
    depth: int  # steps in flight at once
    in_flight: deque[tuple[Any, Any]]
    outputs: dict[str, list[int]]
    num_preemptions: int = 0

    def step(self) -> None:
        """Schedule and run a step; process the oldest result once ``depth`` steps are in flight."""
        output = self.scheduler.schedule()
        # Engines also run steps without tokens, so that a connector goes on.
        connector = self.worker.connector
        if output.total_num_scheduled_tokens or (connector is not None and connector.is_busy):
            self.in_flight.append((output, self.worker.run(output, self.scheduler.requests)))
            if len(self.in_flight) < self.depth:
                return
        if self.in_flight:
            results = self.scheduler.update_from_output(*self.in_flight.popleft())
            if self.depth == 1 and self.scheduler.num_spec_tokens:
                drafts = self.worker.draft_token_ids()
                self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))
            for result in results.values():
                for entry in result.outputs:
                    self.outputs.setdefault(entry.request_id, []).extend(entry.new_token_ids)

    @property
    def manager(self) -> Any:
        """Rose's block manager proper."""
        return self.scheduler.kv_cache_manager.manager


def make_simulation(
    make_config: MakeConfig,
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    depth: int = 1,
    is_async: bool | None = None,
    worker_options: dict[str, Any] | None = None,
    encoder_budget: int = 0,
    connector: Any = None,
    windows: Sequence[int | None] = (None,),
    **options: Any,
) -> Simulation:
    """Build both, with ``depth`` steps in flight; asynchronous scheduling if that is more than one, unless told.

    Args:
        encoder_budget: positions of multimodal items that are encoded in a step, and kept, at most.
        connector: the worker's side of a KV connector; the scheduler's side, too, if it has one.
        windows: of each KV cache group, None for one that keeps everything, ``STATE`` for one with states.
    """
    is_async = depth > 1 if is_async is None else is_async
    config = make_config(
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        **{"max_num_batched_tokens": 48, **options},
    )
    config.scheduler_config.async_scheduling = is_async
    groups = [
        KVCacheGroupSpec([f"layer {index}"], _spec_of(window, block_size))
        for index, window in enumerate(windows)
    ]
    kv_cache_config = KVCacheConfig(num_blocks, [], groups)
    config.cache_config.num_gpu_blocks = num_blocks
    if STATE in windows:
        config.cache_config.mamba_cache_mode = "align"
    scheduler_class = RoseAsyncScheduler if is_async else RoseScheduler
    scheduler = scheduler_class(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=True,
    )
    scheduler.max_num_encoder_input_tokens = encoder_budget
    scheduler.encoder_cache_manager = EncoderCacheManager(encoder_budget)
    worker = FakeWorker(
        num_blocks, block_size, windows=windows, max_model_len=MAX_MODEL_LEN, **(worker_options or {})
    )
    if connector is not None:
        worker.connector = connector
        if isinstance(connector, KVConnectorBase_V1):
            # In place of the one that the options configure.
            scheduler.connector = connector
        connector.follow(worker)
    simulation = Simulation(scheduler, worker, depth, deque(), {})
    preempt = scheduler._preempt_request

    def count_preemption(*args: Any, **kwargs: Any) -> None:
        simulation.num_preemptions += 1
        preempt(*args, **kwargs)

    scheduler._preempt_request = count_preemption
    return simulation


def _spec_of(window: int | None, block_size: int) -> Any:
    shape: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 1, "head_size": 64}
    if window == STATE:
        return MambaSpec(
            block_size=block_size, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    if window is not None:
        return SlidingWindowSpec(**shape, dtype=torch.float32, sliding_window=window)
    return as_rose_spec(FullAttentionSpec(**shape, dtype=torch.float32))


def make_request(
    request_id: str, prompt: list[int], max_tokens: int, salt: str | None = None, **options: Any
) -> Request:
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
        None,
        cache_salt=salt,
        **options,
    )


def items_of(prompt: list[int], choice: int) -> list[MultiModalFeatureSpec]:
    """Return the multimodal items of a prompt: at each of ``ITEM_PLACES`` one of two, as the bits of ``choice`` say.

    As with vLLM's own names of items, equal names have equal placeholder tokens.
    """
    items = []
    for index, (first, length) in enumerate(ITEM_PLACES):
        if first + length <= len(prompt):
            tokens = zlib.crc32(repr(prompt[first : first + length]).encode())
            name = str(2 * (tokens + index) + (choice >> index & 1))
            place = PlaceholderRange(first, length)
            items.append(MultiModalFeatureSpec(MultiModalKwargsItem({}), "image", name, place))
    return items


def run_random_traffic(
    simulation: Simulation,
    *,
    num_requests: int = 150,
    has_items: bool = False,
    after_step: Callable[[], None] | None = None,
    **request_options: Any,
) -> None:
    """Add, abort and preempt requests that share prefixes, follow up on each other and differ in salt; check them all.

    Raises:
        AssertionError: a wrong read or write in the worker, a wrong output, or a block that is still held.
    """
    rng = random.Random(7)
    scheduler = simulation.scheduler
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(3)]
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    num_added = 0
    while num_added < num_requests or scheduler.has_unfinished_requests() or simulation.in_flight:
        if num_added < num_requests and rng.random() < 0.5:
            suffix = [rng.randrange(VOCAB_SIZE)] * rng.randrange(0, 3)
            prompt = rng.choice(stems)[: rng.randrange(1, 100)] + suffix
            request_id, max_tokens = f"r{num_added}", rng.randrange(1, 40)
            choice = rng.randrange(8) if has_items else 0
            items = items_of(prompt, choice) if has_items else []
            # A follow-up of a finished request: prompt and answer, as in a conversation.
            if rng.random() < 0.2 and expected:
                prompt = (prompt + expected_output(with_contents(prompt, items), 20))[:120]
            expected[request_id] = expected_output(with_contents(prompt, items), max_tokens)
            salt = rng.choice([None, None, None, "other"])
            request = make_request(request_id, prompt, max_tokens, salt, mm_features=items, **request_options)
            request.priority = rng.randrange(3)
            scheduler.add_request(request)
            num_added += 1
        if rng.random() < 0.03 and scheduler.running:
            victim = rng.choice(scheduler.running).request_id
            aborted.add(victim)
            scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.01:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
        simulation.step()
        simulation.manager.check_integrity()
        if after_step is not None:
            after_step()
    for request_id, tokens in expected.items():
        got = simulation.outputs.get(request_id, [])
        assert got == (tokens[: len(got)] if request_id in aborted else tokens), request_id
    # One more schedule tells the worker what has finished; no block may be held any more.
    assert simulation.manager.usage == 0.0
