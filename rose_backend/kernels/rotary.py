"""Rotary position embedding of queries and keys, with the norm of each head in front of it where a model has one."""

from __future__ import annotations

import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.attention_options import HeadRotation
from rose_backend.kernels.tensor_checks import check_same_dtype, check_tensors


def rotate_query_key(
    query: torch.Tensor,  # [T, HQ, D]  written
    key: torch.Tensor,  # [T, HKV, D]  written
    positions: torch.Tensor,  # [T] int64
    rotation: HeadRotation,
) -> None:
    """Rotate the first ``DR`` numbers of each head, in place: number ``i`` with number ``i + DR / 2``.

    ``(a, b)`` becomes ``(a * cos - b * sin, b * cos + a * sin)``. With norms each head is first normalised as by
    ``rms_norm``. Rounded once, from float32. Decode attention does the same on its way (``paged_decode``).

    Args:
        query, key: two parts of one projection, or tensors of their own; innermost stride 1.
        positions: inside the table, of padding rows too; a GPU does not check that.
        rotation: on GPUs of capability 9.0 and later, its table and ``positions`` are read while the kernel in front
            still runs, and must be complete: they are if whatever made them is followed, before this call, by a kernel
            that was launched without programmatic dependence, such as ``embed_tokens``.

    Raises:
        ShapeError: shapes, strides, dtypes or devices disagree, or only one of the norms is given.
    """
    check_tensors(query=(query, "T HQ D"), key=(key, "T HKV D"), positions=(positions, "T", torch.int64))
    check_same_dtype(query=query, key=key)
    check_rotation(query, rotation)
    for name, tensor in (("query", query), ("key", key)):
        if tensor.stride(2) != 1:
            raise ShapeError(f"{name}: expected an innermost stride of 1, got {tensor.stride(2)}")
    if positions.device != query.device:
        raise ShapeError(f"positions: expected device {query.device} as query, got {positions.device}")
    if query.is_cuda:
        from rose_backend.kernels.gpu import rotary as gpu

        return gpu.rotate_query_key(query, key, positions, rotation)
    cos, sin = rotation.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    _rotate(query, cos, sin, rotation.query_norm, rotation.eps)
    _rotate(key, cos, sin, rotation.key_norm, rotation.eps)
    return None


def check_rotation(query: torch.Tensor, rotation: HeadRotation) -> None:
    """Require a rotation that belongs to ``query`` [T, HQ, D].

    Raises:
        ShapeError: shapes, dtypes or devices disagree, or only one of the norms is given.
    """
    sizes = check_tensors(query=(query, "T HQ D"), cos_sin=(rotation.cos_sin, "P DR", torch.float32))
    if sizes["DR"] % 2 or sizes["DR"] > sizes["D"]:
        raise ShapeError(f"cos_sin: expected an even DR of at most D={sizes['D']}, got DR={sizes['DR']}")
    if rotation.cos_sin.device != query.device:
        raise ShapeError(f"cos_sin: expected device {query.device} as query, got {rotation.cos_sin.device}")
    if rotation.query_norm is not None and rotation.key_norm is not None:
        norms = {"query_norm": rotation.query_norm, "key_norm": rotation.key_norm}
        check_tensors(query=(query, "T HQ D"), **{name: (norm, "D") for name, norm in norms.items()})
        check_same_dtype(query=query, **norms)
    elif rotation.query_norm is not rotation.key_norm:
        raise ShapeError("query_norm and key_norm: expected both or neither, got one")


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
