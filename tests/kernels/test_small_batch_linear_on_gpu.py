"""The small-batch products on a CUDA device: every type and cut, chained launches, repeats, graphs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rose_backend.kernels import small_batch_linear, small_batch_linear_and_moments
from tests.kernels.test_small_batch_linear import (
    GATED_PARTS,
    GATED_SHAPES,
    PARTS,
    config,
    launch,
    make_case,
    overlapping,
)
from tests.support.error_budget import assert_within_budget
from tests.support.moments import moments_of

pytestmark = pytest.mark.gpu

SHAPES = [(768, 2304, "norm"), (768, 768, "residual"), (768, 3072, "norm gelu"), (3072, 768, "residual")]
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


@pytest.mark.parametrize("parts", PARTS + GATED_PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 33, 64, 130])
def test_odd_sizes(rows: int, dtype: torch.dtype, parts: str) -> None:
    case = make_case(rows, 801, 203, parts, dtype, "cuda")
    for moments in (None, moments_of(case.x, 4)):
        case.check(
            small_batch_linear(case.x, case.layer, gelu=case.gelu, residual=case.residual, x_moments=moments)
        )


@pytest.mark.parametrize(
    ("shape", "row_counts"),
    [(shape, (*range(1, 66), 96, 127, 128, 129, 192, 255, 256)) for shape in SHAPES + GATED_SHAPES]
    + [(shape, (1, 2, 3, 8, 16, 17, 33, 64, 65, 256)) for shape in LLAMA_1B + LLAMA_8B + QWEN3_30B + UNEVEN],
    ids=str,
)
def test_the_shapes_of_models_at_any_number_of_rows(shape: tuple[int, int, str], row_counts: Any) -> None:
    case = make_case(256, *shape, torch.float16, "cuda")
    # As a layer has them, and further apart: how tiles are copied depends on it, and with that what can go wrong.
    aligned = [case.x.contiguous(), torch.cat([case.x, case.x[:, :8]], 1)[:, : shape[0]]]
    layer, exact, same_dtype = case.layer, case.plain(torch.float64), case.plain(torch.float16)
    x_moments = moments_of(case.x, 16)
    for rows, x in itertools.product(row_counts, aligned):
        residual = None if case.residual is None else case.residual[:rows]
        for given in (None, x_moments[:rows]) if case.norm is not None else (None,):
            out = torch.full((rows, case.num_outputs), float("nan"), dtype=torch.float16, device="cuda")
            actual, moments = small_batch_linear_and_moments(
                x[:rows], layer, gelu=case.gelu, residual=residual, out=out, x_moments=given
            )
            assert_within_budget(actual, exact[:rows], same_dtype[:rows])
            torch.testing.assert_close(moments.sum(2), moments_of(actual, 1)[:, :, 0], rtol=1e-4, atol=1e-2)


KINDS_OF_CUTS = [
    (8, config(8, 32, 1024, warp_split=4, weights_left=True)),
    (29, config(32, 32, 1024, warp_split=4, weights_left=True)),
    (29, config(32, 16, 1024, warp_split=4)),
    (29, config(32, 64, 1024, weights_left=True)),
    (29, config(32, 64, 1024, weights_left=True, use_tma=True)),
    (64, config(64, 32, 1024, use_tma=True)),
    (100, config(64, 64, 64, use_tma=True)),
    (200, config(128, 64, 64, use_tma=True)),
]


@pytest.mark.parametrize("shape", SHAPES + GATED_SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "cut"), KINDS_OF_CUTS, ids=str)
def test_every_kind_of_cut(rows: int, cut: dict[str, Any], shape: tuple[int, int, str]) -> None:
    case = make_case(rows, *shape, torch.float16, "cuda")
    case.x = torch.cat([case.x, case.x[:, :8]], 1)[:, : shape[0]]
    split_k = 3 if shape[0] > 1024 else 1
    result, moments = launch(case, {**cut, "split_k": split_k}, num_x_parts=16, with_moments=True)
    case.check(result)
    torch.testing.assert_close(moments.sum(2), moments_of(result, 1)[:, :, 0], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 5, 16, 64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES + GATED_SHAPES, ids=str)
def test_a_thousand_runs_of_the_chosen_cuts_are_bitwise_equal(shape: tuple[int, int, str], rows: int) -> None:
    case = make_case(rows, *shape, torch.float16, "cuda")
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


@pytest.mark.parametrize("use_pdl", [False, True])
@pytest.mark.parametrize(
    "cut", [config(16, 16, 128, 8), config(4, 4, 512, 2, use_dot=False)], ids=["dot", "vector"]
)
def test_a_thousand_runs_are_bitwise_equal(cut: dict[str, Any], use_pdl: bool) -> None:
    case = make_case(4, 3072, 768, "residual", torch.float16, "cuda")
    first = launch(case, cut, use_pdl).clone()
    case.check(first)
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        different |= (launch(case, cut, use_pdl) != first).any()
    assert not different


@pytest.mark.parametrize("rows", [1, 4, 32, 128, 256])
@pytest.mark.parametrize(
    ("widened", "parts"), [(3072, ("norm gelu", "residual")), (6144, ("rms gated nobias", "nobias residual"))]
)
def test_a_chain_of_dependent_launches_in_a_graph(widened: int, parts: tuple[str, str], rows: int) -> None:
    """Each launch reads what the one before wrote, in place over one residual, with early launches allowed."""
    from rose_backend.kernels.linear import small_batch_linear as gpu

    widen = make_case(rows, 768, widened, parts[0], torch.float16, "cuda")
    narrow = make_case(rows, 3072, 768, parts[1], torch.float16, "cuda")
    up, down = widen.layer, narrow.layer
    start = widen.x.contiguous()
    hidden, wide = start.clone(), torch.empty((rows, 3072), dtype=torch.float16, device="cuda")

    def chain(use_pdl: bool) -> None:
        hidden.copy_(start)
        moments = moments_of(start, 1)
        with overlapping(use_pdl):
            for _ in range(24):
                gpu.small_batch_linear(
                    hidden, up, gelu=widen.gelu, residual=None, out=wide, x_moments=moments
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
