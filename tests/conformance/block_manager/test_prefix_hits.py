"""Prefix hits that both managers give alike: at block boundaries, below the last token, and for whom they are meant."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.block_manager.conftest import MakeHost

BASE = list(range(48))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([*BASE, 900], 48),
        ([*BASE[:32], 900, 901], 32),
        ([*BASE[:16], *range(800, 860)], 16),
        ([900, *BASE], 0),
        ([0], 0),
        (BASE[16:], 0),
    ],
    ids=["all", "two_blocks", "one_block", "shifted", "one_token", "suffix"],
)
def test_the_longest_prefix_of_full_blocks_is_found(host: Any, prompt: list[int], expected: int) -> None:
    host.started("first", BASE)
    assert host.hits(host.new_request("late", prompt)) == expected


def test_a_lookup_changes_nothing(host: Any) -> None:
    first = host.started("first", BASE)
    host.free(first)
    probe = host.new_request("probe", [*BASE, 900])
    before = host.snapshot(probe)
    for _ in range(3):
        assert host.hits(probe) == 48
    assert host.snapshot(probe) == before
    assert host.manager.usage == 0.0


def test_a_whole_cached_prompt_leaves_at_least_its_last_token_to_compute(host: Any) -> None:
    host.started("first", BASE)
    equal = host.new_request("equal", BASE)
    assert 32 <= host.hits(equal) <= 47
    host.run(equal)
    assert equal.num_output_tokens == 1
    host.decode(equal, steps=20)


def test_one_token_prompts_are_served_and_never_hit(host: Any) -> None:
    for index in range(3):
        request = host.new_request(str(index), [5])
        assert host.hits(request) == 0
        assert host.run(request) is not None
        host.decode(request, steps=18)
        assert len(host.block_ids(request)) == 2


def test_equal_prompts_of_one_step_are_all_served_right(host: Any) -> None:
    requests = [host.new_request(str(index), BASE[:40]) for index in range(3)]
    host.start_step()
    for request in requests:
        assert host.admit(request) is not None
    host.finish_step()
    host.decode(*requests, steps=20)
    assert len({tuple(request.output_token_ids) for request in requests}) == 1


def test_generated_tokens_are_found_too(host: Any) -> None:
    first = host.started("first", BASE[:30])
    host.decode(first, steps=20)
    host.free(first)
    follow_up = host.new_request("follow_up", [*first.all_token_ids[:48], 900, 901])
    assert host.hits(follow_up) == 48
    host.run(follow_up)


def test_a_hit_is_found_while_its_owner_runs_and_after_it_left(host: Any) -> None:
    first = host.started("first", BASE)
    probe = host.new_request("probe", [*BASE, 900])
    assert host.hits(probe) == 48
    host.free(first)
    assert host.hits(probe) == 48


def test_salts_and_adapters_are_kept_apart(host: Any) -> None:
    prompt = [*BASE, 900]
    tenants = [
        {},
        {"salt": "one"},
        {"salt": "two"},
        {"adapter": "one"},
        {"adapter": "two"},
        {"adapter": "one", "salt": "one"},
        {"adapter": "one", "adapter_path": "second"},
    ]
    for index, tenant in enumerate(tenants):
        request = host.new_request(f"first{index}", prompt, **tenant)
        assert host.hits(request) == 0, tenant
        host.run(request)
        again = host.new_request(f"again{index}", prompt, **tenant)
        assert host.hits(again) == 48, tenant
        host.run(again)
        host.free(request, again)


def test_a_request_may_keep_from_reading_the_cache_and_still_feeds_it(host: Any) -> None:
    prompt = [*BASE, 900]
    host.started("first", prompt)
    shy = host.new_request("shy", [*prompt, *range(700, 715)], skip_reading=True)
    host.start_step()
    assert host.manager.get_computed_blocks(shy) == (host.manager.empty_kv_cache_blocks, 0, 0)
    host.run(shy)
    assert host.hits(host.new_request("late", [*prompt, *range(700, 716)])) == 64


def test_without_caching_nothing_is_found(make_host: MakeHost) -> None:
    host = make_host(enable_caching=False)
    first = host.started("first", BASE)
    host.decode(first, steps=20)
    host.free(first)
    again = host.new_request("again", BASE)
    host.start_step()
    assert host.manager.get_computed_blocks(again) == (host.manager.empty_kv_cache_blocks, 0, 0)
    host.run(again)
    assert host.num_used_blocks == 3
    assert host.manager.estimate_cached_tokens(again) == 0


@pytest.mark.parametrize("num_shared", [16, 32, 48])
def test_many_readers_share_one_copy_of_a_prefix(make_host: MakeHost, num_shared: int) -> None:
    host = make_host(40, max_num_seqs=20)
    host.started("first", BASE[:num_shared])
    readers = [host.new_request(str(index), [*BASE[:num_shared], 900 + index]) for index in range(15)]
    host.start_step()
    for reader in readers:
        host.admit(reader)
    host.finish_step()
    assert host.num_used_blocks == num_shared // 16 + len(readers)
    host.decode(*readers, steps=5)
