"""What this vLLM calls on the objects that Rose puts in its place, Rose's classes accept. Needs no GPU and no engine.

Run it against any installed vLLM: each failure names the member that moved.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager

from rose_backend.vllm_plugin.attention_backend import (
    RoseAttentionBackend,
    RoseAttentionImpl,
    RoseAttentionMetadataBuilder,
)
from rose_backend.vllm_plugin.kv_cache_blocks import RoseBlocks
from rose_backend.vllm_plugin.kv_cache_manager import RoseKVCacheManager

NOT_CALLED_ON_BLOCKS = {
    "get_unhashed_block_ids",  # KV connectors only, which are refused at start-up
    "get_unhashed_block_ids_all_groups",
}

# All belong to features that are refused at start-up, or that one group of full attention does not need.
IGNORED_ARGUMENTS = {
    "skip_zeroing_group_ids",
    *("dcp_world_size", "pcp_world_size", "use_eagle", "num_prefill_lookahead", "num_hash_lookahead_tokens"),
    *("enable_kv_cache_events", "enable_mamba_shared_prefix_checkpoint", "metrics_collector"),
    *("hash_block_size", "scheduler_block_size", "max_in_flight_tokens"),
}


def public_functions(owner: type) -> dict[str, Any]:
    return {
        name: getattr(owner, name)
        for name, member in vars(owner).items()
        if not name.startswith("_") and inspect.isfunction(getattr(member, "__func__", member))
    }


def members(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def assert_accepts(ours: Any, theirs: Any, name: str) -> None:
    """Check that a call of ``theirs`` with all arguments works on ``ours``: required ones by place, or all by name."""
    wanted = inspect.signature(theirs).parameters.values()
    accepted = inspect.signature(ours)
    positional = [
        p.name
        for p in wanted
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    by_keyword = {p.name: None for p in wanted if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    try:
        accepted.bind(*positional)
        accepted.bind(**by_keyword)
    except TypeError as error:
        raise AssertionError(
            f"{name}: vLLM has {inspect.signature(theirs)}, Rose {accepted}: {error}"
        ) from error


@pytest.mark.parametrize("name", sorted(public_functions(KVCacheManager)))
def test_block_manager_takes_what_the_scheduler_passes(name: str) -> None:
    assert hasattr(RoseKVCacheManager, name), f"vLLM's KVCacheManager has a new method {name}"
    assert_accepts(getattr(RoseKVCacheManager, name), getattr(KVCacheManager, name), name)


@pytest.mark.parametrize("name", ["allocate_slots", "__init__"])
def test_block_manager_ignores_only_arguments_that_are_known_not_to_matter(name: str) -> None:
    theirs, ours = (
        inspect.signature(getattr(c, name)).parameters for c in (KVCacheManager, RoseKVCacheManager)
    )
    unknown = set(theirs) - set(ours) - IGNORED_ARGUMENTS
    assert not unknown, f"{name} has new arguments: {sorted(unknown)}"


def test_block_manager_has_every_public_member() -> None:
    missing = members(KVCacheManager) - members(RoseKVCacheManager)
    assert not missing, f"vLLM's KVCacheManager has members that Rose's lacks: {sorted(missing)}"


def test_blocks_have_every_method_that_is_called() -> None:
    missing = set(public_functions(KVCacheBlocks)) - members(RoseBlocks) - NOT_CALLED_ON_BLOCKS
    assert not missing, f"vLLM's KVCacheBlocks has methods that Rose's lacks: {sorted(missing)}"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RoseAttentionBackend, AttentionBackend),
        (RoseAttentionImpl, AttentionImpl),
        (RoseAttentionMetadataBuilder, AttentionMetadataBuilder),
    ],
)
def test_attention_classes_are_complete_and_take_the_same_arguments(ours: type, theirs: type) -> None:
    assert not inspect.isabstract(ours), sorted(ours.__abstractmethods__)
    for name in [*public_functions(theirs), "__init__"]:
        if name in vars(ours):
            assert_accepts(getattr(ours, name), getattr(theirs, name), f"{ours.__name__}.{name}")
