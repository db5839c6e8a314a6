"""Chooses how many drafts the requests of a step have: the number that gives the most tokens per second.

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
from itertools import accumulate
from operator import and_
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rose_backend.config import MAX_SPECULATIVE_TOKENS

Tokens = list[int] | NDArray[np.signedinteger[Any]]
_Request = TypeVar("_Request")

_STEPS_BETWEEN_LOOKS = 8
"""Steps between two decisions: outputs that arrive right after a change are of steps before it."""
_MIN_TIMES, _MAX_TIMES = 4, 15
"""Times of steps that a median is taken of."""
_MIN_HOPELESS = 2
"""Times after which a trial is over whose steps take too long even if all drafts are accepted."""
_TRIAL_STEPS, _MAX_COST = 6, 0.01
"""Steps of a trial, about, and the share of its tokens that an engine may lose by trials. A number of drafts that is
not in use is timed again when one is worth it: contexts have grown, or others use the GPU no more."""
_STEPS_BETWEEN_TRIALS = (100, 20_000)
"""At least, and at most."""
_MAX_TRIAL_STEPS = 50
"""After which a trial is given up: steps with prompts are not timed."""
_MIN_GAIN = 1.02
"""By which a number of drafts that is not in use must be better, so that noise changes nothing."""
_MAX_TRIALS = 4
"""Trials that what a step takes is a mean of, about; older ones fade."""
_OTHER_TIMES = 1.25
"""By which a step takes longer than it did, or less, where something else has changed than the contexts."""
_NUM_OBSERVED = 32
"""Steps over which accepted drafts are averaged; older ones fade."""
_MAX_TOKENS_LOOKED_AT = 8192
"""Last tokens of a request that drafts are looked up in, which takes the CPU 0.15 to 0.4 ms."""


def draft_depths(num_drafts: int) -> tuple[int, ...]:
    """Return the numbers of drafts to choose from, rising: 0, 1, 3, 7 and so on, and all ``num_drafts``.

    With these a request computes 1, 2, 4, 8 tokens in a step: tiles of kernels have as many rows. Of more drafts than
    decode attention takes there are all or none, as steps with some of them would be launched kernel by kernel, too.
    """
    if num_drafts > MAX_SPECULATIVE_TOKENS:
        return 0, num_drafts
    return (*((1 << tokens) - 1 for tokens in range(num_drafts.bit_length())), num_drafts)


class _Trial(NamedTuple):
    """Another number of drafts is in use, to time it."""

    depth: int
    """The number before."""
    seconds: float
    """What a step took with it."""
    begin: int
    """When it began, as ``DraftDepth`` counts."""


class _StepTime(NamedTuple):
    """What a step takes with one number of drafts, in batches of one size."""

    seconds: float
    timed: int
    """When, as ``DraftDepth`` counts."""
    trial_steps: int
    """Steps of the trial that has shown it, or about that many."""
    num_trials: int
    """It is a mean of the last ones of, at most ``_MAX_TRIALS``."""


class _Acceptance:
    """How often each of a request's drafts is accepted if those before it are.

    Attributes:
        num_observed: steps that the first draft's share was averaged over, at most ``_NUM_OBSERVED``.
    """

    def __init__(self, num_drafts: int) -> None:
        self._num_observed, self._observed = [0] * num_drafts, [0] * num_drafts
        # Of requests, the share that has all drafts before this one accepted, and the one that has this one, too.
        self._before, self._with = [0.0] * num_drafts, [0.0] * num_drafts

    @property
    def num_observed(self) -> int:
        return self._num_observed[0]

    def note(self, shares: Sequence[float], step: int) -> None:
        """Note which drafts a step has accepted, see ``DraftDepth.note_accepted``."""
        before = 1.0
        for place, share in enumerate(shares):
            self._observed[place] = step
            self._num_observed[place] = num = min(self._num_observed[place] + 1, _NUM_OBSERVED)
            self._before[place] += (before - self._before[place]) / num
            self._with[place] += (share - self._with[place]) / num
            before = share

    def mean(self, depth: int, since: int = -1) -> float:
        """Return how many of ``depth`` drafts are accepted; one that was not observed after step ``since`` may be."""
        accepted, share = 0.0, 1.0
        for place in range(depth):
            if self._observed[place] > since:
                share *= self._with[place] / self._before[place] if self._before[place] else 0.0
            accepted += share
        return accepted


class DraftDepth:
    """Chooses how many drafts requests get, by the tokens per second that each number gives.

    Args:
        num_drafts: ``num_speculative_tokens``.
    """

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = self._depth = num_drafts
        self._depths = draft_depths(num_drafts)
        # By number of drafts and size of the batch, in powers of two.
        self._times = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=_MAX_TIMES))
        # By size and number of drafts, where at least two of these have been timed, one after the other.
        self._known = defaultdict[int, dict[int, _StepTime]](dict)
        self._trial: _Trial | None = None
        # By size and number of drafts, where a trial was given up.
        self._next_trials: dict[tuple[int, int], int] = {}
        self._acceptance = _Acceptance(num_drafts)
        self._num_steps = self._num_drafted = self._next_look = 0
        # Of the batch; and the last step of each size.
        self._size, self._last_steps = 0, dict[int, int]()

    def __str__(self) -> str:
        of_all = self._num_steps and 100.0 * self._num_drafted / self._num_steps
        accepted = self._acceptance.mean(self.num_drafts)
        return f"{of_all:.0f} % of steps had drafts, {accepted:.2f} of {self.num_drafts} are accepted"

    def choose(self, num_requests: int) -> int:
        """Return how many drafts are made in the step to be scheduled, after which ``num_requests`` run."""
        self._num_steps += 1
        has_changed = self._has_another_size(num_requests.bit_length())
        # A trial is over as soon as it has shown enough.
        if self._num_steps >= self._next_look or has_changed or self._trial is not None:
            self._next_look = self._num_steps + _STEPS_BETWEEN_LOOKS
            self._depth = self._choose(self._size)
        self._num_drafted += self._depth > 0
        return self._depth

    def _has_another_size(self, size: int) -> bool:
        """Whether the batch has another size from now on: about twice another one, or not only for some steps.

        What was begun with the size before is over, and what this size took long ago is forgotten.
        """
        last_step, self._last_steps[size] = self._last_steps.get(size, 0), self._num_steps
        is_near, num_others = (
            abs(size - self._size) < 2,
            self._num_steps - self._last_steps.get(self._size, 0),
        )
        if size == self._size or (is_near and num_others < _STEPS_BETWEEN_LOOKS):
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
        """Return what a step takes with the present number of drafts; None if that is not known."""
        times = self._times[self._depth, size]
        return median(times) if len(times) >= _MIN_TIMES else None

    def _goes_on(self, trial: _Trial, size: int, here: float | None) -> bool:
        """Whether a trial has not shown enough yet: it may be better, ``here`` being what its steps take if known."""
        if self._num_steps - trial.begin >= _MAX_TRIAL_STEPS:
            return False
        times = self._times[self._depth, size]
        rate_before = (1.0 + self._acceptance.mean(trial.depth)) / trial.seconds
        if here is None:
            return len(times) < _MIN_HOPELESS or (1.0 + self._depth) / min(times) >= rate_before
        # What is better costs nothing while it is made sure of.
        return len(times) < _MAX_TIMES and (1.0 + self._acceptance.mean(self._depth)) / here > rate_before

    def _end(self, trial: _Trial, size: int) -> float | None:
        """End a trial and note what it has shown; return what its steps took, None if too few were timed.

        Other numbers take longer, or less, as the one before the trial does now. If a trial has made sure of something
        else, what is known is of other times, and all numbers are tried again.
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
        """Return the number of drafts with the most tokens per second; in doubt the present one."""
        if not self._known:
            return self._depth
        # Batches of a size that has not been seen take what the most similar one takes.
        rates = self._rates(self._known[min(self._known, key=lambda other: abs(other - size))])
        best = max(rates, key=lambda depth: rates[depth])
        is_better = self._depth in rates and rates[best] > _MIN_GAIN * rates[self._depth]
        return best if is_better else self._depth

    def _begin_trial(self, size: int, here: float) -> int:
        """Return the number of drafts to try now, having noted what a step takes without; or the present one."""
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
        # Those first that have never been timed, the smallest of them before others: their trials cost the least.
        tried = min(due, key=lambda depth: (known[depth].timed if depth in known else -1, depth))
        self._trial = _Trial(self._depth, here, self._num_steps)
        self._times[tried, size].clear()
        return tried

    def _may_be_best(self, known: dict[int, _StepTime], depth: int) -> bool:
        """Whether ``depth`` drafts may give the most tokens, whatever they take now: no less than fewer drafts do."""
        if depth not in known or self._depth not in known:
            return True
        least_s = max((step.seconds for fewer, step in known.items() if fewer < depth), default=0.0)
        most_tokens = 1.0 + self._acceptance.mean(depth, since=known[depth].timed + _STEPS_BETWEEN_LOOKS)
        return most_tokens > _MIN_GAIN * self._rates(known)[self._depth] * least_s

    def _is_trial_due(self, known: dict[int, _StepTime], depth: int, num_others: int) -> bool:
        """Whether a trial of ``depth`` drafts, one of ``num_others`` to try, is worth what the last one cost."""
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
        """Return the tokens per second of each request, by number of drafts."""
        return {depth: (1.0 + self._acceptance.mean(depth)) / step.seconds for depth, step in known.items()}

    def note_time(self, depth: int, num_requests: int, seconds: float) -> None:
        """Note how long a step took in which ``num_requests`` decoded, with ``depth`` drafts each, and nothing else."""
        size = num_requests.bit_length()
        # Of batches that alternate between two sizes, all steps count for one.
        size = self._size if abs(size - self._size) < 2 else size
        if seconds > 0.0:
            self._times[depth, size].append(seconds)

    def note_accepted(self, shares: Sequence[float]) -> None:
        """Note which drafts were accepted in a step, or would have been.

        Args:
            shares: of each draft that a request had: the share of requests in which it was accepted.
        """
        self._acceptance.note(shares, self._num_steps)


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

    def look(self, requests: Sequence[_Request]) -> list[bool] | None:
        """Return which drafts were right of the request looked at, once it has as many more tokens; else None.

        A draft after a wrong one is wrong.

        Then, or if it runs no more, the next one of these ``requests`` has its turn.
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
