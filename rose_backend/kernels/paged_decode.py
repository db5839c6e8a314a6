"""Decode attention that also stores the new tokens' keys and values: one launch on a GPU, plain torch elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.reference import paged_decode as reference
from rose_backend.kernels.reference.paged_decode import DecodePlan
from rose_backend.kernels.tensor_checks import (
    Spec,
    check_cache_dtype,
    check_head_groups,
    check_sinks,
    check_tensors,
)

__all__ = ["DecodePlan", "paged_decode", "plan_paged_decode"]

MAX_GPU_HEAD_SIZE = 256
"""Larger heads do not fit a program's registers."""

MAX_QUERY_LEN = 8
"""New tokens of a row that one call takes; longer chunks are ``paged_prefill``'s."""

_GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def plan_paged_decode(
    block_table: torch.Tensor,  # [R, MB] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  only shape, dtype and device are used
    *,
    query_start_loc: torch.Tensor | None = None,  # [R + 1] int32
    max_query_len: int = 1,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    chunk_bytes: int = reference.CHUNK_BYTES,
) -> DecodePlan | None:
    """Work out what all layers of a step share. None on a GPU: the kernel reads lengths on the device.

    Args:
        chunk_bytes: keys that are gathered at once, at most, unless a single request has more.

    Raises:
        ShapeError: ``max_query_len`` is not allowed, or a row has more tokens.
    """
    if key_cache.is_cuda:
        return None
    _check_query_lens(query_start_loc, max_query_len)
    return reference.plan_paged_decode(
        block_table,
        num_computed_tokens,
        key_cache,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        chunk_bytes=chunk_bytes,
    )


def paged_decode(
    query: torch.Tensor,  # [T, HQ, D]
    new_key: torch.Tensor | None,  # [T, HKV, D]
    new_value: torch.Tensor | None,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    block_table: torch.Tensor,  # [R, MB] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    *,
    scale: float,
    out: torch.Tensor,  # [T, HQ, D]  written
    query_start_loc: torch.Tensor | None = None,  # [R + 1] int32
    max_query_len: int = 1,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,  # [HQ]
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [HQ] float32
    key_scale: torch.Tensor | None = None,  # one float32
    value_scale: torch.Tensor | None = None,  # one float32
    plan: DecodePlan | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Store one or a few new tokens per request and attend over its whole history.

    Without ``query_start_loc`` token ``r`` is request ``r``'s (``T = R``). With it, tokens ``query_start_loc[r] ..
    query_start_loc[r + 1] - 1`` are, and tokens after the last row's are padding that is left alone. A request's token
    ``i`` has position ``p = num_computed_tokens[r] + i``: it is stored in block ``block_table[r, p // BS]`` at offset
    ``p % BS`` and sees positions ``0 .. p``. New tokens are read from ``new_key``/``new_value``, never back from the
    cache.

    Args:
        query, new_key, new_value: one dtype (float32, float16 or bfloat16), innermost stride 1. Without ``new_key`` and
            ``new_value`` the tokens have been stored before (``write_kv``), and nothing is written.
        key_cache, value_cache: of the same dtype, or both float8_e4m3fn; any strides with an innermost one of 1. The
            blocks that receive tokens must belong to their request alone.
        block_table: entries past the block of a row's last position are never used.
        num_computed_tokens: tokens already stored, without the new ones. A negative value marks a padding row: nothing
            is read or written for it.
        scale: factor on query-key products, usually ``D ** -0.5``.
        query_start_loc: a row may have 0 to ``max_query_len`` tokens; on a GPU further ones would be left out.
        max_query_len: 1 to ``MAX_QUERY_LEN``.
        sliding_window: a query sees at most this many tokens, itself included.
        alibi_slopes: per-head slope of a linear penalty on distance.
        logits_soft_cap: scaled products become ``cap * tanh(product / cap)``.
        sinks: per-head logit, neither scaled nor capped, that takes part in the softmax and attends to nothing.
        key_scale, value_scale: what numbers in float8 caches are multiplied by; None is 1. New tokens are attended as
            the cache will hold them: divided, limited to +-448, rounded, multiplied.
        plan: from ``plan_paged_decode`` with the same lengths, table and options, made once for all layers of a step;
            None makes one for this call. A GPU needs none.
        overlap: on GPUs of capability 9.0 and later, start while the kernel in front still runs, and allow the same to
            the next one (programmatic dependent launch). What kernels in front make or read may be ``query``,
            ``new_key``, ``new_value`` and ``out``. All else, the cached tokens too, is read ahead and must be complete:
            it is if whatever made it is followed, before this call, by a kernel that was launched without programmatic
            dependence. Without ``new_key`` the last tokens come from a kernel in front, and nothing overlaps.

    Calls on one GPU share scratch memory and must follow one another on one stream. They can be captured in a CUDA
    graph after a first call outside, and one captured call serves any lengths.

    Returns:
        ``out``. Accumulated in float32, rounded once.

    Raises:
        ShapeError: shapes or dtypes disagree, ``HQ`` is not a multiple of ``HKV``, only one new tensor is given, a
            scale is given without float8 caches, or ``max_query_len`` is not allowed. On a GPU also: the dtype is
            another, ``D`` is over ``MAX_GPU_HEAD_SIZE``, an innermost stride is not 1, or it cannot convert float8.
    """
    num_tokens = "R" if query_start_loc is None else "T"
    specs: dict[str, Spec] = {
        "query": (query, f"{num_tokens} HQ D"),
        "key_cache": (key_cache, "NB BS HKV D"),
        "value_cache": (value_cache, "NB BS HKV D"),
        "block_table": (block_table, "R MB", torch.int32),
        "num_computed_tokens": (num_computed_tokens, "R", torch.int32),
        "out": (out, f"{num_tokens} HQ D"),
    }
    if query_start_loc is not None:
        specs["query_start_loc"] = (query_start_loc, "R+1", torch.int32)
    if alibi_slopes is not None:
        specs["alibi_slopes"] = (alibi_slopes, "HQ")
    sizes = check_tensors(**specs)
    _check_query_lens(query_start_loc, max_query_len)
    check_head_groups(sizes["HQ"], sizes["HKV"])
    check_new_tokens(query, new_key, new_value, key_cache, value_cache, out, key_scale, value_scale)
    check_sinks(sinks, query)
    tensors = (query, new_key, new_value, key_cache, value_cache, block_table, num_computed_tokens)
    options: dict[str, Any] = {
        "query_start_loc": query_start_loc,
        "max_query_len": max_query_len,
        "sliding_window": sliding_window,
        "alibi_slopes": alibi_slopes,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "key_scale": key_scale,
        "value_scale": value_scale,
    }
    if query.is_cuda:
        from rose_backend.kernels.gpu import paged_decode as gpu
        from rose_backend.kernels.gpu.small_batch_linear import has_dependent_launch

        check_gpu_tensors(
            query=query,
            new_key=new_key,
            new_value=new_value,
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=block_table,
            num_computed_tokens=num_computed_tokens,
            query_start_loc=query_start_loc,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            out=out,
        )
        overlap = overlap and new_key is not None and has_dependent_launch(query.device)
        return gpu.paged_decode(*tensors, scale=scale, out=out, overlap=overlap, **options)
    return reference.paged_decode(*tensors, scale=scale, out=out, plan=plan, **options)


def _check_query_lens(query_start_loc: torch.Tensor | None, max_query_len: int) -> None:
    if query_start_loc is None and max_query_len != 1:
        raise ShapeError(f"max_query_len: expected 1 without query_start_loc, got {max_query_len}")
    if not 1 <= max_query_len <= MAX_QUERY_LEN:
        raise ShapeError(f"max_query_len: expected 1 to {MAX_QUERY_LEN}, got {max_query_len}")


def check_new_tokens(
    query: torch.Tensor,  # [T, HQ, D]
    new_key: torch.Tensor | None,  # [T, HKV, D]
    new_value: torch.Tensor | None,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]
    out: torch.Tensor,  # [T, HQ, D]
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Require both new tensors or neither, shaped like the query, and one dtype of everything but float8 caches.

    Raises:
        ShapeError: one is missing, shapes, dtypes or devices disagree, or a scale is given without float8 caches.
    """
    values = {"query": query, "out": out}
    if new_key is not None and new_value is not None:
        expected = (query.shape[0], *key_cache.shape[2:])
        if new_key.shape != expected or new_value.shape != expected:
            check_tensors(
                query=(query, "T HQ D"),
                key_cache=(key_cache, "NB BS HKV D"),
                new_key=(new_key, "T HKV D"),
                new_value=(new_value, "T HKV D"),
            )
        values |= {"new_key": new_key, "new_value": new_value}
    elif new_key is not new_value:
        missing, present = ("new_key", "new_value") if new_key is None else ("new_value", "new_key")
        raise ShapeError(f"{missing}: expected a tensor because {present} is given, got None")
    check_cache_dtype(key_cache, value_cache, key_scale=key_scale, value_scale=value_scale, **values)


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
