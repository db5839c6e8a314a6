"""Play requests to a streaming engine at given times, and sum up what its callers saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.support.workload import Requests

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)


@dataclass
class Timeline:
    """One request, in seconds since it was due."""

    prompt_len: int
    arrivals: list[float] = field(default_factory=list)
    """When each piece of the answer came; a piece has one token or more."""
    num_tokens: int = 0
    error: str = ""
    """Why there is no answer, or not all of it."""
    due: float = 0.0
    """On the clock of ``time.perf_counter``."""


Send = Callable[[list[int], int, Timeline], Awaitable[None]]
Stream = Callable[[list[int], int], AsyncGenerator[int, None]]
"""Takes a prompt and a number of new tokens; yields how many are new in each piece of the answer."""


def sender(stream: Stream) -> Send:
    """Return what sends a prompt to an engine in this process and notes each piece that has tokens."""

    async def send(prompt: list[int], output_len: int, timeline: Timeline) -> None:
        async for num_tokens in stream(prompt, output_len):
            if num_tokens:
                timeline.arrivals.append(time.perf_counter() - timeline.due)
                timeline.num_tokens += num_tokens

    return send


async def play(send: Send, requests: Requests, start: float | None = None) -> tuple[list[Timeline], float]:
    """Send each prompt when it is due; return what came, and seconds from the start to the last token.

    Times count from when a request was due, not from when it was sent: a client that is late because it shares a core
    with the engine makes its user wait just the same.

    Args:
        send: takes a prompt, a number of new tokens and the timeline to fill in.
        start: from when on requests are due, on the clock of ``time.perf_counter``; None is now.
    """
    start = time.perf_counter() if start is None else start

    async def one(prompt: list[int], output_len: int, at: float) -> Timeline:
        timeline = Timeline(len(prompt), due=start + at)
        await asyncio.sleep(timeline.due - time.perf_counter())
        await send(prompt, output_len, timeline)
        return timeline

    tasks = map(one, requests.prompts, requests.output_lens, requests.due)
    timelines = await asyncio.gather(*tasks)
    return timelines, time.perf_counter() - start


def summary(timelines: Sequence[Timeline], duration: float) -> dict[str, Any]:
    """Return figures under the names that ``vllm bench serve`` gives them; requests with an error only count as failed.

    TTFT: time to the first piece. TPOT: the rest of the time over the rest of the tokens. ITL: gaps between pieces, of
    all requests together. E2EL: time to the last piece. Milliseconds; throughput per second of ``duration``.
    """
    complete = [timeline for timeline in timelines if not timeline.error]
    total_input = sum(timeline.prompt_len for timeline in complete)
    total_output = sum(timeline.num_tokens for timeline in complete)
    figures = {
        "duration": duration,
        "completed": len(complete),
        "failed": len(timelines) - len(complete),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(complete) / duration,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
    }
    values = (
        [timeline.arrivals[0] for timeline in complete],
        [(t.arrivals[-1] - t.arrivals[0]) / (t.num_tokens - 1) for t in complete if t.num_tokens > 1],
        [gap for timeline in complete for gap in np.diff(timeline.arrivals)],
        [timeline.arrivals[-1] for timeline in complete],
    )
    for name, seconds in zip(METRICS, values, strict=True):
        milliseconds = np.array(seconds or [0.0]) * 1e3
        figures[f"mean_{name}_ms"] = float(milliseconds.mean())
        figures[f"median_{name}_ms"] = float(np.median(milliseconds))
        figures[f"std_{name}_ms"] = float(milliseconds.std())
        for share in PERCENTILES:
            figures[f"p{share}_{name}_ms"] = float(np.percentile(milliseconds, share))
    return figures
