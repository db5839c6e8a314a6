"""Remember which GPU tests passed, for which kernels, on which machine: a benchmark compares nothing without.

As a plug-in of pytest it writes down what a run saw:

    python -m pytest -p benchmarks.support.proof --proofs build/kernel_proofs tests/kernels/test_decode_on_gpu.py

A file of tests counts as passed once every test in it has passed, in one run or in several that share a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.run_facts import digest_of

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "rose_backend" / "kernels"
DEFAULT_FOLDER = ROOT / "build" / "kernel_proofs"


def source_digest(*test_files: str) -> str:
    """Return a digest of every kernel's source, and of files of tests."""
    return digest_of([*sorted(KERNELS.rglob("*.py")), *(ROOT / file for file in test_files)], ROOT)


def machine_facts() -> dict[str, str]:
    """Return what a proof holds for: the GPU and the versions that kernels are compiled with."""
    import torch
    import triton

    facts = {"torch": torch.__version__, "triton": triton.__version__, "gpu": "none", "gpu_uuid": "none"}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpu_uuid"] = str(torch.cuda.get_device_properties(0).uuid)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return facts


def unproved_because(test_file: str, folder: Path, machine: dict[str, str]) -> str | None:
    """Return why these tests cannot be said to have passed for the present sources on ``machine``, or None."""
    digest = source_digest(test_file)
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    files = [record["files"].get(test_file) for record in records if record["machine"] == machine]
    seen = [file for file in files if file is not None and file["digest"] == digest]
    if not seen:
        return f"{test_file}: not run for these kernels on this machine"
    collected, passed, failed = (
        set().union(*(file[outcome] for file in seen)) for outcome in ("collected", "passed", "failed")
    )
    for tests, what in ((failed, "failed"), (collected - passed, "not run or skipped")):
        if tests:
            return f"{test_file}: {len(tests)} {what}, {min(tests).split('::', 1)[1]} among them"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--proofs``."""
    parser.addoption("--proofs", type=Path, default=DEFAULT_FOLDER, help="write down here which tests passed")


def pytest_configure(config: pytest.Config) -> None:
    """Watch the run."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        # Under pytest-xdist the processes that run tests write records; the one that started them collects nothing.
        return
    config.pluginmanager.register(_Recorder(config.getoption("--proofs"), config.args), "kernel-proofs")


class _Recorder:
    """Collects outcomes by file of tests."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self._folder = folder
        # Of a file that was asked for by its tests only those would be collected.
        self._narrowed = {argument.split("::")[0] for argument in arguments if "::" in argument}
        self._files: dict[str, dict[str, Any]] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Count the test as there, whether or not it will be deselected."""
        self._file(item.nodeid)["collected"].append(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the test as passed or failed; one that is skipped is neither."""
        if report.failed:
            self._file(report.nodeid)["failed"].append(report.nodeid)
        elif report.passed and report.when == "call":
            self._file(report.nodeid)["passed"].append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        files = {name: file for name, file in self._files.items() if name not in self._narrowed}
        record = {"machine": machine_facts(), "files": files}
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{time.time_ns()}-{os.getpid()}.json"
        (self._folder / name).write_text(json.dumps(record, indent=1) + "\n")

    def _file(self, node: str) -> dict[str, Any]:
        name = node.split("::")[0]
        if name not in self._files:
            # Taken before the first test runs: what it tests is what has been imported.
            self._files[name] = {"digest": source_digest(name), "collected": [], "passed": [], "failed": []}
        return self._files[name]
