"""Rose's KV cache manager without an engine, and requests for it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec

BLOCK_SIZE = 16
SHAPE: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}


def full_spec(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**SHAPE, **changes})


def make_manager(
    num_blocks: int = 11,
    *,
    specs: tuple[Any, ...] | None = None,
    retention_interval: int | None = 0,
    **options: Any,
) -> RoseKVCacheManager:
    specs = specs or (as_rose_spec(full_spec()),)
    groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks, [], groups)
    config.prefix_cache_retention_interval = retention_interval
    arguments: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "log_stats": True, **options}
    return RoseKVCacheManager(
        kv_cache_config=config, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE, **arguments
    )


def make_request(name: str, prompt: list[int] | None, salt: str | None = None, **options: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=50), None, cache_salt=salt, **options)


def admit(manager: RoseKVCacheManager, request: Request, **options: Any) -> Any:
    """Look up and allocate the whole prompt as the scheduler does; advance the request as if the step had run."""
    manager.new_step_starts()
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    allocated = manager.allocate_slots(
        request,
        request.num_tokens - num_hits,
        num_new_computed_tokens=num_hits,
        new_computed_blocks=blocks,
        **options,
    )
    if allocated is not None:
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
    return allocated


def begin(manager: RoseKVCacheManager, request: Request, num_tokens: int | None = None) -> int | None:
    """Look up and allocate ``request`` in the present step; return what it found, None if it has to wait."""
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hits if num_tokens is None else num_tokens
    if manager.allocate_slots(request, num_new, num_hits, blocks) is None:
        return None
    request.num_computed_tokens = num_hits + num_new
    return num_hits


def look_up(manager: RoseKVCacheManager, request: Request) -> int:
    """Return how many tokens of a request are found in the next step."""
    manager.new_step_starts()
    num_hits: int = manager.get_computed_blocks(request)[1]
    return num_hits


def state_of(manager: RoseKVCacheManager) -> Any:
    inner = manager.manager
    inner.check_integrity()
    return (
        inner.num_free_blocks,
        inner.num_free_rows,
        inner.pool.cached_blocks().tolist(),
        inner.block_table.tolist(),
        dict(manager.running.row_of),
    )
