"""Products of a few rows with what stands around them in a layer: twin, interpreted kernel, compiled kernel."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels import empty_rows, pack_linear, small_batch_linear
from rose_backend.kernels.arguments import PackedLinear
from rose_backend.kernels.linear.ops import MAX_ROWS
from tests.support.aot import SHARED_BYTES, compile_launch, compiles, record_launches
from tests.support.error_budget import assert_within_budget
from tests.support.interpreter import run_interpreted
from tests.support.moments import moments_of

EPS = 1e-5


@dataclass
class Case:
    """Random inputs of one product; ``bias``, ``norm``, ``residual`` are None where the product has none."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm: tuple[torch.Tensor, torch.Tensor | None] | None
    residual: torch.Tensor | None
    gelu: bool
    gated: bool

    @property
    def layer(self) -> PackedLinear:
        norm_weight, norm_bias = self.norm or (None, None)
        return pack_linear(
            self.weight, self.bias, norm_weight=norm_weight, norm_bias=norm_bias, eps=EPS, gated=self.gated
        )

    @property
    def num_outputs(self) -> int:
        return len(self.weight) // (2 if self.gated else 1)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Compute with separate torch operations in ``dtype``."""
        x = self.x.to(dtype)
        if self.norm is not None and self.norm[1] is None:
            x = x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * self.norm[0].to(dtype)
        elif self.norm is not None:
            x = F.layer_norm(x, (x.shape[1],), self.norm[0].to(dtype), self.norm[1].to(dtype), EPS)
        y = F.linear(x, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))
        if self.gated:
            y = F.silu(y[:, : self.num_outputs]) * y[:, self.num_outputs :]
        if self.gelu:
            y = F.gelu(y, approximate="tanh")
        return y if self.residual is None else y + self.residual.to(dtype)

    def check(self, actual: torch.Tensor) -> None:
        assert_within_budget(actual, self.plain(torch.float64), self.plain(self.x.dtype))


def make_case(
    rows: int, depth: int, columns: int, parts: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Case:
    """``parts`` names what the product carries: any of "norm" or "rms", "gelu" or "gated", "residual" and "nobias"."""
    generator = torch.Generator().manual_seed(rows * 1000 + depth + columns)

    def random(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * scale + shift
        return values.to(device=device, dtype=dtype)

    gated = "gated" in parts
    columns += columns % 2 if gated else 0
    return Case(
        # A mean that is not zero, and rows of a wider tensor.
        x=random(rows, depth + 3, scale=2.0, shift=0.7)[:, :depth],
        weight=random(columns, depth, scale=depth**-0.5),
        bias=None if "nobias" in parts else random(columns),
        norm=(random(depth, shift=1.0, scale=0.3), random(depth) if "norm" in parts else None)
        if "norm" in parts or "rms" in parts
        else None,
        residual=random(rows, columns + 5)[:, : columns // (2 if gated else 1)]
        if "residual" in parts
        else None,
        gelu="gelu" in parts,
        gated=gated,
    )


PARTS = ["", "norm", "norm gelu", "residual", "gelu residual", "norm residual"]
# Of models without LayerNorm: a bias is where Qwen2 has one.
GATED_PARTS = [
    "nobias",
    "rms",
    "rms nobias",
    "rms gated nobias",
    "nobias residual",
    "norm nobias gated residual",
]


@pytest.mark.parametrize("parts", PARTS + GATED_PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_twin_is_the_separate_operations(parts: str, dtype: torch.dtype) -> None:
    case = make_case(5, 96, 40, parts, dtype)
    case.check(small_batch_linear(case.x, case.layer, gelu=case.gelu, residual=case.residual))


@contextlib.contextmanager
def overlapping(use_pdl: bool | None) -> Iterator[None]:
    """Let launches overlap or not; None: where the device can."""
    from rose_backend.kernels.linear import small_batch_linear as gpu

    can = gpu.has_dependent_launch
    with mock.patch.object(gpu, "has_dependent_launch", can if use_pdl is None else lambda device: use_pdl):
        yield


def launch(
    case: Case,
    config: dict[str, Any],
    use_pdl: bool | None = None,
    num_x_parts: int = 1,
    with_moments: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the product and, ``with_moments``, its moments; those of ``x`` come in ``num_x_parts``."""
    from rose_backend.kernels.linear import small_batch_linear as gpu

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


# Depths and widths that no tile divides; one tile over the whole depth, several, and a split depth; one tile of rows
# and several.
CUTS = [
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
# All parts on the lanes and on the matrix units; of the other cuts what comes behind a tile's last product.
CASES = [
    (rows, cut, parts)
    for rows, cut in CUTS
    for parts in (
        PARTS + GATED_PARTS
        if rows in (1, 16)
        else ["norm gelu", "norm residual", "rms gated nobias", "gated residual"]
    )
]


@pytest.mark.parametrize(
    ("rows", "cut", "parts"), CASES, ids=lambda value: "" if isinstance(value, dict) else None
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_interpreted_kernel_agrees(
    rows: int, cut: dict[str, Any], parts: str, dtype: torch.dtype
) -> None:
    case = make_case(rows, 100, 37, parts, dtype)
    case.check(run_interpreted(launch, case, cut))


@pytest.mark.parametrize("parts", ["", "norm gelu", "norm residual", "rms gated residual"])
@pytest.mark.parametrize("cut", [config(16, 16, 128), config(16, 32, 32, 3)])
def test_moments_are_taken_from_one_product_to_the_next(cut: dict[str, Any], parts: str) -> None:
    case = make_case(21, 100, 37, parts, torch.float16)
    result, moments = run_interpreted(launch, case, cut, num_x_parts=4, with_moments=True)
    case.check(result)
    torch.testing.assert_close(moments.sum(2), moments_of(result, 1)[:, :, 0])


@pytest.mark.parametrize("parts", ["norm", "rms nobias"])
def test_moments_in_more_parts_than_registers_hold(parts: str) -> None:
    case = make_case(21, 4100, 10, parts, torch.float16)
    case.check(run_interpreted(launch, case, config(16, 16, 1024), num_x_parts=4096))


@pytest.mark.parametrize("parts", ["norm residual", "rms gated nobias"])
def test_tiles_copied_by_the_tensor_memory_accelerator(parts: str) -> None:
    case = make_case(21, 109, 37, parts, torch.float16)
    case.x, case.weight = aligned(case.x[:, :104]), aligned(case.weight[:, :104])
    case.norm = tuple(None if vector is None else vector[:104] for vector in case.norm)
    case.check(run_interpreted(launch, case, config(16, 32, 32, use_tma=True)))


def test_rows_behind_are_copied_and_not_used() -> None:
    from rose_backend.kernels.linear import small_batch_linear as gpu

    case = make_case(21, 109, 37, "rms residual nobias", torch.float16)
    whole = empty_rows(case.x, 21, 104)
    whole.untyped_storage().copy_(torch.full((32, 104), float("nan"), dtype=torch.float16).untyped_storage())
    case.x, case.weight = whole.copy_(case.x[:, :104]), aligned(case.weight[:, :104])
    case.norm = (case.norm[0][:104], None)
    assert gpu.rows_of_tiles(case.x, 16) == 32
    result, moments = run_interpreted(launch, case, config(16, 32, 32, use_tma=True), with_moments=True)
    case.check(result)
    assert not moments.isnan().any()


def test_no_more_rows_are_copied_than_there_are() -> None:
    from rose_backend.kernels.linear import small_batch_linear as gpu

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
    from rose_backend.kernels.linear import small_batch_linear as gpu

    assert gpu.lines_ahead(2 * depth, block_n, programs) == expected


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    return torch.cat([matrix, matrix.new_full((len(matrix), 8), float("nan"))], 1)[:, : matrix.shape[1]]


def launch_twice(case: Case, cut: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return launch(case, cut), launch(case, cut)


def test_a_split_depth_leaves_its_counters_as_they_were() -> None:
    case = make_case(4, 100, 37, "residual")
    first, second = run_interpreted(launch_twice, case, config(16, 16, 32, 3))
    assert torch.equal(first, second)


SHAPES = [(768, 2304, "norm"), (768, 768, "residual"), (768, 3072, "norm gelu"), (3072, 768, "residual")]
# Qwen3 0.6B.
GATED_SHAPES = [(1024, 4096, "rms nobias"), (1024, 6144, "rms gated nobias"), (3072, 1024, "nobias residual")]
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
    ],
)
def test_compiles_without_spills(rows: int, shape: tuple[int, int, str], capability: int) -> None:
    compile_chosen_cut(capability, rows, *shape, HALF)


@pytest.mark.parametrize(("rows", "depth", "columns", "parts", "dtype"), COMPILED)
def test_the_chosen_cuts_compile_without_spills(
    rows: int, depth: int, columns: int, parts: str, dtype: torch.dtype
) -> None:
    compile_chosen_cut(90, rows, depth, columns, parts, dtype)


def test_moments_in_many_parts_compile_without_spills() -> None:
    compile_chosen_cut(90, 64, 2048, 4096, "rms gated nobias", FLOAT32, num_x_parts=1024)


def compile_chosen_cut(
    capability: int,
    rows: int,
    depth: int,
    columns: int,
    parts: str,
    dtype: torch.dtype,
    *,
    num_x_parts: int = 16,
) -> None:
    from rose_backend.kernels.linear import small_batch_linear as gpu

    case = make_case(rows, depth, columns, parts, dtype)
    x, out = (
        case.x.clone(memory_format=torch.contiguous_format),
        torch.empty((rows, case.num_outputs), dtype=dtype),
    )
    exact = dtype is torch.float32
    with record_launches(gpu, "small_batch_linear_kernel") as launches, overlapping(capability >= 90):
        gpu.small_batch_linear(
            x,
            case.layer,
            gelu=case.gelu,
            residual=case.residual,
            out=out,
            x_moments=moments_of(x, num_x_parts) if case.norm else None,
            with_moments=case.residual is not None,
            config=gpu.choose_config(
                rows,
                columns,
                depth,
                exact=exact,
                can_use_tma=capability >= 90,
                has_tensor_memory=capability >= 100,
            ),
        )
    cut, lines = launches[0].arguments, launches[0].arguments["PREFETCH"]
    ahead = gpu.lines_ahead(
        cut["DEPTH"] * x.element_size(), cut["BLOCK_N"], -(-columns // cut["BLOCK_N"]) * cut["SPLIT_K"]
    )
    assert lines == (ahead if capability >= 90 else 0)
    resources = compile_launch(launches[0], capability)
    assert resources.spill_bytes == 0
    assert resources.shared_bytes <= MOST_SHARED_BYTES[capability]
    assert ("griddepcontrol.wait" in resources.ptx) == (capability >= 90)


@pytest.mark.parametrize("can_use_tma", [False, True])
@pytest.mark.parametrize("rows", [4, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(
    ("depth", "columns"),
    [
        *((768, 4096), (3072, 4096), (768, 4097), (3072, 50_257)),
        *((4096, columns) for columns in (1025, 4097, 6144, 7168, 7681, 14_336)),
        *((14_336, 4096), (2048, 2048), (1_000_000, 8192)),
    ],
)
def test_parts_never_outgrow_their_scratch(rows: int, depth: int, columns: int, can_use_tma: bool) -> None:
    from rose_backend.kernels.linear import small_batch_linear as gpu

    cut = gpu.choose_config(rows, columns, depth, exact=False, can_use_tma=can_use_tma)
    partial, arrivals = gpu.scratch_on(torch.device("cpu"))
    num_tiles = -(-columns // cut.block_n) * -(-rows // cut.block_m)
    if cut.split_k > 1:
        assert num_tiles * cut.split_k * cut.block_m * cut.block_n <= partial.numel()
        assert num_tiles <= arrivals.numel()


def test_a_cut_that_outgrows_the_scratch_is_refused() -> None:
    from rose_backend.kernels.linear import small_batch_linear as gpu

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
