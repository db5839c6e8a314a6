"""Ids of what stands in a prompt without tokens of its own: multimodal items and prompt embeddings.

A prompt has the same placeholder token for every position of every image, so tokens alone do not tell what was
computed. The block manager is given an id of the item in all of its positions. Equal prefixes then have equal keys and
values, and hits end at any token, inside an item, too; the block manager knows nothing of items. One id for all
positions is enough: what precedes a position in the prompt tells where in the item it lies.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

MAX_ITEMS = 100_000
"""Items whose ids are kept. One that was dropped gets a new id, and is computed once more."""
NEVER_SHARED = -(2**31)
"""In place of an id where all others are used up: no prefix reaches behind such a token."""

Span = tuple[int, int, Any]
"""First position, the one behind the last, and what vLLM tells it by."""


class ItemIds:
    """Gives each item a negative id that no other item ever gets.

    Two items are one if vLLM's identifier, which stands for the content and how it was processed, and the tokens in the
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
