"""The Triton kernel that stores keys and values: exactly the named slots change, bit for bit."""

from __future__ import annotations

import pytest
import torch

from rose_backend.kernels.kv import write_kv as gpu
from rose_backend.kernels.tensor_checks import CACHE_DTYPE
from tests.support.aot import compile_launch, compiles, record_launches
from tests.support.interpreter import run_interpreted
from tests.support.paged_inputs import (
    CACHE_LAYOUTS,
    PagedInputs,
    build_paged_inputs,
    expected_storage,
    same_bits,
)


def launch(inputs: PagedInputs) -> None:
    gpu.write_kv(
        inputs.new_key,
        inputs.new_value,
        inputs.key_cache,
        inputs.value_cache,
        inputs.slot_mapping,
        key_scale=inputs.key_scale,
        value_scale=inputs.value_scale,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_stores(layout: str, dtype: torch.dtype) -> None:
    inputs = build_paged_inputs([0, 5, -1, 13], [1, 9, 3, 19], head_size=24, dtype=dtype, layout=layout)
    # Every innermost stride may be another than 1.
    inputs.new_key = inputs.new_key.transpose(0, 2).contiguous().transpose(0, 2)
    stored = expected_storage(inputs)
    run_interpreted(launch, inputs)
    assert same_bits(inputs.storage, stored)


def test_float8_caches() -> None:
    inputs = build_paged_inputs(
        [0, 5, -1], [3, 9, 2], dtype=torch.float16, cache_dtype=CACHE_DTYPE, key_scale=0.5, value_scale=2.0
    )
    # Numbers that are held exactly: the interpreter rounds others wrongly. Some are limited.
    for new in (inputs.new_key, inputs.new_value):
        new.copy_(2.0 ** torch.randint(-3, 12, new.shape))
    stored = expected_storage(inputs)
    run_interpreted(launch, inputs)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("lengths", [[], [-1, -1]], ids=str)
def test_nothing_to_do(lengths: list[int]) -> None:
    inputs = build_paged_inputs(lengths)
    before = inputs.storage.clone()
    run_interpreted(launch, inputs)
    assert same_bits(inputs.storage, before)


@compiles("_write_kv_kernel")
def test_compiles_without_spills(capability: int) -> None:
    new, slots = torch.empty(64, 12, 64, dtype=torch.float16), torch.empty(64, dtype=torch.int64)
    caches = [(torch.empty(4, 16, 12, 64, dtype=torch.float16), None, "st.global.v4")]
    if capability >= 90:
        caches.append((torch.empty(4, 16, 12, 64, dtype=CACHE_DTYPE), torch.ones(1), "st.global.v2"))
    for cache, scale, wide_store in caches:
        with record_launches(gpu, "_write_kv_kernel") as launches:
            gpu.write_kv(new, new, cache, cache, slots, key_scale=scale, value_scale=scale)
        resources = compile_launch(launches[0], capability)
        assert wide_store in resources.ptx, "the stores are not 8 elements wide"
