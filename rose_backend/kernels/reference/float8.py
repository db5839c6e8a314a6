"""Keys and values in an 8-bit cache, in plain torch: the number stored, times the cache's scale, is the value."""

from __future__ import annotations

import torch

CACHE_DTYPE = torch.float8_e4m3fn
"""4 bits of exponent, 3 of mantissa; no infinities. The only 8-bit type that caches may have."""

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
    """Return what ``cached`` stands for, in ``dtype``: multiplied in float32, rounded once.

    Args:
        scale: float32 of one element; None is 1.
    """
    if cached.dtype == dtype:
        return cached
    return cached.to(dtype) if scale is None else (cached.float() * scale).to(dtype)
