"""Attention over a paged KV cache that also stores the new tokens' keys and values.

``paged_decode`` takes one or a few new tokens per request, ``paged_prefill`` chunks of any length. On a GPU each is one
launch (prefill with float8 caches two); elsewhere plain torch.
"""

from __future__ import annotations

import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import AttentionOptions, HeadRotation
from rose_backend.kernels.attention import reference as decode_reference
from rose_backend.kernels.attention import reference as prefill_reference
from rose_backend.kernels.attention.reference import PrefillPlan
from rose_backend.kernels.pointwise.ops import check_rotation, rotate_query_key
from rose_backend.kernels.tensor_checks import (
    Spec,
    check_cache_dtype,
    check_head_groups,
    check_sinks,
    check_tensors,
)

MAX_GPU_HEAD_SIZE = 512
"""Larger heads do not fit a program's registers."""

MAX_QUERY_LEN = 8
"""New tokens of a row that one call of ``paged_decode`` takes; longer chunks are ``paged_prefill``'s."""

DecodePlan = decode_reference.DecodePlan | torch.Tensor
"""What all layers of a step share: on a GPU ``[R]`` int32, in which order rows begin to be attended."""

_GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def plan_paged_decode(
    block_table: torch.Tensor,  # [R, MB] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  only shape, dtype and device are used
    *,
    options: AttentionOptions,
    query_start_loc: torch.Tensor | None = None,  # [R + 1] int32
    max_query_len: int = 1,
    chunk_bytes: int = decode_reference.CHUNK_BYTES,
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
    _check_query_lens(query_start_loc, max_query_len)
    if key_cache.is_cuda:
        from rose_backend.kernels.attention.split_context import longest_first
        from rose_backend.kernels.tuning.attention_decode import begins_in_turns, num_processors

        num_heads = len(num_computed_tokens) * key_cache.shape[2]
        if options.sliding_window is not None or not begins_in_turns(
            num_heads, num_processors(key_cache.device)
        ):
            return None
        return longest_first(num_computed_tokens)
    return decode_reference.plan_paged_decode(
        block_table,
        num_computed_tokens,
        key_cache,
        options=options,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
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
    options: AttentionOptions,
    out: torch.Tensor,  # [T, HQ, D]  written
    query_start_loc: torch.Tensor | None = None,  # [R + 1] int32
    max_query_len: int = 1,
    plan: DecodePlan | None = None,
    overlap: bool = False,
    rotation: HeadRotation | None = None,
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
        key_cache, value_cache: of the same dtype, or both float8_e4m3fn, which a GPU of compute capability 8.9 can
            convert; any strides with an innermost one of 1. The blocks that receive tokens must belong to their request
            alone.
        block_table: entries past the block of a row's last position are never used.
        num_computed_tokens: tokens already stored, without the new ones. A negative value marks a padding row: nothing
            is read or written for it.
        query_start_loc: a row may have 0 to ``max_query_len`` tokens; on a GPU further ones would be left out.
        max_query_len: 1 to ``MAX_QUERY_LEN``.
        plan: from ``plan_paged_decode`` with the same lengths, table and options, made once for all layers of a step;
            None makes one for this call. A GPU needs none: with it, programs of long rows do not begin last, which
            decides speed only. With ``overlap`` it must be complete as all else is that is read ahead.
        overlap: on GPUs of capability 9.0 and later, start while the kernel in front still runs, and allow the same to
            the next one (programmatic dependent launch). What kernels in front make or read may be ``query``,
            ``new_key``, ``new_value`` and ``out``. All else, the cached tokens too, is read ahead and must be complete:
            it is if whatever made it is followed, before this call, by a kernel that was launched without programmatic
            dependence. Without ``new_key`` the last tokens come from a kernel in front, and nothing overlaps.
        rotation: ``query`` and ``new_key`` are rotated by the tokens' positions on their way, as by
            ``rotate_query_key``; both stay as they are. With one new token per request only.

    Calls in one ``Workspace`` share scratch memory and must follow one another on one stream. They can be captured in a
    CUDA graph after a first call outside, and one captured call serves any lengths.

    Returns:
        ``out``. Accumulated in float32, rounded once.

    Raises:
        ShapeError: shapes or dtypes disagree, ``HQ`` is not a multiple of ``HKV``, only one new tensor is given, a
            scale is given without float8 caches, ``max_query_len`` is not allowed, or ``rotation`` is given without
            ``new_key`` or with ``query_start_loc``, or ``plan`` is another device's. On a GPU also: the dtype is
            another, ``D`` is over ``MAX_GPU_HEAD_SIZE``, an innermost stride is not 1, or it cannot convert float8.
    """
    tensors = (query, new_key, new_value, key_cache, value_cache, block_table, num_computed_tokens)
    _check_query_lens(query_start_loc, max_query_len)
    _check_call(*tensors, query_start_loc, out, options)
    if rotation is not None:
        if new_key is None or query_start_loc is not None:
            raise ShapeError("rotation: expected new_key and no query_start_loc beside it")
        check_rotation(query, rotation)
    if plan is not None and isinstance(plan, torch.Tensor) != query.is_cuda:
        raise ShapeError(f"plan: expected one made for {query.device}, got {type(plan).__name__}")
    if not query.is_cuda:
        assert not isinstance(plan, torch.Tensor)
        if rotation is not None and new_key is not None:
            query, new_key = query.clone(), new_key.clone()
            # Padding rows need a position, too.
            rotate_query_key(query, new_key, num_computed_tokens.clamp(min=0).long(), rotation)
            tensors = (query, new_key, *tensors[2:])
        return decode_reference.paged_decode(
            *tensors,
            options=options,
            out=out,
            query_start_loc=query_start_loc,
            max_query_len=max_query_len,
            plan=plan,
        )
    from rose_backend.kernels.attention.paged_decode import paged_decode as launch
    from rose_backend.kernels.gpu_properties import has_dependent_launch

    return launch(
        *tensors,
        options=options,
        out=out,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        order=plan if isinstance(plan, torch.Tensor) else None,
        overlap=overlap and new_key is not None and has_dependent_launch(query.device),
        rotation=rotation,
    )


def plan_paged_prefill(
    block_table: torch.Tensor,  # [R, MB] int32
    query_start_loc: torch.Tensor,  # [R + 1] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  only shape and device are used
    *,
    options: AttentionOptions,
    num_step_tokens: int,
) -> PrefillPlan | None:
    """Work out what all layers of a step share. None on a GPU: the kernel reads lengths on the device.

    Args:
        options: the sliding window has to be the same for all layers that use the plan.
        num_step_tokens: ``T``; tokens that belong to no row are padding.
    """
    if key_cache.is_cuda:
        return None
    return prefill_reference.plan_paged_prefill(
        block_table,
        query_start_loc,
        num_computed_tokens,
        key_cache,
        options=options,
        num_step_tokens=num_step_tokens,
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
    _check_call(
        query,
        new_key,
        new_value,
        key_cache,
        value_cache,
        block_table,
        num_computed_tokens,
        query_start_loc,
        out,
        options,
    )
    tensors = (
        query,
        new_key,
        new_value,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        num_computed_tokens,
    )
    if not query.is_cuda:
        return prefill_reference.paged_prefill(*tensors, options=options, out=out, plan=plan)
    from rose_backend.kernels.attention.paged_prefill import paged_prefill as launch

    return launch(*tensors, options=options, out=out, mean_query_len=mean_query_len)


def _check_query_lens(query_start_loc: torch.Tensor | None, max_query_len: int) -> None:
    if query_start_loc is None and max_query_len != 1:
        raise ShapeError(f"max_query_len: expected 1 without query_start_loc, got {max_query_len}")
    if not 1 <= max_query_len <= MAX_QUERY_LEN:
        raise ShapeError(f"max_query_len: expected 1 to {MAX_QUERY_LEN}, got {max_query_len}")


def _check_call(
    query: torch.Tensor,
    new_key: torch.Tensor | None,
    new_value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    options: AttentionOptions,
) -> None:
    """Raise a ShapeError where the arguments of either function disagree, or are not for a GPU that they are on."""
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
    if options.alibi_slopes is not None:
        specs["alibi_slopes"] = (options.alibi_slopes, "HQ")
    sizes = check_tensors(**specs)
    check_head_groups(sizes["HQ"], sizes["HKV"])
    _check_new_tokens(query, new_key, new_value, key_cache, value_cache, out, options)
    check_sinks(options.sinks, query)
    if query.is_cuda:
        others = {name: spec[0] for name, spec in specs.items() if name != "query"}
        check_gpu_tensors(query, new_key=new_key, new_value=new_value, sinks=options.sinks, **others)


def _check_new_tokens(
    query: torch.Tensor,
    new_key: torch.Tensor | None,
    new_value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    options: AttentionOptions,
) -> None:
    """Require both new tensors or neither, shaped like the query, and one dtype of everything but float8 caches."""
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
    check_cache_dtype(
        key_cache, value_cache, key_scale=options.key_scale, value_scale=options.value_scale, **values
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
