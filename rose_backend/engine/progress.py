"""Progress bars: of finished requests, of weights that are read, and of the phases of start-up."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sized
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from rose_backend.engine.outputs import RequestOutput
from rose_backend.kernels.gpu_properties import is_recording

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def show_progress(what: str, items: Iterable[_T], /, *, total: int | None = None) -> Iterator[_T]:
    """Yield ``items`` and show a bar on stderr where that is a terminal, which goes when all are done. Log it, too.

    Nothing is shown while kernels are only recorded.

    Args:
        total: their number; None takes their length.
    """
    if is_recording():
        yield from items
        return
    if total is None:
        assert isinstance(items, Sized)
        total = len(items)
    console = Console(stderr=True)
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    start = time.perf_counter()
    logger.info("%s: %d", what, total)
    with bar:
        yield from bar.track(items, total)
    logger.info("%s: %d took %.1f s", what, total, time.perf_counter() - start)


class LoadingProgress:
    """Shows how many bytes of weights were read, and how fast: a bar on stderr where that is a terminal, which goes.

    Elsewhere a log line every ``LOG_INTERVAL_S``. The log has the end in both cases.
    """

    LOG_INTERVAL_S = 5.0

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._is_terminal = console.is_terminal
        self._progress = Progress(
            TextColumn("loading weights"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("loading weights", total=None)
        self._start = self._logged = time.perf_counter()
        self._is_complete = False

    def update(self, num_bytes: int, total: int) -> None:
        """Show that ``num_bytes`` of ``total`` were read."""
        self._progress.update(self._task, completed=num_bytes, total=total)
        now = time.perf_counter()
        is_due = not self._is_terminal and now - self._logged >= self.LOG_INTERVAL_S
        if (is_due or num_bytes == total) and not self._is_complete:
            self._logged, self._is_complete = now, num_bytes == total
            rate = num_bytes / max(now - self._start, 1e-9)
            logger.info(
                "loading weights: %.2f of %.2f GB, %.2f GB/s", num_bytes / 1e9, total / 1e9, rate / 1e9
            )

    def __enter__(self) -> LoadingProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class GenerationProgress:
    """Counts finished requests and generated tokens, and shows them on stderr.

    Args:
        total: requests.
    """

    def __init__(self, total: int) -> None:
        self.num_tokens = 0
        self._start = time.perf_counter()
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("generating", total=total, speed="")

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second since the start."""
        return self.num_tokens / max(time.perf_counter() - self._start, 1e-9)

    def advance(self, output: RequestOutput) -> None:
        """Count one finished request."""
        self.num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self._progress.update(self._task, advance=1, speed=f"{self.tokens_per_s:,.0f} tokens/s")

    def __enter__(self) -> GenerationProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
