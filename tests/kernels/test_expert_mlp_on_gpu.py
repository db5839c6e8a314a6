"""The MLP of a mixture of experts on a CUDA device: every type and number of tokens, repeats, graphs."""

from __future__ import annotations

import pytest
import torch

from rose_backend.kernels import Experts, expert_mlp
from tests.kernels.test_expert_mlp import DTYPES, LEFT, Case, cut, launch, make_case

pytestmark = pytest.mark.gpu

QWEN3_30B = {"num_experts": 128, "top_k": 8, "width": 2048, "inner": 768}
ODD = {"num_experts": 13, "top_k": 5, "width": 1032, "inner": 136}
NUM_TOKENS = [1, 2, 3, 8, 16, 33, 128, 129, 256, 600, 2100]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [QWEN3_30B, ODD], ids=["Qwen3 30B-A3B", "odd"])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_every_number_of_tokens(
    num_tokens: int, shape: dict[str, int], dtype: torch.dtype, norm: bool
) -> None:
    case = make_case(num_tokens, dtype=dtype, norm=norm, device="cuda", **shape)
    first = launch(case)
    case.check(*first)
    # Which program lists a token first changes nothing.
    for _ in range(5):
        assert all(map(torch.equal, launch(case), first))


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 200])
@pytest.mark.parametrize("sizes", [(16, 64, 64), (64, 64, 64), (128, 128, 32)], ids=str)
def test_every_kind_of_tile(sizes: tuple[int, int, int], num_tokens: int, use_tma: bool) -> None:
    case = make_case(num_tokens, dtype=torch.bfloat16, norm=True, device="cuda", **ODD)
    for options in ({}, LEFT):
        cuts = (cut(*sizes, use_tma=use_tma, **options),) * 2
        case.check(*launch(case, cuts))


def replayed(case: Case) -> tuple[torch.Tensor, ...]:
    """Return what a captured graph of two calls in a row makes of the case, behind another one's replay."""
    arguments = (case.x, case.router_logits, case.experts)

    def twice() -> tuple[torch.Tensor, ...]:
        hidden, moments = expert_mlp(*arguments, residual=case.residual)
        return expert_mlp(
            hidden, *arguments[1:], residual=hidden, out=hidden, rms_eps=1e-5, x_moments=moments
        )

    expected = [tensor.clone() for tensor in twice()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = twice()
    for tensor in results:
        tensor.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, results, expected))
    return results


@pytest.mark.parametrize("num_tokens", [1, 2, 64, 256])
def test_graphs_replay_what_was_launched(num_tokens: int) -> None:
    results = replayed(make_case(num_tokens, dtype=torch.bfloat16, device="cuda", **QWEN3_30B))
    assert results[0].isfinite().all()


def test_a_token_that_is_not_a_number_spoils_no_other() -> None:
    case = make_case(50, dtype=torch.float16, device="cuda", **ODD)
    expected, _ = launch(case)
    case.x[3], case.router_logits[3] = float("nan"), float("nan")
    actual, _ = launch(case)
    others = [token for token in range(50) if token != 3]
    assert torch.equal(actual[others], expected[others]) and actual[3].isnan().all()


def test_weights_past_2_to_the_31_elements() -> None:
    num_experts, width, inner = 1024, 2048, 768
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float16, device="cuda").normal_(0, scale, generator=generator)

    experts = Experts(
        random(num_experts, 2 * inner, width, scale=width**-0.5),
        random(num_experts, width, inner, scale=inner**-0.5),
        2,
        True,
    )
    assert experts.widen.numel() > 2**31
    for num_tokens in (2, 40):
        logits = torch.zeros(num_tokens, num_experts, dtype=torch.float16, device="cuda")
        logits[:, -2:] = random(num_tokens, 2, scale=1.0) + 20
        case = Case(random(num_tokens, width, scale=1.0), logits, experts, None, None)
        last = Experts(experts.widen[-2:].clone(), experts.narrow[-2:].clone(), 2, True)
        alone = Case(case.x, logits[:, -2:].contiguous(), last, None, None)
        alone.check(*launch(case))
