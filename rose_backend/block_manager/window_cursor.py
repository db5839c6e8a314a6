"""Where a cached prefix may end so that a sliding window's last tokens are all there, too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rose_backend.block_manager.block_index import BlockIndex
from rose_backend.block_manager.block_pool import NO_BLOCKS, Int32Array


class WindowCursor:
    """One window over one prompt, from right to left.

    A prefix of ``end`` tokens is usable if ``[end - window + 1, end)`` is cached: what its next token attends to. The
    cursor only moves left, so that a lookup costs at most one look at each block of the prompt.

    Args:
        index: of the window's blocks.
        block_tokens: int32 ``[num_blocks, block_size]``, the tokens of every block.
        window: tokens that a token attends to, itself included.
        token_ids: the prompt, int32 ``[P]``.
        digests: of its blocks, see ``BlockManager.hash_blocks``.
        full_blocks_only: whether ``index`` has full blocks only.
    """

    def __init__(
        self,
        index: BlockIndex,
        block_tokens: Int32Array,
        window: int,
        token_ids: Int32Array,
        digests: Sequence[bytes],
        full_blocks_only: bool,
    ) -> None:
        self._index, self._block_tokens, self._window = index, block_tokens, window
        self._token_ids, self._digests = token_ids, digests
        self._full_blocks_only = full_blocks_only
        self._block_size = block_tokens.shape[1]
        self._start: int | None = None  # everything from here to the end that was asked for last is there
        self._blocks: dict[int, int] = {}

    def longest_usable(self, end: int) -> int:
        """Return the length of the longest usable prefix of at most ``end`` tokens; ``end`` never grows."""
        size = self._block_size
        start = end if self._start is None else min(self._start, end)
        while start > max(end - self._window + 1, 0):
            column = (start - 1) // size
            block_id, num_tokens = self._find(column, start)
            # What ends behind a hole either attends to a token of it, or ends in it.
            end = min(end, column * size + num_tokens) if column * size + num_tokens < start else end
            if num_tokens:
                self._blocks[column] = block_id
            start = column * size
        self._start = start
        return end

    def blocks_of(self, end: int) -> Int32Array:
        """Return the blocks of a usable prefix, int32 ``[B]``: its last ones, as far back as the window reaches."""
        if not end:
            return NO_BLOCKS
        columns = range(max(end - self._window + 1, 0) // self._block_size, -(-end // self._block_size))
        return np.array([self._blocks[column] for column in columns], np.int32)

    def _find(self, column: int, end: int) -> tuple[int, int]:
        """Return a block that holds most of the tokens from the beginning of ``column`` to ``end``, and how many."""
        first, digests = column * self._block_size, self._digests
        if column + 1 < len(digests):
            block_id = self._index.full.get(digests[column + 1])
            wanted = self._token_ids[first : first + self._block_size]
            if block_id is not None and self._block_tokens[block_id].tobytes() == wanted.tobytes():
                return block_id, self._block_size
        if self._full_blocks_only:
            return 0, 0
        return self._index.children.longest_prefix(digests[column], self._token_ids[first:end])
