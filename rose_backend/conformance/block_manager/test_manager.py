"""What every manager does as vLLM's: admission, running requests, prefix hits, release, eviction, what vLLM reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_manager import KVCacheManager

from rose_backend.conformance.block_manager.conftest import MakeHost
from rose_backend.conformance.block_manager.differences import (
    DIFFERENCES,
    PROMPT,
    Difference,
    started_with_states,
)
from rose_backend.conformance.block_manager.managers import BLOCK_SIZE, MANAGERS, STATE, find_manager
from rose_backend.conformance.block_manager.pretended_model import VOCAB_SIZE, expected_output


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


@pytest.mark.parametrize("num_right", range(5))
def test_rejected_drafts_are_rolled_back(host: Any, num_right: int) -> None:
    request = host.started("a", PROMPT)
    while request.num_tokens < 100:
        drafts = host.continuation(request, 4)
        drafts[num_right:] = [VOCAB_SIZE] * (4 - num_right)
        before = request.num_tokens
        host.start_step()
        assert host.append(request, drafts=drafts, num_lookahead_tokens=4) is not None
        host.finish_step()
        assert request.num_tokens == before + num_right + 1
        # A table has room for what may be written next: a token, its drafts, and the drafts after those.
        num_blocks = len(host.block_ids(request))
        assert (
            -(-request.num_tokens // BLOCK_SIZE) <= num_blocks <= -(-(request.num_tokens + 8) // BLOCK_SIZE)
        )
    assert host.hits(host.new_request("late", [*request.all_token_ids])) >= 80
    assert list(request.output_token_ids) == expected_output(PROMPT, request.num_output_tokens)


def test_what_was_rejected_is_never_found(host: Any) -> None:
    request = host.started("a", list(range(60)))
    wrong = [VOCAB_SIZE + index for index in range(4)]
    host.start_step()
    host.append(request, drafts=wrong, num_lookahead_tokens=4)
    host.finish_step()
    late = host.new_request("late", [*request.all_token_ids[:61], *wrong, *range(40)])
    assert host.hits(late) <= 61
    host.run(late)
    host.decode(request, late, steps=10)


def test_a_full_pool_refuses_drafts_and_still_serves_without(host: Any) -> None:
    request = host.started("a", list(range(94)))
    host.started("holder", [9] * 96)
    before = host.snapshot()
    host.start_step()
    assert host.append(request, drafts=host.continuation(request, 4), num_lookahead_tokens=4) is None
    assert host.snapshot() == before
    assert host.append(request) is not None
    host.finish_step()


@pytest.mark.parametrize("window", [2, 16, 20, 33])
def test_what_a_window_has_passed_is_given_back(make_host: MakeHost, window: int) -> None:
    host = make_host(25, windows=(window,))
    request = host.started("a", PROMPT)
    # It may be given back as late as when the request takes its next block.
    host.decode(request, steps=BLOCK_SIZE)
    for _ in range(70):
        host.decode(request)
        held = sum(block != 0 for block in host.block_ids(request, 1))
        assert held <= (window - 1) // BLOCK_SIZE + 2
        assert host.num_used_blocks == held + len(host.block_ids(request))


@pytest.mark.parametrize("window", [20, 33])
def test_a_hit_needs_what_the_window_still_shows(make_host: MakeHost, window: int) -> None:
    host = make_host(25, windows=(window,))
    first = host.started("first", list(range(96)))
    host.decode(first, steps=4)
    host.free(first)
    late = host.new_request("late", [*range(96), *range(500, 510)])
    assert 80 <= host.hits(late) <= 96
    host.run(late)
    host.decode(late, steps=20)


def test_drafts_beside_a_window_are_rolled_back(make_host: MakeHost) -> None:
    host = make_host(25, windows=(20,))
    request = host.started("a", PROMPT)
    while request.num_tokens < 110:
        drafts = [*host.continuation(request, 2), VOCAB_SIZE, VOCAB_SIZE]
        host.start_step()
        assert host.append(request, drafts=drafts, num_lookahead_tokens=4) is not None
        host.finish_step()
    assert list(request.output_token_ids) == expected_output(PROMPT, request.num_output_tokens)


def test_states_take_no_more_blocks_for_longer_texts(make_host: MakeHost) -> None:
    host = make_host(25, windows=(STATE,))
    request = host.started("a", PROMPT)
    for _ in range(80):
        host.decode(request)
        assert 1 <= len({block for block in host.block_ids(request, 1) if block}) <= 2
    host.free(request)
    assert host.num_used_blocks == 0


def test_a_hit_ends_where_there_is_a_state(make_host: MakeHost) -> None:
    host, first = started_with_states(make_host)
    late = host.new_request("late", [*PROMPT, *range(500, 510)])
    assert host.hits(late) <= 40
    host.run(late)
    host.decode(first, late, steps=20)


def test_a_preempted_request_resumes_with_its_states(make_host: MakeHost) -> None:
    host = make_host(30, windows=(STATE,))
    request = host.started("a", PROMPT)
    host.decode(request, steps=12)
    host.preempt(request)
    assert host.run(request) is not None
    host.decode(request, steps=20)
    assert list(request.output_token_ids) == expected_output(PROMPT, request.num_output_tokens)


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


def test_tables_are_one_list_per_group(host: Any) -> None:
    host.started("a", list(range(40)))
    (table,) = host.manager.get_block_ids("a")
    assert isinstance(table, list) and all(type(block_id) is int for block_id in table)
    blocks = host.manager.get_blocks("a")
    assert blocks.get_block_ids() == (table,)
    assert [block.block_id for block in blocks.blocks[0]] == table
    assert not any(block.is_null for block in blocks.blocks[0])
    assert all(block.ref_cnt == 1 for block in blocks.blocks[0])
    assert host.manager.get_block_ids("unknown") == ([],)
    assert host.manager.get_blocks("unknown") is host.manager.empty_kv_cache_blocks
    assert host.manager.empty_kv_cache_blocks.get_block_ids(allow_none=True) is None


@pytest.mark.parametrize(("num_computed", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (40, 3)])
def test_tables_are_clipped_to_computed_tokens(host: Any, num_computed: int, num_blocks: int) -> None:
    request = host.started("a", list(range(40)))
    (clipped,) = host.manager.get_block_ids_for_computed_tokens(
        request_id="a", num_computed_tokens=num_computed
    )
    assert clipped == host.block_ids(request)[:num_blocks]


def test_usage_is_the_share_of_blocks_held(host: Any) -> None:
    assert host.manager.usage == 0.0
    first = host.started("first", list(range(48)))
    assert host.manager.usage == pytest.approx(3 / 12)
    second = host.started("second", [*range(48), 900])
    assert host.manager.usage == pytest.approx(4 / 12), "shared blocks count once"
    host.free(first)
    assert host.manager.usage == pytest.approx(4 / 12)
    host.free(second)
    assert host.manager.usage == 0.0, "what is only cached counts as free"


def test_statistics_count_admissions_and_are_read_once(host: Any) -> None:
    prompt = list(range(48))
    host.started("first", prompt)
    for _ in range(3):
        host.hits(host.new_request("only looked up", prompt))
    host.started("second", [*prompt, 900])
    host.started("shy", prompt, skip_reading=True)
    stats = host.manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 48 + 49, 48)
    again = host.manager.make_prefix_cache_stats()
    assert (again.requests, again.queries, again.hits) == (0, 0, 0)


def test_statistics_tell_resumed_requests_apart(host: Any) -> None:
    request = host.started("a", list(range(47)))
    host.decode(request)
    host.preempt(request)
    host.manager.make_prefix_cache_stats()
    host.run(request)
    stats = host.manager.make_prefix_cache_stats()
    assert (stats.requests, stats.preempted_requests, stats.preempted_hits) == (0, 1, 48)


def test_hits_at_block_boundaries_need_no_copies(host: Any) -> None:
    host.started("first", list(range(48)))
    host.start_step()
    host.admit(host.new_request("second", [*range(48), 900]))
    assert host.finish_step() == []
    assert host.manager.take_kv_cache_block_copies() == ([], [])


def test_blocks_that_a_request_still_needs_are_counted(host: Any) -> None:
    count = host.manager.coordinator.get_num_blocks_to_allocate
    arguments = {
        "new_computed_blocks": ((),),
        "num_encoder_tokens": 0,
        "total_computed_tokens": 0,
        "num_local_computed_tokens": 0,
        "num_tokens_main_model": 40,
    }
    assert count("a", 40, **arguments) == 3
    host.started("a", list(range(40)))
    assert count("a", 40, **arguments) == 0
    assert count("a", 60, **arguments) == 1


def test_what_vllm_drains_each_step_is_empty_for_full_attention(host: Any) -> None:
    request = host.started("a", list(range(40)))
    manager = host.manager
    assert manager.take_new_block_ids() == []
    assert manager.take_boundary_state_offloads() == {}
    assert manager.finalize_partial_tail_offloads(request) == []
    assert manager.take_events() == []
    assert manager.get_num_common_prefix_blocks("a") == [0]
    assert manager.num_kv_cache_groups == 1
    assert manager.coordinator.enable_partial_hash_hits is False
    manager.remove_skipped_blocks(request_id="a", processed_computed_tokens=40, num_prompt_tokens=40)
    assert len(host.block_ids(request)) == 3


def test_events_tell_which_full_blocks_can_be_found_and_which_went(make_host: MakeHost) -> None:
    host = make_host(enable_kv_cache_events=True)
    prompt = list(range(40))
    request = host.started("a", prompt)
    stored = host.manager.take_events()
    assert {type(event) for event in stored} == {BlockStored}
    assert [token for event in stored for token in event.token_ids] == prompt[:32]
    hashes = [block_hash for event in stored for block_hash in event.block_hashes]
    assert len(set(hashes)) == 2
    assert stored[0].parent_block_hash is None and {event.block_size for event in stored} == {16}
    host.free(request)
    assert host.manager.take_events() == []
    host.started("intruder", [7] * 128)
    host.started("another", [8] * 64)
    removed = [event for event in host.manager.take_events() if isinstance(event, BlockRemoved)]
    assert [block_hash for event in removed for block_hash in event.block_hashes] == hashes[::-1]


def test_a_reset_is_one_event(make_host: MakeHost) -> None:
    host = make_host(enable_kv_cache_events=True)
    request = host.started("a", list(range(40)))
    host.free(request)
    host.manager.take_events()
    assert host.manager.reset_prefix_cache()
    assert [type(event) for event in host.manager.take_events()] == [AllBlocksCleared]


def test_every_public_name_of_vllms_manager_is_there(host: Any) -> None:
    names = {name for name in vars(KVCacheManager) if not name.startswith("_")}
    assert {name for name in names if not hasattr(host.manager, name)} == set()


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.question)
def test_the_answer_is_vllms(
    make_host: MakeHost,
    manager_name: str,
    difference: Difference,
    record_property: Callable[[str, object], None],
) -> None:
    answer, expected = difference.observe(make_host), difference.stock
    if find_manager(manager_name) is MANAGERS["rose"]:
        expected = difference.rose
        record_property("differs", f"{answer}, vLLM's manager: {difference.stock}. {difference.why}")
    assert answer == expected, f"{answer}, vLLM's manager: {difference.stock}"
