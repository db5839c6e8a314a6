"""Slots of the decode step: which row is in which slot, and the fixed device buffers of all slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.engine.sequence_state import INVALID_TOKEN_ID, SAMPLING_FIELDS, Int32Array, SequenceState
from rose_backend.kernels import SamplingTensors, advance_rows
from rose_backend.kernels.captured_graphs import Fields, Inputs, SizedGraphs

Int64Array = NDArray[np.int64]
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class SlotChange:
    """What has to be written to the device before the next step."""

    slots: Int64Array  # [N]
    rows: Int32Array  # [N], the new row of each slot
    old_slots: Int64Array  # [N], the row's slot until now, or NO_SLOT
    emptied: Int64Array  # [P], slots without a row that the device still computes


class DecodeSlots:
    """Keeps the rows of a decode step in the first few slots.

    A step runs over as many slots as a captured graph has: a row moves only when its slot is beyond a smaller graph's.

    Args:
        state: completion of each row.
    """

    def __init__(self, state: SequenceState) -> None:
        num_rows = len(state.num_tokens)
        self._state = state
        self.row_of_slot: Int64Array = np.full(num_rows, NO_SLOT, np.int64)
        self._slot_of_row: Int64Array = np.full(num_rows, NO_SLOT, np.int64)
        self._generation_of_slot: Int64Array = np.zeros(num_rows, np.int64)
        self._is_active: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # as the device sees it
        self._num_held = 0

    def rows(self) -> Int64Array:
        """Return the rows that are in a slot and have not left since."""
        slots = np.flatnonzero(self.row_of_slot >= 0)
        rows: Int64Array = self.row_of_slot[slots]
        return rows[self._generation_of_slot[slots] == self._state.generation[rows]]

    def slots_of(self, rows: NDArray[np.signedinteger]) -> Int64Array:
        """Return each row's slot, ``NO_SLOT`` for a row that has none."""
        slots = self._slot_of_row[rows]
        is_stale = self._generation_of_slot[slots] != self._state.generation[rows]
        slots[is_stale] = NO_SLOT
        return slots

    def assign(self, rows: Int32Array, width: int) -> tuple[Int64Array, SlotChange | None]:
        """Put exactly ``rows`` into slots below ``width``.

        Returns:
            ``[N]`` the slot of each row, and what has changed; None where nothing has.
        """
        old_slots = self.slots_of(rows)
        stays = (old_slots >= 0) & (old_slots < width)
        if len(rows) == self._num_held and stays.all():
            return old_slots, None
        row_of_slot = np.full_like(self.row_of_slot, NO_SLOT)
        row_of_slot[old_slots[stays]] = rows[stays]
        comes = np.flatnonzero(~stays)
        slots = old_slots.copy()
        slots[comes] = np.flatnonzero(row_of_slot[:width] < 0)[: len(comes)]
        row_of_slot[slots[comes]] = rows[comes]
        self.row_of_slot = row_of_slot
        self._slot_of_row[:] = NO_SLOT
        self._slot_of_row[rows] = slots
        self._generation_of_slot[slots] = self._state.generation[rows]
        self._num_held = len(rows)
        emptied = np.flatnonzero(self._is_active & (row_of_slot < 0))
        self._is_active[emptied] = False
        self._is_active[slots] = True
        return slots, SlotChange(slots[comes], rows[comes], old_slots[comes], emptied)


HISTORY_STEPS = 8
"""Steps whose tokens are kept for the host; more than can be in flight."""

_CHANGE_SIZES = (8, 32, 128)


def sampling_by_name(words: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the rows of ``words``, int32 ``[len(SAMPLING_FIELDS), R]``, as fields of ``SamplingTensors``."""
    rows = zip(SAMPLING_FIELDS, words.unbind(0), strict=True)
    return {name: row if name == "top_k" else row.view(torch.float32) for name, row in rows}


def sampling_of_rows(words: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return ``words``, int32 ``[R, len(SAMPLING_FIELDS)]``, as fields of ``SamplingTensors``.

    Each starts at a multiple of 16 bytes, whatever R is: Triton compiles a kernel once for pointers that do, and once
    more for every other pattern among its arguments.
    """
    num_rows, num_fields = words.shape
    columns = words.new_empty((num_fields, -(-num_rows // 4) * 4))[:, :num_rows]
    return sampling_by_name(columns.copy_(words.t()))


class DecodeBuffers:
    """What a decode step reads and writes, one entry per slot.

    A slot without a row has ``num_computed_tokens`` -1: nothing is read or written for it, and its draw is ignored.

    Args:
        num_slots: S.
        table_width: blocks per sequence (MB).
    """

    def __init__(self, num_slots: int, table_width: int, device: torch.device) -> None:
        self.device = device
        self.tokens = torch.zeros((2, num_slots), dtype=torch.int64, device=device)
        self.input_ids, self.first_tokens = self.tokens.unbind(0)
        """The next step's input; and the tokens drawn last by a step over prompts, in that step's order."""
        self._longs = torch.zeros((3, num_slots), dtype=torch.int64, device=device)
        self.positions, self.draw_positions, self.seeds = self._longs.unbind(0)
        self._words = torch.zeros((1 + len(SAMPLING_FIELDS), num_slots), dtype=torch.int32, device=device)
        self.num_computed_tokens = self._words[0]
        self._sampling = sampling_by_name(self._words[1:])
        self.block_table = torch.zeros((num_slots, table_width), dtype=torch.int32, device=device)
        self.history = torch.zeros(
            (HISTORY_STEPS, num_slots), dtype=torch.int64, pin_memory=device.type != "cpu"
        )
        """``[HISTORY_STEPS, S]`` in host memory: the tokens of step ``n`` are in row ``n % HISTORY_STEPS``."""
        self.step_index = torch.zeros(1, dtype=torch.int64, device=device)
        self.reset()
        sizes = (*(size for size in _CHANGE_SIZES if size < num_slots), num_slots)
        row_fields: Fields = {
            "slots": (np.int64, ()),
            "sources": (np.int64, ()),
            "longs": (np.int64, (4,)),
            "words": (np.int32, (len(self._words),)),
        }
        table_fields: Fields = {"slots": (np.int64, ()), "tables": (np.int32, (table_width,))}
        self._row_changes = SizedGraphs(self._change_rows, row_fields, sizes, device)
        self._table_changes = SizedGraphs(self._change_tables, table_fields, sizes, device)

    def capture(self) -> None:
        """Capture what ``write_rows`` and ``write_block_tables`` do. The buffers must be reset afterwards."""
        self._row_changes.capture()
        self._table_changes.capture()

    def reset(self) -> None:
        """Empty all slots and count steps from 0."""
        self.tokens.zero_()
        self._longs.zero_()
        self._words.zero_()
        self.num_computed_tokens.fill_(-1)
        self.step_index.zero_()

    def sampling(self, width: int) -> SamplingTensors:
        """Return the parameters of the first ``width`` slots' draws."""
        return SamplingTensors(
            seed=self.seeds[:width],
            position=self.draw_positions[:width],
            num_logprobs=-1,
            invalid_token_id=INVALID_TOKEN_ID,
            **{name: values[:width] for name, values in self._sampling.items()},
        )

    def advance(self, token_ids: torch.Tensor) -> None:
        """End a step that drew ``token_ids``, int64 ``[width]``."""
        width = len(token_ids)
        advance_rows(
            token_ids,
            self.input_ids[:width],
            self.num_computed_tokens[:width],
            self.positions[:width],
            self.draw_positions[:width],
            self.history,
            self.step_index,
        )

    def write_rows(
        self,
        slots: NDArray[np.int64],
        state: SequenceState,
        rows: NDArray[np.signedinteger[Any]],
        sources: NDArray[np.int64],
    ) -> None:
        """Put ``rows`` into ``slots``; entries past ``len(rows)`` of ``slots`` become empty.

        Args:
            slots: ``[N]``.
            rows: ``[n]``, at most N.
            sources: ``[N]``: where in ``tokens``, read as one list, the row's newest token is; negative where the
                host knows it.
        """
        num_rows, num_slots = len(rows), len(slots)
        words = np.zeros((num_slots, 1 + len(SAMPLING_FIELDS)), np.int32)
        words[:, 0] = -1
        longs = np.zeros((num_slots, 4), np.int64)
        position = state.num_planned_tokens(rows) - 1
        words[:num_rows, 0] = position
        words[:num_rows, 1:] = state.sampling_words[rows]
        longs[:num_rows, 0] = state.token_ids[rows, state.num_tokens[rows] - 1]
        longs[:num_rows, 1] = position
        longs[:num_rows, 2] = position + 1
        longs[:num_rows, 3] = state.seed[rows]
        self._row_changes.run(slots=slots, sources=sources, longs=longs, words=words)

    def write_block_tables(self, slots: NDArray[np.int64], block_tables: NDArray[np.int32]) -> None:
        """Write the block tables ``[N, MB]`` of ``slots``, ``[N]``."""
        self._table_changes.run(slots=slots, tables=block_tables)

    def _change_rows(self, inputs: Inputs) -> None:
        slots, sources, longs = inputs["slots"], inputs["sources"], inputs["longs"].t()
        known = self.tokens.view(-1)[sources.clamp(min=0)]
        self.input_ids.index_copy_(0, slots, torch.where(sources >= 0, known, longs[0]))
        self._longs.index_copy_(1, slots, longs[1:])
        self._words.index_copy_(1, slots, inputs["words"].t())

    def _change_tables(self, inputs: Inputs) -> None:
        self.block_table.index_copy_(0, inputs["slots"], inputs["tables"])
