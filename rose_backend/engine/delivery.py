"""The last stretch of an output's way: from the text thread to callers on event loops."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Iterable

from rose_backend.engine.outputs import RequestOutput
from rose_backend.errors import EngineDeadError, RequestError

Delivery = RequestOutput | RequestError | EngineDeadError

_MAX_LAG_S = 0.05
"""A loop that is busy for longer than that with something else is not waited for."""


class Subscriber:
    """What one caller, on an event loop, gets for its request. A queue for one reader: cheaper than asyncio's."""

    __slots__ = ("_deliveries", "_num_posted", "_num_taken", "_waiter", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._deliveries: deque[Delivery] = deque()
        self._waiter: asyncio.Future[None] | None = None
        # Each is counted by one thread alone.
        self._num_posted = 0
        self._num_taken = 0

    @property
    def has_taken_all(self) -> bool:
        """Whether nothing is on its way. Any thread may ask."""
        return self._num_posted == self._num_taken

    def note_posted(self) -> None:
        """Count a delivery that is on its way from now on."""
        self._num_posted += 1

    def put(self, delivery: Delivery) -> None:
        """Hand something to the caller. In the loop's thread."""
        self._deliveries.append(delivery)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Delivery:
        """Return the next delivery."""
        while not self._deliveries:
            self._waiter = self.loop.create_future()
            await self._waiter
        self._num_taken += 1
        return self._deliveries.popleft()


class Postman:
    """Takes deliveries to event loops, one wake-up for all of a loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._is_quiet = threading.Event()
        self._is_quiet.set()

    def post(self, deliveries: Iterable[tuple[Subscriber, Delivery]]) -> list[tuple[Subscriber, Delivery]]:
        """Hand over from any thread; returns the deliveries whose loop is closed."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Subscriber, Delivery]]] = defaultdict(list)
        for subscriber, delivery in deliveries:
            subscriber.note_posted()
            by_loop[subscriber.loop].append((subscriber, delivery))
        unreachable: list[tuple[Subscriber, Delivery]] = []
        for loop, batch in by_loop.items():
            self._count(1)
            try:
                loop.call_soon_threadsafe(self._put_all, loop, batch)
            except RuntimeError:  # the loop is closed
                self._count(-1)
                unreachable.extend(batch)
        return unreachable

    def wait_until_seen(self) -> None:
        """Wait until the callers have had their turn with what was posted, but not for ever."""
        self._is_quiet.wait(_MAX_LAG_S)

    def _put_all(self, loop: asyncio.AbstractEventLoop, batch: list[tuple[Subscriber, Delivery]]) -> None:
        for subscriber, delivery in batch:
            subscriber.put(delivery)
        # Behind the callers' tasks, which have just become ready to run.
        loop.call_soon(self._count, -1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_open += change
            if self._num_open:
                self._is_quiet.clear()
            else:
                self._is_quiet.set()
