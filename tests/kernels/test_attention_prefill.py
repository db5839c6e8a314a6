"""Prefill attention: right values for any chunking, exactly the chunk's slots written, nothing forbidden read."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import plan_paged_prefill
from rose_backend.kernels.arguments import CACHE_DTYPE
from rose_backend.kernels.attention import paged_prefill as gpu
from rose_backend.kernels.attention import reference
from tests.support.attention_calls import decode, prefill
from tests.support.implementations import DTYPES, GPU, INTERPRETER, REFERENCE, Implementation, kernels_only
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
    resolve_options,
    same_bits,
    without_passed_blocks,
)

FLOAT32, FLOAT16, BFLOAT16 = DTYPES
COMPUTED, QUERY_LENS = [0, 5, -1, 13, 0, 8, 21], [1, 9, 3, 19, 0, 8, 2]
LOOPS = ("two loops", "one loop", "wide tiles", "descriptors")
"""How the kernel reads, in the interpreter; a GPU chooses by lengths and sizes."""


def prefill_in_small_tiles(inputs: PagedInputs, loops: str, **options: Any) -> torch.Tensor:
    is_wide = loops == "wide tiles"
    tuning = gpu.PrefillTuning(
        query_tile=4 if is_wide else 8,
        tile=8 if is_wide else 4,
        num_warps=4,
        num_stages=1,
        by_descriptor=loops == "descriptors",
        split=loops not in ("one loop", "wide tiles"),
    )
    with mock.patch.object(gpu, "prefill_tuning", lambda *sizes, **facts: tuning):
        return prefill(inputs, **options)


def run(call: Implementation, inputs: PagedInputs, loops: str = "two loops", **options: Any) -> torch.Tensor:
    if call is INTERPRETER:
        return call(prefill_in_small_tiles, inputs, loops, **options)
    return call(prefill, inputs, **options)


def check(
    call: Implementation,
    inputs: PagedInputs,
    loops: str = "two loops",
    rows: list[int] | None = None,
    by_row: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attend and compare output and the whole cache."""
    stored = expected_storage(inputs)
    out = run(call, inputs, loops, **options)
    of_all = {name: options[name] for name in OPTION_NAMES & options.keys()}
    check_attention(inputs, out, rows, by_row=by_row, **of_all)
    assert same_bits(inputs.storage, stored)
    return out


def store(inputs: PagedInputs) -> None:
    as_bits(inputs.storage).copy_(as_bits(expected_storage(inputs)))


# Without bfloat16 in the interpreter, which cannot multiply its matrices.
CASES: list[tuple[Shape, torch.dtype, str, str]] = [
    ((2, 2, 16, 4), FLOAT32, "contiguous", "two loops"),
    ((2, 1, 40, 6), FLOAT32, "vllm", "one loop"),
    ((2, 1, 24, 8), FLOAT16, "layer_of_stack", "two loops"),
    ((3, 1, 32, 16), FLOAT16, "vllm", "one loop"),
    ((3, 1, 32, 16), FLOAT16, "vllm", "wide tiles"),
    ((2, 1, 40, 6), FLOAT32, "vllm", "wide tiles"),
    ((4, 2, 16, 2), FLOAT16, "vllm", "descriptors"),
    ((2, 1, 512, 16), FLOAT16, "vllm", "two loops"),
    ((2, 1, 392, 16), FLOAT32, "heads_first", "one loop"),
    ((8, 2, 16, 8), BFLOAT16, "contiguous", "two loops"),
    ((5, 1, 16, 8), BFLOAT16, "layer_of_stack", "two loops"),
    ((2, 2, 16, 8), BFLOAT16, "vllm", "two loops"),
]


@pytest.mark.parametrize(("shape", "dtype", "layout", "loops"), CASES, ids=str)
def test_values_and_stores(
    implementation: Implementation, shape: Shape, dtype: torch.dtype, layout: str, loops: str
) -> None:
    if implementation is INTERPRETER and dtype == BFLOAT16:
        pytest.skip("the interpreter cannot multiply matrices of bfloat16")
    options = {"dtype": dtype, "layout": layout, "device": implementation.device}
    check(implementation, make_inputs(COMPUTED, QUERY_LENS, shape, **options), loops)


def check_before_and_after_the_store(
    call: Implementation, inputs: PagedInputs, loops: str = "two loops", **options: Any
) -> None:
    """Attend a chunk that is stored on the way, and again what is in the cache now."""
    fused = check(call, inputs, loops, **options)
    separate = check(call, inputs, loops, stored_before=True, **options)
    tolerance = max(1e-6, torch.finfo(fused.dtype).eps)
    torch.testing.assert_close(separate, fused, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("options", [*OPTIONS, {"sliding_window": 6}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(implementation: Implementation, dtype: torch.dtype, options: dict[str, Any]) -> None:
    if implementation is INTERPRETER and dtype == BFLOAT16:
        pytest.skip("the interpreter cannot multiply matrices of bfloat16")
    shape = (4, 2, 16, 8) if implementation is REFERENCE else (2, 2, 16, 4)
    inputs = make_inputs([0, 9], [10, 13], shape, dtype=dtype, layout="vllm", device=implementation.device)
    options = resolve_options(options, shape, implementation.device)
    loops = "descriptors" if dtype == FLOAT16 else "two loops"
    check_before_and_after_the_store(implementation, inputs, loops, **options)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@kernels_only
def test_any_scale(implementation: Implementation, scale: float) -> None:
    for dtype in DTYPES if implementation is GPU else (FLOAT32,):
        query_lens = [130, 40] if implementation is GPU else [10, 13]
        inputs = make_inputs([0, 9], query_lens, dtype=dtype, device=implementation.device)
        check(implementation, inputs, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", [(None, None), (0.5, 2.0), (0.02, 3.0)], ids=str)
def test_float8_caches(
    implementation: Implementation, dtype: torch.dtype, scales: tuple[float | None, float | None]
) -> None:
    if implementation is INTERPRETER and (dtype == BFLOAT16 or scales[0] == 0.02):
        pytest.skip("the interpreter cannot multiply matrices of bfloat16, and rounds wrongly to float8")
    cache = {"cache_dtype": CACHE_DTYPE, "key_scale": scales[0], "value_scale": scales[1]}
    for layout in CACHE_LAYOUTS if implementation is REFERENCE else ("contiguous",):
        inputs = make_inputs(
            COMPUTED, QUERY_LENS, dtype=dtype, layout=layout, device=implementation.device, **cache
        )
        if implementation is INTERPRETER:
            for new in (inputs.new_key, inputs.new_value):
                new.copy_(2.0 ** torch.randint(-3, 2, new.shape))
        inputs.new_key[0] = 2000.0  # Is limited.
        sinks = torch.tensor([2.0, -1.0, 0.0, 5.0], device=implementation.device)
        for options in ({}, {"sliding_window": 15, "sinks": sinks}):
            check(implementation, inputs, **options)
            check(implementation, inputs, stored_before=True, **options)


def test_caches_of_different_strides(implementation: Implementation) -> None:
    inputs = make_inputs([9, 4], [10, 5], (2, 2, 16, 4), device=implementation.device)
    stored, num_blocks = expected_storage(inputs), len(inputs.value_cache)
    inputs.value_cache = inputs.value_cache.transpose(0, 2).contiguous().transpose(0, 2)
    check_attention(inputs, run(implementation, inputs))
    assert same_bits(inputs.key_cache, stored[0, :num_blocks])
    assert same_bits(inputs.value_cache.contiguous(), stored[1, :num_blocks])


def loops_of(call: Implementation) -> tuple[str, ...]:
    return LOOPS if call is INTERPRETER else LOOPS[:1]


@pytest.mark.parametrize(("computed", "query_lens"), [([4], [9]), ([4, -1, 3, 0], [5, 4, 0, 6])], ids=str)
def test_tokens_of_no_row_are_left_alone(
    implementation: Implementation, computed: list[int], query_lens: list[int]
) -> None:
    for loops in loops_of(implementation):
        inputs = make_inputs(computed, query_lens, dtype=FLOAT16, device=implementation.device)
        padded, stored = replace(inputs), expected_storage(inputs)
        for name in ("query", "new_key", "new_value"):
            tensor = getattr(inputs, name)
            setattr(padded, name, torch.cat((tensor, torch.full_like(tensor[:3], float("nan")))))
        out = run(implementation, padded, loops)
        check_attention(inputs, out)
        assert out[len(inputs.query) :].isnan().all()
        assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize(("computed", "query_lens"), [([], []), ([-1, 3], [4, 0])], ids=str)
def test_nothing_to_do(implementation: Implementation, computed: list[int], query_lens: list[int]) -> None:
    inputs = make_inputs(computed, query_lens, device=implementation.device)
    before = inputs.storage.clone()
    assert run(implementation, inputs).isnan().all()
    assert same_bits(inputs.storage, before)


@pytest.mark.parametrize("block_size", [4, 6, 16])
@pytest.mark.parametrize("window", [2, 7, 17])
def test_blocks_that_a_window_has_passed_are_not_read(
    implementation: Implementation, window: int, block_size: int
) -> None:
    for loops in loops_of(implementation)[:3]:
        inputs = make_inputs(
            [0, 45, 30, -1, 64], [3, 9, 17, 2, 1], (2, 2, 16, block_size), device=implementation.device
        )
        assert without_passed_blocks(inputs, window) > 3
        out = run(implementation, inputs, loops, sliding_window=window)
        check_attention(inputs, out, sliding_window=window)


# How plain torch attends, and what the public function refuses.


def test_query_tiles_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tiled = (make_inputs([0, 9, 30], [20, 21, 7]) for _ in range(2))
    expected = check(REFERENCE, whole, sliding_window=10)
    monkeypatch.setattr(reference, "MASKED_QUERY_TILE", 4)
    actual = check(REFERENCE, tiled, sliding_window=10)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_single_tokens_equal_decode() -> None:
    one, other = make_inputs([0, 7, 8, 30]), make_inputs([0, 7, 8, 30])
    torch.testing.assert_close(prefill(one), decode(other), rtol=0, atol=1e-6)
    assert same_bits(one.storage, other.storage)


def test_one_plan_serves_several_calls() -> None:
    inputs, again = (make_inputs(COMPUTED, QUERY_LENS) for _ in range(2))
    options, num_tokens = inputs.options(), len(inputs.query)
    plan = plan_paged_prefill(inputs.kv(1), options=options, num_step_tokens=num_tokens)
    assert same_bits(check(REFERENCE, inputs, plan=plan), check(REFERENCE, again, plan=plan))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": torch.zeros(2).int()}, r"query_start_loc: expected R\+1=3, got 2"),
        ({"query_start_loc": None}, r"query_start_loc: expected a tensor for prefill attention, got None"),
        ({"new_key": None}, r"new_key: expected a tensor because new_value is given, got None"),
        ({"new_value": torch.zeros(7, 2, 16)}, r"new_value: expected T=9, got 7"),
        ({"key_cache": torch.zeros(6, 8, 2, 12)}, r"key_cache: expected D=16, got 12"),
        ({"key_scale": torch.ones(1)}, r"key_scale: expected None with caches of torch.float32, got a tensor"),
        (
            {"value_cache": torch.zeros(6, 8, 2, 16).to(CACHE_DTYPE)},
            r"value_cache: expected dtype torch.float32 as key_cache, got torch.float8_e4m3fn",
        ),
        ({"sinks": torch.zeros(3)}, "sinks: expected HQ=4, got 3"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes: expected HQ=4, got 3"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_mismatches_are_named(change: dict[str, Any], message: str) -> None:
    inputs, options = make_inputs([3, 8], [4, 5]), dict(change)
    for name in change.keys() & vars(inputs).keys():
        setattr(inputs, name, options.pop(name))
    with pytest.raises(ShapeError, match=message):
        prefill(inputs, **options)


# On a GPU at its own sizes: every shape, chunks, far addresses, repetition.

# Padding, no tokens, one token, tiles that end with a chunk or the context and tiles that do not.
LARGE_COMPUTED, LARGE_QUERY_LENS = [0, 5, -1, 333, 64, 90, 0, 128], [200, 1, 40, 329, 128, 0, 165, 256]
CACHES = pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
check_on_gpu = functools.partial(check, GPU, by_row=True)


def on_gpu(
    computed: list[int], query_lens: list[int], shape: Shape = (4, 2, 64, 16), **options: Any
) -> PagedInputs:
    return make_inputs(
        computed, query_lens, shape, **{"dtype": FLOAT16, "layout": "vllm", "device": "cuda", **options}
    )


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape: Shape, dtype: torch.dtype, cache: dict[str, Any]) -> None:
    check_on_gpu(on_gpu(LARGE_COMPUTED, LARGE_QUERY_LENS, shape, dtype=dtype, **cache))


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_layouts(layout: str, cache: dict[str, Any]) -> None:
    check_on_gpu(on_gpu(LARGE_COMPUTED, LARGE_QUERY_LENS, (8, 2, 96, 32), layout=layout, **cache))


@pytest.mark.gpu
@pytest.mark.parametrize("options", LARGE_OPTIONS, ids="+".join)
@pytest.mark.parametrize(
    ("shape", "dtype", "cache"),
    [((3, 3, 64, 16), FLOAT16, {}), ((8, 2, 128, 16), BFLOAT16, FLOAT8), ((8, 2, 64, 16), FLOAT32, {})],
    ids=str,
)
def test_options_of_long_rows(
    options: dict[str, Any], shape: Shape, dtype: torch.dtype, cache: dict[str, Any]
) -> None:
    options = resolve_options(options, shape, "cuda")
    inputs = on_gpu([0, 500, 90], [300, 170, 11], shape, dtype=dtype, **cache)
    check_on_gpu(inputs, **options)
    # The chunk is in the cache now.
    check_on_gpu(inputs, stored_before=True, **options)


@pytest.mark.gpu
@CACHES
def test_few_tokens_per_row(cache: dict[str, Any]) -> None:
    inputs = on_gpu([1000, 16, 0, 40] * 16, [1, 3, 8, 5] * 16, dtype=BFLOAT16, **cache)
    check_on_gpu(inputs, rows=[0, 1, 2, 3, 63])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 33, 300])
def test_many_rows(num_rows: int) -> None:
    computed = torch.randint(-1, 300, (num_rows,)).tolist()
    query_lens = torch.randint(0, 200, (num_rows,)).tolist()
    computed[0], query_lens[0] = 0, 900
    inputs = on_gpu(computed, query_lens)
    out = check_on_gpu(inputs, rows=sorted({0, num_rows // 2, num_rows - 1}))
    assert torch.equal(out.isnan().any(-1).any(-1), ~inputs.real_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [[5, 60], [105, 230]], ids=["short", "long"])
def test_tokens_of_no_row_change_nothing(query_lens: list[int]) -> None:
    step, padded = (on_gpu([4, 100], query_lens, (4, 2, 128, 16)) for _ in range(2))
    for name in ("query", "new_key", "new_value"):
        tensor = getattr(step, name)
        setattr(padded, name, torch.cat((tensor, torch.full_like(tensor[:64], float("nan")))))
    out, num_tokens = prefill(padded), sum(query_lens)
    assert same_bits(out[:num_tokens], prefill(step))
    assert out[num_tokens:].isnan().all()
    assert same_bits(padded.storage, step.storage)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [100, 200])
def test_other_requests_values_do_not_leak(num_tokens: int) -> None:
    step, spoiled = (on_gpu([0, 0], [num_tokens] * 2, (4, 2, 128, 16)) for _ in range(2))
    spoiled.new_value[num_tokens:] = float("nan")
    spoiled.new_key[num_tokens:] = float("inf")
    assert same_bits(*(prefill(each)[:num_tokens].contiguous() for each in (spoiled, step)))


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("shape", [(2, 2, 64, 16), (8, 2, 128, 16)], ids=str)
def test_long_contexts(shape: Shape, cache: dict[str, Any]) -> None:
    check_on_gpu(on_gpu([130_072, 7], [1000, 300], shape, **cache))


@pytest.mark.gpu
@CACHES
def test_addresses_past_two_to_the_31_elements(cache: dict[str, Any]) -> None:
    near = on_gpu([40, 0, 130], [70, 30, 200], (2, 2, 64, 16), **cache)
    far = moved_far_apart(near)
    assert torch.equal(prefill(far), prefill(near))
    assert same_bits(far.key_cache.contiguous(), near.key_cache.contiguous())
    assert same_bits(far.value_cache.contiguous(), near.value_cache.contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["heads first", "odd steps", "odd start"])
def test_any_strides_of_the_projections(kind: str) -> None:
    inputs = on_gpu(LARGE_COMPUTED, LARGE_QUERY_LENS, (8, 2, 128, 16))
    for name in ("query", "new_key", "new_value"):
        tensor = getattr(inputs, name)
        if kind == "heads first":
            view = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        else:
            wide = torch.zeros(*tensor.shape[:2], 131 if kind == "odd steps" else 136, device="cuda").half()
            view = wide[..., 3:].narrow(-1, 0, 128).copy_(tensor)
        setattr(inputs, name, view)
    check_on_gpu(inputs)


@pytest.mark.gpu
def test_projections_past_two_to_the_31_elements() -> None:
    near = on_gpu([0, 40], [150, 70], (2, 1, 64, 16))
    token_stride = (2**31 + 2**20) // 220 // 16 * 16
    storage = torch.empty(220 * token_stride, dtype=FLOAT16, device="cuda")
    far = replace(near)
    for name, offset in (("query", 0), ("new_key", 128), ("new_value", 192)):
        tensor = getattr(near, name)
        view = storage.as_strided(tensor.shape, (token_stride, 64, 1), offset)
        setattr(far, name, view.copy_(tensor))
    assert torch.equal(prefill(far), prefill(near))


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("shape", [(12, 12, 64, 16), (32, 8, 128, 16)], ids=str)
def test_runs_give_the_same_bits(shape: Shape, cache: dict[str, Any]) -> None:
    inputs = on_gpu([8000, 0, 350], [700, 1030, 200], shape, **cache)
    first, out = prefill(inputs), torch.empty_like(inputs.query)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        prefill(inputs, out=out)
        differences += (as_bits(out) != as_bits(first)).sum()
    assert int(differences) == 0


@pytest.mark.gpu
@CACHES
def test_chunks_and_prefix_hits_do_not_change_a_result(cache: dict[str, Any]) -> None:
    whole = on_gpu([0], [700], (8, 2, 128, 16), dtype=BFLOAT16, **cache)
    expected, parts = prefill(whole), []
    as_bits(whole.storage).fill_(0)
    for start, stop in ((0, 256), (256, 300), (300, 700)):
        tokens = slice(start, stop)
        chunk = replace(
            whole,
            query=whole.query[tokens],
            new_key=whole.new_key[tokens],
            new_value=whole.new_value[tokens],
            query_start_loc=torch.tensor([0, stop - start], device="cuda").int(),
            num_computed_tokens=torch.tensor([start], device="cuda").int(),
        )
        parts.append(prefill(chunk))
    # Not bit for bit: tiles begin elsewhere. One unit in the last place of bfloat16 at 1 is 2^-7.
    torch.testing.assert_close(torch.cat(parts), expected, rtol=2**-7, atol=2**-9)


@pytest.mark.gpu
def test_what_the_kernel_cannot_do_is_named() -> None:
    inputs = on_gpu([40], [1])
    assert plan_paged_prefill(inputs.kv(1), options=inputs.options(), num_step_tokens=1) is None
    with pytest.raises(ShapeError, match=r"query: expected one of .* on a GPU, got torch.float64"):
        prefill(on_gpu([3], [1], dtype=torch.float64))
    inputs.key_cache = inputs.key_cache.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(ShapeError, match=r"key_cache: expected an innermost stride of 1"):
        prefill(inputs)
