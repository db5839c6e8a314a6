"""The output thread and stream consumers work half of the time at most; a stuck consumer stops no other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rose_backend.engine import async_engine, output_thread
from rose_backend.engine.async_engine import OutputDispatcher
from rose_backend.engine.client import OutputStream
from rose_backend.engine.output_thread import Abort, OutputHandler, OutputProcessor, OutputThread
from rose_backend.engine.outputs import CompletionOutput, RequestOutput
from rose_backend.errors import RequestError
from tests.support.patience import HANG_S


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


class Harness:
    """A worker, and the rounds of outputs it has delivered."""

    def __init__(
        self, wait_until_consumed: Callable[[], None], is_ready: Callable[[str], bool] = lambda _: True
    ):
        self.rounds: list[list[Output]] = []
        output_handler = OutputHandler(cast(Any, self.rounds.append), is_ready, wait_until_consumed)
        self.worker = OutputThread(cast(OutputProcessor, Processor()), output_handler)

    def post(self, *requests: Request, is_urgent: bool = False) -> None:
        self.worker.post(cast(Abort, requests), is_urgent=is_urgent)

    def wait_for(self, num_rounds: int) -> None:
        deadline = time.monotonic() + HANG_S
        while len(self.rounds) < num_rounds and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(self.rounds) >= num_rounds

    def close(self) -> list[list[Output]]:
        self.worker.stop()
        self.worker.join()
        assert self.worker.failure is None
        return self.rounds


class Clock:
    """A time of its own, in which things are posted, and which passes only while the worker waits or consumers read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.arrivals: deque[tuple[float, bool, tuple[Request, ...]]] = deque()
        """When it comes, whether it is urgent, and what it is; in order of time."""
        self.post: Callable[..., None] = lambda *requests, is_urgent: None

    def pass_until(self, end: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass with all that comes in it, or until something is over."""
        while self.arrivals and self.arrivals[0][0] <= end and not is_over():
            at, is_urgent, requests = self.arrivals.popleft()
            self.now = max(self.now, at)
            self.post(*requests, is_urgent=is_urgent)
        if not is_over():
            self.now = max(self.now, end)


@dataclass
class Call:
    """Stands for the event that wakes the worker."""

    clock: Clock
    is_set: bool = False

    def set(self) -> None:
        self.is_set = True

    def clear(self) -> None:
        self.is_set = False

    def wait(self, seconds: float | None) -> None:
        if seconds is None and not self.is_set and not self.clock.arrivals:
            raise NothingComesError
        until = self.clock.arrivals[-1][0] if seconds is None else self.clock.now + seconds
        if not self.is_set:
            self.clock.pass_until(until, lambda: self.is_set)


class NothingComesError(Exception):
    """The worker waits, and nobody will post anything."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the time of workers that are made from now on; their thread does not start."""
    clock = Clock()
    thread = SimpleNamespace(start=lambda: None)
    threads = SimpleNamespace(Event=lambda: Call(clock), Thread=lambda **options: thread)
    monkeypatch.setattr(output_thread, "threading", threads)
    monkeypatch.setattr(output_thread, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def work_off(clock: Clock, reading_s: Callable[[], float], note: list[float] | None = None) -> list[Output]:
    """Run a worker until all arrivals has come and has been delivered; return its outputs.

    Args:
        reading_s: how long consumers take with what is delivered, called once a round.
        note: takes what the worker wants to wait at most, each time.
    """
    harness = Harness(lambda: clock.pass_until(clock.now + reading_s()))
    clock.post = harness.post
    time_to_wait = harness.worker._time_to_wait

    def noting(back_off_until: float) -> float | None:
        wait_s = time_to_wait(back_off_until)
        if note is not None:
            note.append(wait_s or 0.0)
        return wait_s

    harness.worker._time_to_wait = noting  # type: ignore[method-assign]
    with pytest.raises(NothingComesError):
        harness.worker._run_throttled(lambda _: True)
    return [output for outputs in harness.rounds for output in outputs]


def test_consumers_and_output_thread_leave_half_of_the_time_to_others(clock: Clock) -> None:
    request = Request("one")
    clock.arrivals.extend((index * 0.001, False, (request,)) for index in range(400))
    outputs = work_off(clock, lambda: 0.01)
    # Ten milliseconds of consumers' work, ten of rest.
    assert [later.at - sooner.at for sooner, later in pairwise(outputs)] == pytest.approx([0.02] * 20)
    # What came meanwhile is one piece.
    assert outputs[-1].num_tokens == 400


def test_a_back_off_is_as_long_as_the_average_round(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_thread, "_MAX_BACK_OFF_S", 0.5)
    seconds = [0.01] * 4 + [0.2] + [0.01] * 20
    request, rests = Request("one"), list[float]()
    clock.arrivals.extend((index * 0.001, False, (request,)) for index in range(600))
    outputs = work_off(clock, lambda: seconds.pop(0), rests)
    # The slow round itself holds everybody up, but they do not rest for two tenths of a second behind it.
    assert 0.2 < outputs[5].at - outputs[4].at < 0.23
    assert 0.02 < max(rests) < 0.025


def test_first_tokens_bypass_the_back_off(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_thread, "_MAX_BACK_OFF_S", 0.6)
    old, new = Request("old"), Request("new")
    clock.arrivals.extend([(0.0, False, (old,)), (0.7, False, (old,)), (0.8, True, (old, new))])
    outputs = work_off(clock, lambda: 0.6)
    # The others have their rest, and then all of their text.
    assert [(output.request_id, output.num_tokens, round(output.at, 3)) for output in outputs[:3]] == [
        ("old", 1, 0.0),
        ("new", 1, 0.8),
        ("old", 3, 1.2),
    ]


def test_a_round_serves_the_streams_that_have_waited_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_thread, "_MAX_ROUND", 3)
    gate = threading.Event()
    harness = Harness(lambda: cast(None, gate.wait(HANG_S)), is_ready=lambda name: name != "b")
    requests = [Request(name, has_output=True) for name in "abcdefgh"]
    harness.post(Request("z"))
    harness.wait_for(1)
    harness.post(*requests)
    harness.post(requests[7], requests[0])
    gate.set()
    harness.wait_for(4)
    rounds = harness.close()
    assert ["".join(each.request_id for each in outputs) for outputs in rounds] == ["z", "acd", "efg", "h"]
    assert rounds[1][0].num_tokens == rounds[3][0].num_tokens == 2


def test_deliveries_to_loops_that_live_and_that_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever waits for a loop that is closed, or for one that has taken all, hangs.
    monkeypatch.setattr(async_engine, "_MAX_LAG_S", 10 * HANG_S)
    dispatcher = OutputDispatcher()
    dispatcher.wait_until_consumed()  # nothing is on its way

    async def body() -> None:
        stream = OutputStream("r", asyncio.get_running_loop())
        first, second, third = (
            RequestOutput("r", None, [], [CompletionOutput(0, text, [])]) for text in "abc"
        )
        assert stream.has_consumed_all
        assert dispatcher.post([(stream, first), (stream, second)]) == []
        assert not stream.has_consumed_all
        waiting = asyncio.get_running_loop().run_in_executor(None, dispatcher.wait_until_consumed)
        assert (await stream.get()).outputs[0].text == "ab"
        assert stream.has_consumed_all
        await asyncio.wait_for(waiting, HANG_S)
        cancelled = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        error = RequestError("refused")
        dispatcher.post([(stream, third), (stream, error)])
        assert await stream.get() is third
        with pytest.raises(RequestError) as raised:
            await stream.get()
        assert raised.value is error

    asyncio.run(body())
    loop = asyncio.new_event_loop()
    loop.close()
    lost = (OutputStream("r", loop), RequestError("nobody hears it"))
    assert dispatcher.post([lost]) == [lost]
    dispatcher.wait_until_consumed()
