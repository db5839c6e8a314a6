"""One HTTP connection, with limits that uvicorn lacks (bytes and time of a header, connections, unread answers), and
clients that close only their sending side."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import secrets
import select
import socket
import sys
import termios
from types import SimpleNamespace
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from rose_backend.server.error_answers import ApiError
from rose_backend.server.service import RequestRecord, Service
from rose_backend.server.settings import RETRY_AFTER_S

_CHECK_S = 0.1
"""How soon a client that has left is noticed; a shorter answer is sent without an interim one."""
_INTERIM_ANSWER = b"HTTP/1.1 100 Continue\r\n\r\n"


class HalfClosedWatch:
    """Aborts a connection whose client has closed its sending side when it turns out to have left.

    Some clients close their sending side and wait for the answer, as ``nc -N`` does. The same end of data arrives from
    one that has left. The two differ when something is sent: the system of a client that has left resets the
    connection. So an interim answer, ``100 Continue``, which clients of HTTP/1.1 skip, is sent before the real one; a
    Unix socket shows the difference without it.

    Args:
        cycle: the request that is being answered.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, cycle: RequestResponseCycle
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._cycle = cycle
        self._has_sent = False
        self._timer = loop.call_later(_CHECK_S, self._check)

    def close(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _check(self) -> None:
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        if self._transport.is_closing() or sock is None or sock.fileno() < 0:
            return
        if not self._has_sent and sock.family != socket.AF_UNIX and not self._cycle.response_started:
            if self._cycle.scope["http_version"] != "1.1":
                # It knows no interim answers, and most that end their data have left.
                self._transport.abort()
                return
            self._transport.write(_INTERIM_ANSWER)
            self._has_sent = True
        if _is_reset(sock):
            self._transport.abort()
            return
        self._timer = self._loop.call_later(_CHECK_S, self._check)


def _is_reset(sock: socket.socket) -> bool:
    """Return whether the other side takes nothing any more."""
    poll = select.poll()
    poll.register(sock.fileno(), 0)
    # Both are reported without being asked for. A side that only sends no more is no hang-up.
    return bool(poll.poll(0))


logger = logging.getLogger(__name__)

_LINGER_S = 2.0
"""How long a client whose request was answered before it was complete may pause while it sends the rest. It is dropped;
a connection closed at once is reset before the answer is read."""
_MAX_LINGER_S = 30.0
"""How long it may take to send the rest."""
_MAX_LINGER_BYTES = 64 << 20
"""How much more it may send."""
MAX_LINGERING = 64
"""Connections that may do so, beyond ``max_connections``. More are closed at once."""
MAX_PIPELINED = 16
"""Requests of one connection that may wait for the answer to an earlier one. uvicorn keeps any number."""


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration for these connections."""

    def __init__(self, app: Any, service: Service, **options: Any) -> None:
        super().__init__(app, http=Connection, **options)
        self.service = service
        self.lingering: set[Connection] = set()


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits on headers, idle time, the number of connections, and the time a client may take
    to read.

    Only the bytes of a request are counted and timed: answers pass without an extra step. At any time an answer is
    being sent, or a timer runs that closes the connection. It is aborted when the client has read nothing for
    ``send_timeout_s`` while data is buffered in this process; the application sees a disconnect and aborts the request.
    Only connections with buffered data have a timer for that.
    """

    config: ConnectionConfig
    _progress_timer: asyncio.TimerHandle | None = None
    # What has come of the newest request's; uvicorn sets it when the first one begins.
    url = b""

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
        # Answered for the last time: what still comes is dropped.
        self._is_over = False
        self._num_dropped_bytes = 0
        self._linger_deadline_s = 0.0
        self._half_closed: HalfClosedWatch | None = None
        self._refusal: ApiError | None = None
        self._awaits_header = True
        self._num_headers = 0
        # Since the last end of a header, chunk of a body, or end of a request. A header that begins in the same read as
        # such an end is counted from the next read on, so it may have up to twice the limit.
        self._num_pending_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        # The request that is being answered; uvicorn's own ``cycle`` is the newest.
        self._running: RequestResponseCycle | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self._settings.max_connections
        if len(self.connections) > limit:
            # Refused rather than left unaccepted: a client or load balancer can try another server.
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
        self._stop_watching()
        if self._half_closed is not None:
            self._half_closed.close()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called when much is buffered."""
        super().pause_writing()
        self._watch_progress()

    def resume_writing(self) -> None:
        """Called when little is buffered."""
        super().resume_writing()
        self._stop_watching()
        # The application has finished, so nothing else would notice a client that does not read the rest.
        if self.cycle is not None and self.cycle.response_complete and self.transport.get_write_buffer_size():
            self._watch_progress()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open: for the answer to a complete request."""
        is_complete = self._awaits_header and not self._num_pending_bytes
        if self._is_over or self._is_idle or not is_complete or self._running is None:
            return False
        self.cycle.keep_alive = False
        self._half_closed = HalfClosedWatch(self.loop, self.transport, self._running)
        return True

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._num_dropped_bytes += len(data)
            if self._num_dropped_bytes > _MAX_LINGER_BYTES:
                self.transport.abort()
            return
        # The parser buffers an unfinished header, so bytes are counted before it gets them.
        while data and not self._is_over and not self.transport.is_closing():
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
        if self._timer is None and not self._is_over:
            if not self._awaits_header:
                self._start_timer(self._settings.body_timeout_s)
            elif self._num_pending_bytes:
                self._start_timer(self._settings.header_timeout_s)
            elif self._is_idle and not self.transport.is_closing():
                # The rest of a body that was answered before it was complete: uvicorn has stopped its keep-alive timer.
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._num_headers = 0
        # An earlier answer is no longer watched: the next one adds to the buffer.
        if not self.flow.write_paused:
            self._stop_watching()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers after a chunked body, too.
        self._num_headers += 1
        limit = self._settings.max_headers
        if self._num_headers > limit:
            self._refusal = _header_too_large(f"more than {limit} headers", "max_headers")
            # Stops the parser, which makes uvicorn call send_400_response.
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            # Stops the parser and closes the connection: no refusal can be sent in the middle of another answer.
            raise _header_too_large(f"more than {MAX_PIPELINED} requests in advance", "pipelined requests")
        self._awaits_header = False
        self._num_pending_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.pipeline:
            # uvicorn stops reading, and would miss a disconnect while it answers the request before.
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
        # All that a cycle uses of it.
        write, is_closing = self.transport.write, self.transport.is_closing
        cycle.transport = SimpleNamespace(write=write, is_closing=is_closing, close=self._close_after_answer)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # What is left of an answer that the application has finished.
        if self.transport.get_write_buffer_size():
            self._watch_progress()
        if self._is_over:
            # uvicorn takes it for a connection that waits for its next request.
            self._unset_keepalive_if_required()

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
            # The middleware times a body that is read; a pipelined header can wait for the end of the answer.
            self._start_timer(timeout_s)
        elif self._awaits_header:
            self._refuse(
                ApiError(408, f"header: not complete after {timeout_s:g} seconds", code="header_timeout")
            )
        else:
            # Answered before its body was complete, and the rest does not come.
            self._close()

    def _watch_progress(self) -> None:
        self._stop_watching()
        timeout_s = self._settings.send_timeout_s
        if timeout_s:
            self._progress_timer = self.loop.call_later(
                timeout_s, self._check_progress, self._num_unread_bytes()
            )

    def _stop_watching(self) -> None:
        if self._progress_timer is not None:
            self._progress_timer.cancel()
            self._progress_timer = None

    def _num_unread_bytes(self) -> int:
        """Return the bytes buffered here and in the kernel, which takes more once a third of its bytes are read."""
        num_bytes = self.transport.get_write_buffer_size()
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            unsent = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
            num_bytes += int.from_bytes(unsent, sys.byteorder)
        return num_bytes

    def _check_progress(self, num_bytes_before: int) -> None:
        """Abort the connection unless less is buffered than before; nothing has been added meanwhile."""
        self._progress_timer = None
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes and self._num_unread_bytes() < num_bytes_before:
            self._watch_progress()
        elif num_bytes:
            timeout_s = self._settings.send_timeout_s
            logger.warning(
                "a client has read nothing for %g s while %d bytes wait for it; cutting it off",
                timeout_s,
                num_bytes,
            )
            # close() would wait until the client has read the rest.
            self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # Refusals.

    def _refuse(self, refusal: ApiError) -> None:
        """Answer, if no other answer is under way, and close."""
        if self._is_over:
            return
        if not self._take_over():
            self._end()
            self._close()
            return
        record = RequestRecord(
            secrets.token_hex(16), "other", status=refusal.status_code, error=refusal.detail
        )
        self.transport.write(self._as_bytes(refusal, record.request_id))
        self._service.metrics.responses.labels(record.route, str(record.status)).inc()
        if self._settings.log_requests:
            record.log()
        self._linger()

    def _close_after_answer(self) -> None:
        """Close after an answer."""
        if self.cycle.more_body and not self._is_over:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close for writing, and for some time drop what the client still sends."""
        self._end()
        if len(self._lingering) < MAX_LINGERING and self.transport.can_write_eof():
            self._lingering.add(self)
            self.transport.write_eof()
            self.flow.resume_reading()
            self._linger_deadline_s = self.loop.time() + _MAX_LINGER_S
            self._timer = self.loop.call_later(_LINGER_S, self._check_lingering, 0)
        else:
            self._close()

    def _check_lingering(self, num_bytes_before: int) -> None:
        if self._num_dropped_bytes == num_bytes_before or self.loop.time() > self._linger_deadline_s:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_LINGER_S, self._check_lingering, self._num_dropped_bytes)

    def _end(self) -> None:
        """Handle nothing more that comes. It no longer counts as a connection, and shutdown does not wait for it."""
        self._is_over = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.connections.discard(self)

    def _close(self) -> None:
        """Close; after ``_LINGER_S`` even if the client does not read what is buffered."""
        self.transport.close()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _take_over(self) -> bool:
        """Keep the application from answering an incomplete request. False: it has begun to."""
        if self._is_idle:
            return True
        if self.pipeline or self.cycle.response_started or not self.cycle.more_body:
            return False
        self.cycle.disconnected = True
        self.cycle.waiting_for_100_continue = False
        self.cycle.message_event.set()
        return True

    def _as_bytes(self, refusal: ApiError, request_id: str) -> bytes:
        answer = refusal.response(self.url.partition(b"?")[0].decode("latin-1"))
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
