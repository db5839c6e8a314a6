"""Decode attention that also stores the new token's keys and values: one launch on a GPU, plain torch elsewhere."""

from __future__ import annotations

import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.reference import paged_decode as reference
from rose_backend.kernels.reference.paged_decode import DecodePlan
from rose_backend.kernels.tensor_checks import check_head_groups, check_same_dtype, check_tensors

__all__ = ["DecodePlan", "paged_decode", "plan_paged_decode"]

MAX_GPU_HEAD_SIZE = 256
"""Larger heads do not fit a program's registers."""

_GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def plan_paged_decode(
    block_table: torch.Tensor,  # [R, MB] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  only shape, dtype and device are used
    *,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    chunk_bytes: int = reference.CHUNK_BYTES,
) -> DecodePlan | None:
    """Work out what all layers of a step share. None on a GPU: the kernel reads lengths on the device.

    Args:
        chunk_bytes: keys that are gathered at once, at most, unless a single request has more.
    """
    if key_cache.is_cuda:
        return None
    return reference.plan_paged_decode(
        block_table,
        num_computed_tokens,
        key_cache,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        chunk_bytes=chunk_bytes,
    )


def paged_decode(
    query: torch.Tensor,  # [R, HQ, D]
    new_key: torch.Tensor | None,  # [R, HKV, D]
    new_value: torch.Tensor | None,  # [R, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    block_table: torch.Tensor,  # [R, MB] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    *,
    scale: float,
    out: torch.Tensor,  # [R, HQ, D]  written
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,  # [HQ]
    logits_soft_cap: float | None = None,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """Store one new token per request and attend over its whole history.

    Token position ``p = num_computed_tokens[r]`` of request ``r`` goes to block ``block_table[r, p // BS]``, offset
    ``p % BS``. Attention covers positions ``0 .. p``. The new token is read from ``new_key``/``new_value``, never back
    from the cache.

    Args:
        query, new_key, new_value: one dtype with the caches (float32, float16 or bfloat16), innermost stride 1. Without
            ``new_key`` and ``new_value`` position ``p`` has been stored before (``write_kv``), and nothing is written.
        key_cache, value_cache: any strides with an innermost one of 1. The block that receives the token must belong to
            this request alone.
        block_table: entries past the block of position ``p`` are never used.
        num_computed_tokens: tokens already stored, without the new one. A negative value marks a padding row: nothing
            is read or written for it.
        scale: factor on query-key products, usually ``D ** -0.5``.
        sliding_window: a query sees at most this many tokens, itself included.
        alibi_slopes: per-head slope of a linear penalty on distance.
        logits_soft_cap: scaled products become ``cap * tanh(product / cap)``.
        plan: from ``plan_paged_decode`` with the same lengths, table and options, made once for all layers of a step;
            None makes one for this call. A GPU needs none.

    Calls on one GPU share scratch memory and must follow one another on one stream. They can be captured in a CUDA
    graph after a first call outside, and one captured call serves any lengths.

    Returns:
        ``out``. Accumulated in float32, rounded once.

    Raises:
        ShapeError: shapes or dtypes disagree, ``HQ`` is not a multiple of ``HKV``, or only one new tensor is given. On
            a GPU also: the dtype is another, ``D`` is over ``MAX_GPU_HEAD_SIZE``, or an innermost stride is not 1.
    """
    sizes = check_tensors(
        query=(query, "R HQ D"),
        key_cache=(key_cache, "NB BS HKV D"),
        value_cache=(value_cache, "NB BS HKV D"),
        block_table=(block_table, "R MB", torch.int32),
        num_computed_tokens=(num_computed_tokens, "R", torch.int32),
        out=(out, "R HQ D"),
    )
    check_head_groups(sizes["HQ"], sizes["HKV"])
    check_new_tokens(query, new_key, new_value, key_cache, value_cache, out)
    if query.is_cuda:
        from rose_backend.kernels.gpu import paged_decode as gpu

        check_gpu_tensors(
            query=query,
            new_key=new_key,
            new_value=new_value,
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=block_table,
            num_computed_tokens=num_computed_tokens,
            alibi_slopes=alibi_slopes,
            out=out,
        )
        return gpu.paged_decode(
            query,
            new_key,
            new_value,
            key_cache,
            value_cache,
            block_table,
            num_computed_tokens,
            scale=scale,
            out=out,
            sliding_window=sliding_window,
            alibi_slopes=alibi_slopes,
            logits_soft_cap=logits_soft_cap,
        )
    return reference.paged_decode(
        query,
        new_key,
        new_value,
        key_cache,
        value_cache,
        block_table,
        num_computed_tokens,
        scale=scale,
        out=out,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        logits_soft_cap=logits_soft_cap,
        plan=plan,
    )


def check_new_tokens(
    query: torch.Tensor,  # [T, HQ, D]
    new_key: torch.Tensor | None,  # [T, HKV, D]
    new_value: torch.Tensor | None,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]
    out: torch.Tensor,  # [T, HQ, D]
) -> None:
    """Require both new tensors or neither, shaped like the query, and one dtype of everything.

    Raises:
        ShapeError: one is missing, or shapes or dtypes disagree.
    """
    if new_key is None or new_value is None:
        if new_key is not new_value:
            missing, present = ("new_key", "new_value") if new_key is None else ("new_value", "new_key")
            raise ShapeError(f"{missing}: expected a tensor because {present} is given, got None")
        check_same_dtype(query=query, key_cache=key_cache, value_cache=value_cache, out=out)
        return
    expected = (query.shape[0], *key_cache.shape[2:])
    if new_key.shape != expected or new_value.shape != expected:
        check_tensors(
            query=(query, "T HQ D"),
            key_cache=(key_cache, "NB BS HKV D"),
            new_key=(new_key, "T HKV D"),
            new_value=(new_value, "T HKV D"),
        )
    check_same_dtype(
        query=query,
        new_key=new_key,
        new_value=new_value,
        key_cache=key_cache,
        value_cache=value_cache,
        out=out,
    )


def check_gpu_tensors(query: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Require what the GPU kernels need beyond matching shapes.

    Args:
        tensors: all others, by name.

    Raises:
        ShapeError: the dtype is not supported, the head is too large, or an innermost stride is not 1.
    """
    if query.dtype not in _GPU_DTYPES:
        allowed = ", ".join(map(str, _GPU_DTYPES))
        raise ShapeError(f"query: expected one of {allowed} on a GPU, got {query.dtype}")
    if query.shape[-1] > MAX_GPU_HEAD_SIZE:
        raise ShapeError(f"query: expected D of at most {MAX_GPU_HEAD_SIZE} on a GPU, got {query.shape[-1]}")
    for name, tensor in {"query": query, **tensors}.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ShapeError(
                f"{name}: expected an innermost stride of 1, got strides {list(tensor.stride())}"
            )
