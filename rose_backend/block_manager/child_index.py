"""Which cached block behind a given parent has the longest common prefix with a prompt's next tokens.

The children of a parent are the cached blocks, full or partial, that continue the same chain of full blocks. The first
blocks of all prompts of a namespace have the same parent, so there may be very many; most other parents have one child.

A small group of children is a tuple, and all of it is compared. A large group is split in two:

    open     blocks that a row still appends to, at most one per row: all are compared
    closed   all others, sorted by their tokens: a block with the longest common prefix is next to the place where the
             tokens looked for would be inserted, so two are compared

Appending to an open block changes neither.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from rose_backend.block_manager.block_pool import NO_WRITER, BlockPool, Int32Array

_MAX_SMALL = 8
_FEW = 3
"""So many blocks are compared one by one. A large group has no more to compare but for its open ones."""


class ChildIndex:
    """Cached blocks by the digest of their parent. Memory: about 130 bytes per block.

    Args:
        pool: its ``num_written_tokens`` and ``writers`` give how much a block holds and whether a row appends to it.
        block_tokens: int32 ``[num_blocks, block_size]``, the tokens of every block.
    """

    def __init__(self, pool: BlockPool, block_tokens: Int32Array) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._groups: dict[bytes, _Group] = {}

    def add(self, parents: list[bytes], block_ids: list[int]) -> None:
        """Add blocks, each behind its parent."""
        groups = self._groups
        for parent, block_id in zip(parents, block_ids, strict=True):
            group = groups.get(parent)
            if group is None:
                groups[parent] = (block_id,)
            elif isinstance(group, _LargeGroup):
                group.add(block_id)
            elif len(group) < _MAX_SMALL:
                groups[parent] = (*group, block_id)
            else:
                groups[parent] = large = _LargeGroup(self._pool, self._block_tokens, self._tokens_of)
                for member in (*group, block_id):
                    large.add(member)

    def remove(self, parents: list[bytes], block_ids: list[int]) -> None:
        """Remove blocks, each from behind its parent."""
        groups = self._groups
        for parent, block_id in zip(parents, block_ids, strict=True):
            group = groups.pop(parent)
            if len(group) == 1:
                continue
            if isinstance(group, _LargeGroup):
                group.remove(block_id)
                groups[parent] = group
            else:
                groups[parent] = tuple(member for member in group if member != block_id)

    def close(self, parents: list[bytes], block_ids: list[int]) -> None:
        """Note that no row appends to these blocks any more."""
        groups = self._groups
        for parent, block_id in zip(parents, block_ids, strict=True):
            group = groups[parent]
            if isinstance(group, _LargeGroup):
                group.close(block_id)

    def reopen(self, parent: bytes, block_id: int) -> None:
        """Note that a row will append to or overwrite a block. Call it before its length changes."""
        group = self._groups[parent]
        if isinstance(group, _LargeGroup):
            group.reopen(block_id)

    def longest_prefix(self, parent: bytes, tokens: Int32Array) -> tuple[int, int]:
        """Return the child that shares the longest prefix with ``tokens``, and its length; ``(0, 0)`` if none does."""
        group = self._groups.get(parent)
        if group is None:
            return 0, 0
        members = group.candidates(tokens.tobytes()) if isinstance(group, _LargeGroup) else group
        if not members:
            return 0, 0
        if len(members) <= _FEW:
            return self._longest_prefix_of_few(members, tokens.tobytes())
        block_ids = np.array(members, np.int64)
        same = self._block_tokens.take(block_ids, axis=0)[:, : len(tokens)] == tokens
        same &= np.arange(len(tokens)) < self._pool.num_written_tokens[block_ids][:, None]
        runs = np.where(same.all(axis=1), len(tokens), np.argmin(same, axis=1))
        best = int(np.argmax(runs))
        return (members[best], int(runs[best])) if runs[best] else (0, 0)

    def _longest_prefix_of_few(self, members: Sequence[int], wanted: bytes) -> tuple[int, int]:
        """As ``longest_prefix``, among ``members``: bytes of a few blocks compare faster than arrays of them."""
        itemsize, step = self._block_tokens.itemsize, self._block_tokens.strides[0]
        data = self._block_tokens.take(members, axis=0).tobytes()
        written = self._pool.num_written_tokens.take(members).tolist()
        shared = [
            _num_equal(data[start : start + itemsize * count], wanted) // itemsize
            for start, count in zip(range(0, len(data), step), written, strict=True)
        ]
        longest = max(shared)
        return (members[shared.index(longest)], longest) if longest else (0, 0)

    def is_covered(self, parent: bytes, block_id: int) -> bool:
        """Whether another child of ``parent`` starts with all tokens of this block."""
        group = self._groups[parent]
        if len(group) == 1:
            return False
        tokens = self._tokens_of(block_id)
        members = group.candidates(tokens) if isinstance(group, _LargeGroup) else group
        return any(member != block_id and self._tokens_of(member).startswith(tokens) for member in members)

    def clear(self) -> None:
        """Remove all blocks."""
        self._groups.clear()

    def block_ids(self) -> list[int]:
        """Return all blocks."""
        return [block_id for group in self._groups.values() for block_id in group]

    def _tokens_of(self, block_id: int) -> bytes:
        return self._block_tokens[block_id, : self._pool.num_written_tokens[block_id]].tobytes()


class _LargeGroup:
    """Many children of one parent, the closed ones sorted by their tokens as bytes.

    Bytes compare faster than lists of tokens, and the longest common prefix in bytes is the longest in tokens.
    """

    def __init__(self, pool: BlockPool, block_tokens: Int32Array, tokens_of: Callable[[int], bytes]) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._key = tokens_of
        # In the order of their coming, unlike a set: which of equal blocks is found does not depend on block ids.
        self._open: dict[int, None] = {}
        self._closed = array("i")
        self._keys: list[bytes] = []  # the tokens of each closed block

    def __len__(self) -> int:
        return len(self._open) + len(self._closed)

    def __iter__(self) -> Iterator[int]:
        yield from self._open
        yield from self._closed

    def add(self, block_id: int) -> None:
        is_full = self._pool.num_written_tokens[block_id] == self._block_tokens.shape[1]
        if self._pool.writers[block_id] != NO_WRITER and not is_full:
            self._open[block_id] = None
        else:
            self._insert(block_id)

    def remove(self, block_id: int) -> None:
        if block_id in self._open:
            del self._open[block_id]
        else:
            place = self._closed.index(block_id, bisect_left(self._keys, self._key(block_id)))
            del self._closed[place], self._keys[place]

    def close(self, block_id: int) -> None:
        if block_id in self._open:
            del self._open[block_id]
            self._insert(block_id)

    def reopen(self, block_id: int) -> None:
        self.remove(block_id)
        self._open[block_id] = None

    def candidates(self, tokens: bytes) -> list[int]:
        """Return the open blocks, and the closed ones next to the place of ``tokens`` that share its first token."""
        keys, first = self._keys, tokens[: self._block_tokens.itemsize]
        place = bisect_left(keys, tokens)
        # The one before; the one with exactly these tokens, which may be the caller's own; the one behind that.
        places = range(max(place - 1, 0), min(place + 2, len(keys)))
        return [*self._open, *(self._closed[index] for index in places if keys[index].startswith(first))]

    def _insert(self, block_id: int) -> None:
        key = self._key(block_id)
        place = bisect_left(self._keys, key)
        self._closed.insert(place, block_id)
        self._keys.insert(place, key)


def _num_equal(some: bytes, others: bytes) -> int:
    """Return how many leading bytes are equal."""
    if others.startswith(some):
        return len(some)
    length = min(len(some), len(others))
    difference = int.from_bytes(some[:length], "little") ^ int.from_bytes(others[:length], "little")
    return ((difference & -difference).bit_length() - 1) // 8 if difference else length


_Group: TypeAlias = tuple[int, ...] | _LargeGroup
