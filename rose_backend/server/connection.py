"""One HTTP connection, with the limits that hold before anybody has shown a key: bytes, time, number."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.server import ServerState

from rose_backend.server.error_answers import ApiError
from rose_backend.server.request_record import RequestRecord
from rose_backend.server.service import Service
from rose_backend.server.settings import RETRY_AFTER_S
from rose_backend.server.unread_answers import ReadConnection, ServiceConfig

_LINGER_S = 2.0
"""How long a refused client may go on sending. Closed at once, it would be cut off before it reads the answer."""
MAX_LINGERING = 64
"""Connections that do so, beyond those that are allowed. More are closed at once."""
MAX_PIPELINED = 16
"""Requests that may wait on one connection for the answer to an earlier one. uvicorn keeps any number."""


class ConnectionConfig(ServiceConfig):
    """uvicorn's configuration for these connections."""

    def __init__(self, app: Any, service: Service, **options: Any) -> None:
        super().__init__(app, service, http=Connection, **options)
        self.lingering: set[Connection] = set()


class Connection(ReadConnection):
    """uvicorn's protocol, which takes headers of any size and waits for them without end.

    What is counted and timed here is only what comes before a request is complete: answers pass without a step more.
    At any moment an answer is under way, or a timer runs at whose end the connection is closed.
    """

    def __init__(
        self,
        config: ConnectionConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._service = config.service
        self._settings = config.service.settings
        self._lingering = config.lingering
        self.timeout_keep_alive = self._settings.keep_alive_timeout_s  # type: ignore[assignment]
        self._is_refused = False
        self._refusal: ApiError | None = None
        self._awaits_header = True
        self._num_headers = 0
        # Since the last end of a header, piece of a body, or end of a request. One header that begins right behind such
        # an end is counted from the next piece that comes, so it may have up to twice what is allowed.
        self._num_pending_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        # The one that is being answered; uvicorn keeps the newest.
        self._running: RequestResponseCycle | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self._settings.max_connections
        if len(self.connections) > limit:
            # Rather than leave it unaccepted: a client, or whatever balances loads, learns that it must go elsewhere.
            self._refuse(
                ApiError(
                    503,
                    f"the server has as many connections as it may: {limit} (max_connections)",
                    code="too_many_connections",
                    retry_after=str(RETRY_AFTER_S),
                )
            )
        else:
            self._start_timer(self._settings.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lingering.discard(self)
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # The parser keeps an unfinished header to itself, so bytes are counted before it gets them.
        while data and not self._is_refused and not self.transport.is_closing():
            room = self._settings.max_header_bytes - self._num_pending_bytes
            if room <= 0:
                self._refuse(
                    _header_too_large(
                        f"more than {self._settings.max_header_bytes} bytes", "max_header_bytes"
                    )
                )
                return
            piece, data = data[:room], data[room:]
            self._num_pending_bytes += len(piece)
            super().data_received(piece)
        if self._timer is None and not self._is_refused:
            if not self._awaits_header:
                self._start_timer(self._settings.body_timeout_s)
            elif self._num_pending_bytes:
                self._start_timer(self._settings.header_timeout_s)
            elif self._is_idle and not self.transport.is_closing():
                # The rest of a body that was answered before it had come. uvicorn has stopped waiting for its end.
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._num_headers = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Those behind a chunked body, too.
        self._num_headers += 1
        limit = self._settings.max_headers
        if self._num_headers > limit:
            self._refusal = _header_too_large(f"more than {limit} headers", "max_headers")
            # Ends the parser, which has the connection answered by send_400_response.
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            # Ends the parser, and with it the connection: nothing can be said in the middle of another answer.
            raise _header_too_large(f"more than {MAX_PIPELINED} requests in advance", "pipelined requests")
        self._awaits_header = False
        self._num_pending_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.pipeline:
            # uvicorn stops reading, and would not see the client leave while it answers the request before.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._num_pending_bytes = 0
        if self.pipeline and len(self.cycle.body) + len(body) > HIGH_WATER_LIMIT:
            raise _header_too_large(
                f"a body of more than {HIGH_WATER_LIMIT} bytes in advance", "pipelined requests"
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._awaits_header = True
        self._num_pending_bytes = 0
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser could not read, in the shape of all other errors."""
        self._refuse(self._refusal or ApiError(400, "request: not valid HTTP", code="invalid_http"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # Timers.

    def _start_timer(self, timeout_s: float) -> None:
        self._timer = self.loop.call_later(timeout_s, self._note_timeout, timeout_s)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note_timeout(self, timeout_s: float) -> None:
        self._timer = None
        if not self._is_idle:
            # The gate times a body that is read; a header in advance of an answer can wait for its end.
            self._start_timer(timeout_s)
        elif self._awaits_header:
            self._refuse(
                ApiError(408, f"header: not complete after {timeout_s:g} seconds", code="header_timeout")
            )
        else:
            # Answered without its body, which never ends.
            self._close()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # Refusals.

    def _refuse(self, refusal: ApiError) -> None:
        """Answer, if no other answer is under way, and close."""
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        # It does not count among the others any longer, and nobody waits for it.
        self.connections.discard(self)
        if not self._take_over():
            self._close()
            return
        record = RequestRecord(
            secrets.token_hex(16), "other", status=refusal.status_code, error=refusal.detail
        )
        self.transport.write(self._as_bytes(refusal, record.request_id))
        self._service.metrics.count_response(record.route, record.status)
        if self._settings.log_requests:
            record.log()
        if len(self._lingering) < MAX_LINGERING and self.transport.can_write_eof():
            self._lingering.add(self)
            self.transport.write_eof()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)
        else:
            self._close()

    def _close(self) -> None:
        """Close, soon also against a client that does not read what is left for it."""
        self.transport.close()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _take_over(self) -> bool:
        """Keep the application from answering a request that has not come as a whole. False: it does already."""
        if self._is_idle:
            return True
        if self.pipeline or self.cycle.response_started or not self.cycle.more_body:
            return False
        self.cycle.disconnected = True
        self.cycle.waiting_for_100_continue = False
        self.cycle.message_event.set()
        return True

    def _as_bytes(self, refusal: ApiError, request_id: str) -> bytes:
        answer = refusal.response()
        headers = [
            *self.server_state.default_headers,
            *answer.raw_headers,
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        return b"".join([STATUS_LINE[refusal.status_code], *lines, b"\r\n", answer.body])


def _header_too_large(got: str, limit: str) -> ApiError:
    return ApiError(
        431, f"header: got {got}, which is all that is allowed ({limit})", code="header_too_large"
    )
