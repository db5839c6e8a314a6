"""The committed blocks of one kind of KV cache groups, by digest and behind their parents.

Two indexes lead to a block:

    full      digest of (parent digest, its tokens)  -> the block that holds exactly these tokens
    children  parent digest                          -> every cached block behind this parent, full or partial

A digest stands for all tokens up to the end of its block, so an entry that is missing says nothing of those before or
behind it: the blocks of a sliding window come and go one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from rose_backend.block_manager.block_pool import BlockPool, BoolArray, Int32Array, Int64Array, IntArray
from rose_backend.block_manager.child_index import ChildIndex

Link: TypeAlias = tuple[bytes, bytes]
"""The digest of a block's parent and, if it is full, its own, else none."""


def hash_links(
    rows: IntArray,
    is_full: BoolArray,
    data: bytes,
    chain_digests: list[bytes],
    chain_digest: Callable[[bytes, bytes], bytes],
) -> list[Link]:
    """Hash full blocks that have just been written; arrays are ``[N]``.

    Args:
        rows: the row of each block; the blocks of a row in order.
        is_full: the block is full and gets its digest.
        data: the tokens of all blocks.
        chain_digests: of every row; advanced past its full blocks.
        chain_digest: hashes a parent's digest and a block's tokens.
    """
    links: list[Link] = []
    step = len(data) // max(len(rows), 1)
    for place, (row, fills) in enumerate(zip(rows.tolist(), is_full.tolist(), strict=True)):
        parent, digest = chain_digests[row], b""
        if fills:
            chain_digests[row] = digest = chain_digest(parent, data[place * step : (place + 1) * step])
        links.append((parent, digest))
    return links


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
        self.children = ChildIndex(pool, block_tokens)
        self._keeps_older = not pool.has_groups
        self.epoch = 0
        """Counts the changes that may leave an earlier lookup with a block that is found no more."""

    def publish_and_hash(
        self,
        rows: IntArray,
        block_ids: IntArray,
        is_full: BoolArray,
        opens: BoolArray,
        data: bytes,
        chain_digests: list[bytes],
        chain_digest: Callable[[bytes, bytes], bytes],
    ) -> None:
        """As ``publish`` behind ``hash_links``, in one loop: this is most of the cost of a step that fills blocks."""
        full, parent_of, digest_of, step = self.full, self._parent_of, self._digest_of, 4 * self._block_size
        found: list[int] = []
        closed: list[int] = []
        columns = (values.tolist() for values in (rows, block_ids, is_full, opens))
        for row, block_id, fills, is_new, start in zip(*columns, range(0, len(data), step), strict=True):
            parent = chain_digests[row]
            if fills:
                chain_digests[row] = digest = chain_digest(parent, data[start : start + step])
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
        self._add(found, closed)

    def publish(self, block_ids: IntArray, opens: BoolArray, links: list[Link]) -> list[int]:
        """Add blocks that have just been written; arrays are ``[N]``. Return the full ones that were added.

        If another block holds the same tokens behind the same parent, that one stays and the new one is not indexed.
        With several kinds of groups that goes for a block that is held only; any other is released.

        Args:
            opens: the block has its first tokens, and may grow.
            links: of each block, see ``hash_links``.
        """
        full, parent_of = self.full, self._parent_of
        filled: list[int] = []
        found: list[int] = []
        closed: list[int] = []
        columns = zip(block_ids.tolist(), opens.tolist(), links, strict=True)
        for block_id, is_new, (parent, digest) in columns:
            if digest:
                if digest in full and (self._keeps_older or not self._replaces(full[digest])):
                    if parent_of[block_id]:
                        self.remove([block_id])
                    continue
                full[digest] = block_id
                self._digest_of[block_id] = digest
                filled.append(block_id)
                if parent_of[block_id]:
                    closed.append(block_id)
                    continue
            elif not is_new:
                continue
            found.append(block_id)
            if not self._full_blocks_only:
                parent_of[block_id] = parent
        self._add(found, closed)
        return filled

    def _replaces(self, block_id: int) -> bool:
        """Release an older block with the same tokens, if nobody holds it; return whether that was done.

        A lookup passed it over, as a window in front of it was gone, and what is used again must not keep its old age.
        """
        if self._pool.ref_counts[block_id]:
            return False
        self.remove([block_id])
        self._pool.discard(block_id)
        return True

    def _add(self, found: list[int], closed: list[int]) -> None:
        if not self._full_blocks_only:
            self.children.add([self._parent_of[block_id] for block_id in found], found)
            self.close(closed)
        self._pool.is_cached[found] = True

    def reopen(self, block_id: int) -> None:
        """Note that a row is going to append to a block, which may not be in the index."""
        parent = self._parent_of[block_id]
        if parent:
            self.children.reopen(parent, block_id)

    def close(self, block_ids: list[int]) -> None:
        """Note that no row appends to these blocks any more."""
        self.children.close([self._parent_of[block_id] for block_id in block_ids], block_ids)

    def retire_tails(self, rows: Int64Array, tails: Int64Array) -> None:
        """Note that rows release their last computed blocks, ``tails``.

        Of equal partial blocks only one stays in the index, so that duplicates do not evict other content.
        """
        pool = self._pool
        is_partial = pool.is_cached[tails] & (pool.num_written_tokens[tails] < self._block_size)
        rows, tails = rows[is_partial], tails[is_partial]
        self.close(tails[pool.writers[tails] == rows].tolist())
        for block_id in tails[pool.ref_counts[tails] == 1].tolist():
            if self.children.is_covered(self._parent_of[block_id], block_id):
                self.remove([block_id])

    def remove(self, block_ids: list[int]) -> list[bytes]:
        """Remove blocks; return the digests that no longer lead to one."""
        self.epoch += 1
        self._pool.is_cached[block_ids] = False
        digests = self._drop_digests(block_ids)
        if not self._full_blocks_only:
            parent_of = self._parent_of
            self.children.remove([parent_of[block_id] for block_id in block_ids], block_ids)
            for block_id in block_ids:
                parent_of[block_id] = b""
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
