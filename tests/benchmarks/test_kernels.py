"""benchmarks/kernels.py: results are compared before times, and ratios need a proof. Its times are made up."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernel_cases import FAMILIES, case, cases_of, kv_cache, layer, sampler, small
from benchmarks.kernel_cases.case import COLD_BYTES, MAX_SETS, ROSE, Contest, KernelCase
from benchmarks.kernel_cases.kv_cache import make_steps
from benchmarks.kernel_cases.sampler import FILTERS, allowed_tokens
from benchmarks.kernel_cases.small import HEADS
from benchmarks.reports.parts import all_kernels_table
from benchmarks.support import proof

COPY = 4e12


class FakeGraph:
    """Takes as long as the first launch's result says."""

    taken: ClassVar[list[float]] = []

    def __init__(self, launches: Any) -> None:
        self.us = float(launches[0]()[0])

    def sample(self) -> float:
        self.taken.append(self.us)
        return self.us


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LaunchGraph", FakeGraph)


def measured(sides: dict[str, float], *, compare: bool = True, tolerance: float = 1.0) -> dict[str, Any]:
    """Time sides whose result is the time that they take."""

    def make(num_sets: int) -> Contest:
        launches = {name: [lambda us=us: torch.tensor([us])] * num_sets for name, us in sides.items()}
        return Contest(launches, tolerance=tolerance)

    options = kernels.parse_options([])
    work = KernelCase("some work", 8_000_000, make, flops=6_000_000)
    return {"family": "decode", **kernels.measure(work, options, COPY, compare=compare)}


def test_figures_of_a_row() -> None:
    row = measured({ROSE: 2.0, "slow": 3.0})
    assert row["sides"][ROSE] == {
        "p20_us": 2.0,
        "p50_us": 2.0,
        "p80_us": 2.0,
        "gb_per_s": 4000.0,
        "copy_share": 1.0,
        "tflop_per_s": 3.0,
    }
    assert row["sides"]["slow"]["times_rose"] == 1.5


def test_no_ratio_without_a_proof() -> None:
    row = measured({ROSE: 2.0, "slow": 3.0}, compare=False)
    assert row["sides"]["slow"]["times_rose"] is None
    assert row["sides"]["slow"]["p50_us"] == 3.0


def test_a_peer_that_disagrees_is_not_timed() -> None:
    row = measured({ROSE: 2.0, "wrong": 3.0, "slow": 2.1}, tolerance=0.1)
    assert row["sides"]["wrong"] == {"error": "differs from Rose by 5.0e-01, at most 1.0e-01 expected"}
    assert row["sides"]["slow"]["times_rose"] == pytest.approx(1.05)
    row = measured({ROSE: 2.0, "wrong": float("nan")})
    assert "differs from Rose by nan" in row["sides"]["wrong"]["error"]


def test_a_broken_peer_costs_nobody_else_a_figure_but_a_broken_rose_stops() -> None:
    def make(broken: str) -> Any:
        def work(name: str) -> Any:
            def run() -> torch.Tensor:
                if name == broken:
                    raise RuntimeError("no such kernel")
                return torch.tensor([2.0])

            return [run]

        return lambda num_sets: Contest({ROSE: work(ROSE), "peer": work("peer"), "other": work("other")})

    options = kernels.parse_options([])
    row = kernels.measure(KernelCase("work", 1, make("peer")), options, COPY, compare=True)
    assert row["sides"]["peer"] == {"error": "RuntimeError: no such kernel"}
    assert row["sides"]["other"]["times_rose"] == 1.0
    with pytest.raises(RuntimeError, match="no such kernel"):
        kernels.measure(KernelCase("work", 1, make(ROSE)), options, COPY, compare=True)


def test_results_are_compared_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph writes to all input sets, of which one may be what another side's check starts from."""
    order: list[str] = []

    class Graph(FakeGraph):
        def __init__(self, launches: Any) -> None:
            order.append("time")
            super().__init__(launches)

    monkeypatch.setattr(kernels, "LaunchGraph", Graph)
    launches = {name: [lambda: torch.tensor([2.0])] for name in (ROSE, "peer", "other")}
    contest = Contest(launches, reset=lambda: order.append("compare"))
    kernels.measure(KernelCase("work", 1, lambda _: contest), kernels.parse_options([]), COPY, compare=True)
    assert order == ["compare"] * 4 + ["time"] * 3


def test_sides_take_turns() -> None:
    FakeGraph.taken.clear()
    measured({ROSE: 1.0, "slow": 2.0})
    assert FakeGraph.taken == [*[1.0] * 5, *[2.0] * 5] * 5


def report_of(rows: list[dict[str, Any]], unproved_because: str | None) -> str:
    report = {
        "gpu": "some GPU",
        "driver": "1.2",
        "copy_bytes_per_s": COPY,
        "families": {"decode": {"tests": [], "unproved_because": unproved_because}},
        "missing_peers": {"absent": "No module named 'absent'"},
        "rows": rows,
    }
    return all_kernels_table(report)


def test_the_printed_report_names_losses_and_what_is_missing() -> None:
    text = report_of([measured({ROSE: 3.0, "fast": 1.5, "wrong": 9.0})], None)
    assert "some GPU, driver 1.2, copy 4.00 TB/s" in text
    assert "not every peer was timed: absent (No module named 'absent')" in text
    assert "not every peer was timed: wrong in some work (differs" in text
    assert "| some work | Rose | 3.00 | 3.00 | 3.00 | 2,667 | 66.7% | 2 |  |" in text
    assert text.endswith("Slower in 1 of 1 cases:\n\n- behind fast: some work (0.50x)")


def test_the_printed_report_has_no_ratio_without_a_proof() -> None:
    text = report_of([measured({ROSE: 3.0, "fast": 1.5}, compare=False)], "tests/t.py: 1 failed")
    assert "decode is unproved: tests/t.py: 1 failed" in text
    assert text.endswith("No losses in 1 cases.") and "0.50" not in text
    (line,) = [line for line in text.splitlines() if "fast" in line]
    assert "unproved" in line


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_are_named_and_rotate_among_more_than_a_cache_holds(family: str) -> None:
    cases = cases_of(family)
    assert cases and len({found.name for found in cases}) == len(cases)
    for found in cases:
        assert found.num_sets >= 2
        assert found.num_sets * found.num_bytes >= COLD_BYTES or found.num_sets == MAX_SETS


def test_an_absent_peer_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "MISSING", {})
    sides: dict[str, Any] = {}
    case.add_peer(sides, "absent", lambda: [importlib.import_module("no_such_package_at_all")])  # type: ignore[list-item]
    case.add_peer(sides, "present", list)
    assert case.MISSING == {"absent": "No module named 'no_such_package_at_all'"}
    assert sides == {"present": []}


@pytest.mark.parametrize("name", FILTERS)
def test_allowed_tokens_are_those_of_the_definition(name: str) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.25, 0.03, 0.02]]).log()
    filters = {**FILTERS[name]}
    if "top_k" in filters:
        filters["top_k"] = 3
    allowed = {
        "greedy": [0],
        "no filter": [0, 1, 2, 3, 4],
        "top-k 50, top-p 0.9": [0, 1, 2],
        "top-k 500, top-p 0.9": [0, 1, 2],
        "top-p 0.9": [0, 1, 2],
        "min-p 0.05": [0, 1, 2, 3, 4],
    }[name]
    assert allowed_tokens(logits, filters).nonzero()[:, 1].tolist() == allowed
    if name == "min-p 0.05":
        assert allowed_tokens(logits, {"min_p": 0.7}).nonzero()[:, 1].tolist() == [0, 1]


def test_a_short_run_goes_through_every_family(
    run_benchmark: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_benchmark(kernels.main, "--quick")
    assert {row["family"] for row in report["rows"]} == set(FAMILIES) and report["quick"]
    for row in report["rows"]:
        assert row["sides"][ROSE]["p50_us"] > 0, row
        assert not any(side.get("times_rose") for side in row["sides"].values()), (
            "nothing to compare speeds by"
        )
    assert report["missing_peers"].keys() >= {"FlashAttention 3", "vLLM Triton", "flashinfer"}
    assert "not every peer was timed: vLLM Triton (needs a GPU)" in capsys.readouterr().out


def test_a_short_run_finds_a_side_that_does_other_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layer.Layer, "cublas", lambda self: layer.Layer(len(self.x)).rose())
    assert kernels.main(["--quick", "--families", "linear"]) == 1
    assert (
        "cuBLAS and torch in products of a GPT-2 layer, 3 rows (differs from Rose by"
        in capsys.readouterr().out
    )


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Make the inputs of small cases on the CPU."""
    with small.on_cpu():
        yield


def small_cases() -> Iterator[KernelCase]:
    for family in FAMILIES:
        yield from small.small_cases(family)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_sides_agree(case: KernelCase) -> None:
    contest = case.make(2)
    assert next(iter(contest.sides)) == ROSE
    for side, launches in contest.sides.items():
        assert len(launches) == 2
        assert contest.disagreement(side) is None, side
    if "sample" not in case.name:
        result = contest.sides[ROSE][1]()
        contest.sides["idle"] = [lambda: result]
        assert "differs from Rose by" in (contest.disagreement("idle") or ""), "idle for these inputs"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["greedy", "top-k 50, top-p 0.9", "min-p 0.05"])
def test_a_forbidden_token_is_found_out(name: str) -> None:
    contest = sampler.sampler_case(name, 3).make(2)
    contest.sides["wrong"] = [lambda: torch.full((3,), 17)]
    assert contest.disagreement("wrong") == "the peer drew 3 of 3 tokens that the filters forbid"


@pytest.mark.usefixtures("on_cpu")
def test_a_peer_that_stores_nothing_is_found_out() -> None:
    contest = kv_cache.decode_case(HEADS, 3, 40).make(2)
    out = contest.sides[ROSE][0]().clone()
    contest.sides["forgetful"] = [lambda: out]
    assert "differs from Rose by nan" in (contest.disagreement("forgetful") or "")


@pytest.mark.usefixtures("on_cpu")
def test_a_larger_block_size_keeps_the_content() -> None:
    (step,) = make_steps(HEADS, 2, 40, 24, 1)
    large = step.with_block_size(32)
    assert large.storage.shape == (4, 32, 2, 32)
    assert torch.equal(large.stored(), step.stored())
    tokens, blocks = torch.arange(64), large.block_table[1].long()
    for cache, wanted in ((large.key_cache, step.key_cache), (large.value_cache, step.value_cache)):
        actual = cache[blocks[tokens // 32], tokens % 32]
        assert torch.equal(actual, wanted[step.block_table[1].long()[tokens // 16], tokens % 16])


TESTS = "tests/test_some_kernel.py"
PASSES = "import pytest\npytestmark = pytest.mark.gpu\ndef test_one():\n    print('said')\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout with one kernel and one test that passes."""
    monkeypatch.setattr(proof, "ROOT", tmp_path)
    monkeypatch.setattr(proof, "KERNELS", tmp_path / "kernels")
    for name, text in (
        ("kernels/kernel.py", ""),
        (TESTS, PASSES),
        ("pytest.ini", "[pytest]\nmarkers = gpu: on one\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def why_unproved(checkout: Path) -> str | None:
    return proof.unproved_because(TESTS, checkout / "proofs", proof.machine_facts())


def test_a_full_passed_run_is_a_proof_for_its_sources_and_machine(checkout: Path) -> None:
    assert why_unproved(checkout) == f"{TESTS}: not run for these kernels on this machine"
    proof.prove([TESTS], checkout / "proofs")
    assert why_unproved(checkout) is None
    other = {**proof.machine_facts(), "gpu_uuid": "another"}
    assert "not run for these" in (proof.unproved_because(TESTS, checkout / "proofs", other) or "")
    (checkout / "kernels" / "kernel.py").write_text("changed = True\n")
    assert "not run for these" in (why_unproved(checkout) or "")


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (PASSES + "def test_two():\n    assert False\n", "1 failed or skipped, test_two among them"),
        (
            f"{PASSES}def test_two():\n    pytest.skip()\n",
            "1 failed or skipped, test_two among them",
        ),
        ("import no_such_module\n", "1 failed or skipped, tests.test_some_kernel among them"),
        ("", "pytest ended with 5"),
    ],
)
def test_a_failure_or_a_skip_is_named(checkout: Path, tests: str, why: str) -> None:
    (checkout / TESTS).write_text(tests)
    proof.prove([TESTS], checkout / "proofs")
    assert why_unproved(checkout) == f"{TESTS}: {why}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_names_tests_that_need_a_gpu(family: str) -> None:
    assert "pytest.mark.gpu" in (proof.ROOT / FAMILIES[family]).read_text()
