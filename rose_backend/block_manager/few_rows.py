"""Reservations of one or a few rows, number by number: arrays of a few numbers take longer than a loop over them.

A prompt is admitted as one row, and in most steps of a busy engine a few rows have filled their last block.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_backend.block_manager.allocation import Allocation
from rose_backend.block_manager.block_pool import NULL_BLOCK, BlockPool
from rose_backend.block_manager.row_states import RowStates
from rose_backend.block_manager.sequence_table import SequenceTable
from rose_backend.errors import RowError


@dataclass(frozen=True, slots=True)
class FewRows:
    """Works on the block manager's own arrays; holds no state itself."""

    pool: BlockPool
    table: SequenceTable
    allocation: Allocation
    states: RowStates | None
    block_size: int
    blocks_per_column: int
    """Blocks of all KV cache groups for the same positions."""

    def extend(self, row: int, num_tokens: int) -> int | None:
        """Serve one row as ``BlockManager.reserve`` does.

        Returns:
            The number of blocks allocated; None where there is more to check or to do, and nothing has changed.
        """
        table = self.table
        if table.windowed or num_tokens < 0 or not table.is_in_use(row) or self._lacks_state(row):
            return None
        wanted = int(table.num_computed_tokens[row]) + num_tokens
        if wanted <= table.capacity[row]:
            return 0
        return None if wanted > table.full_capacity_of(table.width) else self.reserve(row, wanted)

    def reserve(self, row: int, wanted: int) -> int | None:
        """Serve one row whose windows have let go of what they passed.

        Args:
            row: in use.
            wanted: tokens that it must be able to hold, at most ``max_model_len``.

        Returns:
            The number of blocks allocated; None if its end is shared, it needs a state, too, or blocks are short, and
            nothing has changed.
        """
        table = self.table
        if self._lacks_state(row):
            return None
        num_blocks = int(table.num_row_blocks[row])
        num_new = max(-(-wanted // self.block_size) - num_blocks, 0)
        total = num_new * self.blocks_per_column
        if table.capacity[row] < table.full_capacity_of(num_blocks) or total > self.pool.num_free_blocks:
            return None
        for kind in table.kinds:
            block_ids = self.allocation.take(kind, num_new)
            kind.block_table[row, num_blocks : num_blocks + num_new] = block_ids
            self.pool.writers[block_ids] = row
        table.append_to(row, num_blocks, num_new)
        return total

    def _lacks_state(self, row: int) -> bool:
        return self.states is not None and self.states.running[row] == NULL_BLOCK

    def append_to_each(self, rows: list[int], counts: list[int]) -> bool:
        """See ``BlockManager.reserve_next_blocks``; there are no windows.

        Args:
            counts: columns of each row.
        """
        table, writers = self.table, self.pool.writers
        for row, count in zip(rows, counts, strict=True):
            if table.capacity[row] != count * self.block_size or count == table.width:
                raise no_next_block(rows)
        if len(rows) * self.blocks_per_column > self.pool.num_free_blocks:
            return False
        (kind,) = table.kinds
        for row, count, block_id in zip(
            rows, counts, self.allocation.take(kind, len(rows)).tolist(), strict=True
        ):
            kind.block_table[row, count] = block_id
            writers[block_id] = row
            table.append_to(row, count, 1)
        return True


def no_next_block(rows: list[int]) -> RowError:
    """Return the error of ``BlockManager.reserve_next_blocks``."""
    return RowError(f"reserve_next_blocks: one of rows {rows} cannot get a block behind its own")
