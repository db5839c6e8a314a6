"""Kinds of KV cache groups, and the block table of each.

A model's layers are in one KV cache group or several, as vLLM makes them: layers that keep everything and layers with a
sliding window are in different groups, and many layers of one sort in several groups of the same size. Groups of one
sort are a *kind*. All groups take blocks of one pool. For the same positions each group of a kind has a block of its
own; the first group's is in the table and stands for all of them, the others are its *followers*. Layers that keep a
state instead of K/V have groups of their own, too, but no table, see ``row_states``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager.block_pool import NULL_BLOCK, Int32Array
from rose_backend.config import check_int
from rose_backend.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GroupKind:
    """KV cache groups of one sort.

    Raises: ConfigError if a number is out of range.
    """

    window: int | None = None
    """Tokens that a token attends to, itself included, at least 2; None: all before it."""
    num_groups: int = 1
    is_state: bool = False
    """Its layers keep one state per sequence, whatever its length, and no K/V."""

    def __post_init__(self) -> None:
        if self.window is not None:
            check_int("window", self.window, 2, 1 << 30)
        check_int("num_groups", self.num_groups, 1, 1 << 10)
        if self.is_state and self.window is not None:
            raise ConfigError(f"window: got {self.window} for a kind with states, allowed is None")

    def most_columns(self, num_at_once: int, block_size: int) -> float:
        """Return in how many columns a row has blocks at most, as far as its length allows.

        Args:
            num_at_once: tokens that are reserved behind the computed ones at most.
        """
        return math.inf if self.window is None else -(-(self.window - 1 + num_at_once) // block_size) + 1


class KindTable:
    """The block tables of one kind of groups. All kinds have the same positions in the same column.

    Args:
        index: place of the kind among all.
        kind: window and number of groups.
        max_num_seqs: rows.
        width: columns.

    Memory: 4 bytes per entry and row.
    """

    def __init__(self, index: int, kind: GroupKind, max_num_seqs: int, width: int) -> None:
        self.index, self.kind = index, kind
        self.window, self.num_groups = kind.window, kind.num_groups
        self.block_table: Int32Array = np.full((max_num_seqs, width), NULL_BLOCK, np.int32)
        self.entries: Int32Array = self.block_table.reshape(-1)
        """The block table in one dimension: ``row * width + column``. One index is cheaper than two."""
        self.first_block: Int32Array = np.zeros(max_num_seqs, np.int32)
        """int32 ``[max_num_seqs]``: the first column of each row that has a block; the window has passed the others."""


def check_kinds(kinds: Sequence[GroupKind]) -> None:
    """Raise ConfigError unless the first kind keeps everything, and windows of different sizes and states follow."""
    has_states = [kind.is_state for kind in kinds]
    windows = [kind.window for kind in kinds if not kind.is_state]
    if any(has_states[:-1]):
        raise ConfigError(
            f"kinds: got states at {has_states.index(True)}, allowed is one such kind, the last"
        )
    if not windows or windows[0] is not None or None in windows[1:] or len(set(windows)) < len(windows):
        raise ConfigError(
            f"kinds: got windows {windows}, allowed are None for the first kind and different sizes for all others"
        )
