"""One row per running sequence: its block tables, its lengths and its state.

A model's layers are in one KV cache group or several, as vLLM makes them: layers that keep everything and layers with a
sliding window are in different groups, and many layers of one type in several groups of the same size. All groups of
one type are a *group type*. All groups take blocks of one pool. For the same positions each group of a type has a
block; the first group's is in the table and represents all of them, the others are its *followers*. Layers that keep a
state instead of K/V have groups, too, but no table, see ``row_states``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rose_backend.block_manager.block_pool import (
    NULL_BLOCK,
    BlockPool,
    BoolArray,
    Int32Array,
    Int64Array,
    IntArray,
)
from rose_backend.block_manager.prefix_index import Place
from rose_backend.config import check_int
from rose_backend.errors import ConfigError, RowError

_NOT_IN_USE = -1
FEW_ROWS = 16
"""Up to this many rows, a loop over numbers takes less time than operations on arrays."""


@dataclass(frozen=True, slots=True)
class GroupType:
    """KV cache groups of one type.

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
            raise ConfigError(f"window: got {self.window} for a group type with states, allowed is None")

    def most_columns(self, num_at_once: int, block_size: int) -> float:
        """Return the largest number of columns in which a row of any length has blocks.

        Args:
            num_at_once: maximum tokens reserved past the computed ones.
        """
        return math.inf if self.window is None else -(-(self.window - 1 + num_at_once) // block_size) + 1


class GroupTypeTable:
    """The block tables of one group type. All group types have the same positions in the same column.

    Args:
        index: place of the group type among all.
        group_type: window and number of groups.
        max_num_seqs: rows.
        width: columns.

    Memory: 4 bytes per entry and row.
    """

    def __init__(self, index: int, group_type: GroupType, max_num_seqs: int, width: int) -> None:
        self.index, self.type = index, group_type
        self.window, self.num_groups = group_type.window, group_type.num_groups
        self.block_table: Int32Array = np.full((max_num_seqs, width), NULL_BLOCK, np.int32)
        self.entries: Int32Array = self.block_table.reshape(-1)
        """The block table in one dimension: ``row * width + column``. One index is cheaper than two."""
        self.first_block: Int32Array = np.zeros(max_num_seqs, np.int32)
        """int32 ``[max_num_seqs]``: the first column of each row that has a block; the window has passed the others."""


def check_group_types(group_types: Sequence[GroupType]) -> None:
    """Raise ConfigError unless the first type keeps everything, and windows of different sizes and states follow."""
    has_states = [each.is_state for each in group_types]
    windows = [each.window for each in group_types if not each.is_state]
    if any(has_states[:-1]):
        raise ConfigError(
            f"group_types: got states at {has_states.index(True)}, allowed is one such group type, the last"
        )
    if not windows or windows[0] is not None or None in windows[1:] or len(set(windows)) < len(windows):
        raise ConfigError(
            f"group_types: got windows {windows}, allowed are None for the first and different sizes for all others"
        )


class SequenceTable:
    """A fixed number of rows, one per running sequence.

    Args:
        max_num_seqs: rows.
        max_model_len: tokens a row can hold.
        block_size: tokens per block.
        group_types: of KV cache groups; each has its own table.

    Memory: ``4 * ceil(max_model_len / block_size)`` bytes per row and group type and about 150 more.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        group_types: Sequence[GroupType] = (GroupType(),),
    ) -> None:
        self.width = -(-max_model_len // block_size)
        self.group_types = tuple(
            GroupTypeTable(index, each, max_num_seqs, self.width) for index, each in enumerate(group_types)
        )
        self.windowed = self.group_types[1:]
        """Group types that release what their window has passed."""
        # Of the first group type, which keeps everything.
        self.block_table: Int32Array = self.group_types[0].block_table
        self.entries: Int32Array = self.group_types[0].entries
        self.num_row_blocks: Int32Array = np.zeros(max_num_seqs, np.int32)
        """int32 ``[max_num_seqs]``: columns of each row, the same for all group types."""
        self.num_computed_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        """int32 ``[max_num_seqs]``: tokens whose K/V is committed."""
        self.capacity: Int32Array = np.full(max_num_seqs, _NOT_IN_USE, np.int32)
        """Tokens that a row may hold without another reservation: what its blocks hold, at most ``max_model_len``, or
        ``num_computed_tokens`` while the block of the next token may be shared. -1: the row is not in use."""
        self.next_publish: Int32Array = np.zeros(max_num_seqs, np.int32)
        """Computed tokens at which a commit next changes the index: the first token of a block, or a full block."""
        self.num_known: list[int] = [0] * max_num_seqs
        """With sliding windows: leading tokens of each row that were in the cache when it was added, whether its window
        was there or not. Others may share them, too."""
        self.changed: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self.chain_digests: list[bytes] = [b""] * max_num_seqs
        """Digest of the chain of full, computed blocks of a row."""
        self.namespaces: list[bytes] = [b""] * max_num_seqs
        self.max_model_len = max_model_len
        self._block_size = block_size
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._scratch: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._order: Int64Array = np.arange(max_num_seqs)
        self._scratch_distinct = b""

    @property
    def num_free_rows(self) -> int:
        """Rows that are not in use."""
        return len(self._free_rows)

    @property
    def is_active(self) -> BoolArray:
        """Which rows are in use."""
        is_active: BoolArray = self.capacity != _NOT_IN_USE
        return is_active

    def take_rows(
        self,
        count: int,
        block_ids: Sequence[IntArray],
        num_tokens: int,
        chain_digest: bytes,
        namespace: bytes,
    ) -> Int64Array:
        """Return rows that all read ``num_tokens``. The caller has checked ``num_free_rows``.

        Args:
            block_ids: of each group type the blocks of the last columns.
        """
        numbers = [self._free_rows.pop() for _ in range(count)]
        # Prompts are added one by one: storing at an integer is ten times faster than at an array of one.
        rows: Any = np.array(numbers, np.int64) if count != 1 else numbers[0]
        num_blocks = len(block_ids[0])
        if num_blocks:
            self.block_table[rows, :num_blocks] = block_ids[0]
        for group_type, own in zip(self.windowed, block_ids[1:], strict=True):
            group_type.block_table[rows, num_blocks - len(own) : num_blocks] = own
            group_type.first_block[rows] = num_blocks - len(own)
        self.num_row_blocks[rows] = num_blocks
        self.num_computed_tokens[rows] = num_tokens
        self.capacity[rows] = num_tokens
        self.next_publish[rows] = num_tokens + 1
        self.changed[rows] = True
        for row in numbers:
            self.chain_digests[row] = chain_digest
            self.namespaces[row] = namespace
            self.num_known[row] = 0
        return np.array(numbers, np.int64)

    def give_back(self, rows: Int64Array, entries: Int64Array) -> None:
        """Empty rows, whose entries are ``entries``, and make them available again."""
        for group_type in self.group_types:
            group_type.entries[entries] = NULL_BLOCK
            group_type.first_block[rows] = 0
        self.num_row_blocks[rows] = 0
        self.num_computed_tokens[rows] = 0
        self.capacity[rows] = _NOT_IN_USE
        self.changed[rows] = False
        self._free_rows.extend(rows.tolist())

    def append(self, rows: Int64Array, counts: Int32Array, total: int) -> tuple[Int64Array, Int64Array]:
        """Append ``counts[i]`` columns to ``rows[i]``, ``total`` in all; return the row and entry of each column."""
        old_counts = self.num_row_blocks[rows]
        new_counts = old_counts + counts
        self.num_row_blocks[rows] = new_counts
        self.capacity[rows] = self.full_capacity(new_counts)
        if not total:  # copies of shared blocks only
            return rows[:0], rows[:0]
        if np.count_nonzero(counts) == total:  # at most one each
            gets_one = counts != 0
            row_of_block: Int64Array = rows[gets_one]
            return row_of_block, row_of_block * self.width + old_counts[gets_one]
        return np.repeat(rows, counts), concatenate_ranges(rows * self.width + old_counts, counts)

    def append_to(self, row: int, num_blocks: int, count: int) -> None:
        """Append columns to one row, which has ``num_blocks``."""
        self.num_row_blocks[row] = num_blocks + count
        self.capacity[row] = self.full_capacity_of(num_blocks + count)
        self.changed[row] = True

    def blocks_at(self, entries: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the blocks of all types, place after place, the first type's after the others', and their rows."""
        if not self.windowed:
            return self.entries[entries].astype(np.int64), entries // self.width
        blocks = np.stack([each.entries[entries] for each in reversed(self.group_types)], axis=1)
        index, _ = np.nonzero(blocks)
        return blocks[blocks != NULL_BLOCK].astype(np.int64), entries[index] // self.width

    def cut_passed(self, rows: Int64Array) -> Int64Array:
        """Take out what the windows of ``rows`` have passed, last block first; return the blocks.

        The next token attends to the last ``window - 1`` computed ones, and to itself.
        """
        removed = []
        for group_type in self.windowed:
            assert group_type.window is not None, "only the first group type keeps everything"
            old = group_type.first_block[rows]
            new = np.maximum(self.num_computed_tokens[rows] - (group_type.window - 1), 0) // self._block_size
            moves = new > old
            if any_of(moves):
                moved, new = rows[moves], new[moves]
                entries = concatenate_ranges(moved * self.width + old[moves], new - old[moves])[::-1]
                removed.append(group_type.entries[entries].astype(np.int64))
                group_type.entries[entries] = NULL_BLOCK
                group_type.first_block[moved] = new
                self.changed[moved] = True
        return np.concatenate(removed) if removed else np.zeros(0, np.int64)

    def full_capacity_of(self, num_row_blocks: int) -> int:
        """As ``full_capacity``, for one row."""
        return min(num_row_blocks * self._block_size, self.max_model_len)

    def full_capacity(self, num_row_blocks: Int32Array) -> Int32Array:
        """Return the tokens that rows with ``num_row_blocks`` blocks hold."""
        capacity: Int32Array = np.minimum(num_row_blocks * self._block_size, self.max_model_len)
        return capacity

    def entries_tail_first(self, rows: Int64Array) -> Int64Array:
        """Return the indices into ``entries`` of the blocks of ``rows``, row by row, the last block of a row first."""
        backwards = rows[::-1]
        entries: Int64Array = concatenate_ranges(backwards * self.width, self.num_row_blocks[backwards])[::-1]
        return entries

    def check_active(self, rows: Int64Array) -> None:
        """Raise RowError unless every row is in use and listed once."""
        self.check_distinct(rows)
        if any_of(self.capacity[rows] == _NOT_IN_USE):
            raise RowError(f"rows {rows.tolist()}: at least one is not in use")

    def is_in_use(self, row: int) -> bool:
        """Whether there is such a row, and it is in use."""
        return 0 <= row < len(self._order) and self.capacity[row] != _NOT_IN_USE

    def check_distinct(self, rows: Int64Array) -> None:
        """Raise RowError unless every row exists and is listed once."""
        num_rows = len(self._order)
        if 0 < len(rows) <= FEW_ROWS:
            numbers = rows.tolist()
            if min(numbers) >= 0 and max(numbers) < num_rows and len(set(numbers)) == len(numbers):
                return
        packed = rows.tobytes()
        if packed == self._scratch_distinct:  # a step passes the same rows several times
            return
        if len(rows) and (rows.min() < 0 or rows.max() >= num_rows):
            raise RowError(f"rows {rows.tolist()}: allowed are 0 to {num_rows - 1}")
        order = self._order[: len(rows)]
        if len(rows) <= num_rows:
            self._scratch[rows] = order  # the last store into an element stays
        if len(rows) > num_rows or any_of(self._scratch[rows] != order):
            raise RowError(f"rows {rows.tolist()}: duplicate row")
        self._scratch_distinct = packed

    def checked_counts(self, name: str, num_tokens: IntArray | int) -> Int32Array | int:
        """Return a number of tokens per row, checked and typed so that adding it to a row's length cannot overflow.

        Raises:
            RowError: one is negative or more than a row can hold; ``name`` is the caller.
        """
        if isinstance(num_tokens, int):
            low = high = num_tokens
        else:
            num_tokens = np.atleast_1d(num_tokens)
            low, high = np.minimum.reduce(num_tokens, initial=0), np.maximum.reduce(num_tokens, initial=0)
        if low < 0 or high > self.max_model_len:
            raise RowError(
                f"{name}: got {low if low < 0 else high} tokens, allowed are 0 to max_model_len, "
                f"{self.max_model_len}"
            )
        return num_tokens if isinstance(num_tokens, int) else num_tokens.astype(np.int32, copy=False)


class RowStates:
    """The states of all rows: blocks of the last group type, which has no table. ``row_states`` works on them.

    Args:
        index: of the group type that keeps a state.
        num_groups: of that group type.
        max_num_seqs: rows.
        pool: has the followers of each block.

    Memory: 8 bytes per row.
    """

    def __init__(self, index: int, num_groups: int, max_num_seqs: int, pool: BlockPool) -> None:
        self.index, self.num_groups = index, num_groups
        self.running: Int32Array = np.zeros(max_num_seqs, np.int32)
        """int32 ``[max_num_seqs]``: the block of each row's running state, which represents those of all groups; the
        null block before the first reservation."""
        self.found: Int32Array = np.zeros(max_num_seqs, np.int32)
        """int32 ``[max_num_seqs]``: the checkpoint that a row starts from, held until its copy has been queued."""
        self.last: dict[int, Place] = {}
        """Where each row's last checkpoint is, or was."""
        self._pool = pool

    def blocks_of(self, rows: IntArray) -> Int32Array:
        """Return the blocks of the running states of rows, int32 ``[num_groups, N]``."""
        return self._pool.blocks_of_groups(self.running[rows], self.num_groups)

    def held_blocks(self) -> Int32Array:
        """Return the blocks that rows hold, an id once per row."""
        held = np.concatenate((self.running, self.found))
        blocks: Int32Array = held[held != NULL_BLOCK]
        return blocks


def any_of(flags: BoolArray) -> bool:
    """Return ``flags.any()``, for a few hundred flags four times as fast."""
    return bool(np.count_nonzero(flags))


def concatenate_ranges(starts: IntArray, counts: IntArray) -> Int64Array:
    """Concatenate ``arange(starts[i], starts[i] + counts[i])``: ``[5, 9], [2, 1]`` give ``[5, 6, 9]``."""
    if len(counts) and not any_of(counts != counts[0]):  # the usual case; three times as fast
        equal: Int64Array = (starts.astype(np.int64)[:, None] + np.arange(counts[0])).reshape(-1)
        return equal
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Int64Array = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return numbers
