"""The server process of ``CompilationPool``: it imports what compiling needs once, then forks the processes.

Reads pickled ``KernelSource`` objects from stdin, writes one line of JSON per kernel to stdout. It leads a session,
which ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import triton
from triton.backends.nvidia import driver
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import triton_key

from rose_backend.compile_ahead.pool import watch_compilations
from rose_backend.compile_ahead.recorded_launches import KernelSource, settle_cache_keys

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 1.0


def main() -> None:
    """Serve one list of kernels."""
    parent = int(sys.argv[1])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # Triton and the compilers that it calls sometimes print.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    settle_cache_keys()
    _wait_for_input(parent)
    sources, num_processes = pickle.load(sys.stdin.buffer)
    # What every process would compute again.
    triton_key()
    make_backend(sources[0].target).hash()
    with ProcessPoolExecutor(
        num_processes,
        multiprocessing.get_context("fork"),
        _prepare_process,
        (os.getpid(), answers.fileno()),
    ) as pool:
        # Forked with the first of these: no thread has started yet.
        futures = {pool.submit(compile_source, source): index for index, source in enumerate(sources)}
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        for future in as_completed(futures):
            answer: dict[str, Any] = {"index": futures[future], "error": None}
            try:
                answer |= future.result()
            except BrokenProcessPool:
                print(json.dumps({"fatal": "a process ended, possibly because memory ran out"}), file=answers)
                return
            except Exception as error:  # whatever a compiler raises
                answer["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(answer), file=answers)


def compile_source(source: KernelSource) -> dict[str, Any]:
    """Compile one kernel into Triton's cache, with what launches it where this Triton compiles that too.

    Returns:
        Fields of ``CompiledKernel``.
    """
    start = time.perf_counter()
    with watch_compilations() as seen:
        kernel = triton.compile(
            ASTSource(source.function(), source.signature, source.constexprs, source.attributes),
            target=source.target,
            options=source.options,
        )
    has_launcher = True
    if hasattr(driver, "make_launcher"):
        # Triton 3.6 compiles C for each signature, which it cannot where CUDA's driver is missing.
        try:
            driver.CudaLauncher(kernel.src, kernel.metadata)
        except Exception:  # of the C compiler, or of what looks for libraries
            has_launcher = False
    folder = Path(next(iter(kernel.metadata_group.values()))).parent.name
    return {
        "seconds": time.perf_counter() - start,
        "folder": folder,
        "was_cached": not seen.compiled,
        "has_launcher": has_launcher,
    }


def _prepare_process(server: int, answers: int) -> None:
    """Let a forked process end with the server, and before others where memory runs out."""
    os.close(answers)  # the server's end of it is the only one: when it closes, the start knows
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != server:
        os._exit(1)


def _wait_for_input(parent: int) -> None:
    """Return when stdin has something or has ended. End this session if the parent is gone.

    A process that the parent has forked may keep the pipe open.
    """
    while not select.select([sys.stdin.buffer], [], [], _LOOK_EVERY_S)[0]:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)


def _end_with(parent: int) -> None:
    _wait_for_input(parent)  # nothing more is sent: it is the end
    os.killpg(0, signal.SIGKILL)
