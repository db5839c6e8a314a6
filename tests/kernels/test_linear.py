"""Products of a few rows with what stands around them in a layer: against separate operations in float64."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import empty_rows, pack_linear, small_batch_linear, small_batch_linear_and_moments
from rose_backend.kernels.arguments import MAX_ROWS, PackedLinear
from rose_backend.kernels.linear import small_batch_linear as gpu
from tests.support.error_budget import assert_within_budget
from tests.support.implementations import GPU, INTERPRETER, Implementation, each_dtype
from tests.support.linear_cases import (
    EPS,
    GATED_PARTS,
    GATED_SHAPES,
    PARTS,
    SHAPES,
    Case,
    make_case,
    overlapping,
)
from tests.support.moments import moments_of

HALF = torch.float16


def launch(
    case: Case,
    config: dict[str, Any],
    use_pdl: bool | None = None,
    num_x_parts: int = 1,
    with_moments: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the product and, ``with_moments``, its moments; those of ``x`` come in ``num_x_parts``."""
    layer = case.layer
    out = torch.full(
        (len(case.x), case.num_outputs + 7), float("nan"), dtype=case.x.dtype, device=case.x.device
    )
    # What the launcher allocates is full of NaN.
    torch.use_deterministic_algorithms(True)
    try:
        with overlapping(use_pdl):
            moments = gpu.small_batch_linear(
                case.x,
                layer,
                gelu=case.gelu,
                residual=case.residual,
                out=out[:, : case.num_outputs],
                x_moments=moments_of(case.x, num_x_parts) if case.norm else None,
                with_moments=with_moments,
                config=gpu.LinearConfig(**config),
            )
    finally:
        torch.use_deterministic_algorithms(False)
    assert out[:, case.num_outputs :].isnan().all()
    result = out[:, : case.num_outputs]
    return (result, moments) if with_moments else result


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


def launch_public(
    case: Case, layer: PackedLinear, num_x_parts: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of both public functions and the moments; ``num_x_parts`` None gives none of ``x``."""
    x_moments = None if num_x_parts is None else moments_of(case.x, num_x_parts)
    options = {"gelu": case.gelu, "residual": case.residual, "x_moments": x_moments}
    alone = small_batch_linear(case.x, layer, **options)
    return alone, *small_batch_linear_and_moments(case.x, layer, **options)


@each_dtype
@pytest.mark.parametrize("parts", PARTS + GATED_PARTS)
def test_values(implementation: Implementation, dtype: torch.dtype, parts: str) -> None:
    """With the configurations that are chosen, which are a GPU's own."""
    sizes = (
        [(5, 96, 40)]
        if implementation is not GPU
        else [(rows, 801, 203) for rows in (1, 2, 3, 5, 16, 33, 64, 130)]
    )
    for size in sizes:
        case = make_case(*size, parts, dtype, implementation.device)
        for num_x_parts in (None, 4):
            alone, result, moments = implementation(launch_public, case, case.layer, num_x_parts)
            case.check(alone)
            case.check(result)
            torch.testing.assert_close(moments.sum(2), moments_of(result, 1)[:, :, 0], rtol=1e-4, atol=1e-2)


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


@pytest.mark.parametrize("parts", ["", "norm gelu", "norm residual", "rms gated residual"])
@pytest.mark.parametrize("tiles", [config(16, 16, 128), config(16, 32, 32, 3)])
def test_moments_are_taken_from_one_product_to_the_next(tiles: dict[str, Any], parts: str) -> None:
    case = make_case(21, 100, 37, parts, HALF)
    result, moments = INTERPRETER(launch, case, tiles, num_x_parts=4, with_moments=True)
    case.check(result)
    torch.testing.assert_close(moments.sum(2), moments_of(result, 1)[:, :, 0])


@pytest.mark.parametrize("parts", ["norm", "rms nobias"])
def test_moments_in_more_parts_than_registers_hold(parts: str) -> None:
    case = make_case(21, 4100, 10, parts, HALF)
    case.check(INTERPRETER(launch, case, config(16, 16, 1024), num_x_parts=4096))


@pytest.mark.parametrize("parts", ["norm residual", "rms gated nobias"])
def test_tiles_copied_by_the_tensor_memory_accelerator(parts: str) -> None:
    case = make_case(21, 109, 37, parts, HALF)
    case.x, case.weight = aligned(case.x[:, :104]), aligned(case.weight[:, :104])
    case.norm = tuple(None if vector is None else vector[:104] for vector in case.norm)
    case.check(INTERPRETER(launch, case, config(16, 32, 32, use_tma=True)))


def test_rows_behind_are_copied_and_not_used() -> None:
    case = make_case(21, 109, 37, "rms residual nobias", HALF)
    whole = empty_rows(case.x, 21, 104)
    whole.untyped_storage().copy_(torch.full((32, 104), float("nan"), dtype=HALF).untyped_storage())
    case.x, case.weight = whole.copy_(case.x[:, :104]), aligned(case.weight[:, :104])
    case.norm = (case.norm[0][:104], None)
    assert gpu.rows_of_tiles(case.x, 16) == 32
    result, moments = INTERPRETER(launch, case, config(16, 32, 32, use_tma=True), with_moments=True)
    case.check(result)
    assert not moments.isnan().any()


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
    ],
)
def test_parts_never_outgrow_their_scratch(depth: int, columns: int) -> None:
    partial, arrivals = gpu.scratch_on(torch.device("cpu"))
    for rows, can_use_tma in itertools.product((4, 16, 32, 64, 128, 256), (False, True)):
        tiles = gpu.choose_linear_config(rows, columns, depth, exact=False, can_use_tma=can_use_tma)
        num_tiles = -(-columns // tiles.block_n) * -(-rows // tiles.block_m)
        if tiles.split_k > 1:
            assert num_tiles * tiles.split_k * tiles.block_m * tiles.block_n <= partial.numel()
            assert num_tiles <= arrivals.numel()


def test_a_cut_that_outgrows_the_scratch_is_refused() -> None:
    x, weight = torch.zeros(16, 768).half(), torch.zeros(1, 1).half().expand(50_257, 768)
    with pytest.raises(ShapeError, match="for the parts of 16 x 50257 results"):
        gpu.small_batch_linear(
            x,
            PackedLinear(weight, torch.zeros(50_257), None, eps=0.0),
            gelu=False,
            residual=None,
            out=torch.empty(16, 50_257).half(),
            x_moments=None,
            config=gpu.LinearConfig(16, 32, 256, 4),
        )


def test_bad_input_is_named() -> None:
    case = make_case(2, 8, 4, "")
    with pytest.raises(ShapeError, match="norm_bias: expected norm_weight"):
        pack_linear(case.weight, case.bias, norm_bias=torch.ones(8))
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
    with pytest.raises(ShapeError, match="x_moments: expected T=2"):
        small_batch_linear(case.x, case.layer, x_moments=torch.zeros(3, 2, 4))
    for shape in ((2, 3, 4), (2, 2, 3)):
        with pytest.raises(ShapeError, match="x_moments: expected contiguous"):
            small_batch_linear(case.x, case.layer, x_moments=torch.zeros(shape))
    with pytest.raises(ShapeError, match="residual: expected O=4"):
        small_batch_linear(case.x, case.layer, residual=torch.zeros(2, 5))


def test_packing_folds_and_leaves_its_inputs() -> None:
    case = make_case(3, 8, 6, "rms gated")
    tensors = [case.weight, case.bias, case.norm[0]]
    copies = [tensor.clone() for tensor in tensors]
    layer = case.layer
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    assert layer.column_sums is None and layer.num_outputs == 3
    folded = case.weight * case.norm[0]
    assert torch.equal(layer.weight, folded[[0, 3, 1, 4, 2, 5]])
    assert torch.equal(layer.bias, case.bias[[0, 3, 1, 4, 2, 5]])
    # Nothing to fold and nothing to reorder: the matrix stays where it is.
    assert pack_linear(case.weight).weight.data_ptr() == case.weight.data_ptr()


@pytest.mark.parametrize("parts", ["", "gated", "rms", "rms gated", "norm", "norm gelu"])
def test_packing_in_place(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Folded a few rows at once: a whole matrix in float32 might not fit.
    module = importlib.import_module(pack_linear.__module__)
    monkeypatch.setattr(module, "_FOLDED_ROWS", 4)
    case = make_case(3, 8, 10, parts, torch.float16)
    norm_weight, norm_bias = case.norm or (None, None)
    expected, weight = case.layer, case.weight.clone()
    options = {"norm_weight": norm_weight, "norm_bias": norm_bias, "eps": EPS, "gated": case.gated}
    packed = pack_linear(weight, case.bias, out=weight, **options)
    assert packed.weight.data_ptr() == weight.data_ptr()
    for name in ("weight", "bias", "column_sums"):
        one, other = getattr(packed, name), getattr(expected, name)
        assert (one is None and other is None) or torch.equal(one, other), name
    with pytest.raises(ShapeError, match="out: expected O=10, got 9"):
        pack_linear(case.weight, case.bias, out=weight[:9], **options)
    with pytest.raises(ShapeError, match="out: expected a contiguous tensor"):
        pack_linear(case.weight, case.bias, out=torch.empty(8, 10).half().t(), **options)
    with pytest.raises(ShapeError, match=r"out: expected dtype torch\.float16 as weight"):
        pack_linear(case.weight, case.bias, out=weight.float(), **options)


def test_no_rows_are_no_work() -> None:
    case = make_case(1, 8, 4, "norm gelu")
    assert small_batch_linear(case.x[:0], case.layer, gelu=True).shape == (0, 4)


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
UNEVEN = [
    (896, 1152, "rms nobias"),
    (896, 9728, "rms gated nobias"),
    (1536, 1536, "nobias residual"),
    (3584, 3584, "nobias residual"),
    (576, 3072, "rms gated nobias"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "row_counts"),
    [(shape, (*range(1, 66), 96, 127, 128, 129, 192, 255, 256)) for shape in SHAPES + GATED_SHAPES]
    + [(shape, (1, 2, 3, 8, 16, 17, 33, 64, 65, 256)) for shape in LLAMA_1B + LLAMA_8B + QWEN3_30B + UNEVEN],
    ids=str,
)
def test_the_shapes_of_models_at_any_number_of_rows(shape: tuple[int, int, str], row_counts: Any) -> None:
    case = make_case(256, *shape, HALF, "cuda")
    # As a layer has them, and further apart: how tiles are copied depends on it, and with that what can go wrong.
    aligned = [case.x.contiguous(), torch.cat([case.x, case.x[:, :8]], 1)[:, : shape[0]]]
    layer, exact, same_dtype = case.layer, case.plain(torch.float64), case.plain(HALF)
    x_moments = moments_of(case.x, 16)
    for rows, x in itertools.product(row_counts, aligned):
        residual = None if case.residual is None else case.residual[:rows]
        for given in (None, x_moments[:rows]) if case.norm is not None else (None,):
            out = torch.full((rows, case.num_outputs), float("nan"), dtype=HALF, device="cuda")
            actual, moments = small_batch_linear_and_moments(
                x[:rows], layer, gelu=case.gelu, residual=residual, out=out, x_moments=given
            )
            assert_within_budget(actual, exact[:rows], same_dtype[:rows])
            torch.testing.assert_close(moments.sum(2), moments_of(actual, 1)[:, :, 0], rtol=1e-4, atol=1e-2)


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
    result, moments = launch(case, {**tiles, "split_k": split_k}, num_x_parts=16, with_moments=True)
    case.check(result)
    torch.testing.assert_close(moments.sum(2), moments_of(result, 1)[:, :, 0], rtol=1e-4, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES + GATED_SHAPES, ids=str)
def test_a_thousand_runs_of_the_chosen_cuts_are_bitwise_equal(shape: tuple[int, int, str], rows: int) -> None:
    case = make_case(rows, *shape, HALF, "cuda")
    case.x = case.x.contiguous()
    layer, moments = case.layer, moments_of(case.x, 16)

    def run() -> torch.Tensor:
        return small_batch_linear(case.x, layer, gelu=case.gelu, residual=case.residual, x_moments=moments)

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
    up, down = up_case.layer, down_case.layer
    start = up_case.x.contiguous()
    hidden, wide = start.clone(), torch.empty((rows, 3072), dtype=HALF, device="cuda")

    def chain(use_pdl: bool) -> None:
        hidden.copy_(start)
        moments = moments_of(start, 1)
        with overlapping(use_pdl):
            for _ in range(24):
                gpu.small_batch_linear(
                    hidden, up, gelu=up_case.gelu, residual=None, out=wide, x_moments=moments
                )
                moments = gpu.small_batch_linear(
                    wide, down, gelu=False, residual=hidden, out=hidden, x_moments=None, with_moments=True
                )  # fmt: skip

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
