"""Checks the shapes and dtypes of the tensors that are passed to a kernel.

A launcher writes down each tensor with its shape in symbols, ``check_tensors(query=(query, "R HQ D"), ...)``. A symbol
takes the size of the first tensor that has it; every later tensor must agree. The letters are listed in
``rose_backend.kernels``.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.gpu_properties import gpu_properties

CACHE_DTYPE = torch.float8_e4m3fn
"""4 bits of exponent, 3 of mantissa; no infinities. The only 8-bit type that caches may have."""

FLOAT8_CAPABILITY = (8, 9)
"""Compute capability from which on a GPU converts to and from 8-bit types."""

_FLOAT8_VALUE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Spec = tuple[torch.Tensor, str] | tuple[torch.Tensor, str, torch.dtype]


def check_tensors(**tensors: Spec) -> dict[str, int]:
    """Compare every tensor with its symbolic shape, and with its dtype where one is given.

    Args:
        tensors: name to ``(tensor, shape)`` or ``(tensor, shape, dtype)``. A shape is a list of symbols separated by
            spaces; ``R+1`` means one more than ``R``, which an earlier dimension must have set.

    Returns:
        Symbol to size.

    Raises:
        ShapeError: names the tensor, the dimension's symbol, the size expected and the size got.
    """
    sizes: dict[str, int] = {}
    for name, spec in tensors.items():
        tensor = spec[0]
        shape = tensor.shape
        dims = _parse_shape(spec[1])
        if len(shape) != len(dims):
            raise ShapeError(f"{name}: expected shape [{spec[1]}], got {len(shape)} dimensions {list(shape)}")
        for dim, (symbol, extra) in enumerate(dims):
            got = shape[dim]
            known = sizes.get(symbol)
            if known is None:
                sizes[symbol] = got - extra
            elif got != known + extra:
                raise ShapeError(_mismatch_message(name, spec[1], dim, known + extra, shape))
        if len(spec) == 3 and tensor.dtype is not spec[2]:
            raise ShapeError(f"{name}: expected dtype {spec[2]}, got {tensor.dtype}")
    return sizes


def check_same_dtype(**tensors: torch.Tensor) -> None:
    """Require one dtype and one device of all tensors.

    Raises:
        ShapeError: names the tensor that differs from the first one.
    """
    first_name, first = next(iter(tensors.items()))
    dtype, device = first.dtype, first.device
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise ShapeError(f"{name}: expected dtype {dtype} as {first_name}, got {tensor.dtype}")
        if tensor.device != device:
            raise ShapeError(f"{name}: expected device {device} as {first_name}, got {tensor.device}")


def check_head_groups(num_query_heads: int, num_kv_heads: int) -> None:
    """Require that each key/value head serves the same number of query heads.

    Raises:
        ShapeError: the query heads cannot be divided.
    """
    if num_kv_heads == 0 or num_query_heads % num_kv_heads:
        raise ShapeError(f"query: HQ must be a multiple of HKV={num_kv_heads}, got HQ={num_query_heads}")


def check_cache_dtype(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    **values: torch.Tensor,
) -> None:
    """Require caches of one dtype and device: that of ``values``, or float8 beside a usual dtype of ``values``.

    Args:
        key_scale, value_scale: float32 of one element; only with float8 caches.
        values: query, output and new keys and values by name; one dtype and device.

    Raises:
        ShapeError: a dtype, device or scale is another. On a GPU also: it cannot convert float8.
    """
    check_same_dtype(**values)
    name, first = next(iter(values.items()))
    is_float8 = key_cache.dtype == CACHE_DTYPE and first.dtype in _FLOAT8_VALUE_DTYPES
    if not is_float8 and key_cache.dtype != first.dtype:
        raise ShapeError(
            f"key_cache: expected dtype {first.dtype} as {name}, or {CACHE_DTYPE} beside float32, float16 or "
            f"bfloat16, got {key_cache.dtype}"
        )
    check_same_dtype(key_cache=key_cache, value_cache=value_cache)
    if key_cache.device != first.device:
        raise ShapeError(f"key_cache: expected device {first.device} as {name}, got {key_cache.device}")
    for scale_name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None:
            _check_scale(scale_name, scale, key_cache, is_float8)
    if is_float8 and key_cache.is_cuda:
        check_float8_capability(gpu_properties(key_cache.device).capability)


def check_float8_capability(capability: tuple[int, int]) -> None:
    """Require a GPU that converts to and from 8-bit types.

    Raises:
        ShapeError: names its compute capability.
    """
    if capability < FLOAT8_CAPABILITY:
        needed, got = (".".join(map(str, version)) for version in (FLOAT8_CAPABILITY, capability))
        raise ShapeError(f"key_cache: {CACHE_DTYPE} needs compute capability {needed}, this GPU has {got}")


def check_sinks(sinks: torch.Tensor | None, query: torch.Tensor) -> None:
    """Require one float32 logit per query head of ``query`` [..., HQ, D], on its device.

    Raises:
        ShapeError: another shape, dtype or device.
    """
    if sinks is None:
        return
    check_tensors(query=(query, "T HQ D"), sinks=(sinks, "HQ", torch.float32))
    if sinks.device != query.device:
        raise ShapeError(f"sinks: expected device {query.device} as query, got {sinks.device}")


def _check_scale(name: str, scale: torch.Tensor, key_cache: torch.Tensor, is_float8: bool) -> None:
    if not is_float8:
        raise ShapeError(f"{name}: expected None with caches of {key_cache.dtype}, got a tensor")
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.dim() > 1:
        got = f"{scale.dtype} {list(scale.shape)}"
        raise ShapeError(f"{name}: expected torch.float32 of one element, got {got}")
    if scale.device != key_cache.device:
        raise ShapeError(f"{name}: expected device {key_cache.device} as key_cache, got {scale.device}")


@lru_cache(maxsize=256)
def _parse_shape(shape: str) -> tuple[tuple[str, int], ...]:
    dims = []
    for word in shape.split():
        symbol, _, extra = word.partition("+")
        dims.append((symbol, int(extra or 0)))
    return tuple(dims)


def _mismatch_message(name: str, spec: str, dim: int, expected: int, shape: torch.Size) -> str:
    symbol = spec.split()[dim]
    return f"{name}: expected {symbol}={expected}, got {shape[dim]} (shape {list(shape)}, expected [{spec}])"
