"""Tokens that were decoded and read, but not yet told to the block manager."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.engine.row_state import Int32Array, RowState

Int64Array = NDArray[np.int64]


class LateCommits:
    """Commits many steps of the same rows at once.

    Until then they count as those of steps in flight. Whoever looks up a prompt or frees a row calls ``flush`` before;
    it may be called at any time.
    """

    def __init__(self, manager: BlockManager, state: RowState) -> None:
        self._manager = manager
        self._state = state
        self._rows: Int64Array = np.empty(0, np.int64)
        self._num_steps = 0
        self._confirmed: dict[int, int] = {}

    @property
    def num_steps(self) -> int:
        """Steps that were read and not committed."""
        return self._num_steps

    def add(self, rows: Int64Array) -> None:
        """Note that a step was read in which each of ``rows`` computed one token behind those it had."""
        if rows is not self._rows:
            if not np.array_equal(rows, self._rows):
                self.flush()
            self._rows = rows
        self._num_steps += 1

    def count(self, num_tokens: Int32Array) -> None:
        """Add to ``num_tokens``, of all rows, what was noted and not committed."""
        if self._num_steps:
            num_tokens[self._rows] += self._num_steps

    def confirm(self, row: int, end: int) -> None:
        """Note that all tokens in front of position ``end`` belong to the text of a row with stop strings."""
        self._confirmed[row] = end

    def flush(self) -> None:
        """Commit what was noted; of rows with stop strings, what is confirmed."""
        self._flush_steps()
        if self._confirmed:
            self._flush_confirmed()

    def _flush_steps(self) -> None:
        rows, num_steps = self._rows, self._num_steps
        if not num_steps:
            return
        self._num_steps = 0
        is_held = self._state.has_stop_strings[rows]
        if np.count_nonzero(is_held):
            self._state.num_held_tokens[rows[is_held]] += num_steps
            rows = rows[~is_held]
        positions = self._manager.num_computed_tokens[rows][:, None] + np.arange(num_steps)
        token_ids = self._state.token_ids[rows[:, None], positions]
        self._manager.commit(rows, num_steps, token_ids.reshape(-1))

    def _flush_confirmed(self) -> None:
        state, computed = self._state, self._manager.num_computed_tokens
        spans = [
            (row, int(computed[row]), end) for row, end in self._confirmed.items() if end > computed[row]
        ]
        self._confirmed.clear()
        if spans:
            rows = np.array([row for row, _, _ in spans])
            counts = np.array([end - start for _, start, end in spans])
            token_ids = [state.token_ids[row, start:end] for row, start, end in spans]
            self._manager.commit(rows, counts, np.concatenate(token_ids))
            state.num_held_tokens[rows] -= counts
