"""What both managers do alike when a request comes in: how many blocks, when it is refused, what a refusal leaves."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.block_manager.conftest import MakeHost
from tests.conformance.block_manager.managers import BLOCK_SIZE


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 100, 128])
def test_a_prompt_gets_the_blocks_it_fills(host: Any, num_tokens: int) -> None:
    request = host.new_request("a", list(range(num_tokens)))
    allocated = host.run(request)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    assert allocated.get_block_ids() == (host.block_ids(request),)
    assert len(host.block_ids(request)) == host.num_used_blocks == num_blocks
    assert host.manager.usage == pytest.approx(num_blocks / 12)


def test_a_chunked_prompt_gets_blocks_chunk_by_chunk(host: Any) -> None:
    request = host.new_request("a", list(range(100)))
    host.run(request, num_tokens=20)
    counts = [host.num_used_blocks]
    for chunk in (12, 1, 31, 36):
        host.start_step()
        host.append(request, chunk)
        host.finish_step()
        counts.append(host.num_used_blocks)
    assert counts == [2, 2, 3, 4, 7]
    assert request.num_output_tokens == 1


def test_a_hit_on_full_blocks_shares_them(host: Any) -> None:
    first = host.new_request("first", list(range(32)))
    late = host.new_request("late", [*range(32), *range(500, 520)])
    host.run(first)
    assert host.hits(late) == 32
    host.run(late)
    assert host.block_ids(late)[:2] == host.block_ids(first)[:2]
    assert host.num_used_blocks == 4
    host.free(first)
    assert host.num_used_blocks == 4, "shared blocks stay while one request reads them"
    host.decode(late, steps=3)


def test_a_pool_without_enough_blocks_refuses_and_stays_as_it_was(host: Any) -> None:
    cached, holder = host.new_request("cached", list(range(32))), host.new_request("holder", [9] * 112)
    host.run(cached)
    host.free(cached)
    host.run(holder)
    probe = host.new_request("probe", list(range(33)))
    late = host.new_request("late", [*range(32), *[7] * 70])
    before = host.snapshot(probe)
    # 7 blocks: 5 are free, two of which are the hit itself.
    assert host.run(late) is None
    assert host.snapshot(probe) == before
    assert host.block_ids(late) == []
    fitting = host.new_request("fitting", [*range(32), *[7] * 48])
    assert host.run(fitting) is not None
    assert host.num_used_blocks == 12


def test_a_refused_request_is_served_once_blocks_return(host: Any) -> None:
    holder, late = host.new_request("holder", [9] * 112), host.new_request("late", [7] * 90)
    host.run(holder)
    assert host.run(late) is None
    host.free(holder)
    assert host.run(late) is not None


def test_a_whole_pool_can_be_used_and_comes_back_whole(host: Any) -> None:
    for generation in range(3):
        requests = [host.new_request(f"{generation}.{index}", [index, generation] * 24) for index in range(4)]
        for request in requests:
            assert host.run(request) is not None
        assert host.manager.usage == 1.0
        assert host.run(host.new_request(f"{generation}.more", [5])) is None
        host.free(*requests)
        assert host.manager.usage == 0.0


def test_reserved_blocks_are_left_alone(host: Any) -> None:
    request = host.new_request("a", list(range(64)))
    before = host.snapshot()
    assert host.run(request, reserved_blocks=9) is None
    assert host.snapshot() == before
    assert host.run(request, reserved_blocks=8) is not None


@pytest.mark.parametrize(("num_lookahead", "num_blocks"), [(7, 3), (8, 3), (9, 4), (40, 5), (500, 8)])
def test_look_ahead_slots_are_given_at_admission(host: Any, num_lookahead: int, num_blocks: int) -> None:
    request = host.new_request("a", list(range(40)))
    host.run(request, num_lookahead_tokens=num_lookahead)
    assert len(host.block_ids(request)) == num_blocks
    host.decode(request, steps=30)


def test_look_ahead_slots_count_when_blocks_are_short(host: Any) -> None:
    host.started("holder", [9] * 112)
    late = host.new_request("late", list(range(64)))
    before = host.snapshot()
    assert host.run(late, num_lookahead_tokens=17) is None
    assert host.snapshot() == before
    assert host.run(late, num_lookahead_tokens=16) is not None


def test_a_chunk_is_admitted_only_if_the_full_sequence_fits(host: Any) -> None:
    holder, late = host.new_request("holder", [9] * 112), host.new_request("late", [7] * 90)
    host.run(holder)
    before = host.snapshot()
    assert host.run(late, num_tokens=16, full_sequence_must_fit=True) is None
    assert host.snapshot() == before
    assert host.run(late, num_tokens=16) is not None
    assert host.num_used_blocks == 8


@pytest.mark.parametrize("num_tokens", [80, 81])
def test_the_watermark_holds_back_newcomers_beside_others_only(make_host: MakeHost, num_tokens: int) -> None:
    host = make_host(watermark=0.54)  # 7 of 13 blocks
    request = host.new_request("a", list(range(num_tokens)))
    fits_beside_others = num_tokens <= 80
    assert (host.run(request, has_scheduled_reqs=True) is not None) == fits_beside_others
    if not fits_beside_others:
        assert host.run(request, has_scheduled_reqs=False) is not None
    # A running request is not held back.
    host.decode(request, steps=120 - num_tokens)
    assert host.num_used_blocks == 8


def test_the_watermark_counts_in_the_full_sequence_check(make_host: MakeHost) -> None:
    host = make_host(watermark=0.54)
    request = host.new_request("a", list(range(96)))
    assert host.run(request, num_tokens=16, full_sequence_must_fit=True) is None
    assert host.run(request, num_tokens=16) is not None
