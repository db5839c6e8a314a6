"""Stop strings are found by the text thread, a step or more late: what the step loop does meanwhile and then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from rose_backend.engine.late_commits import Int64Array, LateCommits
from rose_backend.engine.output_processor import Judgement
from rose_backend.engine.request import Completion
from rose_backend.engine.row_state import Int32Array, RowState
from rose_backend.engine.scheduler import Scheduler


class LateStops:
    """Rows of completions with stop strings.

    Such a row goes on while the text thread looks at its tokens. Until then they count as those of a step in flight: no
    lookup finds them, and nobody does when the text turns out to have ended in front of them. A row that
    has ended in another way waits, without further steps, for what is said about its last token.
    """

    def __init__(self, state: RowState, scheduler: Scheduler, commits: LateCommits) -> None:
        self.num_dropped_tokens = 0
        """Tokens drawn behind a stop string that had not been found yet."""
        self._state = state
        self._scheduler = scheduler
        self._commits = commits
        self._undecided: set[Completion] = set()

    @property
    def num_undecided(self) -> int:
        """Completions with tokens that the text thread has not looked at."""
        return len(self._undecided)

    def hand_over(self, rows: Int64Array) -> None:
        """Note that the text thread gets one more token of each of these; rows without stop strings do not count."""
        for row in rows[self._state.has_stop_strings[rows]].tolist():
            completion = self._state.completions[row]
            assert completion is not None, f"row {row} holds no completion"
            completion.num_handed_over += 1
            self._undecided.add(completion)

    def leave(self, rows: Int32Array) -> None:
        """Let rows go that take no further token, each as soon as nothing it may still be asked for is open."""
        waits = self._state.has_stop_strings[rows]
        if waits.any():
            self._scheduler.set_aside(rows[waits])
            rows = rows[~waits]
        if len(rows):
            self._scheduler.release(rows)

    def forget(self, completions: Iterable[Completion]) -> None:
        """Wait no longer for what is said about these."""
        self._undecided.difference_update(completions)

    def judge(self, judgements: Mapping[Completion, Judgement]) -> None:
        """Confirm tokens that certainly belong to their text, and end texts that have ended."""
        leaving: list[int] = []
        for completion, (num_tokens, is_stopped) in judgements.items():
            is_decided = is_stopped or num_tokens == completion.num_handed_over
            if is_decided:
                self._undecided.discard(completion)
            if is_stopped:
                completion.has_ended = True
                self.num_dropped_tokens += completion.num_handed_over - num_tokens
            row = completion.row
            if row < 0:  # aborted meanwhile
                continue
            num_tokens += int(self._state.num_prompt_tokens[row])
            # The last of them has been drawn, but the step that computes it may not be over.
            self._commits.confirm(row, num_tokens - 1)
            if is_decided and completion.has_ended:
                leaving.append(row)
        if leaving:
            self._scheduler.release(np.array(leaving, np.int32))
