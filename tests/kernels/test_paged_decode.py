"""Decode attention: right values, exactly one slot written per row, nothing else touched, nothing forbidden read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import AttentionOptions, rotate_query_key, write_kv
from rose_backend.kernels.attention import reference as twin
from tests.support.attention_calls import paged_decode, plan_paged_decode
from tests.support.error_budget import assert_within_budget
from tests.support.paged_inputs import (
    CACHE_LAYOUTS,
    PagedInputs,
    build_paged_inputs,
    expected_storage,
    grouped,
    naive_attention,
    random_rotation,
    same_bits,
)

SCALE = 0.25
LENGTHS = [0, 1, 7, 8, 9, 40, 23]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def run(inputs: PagedInputs, *, stored_before: bool = False, **options: Any) -> torch.Tensor:
    out = torch.full_like(inputs.query, float("nan"))
    if stored_before:
        write_kv(inputs.new_key, inputs.new_value, inputs.key_cache, inputs.value_cache, inputs.slot_mapping)
    returned = paged_decode(
        inputs.query,
        None if stored_before else inputs.new_key,
        None if stored_before else inputs.new_value,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_table,
        inputs.num_computed_tokens,
        out=out,
        **grouped(scale=SCALE, **options),
    )
    assert returned is out
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (10, 2), (8, 1)], ids=str)
def test_values_and_stores(dtype: torch.dtype, layout: str, heads: tuple[int, int]) -> None:
    inputs = build_paged_inputs(
        LENGTHS, num_query_heads=heads[0], num_kv_heads=heads[1], dtype=dtype, layout=layout
    )
    stored = expected_storage(inputs)
    out = run(inputs)
    assert_within_budget(
        out, naive_attention(inputs, scale=SCALE), naive_attention(inputs, scale=SCALE, dtype=dtype)
    )
    assert same_bits(inputs.storage, stored)


def test_overlap_changes_nothing_where_there_is_none() -> None:
    one_by_one, overlapped = build_paged_inputs(LENGTHS), build_paged_inputs(LENGTHS)
    assert same_bits(run(overlapped, overlap=True), run(one_by_one, overlap=False))
    assert same_bits(overlapped.storage, one_by_one.storage)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 9},
        {"sliding_window": 1000},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
        {"logits_soft_cap": 0.7},
        {"sliding_window": 12, "alibi_slopes": torch.tensor([0.5, 0.1, 0.2, 0.3]), "logits_soft_cap": 2.0},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = build_paged_inputs(LENGTHS, dtype=dtype, layout="vllm")
    stored = expected_storage(inputs)
    out = run(inputs, **options)
    exact = naive_attention(inputs, scale=SCALE, **options)
    assert_within_budget(out, exact, naive_attention(inputs, scale=SCALE, dtype=dtype, **options))
    assert same_bits(inputs.storage, stored)


def test_options_change_the_result() -> None:
    inputs = build_paged_inputs(LENGTHS)
    plain = naive_attention(inputs, scale=SCALE)
    for options in ({"sliding_window": 9}, {"alibi_slopes": torch.full((4,), 0.3)}, {"logits_soft_cap": 0.7}):
        assert not torch.allclose(plain, naive_attention(inputs, scale=SCALE, **options), atol=1e-3)


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_separate_store_gives_the_same_bits(layout: str) -> None:
    fused, separate = (build_paged_inputs(LENGTHS, layout=layout) for _ in range(2))
    assert same_bits(run(fused), run(separate, stored_before=True))
    assert same_bits(fused.storage, separate.storage)


def test_without_new_key_nothing_is_written() -> None:
    inputs = build_paged_inputs([5, 16])
    write_kv(inputs.new_key, inputs.new_value, inputs.key_cache, inputs.value_cache, inputs.slot_mapping)
    before = inputs.storage.clone()
    run(inputs, stored_before=True)
    assert same_bits(inputs.storage, before)


def test_new_token_is_not_read_back_from_the_cache() -> None:
    # Two rows that wrongly share their tail block: each must still see its own token.
    inputs = build_paged_inputs([4, 4])
    inputs.block_table[1, 0] = inputs.block_table[0, 0]
    inputs.history_keys[1], inputs.history_values[1] = inputs.history_keys[0], inputs.history_values[0]
    exact = naive_attention(inputs, scale=SCALE)
    torch.testing.assert_close(run(inputs).double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [[-1, 5, -1, 17, -1], [-1, -1], [-3]], ids=str)
def test_padding_rows_are_left_alone(lengths: list[int]) -> None:
    inputs = build_paged_inputs(lengths)
    stored = expected_storage(inputs)
    out = run(inputs)
    exact = naive_attention(inputs, scale=SCALE)
    for row, computed in enumerate(lengths):
        if computed < 0:
            assert out[row].isnan().all()
        else:
            torch.testing.assert_close(out[row].double(), exact[row], rtol=0, atol=1e-5)
    assert same_bits(inputs.storage, stored)


def test_empty_batch() -> None:
    inputs = build_paged_inputs([])
    before = inputs.storage.clone()
    assert run(inputs).shape == (0, 4, 16)
    assert same_bits(inputs.storage, before)


def test_inputs_are_not_changed() -> None:
    inputs = build_paged_inputs([3, 8])
    names = ("query", "new_key", "new_value", "block_table", "num_computed_tokens")
    before = {name: getattr(inputs, name).clone() for name in names}
    run(inputs)
    for name in names:
        assert torch.equal(getattr(inputs, name), before[name]), name


def test_strided_query_and_new_tokens() -> None:
    inputs = build_paged_inputs(LENGTHS, num_query_heads=2)
    exact = naive_attention(inputs, scale=SCALE)
    joined = torch.stack((inputs.query, inputs.new_key, inputs.new_value), dim=1)
    inputs.query, inputs.new_key, inputs.new_value = joined.unbind(1)
    assert not inputs.query.is_contiguous()
    torch.testing.assert_close(run(inputs).double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_rotation_on_the_way_equals_one_in_front(norms: bool) -> None:
    turned, plain = (build_paged_inputs([0, 5, -1, 17]) for _ in range(2))
    rotation = random_rotation(turned.query.shape[-1], norms=norms)
    positions = turned.num_computed_tokens.clamp(min=0).long()
    rotate_query_key(turned.query, turned.new_key, positions, rotation)
    before = plain.query.clone(), plain.new_key.clone()
    out = run(plain, rotation=rotation)
    assert same_bits(out, run(turned)) and same_bits(plain.storage, turned.storage)
    assert torch.equal(plain.query, before[0]) and torch.equal(plain.new_key, before[1])
    assert not torch.equal(turned.query, plain.query)


@pytest.mark.parametrize("window", [None, 11])
def test_many_chunks_give_the_same_as_one(window: int | None) -> None:
    lengths = [31, 0, 8, 15, 16, -1, 3, 31, 100, 7]
    one, many = build_paged_inputs(lengths), build_paged_inputs(lengths)
    expected = run(one, sliding_window=window)
    plan = plan_paged_decode(
        many.block_table,
        many.num_computed_tokens,
        many.key_cache,
        options=AttentionOptions(SCALE, window),
        chunk_bytes=4096,
    )
    assert len(plan.chunks) > 2
    actual = run(many, sliding_window=window, plan=plan)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5, equal_nan=True)
    assert same_bits(many.storage, one.storage)


def test_one_plan_serves_several_layers() -> None:
    first, second = build_paged_inputs(LENGTHS, seed=1), build_paged_inputs(LENGTHS, seed=2)
    second.block_table, slots = first.block_table, first.slot_mapping
    moved = build_paged_inputs(LENGTHS, seed=1)
    for name in ("query", "new_key", "new_value"):
        setattr(moved, name, getattr(second, name))
    plan = plan_paged_decode(
        first.block_table, first.num_computed_tokens, first.key_cache, options=AttentionOptions(SCALE)
    )
    run(first, plan=plan)
    out = run(moved, plan=plan)
    assert torch.equal(slots, moved.slot_mapping)
    torch.testing.assert_close(out.double(), naive_attention(moved, scale=SCALE), rtol=0, atol=1e-5)


def test_rows_are_split_by_length() -> None:
    assert twin._split_rows([1, 4, 2, 4], max_blocks=8) == [([1, 3], 4), ([2, 0], 2)]
    assert twin._split_rows([9], max_blocks=2) == [(None, 9)]
    assert twin._split_rows([3, 9], max_blocks=2) == [([1], 9), ([0], 3)]
    assert twin._split_rows([], max_blocks=2) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new_key": torch.zeros(2, 2, 8)}, r"new_key: expected D=16, got 8"),
        ({"new_value": None}, r"new_value: expected a tensor because new_key is given, got None"),
        ({"query": torch.zeros(2, 3, 16)}, r"out: expected HQ=3, got 4"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, r"block_table: expected R=2, got 3"),
        (
            {"block_table": torch.zeros(2, 4, dtype=torch.int64)},
            r"block_table: expected dtype torch.int32, got torch.int64",
        ),
        (
            {"num_computed_tokens": torch.zeros(2, 1, dtype=torch.int32)},
            r"num_computed_tokens: expected shape \[R\]",
        ),
        (
            {"new_key": torch.zeros(2, 2, 16, dtype=torch.float16)},
            r"new_key: expected dtype torch.float32 as query",
        ),
        ({"value_cache": torch.zeros(5, 4, 2, 16)}, r"value_cache: expected (NB|BS)="),
        ({"plan": torch.tensor([1, 0], dtype=torch.int32)}, r"plan: expected one made for cpu, got Tensor"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mismatches_are_named(change: dict[str, Any], message: str) -> None:
    inputs = build_paged_inputs([3, 8])
    for name in change.keys() - {"plan"}:
        setattr(inputs, name, change[name])
    with pytest.raises(ShapeError, match=message):
        paged_decode(
            inputs.query,
            inputs.new_key,
            inputs.new_value,
            inputs.key_cache,
            inputs.value_cache,
            inputs.block_table,
            inputs.num_computed_tokens,
            options=AttentionOptions(SCALE),
            out=torch.zeros(2, 4, 16),
            plan=change.get("plan"),
        )


def test_rotation_needs_one_new_token_each() -> None:
    inputs, rotation = build_paged_inputs([3, 8]), random_rotation(16, norms=True)
    with pytest.raises(ShapeError, match="rotation: expected new_key without query_start_loc"):
        run(inputs, rotation=rotation, stored_before=True)
    with pytest.raises(ShapeError, match="rotation: expected new_key without query_start_loc"):
        run(inputs, rotation=rotation, query_start_loc=inputs.query_start_loc)
    with pytest.raises(ShapeError, match="query_norm: expected D=16, got 18"):
        run(inputs, rotation=replace(random_rotation(18, norms=True), cos_sin=rotation.cos_sin))


def test_head_groups_must_divide() -> None:
    inputs = build_paged_inputs([3], num_query_heads=3, num_kv_heads=2)
    with pytest.raises(ShapeError, match="HQ must be a multiple of HKV=2, got HQ=3"):
        run(inputs)
