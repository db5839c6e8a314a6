"""Engines in processes of their own, side by side: start them, ask them, let them take turns, end them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from benchmarks.support.engines import MODULES, EngineOptions, Sampling
from benchmarks.support.turns import Row, Turn, paused, resume
from benchmarks.support.workload import MODES, WAKING, HeldStreams, Requests

ROOT = Path(__file__).resolve().parents[2]
# A first start compiles for a minute or two; a run of thousands of prompts on a CPU is no benchmark.
MAX_WAIT_S = 600.0
MAX_STOP_S = 20.0


Take = Callable[[Any, str, Turn], Row]
"""Returns the figures of one engine's turn, from its process and name."""


class EngineError(Exception):
    """An engine failed, died, did not start or did not answer; the message has the end of what it printed."""


class EngineProcess:
    """One process that leads a session of its own, and may have children. Everything that it prints is in ``log``."""

    def __init__(self, command: list[str], options: EngineOptions, log: Path, **fields: Any) -> None:
        self.log, self.model = log, options.model
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                command,
                cwd=ROOT,
                env=options.variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **fields,
            )
        self.pid = self.popen.pid

    def facts_if_ready(self) -> dict[str, Any] | None:
        """Return version and settings in force, or None while it is still starting."""
        raise NotImplementedError

    def wake(self) -> None:
        """Return when the engine has made a token: that asks all of its processes."""
        raise NotImplementedError

    def ask_to_end(self) -> None:
        """Continue it if it is paused, and ask it to end."""
        resume(self.pid)
        self.popen.terminate()

    def wait_for_end(self) -> None:
        """Return when it has ended, or after ``MAX_STOP_S``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(MAX_STOP_S)

    def kill(self) -> None:
        """End it and all its children; children of an engine that ended without them are in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def error(self, what: str) -> EngineError:
        """Return an error that says what went wrong, and the last lines that it printed."""
        lines = self.log.read_text(errors="replace").splitlines()[-12:]
        return EngineError("\n    ".join((what, *lines)))


class Worker(EngineProcess):
    """A process of ``benchmarks.support.worker``, for a kind of ``ENGINES``."""

    def __init__(self, kind: str, options: EngineOptions, log: Path) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            descriptor = theirs.fileno()
            command = [sys.executable, "-u", "-m", "benchmarks.support.worker", str(descriptor)]
            super().__init__(command, options, log, pass_fds=[descriptor])
        self.send("start", kind, options)

    def send(self, *command: Any) -> None:
        """Send a command; ``receive`` waits for its answer."""
        with contextlib.suppress(ConnectionError):  # ``receive`` says why
            self._connection.send(command)

    def receive(self, timeout_s: float = MAX_WAIT_S) -> Any:
        """Return the answer to the oldest command without one.

        Raises:
            EngineError: it failed, the process has ended, or nothing came in time.
        """
        try:
            if not self._connection.poll(timeout_s):
                raise self.error(f"no answer within {timeout_s:.0f} s")
            answer, failure = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self.error("the process ended") from None
        if failure:
            raise self.error(failure)
        return answer

    def run(self, requests: Requests, sampling: Sampling) -> Any:
        """Return figures of these requests; errors are those of ``receive``."""
        self.send("run", requests, sampling)
        return self.receive()

    def hold(self, streams: HeldStreams, sampling: Sampling) -> Any:
        """Return figures of streams and of what arrives meanwhile; errors are those of ``receive``."""
        self.send("hold", streams, sampling)
        return self.receive(MAX_WAIT_S + streams.seconds)

    def facts_if_ready(self) -> dict[str, Any] | None:
        return self.receive() if self._connection.poll() else None

    def wake(self) -> None:
        self.run(WAKING, MODES["greedy"])

    def ask_to_end(self) -> None:
        resume(self.pid)
        self.send("close")


class Engines:
    """Engines by name, live side by side. Those that do not start, or fail later, are left out and named.

    Attributes:
        running: what has started.
        facts: what each engine said about itself.
        missing: name -> why it is not installed.
        failed: name -> what went wrong, at the start or later.

    Args:
        make: returns the process of an engine, from its options and a file for what it prints.
        logs: folder for what engines print.
        in_turn: start one after the other, the ones before stopped meanwhile.
    """

    def __init__(
        self, make: Callable[[EngineOptions, Path], Any], logs: Path, *, in_turn: bool = False
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._make, self._logs, self._in_turn = make, logs, in_turn
        self.running: dict[str, Any] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def start(self, wanted: Mapping[str, EngineOptions]) -> dict[str, float]:
        """Start all that are installed, and return the seconds that each took until it was ready."""
        for name, options in wanted.items():
            if not is_installed(options):
                self.missing[name] = f"no module named {MODULES[options.backend]}"
        seconds: dict[str, float] = {}
        names = [name for name in wanted if name not in self.missing]
        for group in [[name] for name in names] if self._in_turn else [names]:
            with paused(process.pid for process in self.running.values()):
                begin = time.monotonic()
                for name in group:
                    log = self._logs / f"{name.replace(', ', '_').replace(' ', '_')}.log"
                    self.running[name] = self._make(wanted[name], log)
                while waiting := [name for name in group if name in self.running and name not in seconds]:
                    for name in waiting:
                        self._look_at(name, begin, seconds)
                    time.sleep(0.05)
        # In the order in which they were asked for.
        self.facts = {name: self.facts[name] for name in self.running}
        return {name: seconds[name] for name in self.running}

    def _look_at(self, name: str, begin: float, seconds: dict[str, float]) -> None:
        """Note that an engine is ready, or drop it if it failed."""
        process = self.running[name]
        try:
            facts = process.facts_if_ready()
            if facts is not None:
                self.facts[name], seconds[name] = facts, time.monotonic() - begin
            elif process.popen.poll() is not None:
                raise process.error("the process ended")
            elif time.monotonic() - begin > MAX_WAIT_S:
                raise process.error(f"did not become ready within {MAX_WAIT_S:.0f} s")
        except EngineError as error:
            self.drop(name, error)

    def drop(self, name: str, error: EngineError) -> None:
        """Go on without an engine that failed."""
        self.failed[name] = str(error)
        _end([self.running.pop(name)])

    def run_all(self, requests: Requests, sampling: Sampling) -> None:
        """Let all workers run the same, one after the other; drop those that fail.

        Engines that time their own steps see nothing of others on the GPU.
        """
        for name, worker in list(self.running.items()):
            try:
                worker.run(requests, sampling)
            except EngineError as error:
                self.drop(name, error)

    def _turn_of(self, name: str, turn: Turn, take: Take, *, pause: bool) -> Row:
        """Wake an engine, all others standing still, and return its row.

        No engine is stopped in the middle of work: between turns all run, and within one only this engine gets work,
        which is answered when the turn ends.
        """
        others = [process.pid for other, process in self.running.items() if other != name and pause]
        with paused(others):
            self.running[name].wake()
            return {"backend": name, **turn.columns, **take(self.running[name], name, turn)}

    def take_turns(
        self, turns: Sequence[Turn], take: Take, rows: list[Row], *, pause: bool, deadline: float
    ) -> int:
        """Add a row per engine and turn to ``rows``, and return how many turns there was no time for.

        Args:
            pause: stop engines whose turn it is not.
            deadline: in ``time.monotonic``'s seconds. An interrupt counts as one: turns that were whole stay.
        """
        with Console(stderr=True).status("") as status:
            for number, turn in enumerate(turns):
                if time.monotonic() > deadline or not self.running:
                    return len(turns) - number
                names = deque(self.running)
                names.rotate(-turn.first)
                taken = []
                try:
                    for name in names:
                        status.update(f"turn {number + 1} of {len(turns)}: {turn.label}: {name}")
                        try:
                            taken.append(self._turn_of(name, turn, take, pause=pause))
                        except EngineError as error:
                            self.drop(name, error)
                except KeyboardInterrupt:
                    return len(turns) - number
                rows += taken
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End all of them; an interrupt meanwhile is not passed on: what was measured is still to be reported."""
        with contextlib.suppress(KeyboardInterrupt):
            _end(list(self.running.values()))


def _end(processes: Sequence[EngineProcess]) -> None:
    """Ask all to end at the same time, paused or not; then end them and all their children."""
    try:
        for process in processes:
            process.ask_to_end()
        for process in processes:
            process.wait_for_end()
    finally:
        for process in processes:
            process.kill()


def is_installed(options: EngineOptions) -> bool:
    """Return whether a process with these variables would find the backend's package."""
    look = f"import importlib.util; print(importlib.util.find_spec({MODULES[options.backend]!r}))"
    command = [sys.executable, "-c", look]
    found = subprocess.run(command, cwd=ROOT, env=options.variables, stdout=subprocess.PIPE)
    # Anything else that goes wrong is for the engine itself to tell.
    return found.stdout.strip() != b"None"
