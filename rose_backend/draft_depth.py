"""Chooses whether a step has all drafts that are asked for or none, whichever gives more tokens per second.

Both engines use it.

A step that verifies drafts takes longer than one without, and gives more tokens where enough of them are accepted. How
much longer depends on how many requests run, and how many are accepted on what they write. Both are measured as the
engine runs. Without drafts, n-grams that would have been drafted are looked up for one request at a time, on the CPU,
and compared with what the model writes. What a head would draft is known from trials alone: a few steps with drafts now
and then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Tokens = list[int] | NDArray[np.signedinteger[Any]]
_Request = TypeVar("_Request")

_STEPS_BETWEEN_LOOKS = 8
"""Steps between two decisions: outputs that arrive right after a change are of steps before it."""
_MIN_TIMES, _MAX_TIMES = 4, 15
"""Times of steps that a median is taken of."""
_TRIAL_STEPS, _MAX_COST = 10, 0.01
"""Steps of a trial, about, and the share of its tokens that an engine may lose by trials. The number of drafts that is
not in use is timed again when one is worth it: contexts have grown, or others use the GPU no more."""
_STEPS_BETWEEN_TRIALS = (100, 20_000)
"""At least, and at most."""
_MAX_TRIAL_STEPS = 50
"""After which a trial is given up: steps with prompts are not timed."""
_MIN_GAIN = 1.02
"""By which the number of drafts that is not in use must be better, so that noise changes nothing."""
_NUM_OBSERVED = 32
"""Steps over which accepted drafts are averaged; older ones fade."""
_MAX_TOKENS_LOOKED_AT = 8192
"""Last tokens of a request that drafts are looked up in, which takes the CPU 0.15 to 0.4 ms."""


class _Trial(NamedTuple):
    """The other number of drafts is in use, to time it."""

    depth: int
    """The number before."""
    seconds: float
    """What a step took with it."""
    begin: int
    """When it began, as ``DraftDepth`` counts."""


class _Comparison(NamedTuple):
    """Both kinds of steps of batches of one size, timed one after the other."""

    seconds: dict[int, float]
    """By number of drafts."""
    num_steps: int
    """When it was made, as ``DraftDepth`` counts."""


class DraftDepth:
    """Chooses how many drafts requests get, 0 or ``num_drafts``, by the tokens per second that either gives.

    Args:
        num_drafts: ``num_speculative_tokens``.
    """

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = self._depth = num_drafts
        # By number of drafts and size of the batch, in powers of two.
        self._times = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=_MAX_TIMES))
        self._comparisons: dict[int, _Comparison] = {}
        self._trial: _Trial | None = None
        # By size, where a trial was given up.
        self._next_trials: dict[int, int] = {}
        self._num_accepted, self._num_observed = 0.0, 0
        self._num_steps = self._num_drafted = self._next_look = 0
        # Of the batch, and the last step in which it had that.
        self._size = self._last_of_size = 0

    def __str__(self) -> str:
        of_all = self._num_steps and 100.0 * self._num_drafted / self._num_steps
        return (
            f"{of_all:.0f} % of steps had drafts, {self._num_accepted:.2f} of {self.num_drafts} are accepted"
        )

    def choose(self, num_requests: int) -> int:
        """Return how many drafts are made in the step to be scheduled, after which ``num_requests`` run."""
        self._num_steps += 1
        has_changed = self._has_another_size(num_requests.bit_length())
        if self._num_steps >= self._next_look or has_changed:
            self._next_look = self._num_steps + _STEPS_BETWEEN_LOOKS
            if self._is_other_better(self._size) or self._is_trial_due(self._size):
                self._depth = self.num_drafts - self._depth
        self._num_drafted += self._depth > 0
        return self._depth

    def _has_another_size(self, size: int) -> bool:
        """Whether the batch has another size from now on: about twice another one, or not only for some steps.

        What was begun with the size before is over, and what this size took at an earlier time is forgotten.
        """
        is_near = abs(size - self._size) < 2
        if size == self._size or (is_near and self._num_steps - self._last_of_size < _STEPS_BETWEEN_LOOKS):
            self._last_of_size = self._num_steps if size == self._size else self._last_of_size
            return False
        self._size, self._last_of_size = size, self._num_steps
        if self._trial is not None:
            self._depth, self._trial = self._trial.depth, None
        for depth in (0, self.num_drafts):
            self._times[depth, size].clear()
        return True

    def _seconds_here(self, size: int) -> float | None:
        """Return what a step takes with the present number of drafts; None if that is not known."""
        times = self._times[self._depth, size]
        return median(times) if len(times) >= _MIN_TIMES else None

    def _is_other_better(self, size: int) -> bool:
        here, trial = self._seconds_here(size), self._trial
        if trial is not None:
            if here is None:
                is_over = self._num_steps - trial.begin >= _MAX_TRIAL_STEPS
                if is_over:
                    self._trial = None
                    self._next_trials[size] = self._num_steps + int(_MAX_TRIAL_STEPS / _MAX_COST)
                return is_over
            self._trial = None
            self._comparisons[size] = _Comparison(
                {trial.depth: trial.seconds, self._depth: here}, self._num_steps
            )
        if not self._comparisons:
            return False
        # Batches of a size that has not been seen take what the most similar one takes.
        nearest = min(self._comparisons, key=lambda other: abs(other - size))
        rates = self._rates(self._comparisons[nearest])
        return rates[self.num_drafts - self._depth] > _MIN_GAIN * rates[self._depth]

    def _is_trial_due(self, size: int) -> bool:
        """Whether to try the other number of drafts; then note what a step takes with the present one."""
        here, known = self._seconds_here(size), self._comparisons.get(size)
        if here is None or self._trial is not None or not self._num_observed:
            return False
        if self._num_steps < self._next_trials.get(size, 0):
            return False
        if known is not None and self._num_steps - known.num_steps < self._steps_until_trial(known):
            return False
        self._trial = _Trial(self._depth, here, self._num_steps)
        self._times[self.num_drafts - self._depth, size].clear()
        if self._depth == 0:
            # What is accepted then counts for more than what was only looked up.
            self._num_observed = min(self._num_observed, _MIN_TIMES)
        return True

    def _steps_until_trial(self, known: _Comparison) -> float:
        """Return after how many steps another trial is worth what it costs, by the last one."""
        rates, other = self._rates(known), self.num_drafts - self._depth
        lost = max(1.0 - rates[other] / rates[self._depth], 0.0)
        num_steps = _TRIAL_STEPS * known.seconds[other] / known.seconds[self._depth] * lost / _MAX_COST
        least, most = _STEPS_BETWEEN_TRIALS
        return min(max(num_steps, least), most)

    def _rates(self, known: _Comparison) -> dict[int, float]:
        """Return the tokens per second of each request, by number of drafts."""
        accepted = self._num_accepted
        return {depth: (1.0 + accepted * (depth > 0)) / seconds for depth, seconds in known.seconds.items()}

    def note_time(self, depth: int, num_requests: int, seconds: float) -> None:
        """Note how long a step took in which ``num_requests`` decoded, with ``depth`` drafts each, and nothing else."""
        self._times[depth, num_requests.bit_length()].append(seconds)

    def note_accepted(self, num_accepted: float) -> None:
        """Note how many drafts of a request were accepted in a step, or would have been; a mean of requests."""
        self._num_observed = min(self._num_observed + 1, _NUM_OBSERVED)
        self._num_accepted += (num_accepted - self._num_accepted) / self._num_observed


class ShadowDrafts(Generic[_Request]):
    """Looks up what would have been drafted for a request, and counts how much of it the model then writes.

    Args:
        num_drafts: ``num_speculative_tokens``.
        min_n, max_n: ``prompt_lookup_min`` and ``prompt_lookup_max``.
        tokens_of: returns all known tokens of a request, prompt and output; None if it runs no more.
    """

    def __init__(
        self, num_drafts: int, min_n: int, max_n: int, tokens_of: Callable[[_Request], Tokens | None]
    ) -> None:
        self._num_drafts, self._min_n, self._max_n = num_drafts, min_n, max_n
        self._tokens_of = tokens_of
        self._turn = 0
        self._request: _Request | None = None
        self._drafts: list[int] = []
        self._start = 0

    def look(self, requests: Sequence[_Request]) -> int | None:
        """Return how many drafts were right of the request looked at, once it has as many more tokens; else None.

        Then, or if it runs no more, the next one of these ``requests`` has its turn.
        """
        num_right = None
        if self._request is not None and (known := self._tokens_of(self._request)) is not None:
            tokens = known[self._start : self._start + self._num_drafts]
            if len(tokens) < self._num_drafts:
                return None
            is_right = [token == draft for token, draft in zip(tokens, self._drafts, strict=True)]
            num_right = [*is_right, False].index(False)
        self._request = None
        if len(requests):
            self._turn = (self._turn + 1) % len(requests)
            request = requests[self._turn]
            if (known := self._tokens_of(request)) is not None:
                self._request, self._start = request, len(known)
                last = np.array(known[-_MAX_TOKENS_LOOKED_AT:])
                self._drafts = look_up(last, self._num_drafts, self._min_n, self._max_n)
        return num_right


def look_up(tokens: NDArray[np.signedinteger[Any]], num_drafts: int, min_n: int, max_n: int) -> list[int]:
    """Return the drafts that vLLM's lookup by n-grams makes after ``tokens``, [T].

    They are what has followed the last occurrence of the longest n-gram, of ``min_n`` to ``max_n`` tokens, that
    ``tokens`` end with. What is missing is the last token again.
    """
    num_tokens = start = len(tokens)
    # Where n-grams end that equal the last one. Those of n tokens are among those of n - 1.
    ends = 1 + np.flatnonzero(tokens[:-1] == tokens[-1])
    for n in range(1, max_n + 1):
        if n > 1:
            ends = ends[ends >= n]
            ends = ends[tokens[ends - n] == tokens[num_tokens - n]]
        if not len(ends):
            break
        if n >= min_n:
            start = int(ends[-1])
    drafts: list[int] = tokens[start : start + num_drafts].tolist()
    return drafts + [int(tokens[-1])] * (num_drafts - len(drafts))
