"""Prefill attention and the store of K/V on a CUDA device: every shape, chunks, far addresses, repetition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import write_kv
from tests.support.attention_calls import paged_prefill, plan_paged_prefill
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

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Padding, no tokens, one token, tiles that end with a chunk or the context and tiles that do not.
LENGTHS, QUERY_LENS = [0, 5, -1, 333, 64, 90, 0, 128], [200, 1, 40, 329, 128, 0, 165, 256]


def check(step: GpuStep, rows: list[int] | None = None, **options: Any) -> torch.Tensor:
    """Attend and compare output and the whole cache."""
    stored = step.expected_storage()
    out = step.prefill(**options)
    step.check(out, rows, **options)
    assert same_bits(step.storage, stored)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["same dtype", "float8"])
def test_every_shape(kind: str, shape: Shape, dtype: torch.dtype) -> None:
    check(make_step(LENGTHS, QUERY_LENS, shape=shape, dtype=dtype, **(FLOAT8 if kind == "float8" else {})))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
def test_layouts(layout: str, cache: dict[str, Any]) -> None:
    check(make_step(LENGTHS, QUERY_LENS, shape=(8, 2, 96, 32), layout=layout, **cache))


@pytest.mark.parametrize("options", OPTIONS, ids="+".join)
@pytest.mark.parametrize(
    ("shape", "dtype", "cache"),
    [
        ((3, 3, 64, 16), torch.float16, {}),
        ((8, 2, 128, 16), torch.bfloat16, FLOAT8),
        ((8, 2, 64, 16), torch.float32, {}),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], shape: Shape, dtype: torch.dtype, cache: dict[str, Any]) -> None:
    options = resolve_options(options, shape[0])
    step = make_step([0, 500, 90], [300, 170, 11], shape=shape, dtype=dtype, **cache)
    check(step, **options)
    stored = step.storage.clone()
    # The chunk is in the cache now.
    step.check(step.prefill(stored_before=True, **options), **options)
    assert same_bits(step.storage, stored)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuStep, "scale", scale)
    check(make_step([0, 77], [130, 40], dtype=dtype))


@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
def test_few_tokens_per_row(cache: dict[str, Any]) -> None:
    step = make_step([1000, 16, 0, 40] * 16, [1, 3, 8, 5] * 16, dtype=torch.bfloat16, **cache)
    check(step, rows=[0, 1, 2, 3, 63])


@pytest.mark.parametrize("num_rows", [1, 2, 33, 300])
def test_many_rows(num_rows: int) -> None:
    lengths = torch.randint(-1, 300, (num_rows,)).tolist()
    query_lens = torch.randint(0, 200, (num_rows,)).tolist()
    lengths[0], query_lens[0] = 0, 900
    step = make_step(lengths, query_lens)
    out = check(step, rows=sorted({0, num_rows // 2, num_rows - 1}))
    assert torch.equal(out.isnan().any(-1).any(-1), ~step.real_tokens())


@pytest.mark.parametrize("query_lens", [[5, 60], [105, 230]], ids=["short", "long"])
def test_tokens_of_no_row_are_left_alone(query_lens: list[int]) -> None:
    step, padded = (make_step([4, 100], query_lens, shape=(4, 2, 128, 16)) for _ in range(2))
    for name in ("query", "new_key", "new_value"):
        tensor = getattr(step, name)
        setattr(padded, name, torch.cat((tensor, torch.full_like(tensor[:64], float("nan")))))
    out = padded.prefill()
    num_tokens = sum(query_lens)
    assert same_bits(out[:num_tokens], step.prefill())
    assert out[num_tokens:].isnan().all()
    assert same_bits(padded.storage, step.storage)


@pytest.mark.parametrize("num_tokens", [100, 200])
def test_other_requests_values_do_not_leak(num_tokens: int) -> None:
    step, spoiled = (make_step([0, 0], [num_tokens] * 2, shape=(4, 2, 128, 16)) for _ in range(2))
    spoiled.new_value[num_tokens:] = float("nan")
    spoiled.new_key[num_tokens:] = float("inf")
    out, expected = (case.prefill()[:num_tokens].contiguous() for case in (spoiled, step))
    assert same_bits(out, expected)


def test_empty_batches() -> None:
    assert make_step([], []).prefill().shape == (0, 4, 64)
    nothing = make_step([-1, 3], [4, 0])
    before = nothing.storage.clone()
    assert nothing.prefill().isnan().all()
    assert same_bits(nothing.storage, before)


@pytest.mark.parametrize("shape", [(2, 2, 64, 16), (8, 2, 128, 16)], ids=str)
@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
def test_long_contexts(shape: Shape, cache: dict[str, Any]) -> None:
    check(make_step([130_072, 7], [1000, 300], shape=shape, **cache))


@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
def test_addresses_past_two_to_the_31_elements(cache: dict[str, Any]) -> None:
    near = make_step([40, 0, 130], [70, 30, 200], shape=(2, 2, 64, 16), **cache)
    num_blocks, _, num_kv_heads, head_size = near.key_cache.shape
    stride = (2**31 + 2**20) // num_blocks // 16 * 16
    # Far enough that every address needs 64 bits, and the last block lies past 2^31 elements by itself.
    storage = torch.empty(2 * stride * num_blocks, dtype=near.key_cache.dtype, device="cuda")
    strides = (2 * stride, 2 * num_kv_heads * head_size, head_size, 1)
    caches = [
        storage.as_strided(near.key_cache.shape, strides, offset) for offset in (0, num_kv_heads * head_size)
    ]
    as_bits(caches[0]).copy_(as_bits(near.key_cache))
    as_bits(caches[1]).copy_(as_bits(near.value_cache))
    far = replace(near, key_cache=caches[0], value_cache=caches[1])
    assert torch.equal(far.prefill(), near.prefill())
    assert same_bits(far.key_cache.contiguous(), near.key_cache.contiguous())
    assert same_bits(far.value_cache.contiguous(), near.value_cache.contiguous())


@pytest.mark.parametrize("kind", ["heads first", "odd steps", "odd start"])
def test_any_strides_of_the_projections(kind: str) -> None:
    step = make_step(LENGTHS, QUERY_LENS, shape=(8, 2, 128, 16))
    for name in ("query", "new_key", "new_value"):
        tensor = getattr(step, name)
        if kind == "heads first":
            view = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        else:
            wide = torch.zeros(*tensor.shape[:2], 131 if kind == "odd steps" else 136, device="cuda").half()
            view = wide[..., 3:].narrow(-1, 0, 128).copy_(tensor)
        setattr(step, name, view)
    check(step)


def test_projections_past_two_to_the_31_elements() -> None:
    near = make_step([0, 40], [150, 70], shape=(2, 1, 64, 16))
    token_stride = (2**31 + 2**20) // 220 // 16 * 16
    storage = torch.empty(220 * token_stride, dtype=torch.float16, device="cuda")
    far = replace(near)
    for name, offset in (("query", 0), ("new_key", 128), ("new_value", 192)):
        tensor = getattr(near, name)
        view = storage.as_strided(tensor.shape, (token_stride, 64, 1), offset)
        setattr(far, name, view.copy_(tensor))
    assert torch.equal(far.prefill(), near.prefill())
    assert same_bits(far.storage, near.storage)


@pytest.mark.parametrize("shape", [(12, 12, 64, 16), (32, 8, 128, 16)], ids=str)
@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
def test_runs_give_the_same_bits(shape: Shape, cache: dict[str, Any]) -> None:
    step = make_step([8000, 0, 350], [700, 1030, 200], shape=shape, **cache)
    first = step.prefill()
    out, lengths = torch.empty_like(first), step.num_computed_tokens
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        paged_prefill(
            step.query,
            step.new_key,
            step.new_value,
            step.key_cache,
            step.value_cache,
            step.block_table,
            step.query_start_loc,
            lengths,
            options=step.options(),
            out=out,
        )
        differences += (out.view(torch.int16) != first.view(torch.int16)).sum()
    assert int(differences) == 0


@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
def test_chunks_and_prefix_hits_do_not_change_a_result(cache: dict[str, Any]) -> None:
    whole = make_step([0], [700], shape=(8, 2, 128, 16), dtype=torch.bfloat16, **cache)
    expected, parts = whole.prefill(), []
    as_bits(whole.storage).fill_(0)
    for start, stop in ((0, 256), (256, 300), (300, 700)):
        tokens = slice(start, stop)
        chunk = replace(
            whole,
            query=whole.query[tokens],
            new_key=whole.new_key[tokens],
            new_value=whole.new_value[tokens],
            query_start_loc=torch.tensor([0, stop - start], device="cuda").int(),
            lengths=[start],
            query_lens=[stop - start],
        )
        parts.append(chunk.prefill())
    # Not bit for bit: tiles begin elsewhere. One unit in the last place of bfloat16 at 1 is 2^-7.
    torch.testing.assert_close(torch.cat(parts), expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["same dtype", "float8"])
def test_write_kv(cache: dict[str, Any]) -> None:
    step = make_step([5, -1, 31, 1000], [40, 3, 1, 200], shape=(2, 2, 80, 16), **cache)
    stored = step.expected_storage()
    ids, offsets = step.slots()
    slots = torch.full((244,), -1, device="cuda")
    slots[step.real_tokens()] = ids * 16 + offsets
    write_kv(
        step.new_key,
        step.new_value,
        step.key_cache,
        step.value_cache,
        slots,
        key_scale=step.key_scale,
        value_scale=step.value_scale,
    )
    assert same_bits(step.storage, stored)


def test_no_plan_is_made() -> None:
    step = make_step([40])
    plan = plan_paged_prefill(
        step.block_table,
        step.query_start_loc,
        step.num_computed_tokens,
        step.key_cache,
        options=step.options(),
        num_step_tokens=1,
    )
    assert plan is None


def test_what_the_kernel_cannot_do_is_named() -> None:
    with pytest.raises(ShapeError, match=r"query: expected one of .* on a GPU, got torch.float64"):
        make_step([3], dtype=torch.float64).prefill()
    step = make_step([3])
    step.key_cache = step.key_cache.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(ShapeError, match=r"key_cache: expected an innermost stride of 1"):
        step.prefill()
