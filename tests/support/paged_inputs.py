"""Paged caches as an adversary would hand them over: shuffled blocks, odd strides, NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from rose_backend.conformance.error_budget import assert_within_budget
from rose_backend.kernels import AttentionOptions, HeadRotation, NewTokens, PagedKV
from rose_backend.kernels.arguments import CACHE_DTYPE
from rose_backend.kernels.kv.ops import to_cache

CACHE_LAYOUTS = ("contiguous", "vllm", "layer_of_stack", "heads_first")
FLOAT8 = {"cache_dtype": CACHE_DTYPE, "key_scale": 0.7, "value_scale": 1.3}
GARBAGE_BLOCK_ID = 1_000_000
Shape = tuple[int, int, int, int]
"""Query heads, KV heads, head size, block size."""
SHAPES: list[Shape] = [
    (3, 3, 64, 16),
    (12, 12, 64, 256),
    (4, 2, 80, 48),
    (8, 2, 96, 32),
    (5, 1, 128, 16),
    (32, 8, 128, 16),
    (8, 1, 192, 64),
    (3, 3, 256, 128),
    (16, 1, 256, 16),
    (2, 2, 16, 16),
]
"""Each head size and each group size; meant for each dtype on a GPU."""
OPTIONS: list[dict[str, Any]] = [
    {"sliding_window": 1},
    {"sliding_window": 9},
    {"sliding_window": 1000},
    {"logits_soft_cap": 0.7},
    {"alibi": True},
    {"sinks": True},
    {"sliding_window": 12, "alibi": True, "logits_soft_cap": 2.0, "sinks": True},
]
LARGE_OPTIONS = [
    {name: value * 30 if name == "sliding_window" else value for name, value in options.items()}
    for options in OPTIONS
]
OPTION_NAMES = {field.name for field in fields(AttentionOptions)}


@dataclass
class PagedInputs:
    """Arguments of both attention functions, and the dense history they stand for."""

    query: torch.Tensor
    """[T, HQ, D], as new keys and values a view of one projection's output."""
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

    @property
    def scale(self) -> float:
        """Factor on query-key products."""
        return self.query.shape[-1] ** -0.5

    @property
    def real_tokens(self) -> torch.Tensor:
        """Tokens of rows that are not padding, [T] bool."""
        return self.slot_mapping >= 0

    def new_tokens(self) -> NewTokens:
        """Return the new keys and values."""
        return NewTokens(self.new_key, self.new_value)

    def kv(self, max_query_len: int | None = None) -> PagedKV:
        """Return what is attended; ``max_query_len`` None is one token per row, without ``query_start_loc``."""
        starts = None if max_query_len is None else self.query_start_loc
        caches = self.key_cache, self.value_cache
        return PagedKV(*caches, self.block_table, self.num_computed_tokens, starts, max_query_len or 1)

    def options(self, **options: Any) -> AttentionOptions:
        """Return these options beside the scale and the caches' scales."""
        of_inputs = {"scale": self.scale, "key_scale": self.key_scale, "value_scale": self.value_scale}
        return AttentionOptions(**(of_inputs | options))

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


def resolve_options(options: dict[str, Any], shape: Shape, device: str) -> dict[str, Any]:
    """Replace ``alibi=True`` and ``sinks=True`` by tensors for the query heads of ``shape``."""
    options, num_heads = dict(options), shape[0]
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.linspace(0.5, 0.01, num_heads, device=device)
    if options.pop("sinks", False):
        # Some outweigh all tokens, and the last one weighs nothing.
        options["sinks"] = torch.linspace(-1.0, 6.0, num_heads, device=device, dtype=torch.bfloat16)
        options["sinks"][-1] = float("-inf")
    return options


def make_inputs(
    lengths: list[int],
    query_lens: list[int] | None = None,
    shape: Shape = (4, 2, 16, 8),
    **options: Any,
) -> PagedInputs:
    """Call ``build_paged_inputs`` with a shape as one tuple."""
    heads = {"num_query_heads": shape[0], "num_kv_heads": shape[1]}
    return build_paged_inputs(
        lengths, query_lens, **heads, head_size=shape[2], block_size=shape[3], **options
    )


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
    device: str = "cpu",
) -> PagedInputs:
    """Build inputs for rows with the given lengths; a negative length makes a padding row.

    Args:
        query_lens: new tokens per row; None is one each.
        cache_dtype: None is ``dtype``.
        key_scale, value_scale: of float8 caches.
        layout: of ``CACHE_LAYOUTS``.
        extra_columns: block-table columns that nothing needs.
    """
    generator = torch.Generator(device).manual_seed(seed)
    query_lens = [1] * len(num_computed_tokens) if query_lens is None else query_lens
    widths = [
        -(-max(computed + length, 0) // block_size) if computed >= 0 else 0
        for computed, length in zip(num_computed_tokens, query_lens, strict=True)
    ]
    num_blocks = sum(widths) + 3
    storage, key_cache, value_cache = _make_cache(
        num_blocks, block_size, num_kv_heads, head_size, cache_dtype or dtype, layout, device
    )
    table_shape = len(widths), max(widths, default=0) + extra_columns
    block_table = torch.full(table_shape, GARBAGE_BLOCK_ID, dtype=torch.int32, device=device)
    blocks_of_rows = torch.randperm(num_blocks, generator=generator, device=device).split([*widths, 3])

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    histories, slots = [], []
    for row, (computed, length) in enumerate(zip(num_computed_tokens, query_lens, strict=True)):
        blocks = blocks_of_rows[row]
        block_table[row, : widths[row]] = blocks.int()
        past = torch.arange(max(computed, 0), device=device)
        histories.append([random(len(past), num_kv_heads, head_size).to(key_cache.dtype) for _ in range(2)])
        for cache, history in zip((key_cache, value_cache), histories[row], strict=True):
            as_bits(cache)[blocks[past // block_size], past % block_size] = as_bits(history)
        positions = torch.arange(computed, computed + length, device=device)
        if computed >= 0:
            slots.append(blocks[positions // block_size] * block_size + positions % block_size)
        else:
            slots.append(torch.full_like(positions, -1))
    num_heads = [num_query_heads, num_kv_heads, num_kv_heads]
    query, new_key, new_value = random(sum(query_lens), sum(num_heads), head_size).split(num_heads, 1)
    return PagedInputs(
        query=query,
        new_key=new_key,
        new_value=new_value,
        key_cache=key_cache,
        value_cache=value_cache,
        storage=storage,
        block_table=block_table,
        query_start_loc=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
        num_computed_tokens=torch.tensor(num_computed_tokens, dtype=torch.int32, device=device),
        history_keys=[keys for keys, _ in histories],
        history_values=[values for _, values in histories],
        slot_mapping=torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64, device=device),
        key_scale=None if key_scale is None else torch.tensor(key_scale, device=device),
        value_scale=None if value_scale is None else torch.tensor([value_scale], device=device),
    )


def _make_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    layout: str,
    device: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = {
        "contiguous": (2, num_blocks, block_size, num_kv_heads, head_size),
        "vllm": (num_blocks, num_kv_heads, block_size, 2 * head_size),
        # Blocks outermost, layers inside: neighbouring blocks of one layer lie far apart.
        "layer_of_stack": (num_blocks, 3, 2, block_size, num_kv_heads, head_size),
        "heads_first": (2, num_blocks, num_kv_heads, block_size, head_size),
    }
    storage = torch.full(shapes[layout], float("nan"), device=device).to(dtype)
    if layout == "vllm":
        views = storage.transpose(1, 2)
        return storage, views[..., :head_size], views[..., head_size:]
    if layout == "layer_of_stack":
        return storage, storage[:, 1, 0], storage[:, 1, 1]
    key_cache, value_cache = storage.transpose(2, 3) if layout == "heads_first" else storage
    return storage, key_cache, value_cache


def moved_far_apart(inputs: PagedInputs) -> PagedInputs:
    """Return the inputs with caches whose addresses need 64 bits, the last block past 2^31 elements by itself."""
    num_blocks, _, num_kv_heads, head_size = inputs.key_cache.shape
    stride = (2**31 + 2**20) // num_blocks // 16 * 16
    storage = torch.empty(
        2 * stride * num_blocks, dtype=inputs.key_cache.dtype, device=inputs.key_cache.device
    )
    strides = (2 * stride, 2 * num_kv_heads * head_size, head_size, 1)
    caches = []
    for cache, offset in ((inputs.key_cache, 0), (inputs.value_cache, num_kv_heads * head_size)):
        caches.append(storage.as_strided(cache.shape, strides, offset))
        as_bits(caches[-1]).copy_(as_bits(cache))
    return replace(inputs, key_cache=caches[0], value_cache=caches[1])


def expected_storage(inputs: PagedInputs) -> torch.Tensor:
    """Return what ``storage`` must hold, bit for bit, once the new tokens have been stored."""
    clone, real = inputs.storage.clone(), inputs.real_tokens
    slots, block_size = inputs.slot_mapping[real], inputs.key_cache.shape[1]
    for cache, new, scale in (
        (inputs.key_cache, inputs.new_key, inputs.key_scale),
        (inputs.value_cache, inputs.new_value, inputs.value_scale),
    ):
        view = clone.as_strided(cache.shape, cache.stride(), cache.storage_offset())
        stored = to_cache(new[: len(real)][real], cache.dtype, scale)
        as_bits(view)[slots // block_size, slots % block_size] = as_bits(stored)
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


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers: not every operation takes 8-bit floats."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(integer)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit; NaN equals the same NaN."""
    return left.dtype == right.dtype and torch.equal(as_bits(left), as_bits(right))


def naive_attention(
    inputs: PagedInputs,
    rows: Sequence[int] | None = None,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    newest_first: bool = False,
) -> torch.Tensor:
    """Return attention of every token [T, HQ, D] by the definition, row after row, in ``dtype``.

    Tokens of padding rows are zero, and of rows that are not among ``rows``.

    Args:
        newest_first: sum over the keys from the last one to the first.
    """
    device = inputs.query.device
    out = torch.zeros(inputs.query.shape, dtype=dtype, device=device)
    num_groups = inputs.query.shape[1] // inputs.new_key.shape[1]
    for row, computed in enumerate(inputs.num_computed_tokens.tolist()):
        tokens = inputs.row_tokens(row)
        if computed < 0 or tokens.start == tokens.stop or (rows is not None and row not in rows):
            continue
        keys, values = inputs.row_keys(row, dtype), inputs.row_values(row, dtype)
        positions = torch.arange(len(keys), device=device)
        distance = positions - positions[computed:].unsqueeze(1)
        if newest_first:
            keys, values, distance = keys.flip(0), values.flip(0), distance.flip(1)
        visible = distance <= 0
        if sliding_window is not None:
            visible &= distance > -sliding_window
        keys, values = (each.repeat_interleave(num_groups, 1) for each in (keys, values))
        # All heads by one product, as in torch's own attention: its rounding is what kernels are compared with.
        scores = torch.einsum("qhd,shd->hqs", inputs.query[tokens].to(dtype), keys)
        scores *= inputs.scale if scale is None else scale
        if logits_soft_cap is not None:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(dtype)[:, None, None] * distance
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            of_sinks = sinks.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, of_sinks), dim=-1)
        weights = scores.softmax(-1)[..., : len(keys)]
        out[tokens] = torch.einsum("hqs,shd->qhd", weights, values)
    return out


def check_attention(
    inputs: PagedInputs,
    out: torch.Tensor,
    rows: Sequence[int] | None = None,
    *,
    by_row: bool = False,
    **options: Any,
) -> None:
    """Compare some rows, None: all, with attention by the definition; padding must be as it was, which is NaN.

    Args:
        by_row: a long row's small numbers must not hide behind a short row's large errors.
    """
    exact = naive_attention(inputs, rows, **options)
    orders = (False, True) if by_row else (False,)
    same_dtype = [
        naive_attention(inputs, rows, dtype=out.dtype, newest_first=order, **options) for order in orders
    ]
    computed = inputs.num_computed_tokens.tolist()
    real = torch.zeros(len(out), dtype=torch.bool)
    for row in range(len(computed)) if rows is None else rows:
        tokens = inputs.row_tokens(row)
        real[tokens] = computed[row] >= 0
        if computed[row] < 0:
            assert out[tokens].isnan().all()
        elif by_row:
            # One token of one request has few numbers, and a lucky sum of torch's would make the budget too small.
            assert_within_budget(out[tokens], exact[tokens], *(each[tokens] for each in same_dtype))
    assert out[len(inputs.query) :].isnan().all()
    real = real.to(out.device).nonzero()[:, 0]
    assert_within_budget(out[real], exact[real], same_dtype[0][real])
