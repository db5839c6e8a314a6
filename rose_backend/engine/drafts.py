"""Drafts of decode steps: likely next tokens, which a step verifies together with the newest token.

A request with ``N`` drafts computes ``N + 1`` tokens in a step. For each of them the next token is drawn, with the
random bits of its position, which do not depend on the step. Drafts that equal the drawn tokens are accepted, and the
token drawn after the last accepted one becomes the newest, so drafts do not change a text. The K/V of rejected drafts
is overwritten by later steps. All of this happens on the device, which knows how far each request is; the CPU learns it
when it reads the tokens.

Steps over requests with sampling extras or a grammar have no drafts, because what their draws need is known for one
position only. Other steps have as many as are fastest (``AdaptiveDrafts``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.config import SpeculativeConfig
from rose_backend.draft_depth import DraftDepth, ShadowDrafts, draft_depths
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
        depths: numbers of drafts that a step may have, rising, without 0.
        propose: given rows and one of ``depths``, returns the rows' drafts, int64 ``[R, depth]``, negative where there
            is none. It must not wait for the device.
        adaptive: chooses how many drafts steps have; None: all in every step that can have them.
    """

    def __init__(
        self, config: SpeculativeConfig, state: SequenceState, device: torch.device, *, is_adaptive: bool
    ) -> None:
        num_drafts = config.num_speculative_tokens
        self.depths = draft_depths(num_drafts)[1:] if is_adaptive else (num_drafts,)
        self.adaptive = AdaptiveDrafts(config, state) if is_adaptive else None
        self.propose: Callable[[DraftedRows, int], torch.Tensor] = self._look_up
        self._config = config
        self._state = state
        self._device = device
        num_slots, max_model_len = state.token_ids.shape
        # The last row is for rows of the batch without a request.
        self._token_ids = torch.zeros((num_slots + 1, max_model_len), dtype=torch.int32, device=device)
        self._slots = torch.full((num_slots,), num_slots, dtype=torch.int64, device=device)
        self._known_generation: NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        rows = np.arange(num_slots + 1, dtype=np.int32)
        self._offsets, *starts = upload(
            device, np.arange(num_drafts + 1), *(rows * (depth + 1) for depth in self.depths)
        )
        self._starts = dict(zip(self.depths, starts, strict=True))

    def write_rows(self, rows: NDArray[np.int64], slots: Slots) -> None:
        """Note that ``slots`` are in ``rows``, int64 ``[N]``; rows past ``len(slots)`` become empty."""
        state, of_rows = self._state, np.full(len(rows), len(self._slots), np.int64)
        of_rows[: len(slots)] = slots
        to, new_slots = upload(self._device, rows, of_rows)
        self._slots.index_copy_(0, to, new_slots)
        # Upload the known tokens of new requests. Tokens that the CPU has not read yet are appended on the device.
        for slot in slots[self._known_generation[slots] != state.generation[slots]].tolist():
            (known,) = upload(self._device, state.token_ids[slot, : state.num_tokens[slot]].copy())
            self._token_ids[slot, : len(known)].copy_(known)
        self._known_generation[slots] = state.generation[slots]

    def rows_of(self, buffers: Any, width: int) -> DraftedRows:
        """Return the first ``width`` rows of ``DecodeBuffers``, and append each row's newest token to its request's."""
        rows = DraftedRows(
            self._slots,
            self._token_ids,
            buffers.input_ids,
            buffers.num_computed_tokens,
            buffers.positions,
            buffers.draw_positions,
        ).first(width)
        # A prompt's pass, or sampling extras that draw again, write the newest token to ``buffers`` only.
        self._token_ids.index_put_((rows.slots, rows.positions), rows.input_ids.int())
        return rows

    def inputs(self, rows: DraftedRows, drafts: torch.Tensor) -> DraftedInputs:
        """Return the inputs of a step that verifies ``drafts``, int64 ``[R, depth]``.

        Drafts past ``max_model_len`` get the last position; the tokens drawn after them are dropped.
        """
        ids = torch.cat([rows.input_ids[:, None], drafts], 1)
        num_rows, depth = drafts.shape
        positions = rows.positions[:, None] + self._offsets[: depth + 1]
        positions = positions.clamp(max=self._token_ids.shape[1] - 1)
        return DraftedInputs(ids.flatten(), positions.flatten(), self._starts[depth][: num_rows + 1])

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

    def _look_up(self, rows: DraftedRows, depth: int) -> torch.Tensor:
        config = self._config
        assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None
        return look_up_drafts(
            rows,
            num_drafts=depth,
            min_n=config.prompt_lookup_min,
            max_n=config.prompt_lookup_max,
        )


class AdaptiveDrafts:
    """Chooses for each step how many drafts it has, by what steps with more or fewer give and how long they take.

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

    def note_accepted(self, shares: Sequence[float]) -> None:
        """Note of each draft in what share of requests a step has accepted it."""
        self._depth.note_accepted(shares)

    def look(self, slots: Slots) -> None:
        """After a step without drafts over ``slots``, note which n-gram drafts would have been accepted.

        Does nothing with a head: its earlier acceptance counts until the next trial.
        """
        if self._shadow is None:
            return
        generation = self._state.generation
        requests: list[int] = (generation[slots] * len(generation) + slots).tolist()
        if (are_right := self._shadow.look(requests)) is not None:
            self._depth.note_accepted(are_right)

    def _tokens_of(self, request: int) -> NDArray[np.int32] | None:
        generation, slot = divmod(request, len(self._state.generation))
        if self._state.generation[slot] != generation:
            return None
        return self._state.token_ids[slot, : self._state.num_tokens[slot]]
