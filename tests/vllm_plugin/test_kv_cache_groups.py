"""Several KV cache groups behind vLLM's interface: blocks in vLLM's order of groups, and what is told of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec
from tests.vllm_plugin.test_kv_cache_manager import admit, full_spec, make_manager, make_request

WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=20
)
SPECS = (WINDOW, as_rose_spec(full_spec()), dataclasses.replace(WINDOW, sliding_window=40), WINDOW)
PROMPT = [*range(100)]


def make(num_blocks: int = 80, **options: Any) -> RoseKVCacheManager:
    return make_manager(num_blocks, specs=SPECS, max_in_flight_tokens=32, **options)


def columns(block_ids: tuple[list[int], ...]) -> list[list[bool]]:
    """Return which columns of each group have a block."""
    return [[block_id != 0 for block_id in ids] for ids in block_ids]


def test_blocks_are_reported_for_each_group_and_those_that_windows_have_passed_are_null() -> None:
    manager = make()
    first = make_request("a", PROMPT)
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
    manager = make()
    first = make_request("a", PROMPT)
    admit(manager, first)
    manager.free(first)
    second = make_request("b", [*PROMPT[:90], 500, 501])
    manager.new_step_starts()
    blocks, num_hits, boundary = manager.get_computed_blocks(second)
    assert (num_hits, boundary) == (90, 0)
    # Token 90 attends to 71 and later, or to 51 and later.
    wanted = [[False] * 4 + [True] * 2, [True] * 6, [False] * 3 + [True] * 3]
    assert columns(blocks.get_block_ids()) == [*wanted, wanted[0]]
    assert blocks.get_block_ids(group_ids=[1]) == (blocks.get_block_ids()[1],)
    allocated = manager.allocate_slots(
        second, 2, num_new_computed_tokens=90, new_computed_blocks=blocks
    ).get_block_ids()
    assert columns(allocated) == [*wanted, wanted[0]]
    # All but the tails, which nobody else holds, or which are copied.
    for found, got in zip(blocks.get_block_ids(), allocated, strict=True):
        assert found[:-1] == got[:-1]
    copies, held = manager.take_kv_cache_block_copies()
    pairs = {(copy.src_block_id, copy.dst_block_id) for copy in copies}
    assert len(copies) == len(pairs) == 4
    assert pairs == {
        (found[-1], got[-1]) for found, got in zip(blocks.get_block_ids(), allocated, strict=True)
    }
    manager.block_pool.free_blocks(held)
    manager.manager.check_integrity()


def test_what_vllm_reads_of_groups() -> None:
    manager = make()
    managers = manager.coordinator.single_type_managers
    assert [one.kv_cache_spec for one in managers] == list(SPECS)
    assert [one.kv_cache_group_id for one in managers] == [0, 1, 2, 3]
    assert manager.num_kv_cache_groups == 4 and manager.coordinator.full_attention_group_id == 1
    assert manager.get_num_common_prefix_blocks("a") == [0] * 4
    assert manager.empty_kv_cache_blocks.get_block_ids() == ([],) * 4
    # 8 blocks; 19 or 39 tokens before 32 new ones, which may begin inside a block.
    assert manager.coordinator.get_num_blocks_to_allocate("a", 128) == 8 + 2 * 5 + 6
