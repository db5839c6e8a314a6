"""The text thread and its readers: at work half of the time at most, and stopped by nobody."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rose_backend.engine import delivery
from rose_backend.engine.delivery import Postman, Subscriber
from rose_backend.engine.output_processor import Abort, OutputProcessor
from rose_backend.engine.text_worker import OutputSink, Readers, TextWorker
from rose_backend.errors import RequestError


class Request:
    request_id = "one"
    is_finished = False


class Processor:
    """Every message is a token of one stream."""

    def __init__(self) -> None:
        self.request = Request()
        self.num_tokens = 0

    def process(self, message: Any) -> Any:
        self.num_tokens += 1
        return [self.request], {}

    def request_output(self, request: Request) -> Any:
        return SimpleNamespace(request_id="one", finished=False, num_tokens=self.num_tokens)


def test_readers_and_texts_leave_half_of_the_time_to_others() -> None:
    rounds: list[tuple[float, int]] = []
    readers = Readers(lambda _: True, lambda: time.sleep(0.01))
    sink = OutputSink(lambda outputs: rounds.append((time.monotonic(), outputs[0].num_tokens)), readers)  # type: ignore[attr-defined]
    worker = TextWorker(cast(OutputProcessor, Processor()), sink)
    start = time.monotonic()
    while time.monotonic() - start < 0.4:
        worker.post(cast(Abort, object()))
        time.sleep(0.001)
    worker.stop()
    worker.join()
    # Ten milliseconds of readers' work, ten of rest; a slow machine only makes it fewer rounds.
    assert 2 < len(rounds) <= 22
    assert all(later - sooner > 0.019 for (sooner, _), (later, _) in pairwise(rounds))
    # What came meanwhile is one piece.
    assert rounds[-1][1] > 2 * len(rounds)


def test_deliveries_to_loops_that_live_and_that_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_MAX_LAG_S", 30.0)
    start = time.monotonic()
    postman = Postman()
    postman.wait_until_seen()  # nothing is on its way

    async def body() -> None:
        subscriber = Subscriber(asyncio.get_running_loop())
        first, second = RequestError("first"), RequestError("second")
        assert subscriber.has_taken_all
        assert postman.post([(subscriber, first), (subscriber, second)]) == []
        assert not subscriber.has_taken_all
        waiting = asyncio.get_running_loop().run_in_executor(None, postman.wait_until_seen)
        assert [await subscriber.get(), await subscriber.get()] == [first, second]
        assert subscriber.has_taken_all
        await asyncio.wait_for(waiting, 10.0)
        cancelled = asyncio.create_task(subscriber.get())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        postman.post([(subscriber, first)])
        assert await subscriber.get() is first

    asyncio.run(body())
    loop = asyncio.new_event_loop()
    loop.close()
    lost = (Subscriber(loop), RequestError("nobody hears it"))
    assert postman.post([lost]) == [lost]
    postman.wait_until_seen()
    assert time.monotonic() - start < 20.0
