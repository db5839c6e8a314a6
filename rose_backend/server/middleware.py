"""The layers between a connection and its route: ``Middleware`` around everything, ``DirectRoutes`` around FastAPI.

FastAPI's routing takes about a fifth of the event loop's time for a request of 44 tokens, so ``DirectRoutes`` calls the
functions of routes with a body directly. FastAPI still describes them in /openapi.json, and answers other methods of
their paths.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rose_backend.errors import EngineDeadError, EngineStalledError
from rose_backend.server.error_answers import (
    CLIENT_LEFT,
    EXPECTED_ERRORS,
    ApiError,
    answer_error,
    as_api_error,
    describe_unreadable_body,
    describe_validation_errors,
)
from rose_backend.server.protocol import Body, check_number_of_fields, refused
from rose_backend.server.service import RequestRecord, Service, given_key
from rose_backend.server.settings import MAX_BODY_FIELDS, MAX_BODY_LISTS, RETRY_AFTER_S, ServerSettings
from rose_backend.server.tracing import trace_headers

logger = logging.getLogger(__name__)

GENERATING_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
_COUNTING_ROUTES = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
_ADAPTER_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_BODY_ROUTES = GENERATING_ROUTES | _COUNTING_ROUTES | _ADAPTER_ROUTES
ROUTES = _BODY_ROUTES | {
    "/",
    "/v1/models",
    "/health",
    "/ping",
    "/version",
    "/metrics",
    "/openapi.json",
    "/docs",
}
READ_ROUTES = ROUTES - _BODY_ROUTES
"""Routes of GET, which also answer HEAD."""
OPEN_ROUTES = frozenset({"/", "/health", "/ping", "/metrics"})
"""Routes without API key: probes and scrapers have none, and the page holds nothing of anybody's."""

MAX_PER_TURN = 4
"""New requests per turn of the event loop. Preparing that many short ones takes less than writing one event to each of
64 streams; with fewer, streams would limit how many requests can begin in a second."""

DirectRoute: TypeAlias = tuple[type[Body], Callable[[Request, Any], Awaitable[Response]]]
"""The model of a route's body, and the function that answers."""
COUNTED_BODY_BYTES = 1 << 17
"""Smaller bodies are parsed in a few milliseconds with any content."""
_CHUNK_BYTES = 1 << 18
"""Bytes counted at once; between two chunks other threads may take the interpreter lock."""
_WORDS = np.frombuffer(b'"tfn', np.uint8)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Middleware:
    """ASGI application around the routes: request id, API key, content type, one log line.

    Refuses a request before its body is read where that is possible.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        # Routes whose answer depends on the body; for others any content type will do.
        self._body_routes = _BODY_ROUTES
        if service.settings.runtime_lora_dir is None:
            self._body_routes -= _ADAPTER_ROUTES
        self._api_keys = [key.encode() for key in service.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = _make_record(scope["path"], headers)
        if self._service.tracing is not None:
            record.trace_headers = trace_headers(headers)
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
            self._check(record.route, scope, headers)
            if is_generating:
                # Before the body is read, which would take memory while it waits.
                await self._service.engine.wait_for_room()
            await self._app(scope, receive, send_noting_status)
        except (ApiError, EngineStalledError, EngineDeadError) as error:
            refusal = as_api_error(error)
            record.error = refusal.detail
            await refusal.response(scope["path"])(scope, receive, send_noting_status)
        except Exception:
            # FastAPI has answered it already, if that was still possible.
            logger.exception("request %s failed", record.request_id)
        finally:
            self._service.num_active_requests -= is_generating
            if record.adapter is not None:
                self._service.adapters.release(record.adapter)
            self._note_end(record)

    def _check(self, route: str, scope: Scope, headers: Headers) -> None:
        service, settings = self._service, self._service.settings
        if not _REQUEST_ID.fullmatch(headers.get("x-request-id", "none")):
            raise ApiError(
                400, "X-Request-Id: allowed are 1 to 128 letters, digits and ._:-", param="X-Request-Id"
            )
        if self._api_keys and route not in OPEN_ROUTES and not self._has_key(headers):
            raise ApiError(
                401,
                "Authorization: this server needs an API key as a bearer token, or in X-Api-Key",
                code="invalid_api_key",
                www_authenticate="Bearer",
            )
        # Starlette matches a route before a last line break, too, but nothing here would have checked its body.
        if "\n" in scope["path"]:
            raise ApiError(404, f"{scope['method']} {scope['path']}: Not Found")
        if route in GENERATING_ROUTES and service.is_draining:
            raise ApiError(
                503,
                "the server is shutting down and takes no new requests",
                code="draining",
                retry_after=str(RETRY_AFTER_S),
                connection="close",
            )
        if scope["method"] != "POST" or route in OPEN_ROUTES:
            return
        if route in self._body_routes:
            _check_content(headers)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > settings.max_body_bytes:
            raise _too_large(f"{length} bytes", settings)

    def _has_key(self, headers: Headers) -> bool:
        given = given_key(headers).encode("latin-1")
        # No early exit: the time must not depend on which key matches, or how far.
        matches = [secrets.compare_digest(given, key) for key in self._api_keys]
        return any(matches)

    def _note_end(self, record: RequestRecord) -> None:
        # Without a status nothing was sent: the client had disconnected.
        record.status = record.status or CLIENT_LEFT
        self._service.metrics.responses.labels(record.route, str(record.status)).inc()
        # Successful probes and scrapes, every few seconds, are not logged, nor is the page.
        if self._service.settings.log_requests and not (record.route in OPEN_ROUTES and record.status == 200):
            record.log()


def _check_content(headers: Headers) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type: got {kind[:80]!r}, allowed is application/json")
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding: got {encoding[:80]!r}, allowed is a body as it is (identity)")


def _make_record(path: str, headers: Headers) -> RequestRecord:
    # One label for all other paths: with a label for each, a client could add any number of time series.
    route = path if path in ROUTES else "other"
    asked_id = headers.get("x-request-id", "")
    return RequestRecord(asked_id if _REQUEST_ID.fullmatch(asked_id) else secrets.token_hex(16), route)


class DirectRoutes:
    """ASGI application around FastAPI's, which does without it for routes with a body.

    Args:
        app: FastAPI, for all other requests.
        routes: by path; each answers POST.
    """

    def __init__(self, app: FastAPI, routes: Mapping[str, DirectRoute]) -> None:
        self._app = app
        self._routes = routes
        self._request_throttle = RequestThrottle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = self._routes.get(scope["path"]) if is_post else None
        if route is None:
            await self._app(scope, receive, send)
            return
        model, answer = route
        scope["app"] = self._app
        request = Request(scope, receive)
        try:
            response = await answer(request, await self._read(model, request, receive))
        except Exception as error:
            await (await answer_error(request, error))(scope, receive, send)
            if not isinstance(error, EXPECTED_ERRORS):
                raise
            return
        await response(scope, receive, send)

    async def _read(self, model: type[Body], request: Request, receive: Receive) -> Body:
        """Return the body; ``request.state.num_body_bytes`` is then its length."""
        service: Service = self._app.state.service
        content = await _read_body(receive, service.settings)
        request.state.num_body_bytes = len(content)
        if len(content) <= COUNTED_BODY_BYTES:
            await self._request_throttle.pass_through()
            return parse_body(model, content)
        limits = service.settings.max_prompts, service.engine.input_processor.max_model_len

        def check_and_parse() -> Body:
            check_body_parts(as_utf8(content), *limits)
            return parse_body(model, content, **_SHARES_THE_LOCK)

        body = await asyncio.to_thread(check_and_parse)
        await self._request_throttle.pass_through()
        return body


class RequestThrottle:
    """Admits at most ``MAX_PER_TURN`` new requests per turn of the event loop, in order of arrival.

    Otherwise a whole burst of requests would be prepared before any running stream sends its next event.
    """

    def __init__(self) -> None:
        self._num_passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def pass_through(self) -> None:
        """Return in this turn of the event loop or in a later one."""
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
            # Otherwise it has been cancelled.
            if not waiter.done():
                waiter.set_result(None)
                self._num_passed += 1
        self._is_turning = self._num_passed > 0
        if self._is_turning:
            loop.call_soon(self._turn, loop)


_SHARES_THE_LOCK: dict[str, Any] = {
    "parse_int": lambda digits: int(digits),
    "parse_float": lambda digits: float(digits),
    "object_pairs_hook": lambda fields: dict(fields),
}
"""Arguments of ``json.loads`` that do not change its answer: where a Python function is called, another thread may take
the interpreter lock. Parsing numbers takes three times as long."""


def parse_body(model: type[Body], content: bytes, **how: Any) -> Body:
    """Return a body that has been checked.

    Args:
        how: arguments of ``json.loads``.

    Raises:
        ApiError: it is no JSON, or a field is not allowed.
        RequestError: there are too many unknown fields.
    """
    try:
        fields = json.loads(content, **how) if content else None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"body: not valid JSON ({error.msg})", param="body") from error
    except (ValueError, RecursionError) as error:
        raise describe_unreadable_body(error) from error
    if fields is None:
        raise ApiError(400, "body: missing, but required", param="body")
    if isinstance(fields, dict):
        check_number_of_fields(model, fields)
    try:
        return model.model_validate(fields, from_attributes=True)
    except ValidationError as error:
        raise describe_validation_errors(error.errors(include_url=False)) from error


async def _read_body(receive: Receive, settings: ServerSettings) -> bytes:
    """Return a whole body, within the limits on its size and on the time until it is complete."""
    parts: list[bytes] = []
    num_bytes, is_complete = 0, False
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while not is_complete:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise describe_unreadable_body(ClientDisconnect())
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > settings.max_body_bytes:
                    raise _too_large(f"more than {num_bytes - 1} bytes", settings)
                is_complete = not message.get("more_body", False)
    except TimeoutError:
        what = f"body: not complete after {settings.body_timeout_s:g} seconds"
        raise ApiError(408, what, param="body", connection="close") from None
    return b"".join(parts)


def _too_large(got: str, settings: ServerSettings) -> ApiError:
    return ApiError(
        413,
        f"body: got {got}, allowed are at most {settings.max_body_bytes}",
        param="body",
        code="body_too_large",
        connection="close",
    )


class BodyParts(NamedTuple):
    """Numbers of strings, and of structural characters outside of them."""

    commas: int
    colons: int
    brackets: int
    """Opening ones, of lists and objects."""
    words: int
    """Strings, names of fields included, and true, false and null."""


def check_body_parts(content: bytes, max_prompts: int, max_model_len: int) -> None:
    """Refuse a body that has more values than any request may have. May run in any thread.

    Parsing strings and literals holds the interpreter lock, for up to seconds with 16 MiB of short ones, in which no
    stream sends anything. Such a body is refused without parsing.

    Args:
        content: the body, which may not be JSON.

    Raises:
        RequestError: there are too many fields, lists and objects, strings and literals, or values.
    """
    parts = count_body_parts(content)
    max_lists = max_prompts + MAX_BODY_LISTS
    # Each field and each list may be followed by a comma.
    max_values = max_prompts * max_model_len + MAX_BODY_FIELDS + max_lists
    for what, number, limit in (
        ("fields", parts.colons, MAX_BODY_FIELDS),
        ("lists and objects", parts.brackets, max_lists),
        # Each field has a name, and may have one for its value; a list of prompts has many.
        ("strings, truth values and nulls", parts.words, 2 * MAX_BODY_FIELDS + max_lists),
        ("values", parts.commas, max_values),
    ):
        if number > limit:
            raise refused("body", f"got {number} {what}, allowed are at most {limit} in one request")


def count_body_parts(content: bytes) -> BodyParts:
    """Count without parsing, about as fast as hashing."""
    totals = np.zeros(4, np.int64)
    is_inside, rest = False, b""
    for first in range(0, len(content), _CHUNK_BYTES):
        chunk = rest + content[first : first + _CHUNK_BYTES]
        # A backslash and the character it escapes must be in the same chunk.
        rest = b"\\" if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 else b""
        chunk = chunk[: len(chunk) - len(rest)].replace(b"\\\\", b"").replace(b'\\"', b"")
        data = np.frombuffer(chunk, np.uint8)
        if not data.size:
            continue
        inside = np.logical_xor.accumulate(data == ord('"')) ^ is_inside
        is_inside = bool(inside[-1])
        outside = data[~inside]
        # Of a string, only the quotation mark at its end is outside.
        totals += [
            np.count_nonzero(outside == ord(",")),
            np.count_nonzero(outside == ord(":")),
            np.count_nonzero((outside == ord("[")) | (outside == ord("{"))),
            np.count_nonzero(np.isin(outside, _WORDS)),
        ]
    return BodyParts(*totals.tolist())


def as_utf8(content: bytes) -> bytes:
    """Return JSON in UTF-8 from any encoding that ``json.loads`` reads; other content is returned as it is."""
    encoding = json.detect_encoding(content)
    if encoding in ("utf-8", "utf-8-sig"):
        return content
    try:
        return content.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeError:
        return content
