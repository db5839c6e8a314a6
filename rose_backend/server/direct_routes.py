"""From an HTTP request with a body straight to its route's function, without FastAPI.

FastAPI's routing takes about a fifth of the event loop's time for a request of 44 tokens. It still describes these
routes in /openapi.json, and answers other methods of their paths.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rose_backend.server.body_parts import COUNTED_BODY_BYTES, as_utf8, check_body_parts
from rose_backend.server.error_answers import (
    EXPECTED_ERRORS,
    answer_error,
    describe_unreadable_body,
    describe_validation_errors,
)
from rose_backend.server.request_models import Body, check_number_of_fields
from rose_backend.server.service import Service

MAX_PER_TURN = 4
"""New requests per turn of the event loop. Preparing that many short ones takes less than writing one event to each of
64 streams; with fewer, streams would limit how many requests can begin in a second."""

DirectRoute: TypeAlias = tuple[type[Body], Callable[[Request, Any], Awaitable[Response]]]
"""The model of a route's body, and the function that answers."""


class DirectRoutes:
    """ASGI application in front of FastAPI's; gives the same answers.

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
            response = await answer(request, await self._read(model, receive))
        except Exception as error:
            await answer_error(request, error)(scope, receive, send)
            if not isinstance(error, EXPECTED_ERRORS):
                raise
            return
        await response(scope, receive, send)

    async def _read(self, model: type[Body], receive: Receive) -> Body:
        content = await _read_body(receive)
        if len(content) <= COUNTED_BODY_BYTES:
            await self._request_throttle.pass_through()
            return parse_body(model, content)
        service: Service = self._app.state.service
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


def _int(digits: str) -> int:
    return int(digits)


def _float(digits: str) -> float:
    return float(digits)


def _dict(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(fields)


_SHARES_THE_LOCK: dict[str, Any] = {"parse_int": _int, "parse_float": _float, "object_pairs_hook": _dict}
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
        found = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise describe_validation_errors([{**found, "ctx": {"error": error.msg}}]) from error
    except (ValueError, RecursionError) as error:
        raise describe_unreadable_body(error) from error
    if fields is None:
        raise describe_validation_errors([{"type": "missing", "loc": ("body",)}])
    if isinstance(fields, dict):
        check_number_of_fields(model, fields)
    try:
        return model.model_validate(fields, from_attributes=True)
    except ValidationError as error:
        found_errors = error.errors(include_url=False)
        raise describe_validation_errors(
            [{**each, "loc": ("body", *each["loc"])} for each in found_errors]
        ) from error


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    is_complete = False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise describe_unreadable_body(ClientDisconnect())
        parts.append(message.get("body", b""))
        is_complete = not message.get("more_body", False)
    return b"".join(parts)
