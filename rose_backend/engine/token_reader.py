"""What the step loop itself does with drawn tokens: append them, see who has ended, tell the text thread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rose_backend.engine.late_commits import Int64Array
from rose_backend.engine.model_runner import SampledTokens
from rose_backend.engine.output_processor import Ending, NewTokens
from rose_backend.engine.request import Completion
from rose_backend.engine.row_state import Int32Array, RowState

_NO_ROWS: Int32Array = np.zeros(0, np.int32)
_AT_LENGTH, _AT_EOS = Ending("length", None), Ending("stop", None)


class TokenReader:
    """Applies one step's tokens to all rows at once; looks at single completions only where something happened.

    It knows tokens and lengths only. The tokens of completions that nobody follows lie in the row buffers until they
    end.

    Args:
        eos_token_ids: tokens that end a completion unless it ignores them.
    """

    def __init__(self, state: RowState, eos_token_ids: tuple[int, ...]) -> None:
        self._state = state
        self._eos_token_ids = np.array(eos_token_ids, np.int64)
        self._last_rows: Int64Array | None = None
        self._last_completions: list[Completion] = []
        self._lengths_only_rows: Int64Array | None = None

    def apply(self, rows: Int64Array, sampled: SampledTokens) -> tuple[Int32Array, NewTokens | None]:
        """Append one token to each of ``rows``.

        Returns:
            The rows whose completion has ended, and what the text thread has to know of this step; None for nothing.
        """
        state, token_ids = self._state, sampled.token_ids
        is_full = state.append(rows, token_ids)
        if self._only_lengths_matter(rows) and not np.count_nonzero(is_full):
            return _NO_ROWS, None
        # np.isin sorts; there are one or two of them.
        is_eos = np.zeros(len(rows), np.bool_)
        for eos_token_id in self._eos_token_ids.tolist():
            is_eos |= token_ids == eos_token_id
        # In most steps nothing happens to anybody.
        if not np.count_nonzero(is_eos | is_full | state.is_watched[rows]):
            return _NO_ROWS, None
        is_eos &= state.stops_at_eos[rows]
        is_stop = self._stop_tokens(rows, token_ids)
        ended = np.flatnonzero(is_eos | is_stop | is_full)
        followed = np.flatnonzero(state.is_followed[rows])
        ended_rows = rows[ended].astype(np.int32)
        if not len(ended) and not len(followed):
            return ended_rows, None
        endings: dict[Completion, Ending] = {}
        for index, row in zip(ended.tolist(), ended_rows.tolist(), strict=True):
            completion, ending = self._completion(row), _AT_LENGTH
            completion.has_ended = True
            if is_eos[index]:
                ending = _AT_EOS
            elif is_stop[index]:
                ending = Ending("stop", int(token_ids[index]))
            endings[completion] = ending
        news = NewTokens(
            completions=self._completions_of(rows, followed),
            token_ids=token_ids[followed].tolist(),
            indices=followed,
            logprobs=sampled.logprobs,
            endings=endings,
            begins_texts=bool(np.count_nonzero(state.num_tokens[rows] == state.num_prompt_tokens[rows] + 1)),
        )
        return ended_rows, news

    def _only_lengths_matter(self, rows: Int64Array) -> bool:
        """Whether no token can end any of ``rows``, and nobody is told of each."""
        if rows is self._lengths_only_rows:  # as in steps that are alike
            return True
        state = self._state
        if np.count_nonzero(state.is_watched[rows] | state.stops_at_eos[rows]):
            return False
        self._lengths_only_rows = rows
        return True

    def _completions_of(self, rows: Int64Array, followed: NDArray[np.intp]) -> list[Completion]:
        # Steps that are alike have the very same rows, and nobody has come or gone between them.
        if rows is not self._last_rows:
            self._last_rows = rows
            self._last_completions = [self._completion(row) for row in rows[followed].tolist()]
        return self._last_completions

    def _stop_tokens(self, rows: Int64Array, token_ids: Int64Array) -> NDArray[np.bool_]:
        is_stop = np.zeros(len(rows), np.bool_)
        for index in np.flatnonzero(self._state.has_stop_tokens[rows]).tolist():
            params = self._completion(int(rows[index])).request.params
            is_stop[index] = int(token_ids[index]) in (params.stop_token_ids or ())
        return is_stop

    def _completion(self, row: int) -> Completion:
        completion = self._state.completions[row]
        assert completion is not None, f"row {row} holds no completion"
        return completion
