"""Prefill attention that also stores the chunk's keys and values.

One launch on a GPU, two with float8 caches; plain torch elsewhere.
"""

from __future__ import annotations

import torch

from rose_backend.kernels.paged_decode import check_gpu_tensors, check_new_tokens
from rose_backend.kernels.reference import paged_prefill as reference
from rose_backend.kernels.reference.paged_prefill import PrefillPlan
from rose_backend.kernels.tensor_checks import check_head_groups, check_sinks, check_tensors

__all__ = ["PrefillPlan", "paged_prefill", "plan_paged_prefill"]


def plan_paged_prefill(
    block_table: torch.Tensor,  # [R, MB] int32
    query_start_loc: torch.Tensor,  # [R + 1] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  only shape and device are used
    *,
    num_step_tokens: int,
    sliding_window: int | None = None,
) -> PrefillPlan | None:
    """Work out what all layers of a step share. None on a GPU: the kernel reads lengths on the device.

    Args:
        num_step_tokens: ``T``; tokens that belong to no row are padding.
    """
    if key_cache.is_cuda:
        return None
    return reference.plan_paged_prefill(
        block_table,
        query_start_loc,
        num_computed_tokens,
        key_cache,
        num_step_tokens=num_step_tokens,
        sliding_window=sliding_window,
    )


def paged_prefill(
    query: torch.Tensor,  # [T, HQ, D]
    new_key: torch.Tensor | None,  # [T, HKV, D]
    new_value: torch.Tensor | None,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    block_table: torch.Tensor,  # [R, MB] int32
    query_start_loc: torch.Tensor,  # [R + 1] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    *,
    scale: float,
    out: torch.Tensor,  # [T, HQ, D]  written
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,  # [HQ]
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [HQ]
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    plan: PrefillPlan | None = None,
    mean_query_len: float | None = None,
) -> torch.Tensor:
    """Store a chunk of each request's prompt and attend causally over what came before and the chunk itself.

    Tokens ``query_start_loc[r] .. query_start_loc[r + 1] - 1`` are request ``r``'s, at positions from
    ``num_computed_tokens[r]`` on; the token at position ``p`` goes to block ``block_table[r, p // BS]``, offset
    ``p % BS``, and sees positions ``0 .. p``. Tokens past the last row's end are padding.

    Args:
        query, new_key, new_value: one dtype with the caches (float32, float16 or bfloat16), innermost stride 1. Beside
            float8 caches (``torch.float8_e4m3fn``), which a GPU of compute capability 8.9 can read, one of these three.
            Without ``new_key`` and ``new_value`` the chunk has been stored before (``write_kv``), and nothing is
            written.
        key_cache, value_cache: any strides with an innermost one of 1. The blocks that receive tokens must belong to
            their request alone.
        block_table: entries past the block of a row's last token are never used.
        query_start_loc: a row without tokens is skipped.
        num_computed_tokens: tokens stored before this step. A negative value marks a padding row, which is skipped.
        scale: factor on query-key products, usually ``D ** -0.5``.
        sliding_window: a query sees at most this many tokens, itself included.
        alibi_slopes: per-head slope of a linear penalty on distance.
        logits_soft_cap: scaled products become ``cap * tanh(product / cap)``.
        sinks: float32; per query head one more logit in the softmax, neither scaled nor capped, without a value.
        key_scale, value_scale: float32 of one element, only with float8 caches; None is 1. A cached number times this
            is the key or value. What is stored is divided by it, limited to +-448 and rounded to the nearest, ties to
            even; the chunk is attended as it is stored.
        plan: from ``plan_paged_prefill`` with the same lengths, table and options, made once for all layers of a step;
            None makes one for this call. A GPU needs none.
        mean_query_len: tokens per row to choose a GPU's tiles for; None takes ``T / R``, which is wrong where rows or
            tokens are padding, as in a captured graph. Decides speed only.

    Returns:
        ``out``. Accumulated in float32, rounded once.

    Raises:
        ShapeError: shapes or dtypes disagree, ``HQ`` is not a multiple of ``HKV``, only one new tensor is given, or a
            scale is given without float8 caches. On a GPU also: the dtype is another, ``D`` is over 256, an innermost
            stride is not 1, or it cannot convert float8.
    """
    sizes = check_tensors(
        query=(query, "T HQ D"),
        key_cache=(key_cache, "NB BS HKV D"),
        value_cache=(value_cache, "NB BS HKV D"),
        block_table=(block_table, "R MB", torch.int32),
        query_start_loc=(query_start_loc, "R+1", torch.int32),
        num_computed_tokens=(num_computed_tokens, "R", torch.int32),
        out=(out, "T HQ D"),
        **({} if alibi_slopes is None else {"alibi_slopes": (alibi_slopes, "HQ")}),
    )
    check_head_groups(sizes["HQ"], sizes["HKV"])
    check_new_tokens(query, new_key, new_value, key_cache, value_cache, out, key_scale, value_scale)
    check_sinks(sinks, query)
    if query.is_cuda:
        from rose_backend.kernels.gpu import paged_prefill as gpu

        check_gpu_tensors(
            query=query,
            new_key=new_key,
            new_value=new_value,
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=block_table,
            query_start_loc=query_start_loc,
            num_computed_tokens=num_computed_tokens,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            out=out,
        )
        return gpu.paged_prefill(
            query,
            new_key,
            new_value,
            key_cache,
            value_cache,
            block_table,
            query_start_loc,
            num_computed_tokens,
            scale=scale,
            out=out,
            sliding_window=sliding_window,
            alibi_slopes=alibi_slopes,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=value_scale,
            mean_query_len=mean_query_len,
        )
    return reference.paged_prefill(
        query,
        new_key,
        new_value,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        num_computed_tokens,
        scale=scale,
        out=out,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        plan=plan,
    )
