"""Decode attention over a paged cache in plain torch: one new token per request, stored and attended.

All requests of a chunk are gathered with one ``index_select`` per cache and attended with one call: no Python loop
over requests. What depends only on lengths and block tables is worked out once per step in a ``DecodePlan`` and shared
by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rose_backend.kernels.reference.attend import attend, position_bias
from rose_backend.kernels.reference.write_kv import write_at

# Gathered keys of one chunk, at most, unless a single request is longer. A few MiB stay in cache between the gather and
# the product that reads them.
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Requests that are gathered together: ``C`` requests, ``W`` block columns, ``S <= W * BS`` positions attended."""

    rows: torch.Tensor | None
    """[C] int64, positions in the batch; None when the chunk is the whole batch in order."""
    block_ids: torch.Tensor
    """[C * W] int64, row after row."""
    new_token_slots: torch.Tensor
    """[C] int64: where each request's new token lies among the C * W * BS gathered positions."""
    hidden_slots: torch.Tensor
    """[H] int64: gathered positions that no request may see (their content may be anything, NaN too)."""
    num_positions: int
    """S: what the longest request of the chunk sees."""
    bias: torch.Tensor | None
    """[C, HKV or 1, HQ / HKV or 1, S] in the cache's dtype; None when everything gathered is visible."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Everything of one step's decode attention that does not depend on the layer."""

    rows: torch.Tensor | None
    """[C] int64: the rows that are not padding; None when all are real."""
    write_block_ids: torch.Tensor
    """[C] int64."""
    write_offsets: torch.Tensor
    """[C] int64."""
    chunks: tuple[DecodeChunk, ...]
    key_scratch: torch.Tensor
    """Room for the largest chunk, [N, BS, HKV, D]."""
    value_scratch: torch.Tensor


def plan_paged_decode(
    block_table: torch.Tensor,  # [R, MB] int32
    num_computed_tokens: torch.Tensor,  # [R] int32
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  only shape, dtype and device are used
    *,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> DecodePlan:
    """Work out one step's gathers and masks. Reads the lengths on the host: on CUDA this waits for the device."""
    _, block_size, num_kv_heads, head_size = key_cache.shape
    positions = num_computed_tokens.to(torch.int64)
    rows = None
    if positions.numel() and int(positions.min()) < 0:
        rows = (positions >= 0).nonzero().squeeze(1)
        positions, block_table = positions[rows], block_table[rows]
    first_columns = torch.zeros_like(positions)
    if sliding_window is not None:
        first_columns = (positions - sliding_window + 1).clamp_(min=0) // block_size
    last_columns = positions // block_size
    widths = (last_columns - first_columns + 1).tolist()
    token_bytes = num_kv_heads * head_size * key_cache.element_size()
    chunks = []
    for members, width in _split_rows(widths, chunk_bytes // max(block_size * token_bytes, 1)):
        chosen = None if members is None else torch.tensor(members, device=positions.device)
        chunks.append(
            _plan_chunk(
                chosen,
                width,
                block_table if chosen is None else block_table[chosen],
                positions if chosen is None else positions[chosen],
                first_columns if chosen is None else first_columns[chosen],
                key_cache,
                sliding_window=sliding_window,
                alibi_slopes=alibi_slopes,
            )
        )
    num_scratch_blocks = max((chunk.block_ids.numel() for chunk in chunks), default=0)
    scratch = key_cache.new_empty((2, num_scratch_blocks, block_size, num_kv_heads, head_size))
    return DecodePlan(
        rows=rows,
        write_block_ids=block_table.gather(1, last_columns.unsqueeze(1)).squeeze(1).to(torch.int64),
        write_offsets=positions % block_size,
        chunks=tuple(chunks),
        key_scratch=scratch[0],
        value_scratch=scratch[1],
    )


def _split_rows(widths: list[int], max_blocks: int) -> list[tuple[list[int] | None, int]]:
    """Group rows into chunks of (rows, block columns), at most ``max_blocks`` gathered blocks each.

    Rows are taken from the longest to the shortest, so that rows of one chunk need little padding.
    """
    if not widths:
        return []
    if len(widths) == 1 or max(widths) * len(widths) <= max_blocks:
        return [(None, max(widths))]
    by_width = sorted(range(len(widths)), key=widths.__getitem__, reverse=True)
    chunks: list[tuple[list[int] | None, int]] = []
    start = 0
    while start < len(by_width):
        width = widths[by_width[start]]
        num_rows = max(max_blocks // width, 1)
        chunks.append((by_width[start : start + num_rows], width))
        start += num_rows
    return chunks


def _plan_chunk(
    rows: torch.Tensor | None,
    width: int,
    block_table: torch.Tensor,  # [C, MB]
    positions: torch.Tensor,  # [C]
    first_columns: torch.Tensor,  # [C]
    key_cache: torch.Tensor,
    *,
    sliding_window: int | None,
    alibi_slopes: torch.Tensor | None,
) -> DecodeChunk:
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    device = positions.device
    columns = first_columns.unsqueeze(1) + torch.arange(width, device=device)
    # Columns past a row's last block hold anything, also ids outside the cache: gather the last block again instead.
    columns = torch.minimum(columns, (positions // block_size).unsqueeze(1))
    first_positions = first_columns.unsqueeze(1) * block_size
    relative_positions = positions - first_positions.squeeze(1)
    num_positions = int(relative_positions.max()) + 1
    key_positions = first_positions + torch.arange(num_positions, device=device)
    visible_from = 0 if sliding_window is None else (positions - sliding_window + 1).unsqueeze(1)
    hidden = (key_positions > positions.unsqueeze(1)) | (key_positions < visible_from)
    hidden_rows, hidden_positions = hidden.nonzero(as_tuple=True)
    num_slots = width * block_size
    bias = None
    if hidden_rows.numel() or alibi_slopes is not None:
        bias = position_bias(
            positions.unsqueeze(1),
            key_positions,
            dtype=key_cache.dtype,
            num_kv_heads=num_kv_heads,
            sliding_window=sliding_window,
            alibi_slopes=alibi_slopes,
        ).squeeze(-2)
    row_starts = torch.arange(positions.numel(), device=device) * num_slots
    return DecodeChunk(
        rows=rows,
        block_ids=block_table.gather(1, columns).view(-1).to(torch.int64),
        new_token_slots=row_starts + relative_positions,
        hidden_slots=hidden_rows * num_slots + hidden_positions,
        num_positions=num_positions,
        bias=bias,
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
    """Twin of ``rose_backend.kernels.paged_decode``."""
    if plan is None:
        plan = plan_paged_decode(
            block_table,
            num_computed_tokens,
            key_cache,
            sliding_window=sliding_window,
            alibi_slopes=alibi_slopes,
        )
    result = out
    if plan.rows is not None:
        query, result = query[plan.rows], torch.empty_like(out[: plan.rows.numel()])
        if new_key is not None and new_value is not None:
            new_key, new_value = new_key[plan.rows], new_value[plan.rows]
    if new_key is not None and new_value is not None:
        write_at(new_key, new_value, key_cache, value_cache, plan.write_block_ids, plan.write_offsets)
    for chunk in plan.chunks:
        rows = chunk.rows
        key = _gather(key_cache, new_key, chunk, plan.key_scratch)
        value = _gather(value_cache, new_value, chunk, plan.value_scratch)
        chunk_query = query if rows is None else query[rows]
        num_rows, num_kv_heads = key.shape[0], key.shape[1]
        # Query heads that share a key head become rows of one product: grouped heads need no copy of the keys.
        grouped_query = chunk_query.unflatten(1, (num_kv_heads, -1))
        attended = attend(grouped_query, key, value, chunk.bias, scale=scale, logits_soft_cap=logits_soft_cap)
        attended = attended.reshape(num_rows, *query.shape[1:])
        if rows is None:
            result.copy_(attended)
        else:
            result[rows] = attended
    if plan.rows is not None:
        out[plan.rows] = result
    return out


def _gather(
    cache: torch.Tensor,  # [NB, BS, HKV, D]
    new_tokens: torch.Tensor | None,  # [rows, HKV, D]
    chunk: DecodeChunk,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Return one chunk's keys or values as [C, HKV, S, D], new tokens and hidden positions already in place."""
    num_blocks = chunk.block_ids.numel()
    num_rows = chunk.new_token_slots.numel()
    # Into a reused buffer: a fresh one of this size costs more in page faults than the copy itself.
    gathered = torch.index_select(cache, 0, chunk.block_ids, out=scratch[:num_blocks])
    by_slot = gathered.flatten(0, 1)
    if new_tokens is not None:
        by_slot[chunk.new_token_slots] = new_tokens if chunk.rows is None else new_tokens[chunk.rows]
    if chunk.hidden_slots.numel():
        # A minus infinity in the bias does not hide a NaN.
        by_slot.index_fill_(0, chunk.hidden_slots, 0.0)
    return by_slot.unflatten(0, (num_rows, -1))[:, : chunk.num_positions].transpose(1, 2)
