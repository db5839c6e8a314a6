"""On CUDA, inside vLLM: every architecture that works and every feature, with Rose and without, on the same traffic.

One command, some 30 pairs of engines, several side by side. ``-k`` chooses among them. With ``ROSE_GPU_MATRIX=FOLDER``
the reports of both sides, their logs and the verdicts stay in FOLDER; ``python -m tests.gpu_matrix FOLDER`` makes
the table of docs/models.md from them. ``tests/gpu_matrix/verdict.py`` has the rule.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu_matrix.cases import CASES
from tests.gpu_matrix.run import Run
from tests.gpu_matrix.table import RESULTS, keep_results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("ROSE_GPU_MATRIX")
    return Path(kept).resolve() if kept else tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def run(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """Start all cases that were chosen; the tests wait for theirs."""
    chosen = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    cases = Run(chosen, folder, tmp_path_factory.mktemp("checkpoints"))
    yield cases
    cases.close()


@pytest.mark.parametrize("name", CASES)
def test_says_what_stock_says(run: Run, folder: Path, name: str) -> None:
    verdict = run.verdict(name)
    keep_results({name: verdict}, folder / RESULTS.name)
    if verdict["outcome"] == "not run":
        pytest.skip("; ".join(verdict["complaints"]))
    assert verdict["outcome"] == "equal", "\n".join(verdict["complaints"][:20])
