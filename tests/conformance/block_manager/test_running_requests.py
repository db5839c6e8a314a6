"""Running requests, alike in both managers: appending, look-ahead slots, refusal, preemption and resumption."""

from __future__ import annotations

from typing import Any

from tests.conformance.block_manager.conftest import MakeHost

PROMPT = list(range(40))


def test_a_decode_takes_a_block_only_when_its_last_is_full(host: Any) -> None:
    request = host.started("a", PROMPT)
    counts = []
    for _ in range(25):
        host.start_step()
        allocated = host.append(request)
        counts.append(len(allocated.get_block_ids()[0]))
        assert (allocated is host.manager.empty_kv_cache_blocks) == (counts[-1] == 0)
        host.finish_step()
    # Positions 48 and 64 open blocks.
    assert [index for index, count in enumerate(counts) if count] == [8, 24]
    assert sum(counts) == 2


def test_the_table_of_a_running_request_is_only_appended_to(host: Any) -> None:
    requests = [host.new_request(str(index), PROMPT[: 20 + index]) for index in range(3)]
    tables: list[list[int]] = []
    for request in requests:
        host.run(request)
        tables.append(host.block_ids(request))
    for _ in range(40):
        host.decode(*requests)
        for index, request in enumerate(requests):
            table = host.block_ids(request)
            assert table[: len(tables[index])] == tables[index]
            tables[index] = table
    assert [len(table) for table in tables] == [4, 4, 4]


def test_new_blocks_are_reported_once_and_in_order(host: Any) -> None:
    request = host.new_request("a", PROMPT)
    reported = list(host.run(request).get_block_ids()[0])
    for _ in range(40):
        host.start_step()
        reported += host.append(request).get_block_ids()[0]
        host.finish_step()
    assert reported == host.block_ids(request)


def test_look_ahead_slots_are_given_and_used_up_later(host: Any) -> None:
    request = host.started("a", PROMPT)
    host.start_step()
    assert len(host.append(request, num_lookahead_tokens=7).get_block_ids()[0]) == 0
    host.finish_step()
    host.start_step()
    assert len(host.append(request, num_lookahead_tokens=24).get_block_ids()[0]) == 2
    host.finish_step()
    for _ in range(38):  # up to position 80
        host.start_step()
        assert host.append(request) is host.manager.empty_kv_cache_blocks
        host.finish_step()
    host.start_step()
    assert len(host.append(request).get_block_ids()[0]) == 1
    host.finish_step()


def test_look_ahead_ends_at_the_longest_sequence(host: Any) -> None:
    request = host.started("a", list(range(120)))
    host.start_step()
    assert host.append(request, num_lookahead_tokens=100).get_block_ids() == ([],)
    host.finish_step()
    assert len(host.block_ids(request)) == 8


def test_a_full_pool_refuses_a_running_request_and_keeps_its_table(host: Any) -> None:
    first, second = host.new_request("first", list(range(96))), host.new_request("second", [9] * 96)
    host.run(first)
    host.run(second)
    before = host.snapshot()
    host.start_step()
    assert host.append(first) is None
    assert host.snapshot() == before
    host.finish_step()
    host.free(second)
    host.decode(first)
    assert len(host.block_ids(first)) == 7


def test_reserved_blocks_hold_back_a_running_request_too(host: Any) -> None:
    request = host.started("a", list(range(48)))
    host.start_step()
    assert host.append(request, reserved_blocks=9) is None
    assert host.append(request, reserved_blocks=8) is not None
    host.finish_step()


def test_a_preempted_request_gives_everything_back_and_resumes_where_it_was(host: Any) -> None:
    request = host.started("a", PROMPT)
    host.decode(request, steps=12)
    tokens = list(request.all_token_ids)
    host.preempt(request)
    assert host.num_used_blocks == 0 and host.block_ids(request) == []
    assert host.hits(request) >= 48, "prompt and answer, as far as blocks are full"
    assert host.admit(request) is not None
    host.finish_step()
    assert list(request.all_token_ids[:-1]) == tokens
    host.decode(request, steps=20)


def test_a_preempted_request_starts_over_if_its_blocks_are_gone(host: Any) -> None:
    request = host.started("a", PROMPT)
    host.decode(request, steps=12)
    host.preempt(request)
    intruders = [host.new_request(str(index), [900 + index] * 96) for index in range(2)]
    for intruder in intruders:
        host.run(intruder)
    assert host.hits(request) == 0
    assert host.admit(request) is None
    host.finish_step()
    host.free(*intruders)
    assert host.run(request) is not None
    assert len(host.block_ids(request)) == 4


def test_preemption_in_the_step_that_would_have_computed_leaves_the_others_right(host: Any) -> None:
    first, second = host.new_request("first", list(range(90))), host.new_request("second", [9] * 90)
    host.run(first)
    host.run(second)
    host.decode(first, second, steps=6)
    # 6 blocks each: the pool is full, and the first one's next token needs a block.
    host.start_step()
    assert host.append(first) is None
    host.preempt(second)
    assert host.append(first) is not None
    host.finish_step()
    host.decode(first, steps=10)


def test_what_was_refused_without_caching_is_served_after_the_same_frees(make_host: MakeHost) -> None:
    host = make_host(9, enable_caching=False)
    first, second = host.new_request("first", [1] * 64), host.new_request("second", [2] * 64)
    assert host.run(first) is not None and host.run(second) is not None
    assert host.run(host.new_request("third", [3])) is None
    host.preempt(second)
    assert host.run(host.new_request("fourth", [3])) is not None
    host.decode(first, steps=16)
    assert host.num_used_blocks == 6
