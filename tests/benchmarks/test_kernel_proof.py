"""A family of kernels counts as proved only by a full, passed run of its tests, for these sources, on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kernel_cases import FAMILIES
from benchmarks.support import proof

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
