"""The Triton kernel of prefill attention, interpreted on small shapes and compiled for three generations of GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend.kernels import AttentionOptions
from rose_backend.kernels.attention import paged_prefill as gpu
from rose_backend.kernels.attention import paged_prefill as store_chunk
from rose_backend.kernels.gpu_properties import GpuProperties
from rose_backend.kernels.tensor_checks import CACHE_DTYPE
from tests.support.aot import SHARED_BYTES, Launch, compile_launch, compiles, record_launches
from tests.support.attention_calls import paged_prefill
from tests.support.error_budget import assert_within_budget
from tests.support.interpreter import run_interpreted
from tests.support.paged_inputs import (
    PagedInputs,
    build_paged_inputs,
    expected_storage,
    grouped,
    naive_attention,
    same_bits,
    without_passed_blocks,
)

SCALE = 0.25
COMPUTED = [0, 5, -1, 13, 0]
QUERY_LENS = [1, 9, 3, 19, 0]
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


def launch(inputs: PagedInputs, stored_before: bool, loops: str, options: dict[str, Any]) -> torch.Tensor:
    out = torch.full_like(inputs.query, float("nan"))
    returned = paged_prefill(
        inputs.query,
        None if stored_before else inputs.new_key,
        None if stored_before else inputs.new_value,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_table,
        inputs.query_start_loc,
        inputs.num_computed_tokens,
        launch=gpu.paged_prefill,
        out=out,
        tuning=gpu.PrefillTuning(
            query_tile=4 if loops == "wide tiles" else 8,
            tile=8 if loops == "wide tiles" else 4,
            num_warps=4,
            num_stages=1,
            by_descriptor=loops == "descriptors",
            split=loops not in ("one loop", "wide tiles"),
        ),
        **grouped(**{"scale": SCALE, **options}, key_scale=inputs.key_scale, value_scale=inputs.value_scale),
    )
    assert returned is out
    return out


def run(
    inputs: PagedInputs, *, stored_before: bool = False, loops: str = "two loops", **options: Any
) -> torch.Tensor:
    return run_interpreted(launch, inputs, stored_before, loops, options)


def check(inputs: PagedInputs, out: torch.Tensor, *, scale: float = SCALE, **options: Any) -> None:
    """Compare with attention by the definition; padding must be as it was."""
    exact = naive_attention(inputs, scale=scale, **options)
    same_dtype = naive_attention(inputs, scale=scale, dtype=out.dtype, **options)
    real = torch.zeros(len(out), dtype=torch.bool)
    for row, computed in enumerate(inputs.num_computed_tokens.tolist()):
        real[inputs.row_tokens(row)] = computed >= 0
    assert_within_budget(out[real], exact[real], same_dtype[real])
    assert out[~real].isnan().all()


# Without bfloat16, whose matrices the interpreter cannot multiply: that type is tested on a GPU.
@pytest.mark.parametrize(
    ("heads", "head_size", "block_size", "dtype", "layout", "loops"),
    [
        ((2, 2), 16, 4, FLOAT32, "contiguous", "two loops"),
        ((2, 1), 40, 6, FLOAT32, "vllm", "one loop"),
        ((2, 1), 24, 8, FLOAT16, "layer_of_stack", "two loops"),
        ((3, 1), 32, 16, FLOAT16, "vllm", "one loop"),
        ((3, 1), 32, 16, FLOAT16, "vllm", "wide tiles"),
        ((2, 1), 40, 6, FLOAT32, "vllm", "wide tiles"),
        ((4, 2), 16, 2, FLOAT16, "vllm", "descriptors"),
        ((2, 1), 512, 16, FLOAT16, "vllm", "two loops"),
        ((2, 1), 392, 16, FLOAT32, "vllm", "one loop"),
    ],
    ids=str,
)
def test_values_and_stores(
    heads: tuple[int, int], head_size: int, block_size: int, dtype: torch.dtype, layout: str, loops: str
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
    check(inputs, run(inputs, loops=loops))
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 6, "alibi_slopes": torch.tensor([0.5, 0.1])},
        {"sliding_window": 14, "logits_soft_cap": 0.7, "sinks": torch.tensor([1.0, float("-inf")])},
        {"sinks": torch.tensor([-2.0, 4.0])},
        {"scale": -0.3},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("loops", ["two loops", "descriptors", "stored before"])
def test_options(options: dict[str, Any], loops: str) -> None:
    dtype = FLOAT16 if loops == "descriptors" else FLOAT32
    inputs = build_paged_inputs([0, 9], [10, 13], num_query_heads=2, block_size=4, dtype=dtype)
    stored = expected_storage(inputs)
    is_stored = loops == "stored before"
    if is_stored:
        inputs.storage.copy_(stored)
    check(inputs, run(inputs, stored_before=is_stored, loops=loops, **options), **options)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("stored_before", [False, True])
def test_float8_caches(stored_before: bool) -> None:
    inputs = build_paged_inputs(
        [0, 9, -1], [10, 13, 2], dtype=FLOAT16, cache_dtype=CACHE_DTYPE, key_scale=0.5, value_scale=2.0
    )
    # Numbers that are held exactly: the interpreter rounds others wrongly. Some are limited.
    for new in (inputs.new_key, inputs.new_value):
        new.copy_(2.0 ** torch.randint(-3, 2, new.shape))
        new[0, 0, 0] = 2000.0
    stored = expected_storage(inputs)
    if stored_before:
        inputs.storage.copy_(stored)
    check(inputs, run(inputs, stored_before=stored_before))
    assert same_bits(inputs.storage, stored)


def test_caches_of_different_strides() -> None:
    inputs = build_paged_inputs([9, 4], [10, 5], num_query_heads=2, block_size=4)
    stored, num_blocks = expected_storage(inputs), len(inputs.value_cache)
    inputs.value_cache = inputs.value_cache.transpose(0, 2).contiguous().transpose(0, 2)
    check(inputs, run(inputs))
    assert same_bits(inputs.key_cache, stored[0, :num_blocks])
    assert same_bits(inputs.value_cache.contiguous(), stored[1, :num_blocks])


@pytest.mark.parametrize("loops", ["one loop", "two loops", "descriptors"])
def test_tokens_of_no_row_are_left_alone(loops: str) -> None:
    inputs = build_paged_inputs([4], [9], num_query_heads=2, num_kv_heads=2, dtype=FLOAT16)
    stored = expected_storage(inputs)
    real, exact = inputs.row_tokens(0), naive_attention(inputs, scale=SCALE)
    same_dtype = naive_attention(inputs, scale=SCALE, dtype=FLOAT16)
    for name in ("query", "new_key", "new_value"):
        tensor = getattr(inputs, name)
        setattr(inputs, name, torch.cat((tensor, torch.full_like(tensor[:3], float("nan")))))
    out = run(inputs, loops=loops)
    assert_within_budget(out[real], exact, same_dtype)
    assert out[9:].isnan().all()
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize(("computed", "query_lens"), [([], []), ([-1, 3], [4, 0])], ids=str)
def test_nothing_to_do(computed: list[int], query_lens: list[int]) -> None:
    inputs = build_paged_inputs(computed, query_lens)
    before = inputs.storage.clone()
    assert run(inputs).isnan().all()
    assert same_bits(inputs.storage, before)


def record(
    heads: tuple[int, int],
    head_size: int,
    dtype: torch.dtype,
    capability: int,
    *,
    cache_dtype: torch.dtype | None = None,
    query_len: int = 512,
    **options: Any,
) -> list[Launch]:
    """Return the launches for prompts of ``query_len`` tokens, the one that attends last; nothing runs."""
    projected = torch.empty(2048, heads[0] + 2 * heads[1], head_size, dtype=dtype)
    query, key, value = projected.split([heads[0], heads[1], heads[1]], dim=1)
    cache = torch.empty(4, 16, heads[1], head_size, dtype=cache_dtype or dtype)
    ints = torch.empty(5, 8, dtype=torch.int32)
    is_stored = cache.dtype != dtype
    tuning = gpu.prefill_tuning(
        query_len, head_size, dtype, divmod(capability, 10), is_describable=not is_stored
    )
    with (
        record_launches(store_chunk, "_store_chunk_kernel") as launches,
        record_launches(gpu, "_paged_prefill_kernel") as attending,
    ):
        paged_prefill(
            query,
            key,
            value,
            cache,
            cache,
            ints[:4],
            ints[0, :5],
            ints[0, :4],
            launch=gpu.paged_prefill,
            out=torch.empty(query.shape, dtype=dtype),
            tuning=tuning,
            **grouped(scale=1.0, **options),
        )
    return launches + attending


@pytest.mark.parametrize(("mean_query_len", "by_descriptor"), [(None, False), (128, False), (512, True)])
def test_tiles_suit_the_length_that_is_stated(
    mean_query_len: float | None, by_descriptor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 64 rows only a few are real, as in a captured graph: tokens per row say nothing.
    monkeypatch.setattr(gpu, "gpu_properties", lambda device: GpuProperties((9, 0), 132))
    projected = torch.empty(2048, 36, 64, dtype=FLOAT16)
    query, key, value = projected.split(12, dim=1)
    cache = torch.empty(4, 16, 12, 64, dtype=FLOAT16)
    rows = torch.empty(64, 8, dtype=torch.int32)
    lengths = torch.empty(65, dtype=torch.int32)
    with record_launches(gpu, "_paged_prefill_kernel") as launches:
        paged_prefill(
            query,
            key,
            value,
            cache,
            cache,
            rows,
            lengths,
            lengths[:64],
            options=AttentionOptions(1.0),
            launch=gpu.paged_prefill,
            out=torch.empty(query.shape, dtype=FLOAT16),
            mean_query_len=mean_query_len,
        )
    assert (launches[0].arguments["new_key_rows"] is not None) == by_descriptor


@compiles("_paged_prefill_kernel")
@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"), [((12, 12), 64, FLOAT16), ((32, 8), 128, BFLOAT16)], ids=str
)
def test_compiles_without_spills(
    heads: tuple[int, int], head_size: int, dtype: torch.dtype, capability: int
) -> None:
    (launch,) = record(heads, head_size, dtype, capability)
    resources = compile_launch(launch, capability)
    assert {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}[capability] in resources.ptx
    assert ("cp.async.bulk.tensor" in resources.ptx) == (capability >= 90)


@compiles("_paged_prefill_kernel")
def test_heads_of_512_compile_without_spills(capability: int) -> None:
    (launch,) = record((16, 2), 512, BFLOAT16, capability)
    assert compile_launch(launch, capability).shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("query_len", [16, 128])
def test_short_chunks_compile_without_spills(query_len: int) -> None:
    (launch,) = record((12, 12), 64, FLOAT16, 90, query_len=query_len)
    resources = compile_launch(launch, 90)
    assert resources.spill_bytes == 0


@compiles("_paged_prefill_kernel", "_store_chunk_kernel", capabilities=(90, 100))
def test_float8_compiles_without_spills(capability: int) -> None:
    scale = torch.ones(1)
    launches = record(
        (32, 8), 128, BFLOAT16, capability, cache_dtype=CACHE_DTYPE, key_scale=scale, value_scale=scale
    )
    assert len(launches) == 2
    for launch in launches:
        assert "e4m3x2" in compile_launch(launch, capability).ptx


@pytest.mark.parametrize("loops", ["one loop", "two loops", "wide tiles"])
@pytest.mark.parametrize("block_size", [4, 6, 16])
@pytest.mark.parametrize("window", [2, 7, 17])
def test_blocks_that_a_window_has_passed_are_not_read(window: int, block_size: int, loops: str) -> None:
    inputs = build_paged_inputs(
        [0, 45, 30, -1, 64], [3, 9, 17, 2, 1], num_query_heads=2, block_size=block_size
    )
    expected = naive_attention(inputs, scale=SCALE, sliding_window=window)
    assert without_passed_blocks(inputs, window) > 3
    out = run(inputs, loops=loops, sliding_window=window)
    real = inputs.slot_mapping >= 0
    assert not out[real].isnan().any()
    torch.testing.assert_close(out[real].double(), expected[real].double(), atol=1e-4, rtol=1e-4)
