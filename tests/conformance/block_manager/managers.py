"""The managers that the suite is run on. Another one joins with one entry in ``MANAGERS``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec

BLOCK_SIZE = 16


@dataclass(frozen=True)
class ManagerEntry:
    """How to build one manager, and how to recount its books."""

    make: Callable[..., Any]
    """``(num_blocks, *, windows, max_num_seqs, max_model_len, enable_caching, watermark)`` -> manager.

    Each of ``windows`` is a KV cache group beside the first, which keeps everything.
    """
    check_books: Callable[[Any], None]
    """Raises if the manager's own state contradicts itself."""


def _make_rose(
    num_blocks: int, *, windows: Sequence[int] = (), max_num_seqs: int, **options: Any
) -> RoseKVCacheManager:
    common = _common(num_blocks, as_rose_spec(_FULL), windows)
    return RoseKVCacheManager(**common, max_num_seqs=max_num_seqs, **options)


def _make_stock(
    num_blocks: int, *, windows: Sequence[int] = (), max_num_seqs: int, **options: Any
) -> KVCacheManager:
    # The stock manager has no limit of its own on requests.
    return KVCacheManager(**_common(num_blocks, _FULL, windows), **options)


_SHAPE: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_kv_heads": 1,
    "head_size": 64,
    "dtype": torch.float32,
}
_FULL = FullAttentionSpec(**_SHAPE)


def _common(num_blocks: int, full: FullAttentionSpec, windows: Sequence[int]) -> dict[str, Any]:
    specs = [full, *(SlidingWindowSpec(**_SHAPE, sliding_window=window) for window in windows)]
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    return {
        "kv_cache_config": KVCacheConfig(num_blocks, [], groups),
        "scheduler_block_size": BLOCK_SIZE,
        "hash_block_size": BLOCK_SIZE,
        "log_stats": True,
    }


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


MANAGERS = {
    "rose": ManagerEntry(_make_rose, lambda manager: manager.manager.check_integrity()),
    "stock": ManagerEntry(_make_stock, _check_stock_books),
}
