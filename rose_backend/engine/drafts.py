"""Drafts of decode steps: tokens that may come next, which a step verifies beside the newest one.

A request with ``N`` drafts computes ``N + 1`` tokens in a step, and each of them draws what follows it, with the noise
that this place in its text has in any step. Drafts that equal what was drawn in their place are accepted, and the token
drawn after them is its newest one: so a text does not depend on drafts. What was computed of other drafts does not
count, and later steps store over it. All of that happens on the device, which knows how far each request is; the host
learns it when it reads the tokens.

A step over requests with sampling extras or a grammar has no drafts: what their draws need is known for one place only.
Other steps have none, either, while they are faster that way (``AdaptiveDrafts``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.config import SpeculativeConfig
from rose_backend.draft_depth import DraftDepth, ShadowDrafts
from rose_backend.engine.sequence_state import SequenceState
from rose_backend.kernels.arguments import DraftedRows
from rose_backend.kernels.captured_graphs import upload
from rose_backend.kernels.decode_step.ops import accept_drafts, look_up_drafts

logger = logging.getLogger(__name__)

MAX_VERIFIED_TOKENS = 512
"""Tokens that a step with drafts computes at most; steps of more requests have no drafts. Their logits fill the memory
that those of 512 requests without drafts fill."""

Slots = NDArray[np.signedinteger[Any]]
_LOG_INTERVAL_S = 10.0


def max_drafted_rows(num_drafts: int) -> int:
    """Return how many requests a step with ``num_drafts`` for each of them takes."""
    return MAX_VERIFIED_TOKENS // (num_drafts + 1)


class DraftedInputs(NamedTuple):
    """Inputs of a step with drafts, row by row: each row's newest token, and its drafts after it."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [R + 1] int32


class Drafts:
    """The tokens of all requests on the device, in fixed tensors, and what is looked up in them.

    Args:
        is_adaptive: ``EngineConfig.adaptive_drafts``.

    Attributes:
        propose: returns what may follow the tokens of rows, int64 ``[R, num_drafts]``; negative for nothing. It must
            not wait for the device.
        adaptive: None: all steps have drafts that can.
    """

    def __init__(
        self, config: SpeculativeConfig, state: SequenceState, device: torch.device, *, is_adaptive: bool
    ) -> None:
        self.num_drafts = config.num_speculative_tokens
        self.adaptive = AdaptiveDrafts(config, state) if is_adaptive else None
        self.propose: Callable[[DraftedRows], torch.Tensor] = self._look_up
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

    def accept(
        self,
        drawn: torch.Tensor,
        drafts: torch.Tensor,
        rows: DraftedRows,
        buffers: Any,
        features: torch.Tensor | None,
    ) -> None:
        """End a step in ``rows`` of ``buffers``.

        Args:
            drawn: int64 ``[R * (1 + drafts of a row)]``.
            features: of its tokens, see ``HeadDrafts``; None where no head reads them.
        """
        accept_drafts(drawn.view(len(rows.slots), -1), drafts, rows, buffers.history, buffers.step_index)

    def propose_none(self, rows: DraftedRows) -> torch.Tensor:
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


class AdaptiveDrafts:
    """Chooses for each step whether it has drafts, by what steps of either kind give and how long they take.

    Times are those between two steps that are read one after the other, so they have the host's work in them.
    """

    def __init__(self, config: SpeculativeConfig, state: SequenceState) -> None:
        self.num_drafts = config.num_speculative_tokens
        self._state = state
        self._depth = DraftDepth(self.num_drafts)
        # Of a request slot and its generation, as one number. What a head would draft is not known without it.
        self._shadow: ShadowDrafts[int] | None = None
        if config.prompt_lookup_min is not None and config.prompt_lookup_max is not None:
            self._shadow = ShadowDrafts[int](
                self.num_drafts, config.prompt_lookup_min, config.prompt_lookup_max, self._tokens_of
            )
        self._chosen = self.num_drafts
        self._last_read: tuple[int, float] | None = None
        self._logged_s = -_LOG_INTERVAL_S

    def choose(self, num_requests: int) -> int:
        """Return how many drafts each of ``num_requests`` that run is to have in the step that starts next."""
        chosen = self._depth.choose(num_requests)
        if chosen != self._chosen:
            self._chosen, now = chosen, time.monotonic()
            if now - self._logged_s >= _LOG_INTERVAL_S:
                self._logged_s = now
                logger.info("adaptive drafts: %d for each request from now on; %s", chosen, self._depth)
        return chosen

    def note_step(self, num_drafts: int, num_requests: int) -> None:
        """Note that a step was read in which ``num_requests`` decoded, with ``num_drafts`` each, and nothing else."""
        now = time.perf_counter()
        if self._last_read is not None and self._last_read[0] == num_drafts:
            self._depth.note_time(num_drafts, num_requests, now - self._last_read[1])
        self._last_read = num_drafts, now

    def note_other_step(self) -> None:
        """Note that any other step was read, or that there is nothing to do: the next one's time is not known."""
        self._last_read = None

    def note_accepted(self, num_accepted: float) -> None:
        """Note how many drafts of a request a step has accepted; a mean of requests."""
        self._depth.note_accepted(num_accepted)

    def look(self, slots: Slots) -> None:
        """Look after a step without drafts, over ``slots``, which of those would have been right that it could have.

        Of a head's nothing is known then: what was accepted before counts until drafts are tried again.
        """
        if self._shadow is None:
            return
        generation = self._state.generation
        requests: list[int] = (generation[slots] * len(generation) + slots).tolist()
        if (num_right := self._shadow.look(requests)) is not None:
            self._depth.note_accepted(num_right)

    def _tokens_of(self, request: int) -> NDArray[np.int32] | None:
        generation, slot = divmod(request, len(self._state.generation))
        if self._state.generation[slot] != generation:
            return None
        return self._state.token_ids[slot, : self._state.num_tokens[slot]]
