"""What the prefix cache finds: committed blocks by chained digests, and checkpoints of states.

A prompt has one digest per full block, of the block's tokens and of the digest before it. The root digest is keyed, so
no client can compute a digest. The namespace (tenant salt, adapter, ...) is part of it, so that namespaces share no
blocks. In a ``BlockIndex``, one for each KV cache group type, two indexes lead to a block:

    full      digest of (parent digest, its tokens)  -> the block that holds exactly these tokens
    children  parent digest                          -> every cached block after this parent, full or partial

A digest covers all tokens up to the end of its block, so a missing entry says nothing about the blocks before or after
it: the blocks of a sliding window come and go one by one.

The first blocks of all prompts of a namespace have the same parent, so a parent may have very many children; most have
one. A small group of children is a tuple, and all of it is compared. A large group is split in two:

    open     blocks that a row still appends to, at most one per row: all are compared
    closed   all others, sorted by their tokens: a block with the longest common prefix is next to the place where the
             tokens looked for would be inserted, so two are compared

Appending to an open block changes neither.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, overload

import numpy as np

from rose_backend.block_manager.block_pool import (
    NO_WRITER,
    NULL_BLOCK,
    BlockPool,
    BoolArray,
    Int32Array,
    Int64Array,
)

Place: TypeAlias = tuple[bytes, bytes]
"""The digest of the full blocks of a prefix, and its tokens after them, int32 as bytes."""

DIGEST_BYTES = 32
_EMPTY_CHAIN = hashlib.blake2b(digest_size=DIGEST_BYTES)
_MAX_SMALL = 8
_FEW = 3
"""Up to this many blocks are compared one by one. A large group has no more to compare except its open ones."""


class BlockDigests(Sequence[bytes]):
    """Digests of a prompt's blocks, each computed when it is first asked for, once.

    A lookup asks for the blocks that it finds and one more. What is computed after them is hashed when it is indexed.

    Args:
        count: of all of them.
        known: the first of them.
        rest: yields the others.
    """

    def __init__(self, count: int, known: Sequence[bytes], rest: Iterator[bytes]) -> None:
        self._count, self._rest = count, rest
        self.known = list(known)
        """Those that have been computed."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        known = self.known
        for index in range(self._count):
            if index == len(known):  # not hashed for another iteration meanwhile
                known.append(next(self._rest))
            yield known[index]

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        """Return one digest, or those of a slice."""
        if isinstance(index, slice):
            return [self[each] for each in range(self._count)[index]]
        index = range(self._count)[index]  # from the end, too
        for _ in range(index + 1 - len(self.known)):
            self.known.append(next(self._rest))
        return self.known[index]


class PrefixHasher:
    """Hashes namespaces and blocks.

    Args:
        block_size: tokens per block.
        hash_key: at most 64 bytes; None draws a random one.
    """

    def __init__(self, block_size: int, hash_key: bytes | None) -> None:
        self._block_size = block_size
        self._hash_key = os.urandom(32) if hash_key is None else hash_key
        self._last_root: tuple[bytes | None, bytes] = (None, b"")

    def root_digest(self, namespace: bytes) -> bytes:
        """Return the parent digest of a sequence's first block."""
        if namespace != self._last_root[0]:  # most prompts have the namespace of the prompt before
            digest = hashlib.blake2b(namespace, key=self._hash_key, digest_size=DIGEST_BYTES, person=b"root")
            self._last_root = namespace, digest.digest()
        return self._last_root[1]

    def chain_digest(self, parent: bytes, tokens: bytes | memoryview) -> bytes:
        """Return the digest of a full block. ``tokens``: its int32 ids as bytes."""
        state = _EMPTY_CHAIN.copy()  # faster than another constructor call
        state.update(parent + tokens)
        return state.digest()

    def hash_blocks(self, token_ids: Int32Array, namespace: bytes, known: Sequence[bytes]) -> BlockDigests:
        """Return the root digest and the digest of each full block; ``known`` are the first of them."""
        num_digests = 1 + len(token_ids) // self._block_size
        # Not isinstance, which takes ten times as long for an abstract class.
        known = list(known.known if type(known) is BlockDigests else known)
        return BlockDigests(num_digests, known, self.digests(token_ids, namespace, known))

    def digests(
        self, token_ids: Int32Array, namespace: bytes, known: Sequence[bytes] = ()
    ) -> Iterator[bytes]:
        """Yield the digests after ``known``, each hashed only when it is asked for."""
        if not known:
            known = [self.root_digest(namespace)]
            yield known[0]
        digest = known[-1]
        data, step = token_ids.data.cast("B"), 4 * self._block_size
        for start in range((len(known) - 1) * step, len(data) - step + 1, step):
            digest = self.chain_digest(digest, data[start : start + step])
            yield digest


class BlockIndex:
    """Which blocks lookups find.

    Args:
        pool: its ``is_cached`` says which blocks are in an index; ``num_written_tokens`` how much of one is valid.
        block_tokens: int32 ``[num_blocks, block_size]``, the tokens of every block.
        full_blocks_only: index full blocks only.
        parent_of: digest of each block's parent, empty for blocks that are not in ``children``.
        digest_of: digest of each full block, empty for all others. A block is in one index at most, so all share these
            two lists. Lists take less memory and time than dictionaries.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: Int32Array,
        full_blocks_only: bool,
        parent_of: list[bytes],
        digest_of: list[bytes],
    ) -> None:
        self._pool = pool
        self._block_size = block_tokens.shape[1]
        self._full_blocks_only = full_blocks_only
        self._parent_of, self._digest_of = parent_of, digest_of
        self.full: dict[bytes, int] = {}
        self.children = ChildIndex(pool, block_tokens, parent_of)
        self._keeps_older = not pool.has_groups
        self.epoch = 0
        """Counts the changes that may leave an earlier lookup with a block that is no longer found."""

    def publish(
        self, block_ids: list[int], opens: list[bool], parents: list[bytes], digests: list[bytes]
    ) -> None:
        """Add blocks that have just been written; all lists are ``[N]``.

        If another block holds the same tokens after the same parent, that one stays and the new one is not indexed.
        With several group types it stays only if it is held; otherwise it is released.

        Args:
            block_ids: those of a row in order.
            opens: the block has its first tokens, and may grow.
            parents: the digest of the full blocks before each.
            digests: the digest of a full block; the parent again for a partial one.
        """
        full, parent_of, digest_of = self.full, self._parent_of, self._digest_of
        found: list[int] = []
        closed: list[int] = []
        for block_id, is_new, parent, digest in zip(block_ids, opens, parents, digests, strict=True):
            if digest is not parent:
                if digest in full and (self._keeps_older or not self._replaces(full[digest])):
                    if parent_of[block_id]:
                        self.remove([block_id])
                    continue
                full[digest] = block_id
                digest_of[block_id] = digest
                if parent_of[block_id]:
                    closed.append(block_id)
                    continue
            elif not is_new:
                continue
            found.append(block_id)
            if not self._full_blocks_only:
                parent_of[block_id] = parent
        if not self._full_blocks_only:
            self.children.add(found)
            self.children.close(closed)
        self._pool.is_cached[found] = True

    def _replaces(self, block_id: int) -> bool:
        """Release an older block with the same tokens, if nobody holds it; return whether that was done.

        A lookup skipped it because a window before it was gone, and what is used again must not keep its old age.
        """
        if self._pool.ref_counts[block_id]:
            return False
        self.remove([block_id])
        self._pool.discard(block_id)
        return True

    def reopen(self, block_id: int) -> None:
        """Note that a row is going to append to a block, which may not be in the index."""
        if self._parent_of[block_id]:
            self.children.reopen(block_id)

    def retire_tails(self, rows: Int64Array, tails: Int64Array) -> None:
        """Note that rows release their last computed blocks, ``tails``.

        Of equal partial blocks only one stays in the index, so that duplicates do not evict other content.
        """
        pool = self._pool
        is_partial = pool.is_cached[tails] & (pool.num_written_tokens[tails] < self._block_size)
        rows, tails = rows[is_partial], tails[is_partial]
        self.children.close(tails[pool.writers[tails] == rows].tolist())
        for block_id in tails[pool.ref_counts[tails] == 1].tolist():
            if self.children.is_covered(block_id):
                self.remove([block_id])

    def remove(self, block_ids: list[int]) -> list[bytes]:
        """Remove blocks; return the digests that no longer lead to one."""
        self.epoch += 1
        self._pool.is_cached[block_ids] = False
        digests = self._drop_digests(block_ids)
        if not self._full_blocks_only:
            self.children.remove(block_ids)
        return digests

    def truncate(self, block_id: int) -> list[bytes]:
        """Note that a row is going to overwrite the end of a block, before its length changes; as ``remove``."""
        self.epoch += 1
        self.reopen(block_id)
        if self._full_blocks_only:
            self._pool.is_cached[block_id] = False
        return self._drop_digests([block_id])

    def _drop_digests(self, block_ids: list[int]) -> list[bytes]:
        digest_of, dropped = self._digest_of, []
        for block_id in block_ids:
            if digest := digest_of[block_id]:
                digest_of[block_id] = b""
                del self.full[digest]
                dropped.append(digest)
        return dropped

    def clear(self) -> None:
        """Remove all blocks; the caller empties the lists of parents and digests."""
        self.epoch += 1
        self.full.clear()
        self.children.clear()

    def block_ids(self) -> Int32Array:
        """Return every block of the index, from the index itself."""
        return np.array(
            [*(self.full.values() if self._full_blocks_only else self.children.block_ids())], np.int32
        )


class ChildIndex:
    """Cached blocks by the digest of their parent. Memory: about 130 bytes per block.

    Args:
        pool: its ``num_written_tokens`` and ``writers`` give how much a block holds and whether a row appends to it.
        block_tokens: int32 ``[num_blocks, block_size]``, the tokens of every block.
        parent_of: digest of each block's parent: set before a block is added, emptied when it is removed.
    """

    def __init__(self, pool: BlockPool, block_tokens: Int32Array, parent_of: list[bytes]) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._parent_of = parent_of
        self._groups: dict[bytes, _Group] = {}

    def add(self, block_ids: list[int]) -> None:
        """Add blocks, each as a child of its parent."""
        groups, parent_of = self._groups, self._parent_of
        for block_id in block_ids:
            parent = parent_of[block_id]
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

    def remove(self, block_ids: list[int]) -> None:
        """Remove blocks from the children of their parents."""
        groups, parent_of = self._groups, self._parent_of
        for block_id in block_ids:
            parent, parent_of[block_id] = parent_of[block_id], b""
            group = groups.pop(parent)
            if len(group) == 1:
                continue
            if isinstance(group, _LargeGroup):
                group.remove(block_id)
                groups[parent] = group
            else:
                groups[parent] = tuple(member for member in group if member != block_id)

    def close(self, block_ids: list[int]) -> None:
        """Note that no row appends to these blocks any more."""
        for block_id in block_ids:
            group = self._groups[self._parent_of[block_id]]
            if isinstance(group, _LargeGroup):
                group.close(block_id)

    def reopen(self, block_id: int) -> None:
        """Note that a row will append to or overwrite a block. Call it before its length changes."""
        group = self._groups[self._parent_of[block_id]]
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

    def is_covered(self, block_id: int) -> bool:
        """Whether another child of the same parent starts with all tokens of this block."""
        group = self._groups[self._parent_of[block_id]]
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
        # In order of arrival, unlike a set: which of equal blocks is found does not depend on block ids.
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
        # The one before; the one with exactly these tokens, which may be the caller's own; the one after that.
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


class StateIndex:
    """Which checkpoints of states lookups find. Memory: about 350 bytes and the tokens of less than a block for each.

    A checkpoint is that of a whole prefix, and of no other length: its place is the digest of the prefix's full blocks
    and the tokens after those, fewer than a block. There are few of them, as each takes as much memory as many tokens.

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
        """Counts the changes that may leave an earlier lookup with a block that is no longer found."""

    def get(self, place: Place) -> int:
        """Return the checkpoint at a place, or the null block."""
        return self._block_at.get(place, NULL_BLOCK)

    def place_of(self, block_id: int) -> Place:
        """Return where a checkpoint is."""
        return self._place_of[block_id]

    def are_last(self, block_ids: Int64Array) -> BoolArray:
        """Return which of some blocks, of any group type, are the last checkpoint of a running row."""
        places = map(self._place_of.get, block_ids.tolist())
        return np.fromiter((place in self.last_of_rows for place in places), np.bool_, len(block_ids))

    def add(self, place: Place, block_id: int) -> None:
        """Add a checkpoint at a place that has none."""
        self._block_at[place] = block_id
        self._place_of[block_id] = place
        digest, tail = place
        insort(self._tails.setdefault(digest, []), tail)
        self._pool.is_cached[block_id] = True

    def remove(self, block_ids: list[int]) -> list[bytes]:
        """Remove checkpoints. As of the other indexes, the answer is the digests of full blocks: none."""
        self.epoch += 1
        self._pool.is_cached[block_ids] = False
        for block_id in block_ids:
            digest, tail = place = self._place_of.pop(block_id)
            del self._block_at[place]
            tails = self._tails[digest]
            del tails[bisect_left(tails, tail)]
            if not tails:
                del self._tails[digest]
        return []

    def longest_usable(
        self, token_ids: Int32Array, digests: Sequence[bytes], block_size: int, end: int
    ) -> tuple[int, int]:
        """Return the longest of a prompt's prefixes of at most ``end`` tokens that has a checkpoint, and this one."""
        for column in range(end // block_size, -1, -1):
            first = column * block_size
            # The tokens of a whole block are in its digest.
            tokens = token_ids[first : min(end, first + block_size - 1)].tobytes()
            if (place := self.longest_prefix(digests[column], tokens)) is not None:
                return first + len(place[1]) // token_ids.itemsize, self.get(place)
        return 0, NULL_BLOCK

    def longest_prefix(self, digest: bytes, tokens: bytes) -> Place | None:
        """Return the place after ``digest`` of the longest checkpoint that ``tokens`` begin with, if there is one."""
        tails = self._tails.get(digest)
        while tails and (place := bisect_right(tails, tokens)):
            tail = tails[place - 1]
            if tokens.startswith(tail):
                return digest, tail
            # Whatever is shorter and begins both is a beginning of what they have in common.
            tokens = tokens[: _num_equal(tail, tokens)]
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
