"""The text thread and its readers: at work half of the time at most, and stopped by nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import pytest

from rose_backend.engine import delivery, text_worker
from rose_backend.engine.delivery import Postman, Subscriber
from rose_backend.engine.output_processor import Abort, OutputProcessor
from rose_backend.engine.text_worker import OutputSink, Readers, TextWorker
from rose_backend.errors import RequestError


@dataclass(eq=False)
class Request:
    request_id: str
    num_tokens: int = 0
    has_output: bool = False
    is_finished = False


@dataclass(frozen=True)
class Output:
    request_id: str
    num_tokens: int
    at: float
    finished = False


class Processor:
    """A message is a list of requests, each of which gets a token."""

    def process(self, message: Any) -> Any:
        for request in message:
            request.num_tokens += 1
        return message, {}

    def request_output(self, request: Request) -> Output:
        request.has_output = True
        return Output(request.request_id, request.num_tokens, time.monotonic())


class Desk:
    """A worker, and the rounds of outputs it has delivered."""

    def __init__(self, wait_until_seen: Callable[[], None], is_ready: Callable[[str], bool] = lambda _: True):
        self.rounds: list[list[Output]] = []
        sink = OutputSink(cast(Any, self.rounds.append), Readers(is_ready, wait_until_seen))
        self.worker = TextWorker(cast(OutputProcessor, Processor()), sink)

    def post(self, *requests: Request, is_urgent: bool = False) -> None:
        self.worker.post(cast(Abort, requests), is_urgent=is_urgent)

    def wait_for(self, num_rounds: int) -> None:
        deadline = time.monotonic() + 20.0
        while len(self.rounds) < num_rounds and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(self.rounds) >= num_rounds

    def close(self) -> list[list[Output]]:
        self.worker.stop()
        self.worker.join()
        assert self.worker.failure is None
        return self.rounds


def test_readers_and_texts_leave_half_of_the_time_to_others() -> None:
    desk, request = Desk(lambda: time.sleep(0.01)), Request("one")
    start = time.monotonic()
    while time.monotonic() - start < 0.4:
        desk.post(request)
        time.sleep(0.001)
    outputs = [output for (output,) in desk.close()]
    # Ten milliseconds of readers' work, ten of rest; a slow machine only makes it fewer rounds.
    assert 2 < len(outputs) <= 22
    assert all(later.at - sooner.at > 0.019 for sooner, later in pairwise(outputs))
    # What came meanwhile is one piece.
    assert outputs[-1].num_tokens > 2 * len(outputs)


def test_a_rest_is_as_long_as_rounds_usually_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_worker, "_MAX_REST_S", 0.5)
    seconds = [0.01] * 4 + [0.2] + [0.01] * 20
    desk, request, rests = Desk(lambda: time.sleep(seconds.pop(0))), Request("one"), list[float]()
    time_to_wait = desk.worker._time_to_wait

    def noting(rest_until: float) -> float | None:
        wait_s = time_to_wait(rest_until)
        rests.append(wait_s or 0.0)
        return wait_s

    monkeypatch.setattr(desk.worker, "_time_to_wait", noting)
    while seconds:
        desk.post(request)
        time.sleep(0.001)
    outputs = [output for (output,) in desk.close()]
    # The slow round itself holds everybody up, but they do not rest for two tenths of a second behind it.
    assert outputs[5].at - outputs[4].at > 0.2
    assert 0.005 < max(rests) < 0.1


def test_first_tokens_do_not_wait_for_the_end_of_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_worker, "_MAX_REST_S", 0.6)
    is_resting = threading.Event()

    def look() -> None:
        time.sleep(0.6)
        is_resting.set()

    desk, old, new = Desk(look), Request("old"), Request("new")
    desk.post(old)
    assert is_resting.wait(20.0)
    start = time.monotonic()
    desk.post(old)
    desk.post(old, new, is_urgent=True)
    desk.wait_for(3)
    first, second, third = desk.close()[:3]
    assert [output.request_id for output in (*first, *second, *third)] == ["old", "new", "old"]
    # The others have their rest, and then all of their text.
    assert second[0].at - start < 0.3 < 0.5 < third[0].at - start
    assert third[0].num_tokens == 3 and second[0].num_tokens == 1


def test_a_round_is_for_those_who_have_waited_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_worker, "_MAX_ROUND", 3)
    gate = threading.Event()
    desk = Desk(lambda: cast(None, gate.wait(20.0)), is_ready=lambda name: name != "b")
    requests = [Request(name, has_output=True) for name in "abcdefgh"]
    desk.post(Request("z"))
    desk.wait_for(1)
    desk.post(*requests)
    desk.post(requests[7], requests[0])
    gate.set()
    desk.wait_for(4)
    rounds = desk.close()
    assert ["".join(each.request_id for each in outputs) for outputs in rounds] == ["z", "acd", "efg", "h"]
    assert rounds[1][0].num_tokens == rounds[3][0].num_tokens == 2


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
