"""Requests to an ``AsyncEngine`` in this process, and when each of them got what."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from rose_backend import AsyncEngine, SamplingParams
from rose_backend.engine.row_state import RowState

METRICS = ("queue_wait", "prefill", "ttft", "tpot", "itl", "latency")
PERCENTILES = (50, 95, 99)


@dataclass
class Served:
    """One request; seconds on the clock of ``time.perf_counter``."""

    due: float
    scheduled: float = 0.0
    """When it got a row, that is, when the step was planned that begins its prompt."""
    arrivals: list[float] = field(default_factory=list)
    """When each piece of the answer came; a piece has one token or more."""
    num_tokens: int = 0
    """Of all its texts."""

    def seconds(self) -> dict[str, list[float]]:
        """Return what each metric has of this request."""
        first, last = self.arrivals[0], self.arrivals[-1]
        later_tokens = self.num_tokens - 1
        return {
            "queue_wait": [self.scheduled - self.due],
            "prefill": [first - self.scheduled],
            "ttft": [first - self.due],
            "tpot": [(last - first) / later_tokens] if later_tokens else [],
            "itl": np.diff(self.arrivals).tolist(),
            "latency": [last - self.due],
        }


@dataclass(frozen=True)
class RunOptions:
    """How requests come.

    Attributes:
        interval_s: between two of them.
        tokenize_workers: threads that make token ids of texts; 0 leaves it to the engine, on the event loop.
    """

    interval_s: float = 0.0
    tokenize_workers: int = 0


async def serve(
    engine: AsyncEngine, prompts: Sequence[Any], params: Sequence[SamplingParams], options: RunOptions
) -> tuple[list[Served], float]:
    """Send requests, one every ``interval_s``; return what each saw, and seconds from the start to the last token.

    Args:
        prompts: texts or token ids.
    """
    served: dict[str, Served] = {}
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_noting_rows(served))
        pool = None
        if options.tokenize_workers:
            pool = stack.enter_context(ThreadPoolExecutor(options.tokenize_workers))
        start = time.perf_counter()

        async def one(index: int) -> None:
            request = served[f"request-{index}"] = Served(start + index * options.interval_s)
            await asyncio.sleep(max(request.due - time.perf_counter(), 0.0))
            prompt = prompts[index]
            if pool is not None and isinstance(prompt, str):
                prompt = await loop.run_in_executor(pool, engine.tokenizer.encode, prompt)
            async for output in engine.generate(prompt, params[index], request_id=f"request-{index}"):
                num_tokens = sum(len(text.token_ids) for text in output.outputs)
                if num_tokens > request.num_tokens:
                    request.arrivals.append(time.perf_counter())
                    request.num_tokens = num_tokens

        await asyncio.gather(*(one(index) for index in range(len(prompts))))
    return list(served.values()), time.perf_counter() - start


@contextlib.contextmanager
def _noting_rows(served: dict[str, Served]) -> Iterator[None]:
    fill = RowState.fill

    def noting(state: RowState, row: int, completion: Any) -> None:
        request = served.get(completion.request.request_id)
        if request is not None and not request.scheduled:
            request.scheduled = time.perf_counter()
        fill(state, row, completion)

    with mock.patch.object(RowState, "fill", noting):
        yield


def figures(served: Sequence[Served], duration: float) -> dict[str, float]:
    """Return mean and percentiles of each metric in milliseconds, and throughput per second of ``duration``.

    queue_wait: from when a request was due until it got a row. prefill: from then to the first token. ttft: both. tpot:
    the rest of the time over the rest of the tokens. itl: gaps between pieces. latency: to the last token.
    """
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for request in served:
        for name, seconds in request.seconds().items():
            values[name] += seconds
    total = sum(request.num_tokens for request in served)
    result = {
        "duration": duration,
        "completed": len(served),
        "total_output_tokens": total,
        "request_throughput": len(served) / duration,
        "output_throughput": total / duration,
    }
    for name, seconds in values.items():
        milliseconds = np.array(seconds or [0.0]) * 1e3
        result[f"mean_{name}_ms"] = float(milliseconds.mean())
        for share in PERCENTILES:
            result[f"p{share}_{name}_ms"] = float(np.percentile(milliseconds, share))
    return result
