"""The Triton kernel of prefill attention, interpreted on small shapes and compiled for three generations of GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend.kernels.gpu import paged_prefill as gpu
from tests.support.aot import CAPABILITIES, compile_launch, record_launches
from tests.support.error_budget import assert_within_budget
from tests.support.interpreter import run_interpreted
from tests.support.paged_inputs import (
    PagedInputs,
    build_paged_inputs,
    expected_storage,
    naive_attention,
    same_bits,
)

SCALE = 0.25
COMPUTED = [0, 5, -1, 13, 0]
QUERY_LENS = [1, 9, 3, 19, 0]
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


def launch(inputs: PagedInputs, stored_before: bool, split: bool, options: dict[str, Any]) -> torch.Tensor:
    out = torch.full_like(inputs.query, float("nan"))
    returned = gpu.paged_prefill(
        inputs.query,
        None if stored_before else inputs.new_key,
        None if stored_before else inputs.new_value,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_table,
        inputs.query_start_loc,
        inputs.num_computed_tokens,
        scale=SCALE,
        out=out,
        tuning=gpu.PrefillTuning(query_tile=8, tile=4, num_warps=4, num_stages=1, split=split),
        **options,
    )
    assert returned is out
    return out


def run(
    inputs: PagedInputs, *, stored_before: bool = False, split: bool = True, **options: Any
) -> torch.Tensor:
    return run_interpreted(launch, inputs, stored_before, split, options)


def check(inputs: PagedInputs, out: torch.Tensor, **options: Any) -> None:
    """Compare with attention by the definition; padding must be as it was."""
    exact = naive_attention(inputs, scale=SCALE, **options)
    same_dtype = naive_attention(inputs, scale=SCALE, dtype=out.dtype, **options)
    real = torch.zeros(len(out), dtype=torch.bool)
    for row, computed in enumerate(inputs.num_computed_tokens.tolist()):
        real[inputs.row_tokens(row)] = computed >= 0
    assert_within_budget(out[real], exact[real], same_dtype[real])
    assert out[~real].isnan().all()


# Without bfloat16, whose matrices the interpreter cannot multiply: that type is tested on a GPU.
@pytest.mark.parametrize(
    ("heads", "head_size", "block_size", "dtype", "layout", "split"),
    [
        ((2, 2), 16, 8, FLOAT32, "contiguous", True),
        ((2, 1), 40, 6, FLOAT32, "vllm", False),
        ((2, 1), 24, 8, FLOAT16, "layer_of_stack", True),
        ((3, 1), 32, 16, FLOAT16, "vllm", False),
    ],
    ids=str,
)
def test_values_and_stores(
    heads: tuple[int, int], head_size: int, block_size: int, dtype: torch.dtype, layout: str, split: bool
) -> None:
    inputs = build_paged_inputs(
        COMPUTED,
        QUERY_LENS,
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        layout=layout,
    )
    stored = expected_storage(inputs)
    check(inputs, run(inputs, split=split))
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 6, "alibi_slopes": torch.tensor([0.5, 0.1])},
        {"sliding_window": 14, "logits_soft_cap": 0.7},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("stored_before", [False, True])
def test_options(options: dict[str, Any], stored_before: bool) -> None:
    inputs = build_paged_inputs([0, 9], [10, 13], num_query_heads=2, num_kv_heads=2)
    stored = expected_storage(inputs)
    if stored_before:
        inputs.storage.copy_(stored)
    check(inputs, run(inputs, stored_before=stored_before, **options), **options)
    assert same_bits(inputs.storage, stored)


def test_tokens_of_no_row_are_left_alone() -> None:
    inputs = build_paged_inputs([4], [5], num_query_heads=2, num_kv_heads=2)
    stored, exact = expected_storage(inputs), naive_attention(inputs, scale=SCALE)
    for name in ("query", "new_key", "new_value"):
        tensor = getattr(inputs, name)
        setattr(inputs, name, torch.cat((tensor, torch.full_like(tensor[:3], float("nan")))))
    out = run(inputs)
    torch.testing.assert_close(out[:5].double(), exact, rtol=0, atol=1e-5)
    assert out[5:].isnan().all()
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize(("computed", "query_lens"), [([], []), ([-1, 3], [4, 0])], ids=str)
def test_nothing_to_do(computed: list[int], query_lens: list[int]) -> None:
    inputs = build_paged_inputs(computed, query_lens)
    before = inputs.storage.clone()
    assert run(inputs).isnan().all()
    assert same_bits(inputs.storage, before)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"), [((12, 12), 64, FLOAT16), ((32, 8), 128, BFLOAT16)], ids=str
)
def test_compiles_without_spills(
    heads: tuple[int, int], head_size: int, dtype: torch.dtype, capability: int
) -> None:
    query = torch.empty(2048, heads[0], head_size, dtype=dtype)
    new = torch.empty(2048, heads[1], head_size, dtype=dtype)
    cache = torch.empty(4, 16, heads[1], head_size, dtype=dtype)
    ints = torch.empty(5, 8, dtype=torch.int32)
    with record_launches(gpu, "_paged_prefill_kernel") as launches:
        gpu.paged_prefill(
            query,
            new,
            new,
            cache,
            cache,
            ints[:4],
            ints[0, :5],
            ints[0, :4],
            scale=1.0,
            out=query,
            tuning=gpu.prefill_tuning(512, head_size, dtype, divmod(capability, 10)),
        )
    resources = compile_launch(launches[0], capability)
    print(f"sm_{capability} {heads} {head_size}: {resources.summary()}")
    assert resources.spill_bytes == 0
    assert {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}[capability] in resources.ptx
