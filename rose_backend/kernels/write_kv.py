"""Store new keys and values at given slots of a paged cache.

Used when the store is not part of attention (``fused_kv_append`` off). One launch on a GPU, plain torch elsewhere.
"""

from __future__ import annotations

import torch

from rose_backend.kernels.reference import write_kv as reference
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
    if new_key.is_cuda:
        from rose_backend.kernels.gpu import write_kv as gpu

        gpu.write_kv(
            new_key,
            new_value,
            key_cache,
            value_cache,
            slot_mapping,
            key_scale=key_scale,
            value_scale=value_scale,
        )
    else:
        reference.write_kv(
            new_key,
            new_value,
            key_cache,
            value_cache,
            slot_mapping,
            key_scale=key_scale,
            value_scale=value_scale,
        )
