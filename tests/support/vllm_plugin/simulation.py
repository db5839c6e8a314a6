"""vLLM's scheduler over Rose's block manager with a ``FakeWorker``, and random traffic for both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
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
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec
from rose_backend.vllm_plugin.scheduler.scheduler import RoseAsyncScheduler, RoseScheduler
from tests.support.vllm_plugin.configs import MakeConfig, n_grams
from tests.support.vllm_plugin.fake_worker import STATE, FakeWorker

MAX_MODEL_LEN = 160
NUM_DRAFTS = 3


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
        if (result := self.execute(output)) is not None:
            self.in_flight.append((output, result))
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

    def execute(self, output: Any) -> Any:
        """Run a step; return its result, None if there is nothing in it.

        Engines run steps without tokens, too: blocks are copied, for checkpoints of states, and a connector goes on.
        """
        connector = self.worker.connector
        has_result = output.total_num_scheduled_tokens or (connector is not None and connector.is_busy)
        result = self.worker.run(output, self.scheduler.requests)
        return result if has_result else None

    def checked_step(self) -> None:
        """Run a step and check the block manager, which releases what has ended when it is asked for."""
        self.step()
        self.manager.check_integrity()

    @property
    def manager(self) -> Any:
        """Rose's block manager proper."""
        return self.scheduler.kv_cache_manager.manager

    @property
    def sides(self) -> tuple[Simulation]:
        """This one; see ``lockstep.Pair``."""
        return (self,)

    @property
    def is_busy(self) -> bool:
        """Whether requests, results or transfers are under way."""
        is_serving = self.scheduler.has_unfinished_requests() or self.in_flight
        return bool(is_serving or (self.worker.connector is not None and self.worker.connector.is_busy))

    def add(self, *makers: Callable[[], Request]) -> Request:
        """Add the requests that functions make; return the last one."""
        for make in makers:
            self.scheduler.add_request(request := make())
        return request

    def for_all(self, call: Callable[[Any], Any]) -> None:
        """Do something to the scheduler."""
        call(self.scheduler)

    def run(self) -> None:
        """Step until nothing is under way."""
        while self.is_busy:
            self.checked_step()

    def serve(self, *prompts: list[int]) -> list[dict[str, int]]:
        """Generate three tokens for each; return how many tokens of which request each step has computed."""
        for index, prompt in enumerate(prompts):
            self.scheduler.add_request(make_request(f"r{index}", prompt, 3))
        steps: list[dict[str, int]] = []
        run = self.worker.run

        def noting(output: Any, requests: Any) -> Any:
            if output.num_scheduled_tokens:
                steps.append(dict(output.num_scheduled_tokens))
            return run(output, requests)

        self.worker.run = noting  # type: ignore[method-assign]
        self.run()
        return steps


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
    scheduler_class: Any = None,
    use_v2_model_runner: bool | None = None,
    additional_config: dict[str, Any] | None = None,
    **options: Any,
) -> Simulation:
    """Build both, with ``depth`` steps in flight; asynchronous scheduling if that is more than one, unless told.

    Each step has all drafts that are asked for, unless ``additional_config`` lets Rose choose.

    Args:
        encoder_budget: positions of multimodal items that are encoded in a step, and kept, at most.
        connector: the worker's side of a KV connector; the scheduler's side, too, if it has one.
        windows: of each KV cache group, None for one that keeps everything, ``STATE`` for one with states.
        scheduler_class: Rose's unless told.
        use_v2_model_runner: whatever this vLLM takes by itself unless told; V2 cannot be configured without Triton.
    """
    is_async = depth > 1 if is_async is None else is_async
    config = make_config(
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        additional_config={"rose": {"adaptive_drafts": False, **(additional_config or {}).get("rose", {})}},
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
    scheduler_class = scheduler_class or (RoseAsyncScheduler if is_async else RoseScheduler)
    is_v2 = config.use_v2_model_runner if use_v2_model_runner is None else use_v2_model_runner
    with patch.object(type(config), "use_v2_model_runner", is_v2):
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


def drafting(
    num_drafts: int = NUM_DRAFTS,
    share_right: float = 0.7,
    *,
    model: Path | None = None,
    drafter: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return options of ``make_simulation`` with which its worker drafts, and decodes may be scheduled at once.

    Args:
        model: that drafts are made for; None for the usual one.
        drafter: of ``speculative_config``: one with K/V of its own; if None, drafts are n-grams.
    """
    of_worker: dict[str, Any] = {"num_drafts": num_drafts, "share_right": share_right}
    options: dict[str, Any] = {"use_v2_model_runner": True, "worker_options": of_worker}
    if model is not None:
        options["model"] = str(model)
    if drafter is None:
        return options | {"speculative_config": n_grams(num_drafts, "ngram_gpu")}
    of_worker |= {"num_lookahead": num_drafts, "drafter_reads_ahead": drafter["method"] != "draft_model"}
    return options | {"speculative_config": {**drafter, "num_speculative_tokens": num_drafts}}


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
