"""The attention functions with each tensor as an argument of its own, for tests that change one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rose_backend import kernels
from rose_backend.kernels import NewTokens, PagedKV


def paged_decode(
    query: torch.Tensor,
    new_key: torch.Tensor | None,
    new_value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = 1,
    launch: Callable[..., torch.Tensor] = kernels.paged_decode,
    **options: Any,
) -> torch.Tensor:
    """Call ``launch`` as decode attention is called."""
    kv = PagedKV(key_cache, value_cache, block_table, num_computed_tokens, query_start_loc, max_query_len)
    return launch(query, _new_tokens(new_key, new_value), kv, **options)


def paged_prefill(
    query: torch.Tensor,
    new_key: torch.Tensor | None,
    new_value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    *,
    launch: Callable[..., torch.Tensor] = kernels.paged_prefill,
    **options: Any,
) -> torch.Tensor:
    """Call ``launch`` as prefill attention is called."""
    kv = PagedKV(key_cache, value_cache, block_table, num_computed_tokens, query_start_loc)
    return launch(query, _new_tokens(new_key, new_value), kv, **options)


def plan_paged_decode(
    block_table: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = 1,
    **options: Any,
) -> Any:
    """Call ``kernels.plan_paged_decode``."""
    kv = PagedKV(key_cache, key_cache, block_table, num_computed_tokens, query_start_loc, max_query_len)
    return kernels.plan_paged_decode(kv, **options)


def plan_paged_prefill(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    key_cache: torch.Tensor,
    **options: Any,
) -> Any:
    """Call ``kernels.plan_paged_prefill``."""
    kv = PagedKV(key_cache, key_cache, block_table, num_computed_tokens, query_start_loc)
    return kernels.plan_paged_prefill(kv, **options)


def _new_tokens(key: torch.Tensor | None, value: torch.Tensor | None) -> NewTokens | None:
    if key is None and value is None:
        return None
    return NewTokens(key, value)  # type: ignore[arg-type]  # one of them may be missing, which is refused
