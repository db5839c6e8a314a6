"""vLLM's own KVCacheManager and requests as its engine core builds them, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from rose_backend.vllm_plugin.kv_cache_manager import RoseKVCacheManager
from rose_backend.vllm_plugin.kv_cache_spec import as_rose_spec

init_none_hash(sha256)  # vLLM's default algorithm
_SAMPLING = SamplingParams(max_tokens=1_000_000)


def make_manager(
    side: str, *, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
) -> Any:
    """Return vLLM's manager (``side`` "stock") or Rose's behind vLLM's interface ("rose_in_vllm"), caching on."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    if side == "rose_in_vllm":
        spec = as_rose_spec(spec)
    arguments: dict[str, Any] = {
        "kv_cache_config": KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        "max_model_len": max_model_len,
        "scheduler_block_size": block_size,
        "hash_block_size": block_size,
    }
    if side == "rose_in_vllm":
        return RoseKVCacheManager(**arguments, max_num_seqs=max_num_seqs)
    return KVCacheManager(**arguments)


def make_request(name: str, prompt: list[int], block_size: int) -> Request:
    """Return a waiting request, its full blocks hashed."""
    return Request(name, prompt, _SAMPLING, None, block_hasher=get_request_block_hasher(block_size, sha256))


def make_equal_request(name: str, other: Request) -> Request:
    """Return a request for the prompt of ``other`` without hashing it again."""
    request = Request(name, other.prompt_token_ids, _SAMPLING, None)
    request.block_hashes = list(other.block_hashes)
    request._block_hasher = other._block_hasher
    return request


def hash_request(request: Request) -> None:
    """Hash a request's blocks anew, as the engine core does when it arrives."""
    request.block_hashes = []
    request.update_block_hashes()


def admit(manager: Any, request: Request) -> None:
    """Admit a request, compute its whole prompt and its first token, as the scheduler would."""
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    allocated = manager.allocate_slots(
        request, request.num_tokens - num_hits, num_new_computed_tokens=num_hits, new_computed_blocks=blocks
    )
    if allocated is None:
        raise RuntimeError(f"{request.request_id}: the pool is too small for this scene")
    _, retained = manager.take_kv_cache_block_copies()
    manager.block_pool.free_blocks(retained)
    request.num_computed_tokens = request.num_tokens
    request.status = RequestStatus.RUNNING
    request.append_output_token_ids(1)


def shuffle_free_blocks(manager: Any, order: Sequence[int]) -> None:
    """Put the free blocks of vLLM's pool in ``order``, as after long use. Nothing is in use or cached."""
    pool = manager.block_pool
    blocks = pool.get_new_blocks(len(order))
    pool.free_blocks([blocks[index] for index in order])
