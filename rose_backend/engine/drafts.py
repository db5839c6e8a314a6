"""Drafts of decode steps: tokens that may come next, which a step verifies beside the newest one.

A request with ``N`` drafts computes ``N + 1`` tokens in a step, and each of them draws what follows it, with the noise
that this place in its text has in any step. Drafts that equal what was drawn in their place are accepted, and the token
drawn after them is its newest one: so a text does not depend on drafts. What was computed of other drafts does not
count, and later steps store over it. All of that happens on the device, which knows how far each request is; the host
learns it when it reads the tokens.

A step over requests with sampling extras or a grammar has no drafts: what their draws need is known for one place only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.config import SpeculativeConfig
from rose_backend.engine.sequence_state import SequenceState
from rose_backend.kernels.arguments import DraftedRows
from rose_backend.kernels.captured_graphs import upload
from rose_backend.kernels.decode_step.ops import accept_drafts, look_up_drafts

MAX_VERIFIED_TOKENS = 512
"""Of a step with drafts; with more requests it has none. Their logits take as much memory as those of a captured step
of as many requests, and with so many a step without drafts uses the GPU's arithmetic as well."""

Slots = NDArray[np.signedinteger[Any]]


def max_drafted_rows(num_drafts: int) -> int:
    """Return how many requests a step takes that have so many drafts each."""
    return MAX_VERIFIED_TOKENS // (num_drafts + 1)


class DraftedInputs(NamedTuple):
    """Inputs of a step with drafts, row by row: each row's newest token, and its drafts after it."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [R + 1] int32


class Drafts:
    """The tokens of all requests on the device, in fixed tensors, and what is looked up in them.

    Args:
        propose: returns what may follow the tokens of rows, int64 ``[R, num_drafts]``; negative for nothing. It must
            not wait for the device. None: looks up n-grams as ``config`` says.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        state: SequenceState,
        device: torch.device,
        propose: Callable[[DraftedRows], torch.Tensor] | None = None,
    ) -> None:
        self.num_drafts = config.num_speculative_tokens
        self.propose = propose or self._look_up
        self._config = config
        self._state = state
        self._device = device
        num_slots, max_model_len = state.token_ids.shape
        # The last one is that of rows without a request.
        self._token_ids = torch.zeros((num_slots + 1, max_model_len), dtype=torch.int32, device=device)
        self._slots = torch.full((num_slots,), num_slots, dtype=torch.int64, device=device)
        self._known_generation: NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        query_len = self.num_drafts + 1
        starts = np.arange(0, (num_slots + 1) * query_len, query_len, dtype=np.int32)
        self._offsets, self._starts = upload(device, np.arange(query_len), starts)

    def write_rows(self, rows: NDArray[np.int64], slots: Slots) -> None:
        """Note that ``slots`` are in ``rows``, int64 ``[N]``; rows past ``len(slots)`` become empty."""
        state, of_rows = self._state, np.full(len(rows), len(self._slots), np.int64)
        of_rows[: len(slots)] = slots
        to, new_slots = upload(self._device, rows, of_rows)
        self._slots.index_copy_(0, to, new_slots)
        # What the host does not know yet is in the rows, or gets there.
        for slot in slots[self._known_generation[slots] != state.generation[slots]].tolist():
            (known,) = upload(self._device, state.token_ids[slot, : state.num_tokens[slot]].copy())
            self._token_ids[slot, : len(known)].copy_(known)
        self._known_generation[slots] = state.generation[slots]

    def rows_of(self, buffers: Any, width: int) -> DraftedRows:
        """Return the first ``width`` rows of ``DecodeBuffers``, whose newest tokens may be anywhere but there."""
        rows = DraftedRows(
            self._slots,
            self._token_ids,
            buffers.input_ids,
            buffers.num_computed_tokens,
            buffers.positions,
            buffers.draw_positions,
        ).first(width)
        # It may have been drawn after a prompt, or again.
        self._token_ids.index_put_((rows.slots, rows.positions), rows.input_ids.int())
        return rows

    def inputs(self, rows: DraftedRows, drafts: torch.Tensor) -> DraftedInputs:
        """Return what a step reads that verifies ``drafts``, int64 ``[R, num_drafts]``.

        Drafts past the longest request's length have the last position, and nobody needs what is drawn after them.
        """
        ids = torch.cat([rows.input_ids[:, None], drafts], 1)
        positions = (rows.positions[:, None] + self._offsets).clamp(max=self._token_ids.shape[1] - 1)
        return DraftedInputs(ids.flatten(), positions.flatten(), self._starts[: len(drafts) + 1])

    def accept(self, drawn: torch.Tensor, drafts: torch.Tensor, rows: DraftedRows, buffers: Any) -> None:
        """End a step in ``rows`` of ``buffers`` that drew ``drawn``, int64 ``[R * (1 + drafts of a row)]``."""
        accept_drafts(drawn.view(len(rows.slots), -1), drafts, rows, buffers.history, buffers.step_index)

    def none_for(self, rows: DraftedRows) -> torch.Tensor:
        """Return the drafts of a step that has none."""
        return rows.input_ids.new_empty((len(rows.slots), 0))

    def _look_up(self, rows: DraftedRows) -> torch.Tensor:
        config = self._config
        assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None
        return look_up_drafts(
            rows,
            num_drafts=self.num_drafts,
            min_n=config.prompt_lookup_min,
            max_n=config.prompt_lookup_max,
        )
