"""Which Python and which device the set-up uses. Standard library only; runs under Python 3.7 and newer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Iterable, Iterator, NamedTuple

OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 14)
DEVICES = ("cpu", "cuda")


class SetUpError(Exception):
    """One step failed; the text says what failed and what to do.

    Attributes:
        output: end of the failed command's standard error, empty where no command ran.
    """

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class Python(NamedTuple):
    """An interpreter that was found on this machine."""

    path: str
    version: tuple[int, ...]
    has_venv: bool


def dotted(version: Iterable[int]) -> str:
    """Return ``(3, 11)`` as ``"3.11"``."""
    return ".".join(str(part) for part in version)


def is_supported(version: Iterable[int]) -> bool:
    """Whether the pinned packages have builds for this version of Python."""
    return OLDEST_PYTHON <= tuple(version)[:2] <= NEWEST_PYTHON


def probe_python(path: str) -> Python | None:
    """Ask an interpreter for its version and whether it can make virtual environments; None if it fails."""
    code = (
        "import sys, importlib.util as u; base = getattr(sys, '_base_executable', None) or sys.executable\n"
        "print(base); print(*sys.version_info[:3]); print(all(u.find_spec(m) for m in ('venv', 'ensurepip')))"
    )
    try:
        text = subprocess.run(
            [path, "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        base, version, has_venv = text.strip().splitlines()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Python(base, tuple(int(part) for part in version.split()), has_venv == "True")


def installed_pythons() -> Iterator[Python]:
    """Yield the interpreter that runs this script, then those on PATH."""
    names = [f"python3.{minor}" for minor in range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1)]
    for name in [sys.executable, *names, "python3"]:
        path = shutil.which(name)
        found = probe_python(path) if path else None
        if found is not None:
            yield found


def choose_python(candidates: Iterable[Python]) -> Python:
    """Return the first candidate that is recent enough and can make a virtual environment.

    Raises:
        SetUpError: there is none; says whether Python itself or only its venv module is missing.
    """
    seen = []
    for candidate in candidates:
        if is_supported(candidate.version) and candidate.has_venv:
            return candidate
        seen.append(candidate)
    for candidate in seen:
        if is_supported(candidate.version):
            package = f"python{dotted(candidate.version[:2])}-venv"
            raise SetUpError(
                f"{candidate.path} (Python {dotted(candidate.version)}) has no venv module.\n"
                f"Install it (Debian and Ubuntu: sudo apt install {package}) and run the same command again."
            )
    versions = ", ".join(f"{item.path} ({dotted(item.version)})" for item in seen) or "none at all"
    raise SetUpError(
        f"Python {dotted(OLDEST_PYTHON)} to {dotted(NEWEST_PYTHON)} is needed; found {versions}.\n"
        "Install one, or name it: make PYTHON=/path/to/python3.11 ..."
    )


def detect_device() -> str:
    """Return "cpu" or "cuda": ROSE_DEVICE if set, else cuda where nvidia-smi runs successfully.

    Raises:
        SetUpError: ROSE_DEVICE has another value.
    """
    wanted = os.environ.get("ROSE_DEVICE", "")
    if wanted:
        if wanted not in DEVICES:
            raise SetUpError(f"ROSE_DEVICE: got {wanted!r}, allowed are {' and '.join(DEVICES)}.")
        return wanted
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return "cpu"
    finished = subprocess.run([nvidia_smi], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return "cuda" if finished.returncode == 0 else "cpu"


def venv_python_version(venv: Path) -> str | None:
    """Return the Python version of a usable virtual environment, else None."""
    config = venv / "pyvenv.cfg"
    if not config.is_file() or not (venv / "bin" / "python").exists():
        return None
    match = re.search(r"^version\s*=\s*(\d+\.\d+)", config.read_text(), re.MULTILINE)
    version = match.group(1) if match else ""
    return version if version and is_supported(int(part) for part in version.split(".")) else None
