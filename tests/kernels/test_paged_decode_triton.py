"""The Triton kernel of decode attention, interpreted on small shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels import rotate_query_key
from rose_backend.kernels.attention import paged_decode as gpu
from rose_backend.kernels.attention.ops import check_gpu_tensors
from rose_backend.kernels.kv.reference import from_cache, to_cache
from rose_backend.kernels.tensor_checks import CACHE_DTYPE
from rose_backend.kernels.tuning import attention
from rose_backend.kernels.tuning.attention import heads_per_program
from tests.support.attention_calls import paged_decode
from tests.support.error_budget import assert_within_budget
from tests.support.interpreter import run_interpreted
from tests.support.paged_inputs import (
    PagedInputs,
    build_paged_inputs,
    expected_storage,
    grouped,
    naive_attention,
    random_rotation,
    same_bits,
    without_passed_blocks,
)

SCALE = 0.25
LENGTHS = [0, 7, 8, -1, 9, 23]
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


def launch(
    inputs: PagedInputs,
    stored_before: bool,
    num_programs: int,
    max_whole: int,
    num_stages: int,
    early_tiles: int,
    order: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, int, int]:
    """Return output, records written by split rows, and what the counters add up to afterwards."""
    # The interpreter cannot multiply bfloat16 matrices; compiled, float32 must not use the matrix units. Numbers from
    # float8 caches are multiplied as float16.
    is_float8 = inputs.key_cache.dtype == CACHE_DTYPE
    use_dot = inputs.query.dtype == FLOAT16 or (is_float8 and inputs.query.dtype == BFLOAT16)
    tuning = gpu.DecodeTuning(
        tile=8,
        min_split=8,
        num_programs=num_programs,
        use_dot=use_dot,
        num_warps=4,
        num_stages=num_stages,
        max_whole=max_whole,
        fan_in=3,
        kv_heads=2,
        early_tiles=early_tiles,
    )
    scratch: list[torch.Tensor] = []
    modules = {
        "decode_tuning": gpu,
        "split_scratch": gpu,
        "_COMBINE_TILE": gpu,
        "_COMBINE_ELEMENTS": gpu,
        "MAX_QUERY_ELEMENTS": attention,
    }
    before = {name: getattr(module, name) for name, module in modules.items()}

    def poisoned_scratch(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scratch.extend(before["split_scratch"](*args))
        scratch[0].fill_(float("nan"))
        return scratch[0], scratch[1]

    values = (lambda *sizes, **facts: tuning, poisoned_scratch, 2, 8, 512)
    # So few that combining takes two levels and several iterations, and that programs share the queries of a KV head.
    for (name, module), value in zip(modules.items(), values, strict=True):
        setattr(module, name, value)
    gpu._launch_shape.cache_clear()
    try:
        out = torch.full_like(inputs.query, float("nan"))
        returned = paged_decode(
            inputs.query,
            None if stored_before else inputs.new_key,
            None if stored_before else inputs.new_value,
            inputs.key_cache,
            inputs.value_cache,
            inputs.block_table,
            inputs.num_computed_tokens,
            launch=gpu.paged_decode,
            out=out,
            order=order,
            **grouped(scale=SCALE, key_scale=inputs.key_scale, value_scale=inputs.value_scale, **options),
        )
    finally:
        for name, module in modules.items():
            setattr(module, name, before[name])
        gpu._launch_shape.cache_clear()
    assert returned is out
    if not scratch:
        return out, 0, 0
    return out, int((~scratch[0][:, 0].isnan()).sum()), int(scratch[1].abs().sum())


def run(
    inputs: PagedInputs,
    *,
    stored_before: bool = False,
    num_programs: int = 48,
    max_whole: int = 0,
    num_stages: int = 2,
    early_tiles: int = 0,
    order: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, int]:
    """Return output and the number of records of split rows."""
    out, num_records, counted = run_interpreted(
        launch, inputs, stored_before, num_programs, max_whole, num_stages, early_tiles, order, options
    )
    assert counted == 0, "a counter was left behind for the next launch"
    return out, num_records


def run_tokens(inputs: PagedInputs, **options: Any) -> torch.Tensor:
    """As ``run`` for rows of up to 4 tokens, with garbage behind the last row's, which must be left alone."""
    padded = replace(
        inputs,
        **{
            name: F.pad(getattr(inputs, name), (0, 0, 0, 0, 0, 2), value=float("nan"))
            for name in ("query", "new_key", "new_value")
        },
    )
    out, _ = run(padded, query_start_loc=inputs.query_start_loc, max_query_len=4, **options)
    assert out[-2:].isnan().all()
    return out[:-2]


def check(inputs: PagedInputs, out: torch.Tensor, **options: Any) -> None:
    """Compare with attention by the definition; padding rows must be as they were."""
    real = inputs.slot_mapping >= 0
    exact = naive_attention(inputs, scale=SCALE, **options)
    same_dtype = naive_attention(inputs, scale=SCALE, dtype=out.dtype, **options)
    assert_within_budget(out[real], exact[real], same_dtype[real])
    assert out[~real].isnan().all()


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
@pytest.mark.parametrize("num_programs", [0, 48])
@pytest.mark.parametrize("max_query_len", [1, 4])
def test_no_order_of_rows_changes_a_bit(dtype: torch.dtype, num_programs: int, max_query_len: int) -> None:
    query_lens = None if max_query_len == 1 else [1, 4, 2, 1, 0, 3]
    order = torch.tensor([5, 2, 0, 4, 1, 3], dtype=torch.int32)
    ordered, plain = (build_paged_inputs(LENGTHS, query_lens, dtype=dtype) for _ in range(2))
    attend = run_tokens if max_query_len > 1 else lambda *args, **options: run(*args, **options)[0]
    options = {"num_programs": num_programs, "max_whole": 8}
    expected = attend(plain, **options)
    assert same_bits(attend(ordered, order=order, **options), expected)
    assert same_bits(ordered.storage, plain.storage)
    check(plain, expected)


@pytest.mark.parametrize(
    ("heads", "head_size", "block_size", "dtype", "layout"),
    [
        ((2, 2), 16, 8, FLOAT32, "contiguous"),
        ((4, 2), 24, 8, FLOAT32, "vllm"),
        ((2, 2), 16, 8, FLOAT16, "layer_of_stack"),
        ((5, 1), 40, 6, FLOAT16, "vllm"),
        ((4, 1), 32, 16, BFLOAT16, "contiguous"),
        ((2, 1), 512, 16, FLOAT16, "vllm"),
        ((2, 1), 392, 16, FLOAT32, "vllm"),
    ],
    ids=str,
)
def test_values_and_stores(
    heads: tuple[int, int], head_size: int, block_size: int, dtype: torch.dtype, layout: str
) -> None:
    inputs = build_paged_inputs(
        LENGTHS,
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        layout=layout,
    )
    stored = expected_storage(inputs)
    out, num_records = run(inputs)
    check(inputs, out)
    assert same_bits(inputs.storage, stored)
    assert num_records > 0, "no row was split"


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 9},
        {"alibi_slopes": torch.tensor([0.5, 0.1])},
        {"logits_soft_cap": 0.7},
        {"sinks": torch.tensor([3.0, -1.0])},
        {
            "sliding_window": 12,
            "alibi_slopes": torch.tensor([0.5, 0.1]),
            "logits_soft_cap": 2.0,
            "sinks": torch.tensor([1.0, float("-inf")]),
        },
    ],
    ids="+".join,
)
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
def test_options(options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = build_paged_inputs([0, 8, 23], num_query_heads=2, num_kv_heads=1, dtype=dtype)
    stored = expected_storage(inputs)
    check(inputs, run(inputs, **options)[0], **options)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize(
    ("heads", "dtype", "layout", "options"),
    [
        ((4, 2), FLOAT16, "vllm", {}),
        ((5, 1), FLOAT16, "contiguous", {"sinks": torch.linspace(-1, 3, 5)}),
        ((2, 1), FLOAT16, "layer_of_stack", {"sliding_window": 5, "alibi_slopes": torch.tensor([0.5, 0.1])}),
        ((2, 2), FLOAT32, "vllm", {"sliding_window": 5, "sinks": torch.tensor([0.5, 1.0])}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stored_before", [False, True], ids=["new", "stored before"])
def test_several_tokens(
    heads: tuple[int, int], dtype: torch.dtype, layout: str, options: dict[str, Any], stored_before: bool
) -> None:
    inputs = build_paged_inputs(
        [0, 7, 30, -1, 23],
        [4, 3, 0, 2, 4],
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=24,
        dtype=dtype,
        layout=layout,
    )
    stored = expected_storage(inputs)
    if stored_before:
        inputs.storage.copy_(stored)
    check(inputs, run_tokens(inputs, stored_before=stored_before, **options), **options)
    assert same_bits(inputs.storage, stored)


def test_heads_that_one_program_attends() -> None:
    assert [heads_per_program(group, 1, 128) for group in (1, 5, 16)] == [1, 5, 16]
    assert [heads_per_program(group, 8, 128) for group in (1, 4, 6, 7, 16)] == [1, 4, 6, 7, 8]
    assert heads_per_program(5, 8, 256) == 1


@pytest.mark.parametrize(
    ("query_lens", "dtype"),
    [(None, FLOAT32), (None, FLOAT16), (None, BFLOAT16), ([3, 1, 2, 4], FLOAT16), ([3, 1, 2, 4], BFLOAT16)],
    ids=str,
)
def test_float8_caches(query_lens: list[int] | None, dtype: torch.dtype) -> None:
    # Queries beyond float16's range where their own type has it, beside keys so small that products are moderate.
    large = 2.0**8 if dtype == FLOAT16 else 2.0**20
    inputs = build_paged_inputs(
        [0, -1, 2, 23],
        query_lens,
        dtype=dtype,
        cache_dtype=CACHE_DTYPE,
        key_scale=0.5 / large,
        value_scale=2.0,
    )
    inputs.query[:, :2] *= large
    inputs.new_key *= 0.5 / large
    # Triton's interpreter itself rounds wrongly to float8: take numbers that it holds.
    for name, scale in (("new_key", inputs.key_scale), ("new_value", inputs.value_scale)):
        rounded = to_cache(getattr(inputs, name), CACHE_DTYPE, scale)
        setattr(inputs, name, from_cache(rounded, dtype, scale))
    stored = expected_storage(inputs)
    out = run_tokens(inputs) if query_lens else run(inputs)[0]
    check(inputs, out)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize(
    ("heads", "head_size", "rotated", "dtype"),
    [
        ((2, 2), 16, 16, FLOAT32),
        ((4, 2), 24, 24, FLOAT32),
        ((4, 2), 32, 32, FLOAT16),
        ((5, 1), 40, 16, FLOAT16),
        ((3, 3), 16, 4, FLOAT16),
    ],
    ids=str,
)
def test_heads_are_rotated_on_the_way(
    heads: tuple[int, int], head_size: int, rotated: int, dtype: torch.dtype, norms: bool
) -> None:
    shape = {"num_query_heads": heads[0], "num_kv_heads": heads[1], "head_size": head_size, "dtype": dtype}
    plain, turned = (build_paged_inputs(LENGTHS, **shape) for _ in range(2))
    rotation = random_rotation(head_size, rotated, norms=norms, dtype=dtype)
    rotate_query_key(turned.query, turned.new_key, turned.num_computed_tokens.clamp(min=0).long(), rotation)
    before = plain.query.clone(), plain.new_key.clone()
    out, _ = run(plain, rotation=rotation)
    check(turned, out)
    # The last bit may differ: squares are added in another order.
    torch.testing.assert_close(
        plain.storage, expected_storage(turned), rtol=torch.finfo(dtype).eps, atol=1e-6, equal_nan=True
    )
    assert same_bits(plain.query, before[0]) and same_bits(plain.new_key, before[1])


def test_float8_caches_hold_rotated_keys() -> None:
    shape = {"dtype": FLOAT16, "cache_dtype": CACHE_DTYPE}
    plain, turned = (build_paged_inputs([0, 2, 23], **shape) for _ in range(2))
    rotation = random_rotation(16, norms=True, dtype=FLOAT16)
    for each in (plain, turned):
        # Triton's interpreter itself rounds wrongly to float8: take keys and angles that give numbers which it holds.
        each.new_key.fill_(2.0)
        each.new_value.fill_(0.5)
    rotation.key_norm.fill_(1.0)
    rotation.cos_sin[:] = torch.tensor([0.5] * 8 + [0.25] * 8)
    rotate_query_key(turned.query, turned.new_key, turned.num_computed_tokens.long(), rotation)
    stored = expected_storage(turned)
    out, _ = run(plain, rotation=rotation)
    check(turned, out)
    assert same_bits(plain.storage, stored)


def test_long_rows_get_most_splits() -> None:
    one, many = (build_paged_inputs([40, 3], num_query_heads=1, num_kv_heads=1) for _ in range(2))
    # The maximum rises from split to split.
    slopes = torch.tensor([0.5])
    whole, no_records = run(one, num_programs=1, alibi_slopes=slopes)
    split, num_records = run(many, num_programs=7, alibi_slopes=slopes)
    assert (no_records, num_records) == (0, 5)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("max_whole", "num_records"), [(8, 2 + 3 + 2), (9, 3 + 2), (23, 0)])
@pytest.mark.parametrize("query_lens", [None, [1, 1, 0, 1, 3, 1]], ids=["one token", "several tokens"])
def test_short_rows_stay_whole(query_lens: list[int] | None, max_whole: int, num_records: int) -> None:
    inputs = build_paged_inputs([7, 9, -1, 23, 0, 16], query_lens, num_query_heads=1, num_kv_heads=1)
    stored = expected_storage(inputs)
    options = {} if query_lens is None else {"query_start_loc": inputs.query_start_loc, "max_query_len": 3}
    out, counted = run(inputs, max_whole=max_whole, **options)
    check(inputs, out)
    assert counted == num_records
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_any_number_of_tiles_may_be_on_their_way(num_stages: int) -> None:
    inputs = build_paged_inputs([0, 9, 30], num_query_heads=2)
    stored = expected_storage(inputs)
    options = {"num_programs": 1, "num_stages": num_stages, "sliding_window": 26}
    check(inputs, run(inputs, **options)[0], sliding_window=26)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("num_programs", [1, 48])
@pytest.mark.parametrize("query_lens", [None, [1, 3, 0, 2, 4, 1]], ids=["one token", "several tokens"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 11, "logits_soft_cap": 2.0}], ids=str)
def test_a_tile_that_is_loaded_early(
    query_lens: list[int] | None, num_programs: int, options: dict[str, Any]
) -> None:
    inputs = build_paged_inputs(LENGTHS, query_lens, dtype=FLOAT16)
    stored = expected_storage(inputs)
    arguments = {"early_tiles": 1, "num_programs": num_programs, **options}
    out = run(inputs, **arguments)[0] if query_lens is None else run_tokens(inputs, **arguments)
    check(inputs, out, **options)
    assert same_bits(inputs.storage, stored)


def test_rows_that_fill_the_places_are_hardly_split() -> None:
    # Two programs beyond one per row: a batch of equal rows stays whole, a long row among short ones does not.
    equal = build_paged_inputs([16] * 4, num_query_heads=1, num_kv_heads=1)
    uneven = build_paged_inputs([30, 1, 1, 1], num_query_heads=1, num_kv_heads=1)
    assert run(equal, num_programs=5)[1] == 0
    assert run(uneven, num_programs=5)[1] == 2


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
def test_without_new_tokens_nothing_is_written(dtype: torch.dtype) -> None:
    inputs = build_paged_inputs([5, 16, -1], dtype=dtype)
    inputs.storage.copy_(stored := expected_storage(inputs))
    check(inputs, run(inputs, stored_before=True)[0])
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("block_size", [6, 8, 16])
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
def test_keys_and_values_have_strides_of_their_own(dtype: torch.dtype, block_size: int) -> None:
    inputs = build_paged_inputs(LENGTHS, block_size=block_size, dtype=dtype)
    values = torch.cat((inputs.value_cache, torch.full_like(inputs.value_cache, float("nan"))), 3)[..., :16]
    apart, _ = run(replace(inputs, value_cache=values))
    check(inputs, apart)
    together, _ = run(inputs)
    assert same_bits(apart, together) and same_bits(values.contiguous(), inputs.value_cache.contiguous())


def test_new_token_is_not_read_back_from_the_cache() -> None:
    # Two rows that wrongly share their tail block: each must still see its own token.
    inputs = build_paged_inputs([4, 4])
    inputs.block_table[1, 0] = inputs.block_table[0, 0]
    inputs.history_keys[1], inputs.history_values[1] = inputs.history_keys[0], inputs.history_values[0]
    check(inputs, run(inputs)[0])


@pytest.mark.parametrize("lengths", [[], [-1, -3]], ids=str)
def test_nothing_to_do(lengths: list[int]) -> None:
    inputs = build_paged_inputs(lengths)
    before = inputs.storage.clone()
    out, _ = run(inputs)
    assert out.shape == (len(lengths), 4, 16) and out.isnan().all()
    assert same_bits(inputs.storage, before)


def test_what_the_kernels_cannot_do_is_named() -> None:
    query, cache = torch.zeros(2, 3, 16), torch.zeros(2, 16, 3, 16)
    check_gpu_tensors(query, key_cache=cache, new_key=None)
    with pytest.raises(ShapeError, match=r"query: expected D of at most 512 on a GPU, got 520"):
        check_gpu_tensors(torch.zeros(2, 3, 520))
    with pytest.raises(ShapeError, match=r"query: expected one of .* on a GPU, got torch.float64"):
        check_gpu_tensors(query.double())
    with pytest.raises(ShapeError, match=r"key_cache: expected an innermost stride of 1, got strides"):
        check_gpu_tensors(query, key_cache=cache.transpose(1, 3))


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("window", [2, 7, 17])
def test_blocks_that_a_window_has_passed_are_not_read(window: int, block_size: int) -> None:
    inputs = build_paged_inputs([0, 45, 30, -1, 64, 100], num_query_heads=2, block_size=block_size)
    expected = naive_attention(inputs, scale=SCALE, sliding_window=window)
    assert without_passed_blocks(inputs, window) > 3
    out, _ = run(inputs, sliding_window=window)
    real = inputs.slot_mapping >= 0
    assert not out[real].isnan().any()
    torch.testing.assert_close(out[real].double(), expected[real].double(), atol=1e-4, rtol=1e-4)
