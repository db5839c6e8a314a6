"""Tokens that were computed, but not yet told to the block manager: prompts, and tokens that were decoded and read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.block_manager.array_types import IntArray
from rose_backend.engine.early_texts import EarlyTexts
from rose_backend.engine.row_state import Int32Array, RowState

Int64Array = NDArray[np.int64]

_RIPE_TOKENS = 32
"""Decoded tokens of a row are committed when they are so many."""

_MAX_PIECES, _MIN_ROWS_PER_PIECE, _MAX_TOKENS_PER_PIECE = 3, 16, 3072
"""Committing 32 tokens of a row takes the host about 6 microseconds, most of it for the two blocks that they fill, and
all of 256 rows at once longer than the device has work for. Pieces are small enough to fit beside one step, and large
enough that a call costs little more than its rows: it costs as much as some 20 of them."""


class LateCommits:
    """Commits many tokens of a row at once, and a piece of the rows after the other.

    While many prompts come in, the device computes them about as fast as the host prepares them, and making them
    findable would be a third of the host's work. So that, too, is left for steps in which the host only waits. Nothing
    is found later for it: whoever looks up a prompt calls ``flush_for`` before, whoever frees rows calls ``flush``.

    Until they are committed, tokens count as those of steps in flight.
    """

    def __init__(self, manager: BlockManager, state: RowState) -> None:
        self._manager = manager
        self._state = state
        # Late tokens of each row, at most _most, but for as many of each of _last_rows as _num_repeats says.
        self._settled: Int32Array = np.zeros(len(state.num_held_tokens), np.int32)
        self._last_rows: IntArray | None = None
        self._num_repeats = 0
        self._most = 0
        self.early_texts = EarlyTexts(state)
        """Where the tokens of completions that are not followed go, when they are committed."""
        self._num_steps = 0
        self._confirmed: dict[int, int] = {}
        self._frontier: tuple[IntArray, IntArray, IntArray] | None = None

    def add(self, rows: IntArray, num_tokens: IntArray | None = None) -> None:
        """Note that each of ``rows`` has computed ``num_tokens`` behind those it had, and that these are known.

        Args:
            rows: ``[N]``, not changed afterwards: the same array again is taken for the same rows.
            num_tokens: ``[N]``; None: one each.
        """
        self._frontier = None
        if num_tokens is None and rows is self._last_rows:  # as in steps that are alike
            self._num_repeats += 1
            return
        num_late = self._settle()
        num_late[rows] += 1 if num_tokens is None else num_tokens
        self._most = int(num_late.max())
        self._last_rows = rows

    def keep_up(self) -> None:
        """Commit the next piece, if there is enough for one. Call it in every step, right before the host waits."""
        self._num_steps += 1
        num_committed = self._commit_piece() if self._most + self._num_repeats >= _RIPE_TOKENS else 0
        if num_committed <= _MIN_ROWS_PER_PIECE:  # nothing beside large commits: see EarlyTexts
            self.early_texts.hand_over()
        if self._confirmed and self._num_steps % _RIPE_TOKENS == 0:
            self._flush_confirmed()

    def count(self, num_tokens: Int32Array) -> None:
        """Add to ``num_tokens``, of all rows, what was noted and not committed."""
        num_tokens += self._settle()

    def confirm(self, row: int, end: int) -> None:
        """Note that all tokens in front of position ``end`` belong to the text of a row with stop strings."""
        self._confirmed[row] = end

    def flush(self, rows: IntArray | None = None) -> None:
        """Commit what was noted of ``rows``, of all without; of rows with stop strings, what is confirmed.

        Nobody is told: most of these rows leave, or are about to be planned, and no time is to be lost.
        """
        num_late = self._settle()
        late = np.flatnonzero(num_late) if rows is None else rows[num_late[rows] > 0]
        if len(late):
            self._commit(late)
        if self._confirmed:
            self._flush_confirmed()

    def flush_for(self, prompt: Int32Array, namespace: bytes) -> None:
        """Commit all that a lookup of ``prompt`` in ``namespace`` could find if nothing were late.

        A late token is of use to it only if it goes on like the row, from the start to that token.
        """
        if self._confirmed:
            self._flush_confirmed()
        # Many prompts come in at once: between them nothing becomes late.
        if self._frontier is None:
            self._frontier = self._look_at_frontier()
        late, first_late, tokens = self._frontier
        if not len(late):
            return
        # The last token of a prompt is always computed.
        last = len(prompt) - 1
        goes_on = np.flatnonzero((prompt[np.minimum(first_late, last)] == tokens) & (first_late < last))
        if not len(goes_on):
            return
        token_ids, namespaces = self._state.token_ids, self._manager.table.namespaces
        alike = [
            row
            for row, end in zip(late[goes_on].tolist(), first_late[goes_on].tolist(), strict=True)
            if namespaces[row] == namespace and np.array_equal(token_ids[row, :end], prompt[:end])
        ]
        if alike:
            self.early_texts.put(*self._commit(np.array(alike, np.int64)))

    def _settle(self) -> Int32Array:
        """Return how many tokens of each row were noted and not committed."""
        if self._num_repeats:
            self._settled[self._last_rows] += self._num_repeats
            self._most += self._num_repeats
            self._num_repeats = 0
        return self._settled

    def _commit_piece(self) -> int:
        """Commit the tokens of some rows that have enough of them; return how many rows."""
        num_late = self._settle()
        ripe = np.flatnonzero(num_late >= _RIPE_TOKENS)
        if len(ripe):
            num_rows = max(_MIN_ROWS_PER_PIECE, -(-np.count_nonzero(num_late) // _MAX_PIECES))
            fits = np.cumsum(num_late[ripe]) <= _MAX_TOKENS_PER_PIECE
            ripe = ripe[: min(num_rows, max(1, np.count_nonzero(fits)))]
            self.early_texts.put(*self._commit(ripe))
        self._most = int(num_late.max())
        return len(ripe)

    def _look_at_frontier(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return rows with late tokens, where in each the first of them stands, and these tokens."""
        late = np.flatnonzero(self._settle())
        first_late = self._manager.num_computed_tokens[late]
        return late, first_late, self._state.token_ids[late, first_late]

    def _commit(self, rows: IntArray) -> tuple[IntArray, IntArray, Int32Array, Int32Array]:
        """Commit what was noted of ``rows``.

        Returns:
            Of ``N`` rows that were not held back: the rows, where the tokens of each start, how many they are, all
            ``[N]``, and the tokens themselves.
        """
        state = self._state
        self._frontier = None
        num_late = self._settle()
        counts = num_late[rows]
        num_late[rows] = 0
        is_held = state.has_stop_strings[rows]
        if np.count_nonzero(is_held):
            state.num_held_tokens[rows[is_held]] += counts[is_held]
            rows, counts = rows[~is_held], counts[~is_held]
        # A step that is being planned has counted them among these.
        state.num_uncommitted_tokens[rows] -= counts
        starts = self._manager.num_computed_tokens[rows]
        token_ids = state.tokens_at(rows, starts, counts)
        self._manager.commit(rows, counts, token_ids)
        return rows, starts, counts, token_ids

    def _flush_confirmed(self) -> None:
        state, computed = self._state, self._manager.num_computed_tokens
        rows: Int64Array = np.fromiter(self._confirmed, np.int64)
        if len(late := rows[self._settle()[rows] > 0]):
            self._commit(late)
        spans = [
            (row, int(computed[row]), end) for row, end in self._confirmed.items() if end > computed[row]
        ]
        self._confirmed.clear()
        if spans:
            rows = np.array([row for row, _, _ in spans])
            counts = np.array([end - start for _, start, end in spans])
            token_ids = [state.token_ids[row, start:end] for row, start, end in spans]
            self._manager.commit(rows, counts, np.concatenate(token_ids))
            self._frontier = None
            state.num_held_tokens[rows] -= counts
            state.num_uncommitted_tokens[rows] -= counts
