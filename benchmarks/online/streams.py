"""Keep streams running on an engine while prompts arrive, and time the gaps between their pieces.

A gap is the time between two pieces of one stream, as its consumer gets them from the engine's client in the same
process. Where a consumer or a client falls behind, what a stream has waiting is joined: a piece has several tokens and
a gap stands for several steps. ``tokens_per_piece`` tells, and ``client_busy`` near 1 says that the client was the
limit. Between the last piece of a stream and the first one of the stream that takes its place there is no gap.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.online.timeline import Stream, play, sender, summary
from benchmarks.support.workload import HeldStreams

GAP_PERCENTILES = (50, 90, 99)
_OF_PROMPTS = ("completed", "p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")


@dataclass
class Pieces:
    """One stream's answer."""

    times: list[float] = field(default_factory=list)
    """When each piece came, on the clock of ``time.perf_counter``."""
    counts: list[int] = field(default_factory=list)
    """Tokens of each piece."""


class _Places:
    """In each of ``num_streams`` places one stream follows the other, up to ``end``."""

    def __init__(self, stream: Stream, load: HeldStreams) -> None:
        self._stream, self._load = stream, load
        self._num_silent = load.num_streams
        self.all_run = asyncio.Event()
        """All places have had a piece."""
        self.end = float("inf")
        """Streams end with the first piece behind it, so that the last gap of each is whole."""
        self.answers: list[Pieces] = []

    async def hold(self, index: int) -> None:
        """Let streams run in one place."""
        for number, (prompt, output_len) in enumerate(self._load.prompts(index)):
            if time.perf_counter() >= self.end:
                return
            await self._run(prompt, output_len, is_first=number == 0)

    async def _run(self, prompt: list[int], output_len: int, *, is_first: bool) -> None:
        """Let one stream run; nothing but the clock and two lists between its pieces."""
        answer = Pieces()
        self.answers.append(answer)
        times, counts = answer.times, answer.counts
        async with aclosing(self._stream(prompt, output_len)) as pieces:
            async for num_tokens in pieces:
                if not num_tokens:
                    continue
                now = time.perf_counter()
                times.append(now)
                counts.append(num_tokens)
                if is_first:
                    is_first = False
                    self._note_first_piece()
                if now >= self.end:
                    return
        if sum(counts) != output_len:
            raise RuntimeError(f"a stream got {sum(counts)} new tokens, {output_len} were asked for")

    def _note_first_piece(self) -> None:
        self._num_silent -= 1
        if not self._num_silent:
            self.all_run.set()


async def hold_streams(stream: Stream, load: HeldStreams) -> dict[str, Any]:
    """Start all streams, then send what arrives at its times; return figures from the first due time to the end.

    Milliseconds: gaps of the streams, TTFT and ITL of what arrived (``ttfts_ms`` are all, in order); tokens per second
    are of both together. The consumer's share of a core, ``client_busy``, is its whole process's: the engine's client
    is part of it.

    Raises:
        RuntimeError: an answer is shorter than was asked for.
        Exception: whatever the engine raises.
    """
    places = _Places(stream, load)
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(load.num_streams):
                group.create_task(places.hold(index))
            await places.all_run.wait()
            await asyncio.sleep(load.settle_s)
            start, used = time.perf_counter(), time.process_time()
            timelines, _ = await play(sender(stream), load.arriving, start)
            await asyncio.sleep(start + load.seconds - time.perf_counter())
            places.end = end = time.perf_counter()
            busy = (time.process_time() - used) / (end - start)
    except ExceptionGroup as failures:
        # Of one engine: the first says why.
        raise failures.exceptions[0] from None
    asked, got = sum(load.arriving.output_lens), sum(timeline.num_tokens for timeline in timelines)
    if got != asked:
        raise RuntimeError(f"got {got} new tokens, {asked} were asked for")
    prompts = summary(timelines, end - start)
    of_streams = gap_figures(places.answers, start, end)
    num_tokens = of_streams.pop("num_tokens") + asked
    return {
        "duration": end - start,
        **of_streams,
        **{name: prompts[name] for name in _OF_PROMPTS},
        "ttfts_ms": [timeline.arrivals[0] * 1e3 for timeline in timelines],
        "output_throughput": num_tokens / (end - start),
        "client_busy": busy,
    }


def gap_figures(answers: Sequence[Pieces], start: float, end: float) -> dict[str, Any]:
    """Return figures of all gaps of which a part lies between two times, and of the tokens that came between them.

    Raises:
        RuntimeError: there was no gap.
    """
    gaps, num_pieces, num_tokens = [np.empty(0)], 0, 0
    for answer in answers:
        times, counts = np.array(answer.times), np.array(answer.counts)
        gaps.append(np.diff(times)[(times[1:] > start) & (times[:-1] < end)])
        came = (times > start) & (times <= end)
        num_pieces += int(came.sum())
        num_tokens += int(counts[came].sum())
    milliseconds = np.concatenate(gaps) * 1e3
    if not len(milliseconds):
        raise RuntimeError("no stream had two pieces while prompts arrived")
    figures = {f"p{share}_gap_ms": float(np.percentile(milliseconds, share)) for share in GAP_PERCENTILES}
    return {
        "num_gaps": len(milliseconds),
        **figures,
        "max_gap_ms": float(milliseconds.max()),
        "num_tokens": num_tokens,
        "tokens_per_piece": num_tokens / max(num_pieces, 1),
    }


def together(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one engine's figures of several turns.

    Medians of its turns; but the longest gap of all, and TTFT percentiles of all prompts together, as a turn has too
    few for a p99. ``gap_tail`` is the gaps' p99 over their median.
    """
    ttfts = list(itertools.chain.from_iterable(turn["ttfts_ms"] for turn in turns))
    names = [name for name in turns[0] if name != "ttfts_ms"]
    figures = {name: statistics.median(turn[name] for turn in turns) for name in names}
    figures |= {f"p{share}_ttft_ms": float(np.percentile(ttfts, share)) for share in GAP_PERCENTILES}
    return {
        **figures,
        "completed": sum(turn["completed"] for turn in turns),
        "max_gap_ms": max(turn["max_gap_ms"] for turn in turns),
        "gap_tail": figures["p99_gap_ms"] / figures["p50_gap_ms"],
    }
