"""Compile many kernels at once, in processes, into Triton's cache on disk: the launch of each finds it there.

Not in threads, although Triton's compiler holds Python's lock for a small part of its time only: a start that reads
weights or traces a model holds it, too, and where memory runs out a process can end instead of the start. The processes
are forked from a server that has never touched CUDA, not from this process, and do not run the caller's main module.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rose_backend.errors import ConfigError

if TYPE_CHECKING:
    from rose_backend.compile_ahead.recorded_launches import KernelSource

MAX_PROCESSES = 32
"""A start has about as many kernels as this, twice."""
MAX_SILENCE_S = 300.0
"""A kernel takes seconds; where none is finished for so long, something hangs, and the start goes on alone."""
COMPILES_ALONE = "kernels are compiled one after the other, in this process"
"""What is logged where other processes could not."""
_START_SERVER = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from rose_backend.compile_ahead.server import main; main()"
)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One that the pool has finished."""

    source: KernelSource
    error: str | None
    """Why it was not compiled."""
    seconds: float = 0.0
    folder: str = ""
    """Below ``cache_directory()``."""
    was_cached: bool = False
    """It had been compiled before."""
    has_launcher: bool = True
    """What launches it was compiled, too, if this Triton needs that."""


class CompilationPool:
    """Processes that compile; started at once, because they import what they need meanwhile.

    Args:
        num_processes: None takes ``usable_cores``; never more than ``MAX_PROCESSES``.
    """

    def __init__(self, num_processes: int | None = None) -> None:
        self._num_processes = min(num_processes or usable_cores(), MAX_PROCESSES)
        self._sources: Sequence[KernelSource] = ()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TRITON_CACHE_DIR": cache_directory(),
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the pool
        self._server = subprocess.Popen(
            [sys.executable, "-c", _START_SERVER, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            # All of its processes are ended together, and an interrupt from the keyboard is for the start alone.
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_receive, args=(self._server, self._lines), daemon=True).start()
        self.close = weakref.finalize(self, _end, self._server)
        """Ends the processes."""
        self.failure: str | None = None
        """Why not all kernels were compiled; None while nothing has failed."""

    def submit(self, sources: Sequence[KernelSource]) -> None:
        """Start to compile; once only."""
        # What is started last should be short.
        self._sources = sorted(sources, key=lambda source: source.length(), reverse=True)
        num_processes = max(min(self._num_processes, len(sources)), 1)
        message = pickle.dumps((self._sources, num_processes))
        # The server reads when it has imported what it needs, and a pipe holds little.
        threading.Thread(target=_send, args=(self._server, message), daemon=True).start()

    def finished(self) -> Iterator[CompiledKernel]:
        """Yield each kernel when it is done. Ends early where ``failure`` says why."""
        num_finished = 0
        while num_finished < len(self._sources) and self.failure is None:
            try:
                line = self._lines.get(timeout=MAX_SILENCE_S)
            except queue.Empty:
                self.failure = f"no kernel was finished within {MAX_SILENCE_S:.0f} s"
                self.close()
                return
            if not line:
                self.failure = (
                    f"the compiling process ended with exit code {self._server.wait()}{self._last_words()}"
                )
                return
            answer = json.loads(line)
            if "fatal" in answer:
                self.failure = answer["fatal"]
                return
            num_finished += 1
            yield CompiledKernel(self._sources[answer.pop("index")], **answer)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


def usable_cores() -> int:
    """Return the cores of this process: those that it may run on, or fewer if its control group has less time."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no control groups, no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(int(quota) // int(period), 1))
    return cores


def _receive(server: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Pass on the lines of a server, and an empty one behind the last."""
    assert server.stdout is not None
    with server.stdout:
        for line in server.stdout:
            lines.put(line)
    lines.put(b"")


def _send(server: subprocess.Popen[bytes], message: bytes) -> None:
    assert server.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # it has ended, as ``finished`` will see
        server.stdin.write(message)
        server.stdin.flush()


def _end(server: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    assert server.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        server.stdin.close()


class CompleteStarts:
    """Notes in Triton's cache of starts whose kernels are all there: such a start need not look for them again.

    A note that says too much costs time only: the launch compiles what it does not find.

    Args:
        key: all that decides which kernels a start needs; the sources of this package and Triton's version are added.
    """

    def __init__(self, *key: object) -> None:
        import triton

        digest = hashlib.sha256(repr((triton.__version__, _package_digest(), *key)).encode()).hexdigest()
        self._path = Path(cache_directory()) / f"rose-{digest[:32]}.json"

    def is_complete(self) -> bool:
        """Whether all kernels of such a start were compiled before, and are still there."""
        try:
            folders = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return False
        if not isinstance(folders, list):
            return False
        return all(isinstance(each, str) and (self._path.parent / each).is_dir() for each in folders)

    def note(self, kernels: Sequence[CompiledKernel]) -> None:
        """Note that such a start needs just these, if the cache can be written."""
        temporary = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps([kernel.folder for kernel in kernels]))
            temporary.replace(self._path)


def check_cache_is_writable() -> None:
    """Check that Triton can write into its cache.

    Raises:
        ConfigError: it cannot.
    """
    directory = cache_directory()
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"TRITON_CACHE_DIR: got {directory!r}, a folder that can be written is needed: some kernels have to be "
            f"compiled ({error.strerror})"
        ) from error


def cache_directory() -> str:
    """Return the folder in which Triton looks for compiled kernels."""
    from triton import knobs

    return str(knobs.cache.dir)


def _package_digest() -> str:
    import rose_backend

    digest = hashlib.sha256()
    # What is measured chooses kernels too.
    for path in sorted(Path(rose_backend.__file__).parent.rglob("*")):
        if path.suffix in (".py", ".txt"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
