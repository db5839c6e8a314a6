"""Attention and the store of K/V on a CUDA device: every shape, long contexts, far addresses, graphs, repetition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import paged_decode, paged_prefill, plan_paged_decode, plan_paged_prefill, write_kv
from tests.support.error_budget import assert_within_budget
from tests.support.paged_inputs import GARBAGE_BLOCK_ID, same_bits

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# (query heads, KV heads, head size, block size): each head size and each group size with each dtype.
SHAPES = [
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
OPTIONS = [
    {"sliding_window": 1},
    {"sliding_window": 100},
    {"logits_soft_cap": 0.7},
    {"alibi": True},
    {"sliding_window": 333, "alibi": True, "logits_soft_cap": 2.0},
]


@dataclass
class Case:
    """A step on the GPU: rows of cached tokens, all blocks but theirs full of NaN."""

    query: torch.Tensor
    new_key: torch.Tensor
    new_value: torch.Tensor
    storage: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    lengths: list[int]
    query_lens: list[int]

    @property
    def num_computed_tokens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device="cuda")

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    def decode(self, **options: Any) -> torch.Tensor:
        out = torch.full_like(self.query, float("nan"))
        return paged_decode(
            self.query,
            self.new_key,
            self.new_value,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.num_computed_tokens,
            scale=self.scale,
            out=out,
            **options,
        )

    def prefill(self, *, stored_before: bool = False, **options: Any) -> torch.Tensor:
        out = torch.full_like(self.query, float("nan"))
        return paged_prefill(
            self.query,
            None if stored_before else self.new_key,
            None if stored_before else self.new_value,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.query_start_loc,
            self.num_computed_tokens,
            scale=self.scale,
            out=out,
            **options,
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
        flags = [length >= 0 for length in self.lengths]
        return torch.tensor(flags, device="cuda").repeat_interleave(
            torch.tensor(self.query_lens, device="cuda")
        )

    def expected_storage(self) -> torch.Tensor:
        expected = self.storage.clone()
        ids, offsets = self.slots()
        real = self.real_tokens()
        for cache, new in ((self.key_cache, self.new_key), (self.value_cache, self.new_value)):
            view = expected.as_strided(cache.shape, cache.stride(), cache.storage_offset())
            view[ids, offsets] = new[real]
        return expected

    def check(self, out: torch.Tensor, rows: list[int] | None = None, **options: Any) -> None:
        """Compare ``rows`` with attention by the definition in float64, and padding rows with what they were."""
        for row in range(len(self.lengths)) if rows is None else rows:
            start = int(self.query_start_loc[row])
            tokens = slice(start, start + self.query_lens[row])
            if self.lengths[row] < 0:
                assert out[tokens].isnan().all()
                continue
            exact = attend_by_definition(self, row, tokens, torch.float64, **options)
            same_dtype = attend_by_definition(self, row, tokens, self.query.dtype, **options)
            assert_within_budget(out[tokens], exact, same_dtype)


def attend_by_definition(
    case: Case,
    row: int,
    tokens: slice,
    dtype: torch.dtype,
    *,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """Return attention of one row's new tokens [Q, HQ, D]."""
    length, block_size = case.lengths[row], case.key_cache.shape[1]
    past = torch.arange(length, device="cuda")
    blocks = case.block_table[row].long()[past // block_size]
    group = case.query.shape[1] // case.key_cache.shape[2]
    key, value = (
        torch.cat((cache[blocks, past % block_size], new[tokens])).to(dtype).repeat_interleave(group, 1)
        for cache, new in ((case.key_cache, case.new_key), (case.value_cache, case.new_value))
    )
    scores = torch.einsum("qhd,shd->hqs", case.query[tokens].to(dtype), key) * case.scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    distance = torch.arange(len(key), device="cuda") - torch.arange(length, len(key), device="cuda")[:, None]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(dtype)[:, None, None] * distance
    visible = distance <= 0
    if sliding_window is not None:
        visible &= distance > -sliding_window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqs,shd->qhd", weights, value)


def make_case(
    lengths: list[int],
    query_lens: list[int] | None = None,
    *,
    shape: tuple[int, int, int, int] = (4, 2, 64, 16),
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Case:
    """Build a step; K and V lie in one allocation as in vLLM, and blocks are shuffled."""
    num_query_heads, num_kv_heads, head_size, block_size = shape
    query_lens = [1] * len(lengths) if query_lens is None else query_lens
    widths = [
        -(-(length + count) // block_size) if length >= 0 else 0
        for length, count in zip(lengths, query_lens, strict=True)
    ]
    torch.manual_seed(seed)
    num_blocks = sum(widths) + 2
    storage = torch.full(
        (num_blocks, num_kv_heads, block_size, 2 * head_size), float("nan"), dtype=dtype, device="cuda"
    )
    by_token = storage.transpose(1, 2)
    key_cache, value_cache = by_token[..., :head_size], by_token[..., head_size:]
    table = torch.full((len(lengths), max(widths) + 2), GARBAGE_BLOCK_ID, dtype=torch.int32, device="cuda")
    order = torch.randperm(num_blocks, device="cuda")
    first = 0
    for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        blocks = order[first : first + width]
        first += width
        table[row, :width] = blocks.int()
        if length > 0:
            past = torch.arange(length, device="cuda")
            for cache in (key_cache, value_cache):
                cache[blocks[past // block_size], past % block_size] = torch.randn(
                    length, num_kv_heads, head_size, device="cuda"
                ).to(dtype)
    projected = torch.randn(sum(query_lens), num_query_heads + 2 * num_kv_heads, head_size, device="cuda").to(
        dtype
    )
    query, new_key, new_value = projected.split([num_query_heads, num_kv_heads, num_kv_heads], dim=1)
    starts = torch.tensor([0, *query_lens], device="cuda").cumsum(0).int()
    return Case(
        query, new_key, new_value, storage, key_cache, value_cache, table, starts, lengths, query_lens
    )


def resolve(options: dict[str, Any], num_query_heads: int) -> dict[str, Any]:
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.linspace(0.5, 0.01, num_query_heads, device="cuda")
    return options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_of_every_shape(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    case = make_case([0, 1, 15, 16, -1, 700, 33, 5000], shape=shape, dtype=dtype)
    stored = case.expected_storage()
    out = case.decode()
    case.check(out)
    assert same_bits(case.storage, stored)


@pytest.mark.parametrize("options", OPTIONS, ids="+".join)
@pytest.mark.parametrize("heads", [(3, 3), (8, 2)], ids=str)
def test_decode_options(options: dict[str, Any], heads: tuple[int, int]) -> None:
    case = make_case([0, 99, 100, 101, -1, 3000], shape=(*heads, 64, 16))
    options = resolve(options, heads[0])
    stored = case.expected_storage()
    case.check(case.decode(**options), **options)
    assert same_bits(case.storage, stored)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 64, 255, 1024])
def test_decode_of_many_rows(num_rows: int) -> None:
    lengths = torch.randint(-1, 600, (num_rows,)).tolist()
    lengths[0] = 4000
    case = make_case(lengths)
    stored = case.expected_storage()
    out = case.decode()
    case.check(out, rows=sorted({0, num_rows // 2, num_rows - 1}))
    assert out.isnan().any(-1).any(-1).tolist() == [length < 0 for length in lengths]
    assert same_bits(case.storage, stored)


@pytest.mark.parametrize("shape", [(2, 2, 64, 16), (8, 2, 128, 16)], ids=str)
def test_long_contexts(shape: tuple[int, int, int, int]) -> None:
    for lengths in ([131_071], [131_071, 17, 65_000]):
        case = make_case(lengths, shape=shape)
        case.check(case.decode())
    chunk = make_case([130_000], [1000], shape=shape)
    chunk.check(chunk.prefill())


def test_addresses_past_two_to_the_31_elements() -> None:
    case = make_case([40, 100, 7], [1, 1, 1], shape=(2, 2, 64, 16))
    chunk = make_case([40, 0], [70, 30], shape=(2, 2, 64, 16))
    for near, is_chunk in ((case, False), (chunk, True)):
        num_blocks, _, num_kv_heads, head_size = near.key_cache.shape
        stride = (2**31 + 2**20) // num_blocks // 16 * 16
        # Far enough that every address needs 64 bits, and the last block lies past 2^31 elements by itself.
        storage = torch.empty(2 * stride * num_blocks, dtype=torch.float16, device="cuda")
        strides = (2 * stride, 2 * num_kv_heads * head_size, head_size, 1)
        caches = [
            storage.as_strided(near.key_cache.shape, strides, offset)
            for offset in (0, num_kv_heads * head_size)
        ]
        caches[0].copy_(near.key_cache)
        caches[1].copy_(near.value_cache)
        far = replace(near, key_cache=caches[0], value_cache=caches[1])
        if is_chunk:
            assert torch.equal(far.prefill(), near.prefill())
        else:
            assert torch.equal(far.decode(), near.decode())
        assert same_bits(far.key_cache.contiguous(), near.key_cache.contiguous())
        assert same_bits(far.value_cache.contiguous(), near.value_cache.contiguous())


def test_one_captured_graph_serves_any_lengths() -> None:
    cases = [
        make_case(lengths, seed=seed)
        for seed, lengths in enumerate([[5000, 3, 900], [0, 4999, -1], [17, 17, 2500]])
    ]
    first = cases[0]
    static = replace(
        first,
        block_table=torch.zeros(3, 400, dtype=torch.int32, device="cuda"),
        storage=torch.empty(800, *first.storage.shape[1:], dtype=first.query.dtype, device="cuda"),
    )
    by_token = static.storage.transpose(1, 2)
    static.key_cache, static.value_cache = by_token[..., :64], by_token[..., 64:]
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")
    out = torch.empty_like(first.query)

    def launch() -> None:
        paged_decode(
            static.query,
            static.new_key,
            static.new_value,
            static.key_cache,
            static.value_cache,
            static.block_table,
            lengths,
            scale=static.scale,
            out=out,
        )

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for case in (*cases, *reversed(cases)):
        expected = case.decode()
        static.query.copy_(case.query)
        static.new_key.copy_(case.new_key)
        static.new_value.copy_(case.new_value)
        static.storage[: len(case.storage)].copy_(case.storage)
        static.block_table[:, : case.block_table.shape[1]].copy_(case.block_table)
        lengths.copy_(case.num_computed_tokens)
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out, expected)


@pytest.mark.parametrize("heads", [(12, 12, 64), (32, 8, 128)], ids=str)
def test_a_thousand_runs_give_the_same_bits(heads: tuple[int, int, int]) -> None:
    case = make_case([8000, 1, 350, 2047], shape=(*heads, 16))
    first = case.decode()
    lengths, out = case.num_computed_tokens, torch.empty_like(first)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        paged_decode(
            case.query,
            case.new_key,
            case.new_value,
            case.key_cache,
            case.value_cache,
            case.block_table,
            lengths,
            scale=case.scale,
            out=out,
        )
        differences += (out.view(torch.int16) != first.view(torch.int16)).sum()
    assert int(differences) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_of_every_shape(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    case = make_case([0, 5, -1, 333, 64, 0], [200, 1, 40, 129, 128, 65], shape=shape, dtype=dtype)
    stored = case.expected_storage()
    case.check(case.prefill())
    assert same_bits(case.storage, stored)


@pytest.mark.parametrize("options", OPTIONS, ids="+".join)
def test_prefill_options(options: dict[str, Any]) -> None:
    options = resolve(options, 4)
    case = make_case([0, 500, 90], [300, 70, 11], shape=(4, 2, 64, 16))
    stored = case.expected_storage()
    out = case.prefill(**options)
    case.check(out, **options)
    assert same_bits(case.storage, stored)
    again = case.prefill(stored_before=True, **options)
    case.check(again, **options)
    assert same_bits(case.storage, stored)


def test_prefill_of_few_tokens_per_row() -> None:
    case = make_case([1000, 16, 0, 40] * 16, [1, 3, 8, 5] * 16, dtype=torch.bfloat16)
    stored = case.expected_storage()
    case.check(case.prefill(), rows=[0, 1, 2, 3, 63])
    assert same_bits(case.storage, stored)


def test_write_kv() -> None:
    case = make_case([5, -1, 31, 1000], [40, 3, 1, 200], shape=(2, 2, 80, 16))
    stored = case.expected_storage()
    ids, offsets = case.slots()
    slots = torch.full((244,), -1, device="cuda")
    slots[case.real_tokens()] = ids * 16 + offsets
    write_kv(case.new_key, case.new_value, case.key_cache, case.value_cache, slots)
    assert same_bits(case.storage, stored)


def test_no_plan_is_made() -> None:
    case = make_case([40])
    assert plan_paged_decode(case.block_table, case.num_computed_tokens, case.key_cache) is None
    plan = plan_paged_prefill(
        case.block_table, case.query_start_loc, case.num_computed_tokens, case.key_cache, num_step_tokens=1
    )
    assert plan is None


def test_what_the_kernels_cannot_do_is_named() -> None:
    with pytest.raises(ShapeError, match=r"query: expected D of at most 256 on a GPU, got 272"):
        make_case([3], shape=(1, 1, 272, 16)).decode()
    with pytest.raises(ShapeError, match=r"query: expected one of .* on a GPU, got torch.float64"):
        make_case([3], dtype=torch.float64).prefill()
    case = make_case([3])
    case.key_cache = case.key_cache.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(ShapeError, match=r"key_cache: expected an innermost stride of 1"):
        case.decode()
