"""Servers of the engines that are compared, as users start them, and what they count while they serve."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import sys
import urllib.request
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support.engines import (
    STEP_MS,
    EngineOptions,
    as_flags,
    rose_options,
    sglang_options,
    vllm_options,
)
from benchmarks.support.worker_pool import EngineError, EngineProcess
from benchmarks.support.workload import WAKING

MAX_WAKE_S = 60.0
HOST_ONLY_SERVER = "benchmarks.online.host_only_server"
"""``vllm serve`` with a device that takes the same time for any step, where the environment says how long."""
_PORTS = range(20_000, 30_000)


def server_command(options: EngineOptions, port: int) -> list[str]:
    """Return the command that serves ``options.model`` on ``port``."""
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if options.backend == "sglang":
        return [sys.executable, "-m", "sglang.launch_server", *where, *as_flags(sglang_options(options))]
    if options.backend == "rose":
        fields = rose_options(options)
        command = ["-m", "rose_backend.cli", "serve", fields.pop("model"), "--no-log-requests"]
    else:
        fields = {**vllm_options(options), "disable_uvicorn_access_log": True}
        if options.backend == "rose-in-vllm":
            # Metrics that are rounded would make prompts look longer than what was computed of them.
            switches = fields.get("additional_config", {}).get("rose", {})
            fields["additional_config"] = {"rose": {**switches, "exact_cached_tokens": True}}
        module = HOST_ONLY_SERVER if STEP_MS in options.variables else "vllm.entrypoints.cli.main"
        command = ["-m", module, "serve", fields.pop("model")]
    return [sys.executable, *command, *where, *as_flags(fields)]


def free_port() -> int:
    """Return a free port, low enough that a server may take the one 10,000 above it as well.

    Linux gives ports from 32,768 on to clients, so nobody else is given this one before the server binds it.
    """
    # Not from the seeded generator: two processes with one seed would take the same port.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise EngineError(f"no port is free between {_PORTS.start} and {_PORTS.stop - 1}")


class Server(EngineProcess):
    """One server that listens on a free port."""

    def __init__(self, options: EngineOptions, log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._version_path = "server_info" if options.backend == "sglang" else "version"
        super().__init__(server_command(options, port), options, log)

    def facts_if_ready(self) -> dict[str, Any] | None:
        """Return the version, once /health answers."""
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=1.0).close()
        except OSError:
            return None
        return {"version": self.version()}

    def version(self) -> str:
        """Return what the running server calls its version, or why it does not say."""
        try:
            with urllib.request.urlopen(f"{self.url}/{self._version_path}", timeout=30.0) as answer:
                return str(json.load(answer)["version"])
        except (OSError, KeyError, ValueError) as error:
            return f"not told ({type(error).__name__}: {error})"

    def wake(self) -> None:
        """Return when the server has made a token: unlike /health, that asks all of its processes."""
        fields = {"model": self.model, "prompt": WAKING.prompts[0], "max_tokens": 1, "temperature": 0.0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
        )
        # One that does not answer fails the requests of its turn, too: those are counted, and say why.
        failures = contextlib.suppress(OSError, http.client.HTTPException)
        with failures, urllib.request.urlopen(request, timeout=MAX_WAKE_S) as answer:
            answer.read()


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
