"""What an engine returns: outputs of requests, whose names are vLLM's, and its counters. Nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from rose_backend.engine.tokenizer import MAX_TOKENS_BEFORE, TokenTexts


@dataclass(slots=True)
class EngineStats:
    """Counted since the engine started."""

    steps: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model: prompt, generated and recomputed ones."""
    prompt_tokens_computed: int = 0
    """Prompt tokens computed for the first time; a prompt with ``n`` completions counts once."""
    recomputed_tokens: int = 0
    """Tokens computed again after a preemption."""
    generated_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens supplied by the prefix cache."""
    prefix_cache_queries: int = 0
    """Tokens looked up in the prefix cache, including by sequences that resume after a preemption."""
    prefix_cache_hits: int = 0
    """Tokens found there."""
    reported_prefix_cache_hits: int = 0
    """The same, each lookup's rounded down to whole blocks of at least 16 tokens: what clients may see."""
    preemptions: int = 0
    clones: int = 0
    """Blocks copied because a sequence wrote into a shared, partly filled block."""
    spec_decode_num_drafts: int = 0
    """Times that a sequence had drafts in a step; these four count as vLLM's of these names."""
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """Of the first draft, the second, and so on; empty without ``speculative_config``."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What is in use at one moment."""

    num_running: int
    """Sequences that hold a request slot; each of a request's ``n`` completions counts."""
    num_waiting: int
    """Requests that have no request slot yet, preempted ones included."""
    kv_cache_usage: float
    """Share of the KV blocks that sequences hold, 0 to 1."""


class Counters(NamedTuple):
    """Both, for metrics."""

    stats: EngineStats
    load: EngineLoad


FinishReason = Literal["stop", "length", "abort", "error"]
"""``error``: all logits were NaN or minus infinity, so no token could be chosen. The tokens before it are kept."""


class Logprob(NamedTuple):
    """One candidate token at one position."""

    logprob: float
    """Natural logarithm of its probability, before penalties and temperature."""
    rank: int
    """1 for the most likely token."""
    decoded_token: str


Logprobs: TypeAlias = list[dict[int, Logprob]]

_MIN_LOGPROB = -9999.0
"""Written for minus infinity, which JSON lacks; vLLM writes the same."""


def json_logprob(logprob: float) -> float | None:
    """Return a log-probability as JSON can hold it; None where the model's logits gave no number."""
    return max(logprob, _MIN_LOGPROB) if logprob < math.inf else None


LogprobWords: TypeAlias = NDArray[np.float32]
"""``[N, 2 + 2K]``, of N tokens: log-probability and rank of the token (1 = most likely), then the K largest
log-probabilities at its place, falling, and their tokens. Rank and tokens are the bits of int32 numbers."""


class PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """Of each token of a prompt its log-probability and the most likely tokens, the token itself first; None for the
    first token, which nothing comes before.

    Entries are made when they are looked at: those of a long prompt would take many times the memory of their numbers.

    Args:
        token_ids: ``[P]`` of the prompt.
        num_logprobs: most likely tokens of each place.
    """

    def __init__(self, token_ids: NDArray[np.int32], num_logprobs: int, texts: TokenTexts) -> None:
        self.token_ids = token_ids
        self._num_logprobs = num_logprobs
        self._texts = texts
        # np.empty touches no memory, so a prompt that waits takes none.
        self._words: LogprobWords = np.empty((len(token_ids) - 1, 2 + 2 * num_logprobs), np.float32)

    def write(self, first: int, words: LogprobWords) -> None:
        """Write those of the tokens from index ``first`` on; ``words`` may have more of the most likely tokens."""
        count, first_token = self._num_logprobs, 1 + words.shape[1] // 2
        own = self._words[first - 1 :][: len(words)]
        own[:, : 2 + count] = words[:, : 2 + count]
        own[:, 2 + count :] = words[:, first_token : first_token + count]

    def pieces(self, num_bytes: int) -> Iterator[tuple[int, LogprobWords]]:
        """Yield the arguments of ``write`` that make a copy, each of at most that many bytes, or of one token."""
        step = max(num_bytes // (4 * self._words.shape[1]), 1)
        for first in range(0, len(self._words), step):
            yield first + 1, self._words[first : first + step]

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        places = range(len(self))[index]
        return self._entry(places) if isinstance(places, int) else [self._entry(each) for each in places]

    def _entry(self, place: int) -> dict[int, Logprob] | None:
        if place == 0:
            return None
        words, count = self._words[place - 1], self._num_logprobs
        numbers = words.view(np.int32)
        # As in vLLM, a part of a character is completed by tokens before it, the first one apart.
        before = self.token_ids[max(place - MAX_TOKENS_BEFORE, 1) : place].tolist()
        token_ids = [int(self.token_ids[place]), *numbers[2 + count :].tolist()]
        logprobs = [float(words[0]), *words[2 : 2 + count].tolist()]
        ranks = [int(numbers[1]), *range(1, count + 1)]
        return {
            token_id: Logprob(logprob, rank, self._texts.text(token_id, before))
            for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True)
        }


def json_logprobs(
    candidates: dict[int, Logprob] | None,
) -> dict[str, dict[str, float | int | str | None]] | None:
    """Return the candidates at one place as JSON can hold them, in vLLM's form."""
    if candidates is None:
        return None
    return {
        str(token_id): {**entry._asdict(), "logprob": json_logprob(entry.logprob)}
        for token_id, entry in candidates.items()
    }


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` texts, up to now.

    Inside the engine and the server, an output of a stream holds only what is new since the previous one: text, tokens
    and log-probabilities. ``GrowingCompletions`` puts such outputs together.
    """

    index: int
    text: str
    """All text that is certain: without an unfinished character and without what may become a stop string."""
    token_ids: list[int]
    logprobs: Logprobs | None = None
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
    prompt_logprobs: PromptLogprobs | None = None
    """None unless asked for, and before there is a token. All outputs of a stream share it."""


class GrowingCompletions:
    """Puts together the completions of one request, of which each output of a stream holds what is new."""

    __slots__ = ("_completions",)

    def __init__(self) -> None:
        # Each with pieces of text, the first of which was returned before. Appending to a text would copy all of it.
        self._completions: dict[int, tuple[CompletionOutput, list[str]]] = {}

    def add(self, completions: list[CompletionOutput]) -> None:
        """Add what is new."""
        for new in completions:
            if new.index not in self._completions:
                whole = CompletionOutput(new.index, "", [], None if new.logprobs is None else [])
                self._completions[new.index] = whole, [""]
            whole, pieces = self._completions[new.index]
            pieces.append(new.text)
            whole.token_ids += new.token_ids
            if whole.logprobs is not None and new.logprobs is not None:
                whole.logprobs += new.logprobs
            whole.cumulative_logprob = new.cumulative_logprob
            whole.finish_reason = new.finish_reason
            whole.stop_reason = new.stop_reason

    def take(self) -> list[CompletionOutput]:
        """Return all that was added, in order of index, and forget it."""
        taken = []
        for _, (whole, pieces) in sorted(self._completions.items()):
            whole.text = whole.delta_text = "".join(pieces)
            taken.append(whole)
        self._completions.clear()
        return taken

    def snapshot(self) -> list[CompletionOutput]:
        """Return all that was added, in order of index; the lists are copies."""
        return [self._snapshot(*self._completions[index]) for index in sorted(self._completions)]

    @staticmethod
    def _snapshot(whole: CompletionOutput, pieces: list[str]) -> CompletionOutput:
        delta_text = "".join(pieces[1:])
        pieces[:] = [pieces[0] + delta_text]
        return CompletionOutput(
            whole.index,
            pieces[0],
            whole.token_ids.copy(),
            None if whole.logprobs is None else whole.logprobs.copy(),
            whole.cumulative_logprob,
            whole.finish_reason,
            whole.stop_reason,
            delta_text,
        )
