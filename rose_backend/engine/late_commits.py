"""Tokens that were decoded and read, but not yet told to the block manager."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.engine.row_state import Int32Array, RowState

Int64Array = NDArray[np.int64]

_STEPS_PER_COMMIT = 32
"""A row is committed once in so many steps."""

_MAX_PIECES, _MIN_ROWS_PER_PIECE = 4, 16
"""Committing 32 tokens of a row takes the host about 6 microseconds, most of it for the two blocks that they fill, and
all of 256 rows at once longer than the device has work for. Pieces are small enough to fit beside one step, and large
enough that a call costs little more than its rows."""


class LateCommits:
    """Commits many steps of the same rows at once, a piece of the rows after the other.

    Until then they count as those of steps in flight. Whoever looks up a prompt or frees a row calls ``flush`` before;
    it may be called at any time.
    """

    def __init__(self, manager: BlockManager, state: RowState) -> None:
        self._manager = manager
        self._state = state
        self._rows: Int64Array = np.empty(0, np.int64)
        # Steps of these rows, and how many of them are committed.
        self._num_steps = 0
        self._num_done: Int64Array = np.empty(0, np.int64)
        self._pieces: list[slice] = []
        self._steps_per_piece = 1
        self._num_pieces_done = 0
        self._confirmed: dict[int, int] = {}

    def add(self, rows: Int64Array) -> None:
        """Note that a step was read in which each of ``rows`` computed one token behind those it had."""
        if rows is not self._rows:
            if not np.array_equal(rows, self._rows):
                self.flush()
                self._begin(rows)
            self._rows = rows
        self._num_steps += 1

    def keep_up(self) -> None:
        """Commit the next piece of the rows, if it is time for it. Call it in every step, while the device works."""
        if self._num_steps < (self._num_pieces_done + 1) * self._steps_per_piece:
            return
        piece = self._pieces[self._num_pieces_done % len(self._pieces)]
        self._num_pieces_done += 1
        num_steps = self._num_steps - int(self._num_done[piece.start])
        self._num_done[piece] = self._num_steps
        self._commit(self._rows[piece], num_steps)
        if self._confirmed and self._num_pieces_done % len(self._pieces) == 0:
            self._flush_confirmed()

    def count(self, num_tokens: Int32Array) -> None:
        """Add to ``num_tokens``, of all rows, what was noted and not committed."""
        if self._num_steps:
            num_tokens[self._rows] += (self._num_steps - self._num_done).astype(np.int32)

    def confirm(self, row: int, end: int) -> None:
        """Note that all tokens in front of position ``end`` belong to the text of a row with stop strings."""
        self._confirmed[row] = end

    def flush(self) -> None:
        """Commit what was noted; of rows with stop strings, what is confirmed."""
        self._flush_steps()
        if self._confirmed:
            self._flush_confirmed()

    def _begin(self, rows: Int64Array) -> None:
        """Divide rows that are new here into pieces whose turns are spread over ``_STEPS_PER_COMMIT`` steps."""
        size = max(_MIN_ROWS_PER_PIECE, -(-len(rows) // _MAX_PIECES))
        self._pieces = [slice(start, start + size) for start in range(0, len(rows), size)]
        self._steps_per_piece = max(1, _STEPS_PER_COMMIT // max(1, len(self._pieces)))
        self._num_done = np.zeros(len(rows), np.int64)

    def _flush_steps(self) -> None:
        num_steps, self._num_steps = self._num_steps, 0
        if not num_steps:
            return
        num_left = num_steps - self._num_done
        self._num_pieces_done = 0
        self._num_done[:] = 0
        # Pieces differ in how far they are: a call for each number of steps that is left.
        for count in np.unique(num_left).tolist():
            if count:
                self._commit(self._rows[num_left == count], count)

    def _commit(self, rows: Int64Array, num_steps: int) -> None:
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
