"""Servers of the engines that are compared, as users start them, and what they count while they serve."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support.engines import (
    EngineOptions,
    as_flags,
    attention_backend_of,
    module_of,
    rose_options,
    sglang_options,
    vllm_options,
)
from benchmarks.support.turns import EngineError, paused
from benchmarks.support.worker import WAKING_PROMPT
from benchmarks.support.worker_pool import ROOT, EngineProcess, Engines

MAX_START_S = 300.0
MAX_WAKE_S = 60.0
HOST_ONLY_SERVER = "benchmarks.online.host_only_server"
"""``vllm serve`` with a device that takes ``EngineOptions.step_ms`` for any step."""
STEP_MS = "ROSE_BENCHMARK_STEP_MS"
"""Variable of the environment that tells it how long."""
_PORTS = range(20_000, 30_000)
_NOT_FOUND = 44


def server_command(backend: str, options: EngineOptions, port: int) -> list[str]:
    """Return the command that serves ``options.model`` on ``port``."""
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if backend == "sglang":
        return [sys.executable, "-m", "sglang.launch_server", *where, *as_flags(sglang_options(options))]
    if backend == "rose":
        fields = rose_options(options)
        command = ["-m", "rose_backend.cli", "serve", fields.pop("model"), "--no-log-requests"]
    else:
        attention = attention_backend_of(backend, options)
        fields = {**vllm_options(options, attention), "disable_uvicorn_access_log": True}
        if backend == "rose-in-vllm":
            # Metrics that are rounded would make prompts look longer than what was computed of them.
            switches = fields.get("additional_config", {}).get("rose", {})
            fields["additional_config"] = {"rose": {**switches, "exact_cached_tokens": True}}
        module = "vllm.entrypoints.cli.main" if options.step_ms is None else HOST_ONLY_SERVER
        command = ["-m", module, "serve", fields.pop("model")]
    return [sys.executable, *command, *where, *as_flags(fields)]


def missing_module(backend: str, variables: Mapping[str, str]) -> str | None:
    """Return why ``backend`` is not installed for a process with these variables; None where it is."""
    module = module_of(backend)
    is_missing = f"importlib.util.find_spec({module!r}) is None"
    look = f"import importlib.util, sys; sys.exit({_NOT_FOUND} * ({is_missing}))"
    found = subprocess.run([sys.executable, "-c", look], cwd=ROOT, env=variables)
    # Anything else that goes wrong is for the server itself to tell.
    return f"no module named {module}" if found.returncode == _NOT_FOUND else None


def free_port() -> int:
    """Return a free port, low enough that a server may take the one 10,000 above it as well."""
    # Not from the seeded generator: two processes with one seed would take the same port.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise EngineError(f"no port is free between {_PORTS.start} and {_PORTS.stop - 1}")


class Server(EngineProcess):
    """One server that listens on a free port."""

    def __init__(self, backend: str, options: EngineOptions, variables: Mapping[str, str], log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.backend, self.model = backend, options.model
        self.command = server_command(backend, options, port)
        super().__init__(self.command, {**variables, **_step_time(options)}, log)

    def wait_until_ready(self) -> None:
        """Return once /health answers.

        Raises:
            EngineError: the process ended, or the time is up.
        """
        deadline = time.monotonic() + MAX_START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5.0).close()
                return
            time.sleep(0.2)
        raise EngineError(f"did not become ready{self.end_of_log()}")

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


def _step_time(options: EngineOptions) -> dict[str, str]:
    return {} if options.step_ms is None else {STEP_MS: str(options.step_ms)}


class Servers(Engines[Server]):
    """Servers. Their facts are the versions that they tell.

    Args:
        in_turn: start one after the other, the ones before stopped meanwhile.
    """

    def __init__(self, logs: Path, *, in_turn: bool = False) -> None:
        super().__init__(logs)
        self._in_turn = in_turn
        self._wanted: dict[str, tuple[str, EngineOptions, Mapping[str, str]]] = {}

    def add(self, name: str, backend: str, options: EngineOptions, variables: Mapping[str, str]) -> None:
        """Ask for a server; ``wait_until_started`` starts all of them."""
        missing = missing_module(backend, variables)
        if missing is not None:
            self.missing[name] = missing
            return
        self._wanted[name] = (backend, options, variables)

    def wait_until_started(self) -> dict[str, float]:
        """Fill ``running``, ``facts`` and ``failed``; return the seconds that each took until it was ready."""
        start_up_s: dict[str, float] = {}
        with ThreadPoolExecutor(1 if self._in_turn else max(len(self._wanted), 1)) as starters:
            found = dict(zip(self._wanted, starters.map(self._start, self._wanted), strict=True))
        for name, seconds in found.items():
            # In the order in which they were asked for.
            if seconds is not None:
                self.running[name] = self.running.pop(name)
                start_up_s[name] = seconds
                self.facts[name] = {"version": self.running[name].version()}
        return start_up_s

    def _start(self, name: str) -> float | None:
        with paused(server.pid for server in list(self.running.values()) if self._in_turn):
            begin = time.monotonic()
            try:
                server = self.running[name] = Server(*self._wanted[name], self.log_of(name))
                server.wait_until_ready()
            except EngineError as error:
                self.drop(name, error)
                return None
            return time.monotonic() - begin


COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""Our names and vLLM's."""


def server_counts(url: str) -> Counter[str]:
    """Return counts since start-up, of all engines of the server together.

    Raises:
        KeyError: the server has no such counter.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as response:
        return parse_counts(response.read().decode())


def parse_counts(text: str) -> Counter[str]:
    """Read a page of /metrics; see ``server_counts``."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += int(sample.value) if sample.name in COUNTERS.values() else 0
    missing = [name for name in COUNTERS.values() if name not in sums]
    if missing:
        raise KeyError(f"the server does not count {', '.join(missing)}")
    return Counter({ours: sums[theirs] for ours, theirs in COUNTERS.items()})


def processor_seconds(pid: int) -> dict[str, float]:
    """Return processor time of a process and all below it, by name; those of one name together."""
    root = psutil.Process(pid)
    seconds: dict[str, float] = defaultdict(float)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds[process.name()] += times.user + times.system
    return seconds
