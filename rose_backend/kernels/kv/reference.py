"""Writes to a paged KV cache in plain torch, and what numbers in a float8 cache mean."""

from __future__ import annotations

import torch

LARGEST = 448.0
"""Largest number of ``CACHE_DTYPE``: what is larger is stored as this."""


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
    """Reference of ``rose_backend.kernels.write_kv``."""
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


def block_clone(
    kv_cache: torch.Tensor,
    src_block_ids: torch.Tensor,  # [N]
    dst_block_ids: torch.Tensor,  # [N]
    *,
    block_dim: int = 0,
) -> None:
    """Reference of ``rose_backend.kernels.block_clone``."""
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
