"""The Triton kernel of decode attention, interpreted on small shapes and compiled for three generations of GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.gpu import paged_decode as gpu
from rose_backend.kernels.paged_decode import check_gpu_tensors
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
LENGTHS = [0, 7, 8, -1, 9, 23]
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


def launch(
    inputs: PagedInputs, stored_before: bool, num_programs: int, options: dict[str, Any]
) -> tuple[torch.Tensor, int, int]:
    """Return output, records written by split rows, and what the counters add up to afterwards."""
    # The interpreter cannot multiply bfloat16 matrices; compiled, float32 must not use the matrix units.
    use_dot = inputs.query.dtype == FLOAT16
    tuning = gpu.DecodeTuning(
        tile=8, min_split=8, num_programs=num_programs, use_dot=use_dot, num_warps=4, num_stages=1
    )
    scratch: list[torch.Tensor] = []
    make_scratch, combine_elements = gpu.split_scratch, gpu._COMBINE_ELEMENTS

    def poisoned_scratch(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scratch.extend(make_scratch(*args))
        scratch[0].fill_(float("nan"))
        return scratch[0], scratch[1]

    # So few that combining takes several iterations.
    gpu.split_scratch, gpu._COMBINE_ELEMENTS = poisoned_scratch, 8
    try:
        out = torch.full_like(inputs.query, float("nan"))
        returned = gpu.paged_decode(
            inputs.query,
            None if stored_before else inputs.new_key,
            None if stored_before else inputs.new_value,
            inputs.key_cache,
            inputs.value_cache,
            inputs.block_table,
            inputs.num_computed_tokens,
            scale=SCALE,
            out=out,
            tuning=tuning,
            **options,
        )
    finally:
        gpu.split_scratch, gpu._COMBINE_ELEMENTS = make_scratch, combine_elements
    assert returned is out
    if not scratch:
        return out, 0, 0
    return out, int((~scratch[0][:, 0].isnan()).sum()), int(scratch[1].abs().sum())


def run(
    inputs: PagedInputs, *, stored_before: bool = False, num_programs: int = 12, **options: Any
) -> tuple[torch.Tensor, int]:
    """Return output and the number of records of split rows."""
    out, num_records, counted = run_interpreted(launch, inputs, stored_before, num_programs, options)
    assert counted == 0, "a counter was left behind for the next launch"
    return out, num_records


def check(inputs: PagedInputs, out: torch.Tensor, **options: Any) -> None:
    """Compare with attention by the definition; padding rows must be as they were."""
    real = inputs.num_computed_tokens >= 0
    exact = naive_attention(inputs, scale=SCALE, **options)
    same_dtype = naive_attention(inputs, scale=SCALE, dtype=out.dtype, **options)
    assert_within_budget(out[real], exact[real], same_dtype[real])
    assert out[~real].isnan().all()


@pytest.mark.parametrize(
    ("heads", "head_size", "block_size", "dtype", "layout"),
    [
        ((2, 2), 16, 8, FLOAT32, "contiguous"),
        ((4, 2), 24, 8, FLOAT32, "vllm"),
        ((2, 2), 16, 8, FLOAT16, "layer_of_stack"),
        ((5, 1), 40, 6, FLOAT16, "vllm"),
        ((4, 1), 32, 16, BFLOAT16, "contiguous"),
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
        {"sliding_window": 12, "alibi_slopes": torch.tensor([0.5, 0.1]), "logits_soft_cap": 2.0},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
def test_options(options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = build_paged_inputs([0, 8, 23], num_query_heads=2, num_kv_heads=1, dtype=dtype)
    stored = expected_storage(inputs)
    check(inputs, run(inputs, **options)[0], **options)
    assert same_bits(inputs.storage, stored)


def test_long_rows_get_most_splits() -> None:
    one, many = (build_paged_inputs([40, 3], num_query_heads=1, num_kv_heads=1) for _ in range(2))
    # The maximum rises from split to split.
    slopes = torch.tensor([0.5])
    whole, no_records = run(one, num_programs=1, alibi_slopes=slopes)
    split, num_records = run(many, num_programs=6, alibi_slopes=slopes)
    assert (no_records, num_records) == (0, 5)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
def test_without_new_tokens_nothing_is_written(dtype: torch.dtype) -> None:
    inputs = build_paged_inputs([5, 16, -1], dtype=dtype)
    inputs.storage.copy_(stored := expected_storage(inputs))
    check(inputs, run(inputs, stored_before=True)[0])
    assert same_bits(inputs.storage, stored)


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
    with pytest.raises(ShapeError, match=r"query: expected D of at most 256 on a GPU, got 272"):
        check_gpu_tensors(torch.zeros(2, 3, 272))
    with pytest.raises(ShapeError, match=r"query: expected one of .* on a GPU, got torch.float64"):
        check_gpu_tensors(query.double())
    with pytest.raises(ShapeError, match=r"key_cache: expected an innermost stride of 1, got strides"):
        check_gpu_tensors(query, key_cache=cache.transpose(1, 3))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"),
    [((12, 12), 64, FLOAT16), ((32, 8), 128, BFLOAT16)],
    ids=str,
)
def test_compiles_without_spills(
    heads: tuple[int, int], head_size: int, dtype: torch.dtype, capability: int
) -> None:
    query = torch.empty(64, heads[0], head_size, dtype=dtype)
    new = torch.empty(64, heads[1], head_size, dtype=dtype)
    cache = torch.empty(4, 16, heads[1], head_size, dtype=dtype)
    ints = torch.empty(64, 4, dtype=torch.int32)
    with record_launches(gpu, "_paged_decode_kernel") as launches:
        gpu.paged_decode(
            query,
            new,
            new,
            cache,
            cache,
            ints,
            ints[:, 0].contiguous(),
            scale=1.0,
            out=query,
            tuning=gpu.decode_tuning(head_size, dtype, 132),
        )
    resources = compile_launch(launches[0], capability)
    print(f"sm_{capability} {heads} {head_size}: {resources.summary()}")
    assert resources.spill_bytes == 0
    assert "mma" in resources.ptx and "cp.async" in resources.ptx
