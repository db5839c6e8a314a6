"""Freeing and forgetting, alike in both managers: what stays findable, in which order it goes, and resetting."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.block_manager.conftest import MakeHost


def fill(host: Any, num_blocks: int) -> Any:
    """Take ``num_blocks`` blocks for content that is not cached."""
    request = host.new_request(f"filler{num_blocks}", [12345] * (16 * num_blocks))
    assert host.run(request) is not None
    return request


def cached(host: Any, name: str, first_token: int, num_blocks: int) -> Any:
    """Compute and finish a prompt of full blocks; return a request that would find all of it."""
    prompt = list(range(first_token, first_token + 16 * num_blocks))
    request = host.new_request(name, prompt)
    assert host.run(request) is not None
    host.free(request)
    return host.new_request(f"probe of {name}", [*prompt, 1])


def test_unused_blocks_go_before_cached_ones(host: Any) -> None:
    probe = cached(host, "a", 100, 4)
    fill(host, 8)
    assert host.hits(probe) == 64


def test_evicted_blocks_of_a_running_request_are_not_found(host: Any) -> None:
    prompt = list(range(100, 148))
    request, probe = host.new_request("a", prompt), host.new_request("probe", [*prompt, 1])
    assert host.run(request) is not None
    assert host.hits(probe) == 48
    host.manager.evict_blocks(set(host.block_ids(request)[1:]))
    assert host.hits(probe) == 16
    host.decode(request, steps=20)
    host.free(request)
    assert host.hits(probe) == 16


@pytest.mark.parametrize(
    ("num_evicted", "expected"), [(1, [32, 48]), (3, [0, 48]), (4, [0, 32]), (6, [0, 0])]
)
def test_the_least_recently_freed_goes_first_and_tails_before_heads(
    host: Any, num_evicted: int, expected: list[int]
) -> None:
    probes = [cached(host, "old", 100, 3), cached(host, "young", 300, 3)]
    fill(host, 6)
    host.started("evictor", [777] * (16 * num_evicted))
    assert [host.hits(probe) for probe in probes] == expected


def test_use_makes_young_again(host: Any) -> None:
    old, young = cached(host, "old", 100, 3), cached(host, "young", 300, 3)
    host.run(old)
    host.free(old)
    fill(host, 6)
    host.started("evictor", [777] * 32)
    again = host.new_request("again", [*range(100, 148), 1])
    assert host.hits(again) == 48 and host.hits(young) < 48


def test_held_blocks_are_never_evicted(host: Any) -> None:
    holder = host.started("holder", list(range(64)))
    probe = host.new_request("probe", [*range(64), 1])
    host.free(fill(host, 8))
    host.free(fill(host, 8))
    assert host.hits(probe) == 64
    host.decode(holder, steps=20)


def test_a_reader_keeps_a_prefix_from_eviction_when_its_first_owner_left(host: Any) -> None:
    first = host.started("first", list(range(64)))
    host.started("reader", [*range(64), 900])
    host.free(first)
    host.free(fill(host, 7))
    host.free(fill(host, 7))
    assert host.hits(host.new_request("probe", [*range(64), 901])) == 64


def test_an_evicted_prefix_is_computed_again(host: Any) -> None:
    cached(host, "a", 100, 6)
    fillers = [host.new_request(f"f{index}", [index] * 96) for index in range(2)]
    for filler in fillers:
        assert host.run(filler) is not None
    host.free(*fillers)
    again = host.new_request("again", list(range(100, 196)))
    assert host.hits(again) == 0
    host.run(again)
    host.decode(again, steps=10)


def test_a_reset_is_refused_while_requests_hold_blocks(host: Any) -> None:
    prompt = list(range(48))
    request, probe = host.new_request("a", prompt), host.new_request("probe", [*prompt, 1])
    host.run(request)
    before = host.snapshot(probe)
    assert host.manager.reset_prefix_cache() is False
    assert host.snapshot(probe) == before
    host.free(request)
    assert host.hits(probe) == 48
    assert host.manager.reset_prefix_cache() is True
    assert host.hits(probe) == 0
    assert host.manager.make_prefix_cache_stats().reset
    host.run(probe)
    assert host.hits(host.new_request("later", [*prompt, 2])) == 48


def test_an_empty_cache_can_be_reset(make_host: MakeHost) -> None:
    for enable_caching in (True, False):
        host = make_host(enable_caching=enable_caching)
        assert host.manager.reset_prefix_cache() is True


def test_popped_blocks_stay_held_until_they_are_handed_back(host: Any) -> None:
    prompt = list(range(48))
    request = host.started("a", prompt)
    blocks = host.pop_for_later_free(request)
    assert host.block_ids(request) == []
    assert host.num_used_blocks == 3
    assert host.manager.reset_prefix_cache() is False
    host.manager.block_pool.free_blocks(reversed(blocks))
    assert host.num_used_blocks == 0
    assert host.hits(host.new_request("probe", [*prompt, 1])) == 48


def test_freeing_a_request_without_blocks_changes_nothing(host: Any) -> None:
    stranger = host.new_request("stranger", [1, 2, 3])
    before = host.snapshot()
    host.manager.free(stranger)
    assert host.pop_for_later_free(stranger) == []
    assert host.snapshot() == before


def test_an_aborted_prefill_leaves_only_what_it_computed(host: Any) -> None:
    request = host.new_request("a", list(range(100)))
    host.run(request, num_tokens=32)
    host.free(request)
    assert host.hits(host.new_request("probe", list(range(100)))) == 32
