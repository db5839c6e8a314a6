"""What is known of one HTTP request, for its line in the log and for the metrics."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

logger = logging.getLogger("rose_backend.server.requests")

_MAX_ERROR_CHARACTERS = 300


@dataclass(slots=True)
class RequestRecord:
    """Filled in on the request's way through the server."""

    request_id: str
    route: str
    start_s: float = field(default_factory=time.monotonic)
    status: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: float | None = None
    """``time.monotonic`` when the first token came back from the engine."""
    finish_reasons: set[str] = field(default_factory=set)
    error: str | None = None
    """Why the request was refused, or could not be completed."""

    @property
    def latency_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.start_s

    def log(self) -> None:
        """Write the line: ``name=value`` pairs, tokens and times only of requests that reached the engine."""
        parts = [f"id={self.request_id}", f"route={self.route}", f"status={self.status}"]
        if self.num_prompt_tokens:
            parts += [
                f"prompt_tokens={self.num_prompt_tokens}",
                f"cached_tokens={self.num_cached_tokens}",
                f"output_tokens={self.num_output_tokens}",
            ]
        if self.first_token_s is not None:
            parts.append(f"ttft_ms={(self.first_token_s - self.start_s) * 1e3:.1f}")
        parts.append(f"latency_ms={self.latency_s * 1e3:.1f}")
        if self.finish_reasons:
            parts.append(f"finish={','.join(sorted(self.finish_reasons))}")
        if self.error is not None:
            parts.append(f"error={self.error[:_MAX_ERROR_CHARACTERS]!r}")
        logger.info(" ".join(parts))
