"""Ends connections whose clients do not read their answers.

What an answer writes waits in this process until the system takes it, and a stream waits with it. Only connections on
which something waits are looked at: a client that keeps up costs nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rose_backend.server.service import Service

logger = logging.getLogger(__name__)


class ServiceConfig(uvicorn.Config):
    """uvicorn's configuration, and what connections need to know of the server."""

    def __init__(self, app: Any, service: Service, **options: Any) -> None:
        super().__init__(app, **{"http": ReadConnection, **options})
        self.service = service


class ReadConnection(HttpToolsProtocol):
    """uvicorn's protocol, which waits for a client to read without end.

    A connection is cut off when the client has read nothing for ``send_timeout_s`` while something waits for it. The
    application sees a client that has left: whatever runs for it is aborted.
    """

    config: ServiceConfig
    _look: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Called by the transport when much waits."""
        super().pause_writing()
        self._begin_looking()

    def resume_writing(self) -> None:
        """Called by the transport when little waits."""
        super().resume_writing()
        self._stop_looking()
        # Nobody else waits for the end of a whole answer.
        if self.cycle is not None and self.cycle.response_complete and self.transport.get_write_buffer_size():
            self._begin_looking()

    def on_response_complete(self) -> None:
        """Look after the rest of an answer, with which the application has nothing to do any more."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._begin_looking()

    def on_message_begin(self) -> None:
        """Forget how much waited for an earlier answer: the next one adds to it."""
        if not self.flow.write_paused:
            self._stop_looking()
        super().on_message_begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the transport at the end."""
        self._stop_looking()
        super().connection_lost(exc)

    def _begin_looking(self) -> None:
        self._stop_looking()
        timeout_s = self.config.service.settings.send_timeout_s
        if timeout_s:
            self._look = self.loop.call_later(timeout_s, self._check_progress, self._num_unread_bytes())

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _num_unread_bytes(self) -> int:
        """Return how much waits here and in the system, which asks for more only when a third of its own has gone."""
        num_bytes = self.transport.get_write_buffer_size()
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            waiting = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
            num_bytes += int.from_bytes(waiting, sys.byteorder)
        return num_bytes

    def _check_progress(self, num_bytes_before: int) -> None:
        """Cut the client off unless less waits than before; nothing has been added meanwhile."""
        self._look = None
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes and self._num_unread_bytes() < num_bytes_before:
            self._begin_looking()
        elif num_bytes:
            timeout_s = self.config.service.settings.send_timeout_s
            logger.warning(
                "a client has read nothing for %g s while %d bytes wait for it; cutting it off",
                timeout_s,
                num_bytes,
            )
            # close() would wait until the client has read the rest.
            self.transport.abort()
