"""Run ``vllm serve MODEL --attention-backend rose``, say when it is ready, and end it without leaving a process behind.

Called by ``make serve`` with the virtual environment's Python. Arguments that are not known here go to vLLM unchanged.
The server listens on 127.0.0.1 alone unless ``--host`` says otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

DEFAULT_HOST = "127.0.0.1"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
POLL_SECONDS = 0.25
# Until the server answers, a line this often says that it is still starting.
SECONDS_BETWEEN_LINES = 15.0
# After Ctrl-C the server gets this long; then the whole process group is told to end, then killed.
SECONDS_BEFORE_TERMINATE = 15.0
SECONDS_BEFORE_KILL = 25.0
# Once the server itself has ended, its helpers get this long before they are killed.
SECONDS_FOR_HELPERS = 5.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServeError(Exception):
    """The server cannot be started as asked; the text says why and what to do."""


def option_value(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of ``--name value`` or ``--name=value`` in a list of arguments, None where it is absent."""
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def check_model(model: str) -> None:
    """Raise ServeError where ``model`` is neither a model directory nor could be a Hugging Face id."""
    path = Path(model)
    if model and path.is_dir():
        if not (path / "config.json").is_file():
            raise ServeError(f"MODEL: {model!r} is a directory without config.json, so it holds no model.")
        return
    if model and (path.exists() or "://" in model):
        return
    looks_local = "/" in model and path.parent.is_dir()
    if looks_local or not HUB_ID.fullmatch(model):
        raise ServeError(
            f"MODEL: {model!r} does not exist and is no Hugging Face id. Give a directory or an id such as gpt2 or "
            "owner/name."
        )


def check_installation(vllm_script: Path) -> None:
    """Raise ServeError where vLLM's own command is not installed beside this Python."""
    if not vllm_script.is_file():
        raise ServeError(
            f"{vllm_script} is missing. Run make set-up, then this script with .venv/bin/python."
        )


def check_port(host: str, port: int) -> None:
    """Raise ServeError where ``port`` is no port or cannot be bound on ``host`` (an empty one: all addresses)."""
    if not 1 <= port <= 65535:
        raise ServeError(f"PORT: got {port}, allowed is a number from 1 to 65535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServeError(
                f"PORT: {port} cannot be used ({error.strerror}). Choose another: PORT={port + 1} make serve"
            ) from error


def server_arguments(
    model: str, port: int, extra: Sequence[str], *, is_cpu: bool, has_compiler: bool
) -> list[str]:
    """Return the arguments of ``vllm``: the defaults of ``make serve``, then the user's own in ``extra``."""
    arguments = ["serve", model, "--port", str(port)]
    if option_value(extra, "--host") is None:
        # vLLM's own default is all addresses.
        arguments += ["--host", DEFAULT_HOST]
    if option_value(extra, "--attention-backend") is None:
        arguments += ["--attention-backend", "rose"]
    if "--no-enable-prompt-tokens-details" not in extra:
        arguments.append("--enable-prompt-tokens-details")
    if is_cpu and not has_compiler and "--enforce-eager" not in extra:
        print("NOTICE: no C++ compiler (g++) on PATH, so vLLM runs without torch.compile (--enforce-eager).")
        arguments.append("--enforce-eager")
    return [*arguments, *extra]


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: defaults of ``make serve`` under whatever the user chose.

    A small KV cache on a CPU, and no process of the server imports from the current directory.
    """
    # vLLM's default is a large share of the machine's memory. Unit: GiB.
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONSAFEPATH": "1", **environment}


def curl_line(model_name: str, host: str, port: int) -> str:
    """Return a command to try, on one line."""
    body = {"model": model_name, "prompt": "It was a bright morning and", "max_tokens": 48, "temperature": 0}
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1/completions"
    return f"curl -s {url} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def is_healthy(host: str, port: int) -> bool:
    """Whether GET /health answers 200."""
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def linux_prctl(option: int, value: int) -> None:
    """Call prctl(2) on Linux; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of processes that the server leaves behind, so that none escapes the final sweep."""
    set_child_subreaper = 36
    linux_prctl(set_child_subreaper, 1)


def end_with_parent() -> None:
    """Let the server be terminated should this process be killed in a way that it cannot handle."""
    set_parent_death_signal = 1
    linux_prctl(set_parent_death_signal, signal.SIGTERM)


def reap_children() -> bool:
    """Collect every child that has ended, adopted ones too; return whether some still run."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True


def kill_children() -> None:
    """Kill the direct children of this process, adopted ones too, where the system lists them."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    for process_id in listing.read_text().split() if listing.is_file() else []:
        os.kill(int(process_id), signal.SIGKILL)


class Server:
    """The server process, in a process group of its own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.stop_requests: list[int] = []
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_requests.append(number)

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or None where the server still runs after ``seconds``."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> int:
        """End the server: politely, then firmly, then by force. A second Ctrl-C skips a stage. Return its status."""
        stages = [
            (signal.SIGINT, SECONDS_BEFORE_TERMINATE, self._process.send_signal),
            (signal.SIGTERM, SECONDS_BEFORE_KILL - SECONDS_BEFORE_TERMINATE, self._signal_group),
        ]
        for number, patience, send in stages:
            send(number)
            asked = len(self.stop_requests)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and len(self.stop_requests) == asked:
                status = self.wait(POLL_SECONDS)
                if status is not None:
                    return status
        self._signal_group(signal.SIGKILL)
        return self._process.wait()

    def sweep(self) -> None:
        """Wait until everything that the ended server started is gone too; kill what takes too long."""
        started = time.monotonic()
        while reap_children() and time.monotonic() - started < 2 * SECONDS_FOR_HELPERS:
            if time.monotonic() - started > SECONDS_FOR_HELPERS:
                self._signal_group(signal.SIGKILL)
                kill_children()
            time.sleep(POLL_SECONDS / 5)

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass


def supervise(server: Server, host: str, port: int, model_name: str) -> int:
    """Show the curl line once the server is healthy, wait until it ends, and return the exit status.

    0: stopped by a signal and ended in order. Otherwise the server's own status, never 0.
    """
    started = line_due = time.monotonic()
    is_ready = False
    while not server.stop_requests:
        status = server.wait(POLL_SECONDS)
        if status is not None:
            when = "after it was ready" if is_ready else "before it was ready"
            print(
                f"\nThe server ended by itself {when} (status {status}); the log above says why.",
                file=sys.stderr,
            )
            return status if status > 0 else 128 - status if status < 0 else 1
        if is_ready:
            continue
        seconds = time.monotonic() - started
        if is_healthy(host, port):
            is_ready = True
            print(
                f"\nReady after {seconds:.0f} s; Ctrl-C ends it. Try:\n\n{curl_line(model_name, host, port)}\n",
                flush=True,
            )
        elif time.monotonic() - line_due >= SECONDS_BETWEEN_LINES:
            line_due = time.monotonic()
            print(f"vLLM is still starting, {seconds:.0f} s so far", flush=True)
    print("\nStopping the server ...", flush=True)
    status = server.stop()
    return (
        0 if status in (0, -signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM) else 1
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the request, run the server, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="directory or Hugging Face id")
    parser.add_argument("--port", type=int, default=8000)
    options, extra = parser.parse_known_args(arguments)
    host = option_value(extra, "--host")
    host = DEFAULT_HOST if host is None else host
    vllm_script = Path(sys.executable).parent / "vllm"
    try:
        check_installation(vllm_script)
        check_model(options.model)
        check_port(host, options.port)
    except ServeError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 2
    has_compiler = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++"))
    is_cpu = "cpu" in importlib.metadata.version("vllm")
    server_args = server_arguments(
        options.model, options.port, extra, is_cpu=is_cpu, has_compiler=has_compiler
    )
    print(f"$ {shlex.join(['vllm', *server_args])}", flush=True)
    print(
        "Starting vLLM: it imports its modules, loads the model and warms up. Its log begins after the imports; with "
        "two cores it answers after one to two minutes.",
        flush=True,
    )
    adopt_orphans()
    server = Server([str(vllm_script), *server_args], server_environment(os.environ))
    local_host = "localhost" if host in ("", "0.0.0.0", "::") else host
    try:
        return supervise(
            server, local_host, options.port, option_value(extra, "--served-model-name") or options.model
        )
    finally:
        server.sweep()


if __name__ == "__main__":
    sys.exit(main())
