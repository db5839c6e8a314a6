"""Computed tokens that are committed to the block manager, and sent to the output thread, later and in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.block_manager.block_pool import IntArray
from rose_backend.engine.output_processor import IncrementalTokens
from rose_backend.engine.sequence_state import Int32Array, SequenceState

Int64Array = NDArray[np.int64]

_TOKENS_PER_COMMIT = 32
"""Decoded tokens of a row are committed when there are so many."""

_MAX_PIECES, _MIN_ROWS_PER_PIECE, _MAX_TOKENS_PER_PIECE = 3, 16, 3072
"""Committing 32 tokens of a row takes the host about 6 microseconds, and a call as long as some 20 rows. A piece fits
beside one step; all of 256 rows at once would take longer than the device has work for."""


class DeferredCommits:
    """Commits many tokens of a row at once, and the rows in several pieces.

    Committing would be a third of the host's work while many prompts are admitted and the host limits the speed, so it
    is deferred to steps in which the host only waits. This never delays a prefix hit: ``flush_for`` is called before
    each lookup, ``flush`` before rows are freed. Until they are committed, tokens count as those of steps in flight.
    """

    def __init__(self, manager: BlockManager, state: SequenceState) -> None:
        self._manager = manager
        self._state = state
        # Pending tokens of each row, at most _max_pending, but for as many of each of _last_rows as _num_repeats says.
        self._pending_counts: Int32Array = np.zeros(len(state.num_held_tokens), np.int32)
        self._last_rows: IntArray | None = None
        self._num_repeats = 0
        self._max_pending = 0
        self.incremental_detokenization = IncrementalDetokenization(state)
        """Gets the tokens of completions without ``needs_each_token`` when they are committed."""
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
        if num_tokens is None and rows is self._last_rows:  # in steady-state decode
            self._num_repeats += 1
            return
        num_pending = self._pending()
        num_pending[rows] += 1 if num_tokens is None else num_tokens
        self._max_pending = int(num_pending.max())
        self._last_rows = rows

    def commit_some(self) -> None:
        """Commit the next piece, if there is enough for one. Call it in every step, right before the host waits."""
        self._num_steps += 1
        num_committed = (
            self._commit_piece() if self._max_pending + self._num_repeats >= _TOKENS_PER_COMMIT else 0
        )
        if num_committed <= _MIN_ROWS_PER_PIECE:  # not beside large commits, see IncrementalDetokenization
            self.incremental_detokenization.send_next()
        if self._confirmed and self._num_steps % _TOKENS_PER_COMMIT == 0:
            self._flush_confirmed()

    def count(self, num_tokens: Int32Array) -> None:
        """Add to ``num_tokens``, of all rows, what was noted and not committed."""
        num_tokens += self._pending()

    def confirm(self, row: int, end: int) -> None:
        """Note that all tokens in front of position ``end`` belong to the text of a row with stop strings."""
        self._confirmed[row] = end

    def flush(self, rows: IntArray | None = None) -> None:
        """Commit what was noted of ``rows`` (None: all); of rows with stop strings, what is confirmed.

        The output thread gets none of it: these rows leave, or scheduling waits for the commit.
        """
        num_pending = self._pending()
        pending = np.flatnonzero(num_pending) if rows is None else rows[num_pending[rows] > 0]
        if len(pending):
            self._commit(pending)
        if self._confirmed:
            self._flush_confirmed()

    def flush_for(self, prompt: Int32Array, namespace: bytes) -> None:
        """Commit all that a lookup of ``prompt`` in ``namespace`` could find if nothing were deferred.

        A pending token can be found only if the prompt equals the row from the start to that token.
        """
        if self._confirmed:
            self._flush_confirmed()
        # Many prompts are admitted at once: no token becomes pending between them.
        if self._frontier is None:
            self._frontier = self._find_frontier()
        pending, first_pending, tokens = self._frontier
        if not len(pending):
            return
        # The last token of a prompt is always computed.
        last = len(prompt) - 1
        matches = np.flatnonzero((prompt[np.minimum(first_pending, last)] == tokens) & (first_pending < last))
        if not len(matches):
            return
        token_ids, namespaces = self._state.token_ids, self._manager.table.namespaces
        matching_rows = [
            row
            for row, end in zip(pending[matches].tolist(), first_pending[matches].tolist(), strict=True)
            if namespaces[row] == namespace and np.array_equal(token_ids[row, :end], prompt[:end])
        ]
        if matching_rows:
            self.incremental_detokenization.put(*self._commit(np.array(matching_rows, np.int64)))

    def _pending(self) -> Int32Array:
        """Return how many tokens of each row were added and not committed."""
        if self._num_repeats:
            self._pending_counts[self._last_rows] += self._num_repeats
            self._max_pending += self._num_repeats
            self._num_repeats = 0
        return self._pending_counts

    def _commit_piece(self) -> int:
        """Commit the tokens of some rows that have enough of them; return how many rows."""
        num_pending = self._pending()
        due_rows = np.flatnonzero(num_pending >= _TOKENS_PER_COMMIT)
        if len(due_rows):
            num_rows = max(_MIN_ROWS_PER_PIECE, -(-np.count_nonzero(num_pending) // _MAX_PIECES))
            fits = np.cumsum(num_pending[due_rows]) <= _MAX_TOKENS_PER_PIECE
            due_rows = due_rows[: min(num_rows, max(1, np.count_nonzero(fits)))]
            self.incremental_detokenization.put(*self._commit(due_rows))
        self._max_pending = int(num_pending.max())
        return len(due_rows)

    def _find_frontier(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return rows with pending tokens, the position of the first one in each, and that token."""
        pending = np.flatnonzero(self._pending())
        first_pending = self._manager.num_computed_tokens[pending]
        return pending, first_pending, self._state.token_ids[pending, first_pending]

    def _commit(self, rows: IntArray) -> tuple[IntArray, IntArray, Int32Array, Int32Array]:
        """Commit what was noted of ``rows``.

        Returns:
            Of ``N`` rows that were not held back: the rows, where the tokens of each start, how many they are, all
            ``[N]``, and the tokens themselves.
        """
        state = self._state
        self._frontier = None
        num_pending = self._pending()
        counts = num_pending[rows]
        num_pending[rows] = 0
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
        if len(pending := rows[self._pending()[rows] > 0]):
            self._commit(pending)
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


_MIN_ROWS_PER_PORTION, _MAX_PORTIONS = 32, 6
"""Detokenizing 32 rows of 32 tokens takes 0.1 to 0.5 ms, about as long as the host waits for a step of many rows.
Portions of 64 rows cost the step loop more, of 16 no less."""
_MAX_KEPT_PORTIONS = 24


class IncrementalDetokenization:
    """Committed tokens of completions without ``needs_each_token``, until they are sent to the output thread.

    They are sent in portions, in steps that commit little, and detokenized while the host waits for such a step: beside
    a detokenizing output thread, which competes for the interpreter lock, a commit takes three times as long.
    """

    def __init__(self, state: SequenceState) -> None:
        self.send: Callable[[IncrementalTokens], None] | None = None
        """Receives the tokens; with None, none are kept."""
        self._state = state
        self._portions: deque[IncrementalTokens] = deque()

    def put(self, rows: IntArray, starts: IntArray, counts: Int32Array, token_ids: Int32Array) -> None:
        """Keep what was committed, without prompts and completions with ``needs_each_token``.

        When there is too much of it, the oldest is sent at once.

        Args:
            rows: ``[N]``
            starts: ``[N]``, position of the first token of each row, in prompt and output.
            counts: ``[N]``
            token_ids: ``[sum(counts)]``, those of a row behind those of the row before.
        """
        state = self._state
        if self.send is None:
            return
        is_due = ~state.needs_each_token[rows] & (starts + counts > state.num_prompt_tokens[rows])
        num_due = int(np.count_nonzero(is_due))
        if num_due < len(rows):
            token_ids = token_ids[np.repeat(is_due, counts)]
            rows, starts, counts = rows[is_due], starts[is_due], counts[is_due]
        size = max(_MIN_ROWS_PER_PORTION, -(-num_due // _MAX_PORTIONS))
        ends = np.cumsum(counts)
        for first in range(0, num_due, size):
            some = slice(first, first + size)
            tokens = token_ids[ends[first] - counts[first] : ends[some][-1]]
            completions = [state.completion(row) for row in rows[some].tolist()]
            self._portions.append(
                IncrementalTokens(completions, starts[some].tolist(), counts[some].tolist(), tokens)
            )
        while len(self._portions) > _MAX_KEPT_PORTIONS:
            self.send(self._portions.popleft())

    def send_next(self) -> None:
        """Send the output thread a portion, or some if they are small. Call it right before the host waits."""
        if self.send is None:
            return
        portions, num_rows = self._portions, 0
        while portions and (not num_rows or num_rows + len(portions[0].completions) <= _MIN_ROWS_PER_PORTION):
            num_rows += len(portions[0].completions)
            self.send(portions.popleft())

    def drop(self) -> None:
        """Drop what was not sent: all completions have ended."""
        self._portions.clear()
