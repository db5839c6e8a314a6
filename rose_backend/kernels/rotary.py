"""Rotary position embedding of queries and keys, with the norm of each head in front of it where a model has one."""

from __future__ import annotations

import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.tensor_checks import check_same_dtype, check_tensors


def rotate_query_key(
    query: torch.Tensor,  # [T, HQ, D]  written
    key: torch.Tensor,  # [T, HKV, D]  written
    positions: torch.Tensor,  # [T] int64
    cos_sin: torch.Tensor,  # [P, DR] float32
    *,
    query_norm: torch.Tensor | None = None,  # [D]
    key_norm: torch.Tensor | None = None,  # [D]
    eps: float = 0.0,
) -> None:
    """Rotate the first ``DR`` numbers of each head, in place: number ``i`` with number ``i + DR / 2``.

    ``(a, b)`` becomes ``(a * cos - b * sin, b * cos + a * sin)``. With the norms each head is first normalised as by
    ``rms_norm``, those of queries by ``query_norm`` and those of keys by ``key_norm``. Rounded once, from float32.

    Args:
        query, key: two parts of one projection, or tensors of their own; innermost stride 1.
        positions: inside the table, of padding rows too; a GPU does not check that.
        cos_sin: ``DR / 2`` cosines and then as many sines of each position; ``DR`` is even and at most ``D``. On GPUs
            of capability 9.0 and later, the table and ``positions`` are read while the kernel in front still runs, and
            must be complete: they are if whatever made them is followed, before this call, by a kernel that was
            launched without programmatic dependence, such as ``embed_tokens``.
        query_norm, key_norm: both or neither.
        eps: of the norms.

    Raises:
        ShapeError: shapes, strides or dtypes disagree, or only one of the norms is given.
    """
    sizes = check_tensors(
        query=(query, "T HQ D"),
        key=(key, "T HKV D"),
        positions=(positions, "T", torch.int64),
        cos_sin=(cos_sin, "P DR", torch.float32),
    )
    check_same_dtype(query=query, key=key)
    if sizes["DR"] % 2 or sizes["DR"] > sizes["D"]:
        raise ShapeError(f"cos_sin: expected an even DR of at most D={sizes['D']}, got DR={sizes['DR']}")
    for name, tensor in (("query", query), ("key", key)):
        if tensor.stride(2) != 1:
            raise ShapeError(f"{name}: expected an innermost stride of 1, got {tensor.stride(2)}")
    if query_norm is not None and key_norm is not None:
        check_tensors(query=(query, "T HQ D"), query_norm=(query_norm, "D"), key_norm=(key_norm, "D"))
        check_same_dtype(query=query, query_norm=query_norm, key_norm=key_norm)
    elif query_norm is not key_norm:
        raise ShapeError("query_norm and key_norm: expected both or neither, got one")
    for name, tensor in (("positions", positions), ("cos_sin", cos_sin)):
        if tensor.device != query.device:
            raise ShapeError(f"{name}: expected device {query.device} as query, got {tensor.device}")
    if query.is_cuda:
        from rose_backend.kernels.gpu import rotary as gpu

        return gpu.rotate_query_key(query, key, positions, cos_sin, query_norm, key_norm, eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    _rotate(query, cos, sin, query_norm, eps)
    _rotate(key, cos, sin, key_norm, eps)
    return None


def _rotate(
    x: torch.Tensor,  # [T, H, D]  written
    cos: torch.Tensor,  # [T, 1, DR / 2]
    sin: torch.Tensor,  # [T, 1, DR / 2]
    norm: torch.Tensor | None,  # [D]
    eps: float,
) -> None:
    half, wide = cos.shape[-1], x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * norm.float()
    first, second, rest = wide.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1))
