"""A real vLLM server as a child process, for tests that talk HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 40.0

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "OMP_NUM_THREADS": "2",
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
        self.client = httpx.Client(base_url=self.url, timeout=120.0)

    @property
    def log(self) -> str:
        """What was printed so far."""
        return self.log_path.read_text(errors="replace")

    def post(self, path: str, **body: object) -> httpx.Response:
        """Send a JSON body."""
        return self.client.post(path, json=body)

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return once ``/health`` answers.

        Raises:
            ServerStartError: the process ended or the time is up.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerStartError(f"ended with {self.process.returncode}\n{self.log[-4000:]}")
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health", timeout=5.0).status_code == 200:
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
                self.process.wait(STOP_TIMEOUT_S)
        _, left = psutil.wait_procs(family, timeout=5.0)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        return left


def family_of(pid: int) -> list[psutil.Process]:
    """Return a process and all that descend from it."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


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
def running_server(model: str | Path, log_path: Path, *arguments: str) -> Iterator[VllmServer]:
    """Start a server, wait until it is ready, and stop it; a process that is left over fails the test."""
    server = start_server(model, log_path, *arguments)
    try:
        server.wait_until_ready()
        yield server
    finally:
        left = server.stop()
    assert not left, f"still running after Ctrl-C: {left}"


def run_until_exit(model: str | Path, log_path: Path, *arguments: str) -> tuple[int, str]:
    """Start a server that is expected to refuse its options; return its exit status and its log."""
    server = start_server(model, log_path, *arguments)
    try:
        status = server.process.wait(START_TIMEOUT_S)
    finally:
        server.stop()
    return status, server.log


def serve_command() -> Sequence[str]:
    """Return the command line of ``vllm serve``, by this interpreter."""
    return sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
