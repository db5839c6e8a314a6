"""Adaptive drafts: chooses for each step how many drafts its requests have, by tokens per second.

Both engines use ``DraftDepth``. To change how many drafts a step has, start here; to change what is drafted, see
``kernels/decode_step/drafts.py`` (n-grams, standalone engine) or vLLM's own drafters.

A step that verifies drafts takes longer than one without, and yields more tokens if enough drafts are accepted. How
much longer depends on the number of running requests; how many are accepted depends on the text. Both are measured
while the engine runs. In steps without drafts, ``ShadowDrafts`` looks up on the CPU which n-grams would have been
drafted, for one request at a time, and compares them with what the model then generates. What a head would draft is
known only from trials: a few steps with another number of drafts now and then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import and_
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rose_backend.config import MAX_SPECULATIVE_TOKENS

Tokens = list[int] | NDArray[np.signedinteger[Any]]
_Request = TypeVar("_Request")

_STEPS_BETWEEN_DECISIONS = 8
"""Outputs that arrive right after a change still belong to steps before it, so the next decision waits this long."""
_MIN_TIMES, _MAX_TIMES = 4, 15
"""Fewest and most step times of which a median is taken."""
_MIN_HOPELESS = 2
"""Step times after which a trial ends if its depth would be slower even with all drafts accepted."""
_TRIAL_STEPS, _MAX_COST = 6, 0.01
"""Approximate length of a trial in steps, and the share of all tokens that trials may cost. Trials are repeated because
times change: contexts grow, and other work on the GPU comes and goes."""
_STEPS_BETWEEN_TRIALS = (100, 20_000)
"""Fewest and most steps between two trials of a depth."""
_MAX_TRIAL_STEPS = 50
"""A trial ends after this many steps. Only steps without prompts are timed, and there may be none."""
_MIN_GAIN = 1.02
"""Another depth is chosen only if it is better by this factor, so that noise changes nothing."""
_MAX_TRIALS = 4
"""Trials over which the time of a step is averaged; older ones fade."""
_OTHER_TIMES = 1.25
"""A trial that differs from earlier ones by this factor replaces them: something else than contexts has changed."""
_NUM_OBSERVED = 32
"""Steps over which accepted drafts are averaged; older ones fade."""
_MAX_TOKENS_LOOKED_AT = 8192
"""Last tokens of a request in which ``ShadowDrafts`` looks for n-grams; this takes the CPU 0.15 to 0.4 ms."""


def draft_depths(num_drafts: int) -> tuple[int, ...]:
    """Return the depths to choose from, rising: 0, 1, 3, 7 and all ``num_drafts``.

    With these a request computes 1, 2, 4 or 8 tokens in a step, which fill the tiles of kernels. If all of them are
    more than decode attention takes, there is only 0 besides: graphs of decodes have at most that many.
    """
    if num_drafts > MAX_SPECULATIVE_TOKENS:
        return 0, num_drafts
    return (*((1 << tokens) - 1 for tokens in range(num_drafts.bit_length())), num_drafts)


class _Trial(NamedTuple):
    """A trial in progress: some steps with another depth, to time them."""

    depth: int
    """The depth before the trial, to compare with."""
    seconds: float
    """Time of a step with that depth."""
    begin: int
    """Step at which the trial began, see ``DraftDepth._num_steps``."""


class _StepTime(NamedTuple):
    """The time of a step with one depth, in batches of one size, by its latest trials."""

    seconds: float
    timed: int
    """Step at which the last trial ended, see ``DraftDepth._num_steps``."""
    trial_steps: int
    """Length of that trial in steps; ``_TRIAL_STEPS`` if there was none."""
    num_trials: int
    """Trials that ``seconds`` is an average of, at most ``_MAX_TRIALS``."""


class _Acceptance:
    """How often the first draft of a request is accepted, and each later one if those before it are.

    Attributes:
        num_observed: number of steps in the average of the first draft, at most ``_NUM_OBSERVED``.
    """

    def __init__(self, num_drafts: int) -> None:
        self._num_observed, self._observed = [0] * num_drafts, [0] * num_drafts
        # By place: the share of requests with all earlier drafts accepted, and the share with this one accepted, too.
        self._before, self._with = [0.0] * num_drafts, [0.0] * num_drafts

    @property
    def num_observed(self) -> int:
        return self._num_observed[0]

    def note(self, shares: Sequence[float], step: int) -> None:
        """Note the accepted drafts of a step, see ``DraftDepth.note_accepted``."""
        before = 1.0
        for place, share in enumerate(shares):
            self._observed[place] = step
            self._num_observed[place] = num = min(self._num_observed[place] + 1, _NUM_OBSERVED)
            self._before[place] += (before - self._before[place]) / num
            self._with[place] += (share - self._with[place]) / num
            before = share

    def mean(self, depth: int, since: int = -1) -> float:
        """Return how many of ``depth`` drafts are accepted on average.

        A place that was not observed after step ``since`` counts as always accepted.
        """
        accepted, share = 0.0, 1.0
        for place in range(depth):
            if self._observed[place] > since:
                share *= self._with[place] / self._before[place] if self._before[place] else 0.0
            accepted += share
        return accepted


class DraftDepth:
    """Chooses the depth, the number of drafts of each request in a step: the one with the most tokens per second.

    Call ``choose`` once per step, ``note_time`` and ``note_accepted`` when outputs arrive. Batches are grouped by size,
    the bit length of the number of requests.

    Args:
        num_drafts: ``num_speculative_tokens``.
    """

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = self._depth = num_drafts
        self._depths = draft_depths(num_drafts)
        # Times of the latest steps in seconds, by depth and size.
        self._times = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=_MAX_TIMES))
        # By size and depth. A size has at least two depths, or none.
        self._known = defaultdict[int, dict[int, _StepTime]](dict)
        self._trial: _Trial | None = None
        # First step of the next trial of a size and depth whose last trial was given up.
        self._next_trials: dict[tuple[int, int], int] = {}
        self._acceptance = _Acceptance(num_drafts)
        # Steps so far; those of them with drafts; the step of the next decision.
        self._num_steps = self._num_drafted = self._next_decision = 0
        # Size of the batch, and the last step whose batch had exactly this size, by size.
        self._size, self._last_steps = 0, dict[int, int]()

    def __str__(self) -> str:
        of_all = self._num_steps and 100.0 * self._num_drafted / self._num_steps
        accepted = self._acceptance.mean(self.num_drafts)
        return f"{of_all:.0f} % of steps had drafts, {accepted:.2f} of {self.num_drafts} are accepted"

    def choose(self, num_requests: int) -> int:
        """Return the depth of the step to be scheduled, after which ``num_requests`` run."""
        self._num_steps += 1
        has_changed = self._note_size(num_requests.bit_length())
        # A trial is over as soon as it has shown enough.
        if self._num_steps >= self._next_decision or has_changed or self._trial is not None:
            self._next_decision = self._num_steps + _STEPS_BETWEEN_DECISIONS
            self._depth = self._choose(self._size)
        self._num_drafted += self._depth > 0
        return self._depth

    def _note_size(self, size: int) -> bool:
        """Note the size of the batch; return whether it counts as changed.

        A neighboring size counts only after some steps, any other at once. A change ends the trial in progress, and
        forgets the times of the new size if they are old.
        """
        last_step, self._last_steps[size] = self._last_steps.get(size, 0), self._num_steps
        is_near = abs(size - self._size) < 2
        num_steps = self._num_steps - self._last_steps.get(self._size, 0)
        if size == self._size or (is_near and num_steps < _STEPS_BETWEEN_DECISIONS):
            return False
        if (trial := self._trial) is not None:
            if self._seconds_here(self._size) is not None:
                self._end(trial, self._size)
            self._depth, self._trial = trial.depth, None
        self._size = size
        if self._num_steps - last_step > _STEPS_BETWEEN_TRIALS[0]:
            for depth in self._depths:
                self._times[depth, size].clear()
        return True

    def _choose(self, size: int) -> int:
        here = self._seconds_here(size)
        if self._trial is not None:
            if self._goes_on(self._trial, size, here):
                return self._depth
            here = self._end(self._trial, size)
        best = self._best(size)
        if best != self._depth:
            return best
        return self._depth if here is None else self._begin_trial(size, here)

    def _seconds_here(self, size: int) -> float | None:
        """Return the median time of a step with the current depth; None if too few have been timed."""
        times = self._times[self._depth, size]
        return median(times) if len(times) >= _MIN_TIMES else None

    def _goes_on(self, trial: _Trial, size: int, here: float | None) -> bool:
        """Whether a trial continues: it has too few times, and may still be better.

        Args:
            here: median time of its steps; None if too few have been timed.
        """
        if self._num_steps - trial.begin >= _MAX_TRIAL_STEPS:
            return False
        times = self._times[self._depth, size]
        rate_before = (1.0 + self._acceptance.mean(trial.depth)) / trial.seconds
        if here is None:
            return len(times) < _MIN_HOPELESS or (1.0 + self._depth) / min(times) >= rate_before
        # A depth that seems better costs nothing while more of its steps are timed.
        return len(times) < _MAX_TIMES and (1.0 + self._acceptance.mean(self._depth)) / here > rate_before

    def _end(self, trial: _Trial, size: int) -> float | None:
        """End a trial; return the median time of its steps, None if too few have been timed.

        The times of all depths change by the factor by which the one before the trial has changed. If the trial has
        made sure that the tried depth has changed by another factor, all depths are due for a trial.
        """
        self._trial, times = None, self._times[self._depth, size]
        if len(times) < _MIN_HOPELESS:
            self._next_trials[size, self._depth] = self._num_steps + int(_MAX_TRIAL_STEPS / _MAX_COST)
            self._depth = trial.depth
            return None
        here, known = median(times), self._known[size]
        last = known.get(trial.depth, _StepTime(trial.seconds, self._num_steps, _TRIAL_STEPS, _MAX_TRIALS))
        for depth, step in known.items():
            known[depth] = step._replace(seconds=step.seconds * trial.seconds / last.seconds)
        known[trial.depth] = last._replace(seconds=trial.seconds, timed=self._num_steps)
        tried, seconds, num_trials = known.get(self._depth), here, 1
        if tried is not None and 1 / _OTHER_TIMES < here / tried.seconds < _OTHER_TIMES:
            num_trials = min(tried.num_trials + 1, _MAX_TRIALS)
            seconds = tried.seconds + (here - tried.seconds) / num_trials
        elif tried is not None and len(times) == _MAX_TIMES:
            for depth, step in known.items():
                known[depth] = step._replace(timed=self._num_steps, trial_steps=0, num_trials=1)
        known[self._depth] = _StepTime(seconds, self._num_steps, self._num_steps - trial.begin, num_trials)
        return here

    def _best(self, size: int) -> int:
        """Return the depth with the most tokens per second; the current one if in doubt."""
        if not self._known:
            return self._depth
        # Where this size was never timed, the most similar size stands in.
        rates = self._rates(self._known[min(self._known, key=lambda other: abs(other - size))])
        best = max(rates, key=lambda depth: rates[depth])
        is_better = self._depth in rates and rates[best] > _MIN_GAIN * rates[self._depth]
        return best if is_better else self._depth

    def _begin_trial(self, size: int, here: float) -> int:
        """Return the depth to try now, and begin its trial; the current depth if none is due.

        Args:
            here: median time of a step with the current depth.
        """
        known = self._known.get(size, {})
        others = [
            depth
            for depth in self._depths
            if depth != self._depth
            and self._num_steps >= self._next_trials.get((size, depth), 0)
            and self._may_be_best(known, depth)
        ]
        due = [depth for depth in others if self._is_trial_due(known, depth, len(others))]
        if not self._acceptance.num_observed or not due:
            return self._depth
        # First depths that have never been timed, small ones before large ones, as their trials cost less.
        tried = min(due, key=lambda depth: (known[depth].timed if depth in known else -1, depth))
        self._trial = _Trial(self._depth, here, self._num_steps)
        self._times[tried, size].clear()
        return tried

    def _may_be_best(self, known: dict[int, _StepTime], depth: int) -> bool:
        """Whether ``depth`` could be the best if a step with it took no longer than one with fewer drafts."""
        if depth not in known or self._depth not in known:
            return True
        least_s = max((step.seconds for fewer, step in known.items() if fewer < depth), default=0.0)
        most_tokens = 1.0 + self._acceptance.mean(depth, since=known[depth].timed + _STEPS_BETWEEN_DECISIONS)
        return most_tokens > _MIN_GAIN * self._rates(known)[self._depth] * least_s

    def _is_trial_due(self, known: dict[int, _StepTime], depth: int, num_others: int) -> bool:
        """Whether the last trial of ``depth``, one of ``num_others`` to try, is long enough ago for what it cost."""
        if depth not in known or self._depth not in known:
            return True
        rates = self._rates(known)
        lost = max(1.0 - rates[depth] / rates[self._depth], 0.0)
        share = _MAX_COST / num_others
        num_steps = (
            known[depth].trial_steps * known[depth].seconds / known[self._depth].seconds * lost / share
        )
        least, most = _STEPS_BETWEEN_TRIALS
        return self._num_steps - known[depth].timed >= min(max(num_steps, least * num_others), most)

    def _rates(self, known: dict[int, _StepTime]) -> dict[int, float]:
        """Return the tokens per second of each request, by depth."""
        return {depth: (1.0 + self._acceptance.mean(depth)) / step.seconds for depth, step in known.items()}

    def note_time(self, depth: int, num_requests: int, seconds: float) -> None:
        """Note the time of a step that only decoded: ``num_requests`` requests with ``depth`` drafts each."""
        size = num_requests.bit_length()
        # All steps of a batch that alternates between two neighboring sizes count for one of them.
        size = self._size if abs(size - self._size) < 2 else size
        if seconds > 0.0:
            self._times[depth, size].append(seconds)

    def note_accepted(self, shares: Sequence[float]) -> None:
        """Note which drafts a step accepted, or would have accepted.

        Args:
            shares: by place of the draft, the share of requests in which it was accepted.
        """
        self._acceptance.note(shares, self._num_steps)


class ShadowDrafts(Generic[_Request]):
    """Looks up which drafts an n-gram lookup would have made for a request, and checks which of them were right.

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

    def look(self, requests: Sequence[_Request]) -> list[bool] | None:
        """Return for each draft of the current request whether it was right, once enough tokens are generated.

        A draft after a wrong one counts as wrong. None before that. Afterwards, or if it no longer runs, the next of
        these ``requests`` becomes the current one.
        """
        are_right: list[bool] | None = None
        if self._request is not None and (known := self._tokens_of(self._request)) is not None:
            tokens = known[self._start : self._start + self._num_drafts]
            if len(tokens) < self._num_drafts:
                return None
            is_right = (token == draft for token, draft in zip(tokens, self._drafts, strict=True))
            are_right = [bool(right) for right in accumulate(is_right, and_)]
        self._request = None
        if len(requests):
            self._turn = (self._turn + 1) % len(requests)
            request = requests[self._turn]
            if (known := self._tokens_of(request)) is not None:
                self._request, self._start = request, len(known)
                last = np.array(known[-_MAX_TOKENS_LOOKED_AT:])
                self._drafts = look_up(last, self._num_drafts, self._min_n, self._max_n)
        return are_right


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
