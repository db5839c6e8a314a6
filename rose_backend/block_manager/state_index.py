"""Checkpoints of states by the tokens that they stand for.

A checkpoint is that of a whole prefix, and of no other length: it lies behind the digest of the prefix's full blocks
and the tokens behind those, fewer than a block. There are few of them, as each takes as much memory as many tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from rose_backend.block_manager.block_pool import NULL_BLOCK, BlockPool, BoolArray, Int32Array, Int64Array

Place: TypeAlias = tuple[bytes, bytes]
"""The digest of the full blocks of a prefix, and its tokens behind them, int32 as bytes."""


class StateIndex:
    """Which checkpoints lookups find. Memory: about 350 bytes and the tokens of less than a block for each.

    Args:
        pool: its ``is_cached`` says which blocks are in an index.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_at: dict[Place, int] = {}
        self._place_of: dict[int, Place] = {}
        self._tails: dict[bytes, list[bytes]] = {}  # by digest, in order
        self.last_of_rows: Counter[Place] = Counter()
        """For how many running rows the checkpoint at a place is the last: others with the same prompt start there."""
        self.epoch = 0
        """Counts the changes that may leave an earlier lookup with a block that is found no more."""

    def get(self, place: Place) -> int:
        """Return the checkpoint at a place, or the null block."""
        return self._block_at.get(place, NULL_BLOCK)

    def place_of(self, block_id: int) -> Place:
        """Return where a checkpoint is."""
        return self._place_of[block_id]

    def are_last(self, block_ids: Int64Array) -> BoolArray:
        """Return which of some blocks, of any kind, are the last checkpoint of a running row."""
        places = map(self._place_of.get, block_ids.tolist())
        return np.fromiter((place in self.last_of_rows for place in places), np.bool_, len(block_ids))

    def add(self, place: Place, block_id: int) -> None:
        """Add a checkpoint at a place that has none."""
        self._block_at[place] = block_id
        self._place_of[block_id] = place
        digest, tail = place
        insort(self._tails.setdefault(digest, []), tail)
        self._pool.is_cached[block_id] = True

    def remove(self, block_ids: list[int]) -> None:
        """Remove checkpoints."""
        self.epoch += 1
        self._pool.is_cached[block_ids] = False
        for block_id in block_ids:
            digest, tail = place = self._place_of.pop(block_id)
            del self._block_at[place]
            tails = self._tails[digest]
            del tails[bisect_left(tails, tail)]
            if not tails:
                del self._tails[digest]

    def longest_prefix(self, digest: bytes, tokens: bytes) -> Place | None:
        """Return the place behind ``digest`` of the longest checkpoint that ``tokens`` begin with, if there is one."""
        tails = self._tails.get(digest)
        while tails and (place := bisect_right(tails, tokens)):
            tail = tails[place - 1]
            if tokens.startswith(tail):
                return digest, tail
            # Whatever is shorter and begins both is a beginning of what they have in common.
            tokens = tokens[: _length_in_common(tokens, tail)]
        return None

    def clear(self) -> None:
        """Remove all checkpoints."""
        self.epoch += 1
        self._block_at.clear()
        self._place_of.clear()
        self._tails.clear()

    def block_ids(self) -> Int32Array:
        """Return every checkpoint, from the index itself."""
        return np.array([*self._block_at.values()], np.int32)


def _length_in_common(one: bytes, other: bytes) -> int:
    """Return how many bytes two strings begin with alike, of which one does not begin with the other."""
    shorter = min(len(one), len(other))
    differs = np.frombuffer(one, np.uint8, shorter) != np.frombuffer(other, np.uint8, shorter)
    return int(differs.argmax()) if differs.any() else shorter


class StateCursor:
    """The checkpoints of one prompt, from right to left.

    Args:
        index: of the checkpoints.
        token_ids: the prompt, int32 ``[P]``.
        digests: of its blocks, see ``BlockManager.hash_blocks``.
        block_size: tokens per block.
    """

    def __init__(
        self, index: StateIndex, token_ids: Int32Array, digests: Sequence[bytes], block_size: int
    ) -> None:
        self._index, self._token_ids, self._digests = index, token_ids, digests
        self._block_size = block_size
        self.block_id = NULL_BLOCK
        """The checkpoint at the end that was returned last."""

    def longest_usable(self, end: int) -> int:
        """Return the length of the longest prefix of at most ``end`` tokens that has a checkpoint; 0 for none."""
        size = self._block_size
        for column in range(end // size, -1, -1):
            first = column * size
            # All tokens of a block stand behind its own digest.
            tokens = self._token_ids[first : min(end, first + size - 1)].tobytes()
            if (place := self._index.longest_prefix(self._digests[column], tokens)) is not None:
                self.block_id = self._index.get(place)
                return first + len(place[1]) // self._token_ids.itemsize
        self.block_id = NULL_BLOCK
        return 0
