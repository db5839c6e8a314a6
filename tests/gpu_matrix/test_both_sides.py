"""The matrix' harness on a CPU: both sides of two architectures, and real reports with one broken token."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu_matrix.cases import CASES
from tests.gpu_matrix.reference import add_exact
from tests.gpu_matrix.run import SIDES, Run, report_path
from tests.gpu_matrix.traffic import NUM_FIRST, NUM_MIXED
from tests.gpu_matrix.verdict import Report, judge
from tests.support.random_checkpoints import VOCAB_SIZE

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
# Rose's layers; experts, sinks and windows in a KV cache group of their own.
NAMES = ("Qwen2ForCausalLM", "GptOssForCausalLM")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Run]:
    cases = Run(NAMES, folder, folder / "checkpoints")
    yield cases
    cases.close()


def reports(folder: Path, name: str) -> tuple[Report, Report]:
    rose, stock = (json.loads(report_path(folder, CASES[name], side).read_text()) for side in SIDES)
    return rose, stock


@pytest.mark.parametrize("name", NAMES)
def test_rose_says_what_stock_says(run: Run, folder: Path, name: str) -> None:
    verdict = run.verdict(name)
    assert verdict["outcome"] == "equal", verdict["complaints"]
    assert verdict["num_requests"] == 3 * NUM_FIRST + NUM_MIXED
    rose, stock = reports(folder, name)
    for answer in [*rose["answers"].values(), *stock["answers"].values()]:
        assert {len(each["tokens"]) for each in answer["completions"]} != {0}


@pytest.mark.parametrize("place", [0, 7])
def test_a_broken_token_is_found(run: Run, folder: Path, place: int) -> None:
    run.verdict(NAMES[0])
    rose, stock = reports(folder, NAMES[0])
    answer = copy.deepcopy(rose["answers"]["mixed-0"])
    tokens = answer["completions"][0]["tokens"]
    tokens[place] = (tokens[place] + 1) % VOCAB_SIZE
    add_exact(NAMES[0], folder / "checkpoints" / NAMES[0], {"mixed-0": answer})
    verdict = judge(rose | {"answers": rose["answers"] | {"mixed-0": answer}}, stock)
    assert verdict.outcome == "different"
    assert any(f"mixed-0: token {place} is" in line for line in verdict.complaints), verdict.complaints
