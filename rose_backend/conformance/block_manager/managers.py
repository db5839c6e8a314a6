"""How the managers under test are built, and how their books are checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec

BLOCK_SIZE = 16
STATE = -1
"""In place of a window: the group's layers keep a state, the latest one or two of a request."""

MakeManager = Callable[..., Any]
"""``(num_blocks, *, windows, max_num_seqs, max_model_len, enable_caching, watermark)`` -> manager.

Each of ``windows`` is a KV cache group beside the first, which keeps everything.
"""


def find_manager(name: str) -> MakeManager:
    """Return how one of ``MANAGERS``, or what ``module:Class`` names, is built.

    Raises:
        ImportError, AttributeError: there is no such thing.
        ValueError: it is not written as ``module:Class``.
    """
    if name in MANAGERS:
        return MANAGERS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"got {name!r}, a KV cache manager is named module:Class")
    factory = getattr(import_module(module), attribute)
    return MANAGERS["rose"] if factory is RoseKVCacheManager else _maker(factory)


def check_books(manager: Any) -> None:
    """Raise if the state of a manager is inconsistent; only the state of Rose's and vLLM's managers is known."""
    if isinstance(manager, RoseKVCacheManager):
        manager.manager.check_integrity()
    elif isinstance(manager, KVCacheManager):
        _check_stock_books(manager)


_SHAPE: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_kv_heads": 1,
    "head_size": 64,
    "dtype": torch.float32,
}
_FULL = FullAttentionSpec(**_SHAPE)


def _maker(factory: Callable[..., Any], full: FullAttentionSpec = _FULL) -> MakeManager:
    def make(num_blocks: int, *, windows: Sequence[int] = (), max_num_seqs: int, **options: Any) -> Any:
        # vLLM's manager does not limit the number of requests.
        if "max_num_seqs" in signature(factory).parameters:
            options["max_num_seqs"] = max_num_seqs
        try:
            return factory(**_common(num_blocks, full, windows), **options)
        except NotImplementedError as error:
            pytest.skip(str(error))

    return make


def _common(num_blocks: int, full: FullAttentionSpec, windows: Sequence[int]) -> dict[str, Any]:
    specs = [full, *(_spec_of(window) for window in windows)]
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    return {
        "kv_cache_config": KVCacheConfig(num_blocks, [], groups),
        "scheduler_block_size": BLOCK_SIZE,
        "hash_block_size": BLOCK_SIZE,
        "log_stats": True,
    }


def _spec_of(window: int) -> KVCacheSpec:
    if window == STATE:
        return MambaSpec(
            block_size=BLOCK_SIZE, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    return SlidingWindowSpec(**_SHAPE, sliding_window=window)


def _check_stock_books(manager: KVCacheManager) -> None:
    tables = [
        blocks
        for group in manager.coordinator.single_type_managers
        for blocks in group.req_to_blocks.values()
    ]
    holders = Counter(block.block_id for blocks in tables for block in blocks if not block.is_null)
    queued = {block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()}
    assert len(queued) == manager.block_pool.get_num_free_blocks()
    for block in manager.block_pool.blocks[1:]:
        assert block.ref_cnt == holders[block.block_id], block
        assert (block.block_id in queued) == (block.ref_cnt == 0), block


MANAGERS = {"rose": _maker(RoseKVCacheManager, as_rose_spec(_FULL)), "stock": _maker(KVCacheManager)}
