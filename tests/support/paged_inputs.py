"""Paged caches as an adversary would hand them over: shuffled blocks, odd strides, NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from rose_backend.kernels import AttentionOptions, HeadRotation
from rose_backend.kernels.kv.reference import to_cache

CACHE_LAYOUTS = ("contiguous", "vllm", "layer_of_stack")
GARBAGE_BLOCK_ID = 1_000_000


@dataclass
class PagedInputs:
    """Arguments of both attention functions, and the dense history they stand for."""

    query: torch.Tensor
    """[T, HQ, D]"""
    new_key: torch.Tensor
    """[T, HKV, D]"""
    new_value: torch.Tensor
    key_cache: torch.Tensor
    """[NB, BS, HKV, D] view of ``storage``."""
    value_cache: torch.Tensor
    storage: torch.Tensor
    """The whole allocation, for comparisons of everything that must not change."""
    block_table: torch.Tensor
    """[R, MB] int32; entries that no length requires hold an id outside the cache."""
    query_start_loc: torch.Tensor
    """[R + 1] int32"""
    num_computed_tokens: torch.Tensor
    """[R] int32"""
    history_keys: list[torch.Tensor]
    """Per row [num_computed_tokens, HKV, D] as cached; empty for padding."""
    history_values: list[torch.Tensor]
    slot_mapping: torch.Tensor
    """[T] int64, -1 for padding rows' tokens."""
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    def row_tokens(self, row: int) -> slice:
        """Return the row's tokens within the step."""
        return slice(int(self.query_start_loc[row]), int(self.query_start_loc[row + 1]))

    def row_keys(self, row: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what the row's tokens see of each other, [S, HKV, D]: history and new tokens as they are cached."""
        new = to_cache(self.new_key[self.row_tokens(row)], self.key_cache.dtype, self.key_scale)
        return _scaled(torch.cat((self.history_keys[row], new)), self.key_scale, dtype)

    def row_values(self, row: int, dtype: torch.dtype) -> torch.Tensor:
        """As ``row_keys``."""
        new = to_cache(self.new_value[self.row_tokens(row)], self.value_cache.dtype, self.value_scale)
        return _scaled(torch.cat((self.history_values[row], new)), self.value_scale, dtype)


def without_passed_blocks(inputs: PagedInputs, window: int) -> int:
    """Point columns that no token of a row attends to at a block of NaN, as block managers do; return how many."""
    block_size, table = inputs.key_cache.shape[1], inputs.block_table
    used = set(table.flatten().tolist())
    unused = next(block for block in range(len(inputs.key_cache)) if block not in used)
    assert inputs.key_cache[unused].isnan().all()
    num_passed = 0
    for row, computed in enumerate(inputs.num_computed_tokens.tolist()):
        passed = max(computed - window + 1, 0) // block_size
        table[row, :passed] = unused
        num_passed += passed
    return num_passed


def grouped(**arguments: Any) -> dict[str, Any]:
    """Return arguments of an attention function, those that are fields of ``AttentionOptions`` as ``options``."""
    names = {field.name for field in fields(AttentionOptions)} & arguments.keys()
    return {"options": AttentionOptions(**{name: arguments.pop(name) for name in names}), **arguments}


def _scaled(cached: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return cached.to(dtype) if scale is None else (cached.double() * scale).to(dtype)


def build_paged_inputs(
    num_computed_tokens: list[int],
    query_lens: list[int] | None = None,
    *,
    num_query_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    key_scale: float | None = None,
    value_scale: float | None = None,
    layout: str = "contiguous",
    seed: int = 0,
    extra_columns: int = 3,
) -> PagedInputs:
    """Build inputs for rows with the given lengths; a negative length makes a padding row.

    Args:
        query_lens: new tokens per row; None is one each.
        cache_dtype: None is ``dtype``.
        key_scale, value_scale: of float8 caches.
        layout: of ``CACHE_LAYOUTS``.
        extra_columns: block-table columns that nothing needs.
    """
    generator = torch.Generator().manual_seed(seed)
    query_lens = [1] * len(num_computed_tokens) if query_lens is None else query_lens
    num_tokens = sum(query_lens)
    widths = [
        -(-max(computed + length, 0) // block_size) if computed >= 0 else 0
        for computed, length in zip(num_computed_tokens, query_lens, strict=True)
    ]
    num_blocks = sum(widths) + 3
    storage, key_cache, value_cache = _make_cache(
        num_blocks, block_size, num_kv_heads, head_size, cache_dtype or dtype, layout
    )
    block_table = torch.full(
        (len(widths), max(widths, default=0) + extra_columns), GARBAGE_BLOCK_ID, dtype=torch.int32
    )
    free_blocks = iter(torch.randperm(num_blocks, generator=generator).tolist())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    history_keys, history_values, slots = [], [], []
    for row, (computed, length) in enumerate(zip(num_computed_tokens, query_lens, strict=True)):
        blocks = torch.tensor([next(free_blocks) for _ in range(widths[row])], dtype=torch.int64)
        block_table[row, : widths[row]] = blocks.to(torch.int32)
        keys, values = (
            random(max(computed, 0), num_kv_heads, head_size).to(key_cache.dtype) for _ in range(2)
        )
        for position in range(max(computed, 0)):
            key_cache[blocks[position // block_size], position % block_size] = keys[position]
            value_cache[blocks[position // block_size], position % block_size] = values[position]
        history_keys.append(keys)
        history_values.append(values)
        positions = torch.arange(computed, computed + length)
        slots.append(
            blocks[positions // block_size] * block_size + positions % block_size
            if computed >= 0
            else torch.full((length,), -1)
        )
    return PagedInputs(
        query=random(num_tokens, num_query_heads, head_size),
        new_key=random(num_tokens, num_kv_heads, head_size),
        new_value=random(num_tokens, num_kv_heads, head_size),
        key_cache=key_cache,
        value_cache=value_cache,
        storage=storage,
        block_table=block_table,
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        num_computed_tokens=torch.tensor(num_computed_tokens, dtype=torch.int32),
        history_keys=history_keys,
        history_values=history_values,
        slot_mapping=torch.cat(slots).to(torch.int64) if slots else torch.empty(0, dtype=torch.int64),
        key_scale=None if key_scale is None else torch.tensor(key_scale),
        value_scale=None if value_scale is None else torch.tensor([value_scale]),
    )


def _make_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nan = float("nan")
    if layout == "contiguous":
        storage = torch.full((2, num_blocks, block_size, num_kv_heads, head_size), nan, dtype=dtype)
        return storage, storage[0], storage[1]
    if layout == "vllm":
        storage = torch.full((num_blocks, num_kv_heads, block_size, 2 * head_size), nan, dtype=dtype)
        views = storage.transpose(1, 2)
        return storage, views[..., :head_size], views[..., head_size:]
    if layout == "layer_of_stack":
        # Blocks outermost, layers inside: neighbouring blocks of one layer lie far apart.
        storage = torch.full((num_blocks, 3, 2, block_size, num_kv_heads, head_size), nan, dtype=dtype)
        return storage, storage[:, 1, 0], storage[:, 1, 1]
    raise ValueError(f"layout: got {layout!r}, allowed are {', '.join(CACHE_LAYOUTS)}")


def expected_storage(inputs: PagedInputs) -> torch.Tensor:
    """Return what ``storage`` must hold, bit for bit, once the new tokens have been stored."""
    clone = inputs.storage.clone()
    key_view = clone.as_strided(
        inputs.key_cache.shape, inputs.key_cache.stride(), inputs.key_cache.storage_offset()
    )
    value_view = clone.as_strided(
        inputs.value_cache.shape, inputs.value_cache.stride(), inputs.value_cache.storage_offset()
    )
    block_size = inputs.key_cache.shape[1]
    keys = to_cache(inputs.new_key, key_view.dtype, inputs.key_scale)
    values = to_cache(inputs.new_value, value_view.dtype, inputs.value_scale)
    for token, slot in enumerate(inputs.slot_mapping.tolist()):
        if slot >= 0:
            key_view[slot // block_size, slot % block_size] = keys[token]
            value_view[slot // block_size, slot % block_size] = values[token]
    return clone


def random_rotation(
    head_size: int,
    rotated: int | None = None,
    *,
    norms: bool,
    num_positions: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> HeadRotation:
    """Return a rotation of the first ``rotated`` numbers of a head, None: of all, with random angles."""
    generator = torch.Generator().manual_seed(head_size)
    angles = torch.rand(num_positions, (rotated or head_size) // 2, generator=generator) * 6.3
    weights = (1 + 0.3 * torch.randn(2, head_size, generator=generator)).to(device, dtype)
    table = torch.cat((angles.cos(), angles.sin()), 1).to(device)
    return HeadRotation(table, *(weights if norms else (None, None)), eps=1e-5)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit; NaN equals the same NaN."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return left.dtype == right.dtype and torch.equal(left.view(integer), right.view(integer))


def naive_attention(
    inputs: PagedInputs,
    *,
    scale: float,
    dtype: torch.dtype = torch.float64,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of every token [T, HQ, D] by the definition, row after row and head after head, in ``dtype``.

    Tokens of padding rows are zero.
    """
    out = torch.zeros(inputs.query.shape, dtype=dtype)
    num_groups = inputs.query.shape[1] // inputs.new_key.shape[1]
    for row, computed in enumerate(inputs.num_computed_tokens.tolist()):
        tokens = inputs.row_tokens(row)
        if computed < 0 or tokens.start == tokens.stop:
            continue
        keys, values = inputs.row_keys(row, dtype), inputs.row_values(row, dtype)
        distance = torch.arange(len(keys)) - torch.arange(computed, len(keys)).unsqueeze(1)
        visible = distance <= 0
        if sliding_window is not None:
            visible &= distance > -sliding_window
        for head in range(inputs.query.shape[1]):
            scores = (inputs.query[tokens, head].to(dtype) @ keys[:, head // num_groups].T) * scale
            if logits_soft_cap is not None:
                scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
            if alibi_slopes is not None:
                scores = scores + alibi_slopes[head].to(dtype) * distance
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].to(dtype).expand(len(scores), 1)), dim=-1)
            weights = scores.softmax(-1)[:, : len(keys)]
            out[tokens, head] = weights @ values[:, head // num_groups]
    return out
