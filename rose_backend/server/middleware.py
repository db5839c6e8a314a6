"""ASGI middleware around all routes: request id, API key, size and time limits of the body, one log line."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rose_backend.errors import EngineDeadError, EngineStalledError
from rose_backend.server.error_answers import CLIENT_LEFT, ApiError, as_api_error
from rose_backend.server.service import RequestRecord, Service
from rose_backend.server.settings import RETRY_AFTER_S

logger = logging.getLogger(__name__)

GENERATING_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions"})
ROUTES = GENERATING_ROUTES | {
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/version",
    "/metrics",
    "/openapi.json",
    "/docs",
}
READ_ROUTES = ROUTES - GENERATING_ROUTES - {"/tokenize", "/detokenize"}
"""Routes of GET, which also answer HEAD."""
OPEN_ROUTES = frozenset({"/health", "/metrics"})
"""Routes without API key: probes and scrapers have none."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Middleware:
    """ASGI application around the routes. Refuses a request before its body is read where that is possible."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._api_keys = [key.encode() for key in service.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = _make_record(scope["path"], headers)
        scope.setdefault("state", {})["record"] = record
        is_head = scope["method"] == "HEAD"
        if is_head and record.route in READ_ROUTES:
            scope = {**scope, "method": "GET"}

        async def send_noting_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                own = (b"x-request-id", record.request_id.encode())
                message["headers"] = [*message.get("headers", ()), own]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        is_generating = record.route in GENERATING_ROUTES
        self._service.num_active_requests += is_generating
        try:
            self._check(record.route, scope["method"], headers)
            if is_generating:
                # Before the body is read, which would take memory while it waits.
                await self._service.wait_for_room()
            await self._app(scope, self._limited(receive), send_noting_status)
        except (ApiError, EngineStalledError, EngineDeadError) as error:
            refusal = as_api_error(error)
            record.error = refusal.detail
            await refusal.response()(scope, receive, send_noting_status)
        except Exception:
            # FastAPI has answered it already, if that was still possible.
            logger.exception("request %s failed", record.request_id)
        finally:
            self._service.num_active_requests -= is_generating
            self._note_end(record)

    def _check(self, route: str, method: str, headers: Headers) -> None:
        service, settings = self._service, self._service.settings
        if not _REQUEST_ID.fullmatch(headers.get("x-request-id", "none")):
            raise ApiError(
                400, "X-Request-Id: allowed are 1 to 128 letters, digits and ._:-", param="X-Request-Id"
            )
        if self._api_keys and route not in OPEN_ROUTES and not self._has_key(headers):
            raise ApiError(
                401,
                "Authorization: this server needs an API key as a bearer token",
                code="invalid_api_key",
                www_authenticate="Bearer",
            )
        if route in GENERATING_ROUTES and service.is_draining:
            raise ApiError(
                503,
                "the server is shutting down and takes no new requests",
                code="draining",
                retry_after=str(RETRY_AFTER_S),
                connection="close",
            )
        if method != "POST":
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"Content-Type: got {kind[:80]!r}, allowed is application/json")
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise ApiError(
                415, f"Content-Encoding: got {encoding[:80]!r}, allowed is a body as it is (identity)"
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > settings.max_body_bytes:
            raise self._too_large(f"{length} bytes")

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.encode("latin-1")
        # No early exit: the time must not depend on which key matches, or how far.
        matches = [secrets.compare_digest(given, key) for key in self._api_keys]
        return scheme.lower() == "bearer" and any(matches)

    def _limited(self, receive: Receive) -> Receive:
        """Return ``receive`` with a limit on the size of the body and on the time until it is complete."""
        num_bytes = 0
        is_complete = False
        timeout_s = self._service.settings.body_timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s

        async def limited_receive() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408,
                    f"body: not complete after {timeout_s:g} seconds",
                    param="body",
                    connection="close",
                ) from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._service.settings.max_body_bytes:
                raise self._too_large(f"more than {num_bytes - 1} bytes")
            is_complete = not message.get("more_body", False)
            return message

        return limited_receive

    def _too_large(self, got: str) -> ApiError:
        limit = self._service.settings.max_body_bytes
        return ApiError(
            413,
            f"body: got {got}, allowed are at most {limit}",
            param="body",
            code="body_too_large",
            connection="close",
        )

    def _note_end(self, record: RequestRecord) -> None:
        # Without a status nothing was sent: the client had disconnected.
        record.status = record.status or CLIENT_LEFT
        self._service.metrics.responses.labels(record.route, str(record.status)).inc()
        # Successful probes and scrapes, every few seconds, are not logged.
        if self._service.settings.log_requests and not (record.route in OPEN_ROUTES and record.status == 200):
            record.log()


def _make_record(path: str, headers: Headers) -> RequestRecord:
    # One label for all other paths: with a label for each, a client could add any number of time series.
    route = path if path in ROUTES else "other"
    asked_id = headers.get("x-request-id", "")
    return RequestRecord(asked_id if _REQUEST_ID.fullmatch(asked_id) else secrets.token_hex(16), route)
