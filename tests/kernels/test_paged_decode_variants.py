"""Decode attention beyond one 16-bit token: several tokens per row, attention sinks, float8 caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels import AttentionOptions
from rose_backend.kernels.kv.reference import to_cache
from rose_backend.kernels.tensor_checks import CACHE_DTYPE
from tests.support.attention_calls import paged_decode, plan_paged_decode
from tests.support.error_budget import assert_within_budget
from tests.support.paged_inputs import (
    CACHE_LAYOUTS,
    PagedInputs,
    build_paged_inputs,
    expected_storage,
    grouped,
    naive_attention,
    same_bits,
)

SCALE = 0.25
LENGTHS, QUERY_LENS = [0, 7, 30, 8, -1, 9, 23], [4, 3, 0, 1, 2, 2, 4]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SINKS = torch.tensor([2.0, -1.0, 0.0, 5.0])


def run(
    inputs: PagedInputs, *, stored_before: bool = False, num_padding: int = 0, **options: Any
) -> torch.Tensor:
    """Attend with ``num_padding`` tokens of garbage behind the last row's; they must be left alone."""
    query, new_key, new_value = (
        F.pad(tensor, (0, 0, 0, 0, 0, num_padding), value=float("nan"))
        for tensor in (inputs.query, inputs.new_key, inputs.new_value)
    )
    out = torch.full_like(query, float("nan"))
    returned = paged_decode(
        query,
        None if stored_before else new_key,
        None if stored_before else new_value,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_table,
        inputs.num_computed_tokens,
        out=out,
        **grouped(scale=SCALE, key_scale=inputs.key_scale, value_scale=inputs.value_scale, **options),
    )
    assert returned is out
    num_tokens = len(inputs.query)
    assert out[num_tokens:].isnan().all()
    return out[:num_tokens]


def run_tokens(inputs: PagedInputs, **options: Any) -> torch.Tensor:
    return run(inputs, num_padding=3, query_start_loc=inputs.query_start_loc, max_query_len=4, **options)


def check(inputs: PagedInputs, out: torch.Tensor, **options: Any) -> None:
    """Compare with attention by the definition; tokens of padding rows must be as they were."""
    real = inputs.slot_mapping >= 0
    exact = naive_attention(inputs, scale=SCALE, **options)
    same_dtype = naive_attention(inputs, scale=SCALE, dtype=out.dtype, **options)
    assert_within_budget(out[real], exact[real], same_dtype[real])
    assert out[~real].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (10, 2)], ids=str)
def test_several_tokens(dtype: torch.dtype, layout: str, heads: tuple[int, int]) -> None:
    inputs = build_paged_inputs(
        LENGTHS, QUERY_LENS, num_query_heads=heads[0], num_kv_heads=heads[1], dtype=dtype, layout=layout
    )
    stored = expected_storage(inputs)
    check(inputs, run_tokens(inputs))
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 9},
        {"alibi_slopes": torch.tensor([0.5, 0.1, 0.2, 0.3])},
        {"logits_soft_cap": 0.7},
        {"sinks": SINKS},
        {"sliding_window": 3, "alibi_slopes": SINKS / 9, "logits_soft_cap": 2.0, "sinks": SINKS},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("tokens", ["one token", "several"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_options(options: dict[str, Any], tokens: str, dtype: torch.dtype) -> None:
    inputs = build_paged_inputs(LENGTHS, QUERY_LENS if tokens == "several" else None, dtype=dtype)
    stored = expected_storage(inputs)
    out = run(inputs, **options) if tokens == "one token" else run_tokens(inputs, **options)
    check(inputs, out, **options)
    assert same_bits(inputs.storage, stored)


def test_sinks_change_the_result() -> None:
    inputs = build_paged_inputs(LENGTHS)
    plain, sunk = (naive_attention(inputs, scale=SCALE, sinks=sinks) for sinks in (None, SINKS))
    assert not torch.allclose(plain, sunk, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", [(None, None), (0.02, 3.0)], ids=str)
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_float8_caches(dtype: torch.dtype, scales: tuple[float | None, float | None], layout: str) -> None:
    inputs = build_paged_inputs(
        LENGTHS,
        QUERY_LENS,
        dtype=dtype,
        cache_dtype=CACHE_DTYPE,
        key_scale=scales[0],
        value_scale=scales[1],
        layout=layout,
    )
    inputs.new_key[0] *= 1000  # Some is limited.
    stored = expected_storage(inputs)
    out = run_tokens(inputs, sliding_window=15, sinks=SINKS)
    check(inputs, out, sliding_window=15, sinks=SINKS)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("cache_dtype", [None, CACHE_DTYPE], ids=str)
def test_what_was_stored_before_gives_the_same(cache_dtype: torch.dtype | None) -> None:
    new, old = (build_paged_inputs(LENGTHS, QUERY_LENS, cache_dtype=cache_dtype) for _ in range(2))
    old.storage.copy_(stored := expected_storage(old))
    same = run_tokens(old, stored_before=True)
    assert torch.equal(run_tokens(new).nan_to_num(9.0), same.nan_to_num(9.0))
    assert same_bits(old.storage, stored)


def test_many_chunks_give_the_same_as_one() -> None:
    one, many = (build_paged_inputs(LENGTHS, QUERY_LENS) for _ in range(2))
    expected = run_tokens(one, sliding_window=11)
    plan = plan_paged_decode(
        many.block_table,
        many.num_computed_tokens,
        many.key_cache,
        query_start_loc=many.query_start_loc,
        options=AttentionOptions(SCALE, 11),
        max_query_len=4,
        chunk_bytes=4096,
    )
    assert plan is not None and len(plan.chunks) > 2
    actual = run_tokens(many, sliding_window=11, plan=plan)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5, equal_nan=True)
    assert same_bits(many.storage, one.storage)


def test_rows_of_equal_length() -> None:
    # Nothing that is gathered is hidden from all queries of a row, but some is from each.
    inputs = build_paged_inputs([5, 5], [3, 3])
    check(inputs, run_tokens(inputs))


def test_rows_of_at_most_one_token() -> None:
    inputs = build_paged_inputs([5, 9, 3, -1], [1, 0, 1, 1])
    stored = expected_storage(inputs)
    check(inputs, run(inputs, num_padding=2, query_start_loc=inputs.query_start_loc))
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("query_lens", [[0, 0], [3, 1]], ids=str)
def test_nothing_to_do(query_lens: list[int]) -> None:
    inputs = build_paged_inputs([5, 9] if query_lens == [0, 0] else [-1, -7], query_lens)
    before = inputs.storage.clone()
    assert run_tokens(inputs).isnan().all()
    assert same_bits(inputs.storage, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_query_len": 2}, r"max_query_len: expected 1 without query_start_loc, got 2"),
        ({"starts": [0, 1, 2], "max_query_len": 9}, r"max_query_len: expected 1 to 8, got 9"),
        ({"starts": [0, 1, 2], "max_query_len": 0}, r"max_query_len: expected 1 to 8, got 0"),
        ({"starts": [0, 2], "max_query_len": 2}, r"query_start_loc: expected R\+1=3, got 2"),
        ({"starts": [0, 0, 2]}, r"query_start_loc: expected 0 to max_query_len=1 tokens per row, got 0 to 2"),
        (
            {"starts": [0, 2, 1]},
            r"query_start_loc: expected 0 to max_query_len=1 tokens per row, got -1 to 2",
        ),
        ({"sinks": torch.zeros(3)}, r"sinks: expected HQ=4, got 3"),
        ({"alibi_slopes": torch.zeros(5)}, r"alibi_slopes: expected HQ=4, got 5"),
        (
            {"key_scale": torch.ones(1)},
            r"key_scale: expected None with caches of torch.float32, got a tensor",
        ),
    ],
    ids=str,
)
def test_mismatches_are_named(options: dict[str, Any], message: str) -> None:
    inputs = build_paged_inputs([3, 8])
    inputs.key_scale = options.pop("key_scale", None)
    if starts := options.pop("starts", None):
        options["query_start_loc"] = torch.tensor(starts, dtype=torch.int32)
    before = inputs.storage.clone()
    with pytest.raises(ShapeError, match=message):
        run(inputs, **options)
    assert same_bits(inputs.storage, before)


def test_float8_is_for_both_caches() -> None:
    inputs = build_paged_inputs([3, 8], dtype=torch.float16)
    inputs.key_cache = to_cache(inputs.key_cache, CACHE_DTYPE, None)
    with pytest.raises(ShapeError, match=r"value_cache: expected dtype torch.float8_e4m3fn as key_cache"):
        run(inputs)
