"""The MLP of a mixture of experts: plain torch, the kernels interpreted on small shapes and compiled for three GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels import Experts, expert_mlp
from rose_backend.kernels.captured_graphs import Workspace, current_workspace
from rose_backend.kernels.linear.ops import row_moments
from tests.support.aot import compile_launch, compiles, record_launches
from tests.support.error_budget import assert_within_budget
from tests.support.interpreter import run_interpreted

HALF, FLOAT32 = torch.float16, torch.float32
DTYPES = [FLOAT32, HALF, torch.bfloat16]
EPS = 1e-5


@dataclass
class Case:
    """Arguments, and what comes of them, one expert after the other."""

    x: torch.Tensor
    router_logits: torch.Tensor
    experts: Experts
    residual: torch.Tensor | None
    rms_eps: float | None

    def by_hand(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the result of separate operations in ``dtype``."""
        x = self.x.to(dtype)
        normed = x if self.rms_eps is None else F.rms_norm(x, x.shape[1:], eps=self.rms_eps)
        logits = self.router_logits.double()
        chosen = torch.zeros_like(logits, dtype=torch.bool)
        for row, marks in zip(logits.tolist(), chosen, strict=True):
            # Python's sort keeps the order of equals.
            marks[sorted(range(len(row)), key=lambda index: -row[index])[: self.experts.top_k]] = True
        weights = torch.softmax(logits, 1) * chosen
        if self.experts.renormalize:
            weights /= weights.sum(1, keepdim=True)
        result = torch.zeros_like(x)
        for expert, takes in enumerate(chosen.T):
            # One expert at a time in float64: all of Qwen3 30B-A3B's take 5 GB.
            widen, narrow = self.experts.widen[expert].to(dtype), self.experts.narrow[expert].to(dtype)
            gate, factor = (normed[takes] @ widen.T).chunk(2, 1)
            output = (F.silu(gate) * factor) @ narrow.T
            result[takes] += output * weights[takes, expert].to(dtype)[:, None]
        return result if self.residual is None else result + self.residual.to(dtype)

    def check(self, actual: torch.Tensor, moments: torch.Tensor) -> None:
        assert actual.dtype == self.x.dtype
        assert_within_budget(actual, self.by_hand(torch.float64), self.by_hand(self.x.dtype))
        torch.testing.assert_close(moments.sum(2), row_moments(actual)[:, :, 0], rtol=1e-4, atol=1e-3)


def make_case(
    num_tokens: int,
    num_experts: int = 6,
    top_k: int = 2,
    width: int = 72,
    inner: int = 40,
    dtype: torch.dtype = FLOAT32,
    *,
    renormalize: bool = True,
    residual: bool = True,
    norm: bool = False,
    device: str = "cpu",
) -> Case:
    """Return random arguments; ``x`` and the residual are views of wider rows."""
    generator = torch.Generator(device).manual_seed(num_tokens + num_experts)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    return Case(
        random(num_tokens, width + 5)[:, :width],
        random(num_tokens, num_experts),
        Experts(
            random(num_experts, 2 * inner, width, scale=width**-0.5),
            random(num_experts, width, inner, scale=inner**-0.5),
            top_k,
            renormalize,
        ),
        random(num_tokens, width + 3)[:, :width] if residual else None,
        EPS if norm else None,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"renormalize": False}, {"residual": False}, {"norm": True}], ids=str
)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_the_twin_is_the_separate_operations(
    num_tokens: int, options: dict[str, bool], dtype: torch.dtype
) -> None:
    case = make_case(num_tokens, dtype=dtype, **options)
    before = case.x.clone()
    case.check(
        *expert_mlp(case.x, case.router_logits, case.experts, residual=case.residual, rms_eps=case.rms_eps)
    )
    assert torch.equal(case.x, before)


def test_results_may_replace_the_residual_or_x() -> None:
    case = make_case(5)
    expected, _ = expert_mlp(case.x, case.router_logits, case.experts, residual=case.x)
    for out in (case.x.clone(), case.x):
        actual, _ = expert_mlp(case.x, case.router_logits, case.experts, residual=case.x, out=out)
        assert actual is out and torch.equal(actual, expected)


def test_a_token_may_take_one_expert_or_all() -> None:
    for top_k in (1, 6):
        case = make_case(4, top_k=top_k)
        case.check(*expert_mlp(case.x, case.router_logits, case.experts, residual=case.residual))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 7}, "top_k: expected 1 to 6, got 7"),
        ({"top_k": 0}, "top_k: expected 1 to 6, got 0"),
        ({"narrow": torch.zeros(6, 72, 39)}, "widen: expected 78 rows of each expert, got 80"),
        ({"narrow": torch.zeros(5, 72, 40)}, "narrow: expected X=6, got 5"),
        ({"narrow": torch.zeros(6, 72, 40).half()}, "narrow: expected dtype torch.float32 as x"),
        ({"narrow": torch.zeros(6, 40, 72).mT}, "narrow: expected a contiguous tensor"),
    ],
)
def test_wrong_experts_are_refused(change: dict[str, Any], message: str) -> None:
    case = make_case(3)
    with pytest.raises(ShapeError, match=message.replace("[", r"\[")):
        expert_mlp(case.x, case.router_logits, replace(case.experts, **change))


def test_other_wrong_arguments_are_refused() -> None:
    case = make_case(3)
    arguments = (case.x, case.router_logits, case.experts)
    with pytest.raises(ShapeError, match="router_logits: expected T=3, got 2"):
        expert_mlp(case.x, case.router_logits[:2], case.experts)
    with pytest.raises(ShapeError, match="residual: expected E=72, got 71"):
        expert_mlp(*arguments, residual=torch.zeros(3, 71))
    with pytest.raises(ShapeError, match="x_moments: expected contiguous"):
        expert_mlp(*arguments, x_moments=torch.zeros(3, 2, 3))
    many = make_case(1, num_experts=1025, width=2, inner=1)
    with pytest.raises(ShapeError, match="at most 1024 experts, got 1025"):
        expert_mlp(many.x, many.router_logits, many.experts)


def launch(case: Case, cuts: tuple[dict[str, Any], dict[str, Any]] | None = None) -> tuple[torch.Tensor, ...]:
    """Return the result and its moments, memory that the launcher allocates being full of NaN."""
    from rose_backend.kernels.experts import expert_mlp as gpu

    out = torch.full(
        (len(case.x), case.x.shape[1] + 7), float("nan"), dtype=case.x.dtype, device=case.x.device
    )
    torch.use_deterministic_algorithms(True)
    try:
        moments = gpu.expert_mlp(
            case.x,
            case.router_logits,
            case.experts,
            residual=case.residual,
            out=out[:, : case.x.shape[1]],
            rms_eps=case.rms_eps,
            x_moments=None if case.rms_eps is None else row_moments(case.x),
            configs=None if cuts is None else (gpu.ExpertConfig(**cuts[0]), gpu.ExpertConfig(**cuts[1])),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert out[:, case.x.shape[1] :].isnan().all()
    assert not gpu._counts_on(case.x.device).any(), "the next call finds them"
    return out[:, : case.x.shape[1]], moments


def cut(block_m: int, block_n: int, block_k: int, **options: bool) -> dict[str, Any]:
    return dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=2, **options)


LEFT = {"weights_left": True}


@pytest.mark.parametrize("dtype", [FLOAT32, HALF], ids=str)
@pytest.mark.parametrize("options", [{"norm": True}, {"renormalize": False, "residual": False}], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 40])
def test_the_interpreted_kernels_agree(num_tokens: int, options: dict[str, bool], dtype: torch.dtype) -> None:
    case = make_case(num_tokens, dtype=dtype, **options)
    case.check(*run_interpreted(launch, case))


@pytest.mark.parametrize("num_tokens", [2, 50])
@pytest.mark.parametrize(
    "cuts", [(cut(16, 16, 32), cut(8, 32, 64, **LEFT)), (cut(8, 32, 16, **LEFT), cut(32, 64, 128))]
)
def test_tiles_of_other_sizes_agree(cuts: tuple[dict[str, Any], ...], num_tokens: int) -> None:
    case = make_case(num_tokens, num_experts=5, top_k=3, width=600, inner=24, dtype=HALF, norm=True)
    case.check(*run_interpreted(launch, case, cuts))


@pytest.mark.parametrize("num_tokens", [2, 30])
def test_weights_copied_by_the_tensor_memory_accelerator(num_tokens: int) -> None:
    # Behind the last column of an expert are another expert's, behind the last expert nothing.
    case = make_case(num_tokens, num_experts=3, width=72, inner=40, dtype=HALF)
    tma = {"use_tma": True}
    case.check(*run_interpreted(launch, case, (cut(16, 32, 32, **tma), cut(16, 64, 32, **LEFT, **tma))))


def test_all_tokens_of_one_expert_and_ties() -> None:
    case = make_case(40, num_experts=7, top_k=1)
    for logits in (0.0, 30.0):
        case.router_logits[:, 5] = logits
        case.router_logits[:, :5] = case.router_logits[:, 6:] = 0.0
        case.check(*run_interpreted(launch, case))
        case.check(*expert_mlp(case.x, case.router_logits, case.experts, residual=case.residual))


@pytest.mark.parametrize("dtype", [FLOAT32, HALF], ids=str)
def test_large_logits_of_either_sign(dtype: torch.dtype) -> None:
    case = make_case(20, num_experts=7, top_k=3, dtype=dtype, renormalize=False)
    case.router_logits[:10] -= 40_000
    case.router_logits[10:] += 40_000
    case.check(*run_interpreted(launch, case))


def test_a_token_that_is_not_a_number_spoils_no_other() -> None:
    case = make_case(20, num_experts=4, top_k=3)
    expected, _ = run_interpreted(launch, case)
    case.x[3], case.router_logits[3] = float("nan"), float("nan")
    case.router_logits[4] = float("-inf")
    actual, _ = run_interpreted(launch, case)
    others = [token for token in range(20) if token not in (3, 4)]
    assert torch.equal(actual[others], expected[others])
    assert actual[3].isnan().all()


def addresses_of_counts() -> list[int]:
    from rose_backend.kernels.experts import expert_mlp as gpu

    found = []
    for num_experts in (4, 900):
        launch(make_case(20, num_experts, width=16, inner=8))
        found.append(gpu._counts_on(torch.device("cpu")).data_ptr())
    return found


def test_a_model_with_more_experts_leaves_captured_graphs_their_counters() -> None:
    first, second = run_interpreted(addresses_of_counts)
    assert first == second


def launch_beside_another(case: Case, other: Case) -> tuple[torch.Tensor, ...]:
    """Launch one engine's experts, and a whole call of another engine's behind each launch of its first three."""
    from rose_backend.kernels.experts import expert_mlp as gpu

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
    case.check(*run_interpreted(launch_beside_another, case, other))


def counts_behind_a_failure() -> torch.Tensor:
    from rose_backend.kernels.experts import expert_mlp as gpu

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with mock.patch.object(gpu, "_product", fail), pytest.raises(RuntimeError, match="out of memory"):
        launch(make_case(20))
    return gpu._counts_on(torch.device("cpu"))


def programs_that_counted(case: Case, cuts: tuple[dict[str, Any], dict[str, Any]]) -> list[int]:
    """Return how many programs of the first product have stored their results, by expert."""
    from rose_backend.kernels.experts import expert_mlp as gpu

    product, found = gpu._product, []

    def first_only(*arguments: Any) -> None:
        if not found:
            product(*arguments)
            found.append(gpu._counts_on(torch.device("cpu"))[gpu.MAX_EXPERTS :].tolist())

    with mock.patch.object(gpu, "_product", first_only):
        launch(case, cuts)
    return found[0][: len(case.experts.widen)]


def test_programs_of_the_first_product_count_themselves() -> None:
    case = make_case(40, num_experts=4, top_k=1, width=40, inner=24)
    case.router_logits.zero_()
    case.router_logits[:33, 2] = case.router_logits[33:, 3] = 1.0
    # 33 tokens are three tiles of 16 rows, 24 columns two of 16.
    assert run_interpreted(programs_that_counted, case, (cut(16, 16, 32), cut(8, 32, 64))) == [0, 0, 6, 2]


def test_a_kernel_that_fails_leaves_no_counts_to_the_next_call() -> None:
    assert not run_interpreted(counts_behind_a_failure).any()


@compiles("_choose_experts_kernel", "_expert_product_kernel", "_add_experts_kernel")
@pytest.mark.parametrize("dtype", [HALF, FLOAT32], ids=str)
@pytest.mark.parametrize("numbers", [(1, 10), (20, 125), (40, 140)], ids=str)
def test_compiles_without_spills(numbers: tuple[int, int], dtype: torch.dtype, capability: int) -> None:
    from rose_backend.kernels.experts import expert_mlp as gpu

    can_use_tma = capability >= 90
    for num_tokens in numbers:
        # Qwen3 30B-A3B's, but for the number of experts, which takes memory: with 128 eight times as many tokens have
        # the same tiles.
        case = make_case(num_tokens, 16, 8, 2048, 768, dtype, norm=num_tokens <= 128)
        with (
            record_launches(gpu, "_choose_experts_kernel") as choices,
            record_launches(gpu, "_expert_product_kernel") as products,
            record_launches(gpu, "_add_experts_kernel") as sums,
            mock.patch.object(gpu, "can_use_tma", lambda matrix: can_use_tma),
            mock.patch.object(gpu, "has_dependent_launch", lambda device: can_use_tma),
        ):
            gpu.expert_mlp(
                case.x,
                case.router_logits,
                replace(case.experts, top_k=8, renormalize=True),
                residual=case.residual,
                out=torch.empty_like(case.x),
                rms_eps=case.rms_eps,
                x_moments=None if case.rms_eps is None else row_moments(case.x),
            )
        for recorded in choices + products + sums:
            resources = compile_launch(recorded, capability)
            assert resources.shared_bytes <= (227 << 10 if can_use_tma else 99 << 10)
            assert ("griddepcontrol.wait" in resources.ptx) == can_use_tma
            if "product" in recorded.kernel.__name__:
                # What one has counted the other waits for: in the interpreter programs run one after the other.
                is_first = recorded.arguments["GATED"]
                assert ("gpu.release" in resources.ptx) == is_first
                assert ("gpu.acquire" in resources.ptx) != is_first
            if can_use_tma and "product" in recorded.kernel.__name__:
                # The second product reads what the first one's programs have counted, and waits when it has stored.
                is_last = resources.ptx.index("griddepcontrol.wait") > resources.ptx.rindex("st.global")
                assert is_last != recorded.arguments["GATED"]
