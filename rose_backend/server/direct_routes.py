"""The routes that take a body, straight to their functions.

FastAPI finds the route, opens exit stacks, parses the content type and resolves dependencies anew for every request:
about a fifth of what a request of 44 tokens takes altogether, on the event loop that writes everybody's streams. It
still describes these routes in /openapi.json, and answers whatever else is asked of their paths.
"""

from __future__ import annotations

import asyncio
import json
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
from rose_backend.server.other_fields import check_number_of_fields
from rose_backend.server.request_models import Body
from rose_backend.server.service import Service
from rose_backend.server.turnstile import Turnstile

DirectRoute: TypeAlias = tuple[type[Body], Callable[[Request, Any], Awaitable[Response]]]
"""The model of a route's body, and what answers."""


class DirectRoutes:
    """ASGI application in front of FastAPI's, whose answers it gives.

    Args:
        app: gets everything else.
        routes: by path; each answers POST.
    """

    def __init__(self, app: FastAPI, routes: Mapping[str, DirectRoute]) -> None:
        self._app = app
        self._routes = routes
        self._turnstile = Turnstile()

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
            content = await _read_body(receive)
            if len(content) > COUNTED_BODY_BYTES:
                await self._check_parts(content)
            await self._turnstile.pass_through()
            response = await answer(request, parse_body(model, content))
        except Exception as error:
            await answer_error(request, error)(scope, receive, send)
            if not isinstance(error, EXPECTED_ERRORS):
                raise
            return
        await response(scope, receive, send)

    async def _check_parts(self, content: bytes) -> None:
        service: Service = self._app.state.service
        limits = service.settings.max_prompts, service.engine.max_model_len
        await asyncio.to_thread(lambda: check_body_parts(as_utf8(content), *limits))


def parse_body(model: type[Body], content: bytes) -> Body:
    """Return a body that has been checked.

    Raises:
        ApiError: it is no JSON, or a field is not allowed.
        RequestError: there are too many fields that nobody knows.
    """
    try:
        fields = json.loads(content) if content else None
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
