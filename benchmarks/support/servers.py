"""Servers of the engines that are compared, as users start them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.support.engines import EngineOptions, rose_options, sglang_options, vllm_options
from benchmarks.support.pause import resume
from benchmarks.support.worker import WAKING_PROMPT
from benchmarks.support.worker_pool import ROOT, worker_environment

MAX_START_S = 300.0
MAX_STOP_S = 20.0
MAX_WAKE_S = 60.0
HOST_ONLY_SERVER = "benchmarks.support.host_only_server"
"""``vllm serve`` with a device that takes ``EngineOptions.step_ms`` for any step."""
STEP_MS = "ROSE_BENCHMARK_STEP_MS"
"""Variable of the environment that tells it how long."""
_PORTS = range(20_000, 30_000)
_NOT_FOUND = 44


class ServerError(Exception):
    """A server did not start; the message has the end of what it printed."""


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as a command line has them: ``max_num_seqs=8`` is --max-num-seqs 8, False is --no-..."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def server_command(backend: str, options: EngineOptions, port: int) -> list[str]:
    """Return the command that serves ``options.model`` on ``port``."""
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if backend == "sglang":
        return [sys.executable, "-m", "sglang.launch_server", *where, *as_flags(sglang_options(options))]
    if backend == "rose":
        fields = rose_options(options)
        command = ["-m", "rose_backend.cli", "serve", fields.pop("model"), "--no-log-requests"]
    else:
        attention = (
            "rose" if backend == "rose-in-vllm" else "FLASH_ATTN" if options.device == "cuda" else None
        )
        fields = {**vllm_options(options, attention), "disable_uvicorn_access_log": True}
        if backend == "rose-in-vllm":
            # Metrics that are rounded would make prompts look longer than what was computed of them.
            switches = fields.get("additional_config", {}).get("rose", {})
            fields["additional_config"] = {"rose": {**switches, "exact_cached_tokens": True}}
        module = "vllm.entrypoints.cli.main" if options.step_ms is None else HOST_ONLY_SERVER
        command = ["-m", module, "serve", fields.pop("model")]
    return [sys.executable, *command, *where, *as_flags(fields)]


def missing_module(backend: str, python_path: str | None, environment: Mapping[str, str]) -> str | None:
    """Return why ``backend`` is not installed for a process with these settings; None where it is."""
    module = {"sglang": "sglang", "rose": "rose_backend"}.get(backend, "vllm")
    look = (
        f"import importlib.util, sys; sys.exit({_NOT_FOUND} * (importlib.util.find_spec({module!r}) is None))"
    )
    found = subprocess.run(
        [sys.executable, "-c", look], cwd=ROOT, env=worker_environment(backend, python_path, environment)
    )
    # Anything else that goes wrong is for the server itself to tell.
    return f"no module named {module}" if found.returncode == _NOT_FOUND else None


def free_port() -> int:
    """Return a port that nobody listens on, low enough that a server may take the one 10,000 above it as well."""
    # Not from the seeded generator: two processes with one seed would take the same port.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"no port is free between {_PORTS.start} and {_PORTS.stop - 1}")


class Server:
    """One server in a process group of its own. What it prints is in ``log``."""

    def __init__(
        self,
        backend: str,
        options: EngineOptions,
        *,
        python_path: str | None,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.backend, self.model = backend, options.model
        self._log = log
        self.command = server_command(backend, options, port)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=worker_environment(backend, python_path, {**environment, **_step_time(options)}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Number of the process that was started; it has children."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return once /health answers.

        Raises:
            ServerError: the process ended, or the time is up.
        """
        deadline = time.monotonic() + MAX_START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5.0).close()
                return
            time.sleep(0.2)
        lines = self._log.read_text(errors="replace").splitlines()[-12:]
        raise ServerError("did not become ready" + "".join(f"\n    {line}" for line in lines))

    def version(self) -> str:
        """Return what the running server calls its version, or why it does not say."""
        path = "server_info" if self.backend == "sglang" else "version"
        try:
            with urllib.request.urlopen(f"{self.url}/{path}", timeout=30.0) as answer:
                return str(json.load(answer)["version"])
        except (OSError, KeyError, ValueError) as error:
            return f"not told ({type(error).__name__}: {error})"

    def wake(self) -> None:
        """Return when the server has made a token: unlike /health, that asks all of its processes."""
        fields = {"model": self.model, "prompt": WAKING_PROMPT, "max_tokens": 1, "temperature": 0.0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
        )
        # One that does not answer fails the requests of its turn, too: those are counted, and say why.
        failures = contextlib.suppress(OSError, http.client.HTTPException)
        with failures, urllib.request.urlopen(request, timeout=MAX_WAKE_S) as answer:
            answer.read()

    def terminate(self) -> None:
        """Ask it to end, paused or not; ``stop`` waits."""
        resume(self.pid)
        self._process.terminate()

    def stop(self) -> None:
        """Ask it to end; then end it and all its children."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(MAX_STOP_S)
        self.kill()

    def kill(self) -> None:
        """End it and all its children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def stop_all(servers: Iterable[Server]) -> None:
    """End servers, all at the same time.

    An interrupt, a second one or a late one, ends the waiting and nothing else: what was measured is still to be
    reported.
    """
    servers = list(servers)
    try:
        for server in servers:
            server.terminate()
        for server in servers:
            server.stop()
    except KeyboardInterrupt:
        for server in servers:
            server.kill()


def _step_time(options: EngineOptions) -> dict[str, str]:
    return {} if options.step_ms is None else {STEP_MS: str(options.step_ms)}


class Servers:
    """Servers by name, live side by side. Those that do not start are left out and named.

    Attributes:
        running: what has started.
        versions: name -> what each calls its version.
        missing: name -> why it is not installed.
        failed: name -> why it did not start.
    """

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self.running: dict[str, Server] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.missing: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def add(
        self,
        backend: str,
        options: EngineOptions,
        *,
        python_path: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a server, if it is installed; ``wait_until_ready`` waits for all of them."""
        missing = missing_module(backend, python_path, environment or {})
        if missing is not None:
            self.missing[backend] = missing
            return
        log = self._logs / f"server_{backend}.log"
        self.running[backend] = Server(
            backend, options, python_path=python_path, environment=environment or {}, log=log
        )

    def wait_until_ready(self) -> None:
        """Fill ``versions`` and ``failed``."""
        for name, server in list(self.running.items()):
            try:
                server.wait_until_ready()
                self.versions[name] = {"version": server.version()}
            except ServerError as error:
                self.failed[name] = str(error)
                self.running.pop(name).stop()

    def stop(self) -> None:
        """End all of them, at the same time; an interrupt ends the waiting only."""
        stop_all(self.running.values())
