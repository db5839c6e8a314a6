"""One engine in a process of its own: takes commands from a connection, and gives an answer to each.

    python -m benchmarks.support.worker DESCRIPTOR

    ("start", "offline" or "streaming", EngineOptions)  -> the engine's facts
    ("run", Requests, sampling)  -> offline: {"seconds": ..., "output_tokens": ...}, of one call with all requests;
                                    streaming: figures as ``vllm bench serve`` names them, of requests at their times
    ("close",)                   -> None

Answers are (answer, ""), failures (None, "what went wrong").
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.online.timeline import Timeline, play, summary
from benchmarks.support.engines import OFFLINE, STREAMING, EngineOptions, Sampling
from benchmarks.support.workload import Requests


class OfflineWorker:
    """Runs one engine's ``generate``."""

    def __init__(self, options: EngineOptions) -> None:
        self.engine = OFFLINE[options.backend](options)

    def run(self, requests: Requests, sampling: Sampling) -> dict[str, Any]:
        start = time.perf_counter()
        output_tokens = self.engine.generate(requests.prompts, requests.output_lens, sampling)
        seconds = time.perf_counter() - start
        check_output(output_tokens, requests)
        return {"seconds": seconds, "output_tokens": output_tokens}

    def close(self) -> None:
        self.engine.close()


class StreamingWorker:
    """Runs one engine's ``stream`` for many callers on one event loop."""

    def __init__(self, options: EngineOptions) -> None:
        self._runner = asyncio.Runner()

        async def make() -> Any:
            return STREAMING[options.backend](options)

        self.engine = self._runner.run(make())

    def run(self, requests: Requests, sampling: Sampling) -> dict[str, Any]:
        async def send(prompt: list[int], output_len: int, timeline: Timeline) -> None:
            async for num_tokens in self.engine.stream(prompt, output_len, sampling):
                if num_tokens:
                    timeline.arrivals.append(time.perf_counter() - timeline.due)
                    timeline.num_tokens += num_tokens

        timelines, duration = self._runner.run(play(send, requests))
        check_output(sum(timeline.num_tokens for timeline in timelines), requests)
        return summary(timelines, duration)

    def close(self) -> None:
        self._runner.run(self.engine.close())
        self._runner.close()


def check_output(output_tokens: int, requests: Requests) -> None:
    """Raise unless every token that was asked for has come."""
    if output_tokens != sum(requests.output_lens):
        raise RuntimeError(f"got {output_tokens} new tokens, {sum(requests.output_lens)} were asked for")


def start(kind: str, options: EngineOptions) -> Any:
    """Return a worker with its engine."""
    worker = {"offline": OfflineWorker, "streaming": StreamingWorker}[kind](options)
    # What is there stays: collections that look at all of it would hit some engine's run at random.
    gc.collect()
    gc.freeze()
    return worker


def serve_commands(connection: Connection) -> None:
    """Carry out what comes, until "close" or the end of the other process."""
    worker: Any = None
    op = ""
    while op != "close":
        try:
            op, *arguments = connection.recv()
        except EOFError:
            return
        try:
            if op == "start":
                worker = start(*arguments)
                answer = worker.engine.facts()
            else:
                answer = getattr(worker, op)(*arguments)
            connection.send((answer, ""))
        except Exception as error:
            traceback.print_exc()
            connection.send((None, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    serve_commands(Connection(descriptor))
