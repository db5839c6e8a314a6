"""One checker for the shapes and types of everything that is handed to a kernel.

A launcher writes down each tensor with its shape in symbols, ``check_tensors(query=(query, "R HQ D"), ...)``. A symbol
takes the size of the first tensor that has it; every later tensor must agree. The letters are listed in
``rose_backend.kernels``.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from rose_backend.errors import ShapeError

Spec = tuple[torch.Tensor, str] | tuple[torch.Tensor, str, torch.dtype]


def check_tensors(**tensors: Spec) -> dict[str, int]:
    """Compare every tensor with its symbolic shape, and with its dtype where one is given.

    Args:
        tensors: name to ``(tensor, shape)`` or ``(tensor, shape, dtype)``. A shape is a list of symbols separated by
            spaces; ``R+1`` stands for one more than ``R``, which an earlier dimension must have set.

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
