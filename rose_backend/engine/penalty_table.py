"""Which tokens each row has seen, on the device, where the draws of every kind of step find and count them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.engine.row_state import RowState
from rose_backend.engine.staging import upload


class PenaltyTable:
    """A prompt mask and output counts over the vocabulary for each row; used by rows with penalties only.

    The host writes a row's entry when the row is about to draw for the first time. From then on the device counts what
    it draws, so no step waits for the tokens of an earlier one.

    Memory: 5 bytes per row and token of the vocabulary, allocated at the start, because captured graphs refer to it.

    Args:
        state: says who holds a row and what it has seen.
        vocab_size: columns (V).
    """

    def __init__(self, state: RowState, vocab_size: int, device: torch.device) -> None:
        num_rows = len(state.num_tokens)
        self._state = state
        self._device = device
        self._counted_generation: NDArray[np.int64] = np.full(num_rows, -1, np.int64)
        self._prompt_mask = torch.zeros((num_rows, vocab_size), dtype=torch.bool, device=device)
        self._output_counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)

    def admit(self, rows: NDArray[np.signedinteger]) -> None:
        """Write the entries of those of ``rows`` that use penalties and have drawn nothing since they were filled."""
        state = self._state
        is_new = state.uses_penalties[rows] & (self._counted_generation[rows] != state.generation[rows])
        for row in rows[is_new].tolist():
            known = state.token_ids[row, : state.num_tokens[row]].astype(np.int64)
            (tokens,) = upload(self._device, known)
            prompt, output = tokens.tensor_split([int(state.num_prompt_tokens[row])])
            self._prompt_mask[row].zero_().index_fill_(0, prompt, True)
            self._output_counts[row].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
            self._counted_generation[row] = state.generation[row]

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return prompt mask (bool ``[S, V]``) and output counts (int32 ``[S, V]``) of ``rows``, int64 ``[S]``."""
        return self._prompt_mask.index_select(0, rows), self._output_counts.index_select(0, rows)

    def count(self, rows: torch.Tensor, token_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Add ``weights`` (int32 ``[S]``, 0 or 1) to the output counts of ``token_ids`` (int64 ``[S]``)."""
        counts = self._output_counts
        counts.view(-1).scatter_add_(0, rows * counts.shape[1] + token_ids, weights)
