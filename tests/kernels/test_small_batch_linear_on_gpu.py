"""The small-batch products on a CUDA device: every type and cut, chained launches, repeats, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend.kernels import small_batch_linear
from tests.kernels.test_small_batch_linear import PARTS, config, launch, make_case
from tests.support.error_budget import assert_within_budget

pytestmark = pytest.mark.gpu

SHAPES = [(768, 2304, "norm"), (768, 768, "residual"), (768, 3072, "norm gelu"), (3072, 768, "residual")]
LLAMA_8B = [(4096, 4096, "residual"), (4096, 6144, "norm"), (4096, 14_336, ""), (14_336, 4096, "residual")]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 33, 64])
def test_odd_sizes(rows: int, dtype: torch.dtype, parts: str) -> None:
    case = make_case(rows, 801, 203, parts, dtype, "cuda")
    case.check(small_batch_linear(case.x, case.layer, gelu=case.gelu, residual=case.residual))


@pytest.mark.parametrize(
    ("shape", "row_counts"),
    [(shape, range(1, 65)) for shape in SHAPES]
    + [(shape, (1, 2, 3, 8, 16, 17, 33, 64)) for shape in LLAMA_8B],
    ids=str,
)
def test_the_shapes_of_models_at_any_number_of_rows(shape: tuple[int, int, str], row_counts: Any) -> None:
    case = make_case(64, *shape, torch.float16, "cuda")
    layer, exact, same_dtype = case.layer, case.plain(torch.float64), case.plain(torch.float16)
    for rows in row_counts:
        residual = None if case.residual is None else case.residual[:rows]
        actual = small_batch_linear(case.x[:rows], layer, gelu=case.gelu, residual=residual)
        assert_within_budget(actual, exact[:rows], same_dtype[:rows])


@pytest.mark.parametrize("rows", [1, 5, 16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_thousand_runs_of_the_chosen_cuts_are_bitwise_equal(shape: tuple[int, int, str], rows: int) -> None:
    case = make_case(rows, *shape, torch.float16, "cuda")
    layer = case.layer
    first = small_batch_linear(case.x, layer, gelu=case.gelu, residual=case.residual)
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        again = small_batch_linear(case.x, layer, gelu=case.gelu, residual=case.residual)
        different |= (again != first).any()
    assert not different


@pytest.mark.parametrize("use_pdl", [False, True])
@pytest.mark.parametrize("cut", [config(16, 128, 8, True), config(4, 512, 2, False)], ids=["dot", "vector"])
def test_a_thousand_runs_are_bitwise_equal(cut: dict[str, Any], use_pdl: bool) -> None:
    case = make_case(4, 3072, 768, "residual", torch.float16, "cuda")
    first = launch(case, cut, use_pdl).clone()
    case.check(first)
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        different |= (launch(case, cut, use_pdl) != first).any()
    assert not different


def test_a_chain_of_dependent_launches_in_a_graph() -> None:
    """Each launch reads what the one before wrote, in place over one residual, with early launches allowed."""
    from rose_backend.kernels.gpu import small_batch_linear as gpu

    widen = make_case(4, 768, 3072, "norm gelu", torch.float16, "cuda")
    narrow = make_case(4, 3072, 768, "residual", torch.float16, "cuda")
    up, down = widen.layer, narrow.layer
    start = widen.x.contiguous()
    hidden, wide = start.clone(), torch.empty((4, 3072), dtype=torch.float16, device="cuda")

    def chain(use_pdl: bool) -> None:
        hidden.copy_(start)
        for _ in range(24):
            gpu.small_batch_linear(
                hidden, up.weight, up.bias, up.column_sums, None, wide, eps=1e-5, gelu=True, use_pdl=use_pdl
            )
            gpu.small_batch_linear(
                wide, down.weight, down.bias, None, hidden, hidden, eps=0.0, gelu=False, use_pdl=use_pdl
            )

    chain(False)
    expected = hidden.clone()
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(50):
        graph.replay()
        assert torch.equal(hidden, expected)
