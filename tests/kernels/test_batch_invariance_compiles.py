"""The kernels of batch invariance, compiled for GPUs that need not be there: one instruction for any number of rows."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch

from rose_backend.kernels import AttentionOptions, NormInput, PackedLinear, PackedNorm, PagedKV
from rose_backend.kernels.attention import batch_invariant as attention
from rose_backend.kernels.attention import paged_prefill
from rose_backend.kernels.linear import batch_invariant as linear
from tests.support.aot import SHARED_BYTES, Resources, compile_launch, compiles, overlapped, record_launches

BFLOAT16 = torch.bfloat16
# Qwen3 0.6B: query, key and value after a norm; gate and factor; what the MLP adds; a head.
PARTS = {"qkv": (1024, 4096), "gate": (1024, 6144), "add": (3072, 1024), "head": (1024, 151_936)}
ROWS = [1, 65, 8192]
HEADS = [(32, 8, 128), (12, 12, 64)]
MMA = re.compile(
    r"\b(wgmma\.mma_async\.sync\.aligned\.(?:m\d+)n\d+(?:k\d+)|mma\.sync\.aligned\.m\d+n\d+k\d+)\S*"
)


def instructions(resources: Resources) -> set[str]:
    """Return the tensor-core instructions, without the number of columns, which are apart from one another."""
    return {re.sub(r"n\d+(?=k)", "n*", found.group(1)) for found in MMA.finditer(resources.ptx)}


def compile_linear(rows: int, shape: tuple[int, int], capability: int, part: str) -> Resources:
    depth, width = shape
    # Nothing touches the memory.
    x, out = torch.empty((rows, depth), dtype=BFLOAT16), torch.empty((rows, width), dtype=BFLOAT16)
    layer = PackedLinear(torch.empty((width, depth), dtype=BFLOAT16), None, None, is_gated=part == "gate")
    norm, residual, next_norm = PackedNorm(torch.empty(depth, dtype=BFLOAT16), 1e-6), None, None
    given = x if part in ("add", "head") else NormInput(x, torch.empty(rows, 2, 16), norm)
    if part == "gate":
        out = out[:, : width // 2].contiguous()
    if part == "add":
        residual, next_norm = out, PackedNorm(torch.empty(width, dtype=BFLOAT16), 1e-6)
    if part == "head":
        out = out.float()
    scratch = torch.empty(16), torch.empty(16, dtype=torch.int32)
    with (
        record_launches(linear, "_batch_invariant_linear_kernel") as launches,
        mock.patch.object(linear, "num_processors", lambda device: 132),
        mock.patch.object(linear, "_scratch", lambda device: scratch),
        mock.patch.object(linear, "has_dependent_launch", lambda device: capability >= 90),
    ):
        linear.batch_invariant_linear(given, layer, out, residual=residual, next_norm=next_norm)
    return compile_launch(overlapped(launches[0], capability), capability)


@compiles("_batch_invariant_linear_kernel")
@pytest.mark.parametrize(("part", "shape"), PARTS.items(), ids=str)
def test_products_of_any_number_of_rows_take_one_instruction(
    part: str, shape: tuple[int, int], capability: int
) -> None:
    found = set()
    for rows in ROWS:
        resources = compile_linear(rows, shape, capability, part)
        assert resources.shared_bytes <= SHARED_BYTES
        assert resources.spill_bytes == 0
        # No product is fused with a sum, outside the tensor cores.
        assert not re.search(r"\bfma\.rn\S*f32", resources.ptx)
        found |= instructions(resources)
    if capability == 90:
        assert found == {"wgmma.mma_async.sync.aligned.m64n*k16"}
    if capability == 80:
        assert found == {"mma.sync.aligned.m16n*k16"}


def compile_attention(
    heads: tuple[int, int, int], num_rows: int, capability: int, *, starts: bool, **options: Any
) -> list[Resources]:
    num_heads, num_kv_heads, head_size = heads
    num_tokens = num_rows * (100 if starts else 1)
    query = torch.empty((num_tokens, num_heads, head_size), dtype=BFLOAT16)
    new_key, new_value = torch.empty((2, num_tokens, num_kv_heads, head_size), dtype=BFLOAT16)
    caches = torch.empty((2, 8, 16, num_kv_heads, head_size), dtype=BFLOAT16)
    lengths = torch.zeros(num_rows, dtype=torch.int32)
    starts_of_rows = torch.zeros(num_rows + 1, dtype=torch.int32) if starts else None
    kv = PagedKV(caches[0], caches[1], torch.zeros((num_rows, 4), dtype=torch.int32), lengths, starts_of_rows)
    scratch = torch.empty(16), torch.empty(16, dtype=torch.int32)
    with (
        record_launches(attention, "_batch_invariant_attention_kernel") as launches,
        record_launches(paged_prefill, "_store_chunk_kernel") as stores,
        mock.patch.object(attention, "num_processors", lambda device: 132),
        mock.patch.object(attention, "_scratch", lambda *sizes: scratch),
    ):
        attention.batch_invariant_attention(
            query,
            paged_prefill.NewTokens(new_key, new_value),
            kv,
            options=AttentionOptions(head_size**-0.5, **options),
            out=torch.empty_like(query),
        )
    return [compile_launch(overlapped(each, capability), capability) for each in (*launches, *stores)]


@compiles("_batch_invariant_attention_kernel")
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decodes_and_prompts_are_attended_by_the_same_instructions(
    heads: tuple[int, int, int], capability: int
) -> None:
    found = []
    for num_rows, starts in ((1, False), (4, True)):
        resources, _ = compile_attention(heads, num_rows, capability, starts=starts)
        assert resources.shared_bytes <= SHARED_BYTES
        found.append(sorted(found_in.group(0) for found_in in MMA.finditer(resources.ptx)))
        # No product is fused with a sum, outside the tensor cores.
        assert not re.search(r"\bfma\.rn\S*f32", resources.ptx)
    assert found[0] == found[1]
    if capability == 90:
        assert found[0] and all(each.startswith("wgmma") for each in found[0])


def test_options_of_attention_compile_without_spills() -> None:
    slopes = torch.empty(32)
    resources, _ = compile_attention(
        HEADS[1],
        4,
        90,
        starts=True,
        sliding_window=100,
        logits_soft_cap=2.0,
        alibi_slopes=slopes,
        sinks=slopes,
    )
    assert resources.spill_bytes == 0
