"""Errors and their HTTP status, in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``.

At ``/v1/messages`` and below they are in Anthropic's: ``{"type": "error", "error": {"type", "message"}}``.
"""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from rose_backend.errors import (
    EngineDeadError,
    EngineStalledError,
    GenerationError,
    QueueFullError,
    RequestError,
)
from rose_backend.server.settings import RETRY_AFTER_S

ENGINE_HAS_STOPPED = "the engine has stopped; the server's log has the reason"

CLIENT_LEFT = 499
"""Status in logs and metrics of a request whose client disconnected before the answer; it is never sent."""

EXPECTED_ERRORS = (HTTPException, RequestError, EngineDeadError, GenerationError, ClientDisconnect)
"""Any other error is a fault of the server, and is logged with its traceback."""

_INVALID, _SERVER = "invalid_request_error", "server_error"
_TYPE_OF_STATUS = {429: "rate_limit_error"}
_MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPE_OF_STATUS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 500: "internal_error"}
# pydantic puts the branches of a union into an error's path; these are not fields.
_BRANCHES = frozenset({"str", "int", "float", "bool", "none"})


class ApiError(HTTPException):
    """An error response, with the fields of OpenAI's error object."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        # A header's name has dashes where a keyword has underscores.
        super().__init__(status, message, {name.replace("_", "-"): value for name, value in headers.items()})
        self.param = param
        self.code = code

    def response(self, path: str = "") -> Response:
        """Return the answer to a request for ``path``, which may not be known."""
        is_message = path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/")
        content = json.dumps(self.messages_body() if is_message else self.body()).encode()
        return Response(content, self.status_code, self.headers, media_type="application/json")

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return OpenAI's error object, as an answer has it."""
        status = self.status_code
        error = {
            "message": self.detail,
            "type": _TYPE_OF_STATUS.get(status, _SERVER if status >= 500 else _INVALID),
            "param": self.param,
            "code": _CODE_OF_STATUS.get(status) if self.code is None else self.code,
        }
        return {"error": error}

    def messages_body(self) -> dict[str, Any]:
        """Return Anthropic's error object, as an answer has it."""
        fallback = "api_error" if self.status_code >= 500 else _INVALID
        kind = _MESSAGES_TYPE_OF_STATUS.get(self.status_code, fallback)
        return {"type": "error", "error": {"type": kind, "message": self.detail}}

    def event(self) -> bytes:
        """Return the event that ends a stream; OpenAI's clients raise when they get it."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"


def as_api_error(error: Exception, what: str = "request") -> ApiError:
    """Return the answer to a request that failed.

    Args:
        what: the request's method and path, for errors that say only what is wrong with them.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        answer = ApiError(error.status_code, f"{what}: {error.detail}")
        answer.headers = error.headers
        return answer
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=str(RETRY_AFTER_S))
    if isinstance(error, EngineStalledError):
        return ApiError(503, str(error), code="engine_stalled", retry_after=str(RETRY_AFTER_S))
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.parameter)
    if isinstance(error, GenerationError):
        return ApiError(500, str(error), code="generation_error")
    if isinstance(error, EngineDeadError):
        # The error's own text may quote anything of the step that failed, other clients' requests included.
        return ApiError(503, ENGINE_HAS_STOPPED, code="engine_dead")
    return ApiError(500, "the server failed; its log has the reason")


def describe_unreadable_body(reason: BaseException) -> ApiError:
    """Describe why a body could not be read as JSON.

    Args:
        reason: what ``json.loads`` raised other than a syntax error, or ``ClientDisconnect``.
    """
    if isinstance(reason, UnicodeDecodeError):
        what = f"not valid {reason.encoding.upper()} at byte {reason.start} ({reason.reason}), allowed is JSON in UTF-8"
    elif isinstance(reason, RecursionError):
        what = "arrays or objects are nested too deeply, no field has more than a few levels"
    elif isinstance(reason, ClientDisconnect):
        what = "the connection was closed before it was complete"
    elif isinstance(reason, ValueError):
        # Python refuses longer ones, since converting them takes more than linear time.
        what = f"got an integer of more digits than are allowed ({sys.get_int_max_str_digits()})"
    else:
        what = "cannot be read"
    return ApiError(400, f"body: {what}", param="body")


def describe_validation_errors(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Name the field of the body that is wrong, what was got and what is allowed.

    Args:
        errors: pydantic's.
    """
    field = errors[0]["loc"][:1]
    ours = [error for error in errors if error["loc"][:1] == field]
    # Of the branches of a union, the one with the deepest error was probably meant.
    deepest = max(ours, key=lambda error: len(error["loc"]))
    path = _field_path(deepest)
    if deepest["type"] == "missing":
        return ApiError(400, f"{path}: missing, but required", param=path)
    got = reprlib.repr(deepest["input"])
    reasons = [str(error["msg"]) for error in ours if _field_path(error) == path]
    allowed = " or ".join(dict.fromkeys(reason.removeprefix("Input should be ") for reason in reasons))
    return ApiError(400, f"{path}: got {got}, allowed is: {allowed}", param=path)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error in the format of its path."""
    for expected in (*EXPECTED_ERRORS, Exception):
        app.add_exception_handler(expected, answer_error)


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed, and put the reason into its record."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    answer = as_api_error(error, f"{request.method} {request.url.path}")
    request.state.record.error = answer.detail
    return answer.response(request.url.path)


def _field_path(error: Mapping[str, Any]) -> str:
    fields = [
        each
        for each in error["loc"]
        if isinstance(each, int) or (each.isidentifier() and each not in _BRANCHES)
    ]
    return ".".join(map(str, fields)) or "body"
