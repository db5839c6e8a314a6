"""Writes to the KV cache outside attention: new keys and values at given slots, and copies of whole blocks.

One launch each on a GPU, plain torch elsewhere. ``write_kv`` is used where the store is no part of attention
(``fused_kv_append`` off).
"""

from __future__ import annotations

import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import check_cache_dtype, check_tensors

LARGEST = 448.0
"""Largest number of ``CACHE_DTYPE``: what is larger is stored as this."""


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
        from rose_backend.kernels.kv.cache_writes import write_kv as launch

        launch(*tensors, key_scale=key_scale, value_scale=value_scale)
    else:
        _write_kv(*tensors, key_scale=key_scale, value_scale=value_scale)


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
        _block_clone(kv_cache, src_block_ids, dst_block_ids, block_dim=block_dim)


def _launch(
    kv_cache: torch.Tensor,
    src_block_ids: torch.Tensor,  # [N]
    dst_block_ids: torch.Tensor,  # [N]
    block_dim: int,
) -> None:
    from rose_backend.kernels.kv.cache_writes import MAX_DEPENDENT_PAIRS
    from rose_backend.kernels.kv.cache_writes import block_clone as launch

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
        _block_clone(kv_cache, src_block_ids, dst_block_ids, block_dim=block_dim)


def to_cache(values: torch.Tensor, cache_dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``values`` as a cache of ``cache_dtype`` holds them; in their own dtype that is as they are.

    Divided by ``scale`` in float32, limited to +-``LARGEST``, rounded to the nearest, ties to even. NaN stays NaN.

    Args:
        scale: float32 of one element; None is 1.
    """
    if values.dtype == cache_dtype:
        return values
    scaled = values.float() if scale is None else values.float() / scale
    return scaled.clamp(-LARGEST, LARGEST).to(cache_dtype)


def from_cache(cached: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the numbers that ``cached`` holds, in ``dtype``: multiplied in float32, rounded once.

    Args:
        scale: float32 of one element; None is 1.
    """
    if cached.dtype == dtype:
        return cached
    return cached.to(dtype) if scale is None else (cached.float() * scale).to(dtype)


def _write_kv(
    new_key: torch.Tensor,  # [T, HKV, D]
    new_value: torch.Tensor,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    slot_mapping: torch.Tensor,  # [T] int64
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """``write_kv`` in plain torch."""
    if slot_mapping.numel() == 0:
        return
    if bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        new_key, new_value, slot_mapping = new_key[kept], new_value[kept], slot_mapping[kept]
    slots = slot_mapping.to(torch.int64)
    block_size = key_cache.shape[1]
    stored_key = to_cache(new_key, key_cache.dtype, key_scale)
    stored_value = to_cache(new_value, value_cache.dtype, value_scale)
    write_at(stored_key, stored_value, key_cache, value_cache, slots // block_size, slots % block_size)


def write_at(
    stored_key: torch.Tensor,  # [T, HKV, D]  in the caches' dtype
    stored_value: torch.Tensor,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    block_ids: torch.Tensor,  # [T] int64
    offsets: torch.Tensor,  # [T] int64
) -> None:
    """Store token ``t`` in block ``block_ids[t]`` at ``offsets[t]``; any strides of the caches."""
    # Two index tensors, not one flat slot: a strided cache cannot be viewed as [NB * BS, HKV, D].
    key_cache.index_put_((block_ids, offsets), stored_key)
    value_cache.index_put_((block_ids, offsets), stored_value)


def _block_clone(
    kv_cache: torch.Tensor,
    src_block_ids: torch.Tensor,  # [N]
    dst_block_ids: torch.Tensor,  # [N]
    *,
    block_dim: int = 0,
) -> None:
    """``block_clone`` in plain torch."""
    if src_block_ids.numel() == 0:
        return
    if kv_cache.device.type == "cpu":
        sources, destinations = src_block_ids.tolist(), dst_block_ids.tolist()
        if set(sources).isdisjoint(destinations):
            # On a CPU torch's index operations move memory at a tenth of the speed of plain copies.
            for source, destination in zip(sources, destinations, strict=True):
                kv_cache.select(block_dim, destination).copy_(kv_cache.select(block_dim, source))
            return
    # The gather is complete before the first store, so a destination may be another pair's source.
    content = kv_cache.index_select(block_dim, src_block_ids)
    kv_cache.index_copy_(block_dim, dst_block_ids.to(torch.int64), content)
