"""Compile the kernels of a start in other processes, into Triton's cache on disk: the launch of each finds it there.

``AheadCompilation`` is what engines use; ``CompilationPool`` are its processes, ``CompleteStarts`` its notes.

Threads would not do, although Triton's compiler holds the interpreter lock only briefly: a start that reads weights or
traces a model needs that lock, too, and when memory runs out, a process can be killed instead of the start. They are
forked from a server (``server.py``) that has never touched CUDA, not from this process, and do not run the main module
of the caller.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose_backend.compile_ahead.recorded_launches import KernelSource, settle_cache_keys
from rose_backend.config import num_usable_cores
from rose_backend.errors import ConfigError

MAX_PROCESSES = 32
"""A start has about twice this many kernels."""
MAX_SILENCE_S = 300.0
"""A kernel takes seconds: if none is finished for this long, something hangs, and the start continues without them."""
COMPILES_ALONE = "kernels are compiled one after the other, in this process"
"""What is logged when other processes could not compile them."""
_BYTES_TRIED = 1 << 20
"""An empty file can still be made where a disk is full."""
_PACKAGE = Path(__file__).resolve().parents[1]
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
        num_processes: None takes ``num_usable_cores``; never more than ``MAX_PROCESSES``.
    """

    def __init__(self, num_processes: int | None = None) -> None:
        self._num_processes = min(num_processes or num_usable_cores(), MAX_PROCESSES)
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
        # Constants are of a dozen types, Triton's own among them, and kernels' keys in the cache depend on these.
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


def _receive(server: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Pass on the lines of a server, then an empty one."""
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
    """Check that Triton can write into its cache, and that its disk is not full.

    Raises:
        ConfigError: it cannot.
    """
    directory = cache_directory()
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_BYTES_TRIED))
            file.flush()
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
    digest = hashlib.sha256()
    # What is measured chooses kernels too.
    for path in sorted(_PACKAGE.rglob("*")):
        if path.suffix in (".py", ".txt"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


Progress = Callable[[Iterable[CompiledKernel], int], Iterator[CompiledKernel]]
"""Passes on what it is given and shows how many of the expected number have come."""


class AheadCompilation:
    """Compiles the kernels of one or more starts, beginning when it is constructed.

    Args:
        starts: notes on these starts.
        record: returns what they launch; its errors propagate. Not called if all starts are complete.
        again: check every kernel even if an earlier start noted that all are there.
        num_processes: None takes one per core of this process.
        progress: shows how far a wait for kernels is.
    """

    def __init__(
        self,
        starts: Sequence[CompleteStarts],
        record: Callable[[], Sequence[KernelSource]],
        *,
        again: bool = False,
        num_processes: int | None = None,
        progress: Progress = lambda kernels, total: iter(kernels),
    ) -> None:
        self.kernels: list[CompiledKernel] = []
        """The finished ones that this process has been told of."""
        self._starts = starts
        self._sources: Sequence[KernelSource] = ()
        self._progress = progress
        self._pool: CompilationPool | None = None
        settle_cache_keys()
        if not again and all(start.is_complete() for start in starts):
            return
        # It starts while this process looks for kernels.
        self._pool = CompilationPool(num_processes)
        self._sources = record()
        self._pool.submit(self._sources)
        self._arrivals = _noted(self._pool.finished(), self.kernels)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._pool is None

    def wait_for(self, *names: str) -> None:
        """Wait only for the kernels with these names."""
        self._wait_for(lambda name: name in names)

    def wait_for_others(self, *names: str) -> None:
        """Wait for all kernels except those with these names.

        Raises:
            ConfigError: as ``wait``.
        """
        self._wait_for(lambda name: name not in names)
        self._why_some_failed()

    def _wait_for(self, is_wanted: Callable[[str], bool]) -> None:
        num_left = sum(is_wanted(source.name) for source in self._sources)
        num_left -= sum(is_wanted(kernel.source.name) for kernel in self.kernels)
        if self._pool is not None:
            wanted = (kernel for kernel in self._arrivals if is_wanted(kernel.source.name))
            for _ in self._progress(itertools.islice(wanted, num_left), num_left):
                pass

    def wait(self) -> str | None:
        """Wait for the last kernel.

        Returns:
            Why some were not compiled; None if all were.

        Raises:
            ConfigError: some were not, because Triton's cache cannot be written.
        """
        if self._pool is None:
            return None
        self._wait_for(lambda name: True)
        pool, self._pool = self._pool, None
        pool.close()
        failure = self._why_some_failed() or pool.failure
        if failure is None and all(kernel.has_launcher for kernel in self.kernels):
            for start in self._starts:
                start.note(self.kernels)
        return failure

    def _why_some_failed(self) -> str | None:
        failed = [kernel for kernel in self.kernels if kernel.error is not None]
        if not failed:
            return None
        check_cache_is_writable()
        return f"{len(failed)} failed, the first is {failed[0].source.name}: {failed[0].error}"


@dataclass(slots=True)
class Compilations:
    """Kernels that were compiled, or loaded from Triton's cache on disk."""

    names: list[str] = field(default_factory=list)
    """In order; a kernel is listed again for other constants or argument types."""
    compiled: list[str] = field(default_factory=list)
    """Those of them that were not on disk."""
    seconds: float = 0.0


@contextlib.contextmanager
def watch_compilations() -> Iterator[Compilations]:
    """Collect what Triton compiles or loads inside the block, in this process."""
    from triton import knobs

    seen = Compilations()
    listener = knobs.compilation.listener

    def listen(*, src: Any, times: Any, cache_hit: bool, **details: Any) -> None:
        seen.names.append(src.name)
        if not cache_hit:
            seen.compiled.append(src.name)
        seen.seconds += times.total * 1e-6
        if listener is not None:
            listener(src=src, times=times, cache_hit=cache_hit, **details)

    knobs.compilation.listener = listen
    try:
        yield seen
    finally:
        knobs.compilation.listener = listener


def _noted(finished: Iterable[CompiledKernel], kernels: list[CompiledKernel]) -> Iterator[CompiledKernel]:
    """Yield kernels as they are finished, and note them.

    No method: a generator that held its object would keep the pool's processes alive after a start that failed.
    """
    for kernel in finished:
        kernels.append(kernel)
        yield kernel
