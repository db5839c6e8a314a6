"""Ids of multimodal items, which the block manager is given in place of their placeholder tokens.

A prompt has the same placeholder token for every position of every image, so tokens alone do not tell what was
computed. With an id of its own in all positions of an item, equal prefixes have equal keys and values, and hits end at
any token, inside an item, too; the block manager knows nothing of items. One id for all positions is enough: what
precedes a position in the prompt tells where in the item it lies.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

MAX_ITEMS = 100_000
"""Items whose ids are kept. One that was dropped gets a new id, and is computed once more."""
NEVER_SHARED = -(2**31)
"""In place of an id where all others are used up: no prefix reaches behind such a token."""


class ItemIds:
    """Gives each item a negative id that no other item ever gets.

    Two items are one if vLLM's identifier, which stands for the content and how it was processed, and the tokens in the
    prompt are equal. A client may choose identifiers itself, so the identifier alone does not tell how long an item is.

    Memory: about 200 bytes for each of at most ``MAX_ITEMS`` items.
    """

    def __init__(self) -> None:
        self._unused = itertools.count(-1, -1)
        self._id_of = functools.lru_cache(maxsize=MAX_ITEMS)(self._new_id)

    def _new_id(self, key: bytes) -> int:
        return max(next(self._unused), NEVER_SHARED)

    def tokens_of(self, request: Request, start: int = 0, end: int | None = None) -> list[int]:
        """Return the tokens of a request from ``start`` to ``end``, or to its last one, with the ids of its items."""
        tokens = request._all_token_ids[start:end]
        if not request.mm_features or start >= request.num_prompt_tokens:
            return tokens
        end = start + len(tokens)
        for items in _overlapping(request.mm_features):
            first, last = items[0].mm_position.offset, max(map(_end, items))
            if first < end and last > start:
                covered = slice(max(first, start) - start, min(last, end) - start)
                item_id = self._id_of(_key(items, request._all_token_ids[first:last]))
                tokens[covered] = [item_id] * (covered.stop - covered.start)
        return tokens


def _overlapping(features: list[MultiModalFeatureSpec]) -> Iterator[list[MultiModalFeatureSpec]]:
    """Yield the items of each span of a prompt; the sound of a video lies within its pictures, for example.

    Args:
        features: of a request, by offset.
    """
    span: list[MultiModalFeatureSpec] = []
    for feature in features:
        if span and feature.mm_position.offset >= max(map(_end, span)):
            yield span
            span = []
        span.append(feature)
    yield span


def _end(feature: MultiModalFeatureSpec) -> int:
    return feature.mm_position.offset + feature.mm_position.length


def _key(items: list[MultiModalFeatureSpec], token_ids: list[int]) -> bytes:
    start = items[0].mm_position.offset
    places = [(item.identifier, item.mm_position.offset - start, item.mm_position.length) for item in items]
    digest = hashlib.blake2b(repr(places).encode(), digest_size=32)
    digest.update(np.array(token_ids, np.int32).tobytes())
    return digest.digest()
