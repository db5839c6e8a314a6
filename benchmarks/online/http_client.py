"""One client for all servers: streams /v1/completions from several processes at once.

A process reads about 25,000 pieces of answers a second; one that can hardly follow makes gaps of its own. Therefore the
requests of a trace are dealt out to several, pieces are only kept while answers come and taken apart afterwards, and
how busy the busiest process was is part of the result.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.online.timeline import Timeline, play
from benchmarks.support.workload import Requests

# From when all processes have what they are to send, to when they begin.
_LEAD_S = 0.2
Chunk = tuple[float, bytes]
"""When it came, on the clock of ``time.perf_counter``, and some bytes of an answer."""


@dataclass(frozen=True)
class Replay:
    """What came back, in no order."""

    timelines: list[Timeline]
    duration: float
    """Seconds from the start to the last piece."""
    client_busy: float
    """Share of a core that the busiest process of the client used."""
    client_late_s: float
    """How much after the start its last process began; its requests count as due before."""


async def replay(url: str, fields: Mapping[str, Any], requests: Requests, start: float) -> Replay:
    """Send requests to a server from ``start`` on, on the clock that all processes of a machine share.

    A request that fails says so in its timeline.

    Args:
        fields: of each request: the model, and how tokens are drawn.
    """
    streamed = {**fields, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    answers: list[tuple[Timeline, int, list[Chunk]]] = []

    async def send(prompt: list[int], output_len: int, timeline: Timeline) -> None:
        body = {**streamed, "prompt": prompt, "max_tokens": output_len}
        chunks: list[Chunk] = []
        try:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                if response.status != 200:
                    timeline.error = f"{response.status}: {(await response.text())[:300]}"
                    return
                async for chunk in response.content.iter_any():
                    chunks.append((time.perf_counter(), chunk))
        except (aiohttp.ClientError, TimeoutError) as error:
            timeline.error = f"{type(error).__name__}: {error}"
            return
        answers.append((timeline, output_len, chunks))

    # Without limits: the requests alone say how many there are at once.
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.sleep(start - time.perf_counter())
        began, used = time.perf_counter(), time.process_time()
        timelines, wall = await play(send, requests, start)
        busy = (time.process_time() - used) / (time.perf_counter() - began)
    for timeline, output_len, chunks in answers:
        try:
            note_answer(chunks, timeline)
        except ValueError as error:
            timeline.error = f"{type(error).__name__}: {error}"
        if not timeline.error and timeline.num_tokens != output_len:
            timeline.error = f"got {timeline.num_tokens} new tokens, {output_len} were asked for"
    ends = (timeline.due + timeline.arrivals[-1] - start for timeline in timelines if timeline.arrivals)
    return Replay(timelines, max(ends, default=wall), busy, max(began - start, 0.0))


def note_answer(chunks: Sequence[Chunk], timeline: Timeline) -> None:
    """Note every piece that has a choice; tokens are what the server counts, as a piece may have several.

    An event came when its end came.

    Raises:
        ValueError: the server reports an error, or what it sends is no JSON.
    """
    usage: dict[str, Any] | None = None
    rest = b""
    for at, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"]))
            if event.get("choices"):
                timeline.arrivals.append(at - timeline.due)
                timeline.num_tokens += 1
            usage = event.get("usage") or usage
    if usage is not None:
        timeline.num_tokens = usage["completion_tokens"]


class ClientProcesses:
    """The client's processes, each with one task at a time."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes = [ProcessPoolExecutor(1, context, _set_up) for _ in range(count)]

    def send(self, url: str, fields: Mapping[str, Any], requests: Requests) -> Replay:
        """Send from all processes at once, see ``replay``; return what came back."""
        count = len(self._processes)
        for ready in [process.submit(gc.collect) for process in self._processes]:
            ready.result()
        start = time.perf_counter() + _LEAD_S
        sent = [
            process.submit(_replay, url, fields, requests.share(index, count), start)
            for index, process in enumerate(self._processes)
        ]
        replays = [part.result() for part in sent]
        return Replay(
            timelines=[timeline for part in replays for timeline in part.timelines],
            duration=max(part.duration for part in replays),
            client_busy=max(part.client_busy for part in replays),
            client_late_s=max(part.client_late_s for part in replays),
        )

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.shutdown(cancel_futures=True)


def _set_up() -> None:
    """Collect no garbage but when asked to."""
    gc.freeze()
    gc.disable()


def _replay(*arguments: Any) -> Replay:
    return asyncio.run(replay(*arguments))
