"""Slots are written exactly, skipped tokens and all other slots stay as they are."""

from __future__ import annotations

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import write_kv
from rose_backend.kernels.tensor_checks import CACHE_DTYPE
from tests.support.paged_inputs import (
    CACHE_LAYOUTS,
    PagedInputs,
    build_paged_inputs,
    expected_storage,
    same_bits,
)


def run(inputs: PagedInputs) -> None:
    write_kv(
        inputs.new_key,
        inputs.new_value,
        inputs.key_cache,
        inputs.value_cache,
        inputs.slot_mapping,
        key_scale=inputs.key_scale,
        value_scale=inputs.value_scale,
    )


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_exactly_the_named_slots(layout: str, dtype: torch.dtype) -> None:
    inputs = build_paged_inputs([3, -1, 8, 15], [2, 3, 7, 1], layout=layout, dtype=dtype)
    assert (inputs.slot_mapping < 0).sum() == 3
    stored = expected_storage(inputs)
    assert not same_bits(stored, inputs.storage)
    run(inputs)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("scales", [(None, None), (0.02, 3.0)], ids=str)
def test_float8_caches(layout: str, scales: tuple[float | None, float | None]) -> None:
    inputs = build_paged_inputs(
        [3, -1, 8],
        [2, 3, 7],
        layout=layout,
        dtype=torch.float16,
        cache_dtype=CACHE_DTYPE,
        key_scale=scales[0],
        value_scale=scales[1],
    )
    inputs.new_value[0] = 1e4  # Is limited.
    stored = expected_storage(inputs)
    run(inputs)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_nothing_to_write(num_tokens: int) -> None:
    inputs = build_paged_inputs([-1] * num_tokens)
    before = inputs.storage.clone()
    run(inputs)
    assert same_bits(inputs.storage, before)


def test_mismatches_are_named() -> None:
    inputs = build_paged_inputs([3, 8])
    with pytest.raises(ShapeError, match=r"slot_mapping: expected T=2, got 3"):
        write_kv(
            inputs.new_key,
            inputs.new_value,
            inputs.key_cache,
            inputs.value_cache,
            torch.zeros(3, dtype=torch.int64),
        )
    inputs.new_key = inputs.new_key.half()
    with pytest.raises(
        ShapeError, match=r"new_value: expected dtype torch.float16 as new_key, got torch.float32"
    ):
        run(inputs)
    inputs.new_value = inputs.new_value.half()
    with pytest.raises(ShapeError, match=r"key_cache: expected dtype torch.float16 as new_key, or torch.flo"):
        run(inputs)
    inputs = build_paged_inputs([3])
    inputs.value_scale = torch.ones(1)
    with pytest.raises(ShapeError, match=r"value_scale: expected None with caches of torch.float32"):
        run(inputs)
