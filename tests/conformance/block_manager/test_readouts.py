"""What vLLM reads from a manager and both answer alike: tables, figures, statistics, and what is drained each step."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_manager import KVCacheManager

from tests.conformance.block_manager.conftest import MakeHost


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
