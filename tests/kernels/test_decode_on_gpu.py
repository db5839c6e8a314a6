"""Decode attention on a CUDA device: every shape, long contexts, far addresses, graphs, repetition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from tests.support.attention_calls import paged_decode, plan_paged_decode
from tests.support.gpu_steps import (
    FLOAT8,
    LAYOUTS,
    OPTIONS,
    SHAPES,
    GpuStep,
    Shape,
    as_bits,
    make_step,
    resolve_options,
)
from tests.support.paged_inputs import same_bits

pytestmark = pytest.mark.gpu

DTYPES = [(torch.float16, {}), (torch.bfloat16, {}), (torch.float32, {}), (torch.bfloat16, FLOAT8)]
LENGTHS, QUERY_LENS = [0, 1, 15, 16, -1, 700, 33, 5000, 40], [4, 3, 2, 1, 2, 4, 0, 3, 4]


def check(step: GpuStep, rows: list[int] | None = None, **options: Any) -> torch.Tensor:
    """Attend and compare output and the whole cache."""
    stored = step.expected_storage()
    out = step.decode(**options)
    options.pop("max_query_len", None)
    step.check(out, rows, **options)
    assert same_bits(step.storage, stored)
    return out


@pytest.mark.parametrize(("dtype", "cache"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape: Shape, dtype: torch.dtype, cache: dict[str, Any]) -> None:
    check(make_step(LENGTHS, shape=shape, dtype=dtype, **cache))


@pytest.mark.parametrize(("dtype", "cache"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_with_several_tokens(shape: Shape, dtype: torch.dtype, cache: dict[str, Any]) -> None:
    check(make_step(LENGTHS, QUERY_LENS, shape=shape, dtype=dtype, **cache), max_query_len=4)


@pytest.mark.parametrize("max_query_len", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(12, 12, 64, 16), (32, 8, 128, 16), (16, 1, 128, 16)], ids=str)
def test_every_number_of_tokens(max_query_len: int, shape: Shape) -> None:
    query_lens = [min(max_query_len, count) for count in (8, 0, 1, 3, 8, 2)]
    step = make_step([2000, 5, 0, 77, 300, -1], query_lens, shape=shape, dtype=torch.bfloat16)
    check(step, max_query_len=max_query_len)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
def test_layouts(layout: str, dtype: torch.dtype, cache: dict[str, Any]) -> None:
    check(make_step([0, 300, 15, 4000], shape=(8, 2, 96, 32), dtype=dtype, layout=layout, **cache))


@pytest.mark.parametrize("options", OPTIONS, ids="+".join)
@pytest.mark.parametrize(("heads", "dtype"), [((8, 2), torch.float16), ((3, 3), torch.float32)], ids=str)
@pytest.mark.parametrize("max_query_len", [None, 4])
def test_options(
    options: dict[str, Any], heads: tuple[int, int], dtype: torch.dtype, max_query_len: int | None
) -> None:
    query_lens = None if max_query_len is None else [4, 1, 3, 4, 2, 4]
    step = make_step([0, 99, 100, 101, -1, 3000], query_lens, shape=(*heads, 64, 16), dtype=dtype)
    check(step, max_query_len=max_query_len, **resolve_options(options, heads[0]))


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 50, "sinks": True}], ids=["plain", "window+sinks"]
)
@pytest.mark.parametrize("max_query_len", [None, 4])
@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
def test_what_was_stored_before(
    options: dict[str, Any], max_query_len: int | None, cache: dict[str, Any]
) -> None:
    options = resolve_options(options, 4)
    step = make_step([0, 99, -1, 3000], None if max_query_len is None else [4, 1, 2, 3], **cache)
    as_bits(step.storage).copy_(as_bits(stored := step.expected_storage()))
    out = step.decode(max_query_len=max_query_len, stored_before=True, **options)
    step.check(out, **options)
    assert same_bits(step.storage, stored)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 64, 255, 1024])
@pytest.mark.parametrize("max_query_len", [None, 3])
def test_many_rows(num_rows: int, max_query_len: int | None) -> None:
    lengths = torch.randint(-1, 600, (num_rows,)).tolist()
    lengths[0] = 4000
    query_lens = None if max_query_len is None else torch.randint(0, 4, (num_rows,)).tolist()
    step = make_step(lengths, query_lens)
    out = check(step, sorted({0, num_rows // 2, num_rows - 1}), max_query_len=max_query_len)
    assert torch.equal(out.isnan().any(-1).any(-1), ~step.real_tokens())


@pytest.mark.parametrize("num_rows", [7, 33, 65, 130, 300])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 90, "alibi": True, "sinks": True}], ids=str)
def test_many_heads_that_share_nothing(num_rows: int, options: dict[str, Any]) -> None:
    """The more rows, the more heads has a program."""
    lengths = torch.randint(-1, 600, (num_rows,)).tolist()
    lengths[:3] = [4000, 0, 319]
    step = make_step(lengths, shape=(12, 12, 64, 16))
    check(step, [0, 1, 2, num_rows // 2, num_rows - 1], **resolve_options(options, 12))


@pytest.mark.parametrize("max_query_len", [None, 2])
def test_empty_batches(max_query_len: int | None) -> None:
    assert make_step([]).decode(max_query_len=max_query_len).shape == (0, 4, 64)
    nothing = make_step([-1, -5, 90] if max_query_len else [-1, -5], [2, 1, 0] if max_query_len else None)
    before = nothing.storage.clone()
    assert nothing.decode(max_query_len=max_query_len).isnan().all()
    assert same_bits(nothing.storage, before)


@pytest.mark.parametrize("shape", [(2, 2, 64, 16), (8, 2, 128, 16)], ids=str)
def test_long_contexts(shape: Shape) -> None:
    for lengths in ([131_071], [131_071, 17, 65_000]):
        check(make_step(lengths, shape=shape))
    check(make_step([131_064, 90_000], [8, 5], shape=shape, **FLOAT8), max_query_len=8)


@pytest.mark.parametrize("max_query_len", [None, 3])
def test_addresses_past_two_to_the_31_elements(max_query_len: int | None) -> None:
    near = make_step([40, 100, 7], None if max_query_len is None else [3, 2, 1], shape=(2, 2, 64, 16))
    num_blocks, _, num_kv_heads, head_size = near.key_cache.shape
    stride = (2**31 + 2**20) // num_blocks // 16 * 16
    # Far enough that every address needs 64 bits, and the last block lies past 2^31 elements by itself.
    storage = torch.empty(2 * stride * num_blocks, dtype=torch.float16, device="cuda")
    strides = (2 * stride, 2 * num_kv_heads * head_size, head_size, 1)
    caches = [
        storage.as_strided(near.key_cache.shape, strides, offset) for offset in (0, num_kv_heads * head_size)
    ]
    caches[0].copy_(near.key_cache)
    caches[1].copy_(near.value_cache)
    far = replace(near, key_cache=caches[0], value_cache=caches[1])
    assert torch.equal(far.decode(max_query_len=max_query_len), near.decode(max_query_len=max_query_len))
    assert same_bits(far.key_cache.contiguous(), near.key_cache.contiguous())
    assert same_bits(far.value_cache.contiguous(), near.value_cache.contiguous())


def run_again(
    step: GpuStep, max_query_len: int | None, *, ordered: bool = False
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a launch of the step into its own output, that output, and the lengths that it reads."""
    lengths, out = step.num_computed_tokens, torch.empty_like(step.query)
    options: dict[str, Any] = {}
    if max_query_len is not None:
        options = {"query_start_loc": step.query_start_loc, "max_query_len": max_query_len}

    def launch() -> None:
        paged_decode(
            step.query,
            step.new_key,
            step.new_value,
            step.key_cache,
            step.value_cache,
            step.block_table,
            lengths,
            options=step.options(),
            out=out,
            plan=plan_of(step, lengths) if ordered else None,
            **options,
        )

    return launch, out, lengths


@pytest.mark.parametrize("max_query_len", [None, 4])
@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
def test_one_captured_graph_serves_any_lengths(max_query_len: int | None, cache: dict[str, Any]) -> None:
    lengths = [[5000, 3, 900], [0, 4999, -1], [17, 17, 2500]]
    query_lens = [[4, 1, 2], [1, 4, 2], [0, 3, 4]] if max_query_len else [[1, 1, 1]] * 3
    steps = [
        make_step(*both, seed=seed, **cache)
        for seed, both in enumerate(zip(lengths, query_lens, strict=True))
    ]
    static = make_step([12_000, 0, 0], [10, 0, 0] if max_query_len else None, **cache)
    static.block_table = torch.zeros(3, 400, dtype=torch.int32, device="cuda")
    launch, out, static_lengths = run_again(static, max_query_len)
    static_lengths.zero_()
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for step in (*steps, *reversed(steps)):
        stored = step.expected_storage()
        as_bits(static.storage)[: len(step.storage)].copy_(as_bits(step.storage))
        expected = step.decode(max_query_len=max_query_len)
        num_tokens = len(step.query)
        for name in ("query", "new_key", "new_value"):
            getattr(static, name)[:num_tokens].copy_(getattr(step, name))
        static.query_start_loc.copy_(step.query_start_loc)
        static.block_table[:, : step.block_table.shape[1]].copy_(step.block_table)
        static_lengths.copy_(step.num_computed_tokens)
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out[:num_tokens], expected)
        assert out[num_tokens:].isnan().all()
        assert same_bits(static.storage[: len(step.storage)], stored)


@pytest.mark.parametrize("heads", [(12, 12, 64), (32, 8, 128)], ids=str)
@pytest.mark.parametrize("max_query_len", [None, 4])
def test_a_thousand_runs_give_the_same_bits(heads: tuple[int, int, int], max_query_len: int | None) -> None:
    query_lens = None if max_query_len is None else [4, 2, 3, 4]
    step = make_step([8000, 1, 350, 2047], query_lens, shape=(*heads, 16))
    first = step.decode(max_query_len=max_query_len)
    launch, out, _ = run_again(step, max_query_len)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        launch()
        differences += (out.view(torch.int16) != first.view(torch.int16)).sum()
    assert int(differences) == 0


def plan_of(step: GpuStep, lengths: torch.Tensor) -> Any:
    return plan_paged_decode(step.block_table, lengths, step.key_cache, options=step.options())


def test_few_rows_have_no_plan() -> None:
    step = make_step([40])
    assert plan_of(step, step.num_computed_tokens) is None


@pytest.mark.parametrize("heads", [(16, 8, 128), (12, 12, 64)], ids=str)
def test_longest_rows_first_in_a_graph_give_the_same_bits(heads: tuple[int, int, int]) -> None:
    step = make_step([(37 * row) % 1500 - 1 for row in range(200)], shape=(*heads, 16))
    order = plan_of(step, step.num_computed_tokens)
    assert torch.equal(order.long(), torch.sort(-step.num_computed_tokens.long(), stable=True).indices)
    step.check(step.decode(plan=order))
    launch, out, lengths = run_again(step, None, ordered=True)
    long, graph = lengths.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    # In another order, and no longer than before: the tables have blocks for so many.
    for lengths_now in (long, (long * 7 % 1500).minimum(long)):
        lengths.copy_(lengths_now)
        run, expected, of_plain = run_again(step, None)
        of_plain.copy_(lengths_now)
        run()
        out.fill_(float("nan"))
        graph.replay()
        rows = lengths_now >= 0
        assert same_bits(out[rows], expected[rows]) and out[~rows].isnan().all()
    assert not torch.equal(plan_of(step, lengths), order)


def test_what_the_kernel_cannot_do_is_named() -> None:
    with pytest.raises(ShapeError, match=r"query: expected D of at most 512 on a GPU, got 520"):
        make_step([3], shape=(1, 1, 520, 16)).decode()
    step = make_step([3])
    step.key_cache = step.key_cache.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(ShapeError, match=r"key_cache: expected an innermost stride of 1"):
        step.decode()
