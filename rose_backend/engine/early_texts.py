"""Tokens that nobody waits for, handed to the text thread in portions that fit beside a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from rose_backend.block_manager.array_types import IntArray
from rose_backend.engine.output_processor import EarlyTokens
from rose_backend.engine.request import Completion
from rose_backend.engine.row_state import Int32Array, RowState

_MIN_ROWS_PER_PORTION, _MAX_PORTIONS = 32, 6
"""The texts of 32 rows with 32 tokens each take 0.1 ms, with cold caches 0.5 ms: about as long as the host waits for a
step of many rows. Portions of 64 rows cost the step loop more, of 16 no less. Rows that began together come in three
pieces every 32 steps (``LateCommits``), so at most 18 of these have a portion."""
_MAX_KEPT_PORTIONS = 24


class EarlyTexts:
    """Committed tokens of completions that are not followed, until the text thread gets them.

    The text thread needs the interpreter's lock. NumPy lets go of it in every larger operation, and the step loop would
    get it back only after the text thread has had its turn: beside it, committing a piece of the rows takes three times
    as long. So tokens are not handed over as they are committed, but a portion at a time in steps that commit little:
    its texts are made while the host waits for such a step.
    """

    def __init__(self, state: RowState) -> None:
        self.tell: Callable[[EarlyTokens], None] | None = None
        """Who is given the tokens; without anybody, none are kept."""
        self._state = state
        self._portions: deque[EarlyTokens] = deque()

    def put(self, rows: IntArray, starts: IntArray, counts: Int32Array, token_ids: Int32Array) -> None:
        """Keep what was committed, but for prompts and for completions whose every token is handed on anyway.

        What has been kept for long is handed over at once when there is too much of it.

        Args:
            rows: ``[N]``
            starts: ``[N]``, where in prompt and output the first token of each row stands.
            counts: ``[N]``
            token_ids: ``[sum(counts)]``, those of a row behind those of the row before.
        """
        state = self._state
        if self.tell is None:
            return
        is_due = ~state.is_followed[rows] & (starts + counts > state.num_prompt_tokens[rows])
        num_due = int(np.count_nonzero(is_due))
        if num_due < len(rows):
            token_ids = token_ids[np.repeat(is_due, counts)]
            rows, starts, counts = rows[is_due], starts[is_due], counts[is_due]
        size = max(_MIN_ROWS_PER_PORTION, -(-num_due // _MAX_PORTIONS))
        ends = np.cumsum(counts)
        for first in range(0, num_due, size):
            some = slice(first, first + size)
            tokens = token_ids[ends[first] - counts[first] : ends[some][-1]]
            completions = [self._completion(row) for row in rows[some].tolist()]
            self._portions.append(
                EarlyTokens(completions, starts[some].tolist(), counts[some].tolist(), tokens)
            )
        while len(self._portions) > _MAX_KEPT_PORTIONS:
            self.tell(self._portions.popleft())

    def hand_over(self) -> None:
        """Give the text thread a portion, or some if they are small. Call it right before the host waits."""
        if self.tell is None:
            return
        portions, num_rows = self._portions, 0
        while portions and (not num_rows or num_rows + len(portions[0].completions) <= _MIN_ROWS_PER_PORTION):
            num_rows += len(portions[0].completions)
            self.tell(portions.popleft())

    def drop(self) -> None:
        """Forget what was not handed over: all completions have ended."""
        self._portions.clear()

    def _completion(self, row: int) -> Completion:
        completion = self._state.completions[row]
        assert completion is not None, f"row {row} holds no completion"
        return completion
