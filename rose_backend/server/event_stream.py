"""Answers that end when the client leaves: streams of events, and work that is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rose_backend.server.error_answers import CLIENT_LEFT
from rose_backend.server.request_record import RequestRecord

T = TypeVar("T")

_HEADERS = {
    "Cache-Control": "no-cache",
    # Proxies like nginx would collect events before they pass them on.
    "X-Accel-Buffering": "no",
}


class EventStream(StreamingResponse):
    """Sends server-sent events as they come.

    Args:
        events: encoded events. Cancelled when the client leaves.
        record: told when that happens.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], record: RequestRecord) -> None:
        super().__init__(events, headers=_HEADERS, media_type="text/event-stream")
        self._events = events
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client has left."""
        try:
            async with aclosing(self._events):
                await unless_disconnected(receive, self.stream_response(send))
        except ClientDisconnect:
            self._record.status = CLIENT_LEFT


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``, and cancel it when the client leaves first.

    Args:
        receive: of a request whose body has been read.

    Raises:
        ClientDisconnect: it has left.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
