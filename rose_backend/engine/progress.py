"""Progress of finished requests, of weights that are read, and of the phases of start-up.

A bar on stderr where that is a terminal, elsewhere a line now and then.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from rose_backend.kernels.gpu_properties import is_recording

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

LINE_INTERVAL_S = 10.0
"""Between two lines of progress where stderr is no terminal."""
_BAR_INTERVAL_S = 0.1
"""Between two updates of a bar: one costs as much as a small step's own work."""


class _Interval:
    """Says that something is due, once per interval, the first time when the first interval is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, time.perf_counter()

    def is_over(self) -> bool:
        """Return whether it is due; the next interval begins then."""
        now = time.perf_counter()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


def _bar(*columns: ProgressColumn, transient: bool = False) -> Progress:
    """Return a bar on stderr, disabled where that is no terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)


def show_progress(what: str, items: Iterable[_T], /, *, total: int | None = None) -> Iterator[_T]:
    """Yield ``items`` and show a bar on stderr where that is a terminal, which goes when all are done.

    The log has the beginning and the end, and elsewhere how many are done, every ``LINE_INTERVAL_S`` at most.
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
    bar = _bar(TextColumn(what), BarColumn(), MofNCompleteColumn(), transient=True)
    start = time.perf_counter()
    logger.info("%s: %d", what, total)
    interval = _Interval(LINE_INTERVAL_S)
    with bar:
        for num_done, item in enumerate(bar.track(items, total), 1):
            yield item
            if bar.disable and interval.is_over():
                logger.info("%s: %d of %d", what, num_done, total)
    logger.info("%s: %d took %.1f s", what, total, time.perf_counter() - start)


class _Shown(AbstractContextManager[Any]):
    """What is shown while a block runs."""

    def __init__(self, progress: Progress, interval_s: float) -> None:
        self._progress, self._interval = progress, _Interval(interval_s)
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


class LoadingProgress(_Shown):
    """Shows how many bytes of weights were read, and how fast: a bar on stderr where that is a terminal, which goes.

    Elsewhere a log line every ``LINE_INTERVAL_S``. The log has the end in both cases.
    """

    def __init__(self) -> None:
        columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        super().__init__(
            _bar(TextColumn("loading weights"), BarColumn(), *columns, transient=True), LINE_INTERVAL_S
        )
        self._task = self._progress.add_task("loading weights", total=None)
        self._is_complete = False

    def update(self, num_bytes: int, total: int) -> None:
        """Show that ``num_bytes`` of ``total`` were read."""
        self._progress.update(self._task, completed=num_bytes, total=total)
        is_due = self._progress.disable and self._interval.is_over()
        if (is_due or num_bytes == total) and not self._is_complete:
            self._is_complete = num_bytes == total
            rate = num_bytes / max(time.perf_counter() - self._start, 1e-9)
            sizes = (decimal(int(count), precision=2) for count in (num_bytes, total, rate))
            logger.info("loading weights: %s of %s, %s/s", *sizes)


class GenerationProgress(_Shown):
    """Shows finished prompts and generated tokens on stderr: a bar where that is a terminal, else lines.

    Args:
        total: prompts.
        count_tokens: returns the tokens that were generated so far, those of unfinished prompts included.
    """

    def __init__(self, total: int, count_tokens: Callable[[], int]) -> None:
        self._total, self._count_tokens = total, count_tokens
        self._num_finished = 0
        self._first_token = count_tokens()
        columns = MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn()
        bar = _bar(TextColumn("generating"), BarColumn(), *columns)
        super().__init__(bar, LINE_INTERVAL_S if bar.disable else _BAR_INTERVAL_S)
        self._task = self._progress.add_task("generating", total=total, speed="")

    def update(self, num_finished: int) -> None:
        """Note after a step that ``num_finished`` more prompts are finished."""
        self._num_finished += num_finished
        if self._interval.is_over():
            self._show()

    def _show(self) -> None:
        num_tokens = self._count_tokens() - self._first_token
        rate = num_tokens / max(time.perf_counter() - self._start, 1e-9)
        speed = f"{num_tokens:,} tokens, {rate:,.0f} tokens/s"
        self._progress.update(self._task, completed=self._num_finished, speed=speed)
        if self._progress.disable:
            print(
                f"generating: {self._num_finished} of {self._total} prompts finished, {speed}",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *error: object) -> None:
        self._show()
        super().__exit__(*error)
