"""Servers of the engines that are compared, as users start them, and one client for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.support.engines import EngineOptions, rose_options, sglang_options, vllm_options
from benchmarks.support.streaming import Timeline
from benchmarks.support.worker_pool import ROOT, worker_environment

MAX_START_S = 300.0
MAX_STOP_S = 20.0


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
        fields = vllm_options(options, attention)
        command = ["-m", "vllm.entrypoints.cli.main", "serve", fields.pop("model")]
    return [sys.executable, *command, *where, *as_flags(fields)]


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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.model = options.model
        self._log = log
        self.command = server_command(backend, options, port)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=worker_environment(backend, python_path, environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

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

    def stop(self) -> None:
        """Ask it to end; then end it and all its children."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(MAX_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Client:
    """Streams /v1/completions. A failure is noted in the request's timeline.

    Args:
        session: shared by all requests.
        url: of the server.
        model: as the server calls it.
        sampling: fields of the request, such as temperature.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, sampling: Mapping[str, Any]
    ) -> None:
        self._session, self._url = session, f"{url}/v1/completions"
        self._fields = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **sampling,
        }

    async def send(self, prompt: list[int], output_len: int, timeline: Timeline) -> None:
        """Send one request and note every piece that has a choice; tokens are what the server counts."""
        body = {**self._fields, "prompt": prompt, "max_tokens": output_len}
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    timeline.error = f"{response.status}: {(await response.text())[:300]}"
                    return
                await self._read(response, timeline)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            timeline.error = f"{type(error).__name__}: {error}"
            return
        if timeline.num_tokens != output_len:
            timeline.error = f"got {timeline.num_tokens} new tokens, {output_len} were asked for"

    async def _read(self, response: aiohttp.ClientResponse, timeline: Timeline) -> None:
        usage: dict[str, Any] | None = None
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"]))
            if event.get("choices"):
                timeline.saw(1)
            usage = event.get("usage") or usage
        # A piece may have several tokens.
        timeline.num_tokens = usage["completion_tokens"] if usage else timeline.num_tokens


def client_session() -> aiohttp.ClientSession:
    """Return a session without limits: the trace alone says how many requests there are at once."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=120)
    )
