"""The Triton kernel of decode attention, compiled for three generations of GPUs that need not be there."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch

from rose_backend.kernels.attention import paged_decode as gpu
from rose_backend.kernels.tensor_checks import CACHE_DTYPE
from tests.support.aot import SHARED_BYTES, Resources, compile_launch, compiles, record_launches
from tests.support.attention_calls import paged_decode
from tests.support.paged_inputs import grouped, random_rotation

Shape = tuple[int, int, int, torch.dtype]
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
def test_a_step_of_64_rows_compiles_without_spills(shape: Shape, capability: int) -> None:
    resources = compile_decode(shape, 64, 1, None, capability)
    check(resources, lane_by_lane=shape == GPT2)
    assert resources.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(("shape", "num_rows", "max_query_len", "cache_dtype", "capability"), CASES, ids=str)
def test_compiles_without_spills(
    shape: Shape, num_rows: int, max_query_len: int, cache_dtype: torch.dtype | None, capability: int
) -> None:
    resources = compile_decode(shape, num_rows, max_query_len, cache_dtype, capability)
    check(resources, lane_by_lane=shape == GPT2 and max_query_len == 1 and cache_dtype is None)


def check(resources: Resources, *, lane_by_lane: bool) -> None:
    assert resources.spill_bytes == 0
    assert ("mma" in resources.ptx) == ("cp.async" in resources.ptx) == (not lane_by_lane)
    assert WIDE_LOAD.search(resources.ptx)
    assert "griddepcontrol" not in resources.ptx


@pytest.mark.parametrize("num_rows", [1, 4, 8, 32, 64, 256])
@pytest.mark.parametrize("shape", [QWEN3_06B, LLAMA_8B], ids=str)
def test_rotating_kernels_compile_without_spills(shape: Shape, num_rows: int) -> None:
    resources = compile_decode(shape, num_rows, 1, None, 90, norms=shape == QWEN3_06B)
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
    shape: Shape, num_rows: int, is_early: bool, norms: bool | None
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


def compile_decode(
    shape: Shape,
    num_rows: int,
    max_query_len: int,
    cache_dtype: torch.dtype | None,
    capability: int,
    *,
    overlap: bool = False,
    norms: bool | None = None,
) -> Resources:
    """Compile as for an H200, with the tuning that is used there; ``norms`` says of what kind a rotation is."""
    num_query_heads, num_kv_heads, head_size, dtype = shape
    query = torch.empty(num_rows * max_query_len, num_query_heads, head_size, dtype=dtype)
    new = torch.empty(num_rows * max_query_len, num_kv_heads, head_size, dtype=dtype)
    cache = torch.empty(4, 16, num_kv_heads, head_size, dtype=cache_dtype or dtype)
    ints = torch.empty(num_rows, 4, dtype=torch.int32)
    options: dict[str, Any] = {}
    if max_query_len > 1:
        options = {
            "query_start_loc": torch.empty(num_rows + 1, dtype=torch.int32),
            "max_query_len": max_query_len,
        }
    if cache_dtype is not None:
        options |= {
            "sinks": torch.empty(num_query_heads),
            "key_scale": torch.empty(1),
            "value_scale": torch.empty(1),
        }
    if norms is not None:
        options["rotation"] = random_rotation(head_size, norms=norms, dtype=dtype)
    tuning = gpu.decode_tuning(
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
        record_launches(gpu, "_paged_decode_kernel") as launches,
        mock.patch.object(gpu, "decode_tuning", lambda *sizes, **facts: tuning),
    ):
        paged_decode(
            query,
            new,
            new,
            cache,
            cache,
            ints,
            ints[:, 0].contiguous(),
            launch=gpu.paged_decode,
            out=query,
            overlap=overlap,
            **grouped(scale=1.0, **options),
        )
    return compile_launch(launches[0], capability)
