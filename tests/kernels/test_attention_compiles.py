"""The kernels of decode and prefill attention, compiled for three generations of GPUs that need not be there."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from rose_backend.kernels import AttentionOptions, NewTokens, PagedKV
from rose_backend.kernels.arguments import CACHE_DTYPE
from rose_backend.kernels.attention import paged_decode, paged_prefill, shared
from rose_backend.kernels.gpu_properties import GpuProperties
from tests.support.aot import SHARED_BYTES, Launch, Resources, compile_launch, compiles, record_launches
from tests.support.paged_inputs import random_rotation

Heads = tuple[int, int, int, torch.dtype]
"""Query heads, KV heads, head size, dtype."""

GPT2, LLAMA_8B = (12, 12, 64, torch.float16), (32, 8, 128, torch.bfloat16)
QWEN3_06B = (16, 8, 128, torch.bfloat16)
GEMMA_4 = (16, 2, 512, torch.bfloat16)
"""Its layers without a window."""
WIDE_LOAD = re.compile(r"ld\.global\S*\.v4")
CASES = [
    (GPT2, 64, 1, CACHE_DTYPE, 100),
    (LLAMA_8B, 64, 1, CACHE_DTYPE, 90),
    (LLAMA_8B, 64, 4, CACHE_DTYPE, 90),
    (LLAMA_8B, 64, 4, None, 80),
    (GEMMA_4, 64, 4, None, 80),
    (GPT2, 64, 4, None, 90),
    *((GPT2, num_rows, 1, None, 90) for num_rows in (1, 32, 100, 256)),
    (GPT2, 8, 1, None, 80),
]


@compiles("_paged_decode_kernel")
@pytest.mark.parametrize("shape", [GPT2, LLAMA_8B, GEMMA_4], ids=str)
def test_a_step_of_64_rows_compiles_without_spills(shape: Heads, capability: int) -> None:
    resources = compile_decode(shape, 64, 1, None, capability)
    check(resources, lane_by_lane=shape == GPT2)
    assert resources.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(("shape", "num_rows", "max_query_len", "cache_dtype", "capability"), CASES, ids=str)
def test_decode_compiles_without_spills(
    shape: Heads, num_rows: int, max_query_len: int, cache_dtype: torch.dtype | None, capability: int
) -> None:
    resources = compile_decode(shape, num_rows, max_query_len, cache_dtype, capability)
    check(resources, lane_by_lane=shape == GPT2 and max_query_len == 1 and cache_dtype is None)


def check(resources: Resources, *, lane_by_lane: bool) -> None:
    assert resources.spill_bytes == 0
    assert ("mma" in resources.ptx) == ("cp.async" in resources.ptx) == (not lane_by_lane)
    assert WIDE_LOAD.search(resources.ptx)
    assert "griddepcontrol" not in resources.ptx


@pytest.mark.parametrize("by_token", [False, True], ids=["by position", "by token"])
@pytest.mark.parametrize("num_rows", [1, 4, 8, 32, 64, 256])
@pytest.mark.parametrize("shape", [QWEN3_06B, LLAMA_8B], ids=str)
def test_rotating_kernels_compile_without_spills(shape: Heads, num_rows: int, by_token: bool) -> None:
    norms = shape == QWEN3_06B
    resources = compile_decode(shape, num_rows, 1, None, 90, norms=norms, by_token=by_token)
    assert resources.spill_bytes == 0 and WIDE_LOAD.search(resources.ptx)


@pytest.mark.parametrize(
    ("shape", "num_rows", "is_early", "norms"),
    [
        (GPT2, 8, True, None),
        (GPT2, 64, False, None),
        (LLAMA_8B, 8, True, None),
        (LLAMA_8B, 40, True, None),
        (LLAMA_8B, 40, True, False),
        (QWEN3_06B, 8, True, True),
        (QWEN3_06B, 24, False, True),
        (QWEN3_06B, 40, False, True),
        (QWEN3_06B, 200, True, True),
        (LLAMA_8B, 64, True, None),
        (LLAMA_8B, 64, True, False),
        (LLAMA_8B, 256, True, None),
        (GPT2, 8, True, True),
    ],
    ids=str,
)
def test_overlap_reads_ahead_and_writes_only_after_the_wait(
    shape: Heads, num_rows: int, is_early: bool, norms: bool | None
) -> None:
    resources = compile_decode(shape, num_rows, 1, None, 90, overlap=True, norms=norms)
    ptx = resources.ptx
    assert resources.spill_bytes == 0
    # One wait is that of a program without work.
    assert ptx.count("griddepcontrol.wait") == 2
    last_wait = ptx.rindex("griddepcontrol.wait")
    first_write = min(ptx.index("st.global"), ptx.index("atom.global"))
    assert ptx.index("ld.global") < ptx.index("griddepcontrol.wait") <= last_wait < first_write
    # The first tile of keys and values, unless many programs need the registers. Angles are wide loads as well.
    is_tile_early = shape == GPT2 or num_rows <= 33
    assert bool(WIDE_LOAD.search(ptx[:last_wait])) == (is_tile_early or norms is not None)
    assert ptx.count("griddepcontrol.launch_dependents") == 1
    launch = ptx.index("griddepcontrol.launch_dependents")
    if is_early:
        assert launch < ptx.index("ld.global")
    else:
        last_tile = [load.start() for load in WIDE_LOAD.finditer(ptx, 0, first_write)][-1]
        assert last_wait < last_tile < launch < first_write


@pytest.mark.parametrize(("num_rows", "max_query_len"), [(1, 8), (32, 4)])
@pytest.mark.parametrize("shape", [QWEN3_06B, LLAMA_8B], ids=str)
def test_rows_of_several_tokens_overlap_too(shape: Heads, num_rows: int, max_query_len: int) -> None:
    alone, resources = (
        compile_decode(shape, num_rows, max_query_len, None, 90, overlap=overlap) for overlap in (False, True)
    )
    ptx = resources.ptx
    assert resources.spill_bytes == alone.spill_bytes and ptx.count("griddepcontrol.wait") == 2
    last_wait = ptx.rindex("griddepcontrol.wait")
    assert ptx.index("ld.global") < ptx.index("griddepcontrol.wait")
    assert last_wait < min(ptx.index("st.global"), ptx.index("atom.global"))
    assert ptx.count("griddepcontrol.launch_dependents") == 1


def compile_decode(
    shape: Heads,
    num_rows: int,
    max_query_len: int,
    cache_dtype: torch.dtype | None,
    capability: int,
    *,
    overlap: bool = False,
    norms: bool | None = None,
    by_token: bool = False,
) -> Resources:
    """Compile as for an H200, with the tuning that is used there; ``norms`` says of what kind a rotation is."""
    rotation = None
    if norms is not None:
        rotation = replace(
            random_rotation(shape[2], norms=norms, num_positions=256, dtype=shape[3]), by_token=by_token
        )
    num_query_heads, num_kv_heads, head_size, dtype = shape
    query = torch.empty(num_rows * max_query_len, num_query_heads, head_size, dtype=dtype)
    new = torch.empty(num_rows * max_query_len, num_kv_heads, head_size, dtype=dtype)
    cache = torch.empty(4, 16, num_kv_heads, head_size, dtype=cache_dtype or dtype)
    ints = torch.empty(num_rows, 4, dtype=torch.int32)
    starts = torch.empty(num_rows + 1, dtype=torch.int32) if max_query_len > 1 else None
    options = AttentionOptions(1.0)
    if cache_dtype is not None:
        scales = {"key_scale": torch.empty(1), "value_scale": torch.empty(1)}
        options = AttentionOptions(1.0, sinks=torch.empty(num_query_heads, dtype=torch.bfloat16), **scales)
    tuning = paged_decode.decode_tuning(
        head_size,
        dtype,
        132,
        cache_dtype=cache_dtype,
        num_rows=num_rows,
        num_queries=num_query_heads // num_kv_heads * max_query_len,
        num_kv_heads=num_kv_heads,
        norms_heads=bool(norms),
    )
    with (
        record_launches(paged_decode, "_paged_decode_kernel") as launches,
        mock.patch.object(paged_decode, "decode_tuning", lambda *sizes, **facts: tuning),
    ):
        paged_decode.paged_decode(
            query,
            NewTokens(new, new),
            PagedKV(cache, cache, ints, ints[:, 0].contiguous(), starts, max_query_len),
            options=options,
            out=query,
            overlap=overlap,
            rotation=rotation,
        )
    return compile_launch(launches[0], capability)


@compiles("_longest_first_kernel")
def test_order_of_rows(capability: int) -> None:
    with record_launches(shared, "_longest_first_kernel") as launches:
        shared.longest_first(torch.zeros(256, dtype=torch.int32))
    compile_launch(launches[0], capability)


FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16


def prefill_arguments(
    heads: tuple[int, int], head_size: int, dtype: torch.dtype, num_rows: int, cache_dtype: torch.dtype
) -> tuple[torch.Tensor, NewTokens, PagedKV]:
    """Return 2,048 new tokens of some rows."""
    projected = torch.empty(2048, heads[0] + 2 * heads[1], head_size, dtype=dtype)
    query, key, value = projected.split([heads[0], heads[1], heads[1]], dim=1)
    cache = torch.empty(4, 16, heads[1], head_size, dtype=cache_dtype)
    table, starts = torch.empty(num_rows, 8, dtype=torch.int32), torch.empty(num_rows + 1, dtype=torch.int32)
    return query, NewTokens(key, value), PagedKV(cache, cache, table, starts[:-1], starts)


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
    arguments = prefill_arguments(heads, head_size, dtype, 4, cache_dtype or dtype)
    describable = cache_dtype in (None, dtype)
    tuning = paged_prefill.prefill_tuning(
        query_len, head_size, dtype, divmod(capability, 10), is_describable=describable
    )
    with record_launches(paged_prefill, "_store_chunk_kernel", "_paged_prefill_kernel") as launches:
        paged_prefill.paged_prefill(
            *arguments, options=AttentionOptions(1.0, **options), out=torch.empty_like(arguments[0]), tuning=tuning
        )  # fmt: skip
    return launches


@pytest.mark.parametrize(("mean_query_len", "by_descriptor"), [(None, False), (128, False), (512, True)])
def test_tiles_suit_the_length_that_is_stated(
    mean_query_len: float | None, by_descriptor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 64 rows only a few are real, as in a captured graph: tokens per row say nothing.
    monkeypatch.setattr(paged_prefill, "gpu_properties", lambda device: GpuProperties((9, 0), 132))
    arguments = prefill_arguments((12, 12), 64, FLOAT16, 64, FLOAT16)
    with record_launches(paged_prefill, "_paged_prefill_kernel") as launches:
        paged_prefill.paged_prefill(
            *arguments,
            options=AttentionOptions(1.0),
            out=torch.empty_like(arguments[0]),
            mean_query_len=mean_query_len,
        )
    assert (launches[0].arguments["new_key_rows"] is not None) == by_descriptor


@compiles("_paged_prefill_kernel")
@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"), [((12, 12), 64, FLOAT16), ((32, 8), 128, BFLOAT16)], ids=str
)
def test_prefill_compiles_without_spills(
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
