"""Rotary positions and head norms: complex float64 products, within twice the error of transformers' modules."""

from __future__ import annotations

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import HeadRotation, pack_linear, rotate_query_key, small_batch_linear
from tests.support.implementations import DTYPES, GPU, Implementation, each_dtype, kernels_only
from tests.support.rotations import MODEL_HEADS, Case, Heads, make_case

both_norms = pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
CASES: list[tuple[int, Heads]] = [
    *(
        (tokens, heads)
        for tokens in (1, 5)
        for heads in ((4, 2, 64, 64), (3, 1, 80, 32), (1, 1, 6, 2), (2, 2, 96, 96))
    ),
    (0, (4, 2, 64, 64)),
    (5, (9, 5, 160, 120)),
    (1, (2, 19, 32, 32)),
]
"""Tokens and heads."""


def rotate(case: Case, positions: torch.Tensor | None = None) -> None:
    positions = case.positions if positions is None else positions
    assert rotate_query_key(*case.query_key(), positions, case.rotation()) is None


def check(call: Implementation, case: Case) -> None:
    """Rotate; nothing but the rotated parts may change."""
    before = case.copy()
    unwritten = [case.rest(), case.positions, case.cos_sin, *(case.norms or ())]
    copies = [tensor.clone() for tensor in unwritten]
    call(rotate, case)
    before.check(*case.query_key())
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(unwritten, copies, strict=True))
    if case.norms is None:
        width = case.cos_sin.shape[1]
        for now, then in zip(case.query_key(), before.query_key(), strict=True):
            assert torch.equal(now[..., width:], then[..., width:])


@both_norms
@each_dtype
def test_query_and_key_turn_in_place(implementation: Implementation, dtype: torch.dtype, norms: bool) -> None:
    for num_tokens, heads in CASES:
        check(implementation, make_case(num_tokens, heads, dtype, norms=norms, device=implementation.device))


@pytest.mark.gpu
@both_norms
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [*MODEL_HEADS, (64, 8, 64, 64)], ids=str)
def test_heads_of_models(heads: Heads, dtype: torch.dtype, norms: bool) -> None:
    for num_tokens in (1, 257):
        check(GPU, make_case(num_tokens, heads, dtype, norms=norms, device="cuda"))


@kernels_only
def test_tensors_of_their_own_and_heads_far_apart(implementation: Implementation) -> None:
    case = make_case(5, (3, 2, 16, 8), torch.float16, norms=True, device=implementation.device)
    query, key = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in case.query_key())
    case.positions = torch.stack((case.positions, case.positions + 1), 1)[:, 0]
    case.cos_sin = torch.cat((case.cos_sin, case.cos_sin), 1).t().contiguous().t()[:, :8]
    case.norms = tuple(torch.stack((norm, -norm), 1)[:, 0] for norm in case.norms)
    implementation(rotate_query_key, query, key, case.positions, case.rotation())
    case.check(query, key)


def test_position_zero_and_what_is_not_rotated_stay_as_they_are() -> None:
    case = make_case(4, (2, 1, 16, 8), torch.bfloat16)
    before, size = case.copy(), case.cos_sin.shape[1]
    rotate(case, torch.zeros_like(case.positions))
    assert torch.equal(case.projected, before.projected)
    rotate(case)
    for now, then in zip(case.query_key(), before.query_key(), strict=True):
        assert torch.equal(now[..., size:], then[..., size:])
        assert not torch.equal(now[..., :size], then[..., :size])


@both_norms
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_types_round_once(dtype: torch.dtype, norms: bool) -> None:
    case = make_case(2, (2, 1, 64, 32), dtype, norms=norms)
    exact = [each.to(dtype) for each in case.exact()]
    rotate(case)
    assert all(map(torch.equal, case.query_key(), exact))


def test_eps_counts(implementation: Implementation) -> None:
    case = make_case(3, CASES[0][1], norms=True, device=implementation.device)
    tiny, larger = case.copy(), case.copy()
    for each, eps in ((tiny, 1e-9), (larger, 3.0)):
        implementation(rotate_query_key, *each.query_key(), each.positions, each.rotation(eps))
    assert larger.query_key()[0].norm() < 0.6 * tiny.query_key()[0].norm()


def test_bad_input_is_named() -> None:
    case = make_case(3, (4, 2, 16, 8), norms=True)
    query, key = case.query_key()
    norm = case.norms[0]
    positions, table = case.positions, case.cos_sin
    for match, arguments in (
        (r"key: expected D=16, got 15", (query, key[..., :15], positions, table)),
        (r"positions: expected T=3, got 2", (query, key, positions[:2], table)),
        (r"positions: expected dtype torch.int64", (query, key, positions.int(), table)),
        (r"cos_sin: expected dtype torch.float32", (query, key, positions, table.half())),
        (r"cos_sin: expected an even DR of at most D=16, got DR=7", (query, key, positions, table[:, 1:])),
        (r"DR=18", (query, key, positions, torch.zeros(9, 18))),
        (r"key: expected dtype torch.float32 as query", (query, key.half(), positions, table)),
        (
            r"query: expected an innermost stride of 1, got 2",
            (query[..., ::2], key[..., :8], positions, table),
        ),
    ):
        with pytest.raises(ShapeError, match=match):
            rotate_query_key(*arguments[:3], HeadRotation(arguments[3]))
    for match, norms in (
        ("both or neither, got one", {"query_norm": norm}),
        ("both or neither, got one", {"key_norm": norm}),
        ("key_norm: expected D=16, got 15", {"query_norm": norm, "key_norm": norm[1:]}),
        ("key_norm: expected dtype", {"query_norm": norm, "key_norm": norm.half()}),
    ):
        with pytest.raises(ShapeError, match=match):
            rotate_query_key(query, key, positions, HeadRotation(table, **norms))


@pytest.mark.gpu
def test_tokens_past_two_to_the_31() -> None:
    case = make_case(3, MODEL_HEADS[0], torch.float16, norms=True, device="cuda")
    width, far = case.projected.shape[1], 2**31 // case.projected.shape[1] + 10
    wide = torch.zeros(far + 3, width, dtype=torch.float16, device="cuda")
    wide[far:] = case.projected
    positions = torch.cat((case.positions.new_zeros(far), case.positions))
    rotate(case)
    expected, case.projected = case.projected, wide
    rotate(case, positions)
    assert torch.equal(wide[far:], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 64])
@both_norms
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
            for launch in (
                lambda: small_batch_linear(hidden, layers[0], out=projected),
                lambda: rotate(case),
                lambda: small_batch_linear(projected, layers[1], out=hidden),
            ):
                launch()
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


@pytest.mark.gpu
@both_norms
def test_a_thousand_runs_are_bitwise_equal(norms: bool) -> None:
    case = make_case(300, MODEL_HEADS[0], torch.bfloat16, norms=norms, device="cuda")
    first = case.copy()
    rotate(first)
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        again = case.copy()
        rotate(again)
        different |= (again.projected != first.projected).any()
    assert not different
