"""Attention over a paged KV cache that also stores the new tokens' keys and values.

``paged_decode`` takes one or a few new tokens per request, ``paged_prefill`` chunks of any length. On a GPU each is one
launch (prefill with float8 caches two); elsewhere plain torch.
"""

from __future__ import annotations

import torch

import rose_backend.kernels.attention.reference as reference
from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import (
    AttentionOptions,
    HeadRotation,
    NewTokens,
    PagedKV,
    Spec,
    check_cache_dtype,
    check_head_groups,
    check_sinks,
    check_tensors,
)
from rose_backend.kernels.attention.reference import PrefillPlan
from rose_backend.kernels.pointwise.ops import check_rotation, rotate_query_key

MAX_GPU_HEAD_SIZE = 512
"""Larger heads do not fit a program's registers."""

MAX_QUERY_LEN = 8
"""New tokens of a row that one call of ``paged_decode`` takes; longer chunks are ``paged_prefill``'s."""

DecodePlan = reference.DecodePlan | torch.Tensor
"""What all layers of a step share: on a GPU ``[R]`` int32, in which order rows begin to be attended."""

_GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def plan_paged_decode(
    kv: PagedKV,  # of the caches only shape, dtype and device are used
    *,
    options: AttentionOptions,
    chunk_bytes: int = reference.CHUNK_BYTES,
) -> DecodePlan | None:
    """Work out what all layers of a step share. On a GPU that is found on the device, and a graph may contain it.

    Args:
        options: sliding window and ALiBi slopes have to be the same for all layers that use the plan.
        chunk_bytes: keys that are gathered at once, at most, unless a single request has more. Not on a GPU.

    Returns:
        None on a GPU where all rows begin at once, or all read no more than a sliding window.

    Raises:
        ShapeError: ``max_query_len`` is not allowed, or a row has more tokens.
    """
    _check_query_lens(kv)
    if not kv.key_cache.is_cuda:
        return reference.plan_paged_decode(kv, options=options, chunk_bytes=chunk_bytes)
    from rose_backend.kernels.attention.paged_decode import order_of_rows

    return order_of_rows(kv, options.sliding_window)


def paged_decode(
    query: torch.Tensor,  # [T, HQ, D]
    new: NewTokens | None,
    kv: PagedKV,  # the caches are written
    *,
    options: AttentionOptions,
    out: torch.Tensor,  # [T, HQ, D]  written
    plan: DecodePlan | None = None,
    overlap: bool = False,
    rotation: HeadRotation | None = None,
) -> torch.Tensor:
    """Store one or a few new tokens per request and attend over its whole history.

    A request's token ``i`` has position ``p = num_computed_tokens[r] + i``: it is stored in block
    ``block_table[r, p // BS]`` at offset ``p % BS`` and sees positions ``0 .. p``. New tokens are read from ``new``,
    never back from the cache.

    Args:
        query, new: one dtype (float32, float16 or bfloat16), innermost stride 1. Without ``new`` the tokens have been
            stored before (``write_kv``), and nothing is written.
        kv: caches of the same dtype, or both float8_e4m3fn, which a GPU of compute capability 8.9 can convert. The
            blocks that receive tokens must belong to their request alone. A row may have 0 to ``max_query_len`` tokens,
            which is 1 to ``MAX_QUERY_LEN``; on a GPU further tokens would be left out.
        plan: from ``plan_paged_decode`` with the same lengths, table and options, made once for all layers of a step;
            None makes one for this call. A GPU needs none: with it, programs of long rows do not begin last, which
            decides speed only. With ``overlap`` it must be complete as all else is that is read ahead.
        overlap: on GPUs of capability 9.0 and later, start while the previous kernel still runs, and allow the same to
            the next one (programmatic dependent launch). What previous kernels make or read may be ``query``, ``new``
            and ``out``. All else, the cached tokens too, is read ahead and must be complete: it is if whatever made it
            is followed, before this call, by a kernel that was launched without programmatic dependence. Without
            ``new`` the last tokens come from a previous kernel, and nothing overlaps.
        rotation: ``query`` and new keys are rotated by the tokens' positions, or ``by_token``, as they are loaded, as
            by ``rotate_query_key``; both stay as they are. With one new token per request only.

    Calls in one ``Workspace`` share scratch memory and must follow one another on one stream. They can be captured in a
    CUDA graph after a first call outside, and one captured call serves any lengths.

    Returns:
        ``out``. Accumulated in float32, rounded once.

    Raises:
        ShapeError: shapes or dtypes disagree, ``HQ`` is not a multiple of ``HKV``, only one new tensor is given, a
            scale is given without float8 caches, ``max_query_len`` is not allowed, or ``rotation`` is given without
            ``new`` or with ``query_start_loc``, or ``plan`` is another device's. On a GPU also: the dtype is another,
            ``D`` is over ``MAX_GPU_HEAD_SIZE``, an innermost stride is not 1, or it cannot convert float8.
    """
    _check_query_lens(kv)
    _check_call(query, new, kv, options, out)
    if rotation is not None:
        _check_rotation(query, new, kv, rotation)
    if plan is not None and isinstance(plan, torch.Tensor) != query.is_cuda:
        raise ShapeError(f"plan: expected one made for {query.device}, got {type(plan).__name__}")
    if not query.is_cuda:
        assert not isinstance(plan, torch.Tensor)
        if rotation is not None and new is not None:
            query, new = _rotated(query, new, kv, rotation)
        return reference.paged_decode(query, new, kv, options=options, out=out, plan=plan)
    from rose_backend.kernels.attention.paged_decode import paged_decode as launch
    from rose_backend.kernels.gpu_properties import has_dependent_launch

    return launch(
        query,
        new,
        kv,
        options=options,
        out=out,
        order=plan if isinstance(plan, torch.Tensor) else None,
        overlap=overlap and new is not None and has_dependent_launch(query.device),
        rotation=rotation,
    )


def _check_rotation(query: torch.Tensor, new: NewTokens | None, kv: PagedKV, rotation: HeadRotation) -> None:
    if new is None or kv.query_start_loc is not None:
        raise ShapeError("rotation: expected new_key without query_start_loc")
    check_rotation(query, rotation)
    if rotation.by_token and len(rotation.cos_sin) < len(query):
        raise ShapeError(
            f"cos_sin: expected a row for each of T={len(query)} tokens, got {len(rotation.cos_sin)}"
        )


def _rotated(
    query: torch.Tensor, new: NewTokens, kv: PagedKV, rotation: HeadRotation
) -> tuple[torch.Tensor, NewTokens]:
    query, new = query.clone(), new._replace(key=new.key.clone())
    # Padding rows need a position, too.
    positions = kv.num_computed_tokens.clamp(min=0).long()
    if rotation.by_token:
        positions = torch.arange(len(query), device=query.device)
    rotate_query_key(query, new.key, positions, rotation)
    return query, new


def plan_paged_prefill(
    kv: PagedKV,  # of the caches only shape and device are used
    *,
    options: AttentionOptions,
    num_step_tokens: int,
) -> PrefillPlan | None:
    """Work out what all layers of a step share. None on a GPU: the kernel reads lengths on the device.

    Args:
        options: the sliding window has to be the same for all layers that use the plan.
        num_step_tokens: ``T``; tokens that belong to no row are padding.
    """
    if kv.key_cache.is_cuda:
        return None
    return reference.plan_paged_prefill(kv, options=options, num_step_tokens=num_step_tokens)


def paged_prefill(
    query: torch.Tensor,  # [T, HQ, D]
    new: NewTokens | None,
    kv: PagedKV,  # with query_start_loc; the caches are written
    *,
    options: AttentionOptions,
    out: torch.Tensor,  # [T, HQ, D]  written
    plan: PrefillPlan | None = None,
    mean_query_len: float | None = None,
) -> torch.Tensor:
    """Store a chunk of each request's prompt and attend causally over what came before and the chunk itself.

    Tensors and errors are those of ``paged_decode``, with any number of tokens per row: a row without tokens and a
    padding row are skipped, and tokens past the last row's end are padding.

    Args:
        plan: from ``plan_paged_prefill`` with the same lengths, table and options, made once for all layers of a step;
            None makes one for this call. A GPU needs none.
        mean_query_len: tokens per row to choose a GPU's tiles for; None takes ``T / R``, which is wrong where rows or
            tokens are padding, as in a captured graph. Decides speed only.

    Returns:
        ``out``. Accumulated in float32, rounded once.
    """
    if kv.query_start_loc is None:
        raise ShapeError("query_start_loc: expected a tensor for prefill attention, got None")
    _check_call(query, new, kv, options, out)
    if not query.is_cuda:
        return reference.paged_prefill(query, new, kv, options=options, out=out, plan=plan)
    from rose_backend.kernels.attention.paged_prefill import paged_prefill as launch

    return launch(query, new, kv, options=options, out=out, mean_query_len=mean_query_len)


def _check_query_lens(kv: PagedKV) -> None:
    if kv.query_start_loc is None and kv.max_query_len != 1:
        raise ShapeError(f"max_query_len: expected 1 without query_start_loc, got {kv.max_query_len}")
    if not 1 <= kv.max_query_len <= MAX_QUERY_LEN:
        raise ShapeError(f"max_query_len: expected 1 to {MAX_QUERY_LEN}, got {kv.max_query_len}")


def _check_call(
    query: torch.Tensor, new: NewTokens | None, kv: PagedKV, options: AttentionOptions, out: torch.Tensor
) -> None:
    """Raise a ShapeError where the arguments of either function disagree, or are not for a GPU that they are on."""
    num_tokens = "R" if kv.query_start_loc is None else "T"
    specs: dict[str, Spec] = {
        "query": (query, f"{num_tokens} HQ D"),
        "key_cache": (kv.key_cache, "NB BS HKV D"),
        "value_cache": (kv.value_cache, "NB BS HKV D"),
        "block_table": (kv.block_table, "R MB", torch.int32),
        "num_computed_tokens": (kv.num_computed_tokens, "R", torch.int32),
        "out": (out, f"{num_tokens} HQ D"),
    }
    if kv.query_start_loc is not None:
        specs["query_start_loc"] = (kv.query_start_loc, "R+1", torch.int32)
    if options.alibi_slopes is not None:
        specs["alibi_slopes"] = (options.alibi_slopes, "HQ")
    sizes = check_tensors(**specs)
    check_head_groups(sizes["HQ"], sizes["HKV"])
    values = {"query": query, "out": out}
    if new is not None:
        _check_new_tokens(query, new, kv)
        values |= {"new_key": new.key, "new_value": new.value}
    check_cache_dtype(
        kv.key_cache, kv.value_cache, key_scale=options.key_scale, value_scale=options.value_scale, **values
    )
    check_sinks(options.sinks, query)
    if query.is_cuda:
        others = {name: spec[0] for name, spec in specs.items() if name != "query"}
        if new is not None:
            others |= {"new_key": new.key, "new_value": new.value}
        check_gpu_tensors(query, sinks=options.sinks, **others)


def _check_new_tokens(query: torch.Tensor, new: NewTokens, kv: PagedKV) -> None:
    """Require both new tensors, shaped like the query's tokens and the caches' heads."""
    if new.key is None or new.value is None:
        missing, present = ("new_key", "new_value") if new.key is None else ("new_value", "new_key")
        raise ShapeError(f"{missing}: expected a tensor because {present} is given, got None")
    expected = (query.shape[0], *kv.key_cache.shape[2:])
    if new.key.shape != expected or new.value.shape != expected:
        check_tensors(
            query=(query, "T HQ D"),
            key_cache=(kv.key_cache, "NB BS HKV D"),
            new_key=(new.key, "T HKV D"),
            new_value=(new.value, "T HKV D"),
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
