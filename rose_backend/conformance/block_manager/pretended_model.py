"""What stands for a model: a position's K/V is a chained hash of all tokens up to it, and so is the next token.

As a real K/V entry's from the second layer on, a content depends on the whole prefix, so that a wrong block shows.
"""

from __future__ import annotations

import zlib
from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

VOCAB_SIZE = 97
ITEM_PLACES = ((10, 23), (40, 9), (49, 16))
"""First position and length of the multimodal items in a prompt that is long enough."""
_MODULUS = (1 << 61) - 1


def chain(state: int, token: int) -> int:
    """Return the content of the next position."""
    return (state * 1_000_003 + token * 7919 + 12345) % _MODULUS


def next_token(state: int) -> int:
    """Return what the pretended model generates greedily."""
    return state % VOCAB_SIZE


def with_contents(tokens: list[int], features: list[Any]) -> list[int]:
    """Return tokens with what a model reads in place of the placeholders: a number for each position of each item."""
    contents = list(tokens)
    for feature in features:
        first, length = feature.mm_position.offset, feature.mm_position.length
        content = 1000 * int(feature.identifier)
        contents[first : first + length] = range(content, content + length)
    return contents


def expected_output(prompt: list[int], num_tokens: int) -> list[int]:
    """Generate without any cache, from a prompt ``with_contents``."""
    state = 0
    for token in prompt:
        state = chain(state, token)
    output = []
    for _ in range(num_tokens):
        output.append(next_token(state))
        state = chain(state, output[-1])
    return output


def items_of(prompt: list[int], choice: int) -> list[MultiModalFeatureSpec]:
    """Return the multimodal items of a prompt: at each of ``ITEM_PLACES`` one of two, as the bits of ``choice`` say.

    As with vLLM's own names of items, equal names have equal placeholder tokens.
    """
    items = []
    for index, (first, length) in enumerate(ITEM_PLACES):
        if first + length <= len(prompt):
            tokens = zlib.crc32(repr(prompt[first : first + length]).encode())
            name = str(2 * (tokens + index) + (choice >> index & 1))
            place = PlaceholderRange(first, length)
            items.append(MultiModalFeatureSpec(MultiModalKwargsItem({}), "image", name, place))
    return items
