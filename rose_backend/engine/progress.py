"""Progress bars: of finished requests, and of the phases of start-up."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rose_backend.engine.outputs import RequestOutput

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def show_progress(what: str, items: Sequence[_T], /) -> Iterator[_T]:
    """Yield ``items`` and show a bar on stderr where that is a terminal, which goes when all are done. Log it, too."""
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
    logger.info("%s: %d", what, len(items))
    with bar:
        yield from bar.track(items)
    logger.info("%s: %d took %.1f s", what, len(items), time.perf_counter() - start)


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
