"""The Triton kernel of rotary positions, interpreted on small shapes and compiled for three generations of GPUs.

The interpreter truncates bfloat16 where GPUs round it, so that type is compared on a GPU only.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_rotary import HEADS, Case, make_case
from tests.support.aot import compile_launch, compiles, overlapped, record_launches
from tests.support.interpreter import run_interpreted

DTYPES = [torch.float32, torch.float16]


def launch(case: Case) -> None:
    from rose_backend.kernels.pointwise import rotary as gpu

    gpu.rotate_query_key(*case.query_key(), case.positions, case.rotation())


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [*HEADS, (9, 5, 160, 120), (2, 19, 32, 32)], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_query_and_key_turn_in_place(
    num_tokens: int, heads: tuple[int, int, int, int], dtype: torch.dtype, norms: bool
) -> None:
    case = make_case(num_tokens, heads, dtype, norms=norms)
    before = case.copy()
    unwritten = [case.rest(), case.positions, case.cos_sin, *(case.norms or ())]
    copies = [tensor.clone() for tensor in unwritten]
    run_interpreted(launch, case)
    before.check(*case.query_key())
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(unwritten, copies, strict=True))
    if not norms:
        width = case.cos_sin.shape[1]
        for now, then in zip(case.query_key(), before.query_key(), strict=True):
            assert torch.equal(now[..., width:], then[..., width:])


def launch_apart(query: torch.Tensor, key: torch.Tensor, case: Case) -> None:
    from rose_backend.kernels.pointwise import rotary as gpu

    gpu.rotate_query_key(query, key, case.positions, case.rotation())


def test_tensors_of_their_own_and_heads_far_apart() -> None:
    case = make_case(5, (3, 2, 16, 8), torch.float16, norms=True)
    query, key = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in case.query_key())
    case.positions = torch.stack((case.positions, case.positions + 1), 1)[:, 0]
    case.cos_sin = torch.cat((case.cos_sin, case.cos_sin), 1).t().contiguous().t()[:, :8]
    case.norms = tuple(torch.stack((norm, -norm), 1)[:, 0] for norm in case.norms)
    run_interpreted(launch_apart, query, key, case)
    case.check(query, key)


# Llama 3 8B, Qwen3, Phi-4-mini with a part of each head rotated, and heads that no vector divides.
SHAPES = [(32, 8, 128, 128), (16, 8, 128, 128), (24, 8, 128, 96), (3, 1, 80, 80)]


@compiles("_rotate_kernel")
def test_compiles_without_spills(capability: int) -> None:
    from rose_backend.kernels.pointwise import rotary as gpu

    with record_launches(gpu, "_rotate_kernel") as launches:
        for heads in SHAPES:
            for dtype in (torch.float16, torch.bfloat16) if heads is SHAPES[0] else (torch.bfloat16,):
                for norms in (False, True):
                    case = make_case(2, heads, dtype, norms=norms)
                    # Rows of a model's own projection.
                    width = case.projected.shape[1] - 5
                    case.projected = case.projected[:, :width].contiguous()
                    launch(case)
    assert len(launches) == 10
    for recorded in launches:
        resources = compile_launch(overlapped(recorded, capability), capability)
        if recorded.arguments["HALF"] == 64:
            assert "ld.global.v4.b32" in resources.ptx and "st.global.v4.b32" in resources.ptx
        assert ("griddepcontrol.wait" in resources.ptx) == (capability >= 90)
