"""Copy many KV blocks of all layers at once. Runs in plain torch on every device."""

from __future__ import annotations

import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.reference import block_clone as reference
from rose_backend.kernels.tensor_checks import check_tensors


def block_clone(
    kv_cache: torch.Tensor,
    src_block_ids: torch.Tensor,  # [N]
    dst_block_ids: torch.Tensor,  # [N]
    *,
    block_dim: int = 0,
) -> None:
    """Copy block ``src_block_ids[i]`` over block ``dst_block_ids[i]`` for every pair.

    All sources are read before any destination is written, so a destination may be another pair's source. Everything
    outside ``block_dim`` is copied whole: layers, keys and values, heads.

    Args:
        kv_cache: any shape and strides, with the blocks along ``block_dim``; written.
        src_block_ids, dst_block_ids: int32 or int64, on the cache's device; destinations are distinct.

    Raises:
        ShapeError: the two lists differ in length or type, or ``block_dim`` is not a dimension of the cache.
    """
    check_tensors(src_block_ids=(src_block_ids, "N"), dst_block_ids=(dst_block_ids, "N"))
    for name, ids in (("src_block_ids", src_block_ids), ("dst_block_ids", dst_block_ids)):
        if ids.dtype not in (torch.int32, torch.int64):
            raise ShapeError(f"{name}: expected dtype torch.int32 or torch.int64, got {ids.dtype}")
    if not -kv_cache.ndim <= block_dim < kv_cache.ndim:
        raise ShapeError(
            f"block_dim: expected a dimension of kv_cache {list(kv_cache.shape)}, got {block_dim}"
        )
    reference.block_clone(kv_cache, src_block_ids, dst_block_ids, block_dim=block_dim)
