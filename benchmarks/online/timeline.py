"""Play requests to a streaming engine at given times, and sum up what its callers saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    queue_wait: float = 0.0
    """Until it got a row, where that is noted."""

    def saw(self, num_tokens: int) -> None:
        """Note a piece of the answer."""
        self.arrivals.append(time.perf_counter() - self.due)
        self.num_tokens += num_tokens


Send = Callable[[Any, int, Timeline], Awaitable[None]]


async def play(
    send: Send, prompts: Sequence[Any], output_lens: Sequence[int], due: Sequence[float]
) -> tuple[list[Timeline], float]:
    """Send each prompt when it is due; return what came, and seconds from the start to the last token.

    Times count from when a request was due, not from when it was sent: a client that is late because it shares a core
    with the engine makes its user wait just the same.

    Args:
        send: takes a prompt, of token ids or text, a number of new tokens and the timeline to fill in.
        due: seconds from the start, one for each prompt.
    """
    start = time.perf_counter()

    async def one(prompt: Any, output_len: int, at: float) -> Timeline:
        timeline = Timeline(len(prompt), due=start + at)
        await asyncio.sleep(timeline.due - time.perf_counter())
        await send(prompt, output_len, timeline)
        return timeline

    tasks = [one(*request) for request in zip(prompts, output_lens, due, strict=True)]
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
    return {
        "duration": duration,
        "completed": len(complete),
        "failed": len(timelines) - len(complete),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(complete) / duration,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        **statistics_ms(latencies(complete), PERCENTILES),
    }


def latencies(timelines: Sequence[Timeline]) -> dict[str, list[float]]:
    """Return seconds of all requests by metric."""
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for timeline in timelines:
        first, last = timeline.arrivals[0], timeline.arrivals[-1]
        values["ttft"].append(first)
        values["e2el"].append(last)
        if timeline.num_tokens > 1:
            values["tpot"].append((last - first) / (timeline.num_tokens - 1))
        values["itl"].extend(np.diff(timeline.arrivals).tolist())
    return values


def statistics_ms(values: Mapping[str, list[float]], shares: Sequence[int]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles of each metric, seconds in milliseconds."""
    figures: dict[str, float] = {}
    for name, seconds in values.items():
        milliseconds = np.array(seconds or [0.0]) * 1e3
        figures[f"mean_{name}_ms"] = float(milliseconds.mean())
        figures[f"median_{name}_ms"] = float(np.median(milliseconds))
        figures[f"std_{name}_ms"] = float(milliseconds.std())
        for share in shares:
            figures[f"p{share}_{name}_ms"] = float(np.percentile(milliseconds, share))
    return figures
