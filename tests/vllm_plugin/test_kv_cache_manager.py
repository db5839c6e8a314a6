"""RoseKVCacheManager call by call: admission, refusals that change nothing, what becomes findable, groups, decodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_cache_interface import SlidingWindowSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import Request

from rose_backend.block_manager import BlockManager, GroupType
from rose_backend.errors import ConfigError, IntegrityError
from rose_backend.vllm_plugin.kv_cache.groups import RoseGroups
from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec
from rose_backend.vllm_plugin.options import HAND_BACK_OPTION
from tests.support.vllm_plugin.managers import (
    BLOCK_SIZE,
    SHAPE,
    admit,
    full_spec,
    look_up,
    make_manager,
    make_request,
    state_of,
)


def decode(manager: RoseKVCacheManager, request: Request, token: int) -> None:
    request.append_output_token_ids(token)
    manager.new_step_starts()
    assert manager.allocate_slots(request, 1) is not None
    request.num_computed_tokens += 1


def refuse(monkeypatch: pytest.MonkeyPatch, manager: RoseKVCacheManager) -> None:
    """Let nobody ask the block manager."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the block manager was asked")

    for name in ("reserve", "commit", "match", "add"):
        monkeypatch.setattr(manager.manager, name, fail)


def note_rows(monkeypatch: pytest.MonkeyPatch, manager: RoseKVCacheManager, name: str) -> list[list[int]]:
    """Return the rows that a method of the block manager is called for."""
    calls: list[list[int]] = []
    original = getattr(manager.manager, name)

    def noted(rows: Any, *args: Any) -> Any:
        calls.append(rows.tolist())
        return original(rows, *args)

    monkeypatch.setattr(manager.manager, name, noted)
    return calls


def test_a_decode_inside_its_block_asks_the_block_manager_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    request = make_request("a", list(range(20)))
    assert len(admit(manager, request).block_ids) == 2
    refuse(monkeypatch, manager)
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
    first, second = make_request("first", list(range(30))), make_request("second", [*range(25), 90, 91])
    admit(manager, first)
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
    assert look_up(manager, late) == num_hits
    admit(manager, late)
    copies, _ = manager.take_kv_cache_block_copies()
    assert len(copies) == (num_hits % BLOCK_SIZE > 0)
    assert len(manager.get_block_ids("late")[0]) == -(-(num_shared + 10) // BLOCK_SIZE)


def test_lookups_respect_the_request_and_the_limit_asked_for() -> None:
    manager = make_manager()
    first = make_request("first", list(range(40)))
    admit(manager, first)
    late = make_request("late", list(range(40)))
    assert look_up(manager, late) == 39
    # vLLM 0.33 passes a limit of its own.
    assert manager.get_computed_blocks(late, 21)[1] == 21
    assert manager.get_computed_blocks_for_connector(late)[1:] == (39, 0, False)
    late.skip_reading_prefix_cache = True
    assert manager.get_computed_blocks(late) == (manager.empty_kv_cache_blocks, 0, 0)
    assert manager.estimate_cached_tokens(first) == 40


@pytest.mark.parametrize("num_lookahead", [0, 1, 3])
@pytest.mark.parametrize(("full_blocks_only", "num_found"), [(False, 37), (True, 32)])
def test_where_hits_end_beside_a_drafter(full_blocks_only: bool, num_found: int, num_lookahead: int) -> None:
    manager = make_manager(full_blocks_only=full_blocks_only, num_prefill_lookahead=num_lookahead)
    admit(manager, make_request("first", list(range(40))))
    expected = num_found - num_lookahead
    if full_blocks_only:
        expected -= expected % 16
    assert look_up(manager, make_request("like it", [*range(37), 60, 61, 62])) == expected


@pytest.mark.parametrize(("is_exact", "num_hits"), [(True, 17), (False, 16)])
def test_statistics_are_read_once(is_exact: bool, num_hits: int) -> None:
    manager = make_manager(exact_cached_tokens=is_exact)
    manager.record_prefix_cache_stats(make_request("a", list(range(40))), 17)
    stats = manager.make_prefix_cache_stats()
    assert stats is not None and (stats.requests, stats.queries, stats.hits) == (1, 40, num_hits)
    again = manager.make_prefix_cache_stats()
    assert again is not None and again.requests == 0
    assert make_manager(log_stats=False).make_prefix_cache_stats() is None


def test_a_preempted_request_keeps_what_its_client_is_told() -> None:
    manager = make_manager()
    request: Any = make_request("a", list(range(40)))
    request.prefill_stats.set(40, 37, 0)
    manager.record_prefix_cache_stats(request, 37)
    request.num_preemptions = 1
    manager.record_prefix_cache_stats(request, 39)
    assert (request.prefill_stats.num_cached_tokens, request.prefill_stats.num_computed_tokens) == (32, 8)
    stats = manager.make_prefix_cache_stats()
    assert stats is not None and (stats.hits, stats.preempted_hits) == (32, 32)
    request.take_prefill_stats()
    manager.record_prefix_cache_stats(request, 39)


def test_the_cache_is_reset_only_while_no_request_holds_blocks() -> None:
    manager = make_manager()
    request = make_request("a", list(range(40)))
    admit(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    stats = manager.make_prefix_cache_stats()
    assert stats is not None and stats.reset
    assert look_up(manager, make_request("b", list(range(40)))) == 0


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


WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=20)
ROSE = as_rose_spec(full_spec())
SPECS = (WINDOW, ROSE, replace(WINDOW, sliding_window=40), WINDOW)


def test_groups_that_rose_does_not_attend_to_are_refused_by_name() -> None:
    for specs, kinds in (
        ((full_spec(),), "FullAttentionSpec"),
        ((ROSE, replace(WINDOW, block_size=32)), "RoseAttentionSpec, SlidingWindowSpec"),
        ((ROSE, replace(WINDOW, extra_retained_tokens=1)), "RoseAttentionSpec, SlidingWindowSpec"),
        ((full_spec(), WINDOW), "FullAttentionSpec, SlidingWindowSpec"),
        ((WINDOW,), "SlidingWindowSpec"),
        *(
            ((replace(ROSE, **change),), "RoseAttentionSpec")
            for change in ({"sliding_window": 32}, {"attention_chunk_size": 32}, {"non_causal": True})
        ),
    ):
        with pytest.raises(ConfigError, match=kinds) as caught:
            make_manager(specs=specs)
        assert HAND_BACK_OPTION in str(caught.value)
    # A drafter's layer has a backend that vLLM chooses.
    for second in (ROSE, full_spec()):
        layers = {"a": ROSE, "b": second}
        make_manager(specs=(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers),))


def test_a_pool_that_can_never_hold_one_sequence_is_refused() -> None:
    make_manager(9)
    with pytest.raises(ConfigError, match="7 usable blocks of 16 tokens"):
        make_manager(8)
    one = RoseGroups((None,), (GroupType(),), ((0, 0),), 16, 0)
    one.check_pool_size(65, 1024, 32)
    with pytest.raises(
        ConfigError, match=r"63 usable blocks of 16 tokens .* max_model_len 1024 \(64 blocks\)"
    ):
        one.check_pool_size(64, 1024, 32)
    # Three groups of 39 tokens before 32 new ones: they may begin inside a block.
    more = RoseGroups((None,) * 4, (GroupType(), GroupType(40, 3)), ((0, 0), (1, 0), (1, 1), (1, 2)), 16, 0)
    more.check_pool_size(1 + 64 + 3 * 6, 1024, 32)
    more.check_pool_size(1 + 4 * 2, 32, 32)
    with pytest.raises(ConfigError, match=r"\(82 blocks\)"):
        more.check_pool_size(64 + 3 * 6, 1024, 32)


def test_the_manager_refuses_a_retention_interval_itself() -> None:
    for interval in (0, None):
        make_manager(retention_interval=interval)
    with pytest.raises(ConfigError, match="prefix_cache_retention_interval: got 64"):
        make_manager(retention_interval=64)


# Several groups: blocks in vLLM's order of groups, and what is told of them.
def make_grouped() -> RoseKVCacheManager:
    return make_manager(80, specs=SPECS, max_in_flight_tokens=32)


def columns(block_ids: tuple[list[int], ...]) -> list[list[bool]]:
    """Return which columns of each group have a block."""
    return [[block_id != 0 for block_id in ids] for ids in block_ids]


def test_blocks_are_reported_for_each_group_and_those_that_windows_have_passed_are_null() -> None:
    manager = make_grouped()
    first = make_request("a", [*range(100)])
    allocated = admit(manager, first).get_block_ids()
    assert columns(allocated) == [[True] * 7] * 4
    assert len({block_id for ids in allocated for block_id in ids}) == 4 * 7, "a block is one group's"
    assert manager.get_block_ids("a") == allocated
    # Of the next blocks, one for each group is new; what the windows have passed is listed as null from now on.
    first.append_output_token_ids([7] * 12)
    assert manager.allocate_slots(first, 12).get_block_ids(allow_none=True) is None
    first.num_computed_tokens = 112
    first.append_output_token_ids([7])
    new = manager.allocate_slots(first, 1).get_block_ids()
    assert columns(new) == [[True]] * 4
    # Token 112 attends to 93 and later, or to 73 and later.
    wanted = [[False] * 5 + [True] * 3, [True] * 8, [False] * 4 + [True] * 4]
    assert columns(manager.get_block_ids("a")) == [*wanted, wanted[0]]
    assert [len(ids) for ids in manager.get_block_ids_for_computed_tokens("a", 100)] == [7] * 4
    handles = manager.get_blocks("a").blocks
    assert [[not handle.is_null for handle in group] for group in handles] == [*wanted, wanted[0]]
    manager.manager.check_integrity()


def test_a_hit_lists_what_each_group_has() -> None:
    manager = make_grouped()
    first = make_request("a", [*range(100)])
    admit(manager, first)
    manager.free(first)
    second = make_request("b", [*range(90), 500, 501])
    manager.new_step_starts()
    blocks, num_hits, boundary = manager.get_computed_blocks(second)
    assert (num_hits, boundary) == (90, 0)
    # Token 90 attends to 71 and later, or to 51 and later.
    wanted = [[False] * 4 + [True] * 2, [True] * 6, [False] * 3 + [True] * 3]
    found = blocks.get_block_ids()
    assert columns(found) == [*wanted, wanted[0]]
    assert blocks.get_block_ids(group_ids=[1]) == (found[1],)
    got = manager.allocate_slots(second, 2, num_hits, blocks).get_block_ids()
    assert columns(got) == [*wanted, wanted[0]]
    # All but the tails, which nobody else holds, or which are copied.
    assert [ids[:-1] for ids in found] == [ids[:-1] for ids in got]
    copies, held = manager.take_kv_cache_block_copies()
    pairs = {(copy.src_block_id, copy.dst_block_id) for copy in copies}
    assert len(copies) == len(pairs) == 4
    assert pairs == {(source[-1], target[-1]) for source, target in zip(found, got, strict=True)}
    manager.block_pool.free_blocks(held)
    manager.manager.check_integrity()


def test_what_vllm_reads_of_groups() -> None:
    manager = make_grouped()
    managers = manager.coordinator.single_type_managers
    assert [one.kv_cache_spec for one in managers] == list(SPECS)
    assert [one.kv_cache_group_id for one in managers] == [0, 1, 2, 3]
    assert manager.num_kv_cache_groups == 4 and manager.coordinator.full_attention_group_id == 1
    assert manager.get_num_common_prefix_blocks("a") == [0] * 4
    assert manager.empty_kv_cache_blocks.get_block_ids() == ([],) * 4
    # 8 blocks; 19 or 39 tokens before 32 new ones, which may begin inside a block.
    assert manager.coordinator.get_num_blocks_to_allocate("a", 128) == 8 + 2 * 5 + 6


# When what running requests have computed becomes findable.
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
    assert look_up(manager, same) == 24
    assert manager.manager.num_computed_tokens[np.array([0])].tolist() == [24]


def found(manager: RoseKVCacheManager, tokens: list[int]) -> int:
    """Return how many of these tokens a request finds that is looked up in the next step."""
    request = make_request("lookup", [*tokens, -1])
    num_hits = look_up(manager, request)
    manager.free(request)
    return num_hits


def test_a_running_request_is_found_by_its_prompt_and_its_full_blocks() -> None:
    manager = make_manager()
    request = make_request("a", list(range(BLOCK_SIZE + 5)))
    admit(manager, request)
    assert found(manager, request._all_token_ids) == BLOCK_SIZE + 5
    for token in range(100, 100 + BLOCK_SIZE):
        decode(manager, request, token)
        num_computed = request.num_computed_tokens
        full = num_computed - num_computed % BLOCK_SIZE
        assert found(manager, request._all_token_ids) == max(full, BLOCK_SIZE + 5)
    manager.free(request)
    assert found(manager, request._all_token_ids) == request.num_computed_tokens
    manager.manager.check_integrity()


def test_chunks_of_a_prompt_are_found_to_its_last_token() -> None:
    manager, prompt = make_manager(), list(range(3 * BLOCK_SIZE + 4))
    request = make_request("a", prompt)
    manager.new_step_starts()
    blocks, _, _ = manager.get_computed_blocks(request)
    # The second chunk fills no block; the last one is short, but ends the prompt.
    for end, num_found in ((19, 19), (21, 19), (49, 49), (52, 52)):
        manager.allocate_slots(request, end - request.num_computed_tokens, 0, blocks)
        request.num_computed_tokens = end
        assert found(manager, prompt) == num_found


def test_a_step_in_which_no_row_fills_a_block_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    requests = [make_request(f"r{index}", [100 * index + n for n in range(4 + index)]) for index in range(3)]
    for request in requests:
        admit(manager, request)
    found(manager, [1, 2, 3])
    committed = note_rows(monkeypatch, manager, "commit")
    for step in range(BLOCK_SIZE):
        for request in requests:
            decode(manager, request, step)
        found(manager, [1, 2, 3])
    # Each request fills one block, each in another step.
    assert sorted(committed) == [[0], [1], [2]]


# Running requests whose last block is full in the same step get their next blocks in one call.
def full_requests(manager: RoseKVCacheManager, count: int) -> list[Request]:
    """Return running requests that have computed exactly one block each and want one more token."""
    requests = []
    for index in range(count):
        request = make_request(f"r{index}", [100 * index + offset for offset in range(BLOCK_SIZE)])
        assert len(admit(manager, request).block_ids) == 1
        request.append_output_token_ids(7)
        requests.append(request)
    manager.new_step_starts()
    return requests


def table(manager: RoseKVCacheManager, request: Request) -> list[int]:
    row = manager.running.row_of[request.request_id]
    return manager.manager.block_table[row, : manager.manager.num_row_blocks[row]].tolist()


def test_one_call_serves_all_full_requests_and_each_hears_of_its_own_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_manager()
    requests = full_requests(manager, 4)
    calls = note_rows(monkeypatch, manager, "reserve")
    for request in requests:
        (new_block,) = manager.allocate_slots(request, 1).block_ids
        assert table(manager, request)[1:] == [new_block]
        assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    assert [len(rows) for rows in calls] == [4]
    manager.manager.check_integrity()


def test_a_pool_too_small_for_all_full_rows_serves_the_one_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(num_blocks=9)
    requests = full_requests(manager, 4)
    holder = make_request("holder", list(range(5000, 5000 + 2 * BLOCK_SIZE)))
    calls = note_rows(monkeypatch, manager, "reserve")
    assert admit(manager, holder) is None, "four rows are all there are"
    for index, request in enumerate(requests):
        # Blocks that are set aside are not handed to others in passing.
        allocated = manager.allocate_slots(request, 1, reserved_blocks=3)
        assert (allocated is None) == (index > 0), index
    assert [len(rows) for rows in calls] == [1]
    assert manager.manager.num_free_blocks == 3


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (1,)])
def test_blocks_of_a_batch_are_those_that_requests_get_one_by_one(order: tuple[int, ...]) -> None:
    managers = make_manager(), make_manager()
    requests = [full_requests(manager, 3) for manager in managers]
    one_by_one = [managers[0].allocate_slots(requests[0][index], 1).get_block_ids() for index in order]
    rows = [managers[1].running.row_of[requests[1][index].request_id] for index in order]
    assert managers[1].running.allocate_next_blocks(rows, len(order)) == one_by_one
    for first, second in zip(*requests, strict=True):
        assert table(managers[0], first) == table(managers[1], second)
    # One block more in each row, and the next step has room.
    assert [managers[1].running.capacity[row] for row in rows] == [2 * BLOCK_SIZE] * len(rows)


def test_a_batch_that_blocks_are_short_for_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(num_blocks=9)
    first, second, third = requests = full_requests(manager, 3)
    holder = make_request("holder", list(range(5000, 5000 + 2 * BLOCK_SIZE + 8)))
    assert len(admit(manager, holder).block_ids) == 3 and manager.manager.num_free_blocks == 2
    rows = [manager.running.row_of[request.request_id] for request in requests]
    assert manager.running.allocate_next_blocks(rows, 3) is None
    assert [len(table(manager, request)) for request in requests] == [1, 1, 1]
    manager.free(third)
    calls = note_rows(monkeypatch, manager, "reserve")
    assert all(manager.allocate_slots(request, 1) is not None for request in (first, second))
    assert [len(rows) for rows in calls] == [2], "the first that asks still asks for all"


def test_rows_that_only_lack_look_ahead_are_extended_together(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    manager.running.tokens_per_decode, manager.running.num_lookahead_tokens = 1 + 2, 2
    requests = full_requests(manager, 3)
    for request in requests:
        # Room for a token and two drafts, and for one of the two that look ahead.
        request.num_computed_tokens = BLOCK_SIZE - 4
    calls = note_rows(monkeypatch, manager, "reserve")
    for request in requests:
        assert len(manager.allocate_slots(request, 3, num_lookahead_tokens=2).get_block_ids()[0]) == 1
    assert [len(rows) for rows in calls] == [3]


def test_a_request_that_leaves_before_it_asks_gives_its_share_back() -> None:
    manager = make_manager()
    first, second = full_requests(manager, 2)
    manager.allocate_slots(first, 1)
    assert manager.manager.num_free_blocks == 10 - 4
    manager.free(second)
    manager.free(first)
    manager.manager.check_integrity()
    assert manager.usage == 0.0


def test_several_tokens_at_once_add_to_the_share() -> None:
    manager = make_manager()
    first, second = full_requests(manager, 2)
    manager.allocate_slots(first, 1)
    blocks = manager.allocate_slots(second, 1, num_lookahead_tokens=BLOCK_SIZE + 3).block_ids.tolist()
    assert len(blocks) == 2 and table(manager, second)[1:] == blocks


def test_a_share_waits_for_a_request_that_was_not_scheduled() -> None:
    manager = make_manager()
    first, second = full_requests(manager, 2)
    for _ in range(2 * BLOCK_SIZE):
        manager.allocate_slots(first, 1)
        first.num_computed_tokens += 1
        manager.new_step_starts()
    # Two more blocks for the first; the second still has one, however often the first asks.
    assert manager.manager.num_free_blocks == 10 - 3 - 2
    (late,) = manager.allocate_slots(second, 1).block_ids
    assert table(manager, second)[1:] == [late]


def test_a_request_with_room_gets_no_block() -> None:
    manager = make_manager()
    roomy = make_request("roomy", list(range(2000, 2000 + BLOCK_SIZE - 1)))
    admit(manager, roomy)
    first, second = full_requests(manager, 2)
    manager.allocate_slots(first, 1)
    assert [len(table(manager, request)) for request in (roomy, first, second)] == [1, 2, 2]
    # vLLM hears of the block ahead once: when it asks for the request's next block.
    assert len(manager.get_block_ids(second.request_id)[0]) == 1
    assert manager.allocate_slots(second, 1).get_block_ids() == (table(manager, second)[1:],)
    assert manager.get_block_ids(second.request_id) == (table(manager, second),)


def test_a_row_that_is_used_again_reports_all_its_blocks() -> None:
    manager = make_manager()
    for name in ("before", "after"):
        request = make_request(name, list(range(3 * BLOCK_SIZE)), name)
        assert len(admit(manager, request).block_ids) == 3
        manager.free(request)


def test_no_request_gets_a_block_beyond_the_model_length() -> None:
    manager = make_manager(max_model_len=BLOCK_SIZE)
    first, second = full_requests(manager, 2)
    assert manager.allocate_slots(first, 1) is manager.empty_kv_cache_blocks
    assert len(table(manager, second)) == 1
