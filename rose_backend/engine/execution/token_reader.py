"""Processing of a step's tokens: append them, end completions, pass them to the output thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from rose_backend.engine.execution.model_runner import SampledTokens
from rose_backend.engine.output.output_processor import Ending, NewTokens, StopCheck
from rose_backend.engine.request import Completion
from rose_backend.engine.scheduling.deferred_commit import DeferredCommits, Int64Array
from rose_backend.engine.scheduling.scheduler import Scheduler
from rose_backend.engine.sequence_state import Int32Array, SequenceState

_NO_ROWS: Int32Array = np.zeros(0, np.int32)
_AT_LENGTH, _AT_EOS, _AT_ERROR = Ending("length", None), Ending("stop", None), Ending("error", None)


class TokenReader:
    """Appends one step's tokens to all rows at once; handles single completions only where one may have ended.

    It knows tokens and lengths only. Without ``needs_each_token``, tokens stay in the row buffers until the completion
    ends or they are committed.

    Args:
        eos_token_ids: tokens that end a completion unless it ignores them.
    """

    def __init__(self, state: SequenceState, eos_token_ids: tuple[int, ...]) -> None:
        self._state = state
        self._eos_token_ids = np.array(eos_token_ids, np.int64)
        self._last_rows: Int64Array | None = None
        self._last_completions: list[Completion] = []
        self._lengths_only_rows: Int64Array | None = None

    def apply(self, rows: Int64Array, sampled: SampledTokens) -> tuple[Int32Array, NewTokens | None]:
        """Append one token to each of ``rows``; a row that has none (``INVALID_TOKEN_ID``) ends.

        Returns:
            The rows whose completion has ended, and what the output thread needs of this step; None for nothing.
        """
        state, token_ids = self._state, sampled.token_ids
        is_full = state.append(rows, token_ids)
        is_invalid = token_ids < 0
        if np.count_nonzero(is_invalid):
            state.take_back(rows[is_invalid])
        elif self._only_lengths_matter(rows) and not np.count_nonzero(is_full):
            return _NO_ROWS, None
        # np.isin sorts; there are one or two of them.
        is_eos = np.zeros(len(rows), np.bool_)
        for eos_token_id in self._eos_token_ids.tolist():
            is_eos |= token_ids == eos_token_id
        # In most steps no row has ended.
        if not np.count_nonzero(is_eos | is_full | is_invalid | state.needs_token_check[rows]):
            return _NO_ROWS, None
        is_eos &= state.stops_at_eos[rows]
        is_stop = self._stop_tokens(rows, token_ids)
        ended = np.flatnonzero(is_eos | is_stop | is_full | is_invalid)
        followed = np.flatnonzero(state.needs_each_token[rows])
        ended_rows = rows[ended].astype(np.int32)
        if not len(ended) and not len(followed):
            return ended_rows, None
        endings: dict[Completion, Ending] = {}
        for index, row in zip(ended.tolist(), ended_rows.tolist(), strict=True):
            completion, ending = self._state.completion(row), _AT_LENGTH
            completion.has_ended = True
            if is_invalid[index]:
                ending = _AT_ERROR
            elif is_eos[index]:
                ending = _AT_EOS
            elif is_stop[index]:
                ending = Ending("stop", int(token_ids[index]))
            endings[completion] = ending
        message = NewTokens(
            completions=self._completions_of(rows, followed),
            token_ids=token_ids[followed].tolist(),
            indices=followed,
            logprobs=sampled.logprobs,
            endings=endings,
            has_first_tokens=bool(
                np.count_nonzero(state.num_tokens[rows] == state.num_prompt_tokens[rows] + 1)
            ),
        )
        return ended_rows, message

    def _only_lengths_matter(self, rows: Int64Array) -> bool:
        """Whether no token can end any of ``rows``, and none is passed on by itself."""
        if rows is self._lengths_only_rows:  # in steady-state decode
            return True
        state = self._state
        if np.count_nonzero(state.needs_token_check[rows] | state.stops_at_eos[rows]):
            return False
        self._lengths_only_rows = rows
        return True

    def _completions_of(self, rows: Int64Array, followed: NDArray[np.intp]) -> list[Completion]:
        # In steady-state decode the array is the same object, and no row has joined or left.
        if rows is not self._last_rows:
            self._last_rows = rows
            self._last_completions = [self._state.completion(row) for row in rows[followed].tolist()]
        return self._last_completions

    def _stop_tokens(self, rows: Int64Array, token_ids: Int64Array) -> NDArray[np.bool_]:
        is_stop = np.zeros(len(rows), np.bool_)
        for index in np.flatnonzero(self._state.has_stop_tokens[rows]).tolist():
            params = self._state.completion(int(rows[index])).request.params
            is_stop[index] = int(token_ids[index]) in (params.stop_token_ids or ())
        return is_stop


class DeferredStops:
    """Rows of completions with stop strings, which the output thread finds one or more steps later.

    Such a row continues to decode while the output thread checks its tokens. Unchecked tokens count as those of a step
    in flight, which no prefix lookup finds. A row that has ended in another way waits, without further steps, for the
    check of its last token.
    """

    def __init__(self, state: SequenceState, scheduler: Scheduler, commits: DeferredCommits) -> None:
        self.num_dropped_tokens = 0
        """Tokens drawn behind a stop string that had not been found yet."""
        self._state = state
        self._scheduler = scheduler
        self._commits = commits
        self._unchecked: set[Completion] = set()

    @property
    def num_unchecked(self) -> int:
        """Completions with tokens that the output thread has not checked."""
        return len(self._unchecked)

    def note_sent(self, rows: Int64Array) -> None:
        """Note that the output thread gets one more token of each of these; only rows with stop strings count."""
        for row in rows[self._state.has_stop_strings[rows]].tolist():
            completion = self._state.completion(row)
            completion.num_sent_tokens += 1
            self._unchecked.add(completion)

    def leave(self, rows: Int32Array) -> None:
        """Release rows that take no further token; with stop strings, after the check of their last token."""
        waits = self._state.has_stop_strings[rows]
        if waits.any():
            self._scheduler.suspend(rows[waits])
            rows = rows[~waits]
        if len(rows):
            self._scheduler.release(rows)

    def forget(self, completions: Iterable[Completion]) -> None:
        """Expect no more stop checks of these completions."""
        self._unchecked.difference_update(completions)

    def apply_stop_checks(self, stop_checks: Mapping[Completion, StopCheck]) -> None:
        """Confirm tokens in front of any stop string, and end the completions that hit one."""
        leaving: list[int] = []
        for completion, (num_tokens, is_stopped) in stop_checks.items():
            is_decided = is_stopped or num_tokens == completion.num_sent_tokens
            if is_decided:
                self._unchecked.discard(completion)
            if is_stopped:
                completion.has_ended = True
                self.num_dropped_tokens += completion.num_sent_tokens - num_tokens
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
