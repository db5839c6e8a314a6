"""Rotary positions on a device: shapes of models, far rows, repeats, and in the middle of overlapping launches."""

from __future__ import annotations

import pytest
import torch

from rose_backend.kernels import pack_linear, rotate_query_key, small_batch_linear
from tests.kernels.test_rotary import DTYPES, HEADS, make_case
from tests.kernels.test_rotary_triton import SHAPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [*HEADS, *SHAPES, (64, 8, 64, 64), (9, 5, 160, 120)], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 257])
def test_query_and_key_turn_in_place(
    num_tokens: int, heads: tuple[int, int, int, int], dtype: torch.dtype, norms: bool
) -> None:
    case = make_case(num_tokens, heads, dtype, norms=norms, device="cuda")
    before = case.copy()
    unwritten = [case.rest(), case.positions, case.cos_sin, *(case.norms or ())]
    copies = [tensor.clone() for tensor in unwritten]
    query, key = case.query_key()
    rotate_query_key(query, key, case.positions, case.rotation())
    before.check(query, key)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(unwritten, copies, strict=True))


def test_tokens_past_two_to_the_31() -> None:
    case = make_case(3, SHAPES[0], torch.float16, norms=True, device="cuda")
    width, far = case.projected.shape[1], 2**31 // case.projected.shape[1] + 10
    wide = torch.zeros(far + 3, width, dtype=torch.float16, device="cuda")
    wide[far:] = case.projected
    positions = torch.cat((case.positions.new_zeros(far), case.positions))
    rotate_query_key(*case.query_key(), case.positions, case.rotation())
    expected, case.projected = case.projected, wide
    rotate_query_key(*case.query_key(), positions, case.rotation())
    assert torch.equal(wide[far:], expected)


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_a_chain_of_dependent_launches_in_a_graph(rows: int, norms: bool) -> None:
    """A product makes what is rotated, and the next product reads it; each may start before the one in front ended."""
    case = make_case(rows, (8, 8, 128, 128), torch.float16, norms=norms, device="cuda")
    width = 24 * 128
    weights = torch.randn(2, width, width, device="cuda").half() * width**-0.5
    layers = [pack_linear(weight, weight.new_zeros(width)) for weight in weights]
    start = torch.randn(rows, width, device="cuda").half()
    hidden, projected = start.clone(), torch.empty_like(start)
    case.projected = projected

    def chain(after_each: bool) -> None:
        hidden.copy_(start)
        for _ in range(24):
            small_batch_linear(hidden, layers[0], out=projected)
            if after_each:
                torch.cuda.synchronize()
            rotate_query_key(*case.query_key(), case.positions, case.rotation())
            if after_each:
                torch.cuda.synchronize()
            small_batch_linear(projected, layers[1], out=hidden)
            if after_each:
                torch.cuda.synchronize()

    chain(after_each=True)
    expected = hidden.clone()
    assert expected.isfinite().all() and not torch.equal(expected, start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(after_each=False)
    for _ in range(50):
        graph.replay()
        assert torch.equal(hidden, expected)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_a_thousand_runs_are_bitwise_equal(norms: bool) -> None:
    case = make_case(300, SHAPES[0], torch.bfloat16, norms=norms, device="cuda")
    first = case.copy()
    rotate_query_key(*first.query_key(), case.positions, case.rotation())
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        again = case.copy()
        rotate_query_key(*again.query_key(), case.positions, case.rotation())
        different |= (again.projected != first.projected).any()
    assert not different
