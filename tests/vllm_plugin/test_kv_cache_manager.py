"""RoseKVCacheManager call by call: admission arithmetic, refusals that change nothing, and what a decode costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request, RequestStatus

from rose_backend.block_manager import BlockManager
from rose_backend.errors import ConfigError, IntegrityError
from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec
from rose_backend.vllm_plugin.options import HAND_BACK_OPTION

BLOCK_SIZE = 16


def full_spec() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)


def groups(*specs: Any) -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]


def make_manager(
    num_blocks: int = 11,
    *,
    specs: tuple[Any, ...] | None = None,
    retention_interval: int | None = 0,
    **options: Any,
) -> RoseKVCacheManager:
    config = KVCacheConfig(num_blocks, [], groups(*(specs or (as_rose_spec(full_spec()),))))
    config.prefix_cache_retention_interval = retention_interval
    arguments: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "log_stats": True, **options}
    return RoseKVCacheManager(
        kv_cache_config=config, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE, **arguments
    )


def make_request(name: str, prompt: list[int], **options: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=50, **options), None)


def admit(manager: RoseKVCacheManager, request: Request, **options: Any) -> Any:
    """Look up and allocate the whole prompt as the scheduler does; advance the request as if the step had run."""
    manager.new_step_starts()
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    allocated = manager.allocate_slots(
        request,
        request.num_tokens - num_hits,
        num_new_computed_tokens=num_hits,
        new_computed_blocks=blocks,
        **options,
    )
    if allocated is not None:
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
    return allocated


def state_of(manager: RoseKVCacheManager) -> Any:
    inner = manager.manager
    inner.check_integrity()
    return (
        inner.num_free_blocks,
        inner.num_free_rows,
        inner.pool.cached_blocks().tolist(),
        inner.block_table.tolist(),
        dict(manager.running.row_of),
    )


def test_a_decode_inside_its_block_asks_the_block_manager_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    request = make_request("a", list(range(20)))
    assert len(admit(manager, request).block_ids) == 2

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the block manager was asked")

    for name in ("reserve", "commit", "match", "add"):
        monkeypatch.setattr(manager.manager, name, fail)
    for _ in range(12):
        manager.new_step_starts()
        request.append_output_token_ids(7)
        assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
        manager.cache_blocks(request, request.num_computed_tokens)
        request.num_computed_tokens += 1
    monkeypatch.undo()
    request.append_output_token_ids(7)
    assert len(manager.allocate_slots(request, 1).block_ids) == 1
    assert len(manager.get_block_ids("a")[0]) == 3


@pytest.mark.parametrize(
    ("tail", "num_chunk", "options"),
    [(8, 8, {"reserved_blocks": 1}), (40, 8, {"full_sequence_must_fit": True}), (40, 40, {})],
    ids=["reserved", "full_sequence", "pool"],
)
def test_a_refusal_changes_nothing(tail: int, num_chunk: int, options: dict[str, Any]) -> None:
    manager = make_manager()
    first = make_request("first", list(range(40)))
    admit(manager, first)
    manager.free(first)
    # 7 of 10 blocks: what is left are the three that the first request filled.
    admit(manager, make_request("holder", list(range(500, 600))))
    late = make_request("late", [*range(40), *range(900, 900 + tail)])
    blocks, num_hits, _ = manager.get_computed_blocks(late)
    assert num_hits == 40
    before = state_of(manager)

    def allocate(**options: Any) -> Any:
        return manager.allocate_slots(
            late, num_chunk, num_new_computed_tokens=40, new_computed_blocks=blocks, **options
        )

    assert allocate(**options) is None and state_of(manager) == before
    assert manager.get_block_ids("late") == ([],)
    if options:
        assert len(allocate().block_ids) == 3, "only the option was in the way"


def test_a_reservation_that_fails_after_all_gives_the_row_back(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    before = state_of(manager)
    monkeypatch.setattr(type(manager.running), "reserve", lambda self, rows, target: False)
    assert admit(manager, make_request("a", list(range(20)))) is None
    assert state_of(manager) == before


def test_a_full_pool_refuses_a_running_request_and_keeps_its_table() -> None:
    manager = make_manager(9)
    first, second = make_request("first", list(range(64))), make_request("second", list(range(100, 164)))
    admit(manager, first)
    admit(manager, second)
    before = state_of(manager)
    first.append_output_token_ids(5)
    assert manager.allocate_slots(first, 1) is None
    assert state_of(manager) == before
    manager.free(second)
    assert len(manager.allocate_slots(first, 1).block_ids) == 1


def test_the_watermark_holds_back_only_newcomers_beside_others() -> None:
    manager = make_manager(watermark=0.3)  # 3 blocks
    assert manager.watermark_blocks == 3
    request = make_request("a", list(range(120)))  # 8 of 10 blocks
    assert admit(manager, request, has_scheduled_reqs=True) is None
    assert admit(manager, request, has_scheduled_reqs=False) is not None


def test_more_requests_than_rows_wait() -> None:
    manager = make_manager(max_num_seqs=1)
    first = make_request("first", [1, 2, 3])
    assert admit(manager, first) is not None
    assert admit(manager, make_request("second", [4, 5, 6])) is None
    manager.free(first)
    assert admit(manager, make_request("second", [4, 5, 6])) is not None


def test_a_hit_inside_a_block_travels_as_a_copy() -> None:
    manager = make_manager()
    first = make_request("first", list(range(30)))
    admit(manager, first)
    second = make_request("second", [*range(25), 90, 91])
    admit(manager, second)
    copies, retained = manager.take_kv_cache_block_copies()
    (first_ids,), (second_ids,) = manager.get_block_ids("first"), manager.get_block_ids("second")
    assert [tuple(copy) for copy in copies] == [(first_ids[1], second_ids[1])]
    assert first_ids[0] == second_ids[0]
    manager.block_pool.free_blocks(retained)
    assert manager.take_kv_cache_block_copies() == ([], [])
    manager.free(first)
    manager.free(second)
    assert manager.usage == 0.0
    manager.manager.check_integrity()


@pytest.mark.parametrize(("num_shared", "num_hits"), [(1, 0), (3, 0), (4, 4), (16, 16), (17, 17), (20, 20)])
def test_a_block_is_not_copied_for_a_few_tokens(num_shared: int, num_hits: int) -> None:
    manager = make_manager()
    admit(manager, make_request("a", list(range(40))))
    late = make_request("late", [*range(num_shared), *range(900, 910)])
    manager.new_step_starts()
    assert manager.get_computed_blocks(late)[1] == num_hits
    admit(manager, late)
    copies, _ = manager.take_kv_cache_block_copies()
    assert len(copies) == (num_hits % BLOCK_SIZE > 0)
    assert len(manager.get_block_ids("late")[0]) == -(-(num_shared + 10) // BLOCK_SIZE)


def test_lookups_respect_the_request_and_the_limit_asked_for() -> None:
    manager = make_manager()
    first = make_request("first", list(range(40)))
    admit(manager, first)
    manager.new_step_starts()
    late = make_request("late", list(range(40)))
    assert manager.get_computed_blocks(late)[1] == 39
    # vLLM 0.33 passes a limit of its own.
    assert manager.get_computed_blocks(late, 21)[1] == 21
    assert manager.get_computed_blocks_for_connector(late)[1:] == (39, 0, False)
    late.skip_reading_prefix_cache = True
    assert manager.get_computed_blocks(late) == (manager.empty_kv_cache_blocks, 0, 0)
    assert manager.estimate_cached_tokens(first) == 40


@pytest.mark.parametrize(("is_exact", "num_hits"), [(True, 17), (False, 16)])
def test_statistics_are_read_once(is_exact: bool, num_hits: int) -> None:
    manager = make_manager(exact_cached_tokens=is_exact)
    request = make_request("a", list(range(40)))
    manager.record_prefix_cache_stats(request, 17)
    stats = manager.make_prefix_cache_stats()
    assert stats is not None and (stats.requests, stats.queries, stats.hits) == (1, 40, num_hits)
    again = manager.make_prefix_cache_stats()
    assert again is not None and again.requests == 0
    assert make_manager(log_stats=False).make_prefix_cache_stats() is None


def test_the_cache_is_reset_only_while_no_request_holds_blocks() -> None:
    manager = make_manager()
    request = make_request("a", list(range(40)))
    admit(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    stats = manager.make_prefix_cache_stats()
    assert stats is not None and stats.reset
    manager.new_step_starts()
    assert manager.get_computed_blocks(make_request("b", list(range(40))))[1] == 0


def test_requests_that_end_together_are_released_together(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    requests = [make_request(f"r{index}", [100 * index, *range(1, 40)]) for index in range(3)]
    for request in requests:
        admit(manager, request)
    calls: list[int] = []
    for name in ("commit", "free"):
        original = getattr(BlockManager, name)
        monkeypatch.setattr(
            BlockManager,
            name,
            lambda *args, call=original, **more: calls.append(len(args[1])) or call(*args, **more),
        )
    for request in requests:
        manager.free(request)
        # As vLLM sets back a request that it preempts.
        request.num_computed_tokens = 0
    assert not calls and manager.usage == 0.0
    assert calls == [3, 3]
    for request in requests:
        assert manager.get_computed_blocks(request)[1] == 39


def test_blocks_of_a_finished_request_may_return_later() -> None:
    manager = make_manager()
    request = make_request("a", list(range(40)))
    admit(manager, request)
    held = manager.pop_blocks_for_free(request)
    assert manager.get_block_ids("a") == ([],) and manager.usage > 0
    manager.block_pool.free_blocks(reversed(held))
    assert manager.usage == 0.0
    assert manager.pop_blocks_for_free(request) == []
    manager.free(request)
    with pytest.raises(IntegrityError, match="never gave out"):
        manager.block_pool.free_blocks(["something"])


def test_what_the_scheduler_reads_at_start_up() -> None:
    manager = make_manager()
    (group,) = manager.coordinator.single_type_managers
    assert group.block_size == BLOCK_SIZE and group.block_pool is manager.block_pool
    request = make_request("a", list(range(40)))
    assert manager.coordinator.get_num_blocks_to_allocate("a", 40) == 3
    admit(manager, request)
    assert manager.coordinator.get_num_blocks_to_allocate("a", 60, total_computed_tokens=40) == 1
    assert manager.get_block_ids_for_computed_tokens("a", 17)[0] == manager.get_block_ids("a")[0][:2]
    handles = manager.get_blocks("a").blocks[0]
    assert [handle.block_id for handle in handles] == manager.get_block_ids("a")[0]
    assert manager.take_events() == [] and manager.take_new_block_ids() == []


def test_groups_that_rose_does_not_attend_to_are_refused_by_name() -> None:
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=32
    )
    rose = as_rose_spec(full_spec())
    for specs, kinds in (
        ((full_spec(),), "FullAttentionSpec"),
        ((rose, replace(window, block_size=32)), "RoseAttentionSpec, SlidingWindowSpec"),
        ((rose, replace(window, extra_retained_tokens=1)), "RoseAttentionSpec, SlidingWindowSpec"),
        ((full_spec(), window), "FullAttentionSpec, SlidingWindowSpec"),
        ((window,), "SlidingWindowSpec"),
        ((replace(rose, sliding_window=32),), "RoseAttentionSpec"),
        ((replace(rose, attention_chunk_size=32),), "RoseAttentionSpec"),
        ((replace(rose, non_causal=True),), "RoseAttentionSpec"),
    ):
        with pytest.raises(ConfigError, match=kinds) as caught:
            make_manager(specs=specs)
        assert HAND_BACK_OPTION in str(caught.value)
    make_manager(specs=(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": rose, "b": rose}),))
    # A drafter's layer has a backend that vLLM chooses.
    drafter = full_spec()
    make_manager(specs=(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": rose, "b": drafter}),))


def test_a_pool_for_less_than_one_sequence_is_refused() -> None:
    make_manager(9)
    with pytest.raises(ConfigError, match="7 usable blocks of 16 tokens"):
        make_manager(8)


def test_published_tokens_are_those_of_earlier_steps_only() -> None:
    manager = make_manager()
    request = make_request("a", list(range(40)))
    manager.new_step_starts()
    assert manager.allocate_slots(request, 24) is not None
    same = make_request("same", list(range(40)))
    assert manager.get_computed_blocks(same)[1] == 0
    # The scheduler counts the chunk as computed at the end of the step; the next step may use it.
    request.num_computed_tokens = 24
    assert manager.get_computed_blocks(same)[1] == 0
    manager.new_step_starts()
    assert manager.get_computed_blocks(same)[1] == 24
    assert manager.manager.num_computed_tokens[np.array([0])].tolist() == [24]


def test_the_manager_refuses_a_retention_interval_itself() -> None:
    for interval in (0, None):
        make_manager(retention_interval=interval)
    with pytest.raises(ConfigError, match="prefix_cache_retention_interval: got 64"):
        make_manager(retention_interval=64)
