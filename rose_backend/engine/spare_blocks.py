"""Blocks for a step, and for some further ones where blocks are plenty."""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager import BlockManager
from rose_backend.engine.row_state import Int32Array, RowState

_BLOCKS_PER_SPARE_BLOCK = 16
"""Rows hold a block that they do not need yet as long as there are so many free ones for each of them."""
_MAX_SPARE_BLOCKS = 2
"""Of each row. Planning costs the host about as much as ten steps that are alike, and taking blocks about as much as
planning."""
TOP_UP_STEPS = 16
"""So many steps before a row runs out of room, ``top_up`` begins."""
_ROWS_PER_TOP_UP = 128
"""A call costs the host about as much as the blocks of 32 rows, and those of 128 fit beside a step."""


def reserve_ahead(manager: BlockManager, state: RowState, rows: Int32Array, num_tokens: Int32Array) -> bool:
    """Make room for ``num_tokens`` of each of ``rows``, all or none; where blocks are plenty, for further steps, too.

    Rows need their next blocks at different times: without that, nearly every step would hand out a few.

    Args:
        num_tokens: ``[N]``, behind what is committed.

    Returns:
        False when blocks are short; nothing has changed then.
    """
    num_computed = manager.num_computed_tokens[rows]
    if np.count_nonzero(manager.table.capacity[rows] < num_computed + num_tokens) == 0:
        return True
    num_spare = _num_spare_blocks(manager, len(rows))
    if num_spare:
        # The last token of a row is never computed.
        longest = state.max_num_tokens[rows] - 1 - num_computed
        further = np.minimum(num_tokens + num_spare * manager.block_size, longest)
        if manager.reserve(rows, np.maximum(num_tokens, further)).ok:
            return True
    return manager.reserve(rows, num_tokens).ok


def top_up(manager: BlockManager, state: RowState, rows: Int32Array, num_steps: int) -> bool:
    """Give some of ``rows``, which all decode, the blocks that ``reserve_ahead`` would give them ``num_steps`` later.

    There it would be all of them at once: for 256 rows longer than their step takes, while here the host only waits.

    Args:
        num_steps: for which all rows have room.

    Returns:
        Whether others may be left.
    """
    num_spare = _num_spare_blocks(manager, len(rows))
    if not num_spare:
        return False
    wanted = state.num_planned_tokens(rows) + (num_steps + 1 + num_spare * manager.block_size)
    # The last token of a row is never computed.
    wanted = np.minimum(wanted, state.max_num_tokens[rows] - 1)
    short = np.flatnonzero(manager.table.capacity[rows] < wanted)[:_ROWS_PER_TOP_UP]
    if not len(short):
        return False
    rows = rows[short]
    return manager.reserve(rows, wanted[short] - manager.num_computed_tokens[rows]).ok


def _num_spare_blocks(manager: BlockManager, num_rows: int) -> int:
    return min(manager.num_free_blocks // (num_rows * _BLOCKS_PER_SPARE_BLOCK), _MAX_SPARE_BLOCKS)
