"""The key of a prefix cache lookup: a request's tokens, namespace and block digests, computed once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from rose_backend.block_manager import BlockManager, PrefixMatch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class HashedPrompt:
    """A request's tokens, int32 ``[P]``, with namespace and digests."""

    token_ids: NDArray[np.int32]
    namespace: bytes
    block_hashes: Sequence[bytes]

    def match(self, manager: BlockManager, max_tokens: int | None) -> PrefixMatch:
        """Look up the longest cached prefix of at most ``max_tokens``."""
        return manager.match(
            self.token_ids, namespace=self.namespace, max_tokens=max_tokens, block_hashes=self.block_hashes
        )

    def shorten(self, match: PrefixMatch, num_tokens: int, block_size: int) -> PrefixMatch:
        """Return the first ``num_tokens`` of a match.

        A lookup with a lower limit may find another block, with other tokens behind the limit.
        """
        return PrefixMatch(
            block_ids=match.block_ids[: -(-num_tokens // block_size)],
            num_tokens=num_tokens,
            chain_digest=self.block_hashes[num_tokens // block_size],
            epoch=match.epoch,
        )


class PromptHashes:
    """Hashed prompts of waiting requests, so that a request that is looked up in every step is hashed once.

    Memory: 4 bytes per token and about 70 bytes per block of each waiting request that was looked up.

    Args:
        manager: hashes with its own key.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._of_request: dict[str, HashedPrompt] = {}

    def __len__(self) -> int:
        return len(self._of_request)

    def get(self, request: Request) -> HashedPrompt:
        """Return a request's tokens and digests; only tokens added since the last call are hashed."""
        known = self._of_request.get(request.request_id)
        if known is not None and len(known.token_ids) == request.num_tokens:
            return known
        token_ids = np.array(request._all_token_ids, np.int32)
        namespace = namespace_of(request)
        block_hashes = self._manager.hash_blocks(
            token_ids, namespace=namespace, known=() if known is None else known.block_hashes
        )
        prompt = HashedPrompt(token_ids, namespace, block_hashes)
        # A streaming session removes tokens between its turns; all others only append.
        if not request.resumable:
            self._of_request[request.request_id] = prompt
        return prompt

    def drop(self, request_id: str) -> None:
        """Forget a request that was admitted or has finished."""
        self._of_request.pop(request_id, None)


def namespace_of(request: Request) -> bytes:
    """Return the namespace of a request: two requests may share blocks if and only if vLLM's own keys are equal.

    These are the keys that vLLM hashes into a request's first block: adapter name and path, and the cache salt. (Keys
    of images and prompt embeddings would differ from block to block; both are refused at start-up.)
    """
    keys, _ = generate_block_hash_extra_keys(request, 0, 1, 0)
    return b"" if keys is None else repr(keys).encode()


def wrap_preprocess_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement of ``EngineCore.preprocess_add_request``; see the patch ledger."""

    @functools.wraps(original)
    def preprocess_add_request(self: EngineCore, request: Any) -> Any:
        # Only here, behind the engine's start: its manager says whether it reads these hashes.
        if self.request_block_hasher is not None and not _reads_block_hashes(self.scheduler):
            self.request_block_hasher = None
        return original(self, request)

    return preprocess_add_request


def _reads_block_hashes(scheduler: Any) -> bool:
    """Whether anything reads ``Request.block_hashes``, which vLLM makes of every prompt: 0.1 ms for 512 tokens."""
    manager = getattr(scheduler, "kv_cache_manager", None)
    return getattr(manager, "reads_block_hashes", True) or scheduler.connector is not None
