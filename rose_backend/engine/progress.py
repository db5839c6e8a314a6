"""A progress bar over finished requests, with tokens per second."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rose_backend.engine.outputs import RequestOutput


class GenerationProgress:
    """Counts finished requests and generated tokens, and shows them on stderr.

    Args:
        total: requests.
        enabled: with False nothing is shown.
    """

    def __init__(self, total: int, *, enabled: bool) -> None:
        self.num_tokens = 0
        self._start = time.perf_counter()
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not enabled,
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
