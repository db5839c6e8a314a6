"""What the engines are asked for: prompts and numbers of new tokens, the same for each of them from a few numbers.

Imports nothing but NumPy: it is loaded beside engines that bring versions of everything else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-k 50, top-p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
}
NANO_VLLM_MODE = "temperature 0.6"
SAMPLING: dict[str, dict[str, Any]] = {**MODES, NANO_VLLM_MODE: {"temperature": 0.6}}


@dataclass(frozen=True)
class Requests:
    """What is asked of an engine, one entry for each request."""

    prompts: list[list[int]]
    output_lens: list[int]
    due: list[float]
    """Seconds from the start."""

    def share(self, index: int, count: int) -> Requests:
        """Return every ``count``-th request from ``index`` on."""
        dealt = slice(index, None, count)
        return Requests(self.prompts[dealt], self.output_lens[dealt], self.due[dealt])


@dataclass(frozen=True)
class HeldStreams:
    """Streams that an engine keeps running while other requests arrive."""

    arriving: Requests
    """Due from when all streams run and ``settle_s`` is over."""
    seconds: float
    """From then on, at least; streams end when all that arrive are answered, too."""
    num_streams: int
    prompt_len: int
    """Of a stream, in tokens."""
    length: int
    """Of a stream, prompt and answer together: then another one takes its place."""
    vocab_size: int
    seed: int
    settle_s: float = 1.0

    def prompts(self, index: int) -> Iterator[tuple[list[int], int]]:
        """Yield prompt and number of new tokens of each stream that runs in one place, without an end.

        The first ones have different lengths, from one place to the next: else all streams would end at once.
        """
        rng, output_len = np.random.default_rng([self.seed, 6, index]), self.length - self.prompt_len
        new_tokens = max(1, output_len * (index + 1) // self.num_streams)
        while True:
            yield rng.integers(1, self.vocab_size, self.prompt_len).tolist(), new_tokens
            new_tokens = output_len


# No other prompt begins with token 0: this one leaves nothing in a prefix cache that a turn could find.
WAKING = Requests([[0, 1, 2, 3]], [1], [0.0])


@dataclass(frozen=True)
class RandomRequests:
    """Requests of random tokens. Lengths are drawn evenly from (low, high), both included."""

    num_requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    seed: int = 0
    num_prefixes: int = 0
    """Prompts begin with one of so many, drawn evenly, in front of ``input_len`` tokens of their own."""
    prefix_len: int = 0

    def requests(self, vocab_size: int, rate: float | None = None) -> Requests:
        """Return token ids below ``vocab_size``; no two workloads of different seeds share a prefix.

        Args:
            rate: of Poisson arrivals a second; None is all at once. The gaps of one seed are the same at every rate,
                but for their unit.
        """
        lengths = self._lengths(self.input_len, 2)
        tokens = self._rng(1).integers(1, vocab_size, sum(lengths)).tolist()
        ends = np.cumsum(lengths).tolist()
        prompts = [tokens[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        if self.num_prefixes:
            shape = (self.num_prefixes, self.prefix_len)
            prefixes = np.random.default_rng(self.seed).integers(1, vocab_size, shape).tolist()
            drawn = self._rng(5).integers(0, self.num_prefixes, self.num_requests)
            prompts = [prefixes[index] + prompt for index, prompt in zip(drawn, prompts, strict=True)]
        due = [0.0] * self.num_requests
        if rate is not None:
            due = (np.cumsum(self._rng(4).exponential(1.0, self.num_requests)) / rate).tolist()
        return Requests(prompts, self._lengths(self.output_len, 3), due)

    def shortened(self, num_requests: int, output_len: int) -> RandomRequests:
        """Return the same with at most so many requests and new tokens, to warm up with."""
        low, high = self.output_len
        return replace(
            self,
            num_requests=min(self.num_requests, num_requests),
            output_len=(min(low, output_len), min(high, output_len)),
        )

    def _rng(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream])

    def _lengths(self, span: tuple[int, int], stream: int) -> list[int]:
        lengths: list[int] = self._rng(stream).integers(span[0], span[1] + 1, self.num_requests).tolist()
        return lengths


@dataclass(frozen=True)
class NanoVllmRequests:
    """Requests of random lengths and tokens, drawn in the order of nano-vllm's ``bench.py``.

    Of 256 requests with ``length`` 1,024 and seed 0, all are that benchmark's: 142,827 prompt and 133,966 new tokens.
    """

    num_requests: int
    length: int = 1024
    """Of prompts and texts, at most; at least 100, where that is no more."""
    seed: int = 0
    """Added to token ids, as lengths shall be the same in each turn and no prompt known."""

    def requests(self, vocab_size: int) -> Requests:
        """Return token ids below ``vocab_size``, of at most 10,001 different ones."""
        low, high = min(100, self.length), self.length
        draw, num_ids = random.Random(0).randint, min(10_001, vocab_size)
        drawn = [[draw(0, 10_000) for _ in range(draw(low, high))] for _ in range(self.num_requests)]
        prompts = [[(token + self.seed) % num_ids for token in prompt] for prompt in drawn]
        output_lens = [draw(low, high) for _ in range(self.num_requests)]
        return Requests(prompts, output_lens, [0.0] * self.num_requests)

    def shortened(self, num_requests: int, output_len: int) -> NanoVllmRequests:
        """Return fewer and shorter requests, to warm up with."""
        return replace(self, num_requests=min(self.num_requests, num_requests), length=output_len)


def request_sets(num_requests: int, *, quick: bool) -> dict[str, RandomRequests]:
    """Return by name the sets that servers are sent, with ``quick`` a sixteenth of all lengths."""
    unit = 1 if quick else 16
    return {
        "random": RandomRequests(num_requests, (32 * unit, 32 * unit), (8 * unit, 8 * unit)),
        # 500 is no multiple of a block's 16 tokens.
        "shared-prefix": RandomRequests(
            num_requests,
            (unit, 4 * unit),
            (8 * unit, 8 * unit),
            num_prefixes=8,
            prefix_len=31 if quick else 500,
        ),
    }
