"""Content -> block: chained hashes for full blocks, longest common run of tokens inside the next one.

Two indexes lead to a block:

    full      digest of (parent digest, its tokens)      -> the block that holds exactly these tokens
    siblings  (parent digest, first token)               -> every block that continues this parent, full or part-filled

Digests are keyed, so that nobody outside the process can construct a collision; the tokens are compared all the same
on every hit. The namespace (tenant salt, adapter, ...) is hashed into the root: other namespaces have other parents.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager.array_types import NO_BLOCKS, Int32Array, IntArray
from rose_backend.block_manager.block_pool import BlockPool

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache holds of a prompt, at the moment of the lookup."""

    block_ids: Int32Array
    """Blocks in position order; the last may be matched in part only."""
    num_tokens: int
    """Leading prompt tokens whose K/V these blocks hold."""
    chain_digest: bytes
    """Digest of the chain of wholly matched blocks."""
    epoch: int
    """State of the cache; a match of another epoch is looked up anew."""


class PrefixCache:
    """The index over published blocks. Memory: ``4 * block_size`` bytes per block, about 0.5 KiB per cached block.

    Args:
        pool: whose ``num_written_tokens`` say how much of a block is valid.
        block_size: tokens per block.
        full_blocks_only: find whole blocks only.
        hash_key: at most 64 bytes; None draws a random one.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, full_blocks_only: bool, hash_key: bytes | None
    ) -> None:
        self._pool = pool
        self.block_size = block_size
        self._full_blocks_only = full_blocks_only
        self._hash_key = os.urandom(32) if hash_key is None else hash_key
        self._block_tokens: Int32Array = np.zeros((pool.num_blocks, block_size), np.int32)
        self._full: dict[bytes, int] = {}
        self._full_digest_of: dict[int, bytes] = {}
        self._siblings: dict[tuple[bytes, int], dict[int, None]] = {}
        self._sibling_key_of: dict[int, tuple[bytes, int]] = {}
        self.epoch = 0

    def root_digest(self, namespace: bytes) -> bytes:
        """Return the parent digest of a sequence's first block."""
        return hashlib.blake2b(
            namespace, key=self._hash_key, digest_size=DIGEST_BYTES, person=b"root"
        ).digest()

    def chain_digest(self, parent: bytes, tokens: bytes) -> bytes:
        """Return the digest of a full block. ``tokens``: its int32 ids as bytes."""
        return hashlib.blake2b(parent + tokens, key=self._hash_key, digest_size=DIGEST_BYTES).digest()

    def match(self, token_ids: Int32Array, namespace: bytes, max_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix, at most ``max_tokens`` long. Changes nothing."""
        size = self.block_size
        digests, blocks = self._walk_full_blocks(token_ids, namespace, max_tokens // size)
        num_tokens = len(blocks) * size
        block_ids = np.array(blocks, np.int32)
        if not self._full_blocks_only and num_tokens < max_tokens:
            rest = token_ids[num_tokens : min(num_tokens + size, max_tokens)]
            block_id, run = self._longest_run(digests[-1], rest)
            if run:
                block_ids = np.append(block_ids, np.int32(block_id))
                num_tokens += run
        return PrefixMatch(block_ids, num_tokens, digests[-1], self.epoch)

    def _walk_full_blocks(
        self, token_ids: Int32Array, namespace: bytes, max_blocks: int
    ) -> tuple[list[bytes], list[int]]:
        """Return the digests from the root on and the blocks of the longest chain of wholly matching blocks."""
        size = self.block_size
        digests, blocks = [self.root_digest(namespace)], []
        data = token_ids.tobytes()
        step = 4 * size
        for start in range(0, max_blocks * step, step):
            digest = self.chain_digest(digests[-1], data[start : start + step])
            block_id = self._full.get(digest)
            if block_id is None:
                break
            digests.append(digest)
            blocks.append(block_id)
        if blocks:
            wanted = token_ids[: len(blocks) * size].reshape(-1, size)
            same = (self._block_tokens[blocks] == wanted).all(axis=1)
            if not same.all():
                count = int(np.argmin(same))
                digests, blocks = digests[: count + 1], blocks[:count]
        return digests, blocks

    def _longest_run(self, parent: bytes, tokens: Int32Array) -> tuple[int, int]:
        siblings = self._siblings.get((parent, int(tokens[0])))
        if not siblings:
            return 0, 0
        block_ids = np.fromiter(siblings, np.int32, len(siblings))
        same = self._block_tokens[block_ids, : len(tokens)] == tokens
        same &= np.arange(len(tokens)) < self._pool.num_written_tokens[block_ids][:, None]
        runs = np.where(same.all(axis=1), len(tokens), np.argmin(same, axis=1))
        best = int(np.argmax(runs))
        return int(block_ids[best]), int(runs[best])

    def store_tokens(self, block_ids: IntArray, offsets: IntArray, token_ids: Int32Array) -> None:
        """Note which token each written slot holds."""
        self._block_tokens[block_ids, offsets] = token_ids

    def copy_tokens(self, src_block_ids: IntArray, dst_block_ids: IntArray) -> None:
        """Note that blocks were cloned."""
        self._block_tokens[dst_block_ids] = self._block_tokens[src_block_ids]

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._sibling_key_of

    def publish(self, block_id: int, parent: bytes) -> None:
        """Make a block that has its first tokens findable; it may grow later."""
        key = (parent, int(self._block_tokens[block_id, 0]))
        self._siblings.setdefault(key, {})[block_id] = None
        self._sibling_key_of[block_id] = key
        self._pool.is_cached[block_id] = True

    def publish_full(self, block_id: int, parent: bytes) -> bytes:
        """Make a published block that is now full findable by its digest; return the digest.

        If another block holds the same tokens behind the same parent, that one stays and this one is unlinked.
        """
        digest = self.chain_digest(parent, self._block_tokens[block_id].tobytes())
        twin = self._full.setdefault(digest, block_id)
        if twin == block_id:
            self._full_digest_of[block_id] = digest
        else:
            self._unlink(block_id)
        return digest

    def is_redundant(self, block_id: int) -> bool:
        """Whether a sibling holds all tokens of this published, part-filled block, too."""
        count = int(self._pool.num_written_tokens[block_id])
        siblings = self._siblings[self._sibling_key_of[block_id]]
        if len(siblings) == 1:
            return False
        others = np.fromiter((other for other in siblings if other != block_id), np.int32, len(siblings) - 1)
        long_enough = others[self._pool.num_written_tokens[others] >= count]
        same = self._block_tokens[long_enough, :count] == self._block_tokens[block_id, :count]
        return bool(same.all(axis=1).any())

    def forget(self, block_ids: IntArray) -> None:
        """Make blocks unfindable."""
        self.epoch += 1
        for block_id in block_ids.tolist():
            self._unlink(block_id)

    def truncate(self, block_id: int, num_tokens: int) -> None:
        """Let lookups find only the first ``num_tokens`` (at least one) of a block: the rest will be overwritten."""
        self.epoch += 1
        digest = self._full_digest_of.pop(block_id, None)
        if digest is not None:
            del self._full[digest]
        self._pool.num_written_tokens[block_id] = num_tokens

    def cached_blocks(self) -> Int32Array:
        """Return every findable block, held or not."""
        if not self._sibling_key_of:
            return NO_BLOCKS
        return np.fromiter(self._sibling_key_of, np.int32, len(self._sibling_key_of))

    def full_index(self) -> dict[bytes, int]:
        """Return the digest index, for the integrity check."""
        return self._full

    def tokens_of(self, block_id: int) -> Int32Array:
        """Return the valid tokens of a block, for the integrity check and for pictures."""
        tokens: Int32Array = self._block_tokens[block_id, : self._pool.num_written_tokens[block_id]]
        return tokens

    def _unlink(self, block_id: int) -> None:
        self._pool.is_cached[block_id] = False
        digest = self._full_digest_of.pop(block_id, None)
        if digest is not None:
            del self._full[digest]
        key = self._sibling_key_of.pop(block_id)
        siblings = self._siblings[key]
        del siblings[block_id]
        if not siblings:
            del self._siblings[key]
