"""Steps of attention on a CUDA device, NaN wherever nothing may be read, and attention by the definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_backend.kernels import AttentionOptions
from rose_backend.kernels.kv.reference import to_cache
from rose_backend.kernels.tensor_checks import CACHE_DTYPE
from tests.support.attention_calls import paged_decode, paged_prefill
from tests.support.error_budget import assert_within_budget
from tests.support.paged_inputs import GARBAGE_BLOCK_ID, grouped

Shape = tuple[int, int, int, int]
"""Query heads, KV heads, head size, block size."""

FLOAT8 = {"cache_dtype": CACHE_DTYPE, "key_scale": 0.7, "value_scale": 1.3}
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
"""Each head size and each group size; meant for each dtype."""
OPTIONS: list[dict[str, Any]] = [
    {"sliding_window": 1},
    {"sliding_window": 100},
    {"logits_soft_cap": 0.7},
    {"alibi": True},
    {"sinks": True},
    {"sliding_window": 333, "alibi": True, "logits_soft_cap": 2.0, "sinks": True},
]
LAYOUTS = ("interleaved", "tokens first", "heads first")


@dataclass
class GpuStep:
    """A step on the GPU: rows of cached tokens, all blocks but theirs full of NaN."""

    query: torch.Tensor
    """[T, HQ, D]"""
    new_key: torch.Tensor
    """[T, HKV, D]"""
    new_value: torch.Tensor
    storage: torch.Tensor
    """The whole allocation, for comparisons of everything that must not change."""
    key_cache: torch.Tensor
    """[NB, BS, HKV, D] view of ``storage``."""
    value_cache: torch.Tensor
    block_table: torch.Tensor
    """[R, MB] int32"""
    query_start_loc: torch.Tensor
    """[R + 1] int32"""
    lengths: list[int]
    """Computed tokens per row; negative for padding."""
    query_lens: list[int]
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None

    @property
    def num_computed_tokens(self) -> torch.Tensor:
        """[R] int32"""
        return torch.tensor(self.lengths, dtype=torch.int32, device="cuda")

    @property
    def scale(self) -> float:
        """Factor on query-key products."""
        return self.query.shape[-1] ** -0.5

    def options(self) -> AttentionOptions:
        """Return scale and float8 scales of this step."""
        return AttentionOptions(self.scale, key_scale=self.key_scale, value_scale=self.value_scale)

    def decode(
        self, *, max_query_len: int | None = None, stored_before: bool = False, **options: Any
    ) -> torch.Tensor:
        """Return decode attention, NaN where nothing was written.

        Args:
            max_query_len: None takes one token per row, without ``query_start_loc``.
        """
        if max_query_len is not None:
            options |= {"query_start_loc": self.query_start_loc, "max_query_len": max_query_len}
        return paged_decode(
            self.query,
            None if stored_before else self.new_key,
            None if stored_before else self.new_value,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.num_computed_tokens,
            out=torch.full_like(self.query, float("nan")),
            **grouped(scale=self.scale, key_scale=self.key_scale, value_scale=self.value_scale, **options),
        )

    def prefill(self, *, stored_before: bool = False, **options: Any) -> torch.Tensor:
        """Return prefill attention, NaN where nothing was written."""
        return paged_prefill(
            self.query,
            None if stored_before else self.new_key,
            None if stored_before else self.new_value,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.query_start_loc,
            self.num_computed_tokens,
            out=torch.full_like(self.query, float("nan")),
            **grouped(scale=self.scale, key_scale=self.key_scale, value_scale=self.value_scale, **options),
        )

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return block ids and offsets of all new tokens of rows that are not padding."""
        block_size = self.key_cache.shape[1]
        ids, offsets = [], []
        for row, (length, count) in enumerate(zip(self.lengths, self.query_lens, strict=True)):
            if length >= 0:
                positions = torch.arange(length, length + count, device="cuda")
                ids.append(self.block_table[row].long()[positions // block_size])
                offsets.append(positions % block_size)
        return torch.cat(ids), torch.cat(offsets)

    def real_tokens(self) -> torch.Tensor:
        """Return which tokens are of rows that are not padding, [T] bool."""
        flags = [length >= 0 for length in self.lengths]
        return torch.tensor(flags, device="cuda").repeat_interleave(
            torch.tensor(self.query_lens, device="cuda")
        )

    def expected_storage(self) -> torch.Tensor:
        """Return what ``storage`` must hold, bit for bit, once the new tokens have been stored."""
        expected = self.storage.clone()
        ids, offsets = self.slots()
        real = self.real_tokens()
        for cache, new, scale in (
            (self.key_cache, self.new_key, self.key_scale),
            (self.value_cache, self.new_value, self.value_scale),
        ):
            view = expected.as_strided(cache.shape, cache.stride(), cache.storage_offset())
            as_bits(view)[ids, offsets] = as_bits(to_cache(new[real], cache.dtype, scale))
        return expected

    def check(self, out: torch.Tensor, rows: list[int] | None = None, **options: Any) -> None:
        """Compare ``rows`` with attention by the definition in float64, and padding rows with what they were."""
        for row in range(len(self.lengths)) if rows is None else rows:
            start = int(self.query_start_loc[row])
            tokens = slice(start, start + self.query_lens[row])
            if self.lengths[row] < 0:
                assert out[tokens].isnan().all()
            elif self.query_lens[row]:
                exact = attend_by_definition(self, row, tokens, torch.float64, **options)
                same_dtype = attend_by_definition(self, row, tokens, self.query.dtype, **options)
                assert_within_budget(out[tokens], exact, same_dtype)


def attend_by_definition(
    step: GpuStep,
    row: int,
    tokens: slice,
    dtype: torch.dtype,
    *,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of one row's new tokens [Q, HQ, D]."""
    length, block_size = step.lengths[row], step.key_cache.shape[1]
    past = torch.arange(length, device="cuda")
    blocks = step.block_table[row].long()[past // block_size]
    group = step.query.shape[1] // step.key_cache.shape[2]

    def seen(cache: torch.Tensor, new: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        stored = as_bits(to_cache(new[tokens], cache.dtype, scale))
        cached = torch.cat((as_bits(cache)[blocks, past % block_size], stored)).view(cache.dtype)
        values = cached.to(dtype) if scale is None else (cached.double() * scale).to(dtype)
        return values.repeat_interleave(group, 1)

    key = seen(step.key_cache, step.new_key, step.key_scale)
    value = seen(step.value_cache, step.new_value, step.value_scale)
    scores = torch.einsum("qhd,shd->hqs", step.query[tokens].to(dtype), key) * step.scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    distance = torch.arange(len(key), device="cuda") - torch.arange(length, len(key), device="cuda")[:, None]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(dtype)[:, None, None] * distance
    visible = distance <= 0
    if sliding_window is not None:
        visible &= distance > -sliding_window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(dtype)[:, None, None].expand(-1, len(distance), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqs,shd->qhd", weights, value)


def make_step(
    lengths: list[int],
    query_lens: list[int] | None = None,
    *,
    shape: Shape = (4, 2, 64, 16),
    dtype: torch.dtype = torch.float16,
    cache_dtype: torch.dtype | None = None,
    key_scale: float | None = None,
    value_scale: float | None = None,
    layout: str = "interleaved",
    seed: int = 0,
) -> GpuStep:
    """Build a step with shuffled blocks; query, keys and values are views of one projection's output.

    Args:
        query_lens: new tokens per row; None is one each.
        cache_dtype: None is ``dtype``.
        layout: of ``LAYOUTS``; "interleaved" is how vLLM lays out K and V, in one allocation.
    """
    num_query_heads, num_kv_heads, head_size, block_size = shape
    query_lens = [1] * len(lengths) if query_lens is None else query_lens
    widths = [
        -(-(length + count) // block_size) if length >= 0 else 0
        for length, count in zip(lengths, query_lens, strict=True)
    ]
    torch.manual_seed(seed)
    num_blocks = sum(widths) + 2
    storage, key_cache, value_cache = _make_caches(num_blocks, shape, cache_dtype or dtype, layout)
    table = torch.full(
        (len(lengths), max(widths, default=0) + 2), GARBAGE_BLOCK_ID, dtype=torch.int32, device="cuda"
    )
    order = torch.randperm(num_blocks, device="cuda")
    first = 0
    for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        blocks = order[first : first + width]
        first += width
        table[row, :width] = blocks.int()
        if length > 0:
            past = torch.arange(length, device="cuda")
            for cache in (key_cache, value_cache):
                content = torch.randn(length, num_kv_heads, head_size, device="cuda").to(cache.dtype)
                as_bits(cache)[blocks[past // block_size], past % block_size] = as_bits(content)
    num_heads = [num_query_heads, num_kv_heads, num_kv_heads]
    projected = torch.randn(sum(query_lens), sum(num_heads), head_size, device="cuda").to(dtype)
    query, new_key, new_value = projected.split(num_heads, dim=1)
    return GpuStep(
        query=query,
        new_key=new_key,
        new_value=new_value,
        storage=storage,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=table,
        query_start_loc=torch.tensor([0, *query_lens], device="cuda").cumsum(0).int(),
        lengths=lengths,
        query_lens=query_lens,
        key_scale=None if key_scale is None else torch.tensor(key_scale, device="cuda"),
        value_scale=None if value_scale is None else torch.tensor(value_scale, device="cuda"),
    )


def _make_caches(
    num_blocks: int, shape: Shape, dtype: torch.dtype, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, num_kv_heads, head_size, block_size = shape
    sizes = {
        "interleaved": (num_blocks, num_kv_heads, block_size, 2 * head_size),
        "tokens first": (2, num_blocks, block_size, num_kv_heads, head_size),
        "heads first": (2, num_blocks, num_kv_heads, block_size, head_size),
    }[layout]
    storage = torch.full(sizes, float("nan"), device="cuda").to(dtype)
    if layout == "interleaved":
        by_token = storage.transpose(1, 2)
        return storage, by_token[..., :head_size], by_token[..., head_size:]
    if layout == "heads first":
        return storage, storage[0].transpose(1, 2), storage[1].transpose(1, 2)
    return storage, storage[0], storage[1]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers: not every operation takes 8-bit floats."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(integer)


def resolve_options(options: dict[str, Any], num_query_heads: int) -> dict[str, Any]:
    """Replace ``alibi=True`` and ``sinks=True`` by tensors for this many heads."""
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.linspace(0.5, 0.01, num_query_heads, device="cuda")
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1.0, 6.0, num_query_heads, device="cuda")
    return options
