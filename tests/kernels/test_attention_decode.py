"""Decode attention: right values, exactly the new tokens' slots written, nothing else touched or forbidden read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from rose_backend import kernels
from rose_backend.compile_ahead.recorded_launches import record_launches as record_compilations
from rose_backend.errors import ShapeError
from rose_backend.kernels import (
    AttentionOptions,
    NewTokens,
    PackedLinear,
    pack_linear,
    rotate_query_key,
    small_batch_linear,
)
from rose_backend.kernels.arguments import CACHE_DTYPE
from rose_backend.kernels.attention import paged_decode as gpu
from rose_backend.kernels.attention import reference, shared
from rose_backend.kernels.attention.ops import check_gpu_tensors
from rose_backend.kernels.gpu_properties import GpuProperties, meta_stands_for
from rose_backend.kernels.kv.ops import from_cache, to_cache
from rose_backend.kernels.tuning import choices as tuning_module
from rose_backend.layers.attention import AttentionRows, AttentionStep, attend, plan_decode
from tests.support.attention_calls import decode, plan_paged_decode
from tests.support.implementations import (
    DTYPES,
    GPU,
    INTERPRETER,
    REFERENCE,
    Implementation,
    each_dtype,
    kernels_only,
)
from tests.support.paged_inputs import (
    CACHE_LAYOUTS,
    FLOAT8,
    LARGE_OPTIONS,
    OPTION_NAMES,
    OPTIONS,
    SHAPES,
    PagedInputs,
    Shape,
    as_bits,
    check_attention,
    expected_storage,
    make_inputs,
    moved_far_apart,
    naive_attention,
    random_rotation,
    resolve_options,
    same_bits,
    without_passed_blocks,
)

FLOAT32, FLOAT16, BFLOAT16 = DTYPES
LENGTHS = [0, 1, 7, 8, 9, 40, 23]
PADDED, QUERY_LENS = [0, 7, 30, 8, -1, 9, 23], [4, 3, 0, 1, 2, 2, 4]
one_or_several = pytest.mark.parametrize("max_query_len", [None, 4], ids=["one token", "several tokens"])


def decode_in_small_tiles(
    inputs: PagedInputs, changes: dict[str, Any], **options: Any
) -> tuple[torch.Tensor, int, int]:
    """Return output, records written by split rows, and what the counters add up to afterwards."""
    # The interpreter cannot multiply bfloat16 matrices; compiled, float32 must not use the matrix units. Numbers from
    # float8 caches are multiplied as float16.
    is_float8 = inputs.key_cache.dtype == CACHE_DTYPE
    tuning = gpu.DecodeTuning(
        **{
            "tile": 8,
            "min_split": 8,
            "num_programs": 48,
            "use_dot": inputs.query.dtype == FLOAT16 or (is_float8 and inputs.query.dtype == BFLOAT16),
            "num_warps": 4,
            "num_stages": 2,
            "max_whole": 0,
            "fan_in": 3,
            "kv_heads": 2,
            "early_tiles": 0,
            **changes,
        }
    )
    scratch: list[torch.Tensor] = []

    def poisoned_scratch(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scratch.extend(shared.split_scratch(*args))
        scratch[0].fill_(float("nan"))
        return scratch[0], scratch[1]

    gpu._launch_shape.cache_clear()
    # So few that combining takes two levels and several iterations, and that programs share the queries of a KV head.
    with (
        mock.patch.multiple(gpu, decode_tuning=lambda *_, **facts: tuning, split_scratch=poisoned_scratch),
        mock.patch.multiple(gpu, _COMBINE_TILE=2, _COMBINE_ELEMENTS=8),
        mock.patch.object(tuning_module, "MAX_QUERY_ELEMENTS", 512),
    ):
        out = decode(inputs, **options)
    gpu._launch_shape.cache_clear()
    if not scratch:
        return out, 0, 0
    return out, int((~scratch[0][:, 0].isnan()).sum()), int(scratch[1].abs().sum())


def interpret(inputs: PagedInputs, tuning: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return output and the number of records of split rows."""
    out, num_records, counted = INTERPRETER(decode_in_small_tiles, inputs, tuning or {}, **options)
    assert counted == 0, "a counter was left behind for the next launch"
    return out, num_records


def run(
    call: Implementation,
    inputs: PagedInputs,
    max_query_len: int | None = None,
    tuning: dict[str, Any] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attend, of several tokens per row with garbage behind the last row's, which must be left alone."""
    given = inputs
    if max_query_len is not None:
        padded = {
            name: F.pad(getattr(inputs, name), (0, 0, 0, 0, 0, 2), value=float("nan"))
            for name in ("query", "new_key", "new_value")
        }
        given = replace(inputs, **padded)
    options |= {"max_query_len": max_query_len}
    if call is INTERPRETER:
        return interpret(given, tuning, **options)[0]
    return call(decode, given, **options)


def check(
    call: Implementation,
    inputs: PagedInputs,
    max_query_len: int | None = None,
    rows: list[int] | None = None,
    by_row: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attend, compare output and the whole cache, and require that nothing else was written."""
    stored = expected_storage(inputs)
    names = ("query", "new_key", "new_value", "block_table", "num_computed_tokens", "query_start_loc")
    before = {name: getattr(inputs, name).clone() for name in names}
    out = run(call, inputs, max_query_len, **options)
    of_all = {name: options[name] for name in OPTION_NAMES & options.keys()}
    check_attention(inputs, out, rows, by_row=by_row, **of_all)
    assert same_bits(inputs.storage, stored)
    for name in names:
        assert torch.equal(getattr(inputs, name), before[name]), name
    return out


def hold_exactly(inputs: PagedInputs) -> None:
    """Round what is stored to what float8 holds: Triton's interpreter itself rounds wrongly to it."""
    for new, scale in ((inputs.new_key, inputs.key_scale), (inputs.new_value, inputs.value_scale)):
        new.copy_(from_cache(to_cache(new, CACHE_DTYPE, scale), new.dtype, scale))


@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        ((2, 2, 16, 8), FLOAT32, "contiguous"),
        ((4, 2, 24, 8), FLOAT32, "vllm"),
        ((8, 1, 16, 8), FLOAT32, "layer_of_stack"),
        ((2, 1, 392, 16), FLOAT32, "heads_first"),
        ((2, 2, 16, 8), FLOAT16, "layer_of_stack"),
        ((10, 2, 16, 8), FLOAT16, "contiguous"),
        ((5, 1, 40, 6), FLOAT16, "vllm"),
        ((2, 1, 512, 16), FLOAT16, "vllm"),
        ((4, 1, 32, 16), BFLOAT16, "contiguous"),
        ((10, 2, 16, 8), BFLOAT16, "layer_of_stack"),
        ((2, 2, 16, 8), BFLOAT16, "vllm"),
    ],
    ids=str,
)
def test_values_and_stores(
    implementation: Implementation, shape: Shape, dtype: torch.dtype, layout: str
) -> None:
    # In the interpreter wide heads take seconds.
    several = implementation is not INTERPRETER or shape[2] < 100
    for max_query_len in (None, 4) if several else (None,):
        for lengths in (LENGTHS, PADDED) if implementation is REFERENCE else (PADDED,):
            query_lens = None if max_query_len is None else QUERY_LENS
            inputs = make_inputs(
                lengths, query_lens, shape, dtype=dtype, layout=layout, device=implementation.device
            )
            check(implementation, inputs, max_query_len)


@pytest.mark.parametrize("options", OPTIONS, ids="+".join)
@each_dtype
def test_options(implementation: Implementation, dtype: torch.dtype, options: dict[str, Any]) -> None:
    several = implementation is not INTERPRETER or dtype == FLOAT16
    for max_query_len in (None, 4) if several else (None,):
        lengths, query_lens = ([0, 8, 23], None) if max_query_len is None else (PADDED, QUERY_LENS)
        shape = (2, 1, 16, 8) if dtype == FLOAT16 else (4, 2, 16, 8)
        inputs = make_inputs(
            lengths, query_lens, shape, dtype=dtype, layout="vllm", device=implementation.device
        )
        check(implementation, inputs, max_query_len, **resolve_options(options, shape, implementation.device))


def test_options_change_the_result() -> None:
    inputs = make_inputs(LENGTHS)
    plain = naive_attention(inputs)
    for options in ({"sliding_window": 9}, {"alibi": True}, {"logits_soft_cap": 0.7}, {"sinks": True}):
        changed = naive_attention(inputs, **resolve_options(options, (4, 2, 16, 8), "cpu"))
        assert not torch.allclose(plain, changed, atol=1e-3)


@one_or_several
@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5, "sinks": True}], ids=["plain", "window+sinks"])
def test_what_was_stored_before_is_only_read(
    implementation: Implementation,
    options: dict[str, Any],
    cache: dict[str, Any],
    max_query_len: int | None,
) -> None:
    query_lens, shape = None if max_query_len is None else QUERY_LENS, (4, 2, 16, 8)
    dtype = FLOAT32 if max_query_len is None else FLOAT16
    inputs, fused = (
        make_inputs(PADDED, query_lens, shape, dtype=dtype, device=implementation.device, **cache)
        for _ in range(2)
    )
    options = resolve_options(options, shape, implementation.device)
    as_bits(inputs.storage).copy_(as_bits(expected_storage(inputs)))
    out = check(implementation, inputs, max_query_len, stored_before=True, **options)
    if implementation is REFERENCE:
        assert same_bits(run(REFERENCE, fused, max_query_len, **options), out)
        assert same_bits(fused.storage, inputs.storage)


@one_or_several
@pytest.mark.parametrize("scales", [(None, None), (0.02, 3.0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8_caches(
    implementation: Implementation,
    dtype: torch.dtype,
    scales: tuple[float | None, float | None],
    max_query_len: int | None,
) -> None:
    query_lens, shape = None if max_query_len is None else QUERY_LENS, (4, 2, 16, 8)
    cache = {"cache_dtype": CACHE_DTYPE, "key_scale": scales[0], "value_scale": scales[1], "seed": 1}
    for layout in CACHE_LAYOUTS if implementation is REFERENCE else ("vllm",):
        inputs = make_inputs(
            PADDED, query_lens, shape, dtype=dtype, layout=layout, device=implementation.device, **cache
        )
        inputs.new_key[0] *= 1000  # Some is limited.
        if implementation is INTERPRETER:
            hold_exactly(inputs)
        sinks = torch.tensor([2.0, -1.0, 0.0, 5.0], device=implementation.device)
        check(implementation, inputs, max_query_len, sliding_window=15, sinks=sinks)


@one_or_several
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kernels_only
def test_large_queries_beside_small_keys(
    implementation: Implementation, dtype: torch.dtype, max_query_len: int | None
) -> None:
    # Queries beyond float16's range where their own type has it, beside keys so small that products are moderate.
    large = 2.0**8 if dtype == FLOAT16 else 2.0**20
    cache = {"cache_dtype": CACHE_DTYPE, "key_scale": 0.5 / large, "value_scale": 2.0}
    query_lens = None if max_query_len is None else [3, 1, 2, 4]
    inputs = make_inputs([0, -1, 2, 23], query_lens, dtype=dtype, device=implementation.device, **cache)
    inputs.query[:, :2] *= large
    inputs.new_key *= 0.5 / large
    hold_exactly(inputs)
    check(implementation, inputs, max_query_len)


@pytest.mark.parametrize("by_token", [False, True], ids=["by position", "by token"])
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize(
    ("shape", "rotated", "dtype"),
    [
        ((2, 2, 16, 8), 16, FLOAT32),
        ((4, 2, 24, 8), 24, FLOAT32),
        ((4, 2, 32, 8), 32, FLOAT16),
        ((5, 1, 40, 8), 16, FLOAT16),
        ((3, 3, 16, 8), 4, FLOAT16),
    ],
    ids=str,
)
def test_heads_are_rotated_on_the_way(
    implementation: Implementation,
    shape: Shape,
    rotated: int,
    dtype: torch.dtype,
    norms: bool,
    by_token: bool,
) -> None:
    device = implementation.device
    plain, turned = (make_inputs(PADDED, shape=shape, dtype=dtype, device=device) for _ in range(2))
    rotation = random_rotation(shape[2], rotated, norms=norms, dtype=dtype, device=device)
    positions = turned.num_computed_tokens.clamp(min=0).long()
    if by_token:
        # Rows of the table that no length leads to.
        rotation = replace(rotation, cos_sin=rotation.cos_sin.flip(0)[: len(positions)], by_token=True)
        positions = torch.arange(len(positions), device=device)
    rotate_query_key(turned.query, turned.new_key, positions, rotation)
    before = plain.query.clone(), plain.new_key.clone()
    out = run(implementation, plain, rotation=rotation)
    check_attention(turned, out)
    # The last bit may differ: squares are added in another order.
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(plain.storage, expected_storage(turned), **tolerance)
    assert same_bits(plain.query, before[0]) and same_bits(plain.new_key, before[1])
    assert not torch.equal(turned.query, plain.query)
    if implementation is REFERENCE:
        assert same_bits(out, run(REFERENCE, turned)) and same_bits(plain.storage, turned.storage)


def test_float8_caches_hold_rotated_keys(implementation: Implementation) -> None:
    cache = {"dtype": FLOAT16, "cache_dtype": CACHE_DTYPE, "device": implementation.device}
    plain, turned = (make_inputs([0, 2, 23], **cache) for _ in range(2))
    rotation = random_rotation(16, norms=True, dtype=FLOAT16, device=implementation.device)
    for each in (plain, turned):
        # Keys and angles that give numbers which float8 holds: the interpreter itself rounds wrongly to it.
        each.new_key.fill_(2.0)
        each.new_value.fill_(0.5)
    rotation.key_norm.fill_(1.0)
    rotation.cos_sin[:, :8], rotation.cos_sin[:, 8:] = 0.5, 0.25
    rotate_query_key(turned.query, turned.new_key, turned.num_computed_tokens.long(), rotation)
    stored = expected_storage(turned)
    check_attention(turned, run(implementation, plain, rotation=rotation))
    assert same_bits(plain.storage, stored)


@one_or_several
@pytest.mark.parametrize("num_programs", [0, 48])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@kernels_only
def test_no_order_of_rows_changes_a_bit(
    implementation: Implementation, dtype: torch.dtype, num_programs: int, max_query_len: int | None
) -> None:
    query_lens = None if max_query_len is None else QUERY_LENS
    ordered, plain = (
        make_inputs(PADDED, query_lens, dtype=dtype, device=implementation.device) for _ in range(2)
    )
    order = torch.tensor([5, 2, 6, 0, 4, 1, 3], dtype=torch.int32, device=implementation.device)
    tuning = {"num_programs": num_programs, "max_whole": 8}
    expected = check(implementation, plain, max_query_len, tuning=tuning)
    assert same_bits(run(implementation, ordered, max_query_len, tuning=tuning, plan=order), expected)
    assert same_bits(ordered.storage, plain.storage)


def test_tensors_of_their_own(implementation: Implementation) -> None:
    inputs = make_inputs(LENGTHS, device=implementation.device)
    assert not inputs.query.is_contiguous()
    for name in ("query", "new_key", "new_value"):
        setattr(inputs, name, getattr(inputs, name).contiguous())
    check(implementation, inputs)


def test_new_token_is_not_read_back_from_the_cache(implementation: Implementation) -> None:
    # Two rows that wrongly share their tail block: each must still see its own token.
    inputs = make_inputs([4, 4], device=implementation.device)
    inputs.block_table[1, 0] = inputs.block_table[0, 0]
    inputs.history_keys[1], inputs.history_values[1] = inputs.history_keys[0], inputs.history_values[0]
    check_attention(inputs, run(implementation, inputs))


@pytest.mark.parametrize(
    ("lengths", "query_lens"),
    [([], None), ([-1, -3], None), ([-3], None), ([5, 9], [0, 0]), ([-1, -7], [3, 1]), ([-1, -5, 90], [2, 1, 0])],
    ids=str,
)  # fmt: skip
def test_nothing_to_do(
    implementation: Implementation, lengths: list[int], query_lens: list[int] | None
) -> None:
    inputs = make_inputs(lengths, query_lens, device=implementation.device)
    before = inputs.storage.clone()
    assert run(implementation, inputs, None if query_lens is None else 4).isnan().all()
    assert same_bits(inputs.storage, before)


@pytest.mark.parametrize("lengths", [[-1, 5, -1, 17, -1], [5, 5]], ids=str)
def test_padding_and_rows_of_equal_length(implementation: Implementation, lengths: list[int]) -> None:
    check(implementation, make_inputs(lengths, device=implementation.device))
    # Nothing that is gathered is hidden from all queries of a row, but some is from each.
    check(implementation, make_inputs(lengths, [3] * len(lengths), device=implementation.device), 3)


def test_skipped_rows_may_have_any_number_of_tokens(implementation: Implementation) -> None:
    # As prompts in a step whose decodes are these.
    check(implementation, make_inputs([5, 17, -1, -1], [3, 2, 20, 4], device=implementation.device), 3)


def test_rows_of_at_most_one_token(implementation: Implementation) -> None:
    check(implementation, make_inputs([5, 9, 3, -1], [1, 0, 1, 1], device=implementation.device), 1)


@pytest.mark.parametrize("block_size", [6, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_keys_and_values_have_strides_of_their_own(
    implementation: Implementation, dtype: torch.dtype, block_size: int
) -> None:
    inputs = make_inputs(PADDED, shape=(4, 2, 16, block_size), dtype=dtype, device=implementation.device)
    values = torch.cat((inputs.value_cache, torch.full_like(inputs.value_cache, float("nan"))), 3)[..., :16]
    apart = run(implementation, replace(inputs, value_cache=values))
    check_attention(inputs, apart)
    together = run(implementation, inputs)
    assert implementation is GPU or same_bits(apart, together)
    assert same_bits(values.contiguous(), inputs.value_cache.contiguous())


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("window", [2, 7, 17])
def test_blocks_that_a_window_has_passed_are_not_read(
    implementation: Implementation, window: int, block_size: int
) -> None:
    inputs = make_inputs([0, 45, 30, -1, 64, 100], shape=(2, 2, 16, block_size), device=implementation.device)
    assert without_passed_blocks(inputs, window) > 3
    check_attention(inputs, run(implementation, inputs, sliding_window=window), sliding_window=window)


# How the kernel splits and loads, which is chosen for a GPU by its size: in the interpreter only.


def test_long_rows_get_most_splits() -> None:
    one, many = (make_inputs([40, 3], shape=(1, 1, 16, 8)) for _ in range(2))
    # The maximum rises from split to split.
    slopes = torch.tensor([0.5])
    whole, no_records = interpret(one, {"num_programs": 1}, alibi_slopes=slopes)
    split, num_records = interpret(many, {"num_programs": 7}, alibi_slopes=slopes)
    assert (no_records, num_records) == (0, 5)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("max_whole", "num_records"), [(8, 2 + 3 + 2), (9, 3 + 2), (23, 0)])
@pytest.mark.parametrize("query_lens", [None, [1, 1, 0, 1, 3, 1]], ids=["one token", "several tokens"])
def test_short_rows_stay_whole(query_lens: list[int] | None, max_whole: int, num_records: int) -> None:
    inputs = make_inputs([7, 9, -1, 23, 0, 16], query_lens, (1, 1, 16, 8))
    stored = expected_storage(inputs)
    options = {} if query_lens is None else {"max_query_len": 3}
    out, counted = interpret(inputs, {"max_whole": max_whole}, **options)
    check_attention(inputs, out)
    assert counted == num_records
    assert same_bits(inputs.storage, stored)


def test_rows_that_fill_the_places_are_hardly_split() -> None:
    # Two programs beyond one per row: a batch of equal rows stays whole, a long row among short ones does not.
    for lengths, num_records in (([16] * 4, 0), ([30, 1, 1, 1], 2)):
        inputs = make_inputs(lengths, shape=(1, 1, 16, 8))
        assert interpret(inputs, {"num_programs": 5})[1] == num_records


@pytest.mark.parametrize("num_stages", [1, 3])
def test_any_number_of_tiles_may_be_on_their_way(num_stages: int) -> None:
    inputs = make_inputs([0, 9, 30], shape=(2, 2, 16, 8))
    tuning = {"num_programs": 1, "num_stages": num_stages}
    check(INTERPRETER, inputs, tuning=tuning, sliding_window=26)


@one_or_several
@pytest.mark.parametrize("num_programs", [1, 48])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 11, "logits_soft_cap": 2.0}], ids=str)
def test_a_tile_that_is_loaded_early(
    max_query_len: int | None, num_programs: int, options: dict[str, Any]
) -> None:
    inputs = make_inputs(PADDED, None if max_query_len is None else QUERY_LENS, dtype=FLOAT16)
    tuning = {"early_tiles": 1, "num_programs": num_programs}
    check(INTERPRETER, inputs, max_query_len, tuning=tuning, **options)


def test_heads_that_one_program_attends() -> None:
    heads_per_program = tuning_module.heads_per_program
    assert [heads_per_program(group, 1, 128) for group in (1, 5, 16)] == [1, 5, 16]
    assert [heads_per_program(group, 8, 128) for group in (1, 4, 6, 7, 16)] == [1, 4, 6, 7, 8]
    assert heads_per_program(5, 8, 256) == 1


# How plain torch gathers, and what the public function refuses.


def test_overlap_changes_nothing_where_there_is_none() -> None:
    one_by_one, overlapped = make_inputs(LENGTHS), make_inputs(LENGTHS)
    assert same_bits(run(REFERENCE, overlapped, overlap=True), run(REFERENCE, one_by_one, overlap=False))
    assert same_bits(overlapped.storage, one_by_one.storage)


@one_or_several
@pytest.mark.parametrize("window", [None, 11])
def test_many_chunks_give_the_same_as_one(window: int | None, max_query_len: int | None) -> None:
    lengths, query_lens = [31, 0, 8, 15, 16, -1, 3, 31, 100, 7], [4, 3, 0, 1, 2, 2, 4, 1, 1, 2]
    one, many = (make_inputs(lengths, query_lens if max_query_len else None) for _ in range(2))
    expected = run(REFERENCE, one, max_query_len, sliding_window=window)
    options = many.options(sliding_window=window)
    plan = kernels.plan_paged_decode(many.kv(max_query_len), options=options, chunk_bytes=4096)
    assert len(plan.chunks) > 2
    actual = run(REFERENCE, many, max_query_len, sliding_window=window, plan=plan)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5, equal_nan=True)
    assert same_bits(many.storage, one.storage)


def test_one_plan_serves_several_layers() -> None:
    first, other, moved = (
        make_inputs(LENGTHS, seed=1),
        make_inputs(LENGTHS, seed=2),
        make_inputs(LENGTHS, seed=1),
    )
    moved = replace(moved, query=other.query, new_key=other.new_key, new_value=other.new_value)
    plan = kernels.plan_paged_decode(first.kv(), options=first.options())
    check(REFERENCE, first, plan=plan)
    check(REFERENCE, moved, plan=plan)


def test_rows_are_split_by_length() -> None:
    assert reference._split_rows([1, 4, 2, 4], max_blocks=8) == [([1, 3], 4), ([2, 0], 2)]
    assert reference._split_rows([9], max_blocks=2) == [(None, 9)]
    assert reference._split_rows([3, 9], max_blocks=2) == [([1], 9), ([0], 3)]
    assert reference._split_rows([], max_blocks=2) == []


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 0.7}, {"is_causal": True}], ids="+".join)
def test_a_sink_is_a_key_without_a_value(options: dict[str, Any]) -> None:
    query, key, value = (torch.randn(2, 3, 4, 8) for _ in range(3))
    sinks = torch.tensor([[0.0], [3.0], [-1.0]])
    attended = reference.attend(query, key, value, None, scale=0.3, sinks=sinks, **options)
    scores = query @ key.transpose(-1, -2) * 0.3
    if "logits_soft_cap" in options:
        scores = 0.7 * torch.tanh(scores / 0.7)
    if "is_causal" in options:
        scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp()[..., None])
    torch.testing.assert_close(attended, weights @ value, rtol=0, atol=1e-6)


def starts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new_key": torch.zeros(2, 2, 8)}, r"new_key: expected D=16, got 8"),
        ({"new_value": None}, r"new_value: expected a tensor because new_key is given, got None"),
        ({"query": torch.zeros(2, 3, 16), "out": torch.zeros(2, 3, 16)}, r"HQ must be a multiple of HKV=2, got HQ=3"),
        ({"out": torch.zeros(2, 3, 16)}, r"out: expected HQ=4, got 3"),
        ({"block_table": torch.zeros(3, 4).int()}, r"block_table: expected R=2, got 3"),
        ({"block_table": torch.zeros(2, 4).long()}, r"block_table: expected dtype torch.int32, got torch.int64"),
        ({"num_computed_tokens": torch.zeros(2, 1).int()}, r"num_computed_tokens: expected shape \[R\]"),
        ({"new_key": torch.zeros(2, 2, 16).half()}, r"new_key: expected dtype torch.float32 as query"),
        ({"value_cache": torch.zeros(5, 4, 2, 16)}, r"value_cache: expected (NB|BS)="),
        ({"value_cache": torch.zeros(6, 8, 2, 16).half()}, r"value_cache: expected dtype torch.float32 as key_ca"),
        ({"plan": starts(1, 0)}, r"plan: expected one made for cpu, got Tensor"),
        ({"max_query_len": 9}, r"max_query_len: expected 1 to 8, got 9"),
        ({"query_start_loc": starts(0, 2), "max_query_len": 2}, r"query_start_loc: expected R\+1=3, got 2"),
        ({"query_start_loc": starts(0, 0, 2), "max_query_len": 1}, r"0 to max_query_len=1 tokens per row, got 0 to 2"),
        ({"query_start_loc": starts(0, 2, 1), "max_query_len": 1}, r"max_query_len=1 tokens per row, got -1 to 2"),
        ({"sinks": torch.zeros(3)}, r"sinks: expected HQ=4, got 3"),
        ({"alibi_slopes": torch.zeros(5)}, r"alibi_slopes: expected HQ=4, got 5"),
        ({"key_scale": torch.ones(1)}, r"key_scale: expected None with caches of torch.float32, got a tensor"),
        ({"rotation": random_rotation(16, norms=True), "stored_before": True}, "rotation: expected new_key without"),
        ({"rotation": random_rotation(16, norms=True), "max_query_len": 1}, "new_key without query_start_loc"),
        (
            {"rotation": replace(random_rotation(16, norms=True, num_positions=1), by_token=True)},
            "cos_sin: expected a row for each of T=",
        ),
        (
            {"rotation": replace(random_rotation(18, norms=True), cos_sin=torch.zeros(9, 16))},
            "query_norm: expected D=16, got 18",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_mismatches_are_named(change: dict[str, Any], message: str) -> None:
    inputs, options = make_inputs([3, 8]), dict(change)
    for name in change.keys() & vars(inputs).keys():
        setattr(inputs, name, options.pop(name))
    before = inputs.storage.clone()
    with pytest.raises(ShapeError, match=message):
        decode(inputs, **{"out": torch.zeros(2, 4, 16), **options})
    assert same_bits(inputs.storage, before)


def test_numbers_of_tokens_that_are_not_allowed_are_named() -> None:
    kv = make_inputs([3, 8]).kv(1)
    for change, message in (
        ({"query_start_loc": None, "max_query_len": 2}, "expected 1 without query_start_loc, got 2"),
        ({"max_query_len": 0}, "expected 1 to 8, got 0"),
    ):
        with pytest.raises(ShapeError, match=message):
            kernels.plan_paged_decode(kv._replace(**change), options=AttentionOptions(1.0))


def test_what_the_kernels_cannot_do_is_named() -> None:
    query, cache = torch.zeros(2, 3, 16), torch.zeros(2, 16, 3, 16)
    check_gpu_tensors(query, key_cache=cache, new_key=None)
    for arguments, message in (
        ((torch.zeros(2, 3, 520),), r"query: expected D of at most 512 on a GPU, got 520"),
        ((query.double(),), r"query: expected one of .* on a GPU, got torch.float64"),
    ):
        with pytest.raises(ShapeError, match=message):
            check_gpu_tensors(*arguments)
    with pytest.raises(ShapeError, match=r"key_cache: expected an innermost stride of 1, got strides"):
        check_gpu_tensors(query, key_cache=cache.transpose(1, 3))


# In which order rows of a step begin to be attended.

H200 = GpuProperties((9, 0), 132)


@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 300])
def test_order_is_that_of_a_stable_sort(num_rows: int) -> None:
    # Few lengths: many rows are equally long, and some have nothing to do.
    lengths = torch.randint(
        -1, 40, (num_rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(1)
    )
    order = INTERPRETER(shared.longest_first, lengths)
    assert order.dtype == torch.int32
    assert order.tolist() == sorted(range(num_rows), key=lambda row: -int(lengths[row]))


def plan_on_meta(num_rows: int, window: int | None = None) -> Any:
    table, lengths = (
        torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((num_rows, 4), num_rows)
    )
    cache = torch.empty(4, 16, 8, 128, dtype=BFLOAT16, device="meta")
    return plan_paged_decode(table, lengths, cache, options=AttentionOptions(1.0, window))


def test_rows_are_ordered_where_they_cannot_all_begin_at_once() -> None:
    with record_compilations(H200) as recorded, meta_stands_for(H200):
        assert plan_on_meta(132) is None and not recorded.sources
        assert plan_on_meta(133).shape == (133,)
        assert [source.name for source in recorded.sources] == ["_longest_first_kernel"]
        # With a window, long rows read no more than others.
        assert plan_on_meta(256, window=128) is None
    begins_in_turns = tuning_module.begins_in_turns
    assert not begins_in_turns(8 * 132, 132) and begins_in_turns(8 * 132 + 1, 132)


def test_a_plan_is_made_once_before_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options["options"].sliding_window)
        return kernels.plan_paged_decode(*args, **options)

    monkeypatch.setattr("rose_backend.layers.attention.plan_paged_decode", counted)
    inputs = make_inputs([5, 9])
    rows = AttentionRows(slice(0, 2), inputs.block_table, inputs.num_computed_tokens)
    options = AttentionOptions(0.25)
    new, cache = NewTokens(inputs.new_key, inputs.new_value), (inputs.key_cache, inputs.value_cache)
    step, out = AttentionStep(rows, None, None), torch.empty_like(inputs.query)
    with pytest.raises(AssertionError, match="plan_decode comes before layers that overlap"):
        attend(inputs.query, new, cache, step, options, out, overlap=True)
    kv = rows.kv(*cache)
    first = plan_decode(rows, kv, options)
    assert plan_decode(rows, kv, options) is first
    attend(inputs.query, new, cache, step, options, out, overlap=True)
    plan_decode(rows, kv, AttentionOptions(0.25, 4))
    assert calls == [None, 4]


# On a GPU at its own sizes: every shape, long contexts, far addresses, graphs, repetition.

LARGE_LENGTHS, LARGE_QUERY_LENS = [0, 1, 15, 16, -1, 700, 33, 5000, 40], [4, 3, 2, 1, 2, 4, 0, 3, 4]
CACHES = pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])


def on_gpu(
    lengths: list[int], query_lens: list[int] | None = None, shape: Shape = (4, 2, 64, 16), **options: Any
) -> PagedInputs:
    return make_inputs(
        lengths, query_lens, shape, **{"dtype": FLOAT16, "layout": "vllm", "device": "cuda", **options}
    )


check_on_gpu = functools.partial(check, GPU, by_row=True)


@pytest.mark.gpu
@one_or_several
@pytest.mark.parametrize(
    ("dtype", "cache"), [*((dtype, {}) for dtype in DTYPES), (BFLOAT16, FLOAT8)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(
    shape: Shape, dtype: torch.dtype, cache: dict[str, Any], max_query_len: int | None
) -> None:
    query_lens = None if max_query_len is None else LARGE_QUERY_LENS
    check_on_gpu(on_gpu(LARGE_LENGTHS, query_lens, shape, dtype=dtype, **cache), max_query_len)


@pytest.mark.gpu
@pytest.mark.parametrize("max_query_len", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(12, 12, 64, 16), (32, 8, 128, 16), (16, 1, 128, 16)], ids=str)
def test_every_number_of_tokens(max_query_len: int, shape: Shape) -> None:
    query_lens = [min(max_query_len, count) for count in (8, 0, 1, 3, 8, 2)]
    inputs = on_gpu([2000, 5, 0, 77, 300, -1], query_lens, shape, dtype=BFLOAT16)
    check_on_gpu(inputs, max_query_len)


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32], ids=str)
def test_layouts(layout: str, dtype: torch.dtype, cache: dict[str, Any]) -> None:
    check_on_gpu(on_gpu([0, 300, 15, 4000], None, (8, 2, 96, 32), dtype=dtype, layout=layout, **cache))


@pytest.mark.gpu
@one_or_several
@pytest.mark.parametrize("options", LARGE_OPTIONS, ids="+".join)
@pytest.mark.parametrize(("shape", "dtype"), [((8, 2, 64, 16), FLOAT16), ((3, 3, 64, 16), FLOAT32)], ids=str)
def test_options_of_long_rows(
    options: dict[str, Any], shape: Shape, dtype: torch.dtype, max_query_len: int | None
) -> None:
    query_lens = None if max_query_len is None else [4, 1, 3, 4, 2, 4]
    inputs = on_gpu([0, 99, 100, 101, -1, 3000], query_lens, shape, dtype=dtype)
    check_on_gpu(inputs, max_query_len, **resolve_options(options, shape, "cuda"))


@pytest.mark.gpu
@CACHES
@one_or_several
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 50, "sinks": True}], ids=["plain", "window+sinks"]
)
def test_what_long_rows_stored_before(
    options: dict[str, Any], max_query_len: int | None, cache: dict[str, Any]
) -> None:
    inputs = on_gpu([0, 99, -1, 3000], None if max_query_len is None else [4, 1, 2, 3], **cache)
    as_bits(inputs.storage).copy_(as_bits(expected_storage(inputs)))
    options = resolve_options(options, (4, 2, 64, 16), "cuda")
    check_on_gpu(inputs, max_query_len, stored_before=True, **options)


@pytest.mark.gpu
@one_or_several
@pytest.mark.parametrize("num_rows", [1, 2, 3, 64, 255, 1024])
def test_many_rows(num_rows: int, max_query_len: int | None) -> None:
    lengths = torch.randint(-1, 600, (num_rows,)).tolist()
    lengths[0] = 4000
    query_lens = None if max_query_len is None else torch.randint(0, 4, (num_rows,)).tolist()
    inputs = on_gpu(lengths, query_lens)
    out = check_on_gpu(inputs, max_query_len, rows=sorted({0, num_rows // 2, num_rows - 1}))
    assert torch.equal(out[: len(inputs.query)].isnan().any(-1).any(-1), ~inputs.real_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [7, 33, 65, 130, 300])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 90, "alibi": True, "sinks": True}], ids=str)
def test_many_heads_that_share_nothing(num_rows: int, options: dict[str, Any]) -> None:
    """The more rows, the more heads has a program."""
    lengths = torch.randint(-1, 600, (num_rows,)).tolist()
    lengths[:3] = [4000, 0, 319]
    shape, rows = (12, 12, 64, 16), [0, 1, 2, num_rows // 2, num_rows - 1]
    check_on_gpu(on_gpu(lengths, None, shape), rows=rows, **resolve_options(options, shape, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 2, 64, 16), (8, 2, 128, 16)], ids=str)
def test_long_contexts(shape: Shape) -> None:
    for lengths in ([131_071], [131_071, 17, 65_000]):
        check_on_gpu(on_gpu(lengths, None, shape))
    check_on_gpu(on_gpu([131_064, 90_000], [8, 5], shape, **FLOAT8), 8)


@pytest.mark.gpu
@one_or_several
def test_addresses_past_two_to_the_31_elements(max_query_len: int | None) -> None:
    near = on_gpu([40, 100, 7], None if max_query_len is None else [3, 2, 1], (2, 2, 64, 16))
    far = moved_far_apart(near)
    assert same_bits(run(GPU, far, max_query_len), run(GPU, near, max_query_len))
    assert same_bits(far.key_cache.contiguous(), near.key_cache.contiguous())
    assert same_bits(far.value_cache.contiguous(), near.value_cache.contiguous())


def launch_of(
    inputs: PagedInputs, max_query_len: int | None, *, is_ordered: bool = False
) -> tuple[Callable[[], None], torch.Tensor]:
    """Return a launch into its own output, and that output."""
    out = torch.empty_like(inputs.query)

    def launch() -> None:
        plan = plan_of(inputs) if is_ordered else None
        decode(inputs, max_query_len=max_query_len, out=out, plan=plan)

    return launch, out


def plan_of(inputs: PagedInputs) -> Any:
    return kernels.plan_paged_decode(inputs.kv(), options=inputs.options())


def captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


@pytest.mark.gpu
@CACHES
@one_or_several
def test_one_captured_graph_serves_any_lengths(max_query_len: int | None, cache: dict[str, Any]) -> None:
    lengths = [[5000, 3, 900], [0, 4999, -1], [17, 17, 2500]]
    query_lens = [[4, 1, 2], [1, 4, 2], [0, 3, 4]] if max_query_len else [[1, 1, 1]] * 3
    steps = [
        on_gpu(*both, seed=seed, **cache) for seed, both in enumerate(zip(lengths, query_lens, strict=True))
    ]
    static = on_gpu([12_000, 0, 0], [10, 0, 0] if max_query_len else None, **cache)
    static.block_table = torch.zeros(3, 400, dtype=torch.int32, device="cuda")
    static.num_computed_tokens.zero_()
    launch, out = launch_of(static, max_query_len)
    graph = captured(launch)
    for step in (*steps, *reversed(steps)):
        stored = expected_storage(step)
        as_bits(static.storage)[: len(step.storage)].copy_(as_bits(step.storage))
        expected = decode(step, max_query_len=max_query_len)
        num_tokens = len(step.query)
        for name in ("query", "new_key", "new_value"):
            getattr(static, name)[:num_tokens].copy_(getattr(step, name))
        static.query_start_loc.copy_(step.query_start_loc)
        static.block_table[:, : step.block_table.shape[1]].copy_(step.block_table)
        static.num_computed_tokens.copy_(step.num_computed_tokens)
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out[:num_tokens], expected)
        assert out[num_tokens:].isnan().all()
        assert same_bits(static.storage[: len(step.storage)], stored)


@pytest.mark.gpu
@one_or_several
@pytest.mark.parametrize("shape", [(12, 12, 64, 16), (32, 8, 128, 16)], ids=str)
def test_a_thousand_runs_give_the_same_bits(shape: Shape, max_query_len: int | None) -> None:
    inputs = on_gpu([8000, 1, 350, 2047], None if max_query_len is None else [4, 2, 3, 4], shape)
    first = decode(inputs, max_query_len=max_query_len)
    launch, out = launch_of(inputs, max_query_len)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        launch()
        differences += (as_bits(out) != as_bits(first)).sum()
    assert int(differences) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 8, 128, 16), (12, 12, 64, 16)], ids=str)
def test_longest_rows_first_in_a_graph_give_the_same_bits(shape: Shape) -> None:
    assert plan_of(on_gpu([40])) is None
    inputs = on_gpu([(37 * row) % 1500 - 1 for row in range(200)], None, shape)
    order, lengths = plan_of(inputs), inputs.num_computed_tokens
    assert torch.equal(order.long(), torch.sort(-lengths.long(), stable=True).indices)
    check_on_gpu(inputs, plan=order)
    launch, out = launch_of(inputs, None, is_ordered=True)
    long, graph = lengths.clone(), captured(launch)
    launch_plain, expected = launch_of(inputs, None)
    # In another order, and no longer than before: the tables have blocks for so many.
    for lengths_now in (long, (long * 7 % 1500).minimum(long)):
        lengths.copy_(lengths_now)
        launch_plain()
        out.fill_(float("nan"))
        graph.replay()
        rows = lengths_now >= 0
        assert same_bits(out[rows], expected[rows]) and out[~rows].isnan().all()
    assert not torch.equal(plan_of(inputs), order)


@pytest.mark.gpu
def test_what_the_kernel_cannot_do_is_named_on_a_gpu() -> None:
    with pytest.raises(ShapeError, match=r"query: expected D of at most 512 on a GPU, got 520"):
        decode(on_gpu([3], None, (1, 1, 520, 16)))
    inputs = on_gpu([3])
    inputs.key_cache = inputs.key_cache.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(ShapeError, match=r"key_cache: expected an innermost stride of 1"):
        decode(inputs)


NUM_LAYERS = 3


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(12, 12, 64, 16), (8, 2, 128, 16)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[0, 40, 144, -1, 270, 17, 255, 100], [3000, 5, 700, -1], [9000], [-1, -1], [150] * 64],
    ids=lambda lengths: f"{len(lengths)} rows, first {lengths[0]}",
)
@pytest.mark.parametrize(
    ("rotates", "query_len"),
    [(False, 1), (True, 1), (False, 4)],
    ids=["plain", "rotates", "several tokens"],
)
def test_overlap_changes_no_bit(shape: Shape, lengths: list[int], rotates: bool, query_len: int) -> None:
    """Two graphs of the same layers, whose lengths change with every replay, over caches of their own."""
    one_by_one, overlapped = (
        _Layers(shape, lengths, rotates, query_len, overlap=overlap) for overlap in (False, True)
    )
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        one_by_one.graph.replay()
        overlapped.graph.replay()
        different += (as_bits(one_by_one.residual) != as_bits(overlapped.residual)).any()
    assert int(different) == 0
    assert same_bits(one_by_one.caches, overlapped.caches)
    assert one_by_one.residual.isfinite().all()
    assert not same_bits(one_by_one.residual, one_by_one.start)


class _Layers:
    """Products that let the kernel behind them start early, with decode attention between them."""

    def __init__(
        self, shape: Shape, lengths: list[int], rotates: bool, query_len: int, *, overlap: bool
    ) -> None:
        num_query_heads, num_kv_heads, head_size, _ = shape
        self._heads = [num_query_heads, num_kv_heads, num_kv_heads]
        self._options: dict[str, Any] = {"overlap": overlap}
        if rotates:
            self._options["rotation"] = random_rotation(
                head_size, norms=True, num_positions=max(lengths) + 2, dtype=FLOAT16, device="cuda"
            )
        if query_len > 1:
            self._options["max_query_len"] = query_len
        query_lens = None if query_len == 1 else [query_len] * len(lengths)
        self._inputs = on_gpu(
            [n + 1 if n >= 0 else n for n in lengths], query_lens, shape, layout="contiguous"
        )
        # Padding rows, too, go through the products: no NaN anywhere.
        self.caches = self._inputs.storage.nan_to_num().repeat(NUM_LAYERS, 1, 1, 1, 1, 1)
        self._lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self._parity = torch.zeros(1, dtype=torch.int32, device="cuda")
        width = num_query_heads * head_size
        torch.manual_seed(1)
        self._layers = [
            (_random_layer(sum(self._heads) * head_size, width), _random_layer(width, width))
            for _ in range(NUM_LAYERS)
        ]
        self.start = torch.randn(len(lengths) * query_len, width, dtype=FLOAT16, device="cuda")
        self.residual, self._attended = self.start.clone(), torch.zeros_like(self._inputs.query)
        self.graph = captured(self._run)

    def _run(self) -> None:
        # Launched in the ordinary way: the lengths are complete before anything behind starts.
        self._parity.bitwise_xor_(1)
        torch.add(self._lengths, self._parity * (self._lengths >= 0), out=self._inputs.num_computed_tokens)
        torch.mul(self.start, 1, out=self.residual)
        for (qkv_layer, out_layer), (key_cache, value_cache) in zip(self._layers, self.caches, strict=True):
            qkv = small_batch_linear(self.residual, qkv_layer)
            query, key, value = qkv.view(len(qkv), sum(self._heads), -1).split(self._heads, dim=1)
            step = replace(
                self._inputs, query=query, new_key=key, new_value=value, key_cache=key_cache, value_cache=value_cache
            )  # fmt: skip
            decode(step, out=self._attended, **self._options)
            small_batch_linear(
                self._attended.flatten(1), out_layer, residual=self.residual, out=self.residual
            )


def _random_layer(num_columns: int, depth: int) -> PackedLinear:
    weight, bias = torch.randn(num_columns, depth + 1, device="cuda").half().split([depth, 1], dim=1)
    return pack_linear(weight.contiguous() * depth**-0.5, bias.flatten().contiguous())
