"""Which row stands in which slot of the decode step's device buffers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rose_backend.engine.row_state import Int32Array, RowState

Int64Array = NDArray[np.int64]
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class SlotChange:
    """What has to be written to the device before the next step."""

    slots: Int64Array  # [N]
    rows: Int32Array  # [N], who comes into each slot
    old_slots: Int64Array  # [N], the slot that the row stood in until now, or NO_SLOT
    emptied: Int64Array  # [P], slots that nobody holds now but the device still works on


class DecodeSlots:
    """Keeps the rows of a decode step in the first few slots, and each row in its slot as long as that is possible.

    A step runs over as many slots as a captured graph has, so holes cost a little and moves cost a little: a row moves
    only when its slot lies behind the last one of a smaller graph.

    Args:
        state: says who holds a row.
    """

    def __init__(self, state: RowState) -> None:
        num_rows = len(state.num_tokens)
        self._state = state
        self._row_of_slot: Int64Array = np.full(num_rows, NO_SLOT, np.int64)
        self._slot_of_row: Int64Array = np.full(num_rows, NO_SLOT, np.int64)
        self._generation_of_slot: Int64Array = np.zeros(num_rows, np.int64)
        self._is_active: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # as the device sees it
        self._num_held = 0

    def rows(self) -> Int64Array:
        """Return the rows that stand in a slot and have not left since."""
        slots = np.flatnonzero(self._row_of_slot >= 0)
        rows: Int64Array = self._row_of_slot[slots]
        return rows[self._generation_of_slot[slots] == self._state.generation[rows]]

    def slots_of(self, rows: NDArray[np.signedinteger]) -> Int64Array:
        """Return each row's slot, ``NO_SLOT`` for a row that has none."""
        slots = self._slot_of_row[rows]
        is_stale = self._generation_of_slot[slots] != self._state.generation[rows]
        slots[is_stale] = NO_SLOT
        return slots

    def row_of_slot(self, slots: Int64Array) -> Int64Array:
        """Return who holds each of ``slots``."""
        rows: Int64Array = self._row_of_slot[slots]
        return rows

    def assign(self, rows: Int32Array, width: int) -> tuple[Int64Array, SlotChange | None]:
        """Put exactly ``rows`` into slots below ``width``.

        Returns:
            ``[N]`` the slot of each row, and what has changed; None where nothing has.
        """
        old_slots = self.slots_of(rows)
        stays = (old_slots >= 0) & (old_slots < width)
        if len(rows) == self._num_held and stays.all():
            return old_slots, None
        row_of_slot = np.full_like(self._row_of_slot, NO_SLOT)
        row_of_slot[old_slots[stays]] = rows[stays]
        comes = np.flatnonzero(~stays)
        slots = old_slots.copy()
        slots[comes] = np.flatnonzero(row_of_slot[:width] < 0)[: len(comes)]
        row_of_slot[slots[comes]] = rows[comes]
        self._row_of_slot = row_of_slot
        self._slot_of_row[:] = NO_SLOT
        self._slot_of_row[rows] = slots
        self._generation_of_slot[slots] = self._state.generation[rows]
        self._num_held = len(rows)
        emptied = np.flatnonzero(self._is_active & (row_of_slot < 0))
        self._is_active[emptied] = False
        self._is_active[slots] = True
        return slots, SlotChange(slots[comes], rows[comes], old_slots[comes], emptied)
