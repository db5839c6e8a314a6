"""Engines in processes of their own, side by side: start them, ask them, end them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from benchmarks.support.engines import EngineOptions
from benchmarks.support.turns import EngineError, resume

ROOT = Path(__file__).resolve().parents[2]
# A first start compiles for a minute or two; a run of thousands of prompts on a CPU is no benchmark.
MAX_WAIT_S = 600.0
MAX_STOP_S = 20.0


def worker_environment(
    backend: str, python_path: str | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables of a process that runs ``backend``.

    Args:
        python_path: what to put on its PYTHONPATH instead of this process's; None keeps it.
        environment: variables to set, over this process's own.
    """
    variables = {**os.environ, **(environment or {})}
    if python_path is not None:
        variables["PYTHONPATH"] = os.pathsep.join((python_path, str(ROOT)))
    if backend == "vllm":
        # Stock: no plug-in is loaded, not even one that stays out of the way.
        variables["VLLM_PLUGINS"] = ""
    return variables


class EngineProcess:
    """One process that leads a session of its own. Everything that it prints is in ``log``.

    Args:
        has_pipes: stdin and stdout are pipes to this process, and only stderr is printed.
    """

    def __init__(
        self, command: list[str], variables: Mapping[str, str], log: Path, *, has_pipes: bool = False
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables,
                stdin=pipe if has_pipes else subprocess.DEVNULL,
                stdout=pipe if has_pipes else output,
                stderr=output,
                text=has_pipes,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Number of the process that was started; it may have children."""
        return self._process.pid

    def ask_to_end(self) -> None:
        """Continue it if it is paused, and ask it to end."""
        resume(self.pid)
        self._process.terminate()

    def wait_for_end(self) -> None:
        """Return when it has ended, or after ``MAX_STOP_S``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(MAX_STOP_S)

    def kill(self) -> None:
        """End it and all its children; children of an engine that ended without them are in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end, paused or not; then end it and all its children."""
        try:
            self.ask_to_end()
            self.wait_for_end()
        finally:
            self.kill()

    def end_of_log(self, num_lines: int = 12) -> str:
        """Return the last lines that it printed, to stand behind a message."""
        lines = self.log.read_text(errors="replace").splitlines()[-num_lines:]
        return "".join(f"\n    {line}" for line in lines)


ProcessT = TypeVar("ProcessT", bound=EngineProcess)


class Engines(Generic[ProcessT]):
    """Engines by name, live side by side. Those that do not start are left out and named.

    Attributes:
        running: what has started.
        facts: what each engine said about itself.
        missing: name -> why it is not installed.
        failed: name -> what went wrong, at the start or later.

    Args:
        logs: folder for what engines print.
    """

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self.running: dict[str, ProcessT] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def log_of(self, name: str) -> Path:
        """Return the file for what an engine prints."""
        return self._logs / f"{name.replace(', ', '_').replace(' ', '_')}.log"

    def drop(self, name: str, error: EngineError) -> None:
        """Go on without an engine that failed."""
        self.failed[name] = str(error)
        if name in self.running:
            self.running.pop(name).stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End all of them, at the same time.

        An interrupt, a second one or a late one, ends the waiting and nothing else: what was measured is still to be
        reported.
        """
        processes = list(self.running.values())
        try:
            for process in processes:
                process.ask_to_end()
            for process in processes:
                process.wait_for_end()
        except KeyboardInterrupt:
            pass
        finally:
            for process in processes:
                process.kill()


class Worker(EngineProcess):
    """A process of ``benchmarks.support.worker``: "offline" or "streaming", with the engine of one backend."""

    def __init__(self, kind: str, backend: str, variables: Mapping[str, str], log: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.support.worker", kind, backend]
        super().__init__(command, variables, log, has_pipes=True)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, op: str, **fields: Any) -> None:
        """Send a command; ``receive`` waits for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # ``receive`` says why

    def receive(self, timeout_s: float = MAX_WAIT_S) -> dict[str, Any]:
        """Return the answer to the oldest command without one.

        Raises:
            EngineError: it failed, the process has ended, or nothing came in time.
        """
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineError(f"no answer within {timeout_s:.0f} s{self.end_of_log()}") from None
        if answer is None:
            raise EngineError(f"the process ended{self.end_of_log()}")
        if "error" in answer:
            raise EngineError(f"{answer['error']}{self.end_of_log()}")
        return answer

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a command and return its answer; errors are those of ``receive``."""
        self.send(op, **fields)
        return self.receive()

    def wake(self) -> None:
        """Return when the engine has made a token; errors are those of ``receive``."""
        self.ask("wake")

    def ask_to_end(self) -> None:
        resume(self.pid)
        self.send("close")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)


class WorkerPool(Engines[Worker]):
    """Engines that are used from Python.

    Args:
        kind: "offline" or "streaming".
        vocab_size: prompts have token ids below it.
    """

    def __init__(self, kind: str, logs: Path, vocab_size: int) -> None:
        super().__init__(logs)
        self._kind, self._vocab_size = kind, vocab_size

    def add(self, name: str, backend: str, options: EngineOptions, variables: Mapping[str, str]) -> None:
        """Let a process make its engine; ``wait_until_started`` waits for all of them."""
        worker = Worker(self._kind, backend, variables, self.log_of(name))
        worker.send("start", options=asdict(options), vocab_size=self._vocab_size)
        self.running[name] = worker

    def wait_until_started(self) -> dict[str, float]:
        """Fill ``facts``, ``missing`` and ``failed``; return seconds of waiting until each was there."""
        start, start_up_s = time.monotonic(), {}
        for name, worker in list(self.running.items()):
            try:
                answer = worker.receive()
            except EngineError as error:
                self.drop(name, error)
                continue
            if "missing" in answer:
                self.missing[name] = answer["missing"]
                self.running.pop(name).stop()
            else:
                self.facts[name] = answer["facts"]
                start_up_s[name] = time.monotonic() - start
        return start_up_s

    def ask_all(self, op: str, **fields: Any) -> None:
        """Let all carry out the same at the same time; drop those that fail."""
        for worker in self.running.values():
            worker.send(op, **fields)
        for name, worker in list(self.running.items()):
            try:
                worker.receive()
            except EngineError as error:
                self.drop(name, error)
