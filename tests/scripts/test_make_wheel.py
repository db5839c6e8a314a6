"""scripts/make_wheel.py: the same bytes from one commit, only what is committed, and what it refuses."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import make_wheel
import pytest

from tests.support.patience import HANG_S

ROOT = Path(make_wheel.__file__).resolve().parent.parent
COPIED = (*make_wheel.SOURCES, "scripts/make_wheel.py", "requirements/cpu.txt", ".gitignore")
AUTHOR = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.com")


def run(
    command: list[str], folder: Path, umask: int = 0o022, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with its output as text; the caller looks at its status."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        umask=umask,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def commit(folder: Path) -> None:
    """Commit all that is in a folder's repository."""
    for command in (["git", "add", "-A"], ["git", *AUTHOR, "commit", "-qm", "A commit"]):
        finished = run(command, folder)
        assert finished.returncode == 0, finished.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository with one commit: what a wheel is made of."""
    folder = tmp_path / "checkout"
    for name in COPIED:
        source, copy = ROOT / name, folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    assert run(["git", "init", "-q"], folder).returncode == 0
    commit(folder)
    return folder


def make(folder: Path, umask: int = 0o022, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script of a checkout."""
    return run([sys.executable, "scripts/make_wheel.py"], folder, umask, **environment)


def test_two_builds_of_one_commit_are_the_same_bytes(tmp_path: Path, checkout: Path) -> None:
    first = make(checkout, TZ="UTC", PYTHONHASHSEED="1")
    assert first.returncode == 0, first.stderr
    (wheel,) = (checkout / "dist").iterdir()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert first.stdout == f"dist/{wheel.name}  sha256 {digest}\n"

    # Another place, mask, time zone and time of the files, and what earlier builds and tools left behind.
    other = tmp_path / "another place" / "of other length"
    assert run(["git", "clone", "-q", str(checkout), str(other)], tmp_path, 0o077).returncode == 0
    for path in other.rglob("*"):
        if ".git" not in path.parts:
            os.utime(path, (time.time() - 10**8,) * 2)
    for name in ("build/lib/rose_backend/stale.py", "rose_backend/__pycache__/stale.pyc"):
        stale = other / name
        stale.parent.mkdir(parents=True)
        stale.write_text("")
    second = make(other, 0o077, TZ="Asia/Tokyo", PYTHONHASHSEED="2", SOURCE_DATE_EPOCH="1")
    assert (second.returncode, second.stdout) == (0, first.stdout), second.stderr

    with zipfile.ZipFile(wheel) as files:
        modes = {
            info.external_attr >> 16 & 0o777 for info in files.infolist() if "RECORD" not in info.filename
        }
        assert modes <= {0o644, 0o755}
        assert [name for name in files.namelist() if "stale" in name] == []


def test_the_wheel_takes_the_place_of_earlier_ones(checkout: Path) -> None:
    (checkout / "dist").mkdir()
    for name in ("rose_backend-0.0.1-py3-none-any.whl", "other-1-py3-none-any.whl"):
        (checkout / "dist" / name).write_text("")
    finished = make(checkout)
    assert finished.returncode == 0, finished.stderr
    names = sorted(path.name for path in (checkout / "dist").iterdir())
    assert names == ["other-1-py3-none-any.whl", finished.stdout.split()[0].removeprefix("dist/")]


@pytest.mark.parametrize("name", ["rose_backend/errors.py", "rose_backend/new.py", "README.md"])
def test_what_is_not_committed_is_refused(checkout: Path, name: str) -> None:
    with (checkout / name).open("a") as file:
        file.write("\n")
    finished = make(checkout)
    assert finished.returncode == 1
    assert finished.stderr.startswith(f"make_wheel: error: {name}: not as in the last commit")
    assert not (checkout / "dist").exists()


def test_another_setuptools_is_refused(checkout: Path) -> None:
    pins = checkout / "requirements" / "cpu.txt"
    pins.write_text("setuptools==77.0.1\n")
    finished = make(checkout)
    assert finished.returncode == 1
    assert finished.stderr.startswith("make_wheel: error: setuptools: got ")
    assert "needed is 77.0.1" in finished.stderr and len(finished.stderr.splitlines()) == 1


def test_a_folder_that_is_no_checkout_is_refused(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    finished = make(checkout, GIT_CEILING_DIRECTORIES=str(checkout.parent))
    assert finished.returncode == 1
    assert finished.stderr.startswith("make_wheel: error: git status failed in ")


def test_a_build_that_fails_says_why(checkout: Path) -> None:
    project = checkout / "pyproject.toml"
    project.write_text(project.read_text() + "\n[project.nonsense]\n")
    commit(checkout)
    finished = make(checkout)
    assert finished.returncode == 1
    assert finished.stderr.startswith("make_wheel: error: setuptools failed:\n")
    assert not (checkout / "dist").exists()
