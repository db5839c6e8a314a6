"""Products of a few rows with what stands around them in a layer: against separate operations in float64."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from rose_backend.compile_ahead.recorded_launches import record_launches
from rose_backend.conformance.error_budget import assert_within_budget
from rose_backend.errors import ShapeError
from rose_backend.kernels import (
    Float8Weight,
    InputQuantization,
    Int4Weight,
    NormInput,
    PackedLinear,
    PackedNorm,
    empty_rows,
    library_quantization,
    norm_input_of,
    pack_linear,
    pack_norm,
    quantize,
    quantized_linear,
    small_batch_linear,
    small_batch_linear_before_norm,
)
from rose_backend.kernels.arguments import MAX_ROWS
from rose_backend.kernels.gpu_properties import GpuProperties, Workspace
from rose_backend.kernels.linear import float8
from rose_backend.kernels.linear import small_batch_linear as gpu
from tests.support.implementations import (
    GPU,
    INTERPRETER,
    ON_GPU,
    REFERENCE,
    Implementation,
    each_dtype,
    kernels_only,
)
from tests.support.linear_cases import (
    EPS,
    FLOAT8_PARTS,
    GATED_PARTS,
    GATED_SHAPES,
    INT4_PARTS,
    PARTS,
    SHAPES,
    Case,
    make_case,
    overlapping,
    random_float8,
    random_int4,
)
from tests.support.moments import check_left, left_to

HALF = torch.float16


def launch(
    case: Case,
    config: dict[str, Any],
    use_pdl: bool | None = None,
    num_x_parts: int = 1,
    next_norm: PackedNorm | None = None,
) -> torch.Tensor:
    """Return the product, and check what it leaves to ``next_norm``; moments of ``x`` come in ``num_x_parts``."""
    layer = case.layer
    out = torch.full(
        (len(case.x), case.num_outputs + 7), float("nan"), dtype=case.x.dtype, device=case.x.device
    )
    # What the launcher allocates is full of NaN.
    torch.use_deterministic_algorithms(True)
    try:
        with overlapping(use_pdl):
            left = gpu.small_batch_linear(
                case.given(num_x_parts),
                layer,
                gelu=case.gelu,
                residual=case.residual,
                out=out[:, : case.num_outputs],
                next_norm=next_norm,
                config=gpu.LinearConfig(**config),
            )
    finally:
        torch.use_deterministic_algorithms(False)
    assert out[:, case.num_outputs :].isnan().all()
    result = out[:, : case.num_outputs]
    if next_norm is None:
        assert left is None
    else:
        check_left(left, next_norm, result)
    return result


def config(block_m: int, block_n: int, block_k: int, split_k: int = 1, **options: Any) -> dict[str, Any]:
    return dict(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        split_k=split_k,
        num_warps=4,
        num_stages=2,
        **options,
    )


def launch_public(case: Case, layer: PackedLinear, num_x_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of both public functions."""
    x, norm, options = case.given(num_x_parts), case.next_norm, {"gelu": case.gelu, "residual": case.residual}
    result, left = small_batch_linear_before_norm(x, layer, norm, **options)
    check_left(left, norm, result)
    return small_batch_linear(x, layer, **options), result


@each_dtype
@pytest.mark.parametrize("parts", PARTS + GATED_PARTS + FLOAT8_PARTS + INT4_PARTS)
def test_values(implementation: Implementation, dtype: torch.dtype, parts: str) -> None:
    """With the configurations that are chosen, which are a GPU's own."""
    sizes = (
        # Zeros of groups change from one turn of the loop to the next.
        [(5, 96, 40), *[(3, 640, 24)] * ("zeros" in parts)]
        if implementation is not GPU
        else [(rows, 801, 203) for rows in (1, 2, 3, 5, 16, 33, 64, 130)]
    )
    for size in sizes:
        case = make_case(*size, parts, dtype, implementation.device)
        for num_x_parts in (1, 4):
            for result in implementation(launch_public, case, case.layer, num_x_parts):
                case.check(result)


# Depths and widths that no tile divides; one tile over the whole depth, several, and a split depth; one tile of rows
# and several.
CONFIGS = [
    (1, config(1, 4, 128, use_dot=False)),
    (2, config(2, 4, 32, use_dot=False)),
    (3, config(4, 2, 32, 2, use_dot=False)),
    (5, config(16, 16, 128)),
    (5, config(8, 16, 128, warp_split=4, weights_left=True)),
    (16, config(16, 16, 32)),
    (17, config(16, 16, 128, warp_split=4)),
    (17, config(32, 32, 32, 3)),
    (21, config(16, 32, 64, 2, weights_left=True)),
]
# All parts on the lanes and on the matrix units; of the others what comes behind a tile's last product. Each one
# and each part has both dtypes.
CASES = [
    (rows, tiles, parts, (torch.float32, HALF)[(index + number) % 2])
    for index, (rows, tiles) in enumerate(CONFIGS)
    for number, parts in enumerate(
        PARTS + GATED_PARTS
        if rows in (1, 16)
        else ["norm gelu", "norm residual", "rms gated nobias", "gated residual"]
    )
]


@pytest.mark.parametrize(
    ("rows", "tiles", "parts", "dtype"), CASES, ids=lambda value: "" if isinstance(value, dict) else None
)
def test_the_interpreted_kernel_agrees(
    rows: int, tiles: dict[str, Any], parts: str, dtype: torch.dtype
) -> None:
    case = make_case(rows, 100, 37, parts, dtype)
    case.check(INTERPRETER(launch, case, tiles))


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("parts", ["", "norm gelu", "norm residual", "rms gated residual"])
@pytest.mark.parametrize("tiles", [config(16, 16, 128), config(16, 32, 32, 3)])
def test_a_product_leaves_its_result_to_the_next_norm(
    tiles: dict[str, Any], parts: str, dtype: torch.dtype
) -> None:
    case = make_case(21, 100, 37, parts, dtype)
    case.check(INTERPRETER(launch, case, tiles, num_x_parts=4, next_norm=case.next_norm))


def two_products(
    hidden: torch.Tensor, first: PackedLinear, norm: PackedNorm, second: PackedLinear
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states behind a product and a residual add, and the product behind their norm."""
    out, left = small_batch_linear_before_norm(hidden, first, norm, residual=hidden)
    return out, small_batch_linear(left, second)


def test_large_norm_weights_overflow_no_float16(implementation: Implementation) -> None:
    """What is stored between two kernels is hidden states times the norm's weight: far beyond what float16 has."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(implementation.device, HALF)

    hidden, first, second = random(5, 64, scale=3000.0), random(64, 64, scale=0.1), random(64, 64, scale=1e-4)
    norm = random(64, scale=1000.0)
    layers = pack_linear(first), pack_norm(norm, EPS), pack_linear(second)
    out, actual = implementation(two_products, hidden, *layers)
    assert (out.float() * norm.float()).abs().amax(1).min() > torch.finfo(HALF).max

    def plain(dtype: torch.dtype) -> torch.Tensor:
        # Squares in float32, as everybody takes them: torch's in float16 overflow, and would allow any error.
        wide = out.to(torch.promote_types(dtype, torch.float32))
        normed = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt()
        return (normed.to(dtype) * norm.to(dtype)) @ second.to(dtype).T

    assert plain(HALF).isfinite().all()
    assert_within_budget(actual, plain(torch.float64), plain(HALF))


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1.0, 1.0),
        (1.001, 2.0),
        (-3.0, 4.0),
        (0.2, 0.25),
        (65504.0, 65536.0),
        (2.0**-24, 2.0**-24),
        (0.0, 1.0),
    ],
)
def test_the_scale_of_a_norm_is_a_power_of_two_not_below_its_weight(largest: float, expected: float) -> None:
    weight = torch.zeros(70, dtype=HALF)
    norm = pack_norm(weight, EPS)
    assert norm.scale is not None and norm.scale.item() == 1.0 and norm.weight is weight
    address = norm.scale.data_ptr()
    weight[33] = largest
    norm.update_scale()
    assert norm.scale.item() == expected and norm.scale.data_ptr() == address
    for dtype in (torch.float32, torch.bfloat16):
        assert pack_norm(weight.to(dtype), EPS).scale is None


def test_a_norm_that_changes_alone_is_read_where_it_was(implementation: Implementation) -> None:
    case = make_case(5, 64, 64, "", HALF, implementation.device)
    weight = torch.full((64,), 0.5, device=case.x.device, dtype=HALF)
    norm = pack_norm(weight, EPS)
    for factor in (1.0, 40.0):
        weight.copy_(torch.linspace(-3, 3, 64) * factor)
        norm.update_scale()
        out, result = implementation(two_products, case.x, case.layer, norm, pack_linear(case.weight))
        behind = Case(out, case.weight, None, (weight, None), None, gelu=False, gated=False)
        behind.check(result)


@pytest.mark.parametrize("parts", ["norm", "rms nobias"])
def test_moments_in_more_parts_than_registers_hold(parts: str) -> None:
    case = make_case(21, 4100, 10, parts, HALF)
    case.check(INTERPRETER(launch, case, config(16, 16, 1024), num_x_parts=4096))


@pytest.mark.parametrize("parts", ["norm residual", "rms gated nobias"])
def test_tiles_copied_by_the_tensor_memory_accelerator(parts: str) -> None:
    case = make_case(21, 109, 37, parts, HALF)
    case.x, case.weight = aligned(case.x[:, :104]), aligned(case.weight[:, :104])
    case.norm = tuple(None if vector is None else vector[:104] for vector in case.norm)
    case.check(INTERPRETER(launch, case, config(16, 32, 32, use_tma=True), next_norm=case.next_norm))


# A block's depth whole and in halves; a depth that is split, unevenly, and one that a tile has whole.
FLOAT8_CONFIGS = [
    (1, config(1, 4, 256, use_dot=False)),
    (5, config(8, 64, 128, 2, weights_left=True)),
    (5, config(8, 128, 128, 3, weights_left=True)),
    (21, config(16, 64, 64, 3)),
]
# Warps share the depth.
SHARED_DEPTHS = [
    (5, config(16, 32, 128, warp_split=4, weights_left=True)),
    (17, config(16, 32, 128, 2, warp_split=4)),
]
# Warps share a depth of more than a block.
SHARED_BLOCKS = [
    (5, config(16, 16, 256, warp_split=4, weights_left=True)),
    (17, config(16, 32, 512, warp_split=4)),
]


@pytest.mark.parametrize(
    ("rows", "tiles", "parts"),
    [
        (*each, parts)
        for parts in FLOAT8_PARTS
        for each in FLOAT8_CONFIGS + SHARED_DEPTHS + SHARED_BLOCKS * ("rows" in parts)
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_scales_of_blocks_and_rows_with_every_kind_of_tile(
    rows: int, tiles: dict[str, Any], parts: str
) -> None:
    for depth in (300, 256):
        case = make_case(rows, depth, 270, parts, HALF if tiles.get("use_dot", True) else torch.float32)
        case.check(INTERPRETER(launch, case, tiles, next_norm=case.next_norm))


def launch_split(case: Case, tiles: dict[str, Any], next_norm: PackedNorm | None = None) -> torch.Tensor:
    """Return the product of activations that are split, whatever their dtype and the GPU."""
    with mock.patch.object(gpu, "can_split", lambda x: True):
        return launch(case, tiles, next_norm=next_norm)


@pytest.mark.parametrize("parts", FLOAT8_PARTS)
@pytest.mark.parametrize(
    ("rows", "tiles"),
    [
        (1, config(8, 64, 128, weights_left=True)),
        (21, config(16, 64, 64, 2, weights_left=True)),
        (6, config(8, 64, 128, 4, weights_left=True)),
    ],
    ids=["one tile", "several", "a part without columns"],
)
def test_activations_that_are_split(rows: int, tiles: dict[str, Any], parts: str) -> None:
    case = make_case(rows, 384, 270, parts, HALF)
    # Groups of columns, and rows, of other magnitudes, down to none.
    case.x[:, 128:256] *= 1e-2
    case.x[::2] *= 8.0
    if rows > 1:
        case.x[3], case.x[5, 256:] = 0.0, 1e-7
    # No more bits than two parts have, nor when a norm's weights have multiplied them.
    case.x = case.x.bfloat16().to(HALF)
    if case.norm is not None:
        case.norm = (2.0 ** torch.randint(-2, 2, case.norm[0].shape).to(HALF), None)
    case.check(INTERPRETER(launch_split, case, tiles, next_norm=case.next_norm))


@kernels_only
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 3e38])
def test_the_parts_of_activations_are_exact(implementation: Implementation, magnitude: float) -> None:
    """But for bits below 2**-20 of the largest number of a group."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 256, generator=generator) * 4 ** torch.randn(5, 256, generator=generator)
    x = (x / x.abs().max() * magnitude).to(implementation.device, torch.bfloat16)
    parts, scales = (each.double().cpu() for each in implementation(float8.split_rows, x))
    exact = x.double().cpu().view(5, 2, 128)
    split = (parts[:, 0] + parts[:, 1] / 16).view(5, 2, 128) * scales.T[..., None]
    largest = exact.abs().amax(2, keepdim=True)
    assert ((split - exact).abs() < largest * 2**-20).all()
    assert (split == exact)[exact.abs() >= largest * 2**-13].all()


@pytest.mark.parametrize(
    ("dtype", "tiles"),
    [(HALF, config(8, 64, 128, 4, weights_left=True)), (torch.float32, config(8, 4, 256, 4, use_dot=False))],
    ids=["dot", "exact"],
)
def test_no_scale_is_read_beyond_the_depth(dtype: torch.dtype, tiles: dict[str, Any]) -> None:
    """Four programs take two blocks each of six, and what lies behind the scales is not a number."""
    case = make_case(5, 768, 128, "blocks nobias", dtype)
    assert isinstance(case.weight, Float8Weight)
    scales = torch.full((6 + 2,), float("nan"))
    scales[:6] = case.weight.scales[0]
    weight = replace(case.weight, scales=scales[:6].view(1, 6))
    case.check(INTERPRETER(launch, replace(case, weight=weight), tiles))


def test_tiles_with_more_than_one_scale_are_refused() -> None:
    case = make_case(5, 300, 270, "blocks nobias", HALF)
    for tiles in (config(16, 16, 256), config(16, 256, 64), config(16, 16, 256, warp_split=2)):
        with pytest.raises(ShapeError, match="that divide 128 with blocks, got"):
            launch(case, tiles)
    # Half of a gated layer's rows are the gate's.
    gated = make_case(5, 300, 270, "blocks gated nobias", HALF)
    gated.check(INTERPRETER(launch, gated, config(16, 256, 64)))


def convert_all(dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return what a product makes of every e4m3 number but NaN, [254], each at another depth, where ``x`` is not 0."""
    codes = torch.cat([torch.arange(127), torch.arange(128, 255)]).to(torch.uint8)
    values = torch.zeros(254, 128, dtype=torch.uint8)
    values[torch.arange(254), torch.arange(254) % 128] = codes
    weight = Float8Weight(values.view(torch.float8_e4m3fn).to(device), torch.ones(254, 1, device=device))
    # One row for each place in four numbers that are converted together: a number in another's place shows.
    x = torch.eye(4, dtype=dtype, device=device).repeat(1, 32)
    out = small_batch_linear(x, pack_linear(weight))
    return out[torch.arange(254) % 4, torch.arange(254)]


@each_dtype
def test_every_float8_number_is_exact(implementation: Implementation, dtype: torch.dtype) -> None:
    codes = torch.cat([torch.arange(127), torch.arange(128, 255)]).to(torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(implementation(convert_all, dtype, implementation.device).cpu(), expected)


# One turn, several, and more programs than have columns; a chunk that ends past the last column.
@pytest.mark.parametrize(
    ("rows", "depth", "tiles"),
    [
        (1, 256, config(8, 64, 256, weights_left=True)),
        (21, 640, config(16, 32, 256, 2, weights_left=True)),
        (6, 768, config(8, 64, 256, 4, weights_left=True)),
        (5, 384, config(8, 64, 256, weights_left=True)),
    ],
    ids=["one turn", "several", "a part without columns", "half a chunk"],
)
@pytest.mark.parametrize("parts", INT4_PARTS)
def test_codes_of_every_kind_of_group(rows: int, depth: int, tiles: dict[str, Any], parts: str) -> None:
    if "int4-32" in parts:
        tiles = {**tiles, "block_k": 128}
    for dtype in (HALF, torch.float32):
        case = make_case(rows, depth, 70, parts, dtype)
        case.check(INTERPRETER(launch, case, tiles, next_norm=case.next_norm))


def test_no_scale_of_a_group_is_read_beyond_the_depth() -> None:
    """A chunk of words ends a group behind the last one, and what lies there is not a number."""
    case = make_case(5, 384, 70, "int4-128 nobias", HALF)
    assert isinstance(case.weight, Int4Weight)
    scales = torch.full((4, 70), float("nan"), dtype=HALF)
    scales[:3] = case.weight.scales
    weight = replace(case.weight, scales=scales[:3])
    case.check(INTERPRETER(launch, replace(case, weight=weight), config(8, 64, 256, weights_left=True)))


def test_other_tiles_of_codes_are_refused() -> None:
    case = make_case(5, 256, 70, "int4-128 nobias", HALF)
    good = {"block_m": 8, "block_n": 64, "block_k": 256, "weights_left": True}
    for wrong in ({"block_k": 128}, {"weights_left": False}, {"warp_split": 4}, {"use_tma": True}):
        with pytest.raises(ShapeError, match="a depth of 256, with an int4 weight, got"):
            launch(case, good | wrong)


def test_a_matrix_is_what_its_codes_zeros_and_scales_say() -> None:
    generator = torch.Generator().manual_seed(3)
    for depth, group, zeros in ((384, 128, False), (320, 64, True), (160, 32, True), (300, 300, False)):
        weight, matrix = random_int4(20, depth, generator, group, zeros=zeros)
        weight.check()
        assert weight.shape == matrix.shape and weight.group_size == group
        assert torch.equal(weight.dequantized(torch.float32).double(), matrix)


NUM_ZEROS = 16


def convert_codes(dtype: torch.dtype, group: int, device: str) -> torch.Tensor:
    """Return what a product makes of every code with every zero, [zeros * 16], where only one column is not 0."""
    zeros = torch.arange(NUM_ZEROS).repeat_interleave(16)
    codes = zeros[:, None].repeat(1, 256)
    rows = torch.arange(len(codes))
    columns = rows * 37 % 256
    codes[rows, columns] = torch.arange(16).repeat(NUM_ZEROS)
    scales = 2.0 ** (rows % 24 - 14)
    weight = Int4Weight(
        torch.empty(len(codes), 64, dtype=torch.int16),
        scales.to(HALF).repeat(256 // group, 1),
        zeros.to(torch.uint8).repeat(256 // group, 1),
        256,
    )
    step, chunk = (32, 128) if group == 32 else (64, 256)
    words = torch.zeros(len(codes), 64, dtype=torch.int64)
    for column in range(256):
        words[:, column // chunk * step + column % step] += codes[:, column] << (4 * (column % chunk // step))
    weight.words.copy_(torch.where(words < 1 << 15, words, words - (1 << 16)))
    weight = Int4Weight(weight.words.to(device), weight.scales.to(device), weight.zeros.to(device), 256)
    # One row for each place in eight numbers that are converted together: a number in another's place shows.
    x = torch.eye(8, dtype=dtype, device=device).repeat(1, 32)
    out = small_batch_linear(x, pack_linear(weight))
    others = out.clone()
    others[columns % 8, rows] = 0.0
    assert not others.any()
    return out[columns % 8, rows]


@each_dtype
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_every_code_is_exact_with_every_zero(
    implementation: Implementation, dtype: torch.dtype, group: int
) -> None:
    rows = torch.arange(NUM_ZEROS * 16)
    expected = ((rows % 16 - rows // 16) * 2.0 ** (rows % 24 - 14)).to(dtype)
    assert torch.equal(implementation(convert_codes, dtype, group, implementation.device).cpu(), expected)


def make_float8(columns: int, depth: int, kind: str, device: str) -> Float8Weight:
    generator = torch.Generator().manual_seed(depth)
    return random_float8(columns, depth, generator, blocks=kind == "blocks", device=device)


def make_quantized(columns: int, depth: int, kind: str, device: str) -> Float8Weight | Int4Weight:
    if kind in ("rows", "blocks"):
        return make_float8(columns, depth, kind, device)
    generator = torch.Generator().manual_seed(depth)
    group, zeros = kind.partition(" ")[0], kind.endswith("zeros")
    return random_int4(
        columns, depth, generator, depth if group == "all" else int(group), zeros=zeros, device=device
    )[0]


@each_dtype
@pytest.mark.parametrize("kind", ["rows", "blocks", "128", "64 zeros", "32", "all zeros"])
def test_products_of_many_rows(implementation: Implementation, dtype: torch.dtype, kind: str) -> None:
    """In three parts of the weight, of 128, 128 and 14 rows."""
    generator, device = torch.Generator().manual_seed(1), implementation.device
    depth = 320 if kind.startswith(("64", "32")) else 384 if kind == "128" else 300
    x = torch.randn(7, depth + 3, generator=generator).to(device, dtype)[:, :depth]
    weight, bias = (
        make_quantized(270, depth, kind, device),
        torch.randn(270, generator=generator).to(device, dtype),
    )
    exact = x.double() @ weight.dequantized(torch.float32).double().T
    plain = x @ weight.dequantized(dtype).T
    for each in (None, bias):
        actual = implementation(in_small_parts, x, weight, each)
        shift = 0 if each is None else each
        assert_within_budget(actual, exact + shift, plain + shift)


def in_small_parts(
    x: torch.Tensor, weight: Float8Weight | Int4Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    from rose_backend.kernels.linear import many_rows

    with (
        mock.patch.object(many_rows, "_PART_BYTES", 130 * x.shape[1] * x.element_size()),
        Workspace(),
    ):
        return quantized_linear(x, weight, bias)


@pytest.mark.parametrize("implementation", [REFERENCE, ON_GPU], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_products_of_activations_in_8_bits(
    implementation: Implementation, dtype: torch.dtype, kind: str
) -> None:
    generator, device = torch.Generator().manual_seed(1), implementation.device
    for num_rows, depth, columns in ((1, 512, 272), (7, 1024, 400), (130, 1536, 4096)):
        x, bias = torch.randn(num_rows, depth, generator=generator), torch.randn(columns, generator=generator)
        x, bias = x.to(device, dtype), bias.to(device, dtype)
        weight = make_float8(columns, depth, kind, device)
        quantization = InputQuantization(by_group=kind == "blocks", aligned_scales=kind == "blocks")
        assert library_quantization(weight, dtype) == (None if device == "cpu" else quantization)
        quantized = quantize(x, quantization)
        groups = quantized.values.double().unflatten(1, (quantized.scales.shape[1], -1))
        meant = (groups * quantized.scales[:, :, None]).flatten(1)
        exact = meant @ weight.dequantized(torch.float32).double().T
        plain = meant.to(dtype) @ weight.dequantized(dtype).T
        # What rounding activations to 8 bits costs.
        cost = (x.double() @ weight.dequantized(torch.float32).double().T - exact).norm()
        for each, shift in ((None, 0), (bias, bias)):
            actual = implementation(quantized_linear, quantized, weight, each)
            assert actual.dtype == dtype and actual.shape == exact.shape
            if kind == "blocks" or not implementation.has_kernels:
                assert_within_budget(actual, exact + shift, plain + shift)
            # Sums of rows are of fewer bits.
            assert (actual.double() - exact - shift).norm() < cost / 8


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "capability", "is_taken"),
    [
        ("rows", (272, 304), torch.bfloat16, (8, 9), True),
        ("rows", (272, 304), torch.float16, (12, 0), True),
        ("rows", (272, 304), torch.bfloat16, (8, 6), False),
        ("rows", (272, 304), torch.float32, (9, 0), False),
        ("rows", (272, 312), torch.bfloat16, (9, 0), False),
        ("rows", (280, 304), torch.bfloat16, (9, 0), False),
        ("blocks", (272, 512), torch.bfloat16, (9, 0), True),
        ("blocks", (272, 512), torch.bfloat16, (8, 9), False),
        ("blocks", (272, 512), torch.bfloat16, (10, 0), False),
        ("blocks", (272, 640), torch.bfloat16, (9, 0), False),
    ],
)
def test_what_a_library_multiplies_in_8_bits(
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
    is_taken: bool,
) -> None:
    weight, by_group = make_float8(*shape, kind, "meta"), kind == "blocks"
    expected = InputQuantization(by_group=by_group, aligned_scales=by_group) if is_taken else None
    with record_launches(GpuProperties(capability, 132)):
        assert library_quantization(weight, dtype) == expected


def test_parts_of_a_weight_are_about_equal() -> None:
    from rose_backend.kernels.linear.many_rows import _rows_at_once

    # Qwen3 8B's last product, 70B's, a small one, and one whose rows hardly fit.
    sizes = [(4096, 1365), (8192, 585), (270, 4096), (4096, 100)]
    assert [_rows_at_once(*each) for each in sizes] == [1024, 512, 384, 96]


def test_bad_float8_weights_are_named() -> None:
    values = torch.zeros(270, 300).to(torch.float8_e4m3fn)
    scales, x = torch.ones(270, 1), torch.zeros(2, 300)
    wrong = [
        (Float8Weight(values.half(), scales), "values: expected dtype torch.float8_e4m3fn"),
        (Float8Weight(values, scales.half()), "scales: expected dtype torch.float32"),
        (
            Float8Weight(values, torch.ones(3, 2)),
            r"scales: expected shape \(270, 1\) or \(3, 3\), got \(3, 2\)",
        ),
        (Float8Weight(values.repeat(1, 2)[:, :300], scales), "values: expected a contiguous tensor"),
    ]
    for weight, message in wrong:
        with pytest.raises(ShapeError, match=message):
            pack_linear(weight)
        with pytest.raises(ShapeError, match=message):
            quantized_linear(x, weight)
    good = Float8Weight(values, scales)
    with pytest.raises(
        ShapeError, match="norm_weight and norm_bias: expected neither with a quantized weight"
    ):
        pack_linear(good, norm_weight=torch.ones(300), norm_bias=torch.ones(300))
    with pytest.raises(ShapeError, match="bias: expected O=270, got 3"):
        pack_linear(good, torch.ones(3))
    with pytest.raises(ShapeError, match="weight: expected whole blocks of 128 rows of a gate, got 135 rows"):
        pack_linear(Float8Weight(values, torch.ones(3, 3)), gated=True)
    with pytest.raises(ShapeError, match="weight: expected E=299, got 300"):
        quantized_linear(x[:, 1:], good)


def test_bad_int4_weights_are_named() -> None:
    words = torch.zeros(6, 128, dtype=torch.int16)  # of 512 columns, 384 of which there are
    scales, zeros = torch.ones(3, 6), torch.zeros(3, 6, dtype=torch.uint8)
    wrong = [
        (Int4Weight(words.int(), scales, zeros, 384), "words: expected dtype torch.int16"),
        (Int4Weight(words, scales.double(), zeros, 384), "scales: expected float32 or half precision, got"),
        (Int4Weight(words, scales, zeros.int(), 384), "zeros: expected dtype torch.uint8"),
        (Int4Weight(words, scales, zeros[:2], 384), "zeros: expected N=3"),
        (
            Int4Weight(words, scales, zeros, 385),
            r"for \(32, 64, 128\) or all of 385 columns, got 3 in each row",
        ),
        (Int4Weight(words, torch.ones(2, 6), None, 512), "or all of 512 columns, got 2 in each row"),
        (Int4Weight(words[:, :64].contiguous(), scales, zeros, 384), "words: expected M=128, got 64"),
        (Int4Weight(words, scales.T.contiguous().T, zeros, 384), "scales: expected a contiguous tensor"),
    ]
    for weight, message in wrong:
        with pytest.raises(ShapeError, match=message):
            pack_linear(weight)
        with pytest.raises(ShapeError, match=message):
            quantized_linear(torch.zeros(2, 384), weight)
    good = Int4Weight(words, scales, zeros, 384)
    with pytest.raises(ShapeError, match="weight: expected E=512, got 384"):
        small_batch_linear(torch.zeros(2, 512), pack_linear(good))


def test_rows_behind_are_copied_and_not_used() -> None:
    case = make_case(21, 109, 37, "residual nobias", HALF)
    whole = empty_rows(case.x, 21, 104)
    whole.untyped_storage().copy_(torch.full((32, 104), float("nan"), dtype=HALF).untyped_storage())
    case.x, case.weight = whole.copy_(case.x[:, :104]), aligned(case.weight[:, :104])
    assert gpu.rows_of_tiles(case.x, 16) == 32
    case.check(INTERPRETER(launch, case, config(16, 32, 32, use_tma=True), next_norm=case.next_norm))


def test_no_more_rows_are_copied_than_there_are() -> None:
    stored = torch.zeros(40, 64)
    assert gpu.rows_of_tiles(stored[:21], 16) == 32
    assert gpu.rows_of_tiles(stored[:21, :32], 64) == 40
    assert gpu.rows_of_tiles(stored[19:], 16) == 21
    assert gpu.rows_of_tiles(stored[19:, 32:], 32) == 21
    assert gpu.rows_of_tiles(stored[3:4].expand(5, 64), 8) == 8
    assert [len(empty_rows(stored, rows, 2)) for rows in (0, 1, 33, MAX_ROWS + 1)] == [0, 1, 33, MAX_ROWS + 1]
    sizes = [empty_rows(stored, rows, 2).untyped_storage().nbytes() // 8 for rows in (0, 1, 33, MAX_ROWS + 1)]
    assert sizes == [1, 1, 64, MAX_ROWS + 1]


@pytest.mark.parametrize(
    ("depth", "block_n", "programs", "expected"),
    [
        (1024, 64, 96, 16),  # Qwen3 0.6B's widest: all of it
        (4096, 64, 600, 4),  # 264 programs at once x 64 columns x 4 lines x 128 bytes are 8.3 MiB
        (14_336, 64, 128, 16),
        (1_000_000, 256, 448, 1),
    ],
)
def test_weights_that_are_asked_for_ahead_fit_the_cache(
    depth: int, block_n: int, programs: int, expected: int
) -> None:
    assert gpu.lines_ahead(2 * depth, block_n, programs) == expected


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    return torch.cat([matrix, matrix.new_full((len(matrix), 8), float("nan"))], 1)[:, : matrix.shape[1]]


def launch_twice(case: Case, tiles: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return launch(case, tiles), launch(case, tiles)


def test_a_split_depth_leaves_its_counters_as_they_were() -> None:
    case = make_case(4, 100, 37, "residual")
    first, second = INTERPRETER(launch_twice, case, config(16, 16, 32, 3))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("depth", "columns"),
    [
        *((768, 4096), (3072, 4096), (768, 4097), (3072, 50_257)),
        *((4096, columns) for columns in (1025, 4097, 6144, 7168, 7681, 14_336)),
        *((14_336, 4096), (2048, 2048), (1_000_000, 8192)),
        # Down of Qwen2.5 7B, and QKV of Llama 2 13B.
        *((18_944, 3584), (5120, 15_360)),
    ],
)
def test_parts_never_outgrow_their_scratch(depth: int, columns: int) -> None:
    partial, arrivals = gpu.scratch_on(torch.device("cpu"))
    for rows, flag in itertools.product((1, 4, 8, 16, 32, 64, 65, 128, 200, 256), (False, True)):
        for tiles in (
            gpu.choose_linear_config(rows, columns, depth, exact=False, can_use_tma=flag),
            gpu.choose_float8_config(rows, columns, depth, split=flag),
            gpu.choose_int4_config(rows, columns, depth, step=64, exact=False, has_wgmma=flag),
        ):
            num_tiles = -(-columns // tiles.block_n) * -(-rows // tiles.block_m)
            if tiles.split_k > 1:
                assert num_tiles * tiles.split_k * tiles.block_m * tiles.block_n <= partial.numel()
                assert num_tiles <= arrivals.numel()


def test_a_cut_that_outgrows_the_scratch_is_refused() -> None:
    x, weight = torch.zeros(16, 768).half(), torch.zeros(1, 1).half().expand(50_257, 768)
    with pytest.raises(ShapeError, match="for the parts of 16 x 50257 results"):
        gpu.small_batch_linear(
            x,
            PackedLinear(weight, torch.zeros(50_257), None),
            gelu=False,
            residual=None,
            out=torch.empty(16, 50_257).half(),
            config=gpu.LinearConfig(16, 32, 256, 4),
        )


def test_bad_input_is_named() -> None:
    case = make_case(2, 8, 4, "")
    for part in ("norm_weight", "norm_bias"):
        with pytest.raises(ShapeError, match="norm_weight and norm_bias: expected both or neither, got one"):
            pack_linear(case.weight, case.bias, **{part: torch.ones(8)})
    with pytest.raises(ShapeError, match="weight: expected an even number of rows with a gate, got 3"):
        pack_linear(case.weight[:3], gated=True)
    gated = pack_linear(case.weight, case.bias, gated=True)
    with pytest.raises(ShapeError, match="gelu: expected False with a gated layer"):
        small_batch_linear(case.x, gated, gelu=True)
    with pytest.raises(ShapeError, match="out: expected O=2, got 4"):
        small_batch_linear(case.x, gated, out=torch.zeros(2, 4))
    with pytest.raises(ShapeError, match=f"at most {MAX_ROWS} rows, got {MAX_ROWS + 1}"):
        small_batch_linear(torch.zeros(MAX_ROWS + 1, 8), case.layer)
    with pytest.raises(ShapeError, match="weight: expected E=9"):
        small_batch_linear(torch.zeros(2, 9), case.layer)
    left = left_to(pack_norm(torch.ones(8), EPS), case.x)
    with pytest.raises(ShapeError, match="x_moments: expected T=2"):
        small_batch_linear(left._replace(moments=torch.zeros(3, 2, 4)), case.layer)
    for shape in ((2, 3, 4), (2, 2, 3)):
        with pytest.raises(ShapeError, match="x_moments: expected contiguous"):
            small_batch_linear(left._replace(moments=torch.zeros(shape)), case.layer)
    folded = pack_linear(case.weight, norm_weight=torch.ones(8), norm_bias=torch.ones(8))
    for x, layer in ((case.x, folded), (left, folded), (left_to(PackedNorm(None, EPS), case.x), case.layer)):
        with pytest.raises(ShapeError, match="x: expected what is left to a LayerNorm where one is folded"):
            small_batch_linear(x, layer)
    for norm, message in (
        (pack_norm(torch.ones(5), EPS), "norm_weight: expected E=4, got 5"),
        (pack_norm(torch.ones(4).half(), EPS), "norm_weight: expected dtype torch.float32 as hidden"),
        (PackedNorm(torch.ones(4), EPS, torch.ones(1)), "norm_scale: expected one with torch.float16 only"),
        (pack_norm(torch.ones(8)[::2], EPS), "norm_weight: expected a contiguous tensor"),
    ):
        with pytest.raises(ShapeError, match=message):
            small_batch_linear_before_norm(case.x, case.layer, norm)
    with pytest.raises(ShapeError, match="residual: expected O=4"):
        small_batch_linear(case.x, case.layer, residual=torch.zeros(2, 5))


def test_packing_folds_layer_norm_alone_and_leaves_its_inputs() -> None:
    case = make_case(3, 8, 6, "norm gated")
    tensors = [case.weight, case.bias, case.norm[0]]
    copies = [tensor.clone() for tensor in tensors]
    layer = case.layer
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    assert layer.num_outputs == 3
    order = [0, 3, 1, 4, 2, 5]
    folded = (case.weight * case.norm[0])[order]
    assert torch.equal(layer.weight, folded) and torch.equal(layer.column_sums, folded.sum(1))
    torch.testing.assert_close(layer.bias, (case.bias + case.weight @ case.norm[1])[order])
    plain = pack_linear(case.weight, case.bias, gated=True)
    assert torch.equal(plain.weight, case.weight[order]) and torch.equal(plain.bias, case.bias[order])
    # Nothing to fold and nothing to reorder: what was loaded stays where it is.
    plain = pack_linear(case.weight, case.bias)
    assert plain.weight.data_ptr() == case.weight.data_ptr() and plain.bias is case.bias


@pytest.mark.parametrize("parts", ["norm", "norm gated", "norm gelu"])
def test_folding_a_few_rows_at_once(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A whole matrix in float32 might not fit.
    case = make_case(3, 8, 10, parts, torch.float16)
    monkeypatch.setattr(importlib.import_module(pack_linear.__module__), "_FOLDED_ROWS", 4)
    assert case.norm is not None
    norm_weight, norm_bias = case.norm
    options = {"norm_weight": norm_weight, "norm_bias": norm_bias, "gated": case.gated}
    packed = pack_linear(case.weight, case.bias, **options)
    for name in ("weight", "bias", "column_sums"):
        assert torch.equal(getattr(packed, name), getattr(case.layer, name)), name


def test_no_rows_are_no_work() -> None:
    case = make_case(1, 8, 4, "norm gelu")
    case.x = case.x[:0]
    assert small_batch_linear(case.given(), case.layer, gelu=True).shape == (0, 4)


# On a GPU at the sizes of models: chained launches, repeats, graphs.

LLAMA_8B = [(4096, 4096, "residual"), (4096, 6144, "norm"), (4096, 14_336, ""), (14_336, 4096, "residual")]
LLAMA_8B += [
    (4096, 6144, "rms nobias"),
    (4096, 28_672, "rms gated nobias"),
    (14_336, 4096, "nobias residual"),
]
# And what Qwen3 0.6B has beside the shapes above.
LLAMA_1B = [
    (2048, 3072, "rms nobias"),
    (2048, 2048, "nobias residual"),
    (2048, 16_384, "rms gated nobias"),
    (8192, 2048, "nobias residual"),
    (2048, 1024, "nobias residual"),
]
QWEN3_30B = [(2048, 5120, "rms nobias"), (4096, 2048, "nobias residual"), (2048, 128, "rms nobias")]
# Depths of Qwen2.5 and SmolLM2, which end inside a tile.
FLOAT8_SHAPES = [
    (4096, 6144, "blocks rms nobias"),
    (4096, 28_672, "rows rms gated nobias"),
    (4096, 24_576, "blocks rms gated nobias"),
    (12_288, 4096, "blocks nobias residual"),
    (896, 1152, "rows rms"),
]
"""Qwen3 8B's, Llama 3.1 8B's widest, and one with a bias whose depth ends inside a tile."""
INT4_SHAPES = [
    (4096, 28_672, "int4-128 rms gated nobias"),
    (14_336, 4096, "int4-128 zeros nobias residual"),
    (4096, 6144, "int4-64 zeros rms nobias"),
    (4096, 4096, "int4-32 nobias residual"),
    (896, 1152, "int4-all zeros rms"),
]
"""Llama 3.1 8B's, in several forms, and one with a bias whose depth ends inside a chunk of words."""
UNEVEN = [
    (896, 1152, "rms nobias"),
    (896, 9728, "rms gated nobias"),
    (1536, 1536, "nobias residual"),
    (3584, 3584, "nobias residual"),
    (576, 3072, "rms gated nobias"),
]


def dtype_of(shape: tuple[int, int, str]) -> torch.dtype:
    """Return the type of a shape's numbers: bfloat16 has products of its own with quantized weights."""
    return torch.bfloat16 if shape in FLOAT8_SHAPES + INT4_SHAPES else HALF


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "row_counts"),
    [(shape, (*range(1, 66), 96, 127, 128, 129, 192, 255, 256)) for shape in SHAPES + GATED_SHAPES]
    + [
        (shape, (1, 2, 3, 8, 16, 17, 33, 64, 65, 256))
        for shape in LLAMA_1B + LLAMA_8B + QWEN3_30B + UNEVEN + FLOAT8_SHAPES + INT4_SHAPES
    ],
    ids=str,
)
def test_the_shapes_of_models_at_any_number_of_rows(shape: tuple[int, int, str], row_counts: Any) -> None:
    dtype = dtype_of(shape)
    case = make_case(256, *shape, dtype, "cuda")
    layer, norm, exact, same_dtype = case.layer, case.next_norm, case.plain(torch.float64), case.plain(dtype)
    for num_x_parts in (1, 16):
        given = case.given(num_x_parts)
        whole = given.scaled if isinstance(given, NormInput) else given
        # As a layer has them, and further apart: how tiles are copied depends on it, and with that what can go wrong.
        aligned = [whole.contiguous(), torch.cat([whole, whole[:, :8]], 1)[:, : shape[0]]]
        for rows, x in itertools.product(row_counts, aligned):
            residual = None if case.residual is None else case.residual[:rows]
            x = x[:rows]
            if isinstance(given, NormInput):
                x = NormInput(x, given.moments[:rows], given.norm)
            out = torch.full((rows, case.num_outputs), float("nan"), dtype=dtype, device="cuda")
            actual, left = small_batch_linear_before_norm(
                x, layer, norm, gelu=case.gelu, residual=residual, out=out
            )
            assert_within_budget(actual, exact[:rows], same_dtype[:rows])
            check_left(left, norm, actual)


KINDS_OF_CONFIGS = [
    (8, config(8, 32, 1024, warp_split=4, weights_left=True)),
    (29, config(32, 32, 1024, warp_split=4, weights_left=True)),
    (29, config(32, 16, 1024, warp_split=4)),
    (29, config(32, 64, 1024, weights_left=True)),
    (29, config(32, 64, 1024, weights_left=True, use_tma=True)),
    (64, config(64, 32, 1024, use_tma=True)),
    (100, config(64, 64, 64, use_tma=True)),
    (200, config(128, 64, 64, use_tma=True)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES + GATED_SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "tiles"), KINDS_OF_CONFIGS, ids=str)
def test_every_kind_of_configuration(rows: int, tiles: dict[str, Any], shape: tuple[int, int, str]) -> None:
    case = make_case(rows, *shape, HALF, "cuda")
    case.x = torch.cat([case.x, case.x[:, :8]], 1)[:, : shape[0]]
    split_k = 3 if shape[0] > 1024 else 1
    case.check(launch(case, {**tiles, "split_k": split_k}, num_x_parts=16, next_norm=case.next_norm))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES + GATED_SHAPES + FLOAT8_SHAPES + INT4_SHAPES, ids=str)
def test_a_thousand_runs_of_the_chosen_cuts_are_bitwise_equal(shape: tuple[int, int, str], rows: int) -> None:
    case = make_case(rows, *shape, dtype_of(shape), "cuda")
    case.x = case.x.contiguous()
    layer, given = case.layer, case.given(16)

    def run() -> torch.Tensor:
        return small_batch_linear(given, layer, gelu=case.gelu, residual=case.residual)

    first = run()
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        again = run()
        different |= (again != first).any()
    assert not different


@pytest.mark.gpu
@pytest.mark.parametrize("use_pdl", [False, True])
@pytest.mark.parametrize(
    "tiles", [config(16, 16, 128, 8), config(4, 4, 512, 2, use_dot=False)], ids=["dot", "vector"]
)
def test_a_thousand_runs_are_bitwise_equal(tiles: dict[str, Any], use_pdl: bool) -> None:
    case = make_case(4, 3072, 768, "residual", HALF, "cuda")
    first = launch(case, tiles, use_pdl).clone()
    case.check(first)
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        different |= (launch(case, tiles, use_pdl) != first).any()
    assert not different


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 32, 128, 256])
@pytest.mark.parametrize(
    ("inner", "parts"), [(3072, ("norm gelu", "residual")), (6144, ("rms gated nobias", "nobias residual"))]
)
def test_a_chain_of_dependent_launches_in_a_graph(inner: int, parts: tuple[str, str], rows: int) -> None:
    """Each launch reads what the one before wrote, in place over one residual, with early launches allowed."""
    up_case = make_case(rows, 768, inner, parts[0], HALF, "cuda")
    down_case = make_case(rows, 3072, 768, parts[1], HALF, "cuda")
    up, down, norm = up_case.layer, down_case.layer, up_case.given().norm
    start = up_case.x.contiguous()
    hidden, wide = start.clone(), torch.empty((rows, 3072), dtype=HALF, device="cuda")

    def chain(use_pdl: bool) -> None:
        hidden.copy_(start)
        left = norm_input_of(hidden, norm)
        with overlapping(use_pdl):
            for _ in range(24):
                gpu.small_batch_linear(left, up, gelu=up_case.gelu, residual=None, out=wide)
                left = gpu.small_batch_linear(
                    wide, down, gelu=False, residual=hidden, out=hidden, next_norm=norm
                )

    chain(False)
    expected = hidden.clone()
    assert expected.isfinite().all()
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(50):
        graph.replay()
        assert torch.equal(hidden, expected)
    if norm.weight is not None and norm.scale is not None:
        old = norm.scale.item()
        norm.weight.mul_(-4)
        norm.update_scale()
        assert norm.scale.item() == 4 * old
        chain(False)
        again = hidden.clone()
        assert again.isfinite().all() and not torch.equal(again, expected)
        graph.replay()
        assert torch.equal(hidden, again)
