"""scripts/install.sh: what it refuses before it writes anything, and what it installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import set_up

from rose_backend.vllm_plugin.registration import SUPPORTED_VERSIONS
from tests.support.patience import HANG_S

from set_up_python import NEWEST_PYTHON, OLDEST_PYTHON, dotted

ROOT = Path(set_up.__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "install.sh"

# Both write down how they are called. uv makes environments whose python and rose do the same.
UV = """#!/bin/bash
echo "uv $*" >> "$CALLS"
[ "$1" = venv ] || exit 0
folder=${!#}
mkdir -p "$folder/bin"
touch "$folder/pyvenv.cfg"
cp "$STAND_IN" "$folder/bin/python"
cp "$STAND_IN" "$folder/bin/rose"
"""
STAND_IN = """#!/bin/bash
[ "$1" != -c ] || set -- -c ... "${@:3}"
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in *torch==*+cpu*) exit "${NO_CPU_TORCH:-0}" ;; esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with stand-ins in ``bin``, a checkout, and an empty ``venv``, for which no disk is checked."""
    for name, text in {"uv": UV, "stand-in": STAND_IN}.items():
        write_program(tmp_path / "bin" / name, text)
    checkout = tmp_path / "checkout"
    (checkout / "dist").mkdir(parents=True)
    (checkout / "dist" / "rose_backend-1-py3-none-any.whl").touch()
    for name in ("scripts", "requirements", "rose_backend"):
        (checkout / name).symlink_to(ROOT / name)
    (tmp_path / "venv").mkdir()
    return tmp_path


def write_program(path: Path, text: str) -> None:
    """Write a script that can be run."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def install(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script in ``place`` with stand-ins first on PATH."""
    variables = {
        "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(place / "calls"),
        "STAND_IN": str(place / "bin" / "stand-in"),
        "PYTHON": sys.executable,
        "ROSE_DEVICE": "cuda",
    }
    return subprocess.run(
        [str(place / "checkout" / "scripts" / "install.sh"), *arguments],
        cwd=place,
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def calls(place: Path) -> list[str]:
    """Return the calls that were written down, with ``place`` left out of paths."""
    return (place / "calls").read_text().replace(f"{place}/", "").splitlines()


def test_bash_can_read_it() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert subprocess.run(["bash", "-n", str(SCRIPT)], timeout=HANG_S).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--gpu"], {}, "--gpu: unknown option; --help lists them"),
        (["one", "two"], {}, "FOLDER: got one and two, one is needed"),
        (["--vllm"], {}, "--vllm: a release is needed, such as"),
        (["--vllm", "0.31.0"], {}, f"--vllm: got 0.31.0, allowed are releases {SUPPORTED_VERSIONS}, such as"),
        (["--vllm=0.99.0"], {}, f"--vllm: got 0.99.0, allowed are releases {SUPPORTED_VERSIONS}, such as"),
        (["--vllm", "0.32"], {}, "--vllm: got 0.32, allowed are releases"),
        (["--vllm", "0.33.0"], {"ROSE_DEVICE": "cpu"}, "--vllm: got 0.33.0, allowed is 0.32.0 on a CPU"),
        ([], {"ROSE_DEVICE": "gpu"}, "ROSE_DEVICE: got 'gpu', allowed are cpu and cuda"),
        ([], {"PYTHON": "/nowhere/python3"}, "PYTHON: got /nowhere/python3; needed is Python"),
        (["checkout"], {}, "FOLDER: checkout exists and is no virtual environment"),
        (["calls"], {}, "FOLDER: calls exists and is no virtual environment"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(
    place: Path, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    (place / "calls").touch()
    finished = install(place, *(arguments or ["venv"]), **environment)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith(f"install.sh: error: {message}")
    assert len(finished.stderr.splitlines()) == 1
    assert calls(place) == [] and not any((place / "venv").iterdir()) and not (place / "vllm-rose").exists()


def test_other_machines_are_refused(place: Path) -> None:
    write_program(place / "bin" / "uname", "#!/bin/sh\necho Darwin\n")
    finished = install(place, "venv")
    assert finished.returncode == 2
    assert finished.stderr == "install.sh: error: got Darwin Darwin, Rose is for Linux x86_64\n"


def test_a_disk_that_is_too_small_is_refused(place: Path) -> None:
    write_program(place / "bin" / "python3.11", f'#!/bin/sh\nPYTHONPATH={place} exec {sys.executable} "$@"\n')
    (place / "sitecustomize.py").write_text(
        "import shutil\nshutil.disk_usage = lambda _: shutil._ntuple_diskusage(0, 0, 0)\n"
    )
    finished = install(place, "new", PYTHON="python3.11")
    assert finished.returncode == 2
    assert (
        finished.stderr
        == f"install.sh: error: FOLDER: {place} has 0.0 GiB free, vLLM for cuda needs 20 GiB\n"
    )


def test_the_help_names_every_option() -> None:
    finished = subprocess.run(
        [str(SCRIPT), "--help"], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert "--vllm VERSION" in finished.stdout and "ROSE_DEVICE=cpu|cuda" in finished.stdout
    oldest, newest = map(dotted, (OLDEST_PYTHON, NEWEST_PYTHON))
    assert f"Python {oldest} to {newest}" in SCRIPT.read_text()


def pin(name: str, file: str) -> str:
    """Return the release that a requirement file pins."""
    (line,) = re.findall(rf"^{name}==(\S+)$", (ROOT / "requirements" / file).read_text(), re.MULTILINE)
    return str(line)


@pytest.mark.parametrize(
    ("arguments", "release"), [([], pin("vllm", "cuda.txt")), (["--vllm", "0.33.0"], "0.33.0")]
)
def test_vllm_and_rose_are_installed_and_checked(place: Path, arguments: list[str], release: str) -> None:
    finished = install(place, *arguments, "venv")
    assert finished.returncode == 0, finished.stderr
    made, *others = calls(place)
    assert made == f"uv venv -q --python {sys.executable} venv"
    pip = "uv pip install --python venv/bin/python"
    wheel = "checkout/dist/rose_backend-1-py3-none-any.whl"
    assert others == [
        f"{pip} vllm=={release}",
        f"{pip} -q setuptools=={pin('setuptools', 'cpu.txt')}",
        "python checkout/scripts/make_wheel.py",
        f"{pip} -q {wheel}[serve]",
        f"{pip} -q --no-deps --force-reinstall {wheel}",
        "python checkout/scripts/set_up_check.py cuda",
        "rose env",
    ]
    assert f"{place}/venv/bin/vllm serve MODEL --attention-backend rose" in finished.stdout

    # Once more: the environment is there.
    again = install(place, *arguments, "venv")
    assert again.returncode == 0, again.stderr
    assert calls(place) == [made, *others, *others]


@pytest.mark.parametrize("has_cpu_build", [True, False])
def test_on_a_cpu_the_pinned_set_is_installed_without_dependencies(place: Path, has_cpu_build: bool) -> None:
    (place / "bin" / "uv").unlink()
    shutil.rmtree(place / "venv")
    (place / "venv").mkdir()
    write_program(place / "venv" / "bin" / "python", STAND_IN)
    write_program(place / "venv" / "bin" / "rose", STAND_IN)
    (place / "venv" / "pyvenv.cfg").touch()
    without_uv = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "uv").exists()
    )
    finished = install(
        place, "venv", ROSE_DEVICE="cpu", PATH=without_uv, NO_CPU_TORCH="0" if has_cpu_build else "1"
    )
    assert finished.returncode == 0, finished.stderr
    pip = "python -m pip install --disable-pip-version-check"
    torch = [f"{pip} -q --no-deps {set_up.TORCH}+cpu"] + ([] if has_cpu_build else [f"{pip} {set_up.TORCH}"])
    assert calls(place)[: len(torch) + 2] == [
        *torch,
        f"{pip} -q --no-deps -r checkout/requirements/cpu.txt",
        "python -c ... checkout/scripts",
    ]
    assert calls(place)[-2:] == ["python checkout/scripts/set_up_check.py cpu", "rose env"]


def test_a_step_that_fails_ends_it(place: Path) -> None:
    write_program(place / "bin" / "stand-in", STAND_IN + 'case "$*" in *make_wheel*) exit 1 ;; esac\n')
    finished = install(place, "venv")
    assert finished.returncode == 1 and "serve MODEL" not in finished.stdout
    assert calls(place)[-1] == "python checkout/scripts/make_wheel.py"
