"""How many prompt tokens a server's step takes on beside texts that are running, so that these do not stall."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from rose_backend.engine.pacing import StepTimes
from rose_backend.engine.request import Completion

_STRETCH = 3.0
"""A step with prompts may take so many times what its decodes alone take: a gap in each running text of three times the
usual one."""
_NUM_STEPS = 4
"""A queue that would take more steps than that is worked off faster: small chunks compute fewer tokens a second, and
requests that wait for their first token wait longer than a text that stalls."""
_NUM_LOOKED_AT = 256


class PromptCap:
    """Chooses each step's token budget.

    Args:
        times: what steps have taken so far.
        most: the budget where nobody has to be spared.
    """

    def __init__(self, times: StepTimes, most: int) -> None:
        self.most = most
        self._times = times

    def budget(self, num_running: int, num_decodes: int, waiting: Collection[Completion]) -> int:
        """Return how many tokens the next step may compute, decodes included.

        Args:
            num_running: sequences that hold a row.
            num_decodes: those of them whose text has begun.
            waiting: completions whose prompts are to be computed.
        """
        decoding = self._times.decoding(num_decodes)
        if not num_decodes or decoding is None:
            return self.most
        room = self._times.prompt_room((_STRETCH - 1) * decoding)
        if waiting:
            queued = sum(len(completion.token_ids) for completion in islice(waiting, _NUM_LOOKED_AT))
            room = max(room, queued // _NUM_STEPS)
        return min(num_running + room, self.most)
