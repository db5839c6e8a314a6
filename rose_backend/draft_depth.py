"""Adaptive drafts: chooses for each step between all ``num_speculative_tokens`` drafts and none, by tokens per second.

Both engines use ``DraftDepth``. To change which steps have drafts, start here; to change what is drafted, see
``kernels/decode_step/drafts.py`` (n-grams, standalone engine) or vLLM's own drafters.

A step that verifies drafts takes longer than one without, and yields more tokens if enough drafts are accepted. How
much longer depends on the number of running requests; how many are accepted depends on the text. Both are measured
while the engine runs. In steps without drafts, ``ShadowDrafts`` looks up on the CPU which n-grams would have been
drafted, for one request at a time, and compares them with what the model then generates. What a head would draft is
known only from trials: a few steps with drafts now and then.
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

_STEPS_BETWEEN_DECISIONS = 8
"""Outputs that arrive right after a change still belong to steps before it, so the next decision waits this long."""
_MIN_TIMES, _MAX_TIMES = 4, 15
"""Fewest and most step times of which a median is taken."""
_TRIAL_STEPS, _MAX_COST = 10, 0.01
"""Approximate length of a trial in steps, and the share of all tokens that trials may cost. Trials are repeated because
times change: contexts grow, and other work on the GPU comes and goes."""
_STEPS_BETWEEN_TRIALS = (100, 20_000)
"""Fewest and most steps between two trials."""
_MAX_TRIAL_STEPS = 50
"""A trial is given up after this many steps. Only steps without prompts are timed, and there may be none."""
_MIN_GAIN = 1.02
"""The other depth is chosen only if it is better by this factor, so that noise changes nothing."""
_NUM_OBSERVED = 32
"""Steps over which accepted drafts are averaged; older ones fade."""
_MAX_TOKENS_LOOKED_AT = 8192
"""Last tokens of a request in which ``ShadowDrafts`` looks for n-grams; this takes the CPU 0.15 to 0.4 ms."""


class _Trial(NamedTuple):
    """A trial in progress: some steps with the other depth, to time them."""

    depth: int
    """The depth before the trial, to compare with."""
    seconds: float
    """Time of a step with that depth."""
    begin: int
    """Step at which the trial began, see ``DraftDepth._num_steps``."""


class _Comparison(NamedTuple):
    """Result of the latest trial with batches of one size."""

    seconds: dict[int, float]
    """Time of a step, by depth."""
    num_steps: int
    """Step at which the trial ended, see ``DraftDepth._num_steps``."""


class DraftDepth:
    """Chooses the depth, the number of drafts of each request: 0 or ``num_drafts``, whichever is faster.

    Call ``choose`` once per step, ``note_time`` and ``note_accepted`` when outputs arrive. Batches are grouped by size,
    the bit length of the number of requests.

    Args:
        num_drafts: ``num_speculative_tokens``.
    """

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = self._depth = num_drafts
        # Times of the latest steps in seconds, by depth and size.
        self._times = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=_MAX_TIMES))
        # By size.
        self._comparisons: dict[int, _Comparison] = {}
        self._trial: _Trial | None = None
        # First step of the next trial of a size whose last trial was given up.
        self._next_trials: dict[int, int] = {}
        # Average of accepted drafts per request and step, and the number of steps in it, at most _NUM_OBSERVED.
        self._num_accepted, self._num_observed = 0.0, 0
        # Steps so far; those of them with drafts; the step of the next decision.
        self._num_steps = self._num_drafted = self._next_decision = 0
        # Size of the batch, and the last step whose batch had exactly this size.
        self._size = self._last_of_size = 0

    def __str__(self) -> str:
        of_all = self._num_steps and 100.0 * self._num_drafted / self._num_steps
        return (
            f"{of_all:.0f} % of steps had drafts, {self._num_accepted:.2f} of {self.num_drafts} are accepted"
        )

    def choose(self, num_requests: int) -> int:
        """Return the depth of the step to be scheduled, after which ``num_requests`` run."""
        self._num_steps += 1
        has_changed = self._note_size(num_requests.bit_length())
        if self._num_steps >= self._next_decision or has_changed:
            self._next_decision = self._num_steps + _STEPS_BETWEEN_DECISIONS
            if self._is_other_better(self._size) or self._is_trial_due(self._size):
                self._depth = self.num_drafts - self._depth
        self._num_drafted += self._depth > 0
        return self._depth

    def _note_size(self, size: int) -> bool:
        """Note the size of the batch; return whether it counts as changed.

        A neighboring size counts only after some steps, any other at once. A change cancels the trial in progress and
        forgets the times of earlier batches of the new size.
        """
        is_near = abs(size - self._size) < 2
        if size == self._size or (
            is_near and self._num_steps - self._last_of_size < _STEPS_BETWEEN_DECISIONS
        ):
            self._last_of_size = self._num_steps if size == self._size else self._last_of_size
            return False
        self._size, self._last_of_size = size, self._num_steps
        if self._trial is not None:
            self._depth, self._trial = self._trial.depth, None
        for depth in (0, self.num_drafts):
            self._times[depth, size].clear()
        return True

    def _seconds_here(self, size: int) -> float | None:
        """Return the median time of a step with the current depth; None if too few have been timed."""
        times = self._times[self._depth, size]
        return median(times) if len(times) >= _MIN_TIMES else None

    def _is_other_better(self, size: int) -> bool:
        """Whether to switch to the other depth. Ends a trial in progress if it has its times, or has taken too long."""
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
        # A size without a comparison of its own takes the most similar size's.
        nearest = min(self._comparisons, key=lambda other: abs(other - size))
        rates = self._rates(self._comparisons[nearest])
        return rates[self.num_drafts - self._depth] > _MIN_GAIN * rates[self._depth]

    def _is_trial_due(self, size: int) -> bool:
        """Whether to try the other depth now. If so, the trial begins."""
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
            # Drafts accepted in the trial shall outweigh those that were only looked up.
            self._num_observed = min(self._num_observed, _MIN_TIMES)
        return True

    def _steps_until_trial(self, known: _Comparison) -> float:
        """Return after how many steps another trial costs no more than ``_MAX_COST``, judged by the last one."""
        rates, other = self._rates(known), self.num_drafts - self._depth
        lost = max(1.0 - rates[other] / rates[self._depth], 0.0)
        num_steps = _TRIAL_STEPS * known.seconds[other] / known.seconds[self._depth] * lost / _MAX_COST
        least, most = _STEPS_BETWEEN_TRIALS
        return min(max(num_steps, least), most)

    def _rates(self, known: _Comparison) -> dict[int, float]:
        """Return the tokens per second of each request, by depth."""
        accepted = self._num_accepted
        return {depth: (1.0 + accepted * (depth > 0)) / seconds for depth, seconds in known.seconds.items()}

    def note_time(self, depth: int, num_requests: int, seconds: float) -> None:
        """Note the time of a step that only decoded: ``num_requests`` requests with ``depth`` drafts each."""
        self._times[depth, num_requests.bit_length()].append(seconds)

    def note_accepted(self, num_accepted: float) -> None:
        """Note how many drafts of a request a step accepted, or would have accepted: the mean over its requests."""
        self._num_observed = min(self._num_observed + 1, _NUM_OBSERVED)
        self._num_accepted += (num_accepted - self._num_accepted) / self._num_observed


class ShadowDrafts(Generic[_Request]):
    """Looks up which drafts an n-gram lookup would have made for a request, and counts how many were right.

    Args:
        num_drafts: ``num_speculative_tokens``.
        min_n, max_n: ``prompt_lookup_min`` and ``prompt_lookup_max``.
        tokens_of: returns all known tokens of a request, prompt and output; None if it is no longer running.
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
        """Return how many leading drafts of the current request were right, once it has generated enough tokens.

        None before that. Afterwards, or if it no longer runs, the next of these ``requests`` becomes the current one.
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
    """Return the drafts, ``num_drafts`` of them, that vLLM's n-gram lookup makes after ``tokens``, [T].

    They are the tokens after the last earlier occurrence of the longest suffix of ``tokens``, of ``min_n`` to ``max_n``
    tokens, that occurs earlier at all. Drafts that are missing repeat the last token.
    """
    num_tokens = start = len(tokens)
    # Ends of earlier occurrences of the suffix of n tokens; each is also one of the suffix of n - 1.
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
