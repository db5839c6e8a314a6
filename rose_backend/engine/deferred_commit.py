"""Computed tokens that are committed to the block manager later and in batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rose_backend.block_manager import BlockManager
from rose_backend.block_manager.block_pool import IntArray
from rose_backend.engine.sequence_state import Int32Array, SequenceState

CommitHandler = Callable[[IntArray, IntArray, Int32Array, Int32Array], None]
"""Gets request slots, the position of the first committed token of each, their numbers, all ``[N]``, and the tokens."""

_TOKENS_PER_COMMIT = 32
"""A request slot's decoded tokens are committed when there are this many."""

_MAX_PIECES, _MIN_SLOTS_PER_PIECE, _MAX_TOKENS_PER_PIECE = 3, 16, 3072
"""Committing 32 tokens of a slot takes the host about 6 microseconds, and a call as long as some 20 slots. A piece fits
beside one step; all of 256 slots at once would take longer than the device has work for."""


class DeferredCommits:
    """Commits many tokens of a request slot at once, and the slots in several pieces.

    Committing would be a third of the host's work while many prompts are admitted and the host limits the speed, so it
    is deferred to steps in which the host only waits. This never delays a prefix hit: ``flush_for`` is called before
    each lookup, ``flush`` before slots are freed. Until they are committed, tokens count as those of steps in flight.

    Args:
        on_commit: receives tokens of slots that go on, as ``IncrementalDetokenization.put``.
    """

    def __init__(self, manager: BlockManager, state: SequenceState, on_commit: CommitHandler) -> None:
        self._manager = manager
        self._state = state
        self._on_commit = on_commit
        # Pending tokens of each slot, at most _max_pending, except _num_repeats more of each of _last_slots.
        self._pending_counts: Int32Array = np.zeros(len(state.num_held_tokens), np.int32)
        self._last_slots: IntArray = np.empty(0, np.int64)
        self._num_repeats = 0
        self._max_pending = 0
        self._num_steps = 0
        self._confirmed: dict[int, int] = {}
        self._frontier: tuple[IntArray, IntArray, IntArray] | None = None

    def add(self, slots: IntArray, num_tokens: IntArray | None = None) -> None:
        """Note that each of ``slots`` has computed ``num_tokens`` more, and that these are known.

        Args:
            slots: ``[N]``, not changed afterwards.
            num_tokens: ``[N]``; None: one each.
        """
        self._frontier = None
        num_pending = self._pending()
        num_pending[slots] += 1 if num_tokens is None else num_tokens
        self._max_pending = int(num_pending.max())
        self._last_slots = slots

    def add_again(self) -> None:
        """Note that each slot of the last call of ``add`` has computed one more token: in steady-state decode."""
        self._frontier = None
        self._num_repeats += 1

    def commit_some(self) -> bool:
        """Commit the next piece, if there is enough for one. Call it in every step, right before the host waits.

        Returns:
            Whether the host has time for something else: it has committed nothing, or a few slots.
        """
        self._num_steps += 1
        num_committed = 0
        if self._max_pending + self._num_repeats >= _TOKENS_PER_COMMIT:
            num_committed = self._commit_piece()
        if self._confirmed and self._num_steps % _TOKENS_PER_COMMIT == 0:
            self._flush_confirmed()
        return num_committed <= _MIN_SLOTS_PER_PIECE

    def count(self, num_tokens: Int32Array) -> None:
        """Add to ``num_tokens``, of all slots, what was noted and not committed."""
        num_tokens += self._pending()

    def confirm(self, slot: int, end: int) -> None:
        """Note that all tokens before position ``end`` belong to the text of a slot with stop strings."""
        self._confirmed[slot] = end

    def flush(self, slots: IntArray | None = None) -> None:
        """Commit what was noted of ``slots`` (None: all); of slots with stop strings, what is confirmed.

        ``on_commit`` gets none of it: these slots leave, or scheduling waits for the commit.
        """
        num_pending = self._pending()
        pending = np.flatnonzero(num_pending) if slots is None else slots[num_pending[slots] > 0]
        if len(pending):
            self._commit(pending)
        if self._confirmed:
            self._flush_confirmed()

    def flush_for(self, prompt: Int32Array, namespace: bytes) -> None:
        """Commit all that a lookup of ``prompt`` in ``namespace`` could find if nothing were deferred.

        A pending token can be found only if the prompt equals the slot's tokens from the start to that token.
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
        matching_slots = [
            slot
            for slot, end in zip(pending[matches].tolist(), first_pending[matches].tolist(), strict=True)
            if namespaces[slot] == namespace and np.array_equal(token_ids[slot, :end], prompt[:end])
        ]
        if matching_slots:
            self._on_commit(*self._commit(np.array(matching_slots, np.int64)))

    def _pending(self) -> Int32Array:
        """Return how many tokens of each slot were added and not committed."""
        if self._num_repeats:
            self._pending_counts[self._last_slots] += self._num_repeats
            self._max_pending += self._num_repeats
            self._num_repeats = 0
        return self._pending_counts

    def _commit_piece(self) -> int:
        """Commit the tokens of some slots that have enough of them; return how many slots."""
        num_pending = self._pending()
        due_slots = np.flatnonzero(num_pending >= _TOKENS_PER_COMMIT)
        if len(due_slots):
            num_slots = max(_MIN_SLOTS_PER_PIECE, -(-np.count_nonzero(num_pending) // _MAX_PIECES))
            fits = np.cumsum(num_pending[due_slots]) <= _MAX_TOKENS_PER_PIECE
            due_slots = due_slots[: min(num_slots, max(1, np.count_nonzero(fits)))]
            self._on_commit(*self._commit(due_slots))
        self._max_pending = int(num_pending.max())
        return len(due_slots)

    def _find_frontier(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return slots with pending tokens, the position of the first one in each, and that token."""
        pending = np.flatnonzero(self._pending())
        first_pending = self._manager.num_computed_tokens[pending]
        return pending, first_pending, self._state.token_ids[pending, first_pending]

    def _commit(self, slots: IntArray) -> tuple[IntArray, IntArray, Int32Array, Int32Array]:
        """Commit what was noted of ``slots``.

        Returns:
            Of ``N`` slots that were not held back: the slots, where the tokens of each start, how many they are, all
            ``[N]``, and the tokens themselves.
        """
        state = self._state
        self._frontier = None
        num_pending = self._pending()
        counts = num_pending[slots]
        num_pending[slots] = 0
        is_held = state.has_stop_strings[slots]
        if np.count_nonzero(is_held):
            state.num_held_tokens[slots[is_held]] += counts[is_held]
            slots, counts = slots[~is_held], counts[~is_held]
        # A step that is being planned has counted them among these.
        state.num_uncommitted_tokens[slots] -= counts
        starts = self._manager.num_computed_tokens[slots]
        token_ids = state.tokens_at(slots, starts, counts)
        self._manager.commit(slots, counts, token_ids)
        return slots, starts, counts, token_ids

    def _flush_confirmed(self) -> None:
        state, computed = self._state, self._manager.num_computed_tokens
        slots, ends = (np.fromiter(each, np.int64) for each in (self._confirmed, self._confirmed.values()))
        self._confirmed.clear()
        if len(pending := slots[self._pending()[slots] > 0]):
            self._commit(pending)
        is_due = ends > computed[slots]
        if np.count_nonzero(is_due):
            slots, starts = slots[is_due], computed[slots[is_due]]
            counts = ends[is_due] - starts
            self._manager.commit(slots, counts, state.tokens_at(slots, starts, counts))
            self._frontier = None
            state.num_held_tokens[slots] -= counts
            state.num_uncommitted_tokens[slots] -= counts
