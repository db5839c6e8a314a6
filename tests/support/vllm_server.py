"""A real vLLM server as a child process, for tests that talk HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from benchmarks.online.servers import free_port
from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    # A tiny model is no faster with more; two servers that are bound to the same cores are ten times slower.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Small memory, no compiler, no network."""


class ServerStartError(RuntimeError):
    """The server did not become ready; the message ends with the tail of its log."""


class VllmServer:
    """One running server.

    Attributes:
        url: root of its HTTP interface.
        log_path: everything it and its children print.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self.client = httpx.Client(base_url=self.url, timeout=HANG_S)

    @property
    def log(self) -> str:
        """What was printed so far."""
        return self.log_path.read_text(errors="replace")

    def post(self, path: str, **body: object) -> httpx.Response:
        """Send a JSON body."""
        return self.client.post(path, json=body)

    def wait_until_ready(self, timeout_s: float = HANG_S) -> None:
        """Return once ``/health`` answers.

        Raises:
            ServerStartError: the process ended or the time is up.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerStartError(f"ended with {self.process.returncode}\n{self.log[-12000:]}")
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            time.sleep(0.25)
        raise ServerStartError(f"not ready after {timeout_s} s\n{self.log[-4000:]}")

    def stop(self) -> list[psutil.Process]:
        """Send what Ctrl-C sends; return the processes of the server that are left afterwards, after killing them."""
        self.client.close()
        family = family_of(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(HANG_S)
        left = kill_what_is_left(family)
        self.process.wait(HANG_S)
        return left


def family_of(pid: int) -> list[psutil.Process]:
    """Return a process and all that descend from it."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def group_of(group: int) -> list[psutil.Process]:
    """Return the processes of a process group, which stay in it when their parents end."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def kill_what_is_left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait a moment for processes to end by themselves, kill the others and return them."""
    _, left = psutil.wait_procs(processes, timeout=HANG_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return left


def start_server(
    model: str | Path, log_path: Path, *arguments: str, environment: dict[str, str] | None = None
) -> VllmServer:
    """Start ``vllm serve MODEL ARGUMENTS`` on a free port without waiting for it."""
    port = free_port()
    command = [*serve_command(), str(model), "--port", str(port), *arguments]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **CPU_ENVIRONMENT, **(environment or {})},
            # A group of its own, so that a Ctrl-C meant for the test run does not reach it twice.
            start_new_session=True,
        )
    return VllmServer(process, port, log_path)


@contextlib.contextmanager
def running_server(
    model: str | Path, log_path: Path, *arguments: str, environment: dict[str, str] | None = None
) -> Iterator[VllmServer]:
    """Start a server, wait until it is ready, and stop it; a process that is left over fails the test."""
    server = start_server(model, log_path, *arguments, environment=environment)
    try:
        server.wait_until_ready()
        yield server
    finally:
        left = server.stop()
    assert not left, f"still running after Ctrl-C: {left}"


def run_until_exits(commands: Mapping[str, Sequence[str]], folder: Path) -> dict[str, tuple[int, str]]:
    """Run servers that are expected to refuse their options; a process that is left over fails the test.

    Args:
        commands: name -> model and arguments of ``vllm serve``.
        folder: for their output.

    Returns:
        Name -> exit status and everything that it and its children printed.
    """
    logs = {str(folder / f"{name}.log"): list(command) for name, command in commands.items()}
    launcher = subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked_serves", json.dumps(logs)],
        cwd=ROOT,
        env={**os.environ, **CPU_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = launcher.communicate(timeout=HANG_S)
    finally:
        left = kill_what_is_left(group_of(launcher.pid))
        launcher.wait(HANG_S)
    assert launcher.returncode == 0 and not left, f"status {launcher.returncode}, still running: {left}"
    statuses = json.loads(printed)
    return {
        name: (status, Path(log).read_text(errors="replace"))
        for name, (log, status) in zip(commands, statuses.items(), strict=True)
    }


def serve_command() -> Sequence[str]:
    """Return the command line of ``vllm serve``, by this interpreter."""
    return sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"
