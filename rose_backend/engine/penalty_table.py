"""Which tokens each row has seen, on the device, for those rows alone whose requests penalise repetition."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.engine.row_state import RowState


class PenaltyTable:
    """A prompt mask and output counts over the vocabulary for each row that uses penalties.

    Slots are handed out on demand and then stay with their row; slot 0 stays empty and stands for every row without
    penalties, so that a mixed batch is one gather. While no row uses penalties nothing is allocated or gathered.

    Args:
        state: says who holds a row and what it has seen.
        vocab_size: columns.
    """

    def __init__(self, state: RowState, vocab_size: int, device: torch.device) -> None:
        num_rows = len(state.num_tokens)
        self._state = state
        self._device = device
        self._slot_of_row: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._counted_generation: NDArray[np.int64] = np.full(num_rows, -1, np.int64)
        self._num_slots = 1
        self._prompt_mask = torch.zeros((1, vocab_size), dtype=torch.bool, device=device)
        self._output_counts = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)

    def gather(self, rows: NDArray[np.int32]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the prompt mask (bool ``[S, V]``) and output counts (int32 ``[S, V]``); None where no row counts."""
        slots = self._slots(rows)
        if slots is None:
            return None, None
        index = torch.from_numpy(slots).to(self._device)
        return self._prompt_mask[index], self._output_counts[index]

    def record(self, rows: NDArray[np.int32], token_ids: torch.Tensor) -> None:
        """Count one new token ``token_ids[i]`` (int64 ``[S]``, on the device) for each of ``rows`` that is counted.

        Call it before the token stands in the row's own buffer.
        """
        slots = self._slots(rows)
        if slots is None:
            return
        counted = np.flatnonzero(slots)
        index = torch.from_numpy(counted).to(self._device)
        counted_slots = torch.from_numpy(slots[counted]).to(self._device)
        self._output_counts[counted_slots, token_ids[index]] += 1

    def _slots(self, rows: NDArray[np.int32]) -> NDArray[np.int64] | None:
        uses_penalties = self._state.uses_penalties[rows]
        if not uses_penalties.any():
            return None
        is_stale = uses_penalties & (self._counted_generation[rows] != self._state.generation[rows])
        for row in rows[is_stale].tolist():
            self._count(row)
        return np.where(uses_penalties, self._slot_of_row[rows], 0)

    def _count(self, row: int) -> None:
        if not self._slot_of_row[row]:
            self._slot_of_row[row] = self._take_slot()
        slot = int(self._slot_of_row[row])
        num_prompt_tokens = int(self._state.num_prompt_tokens[row])
        known = self._state.token_ids[row, : self._state.num_tokens[row]].astype(np.int64)
        tokens = torch.from_numpy(known).to(self._device)
        counts = torch.bincount(tokens[num_prompt_tokens:], minlength=self._output_counts.shape[1])
        self._output_counts[slot] = counts.to(torch.int32)
        self._prompt_mask[slot] = False
        self._prompt_mask[slot, tokens[:num_prompt_tokens]] = True
        self._counted_generation[row] = self._state.generation[row]

    def _take_slot(self) -> int:
        slot = self._num_slots
        self._num_slots += 1
        if slot == len(self._prompt_mask):
            self._prompt_mask = torch.cat([self._prompt_mask, torch.zeros_like(self._prompt_mask)])
            self._output_counts = torch.cat([self._output_counts, torch.zeros_like(self._output_counts)])
        return slot
