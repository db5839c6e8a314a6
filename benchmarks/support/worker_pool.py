"""Engines in processes of their own, side by side: start them, ask them, end them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.support.engines import EngineOptions
from benchmarks.support.pause import resume

ROOT = Path(__file__).resolve().parents[2]
# A first start compiles for a minute or two; a run of thousands of prompts on a CPU is no benchmark.
MAX_WAIT_S = 600.0
MAX_CLOSE_S = 20.0


class WorkerError(Exception):
    """A worker failed, died or did not answer; the message has the end of what it printed."""


def worker_environment(
    backend: str, python_path: str | None, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of a process that runs ``backend``; arguments are those of ``Worker``."""
    variables = {**os.environ, **environment}
    if python_path is not None:
        variables["PYTHONPATH"] = os.pathsep.join((python_path, str(ROOT)))
    if backend == "vllm":
        # Stock: no plug-in is loaded, not even one that stays out of the way.
        variables["VLLM_PLUGINS"] = ""
    return variables


class Worker:
    """One process. Its log is in ``log``.

    Args:
        kind: "offline" or "streaming".
        backend: name of the engine.
        python_path: what to put on its PYTHONPATH instead of this process's; None keeps it.
        environment: variables to set, over this process's own.
        log: file for everything that the engine prints.
    """

    def __init__(
        self, kind: str, backend: str, *, python_path: str | None, environment: Mapping[str, str], log: Path
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.support.worker", kind, backend],
                cwd=ROOT,
                env=worker_environment(backend, python_path, environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )
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
            WorkerError: it failed, the process has ended, or nothing came in time.
        """
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise WorkerError(f"no answer within {timeout_s:.0f} s{self._end_of_log()}") from None
        if answer is None:
            raise WorkerError(f"the process ended{self._end_of_log()}")
        if "error" in answer:
            raise WorkerError(f"{answer['error']}{self._end_of_log()}")
        return answer

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a command and return its answer; errors are those of ``receive``."""
        self.send(op, **fields)
        return self.receive()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def wake(self) -> None:
        """Return when the engine has made a token; errors are those of ``receive``."""
        self.ask("wake")

    def close(self) -> None:
        """Ask it to end, paused or not; if it does not, end it and all its children."""
        try:
            self.ask_to_end()
            self.wait_for_end()
        finally:
            self.kill()

    def ask_to_end(self) -> None:
        """Continue it if it is paused, and ask it to end."""
        resume(self.pid)
        self.send("close")

    def wait_for_end(self) -> None:
        """Return when it has ended, or after ``MAX_CLOSE_S``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(MAX_CLOSE_S)

    def kill(self) -> None:
        """End it and all its children; children of an engine that ended without them are in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def _end_of_log(self, num_lines: int = 12) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-num_lines:]
        return "".join(f"\n    {line}" for line in lines)


class WorkerPool:
    """Workers by name. Those that do not start are left out and named.

    Attributes:
        workers: what has started.
        facts: what each engine said about itself.
        missing: name -> why it is not installed.
        failed: name -> what went wrong, at the start or later.
    """

    def __init__(self, kind: str, logs: Path | None = None) -> None:
        self._kind = kind
        self._own_folder = None if logs is not None else tempfile.TemporaryDirectory()
        self._logs = Path(self._own_folder.name) if self._own_folder else logs
        self.workers: dict[str, Worker] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def add(
        self,
        name: str,
        backend: str,
        options: EngineOptions,
        *,
        vocab_size: int,
        python_path: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Let a process make its engine; ``wait_until_started`` waits for all of them."""
        assert self._logs is not None
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name.replace(', ', '_').replace(' ', '_')}.log"
        worker = Worker(self._kind, backend, python_path=python_path, environment=environment or {}, log=log)
        worker.send("start", options=asdict(options), vocab_size=vocab_size)
        self.workers[name] = worker

    def wait_until_started(self) -> None:
        """Fill ``facts``, ``missing`` and ``failed``."""
        for name, worker in list(self.workers.items()):
            try:
                answer = worker.receive()
            except WorkerError as error:
                self.drop(name, error)
                continue
            if "missing" in answer:
                self.missing[name] = answer["missing"]
                self.workers.pop(name).close()
            else:
                self.facts[name] = answer["facts"]

    def ask_all(self, op: str, **fields: Any) -> None:
        """Let all carry out the same at the same time; drop those that fail."""
        for worker in self.workers.values():
            worker.send(op, **fields)
        for name, worker in list(self.workers.items()):
            try:
                worker.receive()
            except WorkerError as error:
                self.drop(name, error)

    def drop(self, name: str, error: WorkerError) -> None:
        """Go on without a worker that failed."""
        self.failed[name] = str(error)
        self.workers.pop(name).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        workers = list(self.workers.values())
        try:
            for worker in workers:
                worker.ask_to_end()
            for worker in workers:
                worker.wait_for_end()
        except KeyboardInterrupt:
            # A second interrupt, or a late one, ends the waiting: what was measured is still to be reported.
            pass
        finally:
            for worker in workers:
                worker.kill()
            if self._own_folder is not None:
                self._own_folder.cleanup()
