"""Store new keys and values at given slots of a paged cache, in plain torch."""

from __future__ import annotations

import torch

from rose_backend.kernels.reference.float8 import to_cache


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
    """Twin of ``rose_backend.kernels.write_kv``."""
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
