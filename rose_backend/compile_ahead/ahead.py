"""Kernels that other processes compile while this one does something else, until it needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rose_backend.compile_ahead.compilations import settle_cache_keys
from rose_backend.compile_ahead.pool import (
    CompilationPool,
    CompiledKernel,
    CompleteStarts,
    check_cache_is_writable,
)

if TYPE_CHECKING:
    from rose_backend.compile_ahead.recorded_launches import KernelSource

Progress = Callable[[Iterable[CompiledKernel], int], Iterator[CompiledKernel]]
"""Shows how far an iteration is, given what to yield and how many there will be."""


def _show_nothing(kernels: Iterable[CompiledKernel], total: int) -> Iterator[CompiledKernel]:
    return iter(kernels)


class AheadCompilation:
    """Compiles what one start or several need, from its construction on.

    Args:
        starts: notes of these starts.
        record: returns what they launch; what it raises is raised. Not called where all starts are complete.
        again: look at every kernel, also where an earlier start has noted that all are there.
        num_processes: None takes one per core of this process.
    """

    def __init__(
        self,
        starts: Sequence[CompleteStarts],
        record: Callable[[], Sequence[KernelSource]],
        *,
        again: bool = False,
        num_processes: int | None = None,
    ) -> None:
        self.kernels: list[CompiledKernel] = []
        """Those that are done, as far as this process has looked."""
        self._starts = starts
        self._sources: Sequence[KernelSource] = ()
        self._pool: CompilationPool | None = None
        settle_cache_keys()
        if not again and all(start.is_complete() for start in starts):
            return
        # It starts while this process looks for kernels.
        self._pool = CompilationPool(num_processes)
        self._sources = record()
        self._pool.submit(self._sources)
        self._finished = iter(self._pool.finished())

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._pool is None

    def wait_for(self, *names: str) -> None:
        """Wait for the kernels of these names only."""
        self._wait_for(lambda name: name in names)

    def wait_for_others(self, *names: str, progress: Progress = _show_nothing) -> None:
        """Wait for all kernels but those of these names.

        Raises:
            ConfigError: as ``wait``.
        """
        self._wait_for(lambda name: name not in names, progress)
        self._why_some_failed()

    def _wait_for(
        self,
        is_wanted: Callable[[str], bool],
        progress: Progress = _show_nothing,
    ) -> None:
        if self._pool is None:
            return
        num_left = sum(is_wanted(source.name) for source in self._sources)
        num_left -= sum(is_wanted(kernel.source.name) for kernel in self.kernels)
        for _ in progress(self._finish(is_wanted, num_left), num_left):
            pass

    def _finish(self, is_wanted: Callable[[str], bool], num_left: int) -> Iterator[CompiledKernel]:
        """Take what is finished until ``num_left`` wanted kernels are; yield these."""
        while num_left and (kernel := next(self._finished, None)) is not None:
            self.kernels.append(kernel)
            if is_wanted(kernel.source.name):
                num_left -= 1
                yield kernel

    def wait(self, progress: Progress = _show_nothing) -> str | None:
        """Wait for the last kernel.

        Returns:
            Why some are not compiled; None where all are.

        Raises:
            ConfigError: some are not, because Triton's cache cannot be written.
        """
        if self._pool is None:
            return None
        pool, self._pool = self._pool, None
        self.kernels += progress(self._finished, len(self._sources) - len(self.kernels))
        pool.close()
        failure = self._why_some_failed()
        if failure is not None:
            return failure
        if pool.failure is None and all(kernel.has_launcher for kernel in self.kernels):
            for start in self._starts:
                start.note(self.kernels)
        return pool.failure

    def _why_some_failed(self) -> str | None:
        failed = [kernel for kernel in self.kernels if kernel.error is not None]
        if not failed:
            return None
        check_cache_is_writable()
        return f"{len(failed)} failed, the first is {failed[0].source.name}: {failed[0].error}"
