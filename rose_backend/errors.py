"""Every error that rose_backend raises on purpose.

Three kinds: a caller's mistake is a ``ValueError`` that names the field, what was got and what is allowed; a shortage
(no free block, no free row) is a return value, never an exception; a broken invariant is an ``IntegrityError``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RoseError(Exception):
    """Base class of all errors below."""


class ConfigError(RoseError, ValueError):
    """An option has a value that can never work."""


class RequestError(RoseError, ValueError):
    """A request is not allowed. Other requests are not affected."""

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class QueueFullError(RequestError):
    """The queue is full; the request may be retried."""


class EngineStalledError(RequestError):
    """The engine process does not answer, but has not ended; the request may be retried."""

    def __init__(self) -> None:
        super().__init__("the engine does not answer at present; no request is taken until it does")


class GenerationError(RoseError, RuntimeError):
    """The engine could not go on with one request. Other requests are not affected."""


class ModelError(RoseError, ValueError):
    """A checkpoint is missing, damaged, or of a kind that is not supported."""


class RowError(RoseError, ValueError):
    """The block manager was asked about a row that is not in use, or for more than a row can hold."""


class ShapeError(RoseError, ValueError):
    """Tensors passed to a kernel disagree with each other or are not supported by it."""


class IntegrityError(RoseError, RuntimeError):
    """An invariant of the block manager is broken. Always a bug in rose_backend."""


class MetricsError(RoseError, RuntimeError):
    """A server's metrics cannot be read, or contain no KV cache metrics."""


class EngineDeadError(RoseError, RuntimeError):
    """The engine stopped after a failure inside a step; it serves no further requests."""


def nearest_name_hint(name: str, valid_names: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest valid name, or an empty string."""
    matches = difflib.get_close_matches(name, list(valid_names), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def kind_and_text(error: BaseException) -> str:
    """Return type and text of an error, for a report that quotes it."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
