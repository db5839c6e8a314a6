"""Sets of requests for serving benchmarks: prompts with and without prefixes in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.support.workload import Workload, random_prompts


@dataclass(frozen=True)
class Requests:
    """What is asked of a server, one entry for each request."""

    prompts: list[list[int]]
    output_lens: list[int]
    due: list[float]
    """Seconds from the start."""


@dataclass(frozen=True)
class RequestSet:
    """Prompts of random tokens: one of a few prefixes, drawn evenly, then a tail of its own."""

    name: str
    num_prefixes: int
    prefix_len: int
    tail_len: tuple[int, int]
    """Shortest and longest; drawn evenly."""
    output_len: int

    def requests(self, num_requests: int, vocab_size: int, *, rate: float | None, seed: int) -> Requests:
        """Return requests; those of another seed share nothing with them.

        Args:
            rate: requests per second of Poisson arrivals; None sends all of them at once.
        """
        span = (self.output_len, self.output_len)
        tails = Workload(num_requests, self.tail_len, span, "greedy", seed)
        prompts = tails.prompts(vocab_size)
        if self.num_prefixes:
            prefixes = random_prompts(self.num_prefixes, self.prefix_len, vocab_size, seed)
            chosen = np.random.default_rng([seed, 5]).integers(0, self.num_prefixes, num_requests)
            prompts = [prefixes[index] + tail for index, tail in zip(chosen, prompts, strict=True)]
        due = [0.0] * num_requests if rate is None else tails.arrivals(rate)
        return Requests(prompts, tails.output_lens(), due)

    def shortened(self, factor: int) -> RequestSet:
        """Return the same with all lengths divided."""
        low, high = self.tail_len
        return replace(
            self,
            prefix_len=self.prefix_len // factor,
            tail_len=(max(1, low // factor), max(1, high // factor)),
            output_len=self.output_len // factor,
        )


RANDOM = RequestSet("random", num_prefixes=0, prefix_len=0, tail_len=(512, 512), output_len=128)
# 500 is no multiple of a block's 16 tokens.
SHARED_PREFIX = RequestSet("shared-prefix", num_prefixes=8, prefix_len=500, tail_len=(16, 64), output_len=128)
SETS = {each.name: each for each in (RANDOM, SHARED_PREFIX)}
