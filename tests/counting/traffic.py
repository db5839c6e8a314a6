"""Requests of the counting model: what they ask for, and clients that send them, leave early, and come back."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.counting.checkpoint import CYCLE_LENGTH, HEADER_LENGTH, VOCAB_SIZE, count_on

NUM_STEMS = 12
"""Starts that several requests share at a time."""
ABORT_S = (0.001, 0.040)
"""How long a client waits that leaves early, in seconds."""


@dataclass(frozen=True)
class CountingRequest:
    """What one client asks for, until it has the whole answer."""

    prompt: list[int]
    max_tokens: int
    n: int
    temperature: float
    num_aborts: int
    """How often the client leaves before it waits for the end."""

    @property
    def expected(self) -> list[list[int]]:
        """Token ids of each of the ``n`` answers."""
        return [count_on(self.prompt[-1], self.max_tokens)] * self.n


Generate = Callable[[CountingRequest], Coroutine[Any, Any, list[list[int]]]]
"""Answers a request; cancelling it aborts the request."""


@dataclass
class Outcome:
    """Of all requests together."""

    num_requests: int = 0
    num_aborts: int = 0
    wrong: list[str] = field(default_factory=list)


class Requests:
    """Draws requests: of starts that come again at any length and of fresh ones, short and long.

    Args:
        samples: some have siblings, and some are sampled, although their numbers are as good as certain.
    """

    def __init__(self, seed: int, *, samples: bool) -> None:
        self._random = random.Random(seed)
        self._samples = samples
        self._stems = [self._start() for _ in range(NUM_STEMS)]

    def next(self) -> CountingRequest:
        """Return another request."""
        draw = self._random
        if draw.random() < 0.02:
            self._stems[draw.randrange(NUM_STEMS)] = self._start()
        header, start = self._stems[draw.randrange(NUM_STEMS)] if draw.random() < 0.6 else self._start()
        length = draw.choice((draw.randrange(24), draw.randrange(200)))
        n = draw.choice((2, 3)) if self._samples and draw.random() < 0.125 else 1
        is_sampled = n > 1 or (self._samples and draw.random() < 0.2)
        return CountingRequest(
            prompt=[*header, start, *count_on(start, length)],
            max_tokens=draw.choice((draw.randrange(1, 9), draw.randrange(1, 80))),
            n=n,
            temperature=1.0 if is_sampled else 0.0,
            num_aborts=draw.choice((0, 0, 0, 1, 2)),
        )

    def leave_after_s(self) -> float:
        """Return how long a client waits that leaves early."""
        return self._random.uniform(*ABORT_S)

    def _start(self) -> tuple[list[int], int]:
        """Return a header and a number to start with.

        In the header, numbers of the cycle come before others than their successors, so that drafts go wrong.
        """
        start = self._random.randrange(VOCAB_SIZE)
        first = start - start % CYCLE_LENGTH
        pairs = [
            (first + self._random.randrange(CYCLE_LENGTH), self._random.randrange(VOCAB_SIZE))
            for _ in range(HEADER_LENGTH // 2)
        ]
        return list(itertools.chain(*pairs)), start


async def serve(generate: Generate, requests: Requests, num_requests: int, concurrency: int) -> Outcome:
    """Send requests from ``concurrency`` clients, and compare every answer; clients stop at the first that is wrong.

    Args:
        generate: of a running engine.
    """
    outcome = Outcome()

    async def client() -> None:
        while outcome.num_requests < num_requests and not outcome.wrong:
            outcome.num_requests += 1
            request = requests.next()
            for _ in range(request.num_aborts):
                try:
                    await asyncio.wait_for(generate(request), requests.leave_after_s())
                except TimeoutError:
                    outcome.num_aborts += 1
            answers = await generate(request)
            if answers != request.expected:
                outcome.wrong.append(_describe(request, answers))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return outcome


def _describe(request: CountingRequest, answers: list[list[int]]) -> str:
    if len(answers) != request.n:
        return f"{len(answers)} answers, expected {request.n}"
    for which, (answer, expected) in enumerate(zip(answers, request.expected, strict=True)):
        if answer == expected:
            continue
        pairs = zip(answer, expected, strict=False)
        at = next((index for index, (got, right) in enumerate(pairs) if got != right), len(answer))
        return (
            f"prompt of {len(request.prompt)} tokens that ends with {request.prompt[-4:]}, answer {which} of "
            f"{request.n}, token {at}: got {answer[at : at + 4]}, expected {expected[at : at + 4]}"
        )
    raise AssertionError("all answers are right")
