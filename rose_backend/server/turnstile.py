"""Lets few new requests through between two turns of the streams that run already."""

from __future__ import annotations

import asyncio
from collections import deque

MAX_PER_TURN = 4
"""Reading, checking and tokenizing that many short requests takes less than a round of pieces for 64 streams, which may
be in each turn. With fewer, such rounds would decide how many requests can begin in a second."""


class Turnstile:
    """Where new requests queue up, in order, when many come at once.

    The event loop serves whatever is ready in one turn: without this, a burst of requests would be prepared altogether
    before the next piece of any text is sent. For one event loop.
    """

    def __init__(self) -> None:
        self._num_passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def pass_through(self) -> None:
        """Return in this turn of the event loop, or in a later one."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop)
        if self._num_passed < MAX_PER_TURN:
            self._num_passed += 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_passed = 0
        while self._waiting and self._num_passed < MAX_PER_TURN:
            waiter = self._waiting.popleft()
            # Else it has been cancelled.
            if not waiter.done():
                waiter.set_result(None)
                self._num_passed += 1
        self._is_turning = self._num_passed > 0
        if self._is_turning:
            loop.call_soon(self._turn, loop)
