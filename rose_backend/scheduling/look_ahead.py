"""Block look-ahead: where blocks are plenty, running rows reserve blocks for more steps than the next one.

Rows fill their blocks at different steps: without look-ahead, nearly every step would allocate a few blocks.
"""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager import BlockManager
from rose_backend.block_manager.block_pool import Int32Array, IntArray

TOP_UP_STEPS = 16
"""``top_up`` starts this many steps before the first row is full."""
_BLOCKS_PER_SPARE_BLOCK = 16
"""Free blocks that must remain for each block that is reserved ahead."""
_MAX_SPARE_BLOCKS = 2
"""Blocks reserved ahead per row. Planning a step costs the CPU about ten times as much as repeating a steady-state
decode step, and allocating blocks about as much as planning."""
_ROWS_PER_TOP_UP = 128
"""A call costs the CPU about as much as the blocks of 32 rows; those of 128 fit into the time of a step."""


def reserve_ahead(
    manager: BlockManager, rows: IntArray, num_tokens: Int32Array, max_num_tokens: Int32Array
) -> bool:
    """Reserve ``num_tokens`` for each of ``rows``, all or none; where blocks are plenty, for further steps, too.

    Args:
        rows: ``[N]``.
        num_tokens: ``[N]``, counted from what is committed.
        max_num_tokens: int32 ``[max_num_seqs]``, of every row: its length limit.

    Returns:
        False when blocks are short; nothing has changed then.
    """
    num_computed = manager.num_computed_tokens[rows]
    if np.count_nonzero(manager.table.capacity[rows] < num_computed + num_tokens) == 0:
        return True
    num_spare = _num_spare_blocks(manager, len(rows))
    if num_spare:
        # The last token of a row is never computed.
        longest = max_num_tokens[rows] - 1 - num_computed
        further = np.minimum(num_tokens + num_spare * manager.block_size, longest)
        if manager.reserve(rows, np.maximum(num_tokens, further)).ok:
            return True
    return manager.reserve(rows, num_tokens).ok


def top_up(manager: BlockManager, rows: IntArray, num_tokens: Int32Array, max_num_tokens: Int32Array) -> bool:
    """Reserve for some decoding rows, while the CPU waits for the device, what ``reserve_ahead`` would reserve later.

    It would do so for all rows at once, which for 256 rows takes longer than their step.

    Args:
        rows: ``[N]``.
        num_tokens: ``[N]``, tokens that each row will need at the next ``reserve_ahead``.
        max_num_tokens: see ``reserve_ahead``.

    Returns:
        Whether other rows may still be short.
    """
    num_spare = _num_spare_blocks(manager, len(rows))
    if not num_spare:
        return False
    wanted = np.minimum(num_tokens + num_spare * manager.block_size, max_num_tokens[rows] - 1)
    short = np.flatnonzero(manager.table.capacity[rows] < wanted)[:_ROWS_PER_TOP_UP]
    if not len(short):
        return False
    rows = rows[short]
    return manager.reserve(rows, wanted[short] - manager.num_computed_tokens[rows]).ok


def _num_spare_blocks(manager: BlockManager, num_rows: int) -> int:
    return min(manager.num_free_blocks // (num_rows * _BLOCKS_PER_SPARE_BLOCK), _MAX_SPARE_BLOCKS)
