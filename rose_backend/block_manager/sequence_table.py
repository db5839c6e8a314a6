"""One row per running sequence: its block table and its lengths."""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager.array_types import BoolArray, Int32Array, IntArray, within_group_index
from rose_backend.block_manager.block_pool import NULL_BLOCK
from rose_backend.errors import RowError


class SequenceTable:
    """Fixed rows that sequences are given and give back.

    Args:
        max_num_seqs: rows.
        max_blocks_per_row: width of the block table.

    Memory: ``4 * max_blocks_per_row + 18`` bytes per row, and one chain digest.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_row: int) -> None:
        self.block_table: Int32Array = np.full((max_num_seqs, max_blocks_per_row), NULL_BLOCK, np.int32)
        self.num_row_blocks: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        """Tokens whose K/V was written by steps that are over."""
        self.is_active: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self.tail_writable: BoolArray = np.ones(max_num_seqs, np.bool_)
        """False while the block that takes the next token may belong to somebody else, too."""
        self.changed: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self.chain_digests: list[bytes] = [b""] * max_num_seqs
        """Digest of the chain of full, computed blocks of a row."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._scratch: Int32Array = np.zeros(max_num_seqs, np.int32)

    @property
    def num_free_rows(self) -> int:
        """Rows that nobody uses."""
        return len(self._free_rows)

    def take_row(self) -> int:
        """Give out an empty row. The caller has checked that there is one."""
        row = self._free_rows.pop()
        self.is_active[row] = True
        self.changed[row] = True
        return row

    def give_back(self, rows: IntArray) -> None:
        """Empty rows and make them available again."""
        self.block_table[rows, :] = NULL_BLOCK
        self.num_row_blocks[rows] = 0
        self.num_computed_tokens[rows] = 0
        self.is_active[rows] = False
        self.tail_writable[rows] = True
        self.changed[rows] = False
        for row in rows.tolist():
            self.chain_digests[row] = b""
            self._free_rows.append(row)

    def append(self, rows: IntArray, counts: IntArray, block_ids: Int32Array) -> IntArray:
        """Put ``counts[i]`` of ``block_ids`` behind the blocks of ``rows[i]``; return the row of each block."""
        if len(block_ids) == np.count_nonzero(counts):  # one each, the common case
            row_of_block = rows[counts > 0]
            columns = self.num_row_blocks[row_of_block]
        else:
            row_of_block = np.repeat(rows, counts)
            columns = np.repeat(self.num_row_blocks[rows], counts) + within_group_index(counts)
        self.block_table[row_of_block, columns] = block_ids
        self.num_row_blocks[rows] += counts.astype(np.int32)
        return row_of_block

    def check_active(self, rows: IntArray) -> None:
        """Raise RowError unless every row is in use and stands there once."""
        if ((rows < 0) | (rows >= len(self.is_active))).any() or not self.is_active[rows].all():
            raise RowError(f"rows {rows.tolist()}: at least one is not in use")
        order = np.arange(len(rows), dtype=np.int32)
        self._scratch[rows] = order
        if (self._scratch[rows] != order).any():
            raise RowError(f"rows {rows.tolist()}: one stands there twice")

    def cut(self, rows: IntArray, num_kept: IntArray) -> Int32Array:
        """Shorten rows to ``num_kept[i]`` blocks; return what was cut off."""
        width = int(self.num_row_blocks[rows].max())
        columns = np.arange(width)
        tables = self.block_table[rows, :width]
        is_cut = (columns >= num_kept[:, None]) & (columns < self.num_row_blocks[rows][:, None])
        cut: Int32Array = tables[is_cut]
        self.block_table[rows, :width] = np.where(is_cut, NULL_BLOCK, tables)
        self.num_row_blocks[rows] = np.minimum(self.num_row_blocks[rows], num_kept)
        return cut

    def blocks_tail_first(self, rows: IntArray) -> Int32Array:
        """Return all blocks of ``rows``, row after row, the last block of each row first."""
        counts = self.num_row_blocks[rows]
        width = int(counts.max()) if len(rows) else 0
        columns = np.arange(width - 1, -1, -1)
        tables: Int32Array = self.block_table[rows][:, columns]
        return tables[columns < counts[:, None]]
