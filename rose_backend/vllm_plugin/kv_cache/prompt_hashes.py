"""The key of a prefix cache lookup: a request's tokens, ids of its items among them, its namespace and block digests.

A prompt has the same placeholder token for every position of every image, and none for prompt embeddings, so tokens
alone do not tell what was computed. The block manager therefore gets an id of the item at all of its positions. Equal
prefixes then have equal keys and values, and hits end at any token, even inside an item; the block manager knows
nothing of items. One id for all positions is enough: what precedes a position tells where in the item it is.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.request import Request

from rose_backend.block_manager import BlockManager, PrefixMatch
from rose_backend.errors import ConfigError

MAX_ITEMS = 100_000
"""Items whose ids are kept. One that was dropped gets a new id, and is computed once more."""
NEVER_SHARED = -(2**31)
"""In place of an id where all others are used up: no prefix extends past such a token."""

Span = tuple[int, int, Any]
"""First position, the one after the last, and what vLLM tells it by."""


class ItemIds:
    """Gives each item a negative id that no other item ever gets.

    Two items are one if vLLM's identifier, which covers the content and how it was processed, and the tokens in the
    prompt are equal. A client may choose identifiers itself, so the identifier alone does not tell how long an item is.
    The prompt embeddings of a block are an item, told by vLLM's hash of them.

    Memory: about 200 bytes for each of at most ``MAX_ITEMS`` items.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._unused = itertools.count(-1, -1)
        self._id_of = functools.lru_cache(maxsize=MAX_ITEMS)(self._new_id)

    def _new_id(self, key: bytes) -> int:
        return max(next(self._unused), NEVER_SHARED)

    def tokens_of(self, request: Request, start: int = 0, end: int | None = None) -> list[int]:
        """Return the tokens of a request from ``start`` to ``end``, or to its last one, with the ids of its items."""
        tokens = request._all_token_ids[start:end]
        if not has_items(request) or start >= request.num_prompt_tokens:
            return tokens
        end = start + len(tokens)
        spans = (
            _spans_of_items(request.mm_features)
            if request.prompt_embeds is None
            else self._spans_of_embeddings(request, start, end)
        )
        for first, last, name in spans:
            if first < end and last > start:
                covered = slice(max(first, start) - start, min(last, end) - start)
                item_id = self._id_of(_key(name, request._all_token_ids[first:last]))
                tokens[covered] = [item_id] * (covered.stop - covered.start)
        return tokens

    def _spans_of_embeddings(self, request: Request, start: int, end: int) -> Iterator[Span]:
        """Yield the blocks of prompt embeddings between two positions."""
        num_tokens, is_token = request.num_prompt_tokens, request.prompt_is_token_ids
        for first in range(start - start % self._block_size, min(end, num_tokens), self._block_size):
            last = min(first + self._block_size, num_tokens)
            # vLLM keeps these hashes with the request.
            keys, _ = generate_block_hash_extra_keys(request, first, last, 0)
            yield first, last, (keys, is_token and is_token[first:last])


def has_items(request: Request) -> bool:
    """Whether a request's prompt has anything but tokens."""
    return bool(request.mm_features) or request.prompt_embeds is not None


def _spans_of_items(features: list[MultiModalFeatureSpec]) -> Iterator[Span]:
    """Yield the spans of multimodal items, which are sorted by offset; items that overlap are one.

    The sound of a video lies within its pictures, for example.
    """
    first = last = 0
    names: list[tuple[str, int, int]] = []
    for feature in features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if names and offset >= last:
            yield first, last, names
            names = []
        if not names:
            first, last = offset, offset
        names.append((feature.identifier, offset - first, length))
        last = max(last, offset + length)
    if names:
        yield first, last, names


def _key(name: Any, token_ids: list[int]) -> bytes:
    digest = hashlib.blake2b(repr(name).encode(), digest_size=32)
    digest.update(np.array(token_ids, np.int32).tobytes())
    return digest.digest()


@dataclass(frozen=True, slots=True, eq=False)
class HashedPrompt:
    """A request's tokens, int32 ``[P]``, ids of its multimodal items among them, with namespace and digests."""

    token_ids: NDArray[np.int32]
    namespace: bytes
    block_hashes: Sequence[bytes]
    num_shareable: int
    """Tokens before the first that is never shared."""

    def match(self, manager: BlockManager, max_tokens: int | None) -> PrefixMatch:
        """Look up the longest cached prefix of at most ``max_tokens``."""
        limit = self.num_shareable if max_tokens is None else min(max_tokens, self.num_shareable)
        return manager.match(
            self.token_ids, namespace=self.namespace, max_tokens=limit, block_hashes=self.block_hashes
        )

    def begins_like(self, other: HashedPrompt, num_tokens: int) -> bool:
        """Whether this prompt and another have the same first ``num_tokens`` tokens, in one namespace."""
        if self.namespace != other.namespace or num_tokens > min(len(self.token_ids), len(other.token_ids)):
            return False
        return np.array_equal(self.token_ids[:num_tokens], other.token_ids[:num_tokens])

    def shorten(self, match: PrefixMatch, num_tokens: int, block_size: int) -> PrefixMatch:
        """Return the first ``num_tokens`` of a match.

        A lookup with a lower limit may find another block, with other tokens past the limit.
        """
        return PrefixMatch(
            block_ids=match.block_ids[: -(-num_tokens // block_size)],
            num_tokens=num_tokens,
            chain_digest=self.block_hashes[num_tokens // block_size],
            epoch=match.epoch,
        )


class PromptHashes:
    """Hashed prompts of waiting requests, so that a request that is looked up in every step is hashed once.

    Memory: 4 bytes per token and about 70 bytes per block of each waiting request that was looked up; after admission
    the 4 bytes, until its prompt is committed.

    Args:
        manager: hashes with its own key.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._item_ids = ItemIds(manager.block_size)
        self._of_request: dict[str, HashedPrompt] = {}
        self._admitted: dict[str, NDArray[np.int32]] = {}

    def get(self, request: Request) -> HashedPrompt:
        """Return a request's tokens and digests; only tokens added since the last call are hashed."""
        known = self._of_request.get(request.request_id)
        if known is not None and len(known.token_ids) == request.num_tokens:
            return known
        known_hashes: Sequence[bytes] = ()
        if known is None:
            token_ids = self._tokens_of(request, 0)
        else:
            # Its items keep the ids that the digests were made of.
            known_hashes = known.block_hashes
            new_ids = self._tokens_of(request, len(known.token_ids))
            token_ids = np.concatenate((known.token_ids, new_ids))
        namespace = namespace_of(request)
        block_hashes = self._manager.hash_blocks(token_ids, namespace=namespace, known=known_hashes)
        num_shareable = len(token_ids)
        if has_items(request) and NEVER_SHARED in token_ids:
            num_shareable = int((token_ids == NEVER_SHARED).argmax())
        prompt = HashedPrompt(token_ids, namespace, block_hashes, num_shareable)
        # A streaming session removes tokens between its turns; all others only append.
        if not request.resumable:
            self._of_request[request.request_id] = prompt
        return prompt

    def _tokens_of(self, request: Request, start: int) -> NDArray[np.int32]:
        tokens = self._item_ids.tokens_of(request, start)
        # NumPy reads a list two to three times more slowly.
        return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), np.int32)

    def admit(self, request: Request, prompt: HashedPrompt) -> None:
        """Forget the digests of a request that was admitted, and keep its tokens until they are committed."""
        self._of_request.pop(request.request_id, None)
        if not request.resumable:
            self._admitted[request.request_id] = prompt.token_ids

    def tokens_to_commit(
        self, requests: Sequence[Request], starts: Sequence[int], ends: Sequence[int]
    ) -> NDArray[np.int32]:
        """Return the tokens of admitted requests from ``starts`` to ``ends``, one request after the other.

        To be called for each request in order of positions: a prompt is kept up to its last token.
        """
        spans = [self._span(*place) for place in zip(requests, starts, ends, strict=True)]
        if any(isinstance(span, np.ndarray) for span in spans):
            return np.concatenate([np.asarray(span, np.int32) for span in spans])
        return np.fromiter(itertools.chain.from_iterable(spans), np.int32, sum(map(len, spans)))

    def _span(self, request: Request, start: int, end: int) -> Sequence[int] | NDArray[np.int32]:
        """Return an array for a prompt, and a list for what was generated."""
        known = self._admitted.get(request.request_id)
        if known is None:
            return self._item_ids.tokens_of(request, start, end)
        if end < len(known):
            return known[start:end]
        del self._admitted[request.request_id]
        rest = self._item_ids.tokens_of(request, len(known), end)
        return np.concatenate((known[start:], np.array(rest, np.int32))) if rest else known[start:]

    def drop(self, request_id: str) -> None:
        """Forget a request that has ended or was preempted."""
        self._of_request.pop(request_id, None)
        self._admitted.pop(request_id, None)


def namespace_of(request: Request) -> bytes:
    """Return the namespace of a request: two requests may share blocks if and only if vLLM's own keys are equal.

    These are the keys that vLLM hashes into a request's first block: adapter name and path, and the cache salt. (Those
    of multimodal items and prompt embeddings differ from block to block, see ``ItemIds``.)
    """
    # Of no tokens, and past the last item: the keys of the request alone.
    keys, _ = generate_block_hash_extra_keys(request, 0, 0, len(request.mm_features))
    return b"" if keys is None else repr(keys).encode()


def wrap_preprocess_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement of ``EngineCore.preprocess_add_request``; see the patch ledger."""

    def preprocess_add_request(self: Any, request: Any) -> Any:
        manager = getattr(self.scheduler, "kv_cache_manager", None)
        # Only here, after the engine's start: its manager says whether it reads ``Request.block_hashes``. To make them
        # of a prompt of 512 tokens takes 0.1 ms.
        is_unread = not getattr(manager, "reads_block_hashes", True) and self.scheduler.connector is None
        if self.request_block_hasher is not None and is_unread:
            self.request_block_hasher = None
        # Turns take back a token that a state has seen. vLLM answers the request with the error.
        is_session = getattr(request, "resumable", False)
        if is_session and self.async_scheduling and getattr(manager, "has_states", False):
            raise ConfigError(
                "streaming input: this model keeps states, which cannot be set back to before a turn's last token; "
                "--no-async-scheduling serves it"
            )
        return original(self, request)

    return preprocess_add_request
