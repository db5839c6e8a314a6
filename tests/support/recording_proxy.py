"""A server in a thread that hands requests on to another one, and keeps what was asked and answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import httpx

from tests.support.patience import HANG_S

_HEADERS = ("content-type", "x-api-key", "authorization", "anthropic-version", "anthropic-beta")


class Exchange(NamedTuple):
    """One request and its answer."""

    method: str
    path: str
    """Its query included."""
    content: bytes
    content_type: str
    """Of the request."""
    status: int
    answer_type: str
    """Content type of the answer, without parameters."""
    answer: bytes


class RecordingProxy:
    """What was exchanged since the last look.

    Attributes:
        url: root of the proxy's HTTP interface.
    """

    def __init__(self, upstream: httpx.Client) -> None:
        self._exchanges: list[Exchange] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            # HTTP/1.0: an answer ends with its connection.
            def _hand_on(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name: self.headers[name] for name in _HEADERS if name in self.headers}
                answer = upstream.request(self.command, self.path, content=content, headers=headers)
                kind = answer.headers.get("content-type", "")
                exchange = Exchange(
                    self.command,
                    self.path,
                    content,
                    headers.get("content-type", ""),
                    answer.status_code,
                    kind.partition(";")[0],
                    answer.content,
                )
                proxy._exchanges.append(exchange)
                self.send_response(answer.status_code)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(answer.content)

            do_GET = do_POST = do_DELETE = _hand_on

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self) -> list[Exchange]:
        """Return what was exchanged, and forget it."""
        taken, self._exchanges = self._exchanges, []
        return taken


@contextmanager
def recording_proxy(url: str) -> Iterator[RecordingProxy]:
    """Run a proxy of the server at ``url``."""
    with httpx.Client(base_url=url, timeout=HANG_S) as upstream:
        proxy = RecordingProxy(upstream)
        thread = threading.Thread(target=proxy.server.serve_forever, name="proxy", daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.server.shutdown()
            proxy.server.server_close()
            thread.join()
