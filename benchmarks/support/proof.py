"""Run the GPU tests of kernels and remember which passed, on which machine: a benchmark compares nothing without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.support.run_facts import digest_of

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "rose_backend" / "kernels"
DEFAULT_FOLDER = ROOT / "build" / "kernel_proofs"


def source_digest(*test_files: str) -> str:
    """Return a digest of every kernel's source, of what was measured, and of files of tests."""
    sources = sorted([*KERNELS.rglob("*.py"), *KERNELS.rglob("*.txt")])
    return digest_of([*sources, *(ROOT / file for file in test_files)], ROOT)


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


def prove(test_files: Sequence[str], folder: Path) -> None:
    """Run what files test on a GPU, a process for each at the same time, and write down what came of it."""
    folder.mkdir(parents=True, exist_ok=True)
    # Taken before the first test runs: what it tests is what it imports.
    machine, digests = machine_facts(), {file: source_digest(file) for file in test_files}
    runs = {}
    for file in test_files:
        _kept(folder, file, "json").unlink(missing_ok=True)
        options = ["-q", "-m", "gpu", f"--junitxml={_kept(folder, file, 'xml')}"]
        command = [sys.executable, "-m", "pytest", *options, file]
        runs[file] = subprocess.Popen(command, cwd=ROOT)
    for file, run in runs.items():
        status = run.wait()
        results = _kept(folder, file, "xml")
        tests = ElementTree.parse(results).iter("testcase") if results.is_file() else ()
        # A test that has passed has no children but what it printed.
        bad = [
            test.get("name")
            for test in tests
            if {part.tag for part in test} & {"failure", "error", "skipped"}
        ]
        record = {"machine": machine, "digest": digests[file], "status": status, "not_passed": bad}
        _kept(folder, file, "json").write_text(json.dumps(record, indent=1) + "\n")


def unproved_because(test_file: str, folder: Path, machine: dict[str, str]) -> str | None:
    """Return why these tests cannot be said to have passed for the present sources on ``machine``, or None."""
    path = _kept(folder, test_file, "json")
    record = json.loads(path.read_text()) if path.is_file() else {}
    if (record.get("machine"), record.get("digest")) != (machine, source_digest(test_file)):
        return f"{test_file}: not run for these kernels on this machine"
    if record["not_passed"]:
        return f"{test_file}: {len(record['not_passed'])} failed or skipped, {record['not_passed'][0]} among them"
    return f"{test_file}: pytest ended with {record['status']}" if record["status"] else None


def _kept(folder: Path, test_file: str, ending: str) -> Path:
    return folder.absolute() / f"{Path(test_file).stem}.{ending}"
