"""The prefix cache: chained hashes find full blocks, a comparison of tokens finds the longest prefix of the next one.

Hashes are keyed, so no client can compute one; every hit compares the tokens all the same. Each KV cache group type
has an index over the same chain of hashes: a hit ends where all of them have what the next token attends to. A cursor
for each window, and a search for checkpoints, walk left from the hit of the first group type to where that is the case.

What it reports to the outside is here, too: counters since start-up, and events, from which a router or an external
cache keeps a copy of the index. Only full blocks have events: the content of a partial block still changes. Replaying
all events in order gives the full blocks that lookups can find, by digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import TypeAlias

import numpy as np

from rose_backend.block_manager.block_pool import (
    NO_BLOCKS,
    NULL_BLOCK,
    BlockPool,
    BoolArray,
    Int32Array,
    Int64Array,
    IntArray,
)
from rose_backend.block_manager.prefix_index import BlockIndex, PrefixHasher, StateIndex
from rose_backend.errors import RowError

_MIN_REPORTING_UNIT = 16


def reporting_unit(block_size: int) -> int:
    """Return the unit, in tokens, in which prefix hits are reported to clients and metrics.

    A client that saw hits grow token by token could guess the prompts of other clients token by token.
    """
    return max(block_size, _MIN_REPORTING_UNIT)


@dataclass(slots=True)
class CacheStats:
    """Monotonic counters; for a difference, a reader keeps an earlier copy."""

    bytes_per_block: int = 0
    """K/V bytes of one block over all layers. Not a counter."""
    queries: int = 0
    """Prefix lookups of sequences that were added."""
    query_tokens: int = 0
    """Prompt tokens of those lookups."""
    hit_tokens: int = 0
    """Prompt tokens whose K/V was found."""
    reported_hit_tokens: int = 0
    """The same, each lookup rounded down to a multiple of ``reporting_unit``."""
    partial_hits: int = 0
    """Hits that ended inside a block."""
    evictions: int = 0
    """Cached blocks that were reallocated."""
    clones: int = 0
    """Blocks copied on write, and states copied."""
    bytes_cloned: int = 0
    """K/V bytes of those blocks, over all layers."""
    checkpoints: int = 0
    """States copied into the prefix cache; these copies are among ``clones``."""
    claims: int = 0
    """Shared partial blocks that a row got to append to without a copy, as no row had written beyond its length."""
    overwrites: int = 0
    """Shared partial blocks that a row got to append to by dropping cached tokens, as blocks were short."""
    forks: int = 0
    """Rows made by ``fork``."""

    def count_lookup(self, num_tokens: int, num_hit_tokens: int, block_size: int) -> None:
        """Count the lookup of a sequence that was added."""
        self.queries += 1
        self.query_tokens += num_tokens
        self.hit_tokens += num_hit_tokens
        self.reported_hit_tokens += num_hit_tokens - num_hit_tokens % reporting_unit(block_size)
        self.partial_hits += num_hit_tokens % block_size != 0

    def count_clones(self, num_clones: int, num_groups: int) -> None:
        """Count copies of blocks of a group type with ``num_groups`` groups."""
        self.clones += num_clones
        self.bytes_cloned += num_clones * num_groups * self.bytes_per_block

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        names = (field.name for field in fields(self) if field.name != "bytes_per_block")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block was added to the index."""

    block_hash: bytes
    parent_hash: bytes | None
    """Hash of the block before it; None for the first block of a sequence."""
    token_ids: tuple[int, ...]
    namespace: bytes
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A full block was removed from the index."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All blocks were removed from the index."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | CacheCleared


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
    num_known_tokens: int = 0
    """With windows or states, how many leading tokens the group type that keeps everything has: at least as many."""
    window_block_ids: tuple[Int32Array, ...] = ()
    """Of each group type with a sliding window its last blocks, int32 ``[B']``: those that the window reaches."""
    checkpoint: int = NULL_BLOCK
    """With states, the block of the one of exactly these tokens; the null block if there are none."""

    def blocks_of_group_types(self, num_windowed: int) -> list[Int32Array]:
        """Return the blocks of each group type, ``num_windowed`` of which have a sliding window."""
        return [self.block_ids, *(self.window_block_ids or (NO_BLOCKS,) * num_windowed)]


class PrefixCache:
    """The index of committed blocks.

    Memory: ``4 * block_size + 16`` bytes per block, and at most 350 more while it is cached.

    Args:
        pool: its ``num_written_tokens`` tell how much of a block is valid, ``group_type_of`` in which index it is.
        block_size: tokens per block.
        full_blocks_only: find full blocks only.
        hash_key: at most 64 bytes; None draws a random one.
        record_events: record events for ``take_events``; of blocks of the first group type only.
        windows: of each further group type, in tokens. Those of the first group type keep everything.
        has_states: whether the pool's last group type is one of states.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        full_blocks_only: bool,
        hash_key: bytes | None,
        record_events: bool,
        windows: Sequence[int] = (),
        has_states: bool = False,
    ) -> None:
        self._pool = pool
        self.block_size = block_size
        self.full_blocks_only = full_blocks_only
        self.hasher = PrefixHasher(block_size, hash_key)
        self._block_tokens: Int32Array = np.zeros((pool.num_blocks, block_size), np.int32)
        self._slot_tokens: Int32Array = self._block_tokens.reshape(-1)
        self._parent_of: list[bytes] = [b""] * pool.num_blocks
        self._digest_of: list[bytes] = [b""] * pool.num_blocks
        self.indexes = tuple(
            BlockIndex(pool, self._block_tokens, full_blocks_only, self._parent_of, self._digest_of)
            for _ in range(1 + len(windows))
        )
        self.states = StateIndex(pool) if has_states else None
        self._all_indexes: tuple[BlockIndex | StateIndex, ...] = self.indexes
        if self.states is not None:
            self._all_indexes += (self.states,)
        self._windows = tuple(windows)
        self._has_one_type = not windows and not has_states
        self._events: list[CacheEvent] | None = [] if record_events else None

    @property
    def epoch(self) -> int:
        """Version of the cache, see ``PrefixMatch``."""
        return (
            self.indexes[0].epoch if self._has_one_type else sum(index.epoch for index in self._all_indexes)
        )

    # Lookup

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
        if block_hashes is None and not self._has_one_type:
            block_hashes = self.hasher.hash_blocks(token_ids, namespace, ())
        digests = self.hasher.digests(token_ids, namespace) if block_hashes is None else iter(block_hashes)
        parent, block_ids = self._walk_full_blocks(token_ids, digests, max_tokens // size)
        num_tokens = len(block_ids) * size
        if not self.full_blocks_only and num_tokens < max_tokens:
            rest = token_ids[num_tokens : min(num_tokens + size, max_tokens)]
            block_id, run = self.indexes[0].children.longest_prefix(parent, rest)
            if run:
                block_ids = np.append(block_ids, np.int32(block_id))
                num_tokens += run
        match = PrefixMatch(block_ids, num_tokens, parent, self.epoch)
        if block_hashes is None or self._has_one_type:
            return match
        return self._cut_to_other_types(match, token_ids, block_hashes)

    def _cut_to_other_types(
        self, match: PrefixMatch, token_ids: Int32Array, digests: Sequence[bytes]
    ) -> PrefixMatch:
        """Shorten a match of the first group type to the longest one that all windows and states can use, too."""
        end, last_end = match.num_tokens, -1
        windows = [
            WindowCursor(self, index, window, token_ids, digests)
            for index, window in zip(self.indexes[1:], self._windows, strict=True)
        ]
        checkpoint = NULL_BLOCK
        while end != last_end:
            last_end = end
            for cursor in windows:
                end = cursor.longest_usable(end)
            if self.states is not None:
                end, checkpoint = self.states.longest_usable(token_ids, digests, self.block_size, end)
        return PrefixMatch(
            block_ids=match.block_ids[: -(-end // self.block_size)],
            num_tokens=end,
            chain_digest=digests[end // self.block_size] if end != match.num_tokens else match.chain_digest,
            epoch=match.epoch,
            num_known_tokens=match.num_tokens,
            window_block_ids=tuple(cursor.blocks_of(end) for cursor in windows),
            checkpoint=checkpoint,
        )

    def _walk_full_blocks(
        self, token_ids: Int32Array, digests: Iterator[bytes], max_blocks: int
    ) -> tuple[bytes, Int32Array]:
        """Return the digest of the longest chain of matching full blocks, and the blocks, int32 ``[B]``."""
        root, blocks, full = next(digests), [], self.indexes[0].full
        for digest in islice(digests, max_blocks):
            if (block_id := full.get(digest)) is None:
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
        block_ids: Sequence[IntArray],
        is_full: BoolArray,
        opens: Sequence[BoolArray],
        chain_digests: list[bytes],
        namespaces: list[bytes],
    ) -> None:
        """Add blocks to the index that have just been written; all arrays are ``[N]``.

        Args:
            rows: the row of each block; the blocks of a row in order.
            block_ids: of each group type; all group types have the same tokens at the same place.
            is_full: the block is full and gets its digest.
            opens: of each group type, see ``BlockIndex.publish``.
            chain_digests: of every row; advanced past its full blocks.
            namespaces: of every row.
        """
        data, step = self._block_tokens.take(block_ids[0], axis=0).tobytes(), 4 * self.block_size
        hash_block, parents, digests, row_of_block = self.hasher.chain_digest, [], [], rows.tolist()
        # All group types have the same tokens, so each full block is hashed once.
        for row, fills, start in zip(row_of_block, is_full.tolist(), range(0, len(data), step), strict=True):
            parents.append(digest := chain_digests[row])
            if fills:
                chain_digests[row] = digest = hash_block(digest, data[start : start + step])
            digests.append(digest)
        for index, ids, is_new in zip(self.indexes, block_ids, opens, strict=True):
            index.publish(ids.tolist(), is_new.tolist(), parents, digests)
        if self._events is not None:
            blocks = zip(row_of_block, block_ids[0].tolist(), parents, digests, strict=True)
            for row, block_id, parent, digest in blocks:
                # Not one whose tokens another block has.
                if digest is not parent and self._digest_of[block_id] == digest:
                    self._events.append(self._stored(block_id, parent, namespaces[row]))

    def _stored(self, block_id: int, parent: bytes, namespace: bytes) -> BlockStored:
        digest, tokens = self._digest_of[block_id], tuple(self._block_tokens[block_id].tolist())
        known_parent = None if parent == self.hasher.root_digest(namespace) else parent
        return BlockStored(digest, known_parent, tokens, namespace, block_id)

    # Changes of indexed blocks

    def reopen(self, block_id: int) -> None:
        """Note that a row is going to append to a block, which may not be cached."""
        self._index_of(block_id).reopen(block_id)

    def truncate(self, block_id: int) -> None:
        """Note that a row is going to overwrite the end of a block. Call it before the block's length changes."""
        index = self._index_of(block_id)
        digests = index.truncate(block_id)
        self._note_removed(digests if index is self.indexes[0] else [])

    def forget(self, block_ids: list[int]) -> None:
        """Remove blocks from the index."""
        if self._has_one_type:
            self._note_removed(self.indexes[0].remove(block_ids))
            return
        of_type: dict[int, list[int]] = {}
        for block_id, group_type in zip(block_ids, self._pool.group_type_of[block_ids].tolist(), strict=True):
            of_type.setdefault(group_type, []).append(block_id)
        for group_type, mine in of_type.items():
            digests = self._all_indexes[group_type].remove(mine)
            self._note_removed(digests if not group_type else [])

    def clear(self) -> None:
        """Remove all blocks from the index."""
        for index in self._all_indexes:
            index.clear()
        self._parent_of[:] = [b""] * self._pool.num_blocks
        self._digest_of[:] = [b""] * self._pool.num_blocks
        if self._events is not None:
            self._events.append(CacheCleared())

    def blocks_of_group_type(self, block_ids: Int32Array, group_type: int) -> Int64Array | None:
        """Return another type's blocks with the tokens of these full ones of the first type; None if one is gone."""
        full = self.indexes[group_type].full
        found = [full.get(self._digest_of[block_id], NULL_BLOCK) for block_id in block_ids.tolist()]
        return None if NULL_BLOCK in found else np.array(found, np.int64)

    def is_prefix_held(self, block_id: int) -> bool:
        """Whether the last block of the first type with the tokens of a window's full block, or of a state, is held."""
        if self.states is not None and self._pool.group_type_of[block_id] == len(self.indexes):
            digest, tail = self.states.place_of(block_id)
            if tail:
                tokens = np.frombuffer(tail, np.int32)
                first, run = self.indexes[0].children.longest_prefix(digest, tokens)
                return run == len(tokens) and bool(self._pool.ref_counts[first])
        else:
            digest = self._digest_of[block_id]
        first = self.indexes[0].full.get(digest, NULL_BLOCK)
        return first != NULL_BLOCK and bool(self._pool.ref_counts[first])

    def take_events(self) -> list[CacheEvent]:
        """See ``BlockManager.take_events``."""
        events, self._events = self._events, None if self._events is None else []
        return events or []

    def _index_of(self, block_id: int) -> BlockIndex:
        return self.indexes[0] if len(self.indexes) == 1 else self.indexes[self._pool.group_type_of[block_id]]

    def _note_removed(self, digests: list[bytes]) -> None:
        if self._events is not None:
            self._events += [BlockRemoved(digest) for digest in digests]

    # For the integrity check and the block view

    def cached_blocks(self) -> Int32Array:
        """Return every indexed block, held or not, from the indexes themselves."""
        return np.concatenate([index.block_ids() for index in self._all_indexes])

    def full_index(self) -> dict[bytes, int]:
        """Return the index of full blocks of the first group type."""
        return self.indexes[0].full

    def tokens_of(self, block_id: int) -> Int32Array:
        """Return the written tokens of a block."""
        tokens: Int32Array = self._block_tokens[block_id, : self._pool.num_written_tokens[block_id]]
        return tokens


class WindowCursor:
    """One window over one prompt, from right to left.

    A prefix of ``end`` tokens is usable if ``[end - window + 1, end)`` is cached: what its next token attends to. The
    cursor only moves left, so that a lookup costs at most one look at each block of the prompt.

    Args:
        cache: has the tokens of every block.
        index: of the window's blocks.
        window: tokens that a token attends to, itself included.
        token_ids: the prompt, int32 ``[P]``.
        digests: of its blocks, see ``BlockManager.hash_blocks``.
    """

    def __init__(
        self,
        cache: PrefixCache,
        index: BlockIndex,
        window: int,
        token_ids: Int32Array,
        digests: Sequence[bytes],
    ) -> None:
        self._cache, self._index, self._window = cache, index, window
        self._token_ids, self._digests = token_ids, digests
        self._start: int | None = None  # everything from here to the end that was asked for last is there
        self._blocks: dict[int, int] = {}

    def longest_usable(self, end: int) -> int:
        """Return the length of the longest usable prefix of at most ``end`` tokens; ``end`` never grows."""
        size = self._cache.block_size
        start = end if self._start is None else min(self._start, end)
        while start > max(end - self._window + 1, 0):
            column = (start - 1) // size
            block_id, num_tokens = self._find(column, start)
            # A prefix that ends after a hole either attends to a token of it, or ends in it.
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
        size = self._cache.block_size
        columns = range(max(end - self._window + 1, 0) // size, -(-end // size))
        return np.array([self._blocks[column] for column in columns], np.int32)

    def _find(self, column: int, end: int) -> tuple[int, int]:
        """Return a block that holds most of the tokens from the beginning of ``column`` to ``end``, and how many."""
        size, digests = self._cache.block_size, self._digests
        first = column * size
        if column + 1 < len(digests):
            block_id = self._index.full.get(digests[column + 1])
            wanted = self._token_ids[first : first + size]
            if block_id is not None and self._cache.tokens_of(block_id).tobytes() == wanted.tobytes():
                return block_id, size
        if self._cache.full_blocks_only:
            return 0, 0
        return self._index.children.longest_prefix(digests[column], self._token_ids[first:end])
