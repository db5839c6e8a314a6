"""Processes that compile: what they report, how they fail, and which starts are known to be complete."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from rose_backend import kernels
from rose_backend.errors import ConfigError
from rose_backend.kernels.compilation_pool import (
    CompilationPool,
    CompiledKernel,
    CompleteStarts,
    check_cache_is_writable,
)
from rose_backend.kernels.gpu_properties import GpuProperties
from rose_backend.kernels.recorded_launches import KernelSource, record_launches


class Deadly(KernelSource):
    """Ends the process that compiles it, as the system does when memory runs out."""

    def length(self) -> int:
        return 0

    def function(self) -> None:  # type: ignore[override]
        os._exit(9)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KernelSource:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with record_launches(GpuProperties((9, 0), 132)) as recorded:
        ids = torch.empty(3, dtype=torch.int64, device="meta")
        kernels.embed_tokens(ids, ids, torch.empty((9, 64), dtype=torch.float16, device="meta"))
    return recorded.sources[0]


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
    fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    finished, failure = compile_all(source, Deadly(**fields))
    assert [kernel.error for kernel in finished] == [None]
    assert failure == "a process ended, possibly because memory ran out"


def test_a_server_that_ends_is_reported(source: KernelSource) -> None:
    pool = CompilationPool(num_processes=1)
    pool._server.kill()
    pool._server.wait()
    pool.submit([source])
    assert list(pool.finished()) == []
    assert pool.failure is not None and "ended with exit code -9" in pool.failure
    pool.close()


def test_processes_end_with_the_pool(source: KernelSource) -> None:
    pool = CompilationPool(num_processes=1)
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
