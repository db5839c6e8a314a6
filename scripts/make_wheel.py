#!/usr/bin/env python3
"""Build the wheel of the last commit into dist/: the same bytes wherever and whenever it is built.

Only what is committed goes in, with the commit's time and the file modes of umask 022, built by the setuptools that
``requirements/cpu.txt`` pins. Needs git and, beside that setuptools, only Python's standard library.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rose_backend")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


class WheelError(Exception):
    """No wheel was built; the text says why, and what to do."""


def git(*arguments: str) -> bytes:
    """Return what a git command in the checkout prints.

    Raises:
        WheelError: it failed, or there is no git; carries its last line.
    """
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise WheelError("git is not installed; it says what the last commit is") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise WheelError(f"git {arguments[0]} failed in {ROOT}: {lines[-1]}") from None


def check_setuptools() -> None:
    """Raise WheelError unless this Python has the pinned setuptools: another one writes other bytes."""
    pin = re.search(r"^setuptools==(\S+)$", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)
    assert pin is not None
    try:
        found = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != pin[1]:
        raise WheelError(
            f"setuptools: got {found} in {sys.executable}, needed is {pin[1]}; "
            f"{sys.executable} -m pip install setuptools=={pin[1]} installs it"
        )


def check_committed() -> None:
    """Raise WheelError where a file of the wheel differs from the last commit."""
    changed = git("status", "--porcelain", "--", *SOURCES).decode().splitlines()
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise WheelError(
            f"{changed[0][3:]}{more}: not as in the last commit, which is what is built; commit or stash it, "
            "or build what is here with pip wheel --no-deps -w dist ."
        )


def build(dist: Path) -> Path:
    """Build the wheel of the last commit in place of any other wheel of Rose in ``dist``, and return it.

    Raises:
        WheelError: git, setuptools or the checkout do not allow it, or the build failed.
    """
    check_setuptools()
    check_committed()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").decode().strip()}
    with tempfile.TemporaryDirectory() as name:
        tree, out = Path(name, "tree"), Path(name, "out")
        out.mkdir()
        with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", "HEAD", "--", *SOURCES))) as tar:
            tar.extractall(tree, filter="data")
        # -I: nothing from PYTHONPATH or the user's own site-packages.
        command = [sys.executable, "-I", "-c", BUILD, str(out)]
        finished = subprocess.run(
            command, cwd=tree, env=environment, umask=0o022, capture_output=True, text=True
        )
        if finished.returncode != 0:
            raise WheelError(f"setuptools failed:\n{finished.stderr.strip()}")
        built = next(out.glob("*.whl"))
        dist.mkdir(exist_ok=True)
        for old in dist.glob("rose_backend-*.whl"):
            old.unlink()
        return Path(shutil.move(built, dist / built.name))


def main() -> int:
    """Build the wheel, and print its path and digest; return the exit status."""
    try:
        wheel = build(ROOT / "dist")
    except WheelError as error:
        print(f"make_wheel: error: {error}", file=sys.stderr)
        return 1
    print(f"{wheel.relative_to(ROOT)}  sha256 {hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
