"""Clients that have closed their sending side and wait for the answer, as ``nc -N`` does.

The same arrives from a client that has left: the end of its data. The two differ when something is sent: the system of
a client that has left resets the connection. So before an answer begins an interim one is sent, ``100 Continue``, which
clients of HTTP/1.1 pass over; a Unix socket shows the difference by itself.
"""

from __future__ import annotations

import asyncio
import select
import socket

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CHECK_S = 0.1
"""How soon a client that has left is noticed; a shorter answer is sent without an interim one."""
_INTERIM_ANSWER = b"HTTP/1.1 100 Continue\r\n\r\n"


class HalfClosedWatch:
    """Aborts a connection whose client has closed its sending side when it turns out to have left.

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
