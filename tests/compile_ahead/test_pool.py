"""Processes that compile: what they report, how they fail, and which starts are known to be complete."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

from rose_backend import kernels
from rose_backend.compile_ahead import pool as compilation_pool
from rose_backend.compile_ahead.pool import (
    AheadCompilation,
    CompilationPool,
    CompiledKernel,
    CompleteStarts,
    check_cache_is_writable,
    watch_compilations,
)
from rose_backend.compile_ahead.recorded_launches import KernelSource, record_launches
from rose_backend.compile_ahead.server import compile_source
from rose_backend.errors import ConfigError
from rose_backend.kernels.gpu_properties import GpuProperties


class Bad(KernelSource):
    """Comes last, and ends the process that compiles it, as where memory runs out; or is never finished."""

    def length(self) -> int:
        return 0

    def function(self) -> None:  # type: ignore[override]
        os._exit(9) if self.name == "deadly" else threading.Event().wait()


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KernelSource:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with record_launches(GpuProperties((9, 0), 132)) as recorded:
        ids = torch.empty(3, dtype=torch.int64, device="meta")
        kernels.embed_tokens(ids, ids, torch.empty((9, 64), dtype=torch.float16, device="meta"))
    return recorded.sources[0]


def bad(source: KernelSource, name: str) -> Bad:
    fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    return Bad(**fields | {"name": name})


def compile_all(*sources: KernelSource) -> tuple[list[CompiledKernel], str | None]:
    pool = CompilationPool(num_processes=1)
    pool.submit(sources)
    finished = list(pool.finished())
    pool.close()
    return finished, pool.failure


def test_kernels_are_compiled_once(source: KernelSource, tmp_path: Path) -> None:
    (first,), failure = compile_all(source)
    assert failure is None and first.error is None and first.seconds > 0
    assert not first.was_cached and (tmp_path / "cache" / first.folder / f"{source.name}.cubin").is_file()
    (second,), failure = compile_all(source)
    assert failure is None and second.was_cached and second.folder == first.folder


def test_what_cannot_be_compiled_is_reported_and_the_others_go_on(source: KernelSource) -> None:
    broken = dataclasses.replace(source, signature=dict.fromkeys(source.signature, "nonsense"))
    finished, failure = compile_all(broken, source)
    assert failure is None
    assert sorted(kernel.error is None for kernel in finished) == [False, True]


def test_a_process_that_ends_is_reported(source: KernelSource) -> None:
    finished, failure = compile_all(source, bad(source, "deadly"))
    assert [kernel.error for kernel in finished] == [None]
    assert failure == "a process ended, possibly because memory ran out"


@pytest.mark.parametrize(
    ("program", "expected"),
    [("import os; os.kill(os.getpid(), 9)", "-9"), ("raise SystemExit('no such thing')", "1: no such thing")],
)
def test_a_server_that_ends_is_reported_with_its_last_words(
    source: KernelSource, monkeypatch: pytest.MonkeyPatch, program: str, expected: str
) -> None:
    monkeypatch.setattr(compilation_pool, "_START_SERVER", program)
    pool = CompilationPool(num_processes=1)
    pool._server.wait()
    pool.submit([source])
    assert list(pool.finished()) == []
    assert pool.failure == f"the compiling process ended with exit code {expected}"
    pool.close()


def test_a_kernel_that_hangs_does_not_hold_up_the_start(
    source: KernelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = CompilationPool(num_processes=1)
    pool.submit([source, bad(source, "endless")])
    finished = pool.finished()
    assert next(finished).error is None
    monkeypatch.setattr(compilation_pool, "MAX_SILENCE_S", 0.2)
    assert list(finished) == [] and pool.failure == "no kernel was finished within 0 s"
    assert pool._server.returncode == -signal.SIGKILL
    wait_for_the_end_of(pool._server.pid)


def wait_for_the_end_of(session: int) -> None:
    """Return when no process of a session is left: one that is killed is still there for a moment."""
    while members_of(session):
        time.sleep(0.05)


def members_of(session: int) -> list[int]:
    """Return the processes of a session that are alive."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                found += [int(folder.name)] if int(its_session) == session and state != "Z" else []
    return found


def test_all_processes_end_with_a_parent_that_is_killed(source: KernelSource) -> None:
    # The parent's child keeps the pipe to the server open.
    script = (
        "import os, sys, time\n"
        "from rose_backend.compile_ahead.pool import CompilationPool\n"
        "pool = CompilationPool(num_processes=1)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(600)\n"
        "print(pool._server.pid, child, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    server, child = map(int, parent.stdout.readline().split())
    try:
        assert members_of(server)
        parent.kill()
        parent.wait()
        wait_for_the_end_of(server)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdin.close()
        parent.stdout.close()


def test_processes_are_never_more_than_the_limit_and_end_with_the_pool(source: KernelSource) -> None:
    pool = CompilationPool(num_processes=192)
    assert pool._num_processes == compilation_pool.MAX_PROCESSES
    server = pool._server
    pool.submit([source])
    del pool
    assert server.returncode is not None


def test_a_start_is_complete_as_long_as_all_its_kernels_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    start = CompleteStarts("gpt2", 256)
    assert not start.is_complete()
    for name in ("A", "B"):
        (tmp_path / name).mkdir()
    start.note([CompiledKernel(None, None, folder=name) for name in ("A", "B")])  # type: ignore[arg-type]
    assert CompleteStarts("gpt2", 256).is_complete() and not CompleteStarts("gpt2", 255).is_complete()
    (tmp_path / "B").rmdir()
    assert not start.is_complete()
    for damaged in ("5", "[1]", "{"):
        start._path.write_text(damaged)
        assert not start.is_complete()


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    check_cache_is_writable()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        ConfigError, match=r"TRITON_CACHE_DIR: got '.*/file/cache', a folder that can be written"
    ):
        check_cache_is_writable()
    CompleteStarts("gpt2").note([])  # a start that has everything does not need it
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    full = io.BufferedWriter(io.FileIO("/dev/full", "w"))
    monkeypatch.setattr(compilation_pool.tempfile, "TemporaryFile", lambda dir: full)
    with pytest.raises(ConfigError, match=r"TRITON_CACHE_DIR: .* \(No space left on device\)$"):
        check_cache_is_writable()


def test_compilations_are_seen_inside_the_block_only(
    source: KernelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **details: heard.append(src.name))
    with watch_compilations() as seen:
        compile_source(source)
        compile_source(source)
    assert seen.names == heard == [source.name] * 2
    assert seen.compiled == [source.name] and 0 < seen.seconds < 100, "the second one comes from the disk"
    compile_source(source)
    assert len(seen.names) == 2 and len(heard) == 3


def test_a_start_that_fails_leaves_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        finished: Callable[..., Any] = lambda self: iter(())
        submit: Callable[..., Any] = lambda self, sources: None

    monkeypatch.setattr(compilation_pool, "CompilationPool", lambda num_processes: Pool())
    gc.disable()
    try:
        start: Any = SimpleNamespace(is_complete=lambda: False)
        compilation = AheadCompilation([start], list)
        pool = weakref.ref(compilation._pool)
        del compilation
        assert pool() is None, "its processes go on until garbage is collected"
    finally:
        gc.enable()
