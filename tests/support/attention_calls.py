"""The attention functions on paged inputs, and with each tensor as an argument of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rose_backend import kernels
from rose_backend.kernels import NewTokens, PagedKV
from tests.support.paged_inputs import OPTION_NAMES, PagedInputs


def decode(
    inputs: PagedInputs,
    *,
    max_query_len: int | None = None,
    stored_before: bool = False,
    out: torch.Tensor | None = None,
    plan: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Return decode attention of ``inputs``, NaN where nothing was written.

    Args:
        max_query_len: None is one new token per row, without ``query_start_loc``.
        options: arguments of ``paged_decode``, and fields of ``AttentionOptions``.
    """
    return _attend(
        kernels.paged_decode, inputs, inputs.kv(max_query_len), stored_before, out, plan=plan, **options
    )


def prefill(
    inputs: PagedInputs, *, stored_before: bool = False, out: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """Return prefill attention of ``inputs``, NaN where nothing was written; ``options`` as of ``decode``."""
    return _attend(kernels.paged_prefill, inputs, inputs.kv(1), stored_before, out, **options)


def _attend(
    function: Callable[..., torch.Tensor],
    inputs: PagedInputs,
    kv: PagedKV,
    stored_before: bool,
    out: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    of_all = {name: options.pop(name) for name in OPTION_NAMES & options.keys()}
    out = torch.full_like(inputs.query, float("nan")) if out is None else out
    new = None if stored_before else inputs.new_tokens()
    returned = function(inputs.query, new, kv, options=inputs.options(**of_all), out=out, **options)
    assert returned is out
    return out


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


def _new_tokens(key: torch.Tensor | None, value: torch.Tensor | None) -> NewTokens | None:
    if key is None and value is None:
        return None
    return NewTokens(key, value)  # type: ignore[arg-type]  # one of them may be missing, which is refused
