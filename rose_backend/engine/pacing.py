"""When to start the next step of a server: late enough for whoever comes meanwhile, early enough for the device.

With a step in flight the host could start the next one at once. A request that comes a moment later would then wait for
two steps. So the host holds the next step back until shortly before the device needs it.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

_NUM_REMEMBERED = 8
_WIDTH_STEP = 16
"""Steps whose numbers of decodes round up to the same multiple count as alike, and so do prompts by the next number."""
_PROMPT_STEP = 128
_LITTLE_MORE = 1.5
_FIRST_LEAD_S = 300e-6
_MARGIN_S = 30e-6
_NUM_LATENCIES = 64
"""The lead covers the slowest of so many starts: one in so many may come late, and is paid for (``_MAX_COST``)."""
_FORGET_EVERY = 16
"""Steps that are too short to be held back, for the lead that is, until the oldest start is forgotten."""
_MAX_COST = 0.01
"""Share of the device's time that pacing may cost. The idle time after a late start is saved up again, at this rate,
before another step is held back."""
_MIN_HOLD_S = 1e-3
"""For a shorter wait the moment is not known well enough: with steps of 1 ms, waits from 0.1 ms on made first tokens
come 4 ms later (GPT-2 124M, H200, 240 requests a second)."""


class StepLoad(NamedTuple):
    """What makes a step long or short."""

    num_decodes: int
    num_prompt_tokens: int


class StepTimes:
    """How long steps take, from the last ones that were alike. The least of them: what else happens only adds."""

    def __init__(self) -> None:
        make = partial(deque[float], maxlen=_NUM_REMEMBERED)
        self._decodes: defaultdict[int, deque[float]] = defaultdict(make)
        self._prompts: defaultdict[int, deque[float]] = defaultdict(make)

    def record(self, load: StepLoad, seconds: float) -> None:
        """Note how long a step took from end to end. One with prompts and decodes says something about prompts if it
        is known what the decodes take."""
        if not load.num_prompt_tokens:
            self._decodes[_round_up(load.num_decodes, _WIDTH_STEP)].append(seconds)
        elif (decoding := self.decoding(load.num_decodes)) is not None:
            self._prompts[_round_up(load.num_prompt_tokens, _PROMPT_STEP)].append(
                max(seconds - decoding, 0.0)
            )

    def decoding(self, num_decodes: int) -> float | None:
        """Return the seconds that so many decodes take at least, None if that is not known yet."""
        if not num_decodes:
            return 0.0
        width = _round_up(num_decodes, _WIDTH_STEP)
        # Fewer take less, but nearly as much.
        known = max((width_seen for width_seen in self._decodes if width_seen <= width), default=None)
        return None if known is None else min(self._decodes[known])

    def expect(self, load: StepLoad) -> float | None:
        """Return the seconds that a step takes at least; None if nothing like it has been seen."""
        decoding = self.decoding(load.num_decodes)
        if decoding is None or not load.num_prompt_tokens:
            return decoding
        prompts = self._prompts.get(_round_up(load.num_prompt_tokens, _PROMPT_STEP), ())
        return decoding + min(prompts, default=0.0)

    def prompt_room(self, seconds: float) -> int:
        """Return how many prompt tokens a step can take on in so much more time: twice what is known to fit, unless
        less is known to take too long.

        Where even the shortest pass over prompts takes longer, nothing is gained by passes that are shorter still: then
        it is what fits into little more than that one takes.
        """
        least = {num_tokens: min(times) for num_tokens, times in self._prompts.items()}
        seconds = max(seconds, _LITTLE_MORE * min(least.values(), default=0.0))
        fits = max((number for number, took in least.items() if took <= seconds), default=0)
        too_many = min(
            (number for number, took in least.items() if took > seconds and number > fits), default=None
        )
        room = 2 * max(fits, _PROMPT_STEP)
        if too_many is not None:
            room = min(room, too_many - _PROMPT_STEP)
        return max(room, fits, _PROMPT_STEP)


@dataclass(frozen=True, slots=True)
class _Started:
    load: StepLoad
    begun_at: float
    is_first: bool
    """The device had nothing to do when it was started."""


class Pacer:
    """Watches steps start and end, and says how long the next one may be held back.

    A step is started by a lead before the device should need it. The lead is what the host was seen to take from when
    it meant to wake up to when the device had the step: oversleeping, waiting for Python's lock, planning, launching.

    Args:
        can_hold: the device works while the host waits.
        clock: seconds, from any start.
    """

    def __init__(self, *, can_hold: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._can_hold = can_hold
        self.times = StepTimes()
        self._latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)
        self._num_not_held = 0
        self._lost = 0.0
        self._in_flight: deque[_Started] = deque()
        # When the step read last was over, if the host was there to see it.
        self._over_at: float | None = None
        # When the host meant to wake up, and when the device should have needed the step, if one is held back.
        self._held: tuple[float, float] | None = None

    @property
    def lead(self) -> float:
        """By how many seconds a step is started before it should be needed."""
        return max(self._latencies, default=_FIRST_LEAD_S) + _MARGIN_S

    def started(self, load: StepLoad, begun_at: float, *, is_first: bool) -> None:
        """Note that a step was started.

        Args:
            begun_at: when the host began to.
            is_first: the device had nothing to do by the time it was started.
        """
        if self._held is not None:
            now, (wake_at, due_at) = self.clock(), self._held
            self._latencies.append(now - wake_at)
            if is_first:
                self._lost += max(now - due_at, 0.0)
            self._held = None
        self._in_flight.append(_Started(load, begun_at, is_first))

    def over(self, *, was_seen: bool) -> None:
        """Note that the oldest step in flight is over.

        Args:
            was_seen: it ended just now, and not some time before the host looked.
        """
        step, now = self._in_flight.popleft(), self.clock()
        start = step.begun_at if step.is_first else self._over_at
        if was_seen and start is not None:
            self.times.record(step.load, now - start)
            self._lost = max(self._lost - _MAX_COST * (now - start), 0.0)
        self._over_at = now if was_seen else None

    def forget(self) -> None:
        """Note that the steps in flight will not be waited for."""
        self._in_flight.clear()
        self._over_at = None
        self._held = None

    def hold(self) -> float:
        """Return for how many seconds the next step may be held back now; 0 when it is needed soon, or nobody knows."""
        if not self._can_hold or len(self._in_flight) != 1 or self._lost:
            return 0.0
        (step,) = self._in_flight
        start, expected = step.begun_at if step.is_first else self._over_at, self.times.expect(step.load)
        if start is None or expected is None:
            return 0.0
        now, due_at = self.clock(), start + expected
        seconds = due_at - self.lead - now
        if seconds < _MIN_HOLD_S:
            self._num_not_held += 1
            if self._num_not_held % _FORGET_EVERY == 0 and self._latencies:
                self._latencies.popleft()
            return 0.0
        self._held = now + seconds, due_at
        return seconds


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
