"""The prefix cache: chained hashes find full blocks, a comparison of tokens finds the longest prefix of the next one.

Two indexes lead to a block:

    full      digest of (parent digest, its tokens)  -> the block that holds exactly these tokens
    children  parent digest                          -> every cached block behind this parent, full or partial

The root digest is keyed, so no client can compute a digest; every hit compares the tokens all the same. The namespace
(tenant salt, adapter, ...) is part of the root digest, so that namespaces share no blocks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import overload

import numpy as np

from rose_backend.block_manager.block_pool import (
    NO_BLOCKS,
    BlockPool,
    BoolArray,
    Int32Array,
    Int64Array,
    IntArray,
)
from rose_backend.block_manager.child_index import ChildIndex
from rose_backend.block_manager.observability import BlockRemoved, BlockStored, CacheCleared, CacheEvent
from rose_backend.errors import RowError

DIGEST_BYTES = 32
_EMPTY_CHAIN = hashlib.blake2b(digest_size=DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a prompt at the time of the lookup."""

    block_ids: Int32Array
    """int32 ``[B]`` in position order; of the last block only the first tokens may match."""
    num_tokens: int
    """Leading prompt tokens whose K/V these blocks hold."""
    chain_digest: bytes
    """Digest of the chain of the full blocks that match."""
    epoch: int
    """Version of the cache: ``BlockManager.add`` repeats the lookup for a match of another epoch."""


class BlockDigests(Sequence[bytes]):
    """Digests of a prompt's blocks, each computed when it is first asked for, once.

    A lookup asks for the blocks that it finds and one more. What is computed behind them is hashed when it is indexed.

    Args:
        count: of all of them.
        known: the first of them.
        rest: yields those behind them.
    """

    def __init__(self, count: int, known: Sequence[bytes], rest: Iterator[bytes]) -> None:
        self._count, self._known, self._rest = count, list(known), rest

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        known = self._known
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
        for _ in range(index + 1 - len(self._known)):
            self._known.append(next(self._rest))
        return self._known[index]

    @property
    def known(self) -> Sequence[bytes]:
        """Those that have been computed."""
        return self._known


class PrefixCache:
    """The index of committed blocks.

    Memory: ``4 * block_size + 16`` bytes per block, and at most 350 more while it is cached.

    Args:
        pool: its ``num_written_tokens`` tell how much of a block is valid.
        block_size: tokens per block.
        full_blocks_only: find full blocks only.
        hash_key: at most 64 bytes; None draws a random one.
        record_events: record events for ``take_events``.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        full_blocks_only: bool,
        hash_key: bytes | None,
        record_events: bool,
    ) -> None:
        self._pool = pool
        self.block_size = block_size
        self.full_blocks_only = full_blocks_only
        self._hash_key = os.urandom(32) if hash_key is None else hash_key
        self._last_root: tuple[bytes | None, bytes] = (None, b"")
        self._block_tokens: Int32Array = np.zeros((pool.num_blocks, block_size), np.int32)
        self._slot_tokens: Int32Array = self._block_tokens.reshape(-1)
        self._full: dict[bytes, int] = {}
        self._children = ChildIndex(pool, self._block_tokens)
        # By block id, empty if there is none. Lists take less memory and time than dictionaries.
        self._parent_of: list[bytes] = [b""] * pool.num_blocks
        self._digest_of: list[bytes] = [b""] * pool.num_blocks
        self.epoch = 0
        self._events: list[CacheEvent] | None = [] if record_events else None

    # Hashing and lookup

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
        num_digests = 1 + len(token_ids) // self.block_size
        known = [*(known.known if isinstance(known, BlockDigests) else known)]
        return BlockDigests(num_digests, known, self._digests(token_ids, namespace, known))

    def match(
        self, token_ids: Int32Array, namespace: bytes, max_tokens: int, block_hashes: Sequence[bytes] | None
    ) -> PrefixMatch:
        """Find the longest cached prefix, at most ``max_tokens`` long. Changes nothing."""
        size = self.block_size
        if block_hashes is not None and len(block_hashes) <= len(token_ids) // size:
            raise RowError(
                f"block_hashes: got {len(block_hashes)} for {len(token_ids)} tokens, "
                f"expected {1 + len(token_ids) // size}"
            )
        digests = self._digests(token_ids, namespace) if block_hashes is None else iter(block_hashes)
        parent, block_ids = self._walk_full_blocks(token_ids, digests, max_tokens // size)
        num_tokens = len(block_ids) * size
        if not self.full_blocks_only and num_tokens < max_tokens:
            rest = token_ids[num_tokens : min(num_tokens + size, max_tokens)]
            block_id, run = self._children.longest_prefix(parent, rest)
            if run:
                block_ids = np.append(block_ids, np.int32(block_id))
                num_tokens += run
        return PrefixMatch(block_ids, num_tokens, parent, self.epoch)

    def _digests(
        self, token_ids: Int32Array, namespace: bytes, known: Sequence[bytes] = ()
    ) -> Iterator[bytes]:
        """Yield the digests behind ``known``, each hashed only when it is asked for."""
        if not known:
            known = [self.root_digest(namespace)]
            yield known[0]
        digest = known[-1]
        data, step = token_ids.data.cast("B"), 4 * self.block_size
        for start in range((len(known) - 1) * step, len(data) - step + 1, step):
            digest = self.chain_digest(digest, data[start : start + step])
            yield digest

    def _walk_full_blocks(
        self, token_ids: Int32Array, digests: Iterator[bytes], max_blocks: int
    ) -> tuple[bytes, Int32Array]:
        """Return the digest of the longest chain of matching full blocks, and the blocks, int32 ``[B]``."""
        root, blocks = next(digests), []
        for digest in islice(digests, max_blocks):
            if (block_id := self._full.get(digest)) is None:
                break
            blocks.append(block_id)
        if not blocks:
            return root, NO_BLOCKS
        block_ids = np.array(blocks, np.int32)
        wanted = token_ids[: len(blocks) * self.block_size].reshape(-1, self.block_size)
        same = self._block_tokens.take(block_ids, axis=0) == wanted
        if not same.all():
            block_ids = block_ids[: np.argmin(same.all(axis=1))]
        parent = self._digest_of[block_ids[-1]] if len(block_ids) else root
        return parent, block_ids

    # Publishing

    def store_tokens(self, slots: Int64Array, token_ids: Int32Array) -> None:
        """Store the token of each written KV slot, ``block_id * block_size + offset``; both arrays are ``[N]``."""
        self._slot_tokens[slots] = token_ids

    def copy_tokens(self, src_block_ids: Int64Array, dst_block_ids: Int64Array) -> None:
        """Copy the stored tokens with their blocks."""
        self._block_tokens[dst_block_ids] = self._block_tokens.take(src_block_ids, axis=0)

    def publish(
        self,
        rows: IntArray,
        block_ids: IntArray,
        is_full: BoolArray,
        opens: BoolArray,
        chain_digests: list[bytes],
        namespaces: list[bytes],
    ) -> None:
        """Add blocks to the index that have just been written; all arguments but the lists are ``[N]``.

        If another block holds the same tokens behind the same parent, that one stays and the new one is not indexed.

        Args:
            rows: the row of each block; the blocks of a row in order.
            is_full: the block is full and gets its digest.
            opens: the block has its first tokens, and may grow.
            chain_digests: of every row; advanced past its full blocks.
        """
        full, parent_of, step = self._full, self._parent_of, 4 * self.block_size
        data = self._block_tokens.take(block_ids, axis=0).tobytes()
        found: list[int] = []
        closed: list[int] = []
        columns = (values.tolist() for values in (rows, block_ids, is_full, opens))
        for row, block_id, fills, is_new, start in zip(*columns, range(0, len(data), step), strict=True):
            parent = chain_digests[row]
            if fills:
                chain_digests[row] = digest = self.chain_digest(parent, data[start : start + step])
                if digest in full:
                    if parent_of[block_id]:
                        self.forget([block_id])
                    continue
                full[digest] = block_id
                self._digest_of[block_id] = digest
                if self._events is not None:
                    self._events.append(self._stored(block_id, parent, namespaces[row]))
                if parent_of[block_id]:
                    closed.append(block_id)
                    continue
            elif not is_new:
                continue
            found.append(block_id)
            if not self.full_blocks_only:
                parent_of[block_id] = parent
        if not self.full_blocks_only:
            self._children.add([parent_of[block_id] for block_id in found], found)
            self._close(closed)
        self._pool.is_cached[found] = True

    def _stored(self, block_id: int, parent: bytes, namespace: bytes) -> BlockStored:
        digest, tokens = self._digest_of[block_id], tuple(self._block_tokens[block_id].tolist())
        known_parent = None if parent == self.root_digest(namespace) else parent
        return BlockStored(digest, known_parent, tokens, namespace, block_id)

    # Changes of indexed blocks

    def reopen(self, block_id: int) -> None:
        """Note that a row is going to append to a block, which may not be cached."""
        parent = self._parent_of[block_id]
        if parent:
            self._children.reopen(parent, block_id)

    def truncate(self, block_id: int) -> None:
        """Note that a row is going to overwrite the end of a block. Call it before the block's length changes."""
        self.epoch += 1
        self.reopen(block_id)
        self._drop_digests([block_id])
        if self.full_blocks_only:
            self._pool.is_cached[block_id] = False

    def retire_tails(self, rows: Int64Array, tails: Int64Array) -> None:
        """Note that rows release their last computed blocks, ``tails``.

        Of equal partial blocks only one stays in the index, so that duplicates do not evict other content.
        """
        pool = self._pool
        is_partial = pool.is_cached[tails] & (pool.num_written_tokens[tails] < self.block_size)
        rows, tails = rows[is_partial], tails[is_partial]
        self._close(tails[pool.writers[tails] == rows].tolist())
        for block_id in tails[pool.ref_counts[tails] == 1].tolist():
            if self._children.is_covered(self._parent_of[block_id], block_id):
                self.forget([block_id])

    def forget(self, block_ids: list[int]) -> None:
        """Remove blocks from the index."""
        self.epoch += 1
        self._pool.is_cached[block_ids] = False
        self._drop_digests(block_ids)
        if not self.full_blocks_only:
            parent_of = self._parent_of
            self._children.remove([parent_of[block_id] for block_id in block_ids], block_ids)
            for block_id in block_ids:
                parent_of[block_id] = b""

    def clear(self) -> None:
        """Remove all blocks from the index."""
        self.epoch += 1
        self._full.clear()
        self._children.clear()
        self._parent_of = [b""] * self._pool.num_blocks
        self._digest_of = [b""] * self._pool.num_blocks
        if self._events is not None:
            self._events.append(CacheCleared())

    def take_events(self) -> list[CacheEvent]:
        """See ``BlockManager.take_events``."""
        events, self._events = self._events, None if self._events is None else []
        return events or []

    def _close(self, block_ids: list[int]) -> None:
        self._children.close([self._parent_of[block_id] for block_id in block_ids], block_ids)

    def _drop_digests(self, block_ids: list[int]) -> None:
        digest_of, full = self._digest_of, self._full
        for block_id in block_ids:
            if digest := digest_of[block_id]:
                digest_of[block_id] = b""
                del full[digest]
                if self._events is not None:
                    self._events.append(BlockRemoved(digest))

    # For the integrity check and the block view

    def cached_blocks(self) -> Int32Array:
        """Return every indexed block, held or not, from the indexes themselves."""
        block_ids = self._full.values() if self.full_blocks_only else self._children.block_ids()
        return np.array([*block_ids], np.int32)

    def full_index(self) -> dict[bytes, int]:
        """Return the index of full blocks."""
        return self._full

    def tokens_of(self, block_id: int) -> Int32Array:
        """Return the written tokens of a block."""
        tokens: Int32Array = self._block_tokens[block_id, : self._pool.num_written_tokens[block_id]]
        return tokens
