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
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from benchmarks.online.timeline import Timeline, play
from benchmarks.support.workload import Requests

# From when all processes have what they are to send, to when they begin.
_LEAD_S = 0.2


@dataclass(frozen=True)
class Load:
    """Requests for one server: its address, the model as it calls it, and fields of each request."""

    url: str
    model: str
    sampling: Mapping[str, Any]
    requests: Requests


@dataclass(frozen=True)
class Replay:
    """What came back.

    Attributes:
        timelines: of all requests, in no order.
        duration: seconds from the start to the last piece.
        client_busy: share of a core that the busiest process of the client used.
        client_late_s: how much after the start the last process of the client began; its requests count as due before.
    """

    timelines: list[Timeline]
    duration: float
    client_busy: float
    client_late_s: float


class Client:
    """Streams /v1/completions and keeps what comes; ``note_answers`` takes it apart.

    Args:
        session: shared by all requests.
        load: where to send, and what every request has in common.
    """

    def __init__(self, session: aiohttp.ClientSession, load: Load) -> None:
        self._session, self._url = session, f"{load.url}/v1/completions"
        self._fields = {
            "model": load.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **load.sampling,
        }
        self._answers: list[tuple[Timeline, int, list[tuple[float, bytes]]]] = []

    async def send(self, prompt: list[int], output_len: int, timeline: Timeline) -> None:
        """Send one request and keep its answer. A failure is noted in the timeline."""
        body = {**self._fields, "prompt": prompt, "max_tokens": output_len}
        chunks: list[tuple[float, bytes]] = []
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    timeline.error = f"{response.status}: {(await response.text())[:300]}"
                    return
                async for chunk in response.content.iter_any():
                    chunks.append((time.perf_counter(), chunk))
        except (aiohttp.ClientError, TimeoutError) as error:
            timeline.error = f"{type(error).__name__}: {error}"
            return
        self._answers.append((timeline, output_len, chunks))

    def note_answers(self) -> None:
        """Fill in all timelines."""
        for timeline, output_len, chunks in self._answers:
            try:
                note_answer(chunks, timeline)
            except ValueError as error:
                timeline.error = f"{type(error).__name__}: {error}"
                continue
            if timeline.num_tokens != output_len:
                timeline.error = f"got {timeline.num_tokens} new tokens, {output_len} were asked for"
        self._answers.clear()


def note_answer(chunks: Sequence[tuple[float, bytes]], timeline: Timeline) -> None:
    """Note every piece that has a choice; tokens are what the server counts, as a piece may have several.

    Args:
        chunks: the answer's bytes and when they came, on the clock of ``time.perf_counter``. An event came when its end
            came.

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


def client_session() -> aiohttp.ClientSession:
    """Return a session without limits: the trace alone says how many requests there are at once."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=120)
    )


class ClientProcesses:
    """The client's processes, each with one task at a time."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes = [ProcessPoolExecutor(1, mp_context=context) for _ in range(count)]
        for process in self._processes:
            process.submit(gc.freeze)

    def __len__(self) -> int:
        return len(self._processes)

    def send_whole(self, load: Load, index: int) -> Future[Replay]:
        """Let one process send all of ``load`` as soon as it has nothing else to do."""
        return self._processes[index % len(self)].submit(_replay, load, None)

    def send(self, load: Load) -> Replay:
        """Send from all processes at once; return what came back."""
        parts_of = (load.requests.share(index, len(self)) for index in range(len(self)))
        shares = [replace(load, requests=requests) for requests in parts_of]
        for ready in [process.submit(gc.collect) for process in self._processes]:
            ready.result()
        start = time.perf_counter() + _LEAD_S
        parts = [
            process.submit(_replay, share, start)
            for process, share in zip(self._processes, shares, strict=True)
        ]
        replays = [part.result() for part in parts]
        return Replay(
            [timeline for replay in replays for timeline in replay.timelines],
            *(
                max(getattr(replay, name) for replay in replays)
                for name in ("duration", "client_busy", "client_late_s")
            ),
        )

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.shutdown(cancel_futures=True)


def _replay(load: Load, start: float | None) -> Replay:
    """Send ``load`` from ``start`` on, on the clock that all processes of a machine share; None is at once."""
    gc.disable()
    try:
        return asyncio.run(_play(load, start))
    finally:
        gc.enable()


async def _play(load: Load, start: float | None) -> Replay:
    async with client_session() as session:
        client = Client(session, load)
        now = time.perf_counter()
        start = now if start is None else start
        await asyncio.sleep(max(start - now, 0.0))
        used, offset = time.process_time(), start - time.perf_counter()
        requests = load.requests
        due = [offset + at for at in requests.due]
        timelines, wall = await play(client.send, requests.prompts, requests.output_lens, due)
        used = time.process_time() - used
    client.note_answers()
    ends = (timeline.due + timeline.arrivals[-1] - start for timeline in timelines if timeline.arrivals)
    return Replay(timelines, max(ends, default=wall), used / wall, max(-offset, 0.0))
