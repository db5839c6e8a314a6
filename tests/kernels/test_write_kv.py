"""Slots are written exactly, skipped tokens and all other slots stay as they are."""

from __future__ import annotations

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import write_kv
from tests.support.paged_inputs import CACHE_LAYOUTS, build_paged_inputs, expected_storage, same_bits


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_exactly_the_named_slots(layout: str, dtype: torch.dtype) -> None:
    inputs = build_paged_inputs([3, -1, 8, 15], [2, 3, 7, 1], layout=layout, dtype=dtype)
    assert (inputs.slot_mapping < 0).sum() == 3
    stored = expected_storage(inputs)
    assert not same_bits(stored, inputs.storage)
    write_kv(inputs.new_key, inputs.new_value, inputs.key_cache, inputs.value_cache, inputs.slot_mapping)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_nothing_to_write(num_tokens: int) -> None:
    inputs = build_paged_inputs([-1] * num_tokens)
    before = inputs.storage.clone()
    write_kv(inputs.new_key, inputs.new_value, inputs.key_cache, inputs.value_cache, inputs.slot_mapping)
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
    with pytest.raises(
        ShapeError, match=r"new_key: expected dtype torch.float32 as key_cache, got torch.float16"
    ):
        write_kv(
            inputs.new_key.half(), inputs.new_value, inputs.key_cache, inputs.value_cache, inputs.slot_mapping
        )
