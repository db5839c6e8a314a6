"""The kernel of small-batch products, compiled with the configurations that are chosen for models' shapes."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

from rose_backend.kernels import Float8Weight, Int4Weight, NormInput
from rose_backend.kernels.linear import float8, int4, many_rows
from rose_backend.kernels.linear import small_batch_linear as gpu
from tests.support.aot import SHARED_BYTES, Resources, compile_launch, compiles, record_launches
from tests.support.linear_cases import GATED_SHAPES, SHAPES, make_case, overlapping

HALF, FLOAT32 = torch.float16, torch.float32
# With the tensor memory accelerator, all that an H200 or a B200 has.
MOST_SHARED_BYTES = {80: SHARED_BYTES, 90: 227 << 10, 100: 227 << 10}
COMPILED = [(rows, *shape, HALF) for rows in (4, 32, 128, 256) for shape in SHAPES[rows in (4, 128) :: 2]]
COMPILED += [(4, *SHAPES[0], FLOAT32), (64, *SHAPES[3], FLOAT32)]
COMPILED += [
    (rows, *shape, HALF) for rows in (4, 32, 128, 256) for shape in GATED_SHAPES[rows in (4, 128) :: 2]
]
COMPILED += [(4, *GATED_SHAPES[1], FLOAT32)]
# Llama 3.1 8B, Mistral 7B, Llama 3.2 1B twice, Llama 3.1 8B, Qwen3 0.6B, and Qwen3 30B-A3B twice.
WIDE_SHAPES = [
    (4096, 6144, "rms nobias"),
    (4096, 14_336, "rms gated nobias"),
    (2048, 16_384, "rms gated nobias"),
    (8192, 2048, "nobias residual"),
    (14_336, 4096, "nobias residual"),
    (2048, 1024, "nobias residual"),
    (2048, 5120, "rms nobias"),
    (4096, 2048, "nobias residual"),
]
COMPILED += [
    (rows, *shape, HALF) for rows in (1, 2, 8, 32, 64, 128, 256) for shape in WIDE_SHAPES[rows % 3 == 2 :: 2]
]
# Qwen3 8B and Llama 3.1 8B.
FLOAT8_SHAPES = [
    (4096, 6144, "blocks rms nobias"),
    (4096, 28_672, "rows rms gated nobias"),
    (12_288, 4096, "blocks nobias residual"),
]
COMPILED += [
    (rows, *shape, dtype)
    for dtype in (HALF, torch.bfloat16)
    for rows in (1, 16, 32, 64, 128)
    for shape in FLOAT8_SHAPES
]
COMPILED += [(4, *FLOAT8_SHAPES[0], FLOAT32)]
# Llama 3.1 8B, Qwen2 0.5B, and what other groups and zeros are added to.
INT4_SHAPES = [
    (4096, 28_672, "int4-128 rms gated nobias"),
    (14_336, 4096, "int4-128 zeros nobias residual"),
    (4096, 6144, "int4-64 zeros rms nobias"),
    (4096, 6144, "int4-32 zeros rms nobias"),
    (896, 1152, "int4-all zeros rms"),
]
COMPILED += [
    (rows, *shape, dtype)
    for dtype in (HALF, torch.bfloat16)
    for rows in (1, 16, 32, 64, 128)
    for shape in INT4_SHAPES
]
COMPILED += [(4, *INT4_SHAPES[0], FLOAT32)]


@compiles("small_batch_linear_kernel")
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (1, SHAPES[0]),
        (16, SHAPES[3]),
        (32, SHAPES[3]),
        (64, SHAPES[3]),
        (64, SHAPES[2]),
        (16, GATED_SHAPES[0]),
        (4, GATED_SHAPES[1]),
        (32, GATED_SHAPES[1]),
        (32, GATED_SHAPES[2]),
        (32, WIDE_SHAPES[4]),
        (64, GATED_SHAPES[1]),
        *((rows, shape) for rows in (8, 64) for shape in FLOAT8_SHAPES + INT4_SHAPES),
    ],
)
def test_compiles_without_spills(rows: int, shape: tuple[int, int, str], capability: int) -> None:
    compile_chosen_config(capability, rows, *shape, HALF)


@pytest.mark.parametrize("rows", [8, 32, 64, 128])
def test_zeros_take_no_shared_memory_of_their_own(rows: int) -> None:
    """Numbers that pass through it on their way to tensor cores leave room for half as many programs."""
    plain, zeros = (
        compile_chosen_config(90, rows, 4096, 28_672, f"int4-128 {parts}nobias", torch.bfloat16)
        for parts in ("", "zeros ")
    )
    # Zeros themselves do at most.
    assert zeros.shared_bytes <= plain.shared_bytes + 1024


@compiles("_split_kernel", "small_batch_linear_kernel", capabilities=(90, 100))
@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("shape", FLOAT8_SHAPES)
def test_products_of_split_activations_compile_without_spills(
    rows: int, shape: tuple[int, int, str], capability: int
) -> None:
    compile_chosen_config(capability, rows, *shape, torch.bfloat16)


@compiles("_dequantize_kernel")
@pytest.mark.parametrize("parts", ["rows", "blocks"])
def test_writing_a_part_in_half_precision_compiles(parts: str, capability: int) -> None:
    case = make_case(512, 4096, 6144, f"{parts} nobias", torch.bfloat16, has_values=False)
    assert isinstance(case.weight, Float8Weight)
    with record_launches(float8, "_dequantize_kernel") as launches:
        many_rows.quantized_linear(case.x, case.weight, None)
    assert compile_launch(launches[0], capability).spill_bytes == 0


@compiles("_dequantize_int4_kernel")
@pytest.mark.parametrize("parts", ["int4-128", "int4-32 zeros", "int4-all"])
def test_writing_a_part_of_codes_in_half_precision_compiles(parts: str, capability: int) -> None:
    case = make_case(512, 4096, 6144, f"{parts} nobias", torch.bfloat16, has_values=False)
    assert isinstance(case.weight, Int4Weight)
    with record_launches(int4, "_dequantize_int4_kernel") as launches:
        many_rows.quantized_linear(case.x, case.weight, None)
    resources = compile_launch(launches[0], capability)
    # Eight numbers at once.
    assert "st.global.v4.b32" in resources.ptx and "ld.global.v4.b32" in resources.ptx


@pytest.mark.parametrize(("rows", "depth", "columns", "parts", "dtype"), COMPILED)
def test_the_chosen_cuts_compile_without_spills(
    rows: int, depth: int, columns: int, parts: str, dtype: torch.dtype
) -> None:
    compile_chosen_config(90, rows, depth, columns, parts, dtype)


def test_moments_in_many_parts_compile_without_spills() -> None:
    compile_chosen_config(90, 64, 2048, 4096, "rms gated nobias", FLOAT32, num_x_parts=1024)


def compile_chosen_config(
    capability: int,
    rows: int,
    depth: int,
    columns: int,
    parts: str,
    dtype: torch.dtype,
    *,
    num_x_parts: int = 16,
) -> Resources:
    case = make_case(rows, depth, columns, parts, dtype, has_values=False)
    case.x = case.x.clone(memory_format=torch.contiguous_format)
    given, out = case.given(), torch.empty((rows, case.num_outputs), dtype=dtype)
    if isinstance(given, NormInput):
        given = given._replace(moments=torch.empty(rows, 2, num_x_parts))
    exact = dtype is torch.float32
    split = dtype is torch.bfloat16 and isinstance(case.weight, Float8Weight) and capability >= 90
    with (
        record_launches(gpu, "small_batch_linear_kernel") as launches,
        record_launches(float8, "_split_kernel") as splits,
        overlapping(capability >= 90),
        mock.patch.object(gpu, "can_split", lambda x: split),
    ):
        gpu.small_batch_linear(
            given,
            case.layer,
            gelu=case.gelu,
            residual=case.residual,
            out=out,
            next_norm=None if case.residual is None else case.next_norm,
            config=gpu.choose_int4_config(
                rows, columns, depth, step=case.weight.step, exact=exact, has_wgmma=capability >= 90
            )
            if isinstance(case.weight, Int4Weight)
            else gpu.choose_float8_config(rows, columns, depth, split=split)
            if isinstance(case.weight, Float8Weight) and not exact
            else gpu.choose_linear_config(
                rows,
                columns,
                depth,
                exact=exact,
                can_use_tma=capability >= 90 and not isinstance(case.weight, Float8Weight),
                has_tensor_memory=capability >= 100,
            ),
        )
    split_k, tiles, lines = (launches[0].arguments[name] for name in ("SPLIT_K", "TILES", "PREFETCH"))
    weight = case.weight
    num_bits = (
        4 if isinstance(weight, Int4Weight) else 8 if isinstance(weight, Float8Weight) else 8 * out.itemsize
    )
    ahead = gpu.lines_ahead(
        tiles.DEPTH * num_bits // 8,
        tiles.BLOCK_N,
        -(-columns // tiles.BLOCK_N) * split_k,
    )
    assert lines == (ahead if capability >= 90 and not split else 0)
    resources = compile_launch(launches[0], capability)
    assert resources.spill_bytes == 0
    assert resources.shared_bytes <= MOST_SHARED_BYTES[capability]
    assert ("griddepcontrol.wait" in resources.ptx) == (capability >= 90)
    if isinstance(weight, Int4Weight) and not exact:
        # Of 16 bytes; of tiles of 8 rows and 32 columns 8.
        sizes = set(re.findall(r"cp\.async\.c[ag]\S* \[.*?\], \[.*?\], (0x\w+)", resources.ptx))
        assert {"0x10"} <= sizes <= {"0x10", "0x8"}
    assert len(splits) == split
    for each in splits:
        assert compile_launch(each, capability).spill_bytes == 0
    return resources
