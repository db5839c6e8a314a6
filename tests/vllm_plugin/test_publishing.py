"""When what running requests have computed becomes findable, and that no lookup asks for more than it gains."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from tests.support.vllm_plugin import simulation as simulated
from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.fake_worker import FakeWorker, expected_output
from tests.support.vllm_plugin.simulation import Simulation, make_simulation
from tests.vllm_plugin.test_kv_cache_manager import BLOCK_SIZE, admit, make_manager, make_request


def look_up(manager: RoseKVCacheManager, tokens: list[int]) -> int:
    """Return how many of these tokens a request finds that is looked up in the next step."""
    manager.new_step_starts()
    request = make_request("lookup", [*tokens, -1])
    _, num_hits, _ = manager.get_computed_blocks(request)
    manager.free(request)
    return num_hits


def decode(manager: RoseKVCacheManager, request: Request, token: int) -> None:
    request.append_output_token_ids(token)
    manager.new_step_starts()
    assert manager.allocate_slots(request, 1) is not None
    request.num_computed_tokens += 1


def test_a_running_request_is_found_by_its_prompt_and_its_full_blocks() -> None:
    manager = make_manager()
    request = make_request("a", list(range(BLOCK_SIZE + 5)))
    admit(manager, request)
    assert look_up(manager, request._all_token_ids) == BLOCK_SIZE + 5
    for token in range(100, 100 + BLOCK_SIZE):
        decode(manager, request, token)
        num_computed = request.num_computed_tokens
        full = num_computed - num_computed % BLOCK_SIZE
        assert look_up(manager, request._all_token_ids) == max(full, BLOCK_SIZE + 5)
    manager.free(request)
    assert look_up(manager, request._all_token_ids) == request.num_computed_tokens
    manager.manager.check_integrity()


def test_chunks_of_a_prompt_are_found_to_its_last_token() -> None:
    manager = make_manager()
    prompt = list(range(3 * BLOCK_SIZE + 4))
    request = make_request("a", prompt)
    manager.new_step_starts()
    blocks, _, _ = manager.get_computed_blocks(request)
    # The second chunk fills no block; the last one is short, but ends the prompt.
    for end, num_found in ((19, 19), (21, 19), (49, 49), (52, 52)):
        manager.allocate_slots(request, end - request.num_computed_tokens, 0, blocks)
        request.num_computed_tokens = end
        assert look_up(manager, prompt) == num_found


def test_a_step_in_which_no_row_fills_a_block_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    requests = [make_request(f"r{index}", [100 * index + n for n in range(4 + index)]) for index in range(3)]
    for request in requests:
        admit(manager, request)
    look_up(manager, [1, 2, 3])
    committed: list[list[int]] = []
    commit = manager.manager.commit

    def counted(rows: Any, *args: Any) -> None:
        committed.append(rows.tolist())
        commit(rows, *args)

    monkeypatch.setattr(manager.manager, "commit", counted)
    for step in range(BLOCK_SIZE):
        for request in requests:
            decode(manager, request, step)
        look_up(manager, [1, 2, 3])
    # Each request fills one block, each in another step.
    assert sorted(committed) == [[0], [1], [2]]


def stock_simulation(make_config: MakeConfig) -> Simulation:
    """vLLM's own scheduler and manager, two steps in flight."""
    config = make_config(block_size=BLOCK_SIZE, max_model_len=simulated.MAX_MODEL_LEN, max_num_seqs=4)
    config.scheduler_config.async_scheduling = True
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
    config.cache_config.num_gpu_blocks = 40
    scheduler = AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(40, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )
    worker = FakeWorker(40, BLOCK_SIZE, max_model_len=simulated.MAX_MODEL_LEN)
    return Simulation(scheduler, worker, 2, deque(), {})


@pytest.mark.parametrize(
    ("manager", "fate"),
    [
        *(
            ("rose", fate)
            for fate in ("goes on", "is aborted before", "is preempted before", "is aborted after")
        ),
        # vLLM publishes when it schedules a request. Whoever has gone before that is not found.
        *(("stock", fate) for fate in ("goes on", "is aborted after")),
    ],
)
def test_tokens_of_a_step_in_flight_are_found_whatever_becomes_of_it(
    make_config: MakeConfig, manager: str, fate: str
) -> None:
    if manager == "rose":
        simulation = make_simulation(
            make_config, num_blocks=40, block_size=BLOCK_SIZE, max_num_seqs=4, depth=2
        )
    else:
        simulation = stock_simulation(make_config)
    scheduler = simulation.scheduler
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256_cbor)
    first = simulated.make_request("first", list(range(BLOCK_SIZE - 1)), 9, block_hasher=hasher)
    scheduler.add_request(first)
    simulation.step()
    simulation.step()
    # Its first token is known. The step that reads it in, and so fills the block, is in flight.
    assert len(simulation.in_flight) == 1 and first.num_in_flight_tokens == 1
    assert first.num_tokens == first.num_computed_tokens == BLOCK_SIZE
    prompt = [*first.all_token_ids, 1, 2]
    second = simulated.make_request("second", prompt, 5, block_hasher=hasher)
    scheduler.add_request(second)
    if fate == "is aborted before":
        scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    elif fate == "is preempted before":
        scheduler.running.remove(first)
        scheduler._preempt_request(first, 0.0)
    simulation.step()
    # The worker compares what it reads with what must be there.
    assert second.num_computed_tokens == len(prompt)
    assert second.prefill_stats.num_cached_tokens == BLOCK_SIZE
    if fate == "is aborted after":
        scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    while scheduler.has_requests() or simulation.in_flight:
        simulation.step()
    assert simulation.outputs["second"] == expected_output(prompt, 5)
    if "aborted" not in fate:
        assert simulation.outputs["first"] == expected_output(list(range(BLOCK_SIZE - 1)), 9)
