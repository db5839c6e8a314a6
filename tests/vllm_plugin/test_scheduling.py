"""vLLM's own schedulers over Rose's block manager, thousands of random steps, every cache slot checked."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rose_backend.vllm_plugin.kv_cache_spec import as_rose_spec
from rose_backend.vllm_plugin.scheduler import RoseAsyncScheduler, RoseScheduler
from tests.vllm_plugin.conftest import MakeConfig
from tests.vllm_plugin.fake_worker import VOCAB_SIZE, FakeWorker, expected_output

MAX_MODEL_LEN = 160


@dataclass
class Simulation:
    """A scheduler and a worker, and what they were asked to do."""

    scheduler: Any
    worker: FakeWorker
    depth: int  # steps in flight at once
    in_flight: deque[tuple[Any, Any]]
    outputs: dict[str, list[int]]
    num_preemptions: int = 0

    def step(self) -> None:
        """Schedule and run a step; process the oldest result once ``depth`` steps are in flight."""
        output = self.scheduler.schedule()
        if output.total_num_scheduled_tokens:
            self.in_flight.append((output, self.worker.run(output, self.scheduler.requests)))
            if len(self.in_flight) < self.depth:
                return
        if self.in_flight:
            results = self.scheduler.update_from_output(*self.in_flight.popleft())
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
    **options: Any,
) -> Simulation:
    config = make_config(
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        **{"max_num_batched_tokens": 48, **options},
    )
    config.scheduler_config.async_scheduling = depth > 1
    spec = as_rose_spec(
        FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    )
    kv_cache_config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = num_blocks
    scheduler_class = RoseAsyncScheduler if depth > 1 else RoseScheduler
    scheduler = scheduler_class(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=True,
    )
    simulation = Simulation(scheduler, FakeWorker(num_blocks, block_size), depth, deque(), {})
    preempt = scheduler._preempt_request

    def count_preemption(*args: Any, **kwargs: Any) -> None:
        simulation.num_preemptions += 1
        preempt(*args, **kwargs)

    scheduler._preempt_request = count_preemption
    return simulation


def make_request(request_id: str, prompt: list[int], max_tokens: int, salt: str | None = None) -> Request:
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
        None,
        cache_salt=salt,
    )


@pytest.mark.parametrize("depth", [1, 2, 3], ids=["sync", "async", "async_deep"])
@pytest.mark.parametrize(
    ("block_size", "num_blocks", "max_num_seqs", "options"),
    [
        (16, 24, 8, {}),
        (32, 9, 4, {"max_num_batched_tokens": 37}),
        (16, 60, 12, {"enable_prefix_caching": False}),
        (16, 22, 8, {"scheduling_policy": "priority", "watermark": 0.1}),
    ],
    ids=["small_blocks", "tight_pool_odd_chunks", "no_prefix_cache", "priority_watermark"],
)
def test_no_step_reads_what_is_not_there(
    make_config: MakeConfig,
    depth: int,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    options: dict[str, Any],
) -> None:
    simulation = make_simulation(
        make_config,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        depth=depth,
        **options,
    )
    rng = random.Random(7)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(3)]
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    num_added = 0
    while num_added < 150 or simulation.scheduler.has_unfinished_requests() or simulation.in_flight:
        if num_added < 150 and rng.random() < 0.5:
            prompt = rng.choice(stems)[: rng.randrange(1, 100)] + [rng.randrange(VOCAB_SIZE)] * rng.randrange(
                0, 3
            )
            request_id, max_tokens = f"r{num_added}", rng.randrange(1, 40)
            # A follow-up of a finished request: prompt and answer, as in a conversation.
            if rng.random() < 0.2 and expected:
                prompt = (prompt + expected_output(prompt, 20))[:120]
            expected[request_id] = expected_output(prompt, max_tokens)
            request = make_request(request_id, prompt, max_tokens)
            request.priority = rng.randrange(3)
            simulation.scheduler.add_request(request)
            num_added += 1
        if rng.random() < 0.03 and simulation.scheduler.running:
            victim = rng.choice(simulation.scheduler.running).request_id
            aborted.add(victim)
            simulation.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.01 and depth == 1:
            assert simulation.scheduler.reset_prefix_cache(reset_running_requests=True)
        simulation.step()
        simulation.manager.check_integrity()
    for request_id, tokens in expected.items():
        got = simulation.outputs.get(request_id, [])
        assert got == (tokens[: len(got)] if request_id in aborted else tokens), request_id
    # One more schedule tells the worker what has finished; nobody may hold a block any more.
    assert simulation.manager.usage == 0.0
    if options.get("enable_prefix_caching", True):
        stats = simulation.manager.stats
        assert min(stats.hit_tokens, stats.partial_hits, stats.clones, stats.evictions) > 0, stats
        assert simulation.worker.num_copies == stats.clones
    if num_blocks < 60:
        assert simulation.num_preemptions > 0


def test_equal_prompts_of_one_step_do_not_share_before_the_step_is_over(make_config: MakeConfig) -> None:
    simulation = make_simulation(
        make_config, num_blocks=40, block_size=16, max_num_seqs=8, max_num_batched_tokens=160
    )
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


def test_other_tenants_blocks_are_not_found(make_config: MakeConfig) -> None:
    simulation = make_simulation(make_config, num_blocks=40, block_size=16, max_num_seqs=8)
    prompt = list(range(40))
    scheduled = []
    for request_id, salt in (("a", "salt"), ("b", "other"), ("c", None), ("d", "salt")):
        simulation.scheduler.add_request(make_request(request_id, prompt, 1, salt))
        output = simulation.scheduler.schedule()
        scheduled.append(output.num_scheduled_tokens[request_id])
        simulation.scheduler.update_from_output(
            output, simulation.worker.run(output, simulation.scheduler.requests)
        )
    assert scheduled == [40, 40, 40, 1]


def test_a_pool_for_one_sequence_serves_many_requests_one_after_the_other(make_config: MakeConfig) -> None:
    # A hit inside a block would want source and copy at once; with all blocks needed there is room for neither.
    simulation = make_simulation(make_config, num_blocks=11, block_size=16, max_num_seqs=4)
    rng = random.Random(3)
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(150)]
    prompts = [[*stem[: rng.randrange(20, 150)], 1] for _ in range(30)]
    for index, prompt in enumerate(prompts):
        simulation.scheduler.add_request(make_request(f"r{index}", prompt, 8))
    for _ in range(3000):
        if not simulation.scheduler.has_unfinished_requests():
            break
        simulation.step()
        simulation.manager.check_integrity()
    got = [simulation.outputs[f"r{index}"] for index in range(len(prompts))]
    assert got == [expected_output(prompt, 8) for prompt in prompts]
