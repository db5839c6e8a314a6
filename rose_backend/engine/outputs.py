"""What a request returns. Names are vLLM's; nothing here needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]
"""``error``: all logits were NaN or minus infinity, so no token could be chosen. The tokens before it are kept."""


class Logprob(NamedTuple):
    """One candidate token at one position."""

    logprob: float
    """Natural logarithm of its probability, before penalties and temperature."""
    rank: int
    """1 for the most likely token."""
    decoded_token: str


_MIN_LOGPROB = -9999.0
"""Written for minus infinity, which JSON lacks; vLLM writes the same."""


def json_logprob(logprob: float) -> float | None:
    """Return a log-probability as JSON can hold it; None where the model's logits gave no number."""
    return max(logprob, _MIN_LOGPROB) if logprob < math.inf else None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` texts, as far as it has come."""

    index: int
    text: str
    """All text that is certain: without an unfinished character and without what may become a stop string."""
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """One dictionary per token, the token itself always among its keys; None unless asked for."""
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the text; None for the end-of-text token."""
    delta_text: str = ""
    """Text that is new since the previous output of a stream."""

    @property
    def finished(self) -> bool:
        """Whether no more will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's state: final from ``LLM.generate``, growing from ``AsyncEngine.generate``."""

    request_id: str
    prompt: str | None
    """The prompt's text; None when it was given as token ids."""
    prompt_token_ids: list[int]
    """All outputs of a stream share this list."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    """In order of ``index``."""
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens whose K/V came from the prefix cache."""
    scheduled_s: float | None = None
    """``time.monotonic`` when the engine began to compute it; None while it waits for that."""
