"""The chain of digests of a prompt: one per full block, each of its tokens and of the digest before it.

The root digest is keyed, so no client can compute a digest. The namespace (tenant salt, adapter, ...) is part of it, so
that namespaces share no blocks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import overload

from rose_backend.block_manager.block_pool import Int32Array

DIGEST_BYTES = 32
_EMPTY_CHAIN = hashlib.blake2b(digest_size=DIGEST_BYTES)


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
        """Yield the digests behind ``known``, each hashed only when it is asked for."""
        if not known:
            known = [self.root_digest(namespace)]
            yield known[0]
        digest = known[-1]
        data, step = token_ids.data.cast("B"), 4 * self._block_size
        for start in range((len(known) - 1) * step, len(data) - step + 1, step):
            digest = self.chain_digest(digest, data[start : start + step])
            yield digest
