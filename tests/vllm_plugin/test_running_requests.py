"""Running requests whose last block is full in the same step get their next blocks in one call."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import Request

from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from tests.vllm_plugin.test_kv_cache_manager import BLOCK_SIZE, admit, make_manager, make_request


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


def count_calls(manager: RoseKVCacheManager, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    calls: list[list[int]] = []
    reserve = manager.manager.reserve

    def counted(rows: Any, num_tokens: Any) -> Any:
        calls.append(rows.tolist())
        return reserve(rows, num_tokens)

    monkeypatch.setattr(manager.manager, "reserve", counted)
    return calls


def table(manager: RoseKVCacheManager, request: Request) -> list[int]:
    row = manager.running.row_of[request.request_id]
    return manager.manager.block_table[row, : manager.manager.num_row_blocks[row]].tolist()


def test_one_call_serves_all_full_requests_and_each_hears_of_its_own_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_manager()
    requests = full_requests(manager, 4)
    calls = count_calls(manager, monkeypatch)
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
    calls = count_calls(manager, monkeypatch)
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
    calls = count_calls(manager, monkeypatch)
    assert all(manager.allocate_slots(request, 1) is not None for request in (first, second))
    assert [len(rows) for rows in calls] == [2], "the first that asks still asks for all"


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
        request = make_request(name, list(range(3 * BLOCK_SIZE)))
        request.cache_salt = name
        assert len(admit(manager, request).block_ids) == 3
        manager.free(request)


def test_no_request_gets_a_block_beyond_the_model_length() -> None:
    manager = make_manager(max_model_len=BLOCK_SIZE)
    first, second = full_requests(manager, 2)
    assert manager.allocate_slots(first, 1) is manager.empty_kv_cache_blocks
    assert len(table(manager, second)) == 1
