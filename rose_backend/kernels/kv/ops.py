"""Writes to the KV cache outside attention: new keys and values at given slots, and copies of whole blocks.

One launch each on a GPU, plain torch elsewhere. ``write_kv`` is used where the store is no part of attention
(``fused_kv_append`` off).
"""

from __future__ import annotations

import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.kv import reference
from rose_backend.kernels.tensor_checks import check_cache_dtype, check_tensors


def write_kv(
    new_key: torch.Tensor,  # [T, HKV, D]
    new_value: torch.Tensor,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    slot_mapping: torch.Tensor,  # [T] int64
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Store token ``t`` at slot ``slot_mapping[t]`` = block id * BS + offset; -1 skips the token.

    Args:
        new_key, new_value: one dtype with the caches, or float32, float16 or bfloat16 beside float8 caches
            (``torch.float8_e4m3fn``); any strides.
        key_cache, value_cache: any strides; only the named slots change.
        key_scale, value_scale: float32 of one element, only with float8 caches; None is 1. What is stored is divided
            by it, limited to +-448 and rounded to the nearest, ties to even.

    Raises:
        ShapeError: shapes, dtypes or devices disagree, or a scale is given without float8 caches. On a GPU also: it
            cannot convert float8.
    """
    check_tensors(
        new_key=(new_key, "T HKV D"),
        new_value=(new_value, "T HKV D"),
        key_cache=(key_cache, "NB BS HKV D"),
        value_cache=(value_cache, "NB BS HKV D"),
        slot_mapping=(slot_mapping, "T", torch.int64),
    )
    check_cache_dtype(
        key_cache,
        value_cache,
        key_scale=key_scale,
        value_scale=value_scale,
        new_key=new_key,
        new_value=new_value,
    )
    tensors = (new_key, new_value, key_cache, value_cache, slot_mapping)
    if new_key.is_cuda:
        from rose_backend.kernels.kv.write_kv import write_kv as launch

        launch(*tensors, key_scale=key_scale, value_scale=value_scale)
    else:
        reference.write_kv(*tensors, key_scale=key_scale, value_scale=value_scale)


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
    from rose_backend.kernels.kv.block_clone import MAX_DEPENDENT_PAIRS
    from rose_backend.kernels.kv.block_clone import block_clone as launch

    independent = False
    if not (src_block_ids.is_cuda or dst_block_ids.is_cuda):
        independent = set(src_block_ids.tolist()).isdisjoint(dst_block_ids.tolist())
    src_block_ids, dst_block_ids = (
        ids.to(kv_cache.device, non_blocking=True).contiguous() for ids in (src_block_ids, dst_block_ids)
    )
    if independent or len(src_block_ids) <= MAX_DEPENDENT_PAIRS:
        launch(kv_cache, src_block_ids, dst_block_ids, block_dim=block_dim, independent=independent)
    else:
        # More than one program can hold at once: all sources go through memory.
        reference.block_clone(kv_cache, src_block_ids, dst_block_ids, block_dim=block_dim)
