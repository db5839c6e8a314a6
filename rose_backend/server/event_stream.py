"""Answers that end when the client leaves: streams of events, and work that is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rose_backend.server.error_answers import CLIENT_LEFT
from rose_backend.server.request_record import RequestRecord

_HEADERS = [
    (b"cache-control", b"no-cache"),
    # Proxies like nginx would collect events before they pass them on.
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


class ClientWatch:
    """Cancels what its caller's task does in ``async with`` when the client leaves, and turns that into an exception.

    One task that waits is all it takes, for any number of such blocks one after the other: work in a task of its own
    would cost each stream more than its first piece of text.

    Args:
        receive: of a request whose body has been read.

    Raises:
        ClientDisconnect: from a block, if the client has left before its end.
    """

    def __init__(self, receive: Receive) -> None:
        self._worker: asyncio.Task[object] | None = None
        self._num_cancellations = 0
        self._has_left = False
        self._watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
        self._watcher.add_done_callback(self._note_disconnect)

    async def __aenter__(self) -> None:
        if self._has_left:
            raise ClientDisconnect
        self._worker = asyncio.current_task()
        assert self._worker is not None, "a coroutine runs in a task"
        self._num_cancellations = self._worker.cancelling()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        worker, self._worker = self._worker, None
        is_ours = self._has_left and worker is not None and worker.uncancel() <= self._num_cancellations
        # Somebody else may have cancelled the task as well: that goes on.
        if is_ours and kind is asyncio.CancelledError:
            raise ClientDisconnect from error

    def close(self) -> None:
        """Watch no longer."""
        self._watcher.remove_done_callback(self._note_disconnect)
        self._watcher.cancel()

    def _note_disconnect(self, watcher: asyncio.Future[None]) -> None:
        if watcher.cancelled():
            return
        watcher.exception()  # whatever it is, nobody can be answered any more
        self._has_left = True
        if self._worker is not None:
            self._worker.cancel()


class EventStream(Response):
    """Sends server-sent events as they come.

    Args:
        outputs: what the events are made from; closed at the end.
        send_events: sends all events, given what sends a message. Cancelled when the client leaves.
        watch: of the client; closed at the end.
        record: told when the client leaves.
    """

    def __init__(
        self,
        outputs: AsyncGenerator[object, None],
        send_events: Callable[[Send], Awaitable[None]],
        watch: ClientWatch,
        record: RequestRecord,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.raw_headers = _HEADERS
        self._outputs = outputs
        self._send_events = send_events
        self._watch = watch
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client has left."""
        try:
            async with aclosing(self._outputs), self._watch:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_events(send)
        except ClientDisconnect:
            self._record.status = CLIENT_LEFT
        finally:
            self._watch.close()


def events_message(events: bytes, *, is_last: bool = False) -> Message:
    """Return what sends encoded events."""
    return {"type": "http.response.body", "body": events, "more_body": not is_last}


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
