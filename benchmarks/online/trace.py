"""Request traces: made up after the public Qwen chat trace "A", or read from a file of that trace; fitted to a window.

The format is that of qwen_traceA_blksz_16.jsonl in alibaba-edu/qwen-bailian-usagetraces-anon: one JSON object a line
with timestamp (seconds from the start), input_length, output_length and hash_ids, one id for each 16 prompt tokens:
prompts that begin with the same ids begin with the same tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HASHED_TOKENS = 16


@dataclass(frozen=True)
class TraceRequest:
    """One request; prompt and answer in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def prompt(self, vocab_size: int, salt: int) -> list[int]:
        """Return the tokens that the ids stand for; another ``salt`` shares none of them."""
        tokens: list[int] = []
        for hash_id in self.hash_ids:
            block = np.random.default_rng([salt, hash_id]).integers(1, vocab_size, HASHED_TOKENS)
            tokens.extend(block.tolist())
        return tokens[: self.input_length]


class _Chats:
    """Makes up sessions of the statistics below."""

    # Requests a second over the two hours of the trace, and what share of them continues a session.
    REQUEST_RATE, FOLLOW_UP_SHARE = 5.98, 0.463
    SINGLE_SHARE = 0.61
    MEAN_TURNS = 1 / (1 - FOLLOW_UP_SHARE)
    # Gaps between sessions vary a little more than Poisson's: shape of their Gamma distribution.
    BURSTINESS = 0.84
    # (median, sigma) of log-normal distributions. A follow-up's prompt is all before it and some new text, so that
    # first prompts have to be shorter than the median of 1,046 tokens over all requests.
    FIRST_PROMPT, NEW_TEXT, OUTPUT, GAP_S = (480.0, 1.45), (200.0, 1.2), (375.0, 0.6), (110.0, 1.46)
    MAX_INPUT, MAX_OUTPUT = 30_000, 4_000
    # Some sessions begin with one of a few long texts that others begin with, too.
    NUM_SHARED_TEXTS, SHARED_SHARE, SHARED_BLOCKS = 20, 0.85, 40

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 5])
        self._new_ids = itertools.count(self.NUM_SHARED_TEXTS * self.SHARED_BLOCKS)

    def sessions(self, count: int) -> list[TraceRequest]:
        """Return the requests of ``count`` sessions, in no order."""
        rate = self.REQUEST_RATE / self.MEAN_TURNS
        gaps = self._rng.gamma(self.BURSTINESS, 1 / (rate * self.BURSTINESS), count)
        return [request for start in np.cumsum(gaps) for request in self._session(float(start))]

    def _session(self, start: float) -> list[TraceRequest]:
        chain = self._beginning()
        num_tokens = min(self._draw(self.FIRST_PROMPT), self.MAX_INPUT)
        requests: list[TraceRequest] = []
        for turn in range(self._num_turns()):
            if turn:
                start += float(self._rng.lognormal(np.log(self.GAP_S[0]), self.GAP_S[1]))
                num_tokens = min(
                    num_tokens + requests[-1].output_length + self._draw(self.NEW_TEXT), self.MAX_INPUT
                )
            output = min(self._draw(self.OUTPUT), self.MAX_OUTPUT)
            num_blocks = -(-num_tokens // HASHED_TOKENS)
            # The last block of the turn before was not full: its text goes on, so it has another id now.
            kept = chain[:-1] if turn else chain[:num_blocks]
            chain = kept + list(itertools.islice(self._new_ids, num_blocks - len(kept)))
            requests.append(TraceRequest(start, num_tokens, output, tuple(chain)))
        return requests

    def _num_turns(self) -> int:
        if self._rng.random() < self.SINGLE_SHARE:
            return 1
        mean_more = (self.MEAN_TURNS - self.SINGLE_SHARE) / (1 - self.SINGLE_SHARE) - 2
        return 1 + int(self._rng.geometric(1 / (1 + mean_more)))

    def _beginning(self) -> list[int]:
        if self._rng.random() >= self.SHARED_SHARE:
            return []
        text = min(int(self._rng.zipf(1.5)), self.NUM_SHARED_TEXTS) - 1
        return list(range(text * self.SHARED_BLOCKS, (text + 1) * self.SHARED_BLOCKS))

    def _draw(self, median_and_sigma: tuple[float, float]) -> int:
        median, sigma = median_and_sigma
        return max(int(self._rng.lognormal(np.log(median), sigma)), 1)


def synthetic_trace(num_requests: int, seed: int = 0) -> list[TraceRequest]:
    """Return the first requests of a made-up trace with the published statistics of trace A.

    Published: 5.98 requests a second, input p50 1,046 and mean 2,331, output p50 375 and mean 430, 61 % of the sessions
    with one request, 46.3 % follow-ups after 110 s (p50), of the prompt tokens at best 58 % reused.
    """
    requests = sorted(_Chats(seed).sessions(num_requests), key=lambda request: request.timestamp)
    return requests[:num_requests]


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a file.

    Raises:
        ValueError: a line is no request; it is named.
    """
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                fields = json.loads(line)
                lengths = int(fields["input_length"]), int(fields["output_length"])
                hash_ids = tuple(int(hash_id) for hash_id in fields["hash_ids"])
                yield TraceRequest(float(fields["timestamp"]), *lengths, hash_ids)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {type(error).__name__}: {error}") from error


def fitted(
    trace: Iterable[TraceRequest], num_requests: int, *, length_scale: float, max_model_len: int
) -> tuple[list[TraceRequest], int]:
    """Return the first ``num_requests`` that fit the window, all lengths scaled, from second 0 on.

    Returns: the requests, fewer where the trace ends before, and how many among them were left out.
    """
    kept: list[TraceRequest] = []
    num_left_out, start = 0, 0.0
    for request in trace:
        if len(kept) == num_requests:
            break
        input_length = max(round(request.input_length * length_scale), 1)
        output_length = max(round(request.output_length * length_scale), 1)
        num_blocks = -(-input_length // HASHED_TOKENS)
        if input_length + output_length > max_model_len or num_blocks > len(request.hash_ids):
            num_left_out += 1
            continue
        start = request.timestamp if not kept else start
        hash_ids = request.hash_ids[:num_blocks]
        kept.append(TraceRequest(request.timestamp - start, input_length, output_length, hash_ids))
    return kept, num_left_out


def statistics_of(trace: Sequence[TraceRequest]) -> dict[str, Any]:
    """Return what describes a workload, with the share of prompt blocks that an endless prefix cache would supply."""
    facts: dict[str, Any] = {"num_requests": len(trace), "seconds": trace[-1].timestamp if trace else 0.0}
    for name in ("input_length", "output_length"):
        values = [getattr(request, name) for request in trace]
        facts[name] = {
            "mean": float(np.mean(values)),
            **{f"p{share}": float(np.percentile(values, share)) for share in (50, 90, 99)},
        }
    # An id names a block and all before it, so that its place is all that has to match.
    blocks = [block for request in trace for block in enumerate(request.hash_ids)]
    facts["best_prefix_hit_ratio"] = (len(blocks) - len(set(blocks))) / max(len(blocks), 1)
    return facts
