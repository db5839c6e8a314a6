"""Copy many KV blocks of all layers at once: one launch on a GPU, plain torch elsewhere."""

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
        src_block_ids, dst_block_ids: int32 or int64; destinations are distinct. On the cache's device, or on the CPU:
            then they are looked through for destinations that are sources (copies without any are spread wider).

    Raises:
        ShapeError: the two lists differ in length or type, or ``block_dim`` is not a dimension of the cache.
    """
    check_tensors(src_block_ids=(src_block_ids, "N"), dst_block_ids=(dst_block_ids, "N"))
    for name, ids in (("src_block_ids", src_block_ids), ("dst_block_ids", dst_block_ids)):
        if ids.dtype not in (torch.int32, torch.int64):
            raise ShapeError(f"{name}: expected dtype torch.int32 or torch.int64, got {ids.dtype}")
        if ids.device.type != "cpu" and ids.device != kv_cache.device:
            raise ShapeError(f"{name}: expected device cpu or {kv_cache.device}, got {ids.device}")
    if not -kv_cache.ndim <= block_dim < kv_cache.ndim:
        raise ShapeError(
            f"block_dim: expected a dimension of kv_cache {list(kv_cache.shape)}, got {block_dim}"
        )
    if src_block_ids.numel() == 0 or kv_cache.numel() == 0:
        return
    if kv_cache.is_cuda:
        _launch(kv_cache, src_block_ids, dst_block_ids, block_dim)
    else:
        reference.block_clone(kv_cache, src_block_ids, dst_block_ids, block_dim=block_dim)


def _launch(
    kv_cache: torch.Tensor,
    src_block_ids: torch.Tensor,  # [N]
    dst_block_ids: torch.Tensor,  # [N]
    block_dim: int,
) -> None:
    from rose_backend.kernels.gpu import block_clone as gpu

    independent = False
    if not (src_block_ids.is_cuda or dst_block_ids.is_cuda):
        independent = set(src_block_ids.tolist()).isdisjoint(dst_block_ids.tolist())
    src_block_ids, dst_block_ids = (
        ids.to(kv_cache.device, non_blocking=True).contiguous() for ids in (src_block_ids, dst_block_ids)
    )
    if independent or len(src_block_ids) <= gpu.MAX_DEPENDENT_PAIRS:
        gpu.block_clone(kv_cache, src_block_ids, dst_block_ids, block_dim=block_dim, independent=independent)
    else:
        # More than one program can hold at once: all sources go through memory.
        reference.block_clone(kv_cache, src_block_ids, dst_block_ids, block_dim=block_dim)
