"""What every engine of the matrix is asked: a few requests one by one, 60 that meet, and the first ones again.

The same for all engines, decided by a seed: what differs between two sides is theirs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

CHOICES = ["a red rose", "a blue king", "the old garden wall"]
NUM_FIRST, NUM_MIXED = 8, 60
TOP_K = 3
"""Tokens that draws choose from."""
NUM_TOP = 5
CHUNK = 192
"""Tokens of a step; the longest prompts take several."""
MAX_LEN = 512
MAX_RUNNING = 16
SPARSE_KINDS = ("logprobs", "logprobs", "prompt_logprobs", "n", "draws", "structured")

_TOKENS = (600, 4000)
"""Neither text that the tokenizer knows nor what stands for a picture."""
_HEADS = (37, 90, 203)
_LENGTHS = (1, 7, 16, 17, 33, 60, 120, 250, 400)
_SIZES = ((84, 140), (140, 84), (112, 112), (168, 168))


@dataclass(frozen=True)
class Picture:
    """A picture of random colors, the same for the same seed; sizes in pixels."""

    seed: int
    height: int
    width: int


@dataclass(frozen=True)
class Ask:
    """One request."""

    name: str
    kind: str
    """"plain", "logprobs", "prompt_logprobs", "n", "draws" or "structured"."""
    parts: tuple[tuple[int, ...] | Picture, ...]
    """Its prompt."""
    max_tokens: int
    arrival_step: int
    is_adapted: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one (of those allowed)."""
        return self.kind not in ("n", "draws")


def first_asks(has_pictures: bool) -> list[Ask]:
    """Return what is asked one by one, first of all and again in the end; short and long, without pictures and with.

    Every other one asks for log-probabilities, which take another way through the engine.
    """
    draw = random.Random(1)
    asks = []
    for index in range(NUM_FIRST):
        length = (5, 16, 47, 90, 130, 203, 260, 410)[index]
        parts: list[tuple[int, ...] | Picture] = [_text(draw, length)]
        if has_pictures and index % 4 == 3:
            # The last one ends with its picture: asked again, one token of that is computed.
            parts = [*parts, _picture(draw), *([_text(draw, 9)] if index < NUM_FIRST - 1 else [])]
        kind = "logprobs" if index % 2 else "plain"
        asks.append(Ask(f"first-{index}", kind, tuple(parts), max_tokens=16, arrival_step=0))
    return asks


def mixed_asks(has_pictures: bool, has_adapter: bool = False) -> list[Ask]:
    """Return 60 requests that arrive while others decode: 30 without extras, then all kinds.

    Prompts that take several chunks, shared heads that end inside a block, one prompt asked three times, pictures
    beside texts, and more at once than a small pool has room for.
    """
    draw = random.Random(2)
    heads = [_text(draw, length) for length in _HEADS]
    pictures = [_picture(draw) for _ in range(6)]
    common: tuple[tuple[int, ...] | Picture, ...] = (_text(draw, 75),)
    asks, step = [], 0
    for index in range(NUM_MIXED):
        step += draw.choice((0, 0, 1, 1, 3))
        if index == NUM_MIXED // 2:
            # Those before decode alone for a while.
            step += 25
        is_late = index >= NUM_MIXED // 2
        parts: tuple[tuple[int, ...] | Picture, ...]
        if index % 20 == 10:
            parts = common
        elif index % 2:
            head = heads[index // 2 % len(heads)]
            parts = (head[: draw.choice((20, 37, len(head)))] + _text(draw, draw.choice((1, 9, 30))),)
        else:
            parts = (_text(draw, draw.choice(_LENGTHS)),)
        if has_pictures and index % 3 == 1:
            behind = [
                (draw.choice(pictures), _text(draw, draw.choice((1, 12)))) for _ in range(draw.randint(1, 2))
            ]
            parts = (heads[0][:21], *(part for pair in behind for part in pair))
        kind = SPARSE_KINDS[index // 2 % len(SPARSE_KINDS)] if is_late and index % 2 else "plain"
        asks.append(
            Ask(
                f"mixed-{index}",
                kind,
                parts,
                max_tokens=draw.randint(8, 40),
                arrival_step=step,
                is_adapted=has_adapter and index % 3 == 0,
            )
        )
    return asks


def _text(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(*_TOKENS) for _ in range(length))


def _picture(draw: random.Random) -> Picture:
    return Picture(draw.randrange(1 << 30), *draw.choice(_SIZES))
