"""The MLP of a mixture of experts: separate operations in float64, within twice plain torch's own error."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import (
    Experts,
    Float8Experts,
    NormInput,
    PackedNorm,
    expert_mlp,
    norm_input_of,
    pack_norm,
)
from rose_backend.kernels.experts import expert_mlp as gpu
from rose_backend.kernels.gpu_properties import Workspace, current_workspace
from tests.support.expert_cases import Case, make_case
from tests.support.implementations import DTYPES, INTERPRETER, Implementation, each_dtype, kernels_only

FLOAT32, HALF, _ = DTYPES


def launch(
    case: Case,
    configs: tuple[dict[str, Any], dict[str, Any]] | None = None,
    next_norm: PackedNorm | None = None,
) -> tuple[torch.Tensor, NormInput | None]:
    """Return the result and what it leaves to a norm, memory that the launcher allocates being full of NaN.

    ``configs`` are of the kernels' two products; None calls the public function. ``next_norm`` None takes the case's.
    """
    width, device = case.x.shape[1], case.x.device
    out = torch.full((len(case.x), width + 7), float("nan"), dtype=case.x.dtype, device=device)
    next_norm = case.next_norm if next_norm is None else next_norm
    arguments = (case.given(), case.router_logits, case.experts)
    options = {"residual": case.residual, "out": out[:, :width], "next_norm": next_norm}
    torch.use_deterministic_algorithms(True)
    try:
        if configs is None:
            result, left = expert_mlp(*arguments, **options)
            assert result is options["out"]
        else:
            configs = gpu.ExpertConfig(**configs[0]), gpu.ExpertConfig(**configs[1])
            left = gpu.expert_mlp(*arguments, **options, configs=configs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out[:, width:].isnan().all()
    assert not gpu._counts_on(device).any(), "the next call finds them"
    assert left is not None and left.norm is next_norm
    return out[:, :width], left


def tiles(block_m: int, block_n: int, block_k: int, **options: bool) -> dict[str, Any]:
    return dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=2, **options)


LEFT = {"weights_left": True}


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 40])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": True},
        {"renormalize": False, "residual": False},
        # Blocks that end with the rows and columns of an expert's matrices.
        {"norm": True, "float8": True, "width": 136, "inner": 136},
    ],
    ids=str,
)
@each_dtype
def test_values(
    implementation: Implementation, dtype: torch.dtype, options: dict[str, bool], num_tokens: int
) -> None:
    case = make_case(num_tokens, dtype=dtype, device=implementation.device, **options)
    before = case.x.clone()
    case.check(*implementation(launch, case))
    assert torch.equal(case.x, before)


def test_results_may_replace_the_residual_or_x() -> None:
    case = make_case(5)
    expected, left = expert_mlp(case.x, case.router_logits, case.experts, residual=case.x)
    assert left is None
    for out in (case.x.clone(), case.x):
        actual, _ = expert_mlp(case.x, case.router_logits, case.experts, residual=case.x, out=out)
        assert actual is out and torch.equal(actual, expected)


@pytest.mark.parametrize("top_k", [1, 6])
def test_a_token_may_take_one_expert_or_all(implementation: Implementation, top_k: int) -> None:
    case = make_case(4, top_k=top_k, device=implementation.device)
    case.check(*implementation(launch, case))


def test_all_tokens_of_one_expert_and_ties(implementation: Implementation) -> None:
    case = make_case(40, num_experts=7, top_k=1, device=implementation.device)
    for logits in (0.0, 30.0):
        case.router_logits[:, 5] = logits
        case.router_logits[:, :5] = case.router_logits[:, 6:] = 0.0
        case.check(*implementation(launch, case))


@pytest.mark.parametrize("dtype", [FLOAT32, HALF], ids=str)
def test_large_logits_of_either_sign(implementation: Implementation, dtype: torch.dtype) -> None:
    case = make_case(20, num_experts=7, top_k=3, dtype=dtype, renormalize=False, device=implementation.device)
    case.router_logits[:10] -= 40_000
    case.router_logits[10:] += 40_000
    case.check(*implementation(launch, case))


@kernels_only
def test_a_token_that_is_not_a_number_spoils_no_other(implementation: Implementation) -> None:
    case = make_case(50, num_experts=13, top_k=5, dtype=HALF, device=implementation.device)
    expected, _ = implementation(launch, case)
    case.x[3], case.router_logits[3] = float("nan"), float("nan")
    case.router_logits[4] = float("-inf")
    actual, _ = implementation(launch, case)
    others = [token for token in range(50) if token not in (3, 4)]
    assert torch.equal(actual[others], expected[others])
    assert actual[3].isnan().all()


def float8(scales: torch.Tensor) -> Float8Experts:
    return Float8Experts(torch.zeros(6, 1, 72, 40).to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 7}, "top_k: expected 1 to 6, got 7"),
        ({"top_k": 0}, "top_k: expected 1 to 6, got 0"),
        ({"down": torch.zeros(6, 72, 39)}, "gate_up: expected 78 rows of each expert, got 80"),
        ({"down": torch.zeros(5, 72, 40)}, "down: expected X=6, got 5"),
        ({"down": torch.zeros(6, 72, 40).half()}, "down: expected dtype torch.float32 as x"),
        ({"down": torch.zeros(6, 40, 72).mT}, "down: expected a contiguous tensor"),
        ({"down": float8(torch.ones(6, 1, 2, 1))}, r"down.scales: expected (1, 1) blocks, got (2, 1)"),
        ({"down": float8(torch.ones(6, 2, 1, 1))}, "down.scales: expected P=1, got 2"),
        ({"down": float8(torch.ones(6, 1, 1, 1).half())}, "down.scales: expected dtype torch.float32"),
        ({"down": float8(torch.ones(6, 1, 1, 2)[..., ::2])}, "down: expected contiguous tensors"),
    ],
)
def test_wrong_experts_are_refused(change: dict[str, Any], message: str) -> None:
    case = make_case(3)
    with pytest.raises(ShapeError, match=re.escape(message)):
        expert_mlp(case.x, case.router_logits, replace(case.experts, **change))


def test_other_wrong_arguments_are_refused() -> None:
    case = make_case(3)
    arguments = (case.x, case.router_logits, case.experts)
    with pytest.raises(ShapeError, match="router_logits: expected T=3, got 2"):
        expert_mlp(case.x, case.router_logits[:2], case.experts)
    with pytest.raises(ShapeError, match="residual: expected E=72, got 71"):
        expert_mlp(*arguments, residual=torch.zeros(3, 71))
    left = norm_input_of(case.x, case.next_norm)
    with pytest.raises(ShapeError, match="x_moments: expected contiguous"):
        expert_mlp(left._replace(moments=torch.zeros(3, 2, 3)), *arguments[1:])
    with pytest.raises(ShapeError, match="x: expected an RMSNorm before experts, got a LayerNorm"):
        expert_mlp(norm_input_of(case.x, PackedNorm(None, 1e-5)), *arguments[1:])
    with pytest.raises(ShapeError, match="norm_weight: expected E=72, got 71"):
        expert_mlp(*arguments, next_norm=pack_norm(torch.ones(71), 1e-5))
    many = make_case(1, num_experts=1025, width=2, inner=1)
    with pytest.raises(ShapeError, match="at most 1024 experts, got 1025"):
        expert_mlp(many.x, many.router_logits, many.experts)


@pytest.mark.parametrize("num_tokens", [2, 50])
@pytest.mark.parametrize(
    "configs", [(tiles(16, 16, 32), tiles(8, 32, 64, **LEFT)), (tiles(8, 32, 16, **LEFT), tiles(32, 64, 128))]
)
def test_tiles_of_other_sizes_agree(configs: tuple[dict[str, Any], ...], num_tokens: int) -> None:
    case = make_case(num_tokens, num_experts=5, top_k=3, width=600, inner=24, dtype=HALF, norm=True)
    case.check(*INTERPRETER(launch, case, configs))


@pytest.mark.parametrize("num_tokens", [2, 50])
@pytest.mark.parametrize(
    "configs",
    [(tiles(16, 16, 32), tiles(8, 128, 64, **LEFT)), (tiles(8, 64, 128, **LEFT), tiles(32, 32, 128))],
)
def test_tiles_of_float8_experts(configs: tuple[dict[str, Any], ...], num_tokens: int) -> None:
    case = make_case(
        num_tokens, num_experts=4, top_k=2, width=264, inner=136, dtype=HALF, norm=True, float8=True
    )
    case.check(*INTERPRETER(launch, case, configs))
    if num_tokens == 2:
        for wide in ((tiles(16, 256, 32), configs[1]), (configs[0], tiles(16, 16, 256))):
            with pytest.raises(ShapeError, match="tiles that divide blocks of 128"):
                INTERPRETER(launch, case, wide)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 30])
def test_weights_copied_by_the_tensor_memory_accelerator(num_tokens: int, float8: bool) -> None:
    # Behind the last column of an expert are another expert's, behind the last expert nothing.
    case = make_case(num_tokens, num_experts=3, width=80, inner=48, dtype=HALF, float8=float8)
    tma = {"use_tma": True}
    case.check(*INTERPRETER(launch, case, (tiles(16, 32, 32, **tma), tiles(16, 64, 32, **LEFT, **tma))))


def addresses_of_counts() -> list[int]:
    found = []
    for num_experts in (4, 900):
        launch(make_case(20, num_experts, width=16, inner=8))
        found.append(gpu._counts_on(torch.device("cpu")).data_ptr())
    return found


def test_a_model_with_more_experts_leaves_captured_graphs_their_counters() -> None:
    first, second = INTERPRETER(addresses_of_counts)
    assert first == second


def launch_beside_another(case: Case, other: Case) -> tuple[torch.Tensor, ...]:
    """Launch one engine's experts, and a whole call of another engine's behind each launch of its first three."""
    another, num_launches = Workspace(), 0

    def interrupt(original: Callable[..., None]) -> Callable[..., None]:
        def interrupted(*args: Any, **options: Any) -> None:
            nonlocal num_launches
            original(*args, **options)
            if current_workspace() is not another:
                num_launches += 1
                with another:
                    other.check(*launch(other))

        return interrupted

    with (
        mock.patch.object(gpu, "choose_experts", interrupt(gpu.choose_experts)),
        mock.patch.object(gpu, "_product", interrupt(gpu._product)),
        Workspace(),
    ):
        result = launch(case)
    assert num_launches == 3
    return result


def test_another_engine_may_launch_between_the_launches_of_one() -> None:
    case, other = make_case(40), make_case(7, num_experts=9, norm=True)
    case.check(*INTERPRETER(launch_beside_another, case, other))


def counts_behind_a_failure() -> torch.Tensor:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with mock.patch.object(gpu, "_product", fail), pytest.raises(RuntimeError, match="out of memory"):
        launch(make_case(20))
    return gpu._counts_on(torch.device("cpu"))


def programs_that_counted(case: Case, configs: tuple[dict[str, Any], dict[str, Any]]) -> list[int]:
    """Return how many programs of the first product have stored their results, by expert."""
    product, found = gpu._product, []

    def first_only(*arguments: Any) -> None:
        if not found:
            product(*arguments)
            found.append(gpu._counts_on(torch.device("cpu"))[gpu.MAX_EXPERTS :].tolist())

    with mock.patch.object(gpu, "_product", first_only):
        launch(case, configs)
    return found[0][: len(case.experts.gate_up)]


def test_programs_of_the_first_product_count_themselves() -> None:
    case = make_case(40, num_experts=4, top_k=1, width=40, inner=24)
    case.router_logits.zero_()
    case.router_logits[:33, 2] = case.router_logits[33:, 3] = 1.0
    # 33 tokens are three tiles of 16 rows, 24 columns two of 16.
    assert INTERPRETER(programs_that_counted, case, (tiles(16, 16, 32), tiles(8, 32, 64))) == [0, 0, 6, 2]


def test_a_kernel_that_fails_leaves_no_counts_to_the_next_call() -> None:
    assert not INTERPRETER(counts_behind_a_failure).any()


# On a GPU at the sizes of models: every number of tokens, repeats, graphs, far addresses.

QWEN3_30B = {"num_experts": 128, "top_k": 8, "width": 2048, "inner": 768}
ODD = {"num_experts": 13, "top_k": 5, "width": 1032, "inner": 136}
FLOAT8 = {"float8": True}
NUM_TOKENS = [1, 2, 3, 8, 16, 33, 128, 129, 256, 600, 2100]


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [QWEN3_30B, ODD, QWEN3_30B | FLOAT8, ODD | FLOAT8],
    ids=["Qwen3 30B-A3B", "odd", "Qwen3 30B-A3B FP8", "odd FP8"],
)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_every_number_of_tokens(
    num_tokens: int, shape: dict[str, Any], dtype: torch.dtype, norm: bool
) -> None:
    case = make_case(num_tokens, dtype=dtype, norm=norm, device="cuda", **shape)
    first, left = launch(case)
    case.check(first, left)
    # Which program lists a token first changes nothing.
    for _ in range(5):
        again, left_again = launch(case)
        assert torch.equal(again, first) and all(map(torch.equal, left_again[:2], left[:2]))


@pytest.mark.gpu
@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 200])
@pytest.mark.parametrize("sizes", [(16, 64, 64), (64, 64, 64), (128, 128, 32)], ids=str)
def test_every_kind_of_tile(sizes: tuple[int, int, int], num_tokens: int, use_tma: bool) -> None:
    case = make_case(num_tokens, dtype=torch.bfloat16, norm=True, device="cuda", **ODD)
    for options in ({}, LEFT):
        configs = (tiles(*sizes, use_tma=use_tma, **options),) * 2
        case.check(*launch(case, configs))


def replayed(case: Case) -> tuple[torch.Tensor, ...]:
    """Return what a captured graph of two calls in a row makes of the case, behind another one's replay."""
    arguments, norm = (case.x, case.router_logits, case.experts), case.next_norm

    def twice() -> tuple[torch.Tensor, ...]:
        hidden, left = expert_mlp(*arguments, residual=case.residual, next_norm=norm)
        hidden, left = expert_mlp(left, *arguments[1:], residual=hidden, out=hidden, next_norm=norm)
        return hidden, *left[:2]

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


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, FLOAT8], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 64, 256])
def test_graphs_replay_what_was_launched(num_tokens: int, options: dict[str, bool]) -> None:
    results = replayed(make_case(num_tokens, dtype=torch.bfloat16, device="cuda", **QWEN3_30B, **options))
    assert results[0].isfinite().all()


@pytest.mark.gpu
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
    assert experts.gate_up.numel() > 2**31
    for num_tokens in (2, 40):
        logits = torch.zeros(num_tokens, num_experts, dtype=torch.float16, device="cuda")
        logits[:, -2:] = random(num_tokens, 2, scale=1.0) + 20
        case = Case(random(num_tokens, width, scale=1.0), logits, experts, None, None)
        last = Experts(experts.gate_up[-2:].clone(), experts.down[-2:].clone(), 2, True)
        alone = Case(case.x, logits[:, -2:].contiguous(), last, None, None)
        alone.check(*launch(case))
