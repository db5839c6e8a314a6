"""Prefill attention over a paged cache in plain torch: chunks of prompts, stored and attended, row after row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rose_backend.kernels.arguments import AttentionOptions
from rose_backend.kernels.attention.reference import attend, position_bias
from rose_backend.kernels.kv.reference import from_cache, to_cache, write_at

# Queries attended at once where a mask is needed: bounds the mask to this many rows of float per visible token.
MASKED_QUERY_TILE = 256


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One request's share of a step."""

    start: int
    """Its first token in the step."""
    num_tokens: int
    num_computed_tokens: int
    first_position: int
    """Position of the first gathered token: 0, or the block in which a sliding window begins."""
    history_block_ids: torch.Tensor
    """[W] int64: blocks that hold positions ``first_position .. num_computed_tokens - 1``."""
    block_ids: torch.Tensor
    """[W] int64: blocks up to the last new token."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Everything of one step's prefill attention that does not depend on the layer."""

    rows: tuple[PrefillRow, ...]
    token_indices: torch.Tensor | None
    """[N] int64: tokens of the step that are stored; None when all are, in order."""
    write_block_ids: torch.Tensor
    """[N] int64."""
    write_offsets: torch.Tensor
    """[N] int64."""


def plan_paged_prefill(
    block_table: torch.Tensor,  # [R, MB] int32
    query_start_loc: torch.Tensor,  # [R + 1] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  only shape and device are used
    *,
    options: AttentionOptions,
    num_step_tokens: int,
) -> PrefillPlan:
    """Work out one step's gathers and stores. Reads the lengths on the host: on CUDA this waits for the device.

    Args:
        num_step_tokens: ``T``; tokens that belong to no row are padding.
    """
    block_size = key_cache.shape[1]
    device = block_table.device
    starts = query_start_loc.tolist()
    rows: list[PrefillRow] = []
    tokens: list[torch.Tensor] = []
    block_ids: list[torch.Tensor] = []
    offsets: list[torch.Tensor] = []
    for row, computed in enumerate(num_computed_tokens.tolist()):
        start, num_tokens = starts[row], starts[row + 1] - starts[row]
        if num_tokens <= 0 or computed < 0:
            continue
        first_column = 0
        if options.sliding_window is not None:
            first_column = max(computed - options.sliding_window + 1, 0) // block_size
        end_column = -(-(computed + num_tokens) // block_size)
        used = block_table[row, :end_column].to(torch.int64)
        rows.append(
            PrefillRow(
                start=start,
                num_tokens=num_tokens,
                num_computed_tokens=computed,
                first_position=first_column * block_size,
                history_block_ids=used[first_column : -(-computed // block_size)],
                block_ids=used[first_column:],
            )
        )
        positions = torch.arange(computed, computed + num_tokens, device=device)
        tokens.append(torch.arange(start, start + num_tokens, device=device))
        block_ids.append(used[positions // block_size])
        offsets.append(positions % block_size)
    if not rows:
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return PrefillPlan((), empty, empty, empty)
    covers_all = sum(row.num_tokens for row in rows) == num_step_tokens
    return PrefillPlan(
        rows=tuple(rows),
        token_indices=None if covers_all else torch.cat(tokens),
        write_block_ids=torch.cat(block_ids),
        write_offsets=torch.cat(offsets),
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
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.paged_prefill``."""
    if plan is None:
        plan = plan_paged_prefill(
            block_table,
            query_start_loc,
            num_computed_tokens,
            key_cache,
            options=options,
            num_step_tokens=query.shape[0],
        )
    stored_key = None if new_key is None else to_cache(new_key, key_cache.dtype, options.key_scale)
    stored_value = None if new_value is None else to_cache(new_value, value_cache.dtype, options.value_scale)
    for row in plan.rows:
        tokens = slice(row.start, row.start + row.num_tokens)
        _attend_row(
            row,
            query[tokens],
            _row_tokens(key_cache, stored_key, row, query.dtype, options.key_scale),
            _row_tokens(value_cache, stored_value, row, query.dtype, options.value_scale),
            out[tokens],
            options,
        )
    if stored_key is not None and stored_value is not None and plan.rows:
        if plan.token_indices is not None:
            stored_key, stored_value = stored_key[plan.token_indices], stored_value[plan.token_indices]
        write_at(stored_key, stored_value, key_cache, value_cache, plan.write_block_ids, plan.write_offsets)
    return out


def _row_tokens(
    cache: torch.Tensor,  # [NB, BS, HKV, D]
    stored_tokens: torch.Tensor | None,  # [T, HKV, D]  in the cache's dtype
    row: PrefillRow,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """Return the row's keys or values from ``first_position`` to its last new token, [S, HKV, D] of ``dtype``."""
    num_history = row.num_computed_tokens - row.first_position
    if stored_tokens is None:
        gathered = cache.index_select(0, row.block_ids).flatten(0, 1)[: num_history + row.num_tokens]
    else:
        gathered = stored_tokens[row.start : row.start + row.num_tokens]
        if num_history > 0:
            history = cache.index_select(0, row.history_block_ids).flatten(0, 1)[:num_history]
            gathered = torch.cat((history, gathered))
    return from_cache(gathered, dtype, scale)


def _attend_row(
    row: PrefillRow,
    query: torch.Tensor,  # [Q, HQ, D]
    key: torch.Tensor,  # [S, HKV, D]
    value: torch.Tensor,  # [S, HKV, D]
    out: torch.Tensor,  # [Q, HQ, D]  written
    options: AttentionOptions,
) -> None:
    num_kv_heads = key.shape[1]
    num_groups = query.shape[1] // num_kv_heads
    if num_groups > 1:
        key = key.repeat_interleave(num_groups, dim=1)
        value = value.repeat_interleave(num_groups, dim=1)
    heads_query = query.transpose(0, 1).unsqueeze(0)
    heads_key, heads_value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (key, value))
    num_visible = key.shape[0]
    head_sinks = None if options.sinks is None else options.sinks.unsqueeze(-1)
    window = options.sliding_window
    plain = options.alibi_slopes is None and (window is None or num_visible <= window)
    if plain and (row.num_tokens == 1 or row.num_tokens == num_visible):
        attended = attend(
            heads_query,
            heads_key,
            heads_value,
            None,
            scale=options.scale,
            is_causal=row.num_tokens > 1,
            logits_soft_cap=options.logits_soft_cap,
            sinks=head_sinks,
        )
        out.copy_(attended[0].transpose(0, 1))
        return
    key_positions = torch.arange(num_visible, device=query.device) + row.first_position
    num_history = num_visible - row.num_tokens
    for start in range(0, row.num_tokens, MASKED_QUERY_TILE):
        end = min(start + MASKED_QUERY_TILE, row.num_tokens)
        visible = num_history + end
        bias = position_bias(
            key_positions[num_history + start : visible],
            key_positions[:visible],
            dtype=query.dtype,
            num_kv_heads=num_kv_heads,
            options=options,
        ).flatten(0, 1)
        attended = attend(
            heads_query[:, :, start:end],
            heads_key[:, :, :visible],
            heads_value[:, :, :visible],
            bias.unsqueeze(0),
            scale=options.scale,
            logits_soft_cap=options.logits_soft_cap,
            sinks=head_sinks,
        )
        out[start:end].copy_(attended[0].transpose(0, 1))
