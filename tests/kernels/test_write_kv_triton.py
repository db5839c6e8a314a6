"""The Triton kernel that stores keys and values: exactly the named slots change, bit for bit."""

from __future__ import annotations

import pytest
import torch

from rose_backend.kernels.gpu import write_kv as gpu
from tests.support.aot import CAPABILITIES, compile_launch, record_launches
from tests.support.interpreter import run_interpreted
from tests.support.paged_inputs import (
    CACHE_LAYOUTS,
    PagedInputs,
    build_paged_inputs,
    expected_storage,
    same_bits,
)


def launch(inputs: PagedInputs) -> None:
    gpu.write_kv(inputs.new_key, inputs.new_value, inputs.key_cache, inputs.value_cache, inputs.slot_mapping)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_stores(layout: str, dtype: torch.dtype) -> None:
    inputs = build_paged_inputs([0, 5, -1, 13], [1, 9, 3, 19], head_size=24, dtype=dtype, layout=layout)
    # Every innermost stride may be another than 1.
    inputs.new_key = inputs.new_key.transpose(0, 2).contiguous().transpose(0, 2)
    stored = expected_storage(inputs)
    run_interpreted(launch, inputs)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("lengths", [[], [-1, -1]], ids=str)
def test_nothing_to_do(lengths: list[int]) -> None:
    inputs = build_paged_inputs(lengths)
    before = inputs.storage.clone()
    run_interpreted(launch, inputs)
    assert same_bits(inputs.storage, before)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles_without_spills(capability: int) -> None:
    new = torch.empty(64, 12, 64, dtype=torch.float16)
    cache = torch.empty(4, 16, 12, 64, dtype=torch.float16)
    with record_launches(gpu, "_write_kv_kernel") as launches:
        gpu.write_kv(new, new, cache, cache, torch.empty(64, dtype=torch.int64))
    resources = compile_launch(launches[0], capability)
    print(f"sm_{capability}: {resources.summary()}")
    assert resources.spill_bytes == 0
    assert "st.global.v4" in resources.ptx, "the stores are not 16 bytes wide"
