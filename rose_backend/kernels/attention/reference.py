"""Softmax attention over a paged cache in plain torch: decodes and chunks of prompts, stored and attended.

Decodes of a chunk of requests are gathered with one ``index_select`` per cache and attended with one call: no Python
loop over requests. What depends only on lengths and block tables is computed once per step in a ``DecodePlan`` and
shared by all layers. Prompts are attended row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import CACHE_DTYPE, AttentionOptions, NewTokens, PagedKV
from rose_backend.kernels.kv.ops import from_cache, to_cache, write_at

# Gathered keys of one chunk, at most, unless a single request is longer. A few MiB stay in cache between the gather and
# the product that reads them.
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Requests that are gathered together: ``C`` requests, ``Q`` queries each, ``W`` block columns, ``S <= W * BS``
    positions attended, ``N`` new tokens."""

    queries: torch.Tensor | None
    """[C, Q] int64: each request's tokens of the step, the last one repeated. None when the chunk is the whole step in
    order, one token each."""
    real_queries: torch.Tensor | None
    """[N] int64: which of the C * Q queries are the new tokens, each once. None when all are, in order."""
    block_ids: torch.Tensor
    """[C * W] int64, row after row."""
    new_token_slots: torch.Tensor
    """[N] int64: where the new tokens lie among the C * W * BS gathered positions."""
    hidden_slots: torch.Tensor
    """One dimension, int64: gathered positions that no query may see (they may hold anything, NaN too)."""
    num_rows: int
    """C"""
    num_positions: int
    """S: what the longest request of the chunk sees."""
    bias: torch.Tensor | None
    """[C, HKV or 1, HQ / HKV or 1, Q, S]; None when everything gathered is visible."""

    def new_tokens(self) -> torch.Tensor | None:
        """Return the new tokens' indices in the step, [N]; None when they are all of it in order."""
        if self.queries is None or self.real_queries is None:
            return None if self.queries is None else self.queries.flatten()
        return self.queries.flatten()[self.real_queries]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Everything of one step's decode attention that does not depend on the layer."""

    stored_tokens: torch.Tensor | None
    """[N] int64: tokens of the step that are stored; None when all are, in order."""
    write_block_ids: torch.Tensor
    """[N] int64."""
    write_offsets: torch.Tensor
    """[N] int64."""
    chunks: tuple[DecodeChunk, ...]
    key_scratch: torch.Tensor
    """Room for the largest chunk, [N, BS, HKV, D]."""
    value_scratch: torch.Tensor


def plan_paged_decode(
    kv: PagedKV,  # of the caches only shape, dtype and device are used
    *,
    options: AttentionOptions,
    chunk_bytes: int = CHUNK_BYTES,
) -> DecodePlan:
    """Work out one step's gathers and masks. Reads the lengths on the host: on CUDA this waits for the device."""
    key_cache, block_table = kv.key_cache, kv.block_table
    _, block_size, num_kv_heads, head_size = key_cache.shape
    queries, positions, is_real, rows = _find_queries(kv)
    in_order = rows is None and kv.query_start_loc is None
    if rows is not None:
        block_table = block_table[rows]
    first_columns = _first_columns(positions, block_size, options.sliding_window)
    widths = (positions[:, -1] // block_size - first_columns + 1).tolist()
    token_bytes = num_kv_heads * head_size * key_cache.element_size()
    chunks = []
    for members, width in _split_rows(widths, chunk_bytes // max(block_size * token_bytes, 1)):
        chosen = slice(None) if members is None else torch.tensor(members, device=positions.device)
        chunks.append(
            _plan_chunk(
                None if members is None and in_order else queries[chosen],
                positions[chosen],
                is_real[chosen],
                width,
                block_table[chosen],
                key_cache,
                options,
            )
        )
    num_scratch_blocks = max((chunk.block_ids.numel() for chunk in chunks), default=0)
    scratch = key_cache.new_empty((2, num_scratch_blocks, block_size, num_kv_heads, head_size))
    return DecodePlan(
        stored_tokens=None if in_order else queries[is_real],
        write_block_ids=block_table.gather(1, positions // block_size)[is_real].to(torch.int64),
        write_offsets=positions[is_real] % block_size,
        chunks=tuple(chunks),
        key_scratch=scratch[0],
        value_scratch=scratch[1],
    )


def _find_queries(
    kv: PagedKV,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return tokens [C, Q] and positions [C, Q] of the rows that have tokens, the last one repeated, which of them are
    no repetition, and the rows' indices [C], None when all rows have tokens."""
    computed = kv.num_computed_tokens.to(torch.int64)
    if kv.query_start_loc is None:
        starts = torch.arange(computed.numel(), device=computed.device)
        counts = torch.ones_like(computed)
    else:
        starts = kv.query_start_loc[:-1].to(torch.int64)
        counts = kv.query_start_loc[1:] - starts
        attended = counts[computed >= 0]
        if attended.numel() and not 0 <= int(attended.min()) <= int(attended.max()) <= kv.max_query_len:
            raise ShapeError(
                f"query_start_loc: expected 0 to max_query_len={kv.max_query_len} tokens per row, got "
                f"{int(attended.min())} to {int(attended.max())}"
            )
    has_tokens = (computed >= 0) & (counts > 0)
    rows = None
    if not bool(has_tokens.all()):
        rows = has_tokens.nonzero().squeeze(1)
        computed, starts, counts = computed[rows], starts[rows], counts[rows]
    steps = torch.arange(kv.max_query_len, device=computed.device)
    order = torch.minimum(steps, counts.unsqueeze(1) - 1)
    is_real = steps < counts.unsqueeze(1)
    return starts.unsqueeze(1) + order, computed.unsqueeze(1) + order, is_real, rows


def _first_columns(positions: torch.Tensor, block_size: int, sliding_window: int | None) -> torch.Tensor:
    """Return the first block column that any query of a row [C, Q] sees."""
    if sliding_window is None:
        return torch.zeros_like(positions[:, 0])
    return (positions[:, 0] - sliding_window + 1).clamp_(min=0) // block_size


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
    queries: torch.Tensor | None,  # [C, Q]
    positions: torch.Tensor,  # [C, Q]
    is_real: torch.Tensor,  # [C, Q]
    width: int,
    block_table: torch.Tensor,  # [C, MB]
    key_cache: torch.Tensor,
    options: AttentionOptions,
) -> DecodeChunk:
    sliding_window = options.sliding_window
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    device = positions.device
    num_rows, num_queries = positions.shape
    first_columns = _first_columns(positions, block_size, sliding_window).unsqueeze(1)
    last_positions = positions[:, -1:]
    # Columns past a row's last block hold anything, also ids outside the cache: gather the last block again instead.
    columns = torch.minimum(first_columns + torch.arange(width, device=device), last_positions // block_size)
    first_positions = first_columns * block_size
    relative_positions = positions - first_positions
    num_positions = int(relative_positions.max()) + 1
    key_positions = first_positions + torch.arange(num_positions, device=device)
    visible_from = 0 if sliding_window is None else positions[:, :1] - sliding_window + 1
    hidden = (key_positions > last_positions) | (key_positions < visible_from)
    hidden_rows, hidden_positions = hidden.nonzero(as_tuple=True)
    num_slots = width * block_size
    bias = None
    if hidden_rows.numel() or options.alibi_slopes is not None or num_queries > 1:
        bias = position_bias(
            positions,
            key_positions,
            dtype=torch.float32 if key_cache.dtype == CACHE_DTYPE else key_cache.dtype,
            num_kv_heads=num_kv_heads,
            options=options,
        )
    row_starts = torch.arange(num_rows, device=device).unsqueeze(1) * num_slots
    return DecodeChunk(
        queries=queries,
        real_queries=None if num_queries == 1 else is_real.flatten().nonzero().squeeze(1),
        block_ids=block_table.gather(1, columns).view(-1).to(torch.int64),
        new_token_slots=(row_starts + relative_positions)[is_real],
        hidden_slots=hidden_rows * num_slots + hidden_positions,
        num_rows=num_rows,
        num_positions=num_positions,
        bias=bias,
    )


def paged_decode(
    query: torch.Tensor,  # [T, HQ, D]
    new: NewTokens | None,
    kv: PagedKV,  # the caches are written
    *,
    options: AttentionOptions,
    out: torch.Tensor,  # [T, HQ, D]  written
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """Reference of ``rose_backend.kernels.paged_decode``."""
    if plan is None:
        plan = plan_paged_decode(kv, options=options)
    new_key, new_value = _as_cached(new, kv, options)
    if new_key is not None and new_value is not None:
        _store(new_key, new_value, kv, plan)
    dtype = torch.float32 if kv.key_cache.dtype == CACHE_DTYPE else query.dtype
    for chunk in plan.chunks:
        tokens = chunk.new_tokens()
        attended = _attend_chunk(
            query.unsqueeze(1).to(dtype) if chunk.queries is None else query[chunk.queries].to(dtype),
            from_cache(
                _gather(kv.key_cache, new_key, chunk, tokens, plan.key_scratch), dtype, options.key_scale
            ),
            from_cache(
                _gather(kv.value_cache, new_value, chunk, tokens, plan.value_scratch),
                dtype,
                options.value_scale,
            ),
            chunk.bias,
            options,
        )
        if chunk.real_queries is not None:
            attended = attended[chunk.real_queries]
        if tokens is None:
            out.copy_(attended)
        else:
            out[tokens] = attended.to(out.dtype)
    return out


def _as_cached(
    new: NewTokens | None, kv: PagedKV, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return new keys and values as they are stored."""
    if new is None:
        return None, None
    return (
        to_cache(new.key, kv.key_cache.dtype, options.key_scale),
        to_cache(new.value, kv.value_cache.dtype, options.value_scale),
    )


def _store(key: torch.Tensor, value: torch.Tensor, kv: PagedKV, plan: DecodePlan | PrefillPlan) -> None:
    """Store the step's keys and values where the plan says."""
    if plan.stored_tokens is not None:
        key, value = key[plan.stored_tokens], value[plan.stored_tokens]
    write_at(key, value, kv.key_cache, kv.value_cache, plan.write_block_ids, plan.write_offsets)


def _attend_chunk(
    query: torch.Tensor,  # [C, Q, HQ, D]
    key: torch.Tensor,  # [C, HKV, S, D]
    value: torch.Tensor,  # [C, HKV, S, D]
    bias: torch.Tensor | None,  # [C, HKV or 1, HQ / HKV or 1, Q, S]
    options: AttentionOptions,
) -> torch.Tensor:
    """Return [C * Q, HQ, D]."""
    num_rows, num_queries, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    num_groups = num_heads // num_kv_heads
    # Query heads that share a key head become rows of one product: grouped heads need no copy of the keys.
    grouped = query.unflatten(2, (num_kv_heads, num_groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if bias is not None:
        bias = bias.expand(-1, -1, num_groups, -1, -1).flatten(2, 3) if num_queries > 1 else bias.squeeze(-2)
    sinks = options.sinks
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, num_groups).repeat_interleave(num_queries, dim=1)
    attended = attend(
        grouped,
        key,
        value,
        bias,
        scale=options.scale,
        logits_soft_cap=options.logits_soft_cap,
        sinks=sinks,
    ).unflatten(2, (num_groups, num_queries))
    return attended.permute(0, 3, 1, 2, 4).reshape(num_rows * num_queries, num_heads, head_size)


def _gather(
    cache: torch.Tensor,  # [NB, BS, HKV, D]
    new_tokens: torch.Tensor | None,  # [T, HKV, D], in the cache's dtype
    chunk: DecodeChunk,
    tokens: torch.Tensor | None,  # [N]
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Return one chunk's keys or values as [C, HKV, S, D], new tokens and hidden positions already in place."""
    num_blocks = chunk.block_ids.numel()
    # Into a reused buffer: a fresh one of this size costs more in page faults than the copy itself.
    gathered = torch.index_select(cache, 0, chunk.block_ids, out=scratch[:num_blocks])
    by_slot = gathered.flatten(0, 1)
    if new_tokens is not None:
        by_slot[chunk.new_token_slots] = new_tokens if tokens is None else new_tokens[tokens]
    if chunk.hidden_slots.numel():
        # A minus infinity in the bias does not hide a NaN. Of a float8 number, too, all zero bits are zero.
        filled = by_slot.view(torch.uint8) if by_slot.dtype == CACHE_DTYPE else by_slot
        filled.index_fill_(0, chunk.hidden_slots, 0)
    return by_slot.unflatten(0, (chunk.num_rows, -1))[:, : chunk.num_positions].transpose(1, 2)


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
    stored_tokens: torch.Tensor | None
    """[N] int64: tokens of the step that are stored; None when all are, in order."""
    write_block_ids: torch.Tensor
    """[N] int64."""
    write_offsets: torch.Tensor
    """[N] int64."""


def plan_paged_prefill(
    kv: PagedKV,  # of the caches only shape and device are used
    *,
    options: AttentionOptions,
    num_step_tokens: int,
) -> PrefillPlan:
    """Work out one step's gathers and stores. Reads the lengths on the host: on CUDA this waits for the device.

    Args:
        num_step_tokens: ``T``; tokens that belong to no row are padding.
    """
    block_table, query_start_loc, block_size = kv.block_table, kv.query_start_loc, kv.key_cache.shape[1]
    assert query_start_loc is not None, "prefill attention needs it"
    device = block_table.device
    starts = query_start_loc.tolist()
    rows: list[PrefillRow] = []
    tokens: list[torch.Tensor] = []
    block_ids: list[torch.Tensor] = []
    offsets: list[torch.Tensor] = []
    for row, computed in enumerate(kv.num_computed_tokens.tolist()):
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
        stored_tokens=None if covers_all else torch.cat(tokens),
        write_block_ids=torch.cat(block_ids),
        write_offsets=torch.cat(offsets),
    )


def paged_prefill(
    query: torch.Tensor,  # [T, HQ, D]
    new: NewTokens | None,
    kv: PagedKV,  # with query_start_loc; the caches are written
    *,
    options: AttentionOptions,
    out: torch.Tensor,  # [T, HQ, D]  written
    plan: PrefillPlan | None = None,
) -> torch.Tensor:
    """Reference of ``rose_backend.kernels.paged_prefill``."""
    if plan is None:
        plan = plan_paged_prefill(kv, options=options, num_step_tokens=query.shape[0])
    stored_key, stored_value = _as_cached(new, kv, options)
    for row in plan.rows:
        tokens = slice(row.start, row.start + row.num_tokens)
        _attend_row(
            row,
            query[tokens],
            _row_tokens(kv.key_cache, stored_key, row, query.dtype, options.key_scale),
            _row_tokens(kv.value_cache, stored_value, row, query.dtype, options.value_scale),
            out[tokens],
            options,
        )
    if stored_key is not None and stored_value is not None and plan.rows:
        _store(stored_key, stored_value, kv, plan)
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


def attend(
    query: torch.Tensor,  # [R, H, Q, D]
    key: torch.Tensor,  # [R, H, S, D]
    value: torch.Tensor,  # [R, H, S, D]
    bias: torch.Tensor | None,
    *,
    scale: float,
    is_causal: bool = False,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``softmax(cap(scale * q k^T) + bias) v`` as [R, H, Q, D] in the query's dtype, accumulated in float32.

    Args:
        bias: added to the scaled products, float32 or the query's dtype, broadcast to [R, H, Q, S]; minus infinity
            hides a position. At least one position per query must stay visible.
        is_causal: query i sees keys 0..i; only together with ``bias=None``.
        logits_soft_cap: products become ``cap * tanh(product / cap)`` before the bias is added.
        sinks: logits, broadcast to [R, H, Q], that take part in the softmax and attend to nothing. Neither scaled nor
            capped.
    """
    if logits_soft_cap is None and sinks is None and (bias is None or bias.dtype == query.dtype):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=is_causal, scale=scale
        )
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        sink_scores = sinks.float().expand(scores.shape[:-1]).unsqueeze(-1)
        weights = torch.cat((scores, sink_scores), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ value.float()).to(query.dtype)


def position_bias(
    query_positions: torch.Tensor,  # [..., Q]
    key_positions: torch.Tensor,  # [..., S]
    *,
    dtype: torch.dtype,
    num_kv_heads: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return the mask and the ALiBi bias: minus infinity for hidden keys, and ALiBi where asked for.

    A key is hidden when it lies after the query, or ``options.sliding_window`` or more positions before it.

    Args:
        dtype: of the result without slopes. With slopes it is float32: half types would round far distances.
        num_kv_heads: ``options.alibi_slopes`` [HQ] is read as [HKV, HQ / HKV].

    Returns:
        [..., 1, 1, Q, S] without slopes, [..., HKV, HQ / HKV, Q, S] with them.
    """
    distance = (key_positions.unsqueeze(-2) - query_positions.unsqueeze(-1)).unsqueeze(-3).unsqueeze(-3)
    hidden = distance > 0
    if options.sliding_window is not None:
        hidden = hidden | (distance <= -options.sliding_window)
    if options.alibi_slopes is None:
        bias = torch.zeros(distance.shape, dtype=dtype, device=distance.device)
    else:
        slopes = options.alibi_slopes.to(torch.float32).view(num_kv_heads, -1, 1, 1)
        bias = slopes * distance
    return bias.masked_fill_(hidden, float("-inf"))
