"""Store new keys and values at given slots of a paged cache.

Used when the store is not part of attention (``fused_kv_append`` off). One launch on a GPU, plain torch elsewhere.
"""

from __future__ import annotations

import torch

from rose_backend.kernels.reference import write_kv as reference
from rose_backend.kernels.tensor_checks import check_same_dtype, check_tensors


def write_kv(
    new_key: torch.Tensor,  # [T, HKV, D]
    new_value: torch.Tensor,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    slot_mapping: torch.Tensor,  # [T] int64
) -> None:
    """Store token ``t`` at slot ``slot_mapping[t]`` = block id * BS + offset; -1 skips the token.

    Args:
        new_key, new_value: one dtype with the caches, any strides.
        key_cache, value_cache: any strides; only the named slots change.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    check_tensors(
        new_key=(new_key, "T HKV D"),
        new_value=(new_value, "T HKV D"),
        key_cache=(key_cache, "NB BS HKV D"),
        value_cache=(value_cache, "NB BS HKV D"),
        slot_mapping=(slot_mapping, "T", torch.int64),
    )
    check_same_dtype(key_cache=key_cache, value_cache=value_cache, new_key=new_key, new_value=new_value)
    if new_key.is_cuda:
        from rose_backend.kernels.gpu import write_kv as gpu

        gpu.write_kv(new_key, new_value, key_cache, value_cache, slot_mapping)
    else:
        reference.write_kv(new_key, new_value, key_cache, value_cache, slot_mapping)
