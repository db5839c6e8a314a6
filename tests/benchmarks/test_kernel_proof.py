"""A family of kernels counts as proved only by a full, passed run of its tests, for these sources, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.kernel_cases import FAMILIES
from benchmarks.support import proof

TESTS = "tests/kernels/test_tensor_checks.py"


@pytest.fixture(scope="module")
def machine() -> dict[str, str]:
    return proof.machine_facts()


def run_tests(folder: Path, *arguments: str) -> None:
    plugin = ["-p", "benchmarks.support.proof", "--proofs", str(folder)]
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--no-summary", *plugin, *arguments])
    assert status == pytest.ExitCode.OK


def test_two_halves_make_a_whole(
    tmp_path: Path, machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(proof.ROOT)
    assert "not run for these kernels" in (proof.unproved_because(TESTS, tmp_path, machine) or "")
    run_tests(tmp_path / "narrowed", f"{TESTS}::test_head_groups")
    why = proof.unproved_because(TESTS, tmp_path / "narrowed", machine)
    assert "not run for these kernels" in (why or "")
    run_tests(tmp_path, "-k", "head_groups", TESTS)
    assert " not run or skipped, test_" in (proof.unproved_because(TESTS, tmp_path, machine) or "")
    run_tests(tmp_path, "-k", "not head_groups", TESTS)
    assert proof.unproved_because(TESTS, tmp_path, machine) is None


def test_of_a_parallel_run_only_processes_that_run_tests_write_records(tmp_path: Path) -> None:
    registered: list[str] = []
    options = {"numprocesses": 2, "--proofs": tmp_path}
    config: Any = SimpleNamespace(
        getoption=lambda name, default=None: options.get(name, default),
        args=[],
        pluginmanager=SimpleNamespace(register=lambda plugin, name: registered.append(name)),
    )
    proof.pytest_configure(config)
    assert registered == []
    config.workerinput = {}
    proof.pytest_configure(config)
    assert registered == ["kernel-proofs"]


def write_record(folder: Path, machine: dict[str, str], **outcomes: Any) -> None:
    file = {"digest": proof.source_digest(TESTS), "collected": [], "passed": [], "failed": [], **outcomes}
    (folder / "record.json").write_text(json.dumps({"machine": machine, "files": {TESTS: file}}))


def test_a_failure_or_a_skip_is_named(tmp_path: Path, machine: dict[str, str]) -> None:
    one, two = f"{TESTS}::test_one", f"{TESTS}::test_two"
    write_record(tmp_path, machine, collected=[one, two], passed=[one], failed=[two])
    assert proof.unproved_because(TESTS, tmp_path, machine) == f"{TESTS}: 1 failed, test_two among them"
    write_record(tmp_path, machine, collected=[one, two], passed=[one])
    why = proof.unproved_because(TESTS, tmp_path, machine)
    assert why == f"{TESTS}: 1 not run or skipped, test_two among them"
    write_record(tmp_path, machine, collected=[one], passed=[one])
    assert proof.unproved_because(TESTS, tmp_path, machine) is None


def test_another_machine_or_another_source_proves_nothing(
    tmp_path: Path, machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = f"{TESTS}::test_one"
    write_record(tmp_path, machine, collected=[one], passed=[one])
    why = proof.unproved_because(TESTS, tmp_path, {**machine, "gpu_uuid": "another"})
    assert "not run for these kernels on this machine" in (why or "")
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "changed.py").write_text("")
    monkeypatch.setattr(proof, "KERNELS", kernels)
    monkeypatch.setattr(proof, "ROOT", tmp_path)
    (tmp_path / "tests" / "kernels").mkdir(parents=True)
    (tmp_path / TESTS).write_text("")
    why = proof.unproved_because(TESTS, tmp_path, machine)
    assert "not run for these kernels on this machine" in (why or "")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_names_tests_that_need_a_gpu(family: str) -> None:
    assert "pytestmark = pytest.mark.gpu" in (proof.ROOT / FAMILIES[family]).read_text()
