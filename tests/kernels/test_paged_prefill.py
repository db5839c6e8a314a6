"""Prefill attention: right values for any chunking, exactly the chunk's slots written, nothing forbidden read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import AttentionOptions, write_kv
from rose_backend.kernels.attention import reference as twin
from rose_backend.kernels.tensor_checks import CACHE_DTYPE
from tests.support.attention_calls import paged_decode, paged_prefill, plan_paged_prefill
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
COMPUTED = [0, 0, 5, 8, 13, 16, 0, 21]
QUERY_LENS = [1, 9, 3, 8, 1, 11, 16, 2]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SINKS = torch.tensor([2.0, -1.0, 0.0, 5.0])


def run(inputs: PagedInputs, *, stored_before: bool = False, **options: Any) -> torch.Tensor:
    out = torch.full_like(inputs.query, float("nan"))
    if stored_before:
        write_kv(
            inputs.new_key,
            inputs.new_value,
            inputs.key_cache,
            inputs.value_cache,
            inputs.slot_mapping,
            key_scale=inputs.key_scale,
            value_scale=inputs.value_scale,
        )
    returned = paged_prefill(
        inputs.query,
        None if stored_before else inputs.new_key,
        None if stored_before else inputs.new_value,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_table,
        inputs.query_start_loc,
        inputs.num_computed_tokens,
        out=out,
        **grouped(scale=SCALE, key_scale=inputs.key_scale, value_scale=inputs.value_scale, **options),
    )
    assert returned is out
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("heads", [(2, 2), (5, 1), (8, 2)], ids=str)
def test_values_and_stores(dtype: torch.dtype, layout: str, heads: tuple[int, int]) -> None:
    inputs = build_paged_inputs(
        COMPUTED, QUERY_LENS, num_query_heads=heads[0], num_kv_heads=heads[1], dtype=dtype, layout=layout
    )
    stored = expected_storage(inputs)
    out = run(inputs)
    assert_within_budget(
        out, naive_attention(inputs, scale=SCALE), naive_attention(inputs, scale=SCALE, dtype=dtype)
    )
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 6},
        {"sliding_window": 17},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
        {"logits_soft_cap": 0.7},
        {"sinks": SINKS},
        {"sliding_window": 12, "alibi_slopes": SINKS / 9, "logits_soft_cap": 2.0, "sinks": SINKS},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = build_paged_inputs(COMPUTED, QUERY_LENS, dtype=dtype, layout="vllm")
    stored = expected_storage(inputs)
    out = run(inputs, **options)
    exact = naive_attention(inputs, scale=SCALE, **options)
    assert_within_budget(out, exact, naive_attention(inputs, scale=SCALE, dtype=dtype, **options))
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", [(None, None), (0.02, 3.0)], ids=str)
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_float8_caches(dtype: torch.dtype, scales: tuple[float | None, float | None], layout: str) -> None:
    inputs = build_paged_inputs(
        COMPUTED,
        QUERY_LENS,
        dtype=dtype,
        cache_dtype=CACHE_DTYPE,
        key_scale=scales[0],
        value_scale=scales[1],
        layout=layout,
    )
    inputs.new_key[0] *= 1000  # Some is limited.
    stored = expected_storage(inputs)
    options: dict[str, Any] = {"sliding_window": 15, "sinks": SINKS}
    out = run(inputs, **options)
    exact = naive_attention(inputs, scale=SCALE, **options)
    assert_within_budget(out, exact, naive_attention(inputs, scale=SCALE, dtype=dtype, **options))
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("cache_dtype", [None, CACHE_DTYPE], ids=str)
def test_separate_store_gives_the_same(
    layout: str, window: int | None, cache_dtype: torch.dtype | None
) -> None:
    scale = None if cache_dtype is None else 0.1
    fused, separate = (
        build_paged_inputs(
            COMPUTED, QUERY_LENS, layout=layout, cache_dtype=cache_dtype, key_scale=scale, value_scale=scale
        )
        for _ in range(2)
    )
    expected = run(fused, sliding_window=window)
    actual = run(separate, stored_before=True, sliding_window=window)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert same_bits(fused.storage, separate.storage)


def test_query_tiles_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tiled = (build_paged_inputs([0, 9, 30], [20, 21, 7]) for _ in range(2))
    expected = run(whole, sliding_window=10)
    monkeypatch.setattr(twin, "MASKED_QUERY_TILE", 4)
    torch.testing.assert_close(run(tiled, sliding_window=10), expected, rtol=0, atol=1e-6)
    assert same_bits(whole.storage, tiled.storage)


def test_single_tokens_equal_decode() -> None:
    lengths = [0, 7, 8, 30]
    prefill, decode = build_paged_inputs(lengths), build_paged_inputs(lengths)
    expected = paged_decode(
        decode.query,
        decode.new_key,
        decode.new_value,
        decode.key_cache,
        decode.value_cache,
        decode.block_table,
        decode.num_computed_tokens,
        options=AttentionOptions(SCALE),
        out=torch.empty_like(decode.query),
    )
    torch.testing.assert_close(run(prefill), expected, rtol=0, atol=1e-6)
    assert same_bits(prefill.storage, decode.storage)


def test_skipped_rows_and_trailing_padding() -> None:
    inputs = build_paged_inputs([4, -1, 3, 0], [5, 4, 0, 6])
    padded = build_paged_inputs([4, -1, 3, 0], [5, 4, 0, 6])
    stored = expected_storage(inputs)
    exact = naive_attention(inputs, scale=SCALE)
    for name in ("query", "new_key", "new_value"):
        tensor = getattr(padded, name)
        setattr(padded, name, torch.cat((tensor, torch.full_like(tensor[:3], float("nan")))))
    out = run(padded)
    assert same_bits(padded.storage, stored)
    for row, real in enumerate([True, False, False, True]):
        tokens = inputs.row_tokens(row)
        if real:
            torch.testing.assert_close(out[tokens].double(), exact[tokens], rtol=0, atol=1e-5)
        else:
            assert out[tokens].isnan().all()
    assert out[15:].isnan().all()


def test_empty_batch() -> None:
    inputs = build_paged_inputs([], [])
    before = inputs.storage.clone()
    assert run(inputs).shape == (0, 4, 16)
    assert same_bits(inputs.storage, before)


def test_one_plan_serves_several_calls() -> None:
    inputs, again = (build_paged_inputs(COMPUTED, QUERY_LENS) for _ in range(2))
    plan = plan_paged_prefill(
        inputs.block_table,
        inputs.query_start_loc,
        inputs.num_computed_tokens,
        inputs.key_cache,
        options=AttentionOptions(SCALE),
        num_step_tokens=inputs.query.shape[0],
    )
    assert same_bits(run(inputs, plan=plan), run(again, plan=plan))
    assert same_bits(inputs.storage, again.storage)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, r"query_start_loc: expected R\+1=3, got 2"),
        ({"new_key": None}, r"new_key: expected a tensor because new_value is given, got None"),
        ({"new_value": torch.zeros(7, 2, 16)}, r"new_value: expected T=9, got 7"),
        ({"key_cache": torch.zeros(6, 8, 2, 12)}, r"key_cache: expected D=16, got 12"),
        (
            {"key_scale": torch.ones(1)},
            r"key_scale: expected None with caches of torch.float32, got a tensor",
        ),
        (
            {"value_cache": torch.zeros(6, 8, 2, 16).to(CACHE_DTYPE)},
            r"value_cache: expected dtype torch.float32 as key_cache, got torch.float8_e4m3fn",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mismatches_are_named(change: dict[str, Any], message: str) -> None:
    inputs = build_paged_inputs([3, 8], [4, 5])
    for name, value in change.items():
        setattr(inputs, name, value)
    with pytest.raises(ShapeError, match=message):
        run(inputs)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_numbers_of_other_heads_are_named(name: str) -> None:
    with pytest.raises(ShapeError, match=f"{name}: expected HQ=4, got 3"):
        run(build_paged_inputs([3, 8], [4, 5]), **{name: SINKS[:3]})
