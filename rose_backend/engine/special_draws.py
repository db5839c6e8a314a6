"""Draws that need more than logits and a few numbers of their row: penalties, ``min_tokens``, log-probabilities.

A decode step draws for every slot as if nobody asked for any of that. Where somebody does, a second part follows that
draws again from the same logits with everything asked for, and puts these tokens in the place of the first ones. So
steps without such rows pay nothing, and steps with them are started just as early and read just as late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.config import MAX_LOGPROBS
from rose_backend.engine.decode_buffers import HISTORY_STEPS, DecodeBuffers
from rose_backend.engine.logprobs import num_words, pack_logprobs
from rose_backend.engine.penalty_table import PenaltyTable
from rose_backend.engine.row_state import Int32Array, RowState
from rose_backend.engine.staging import upload
from rose_backend.kernels import SampleOutput, SamplingTensors

Sample = Callable[[torch.Tensor, SamplingTensors], SampleOutput]
Rows = NDArray[np.signedinteger[Any]]


class SpecialDraws:
    """What special rows need on the device, in fixed tensors: captured graphs hold their addresses.

    Args:
        sample: chooses tokens, as ``rose_backend.kernels.sample``.
        vocab_size: V.
    """

    def __init__(self, state: RowState, sample: Sample, vocab_size: int, device: torch.device) -> None:
        num_slots, num_banned = state.banned_token_ids.shape
        self._state = state
        self._sample = sample
        self._device = device
        self._penalties = PenaltyTable(state, vocab_size, device)
        self._num_logprobs = min(MAX_LOGPROBS, vocab_size)
        self._words = torch.zeros((4, num_slots), dtype=torch.int32, device=device)
        self._rows, self._min_num_tokens, self._is_special, self._uses_penalties = self._words.unbind(0)
        self._banned_token_ids = torch.full((num_slots, num_banned), -1, dtype=torch.int32, device=device)
        self._minus_infinity = torch.full((num_slots, num_banned), float("-inf"), device=device)
        width = num_words(self._num_logprobs)
        self._report = torch.zeros((num_slots, width), device=device)
        self._reports = torch.zeros((HISTORY_STEPS, num_slots, width), pin_memory=device.type != "cpu")
        self._reports_read = self._reports.numpy()
        self._holds_special: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)

    def is_needed(self, rows: Rows) -> bool:
        """Whether a step over ``rows`` has to draw again."""
        state = self._state
        if not np.count_nonzero(state.is_special[rows]):
            return False
        is_early = state.num_planned_tokens(rows) < state.min_num_tokens[rows]
        needs = is_early | state.uses_penalties[rows] | (state.num_logprobs[rows] >= 0)
        return bool(np.count_nonzero(needs & state.is_special[rows]))

    def write_rows(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Note that ``rows`` come into ``slots``, int64 ``[N]``; slots past ``len(rows)`` become empty."""
        state, num_rows = self._state, len(rows)
        is_special = state.is_special[rows]
        if not (np.count_nonzero(is_special) or np.count_nonzero(self._holds_special[slots])):
            return
        self._penalties.admit(rows)
        self._holds_special[slots] = False
        self._holds_special[slots[:num_rows]] = is_special
        words = np.zeros((4, len(slots)), np.int32)
        words[:, :num_rows] = rows, state.min_num_tokens[rows], is_special, state.uses_penalties[rows]
        banned = np.full((len(slots), state.banned_token_ids.shape[1]), -1, np.int32)
        banned[:num_rows] = state.banned_token_ids[rows]
        to, new_words, new_banned = upload(self._device, slots, words, banned)
        self._words.index_copy_(1, to, new_words)
        self._banned_token_ids.index_copy_(0, to, new_banned)

    def redraw(self, buffers: DecodeBuffers, logits: torch.Tensor) -> None:
        """Draw again from ``logits``, float32 ``[width, V]``, behind a step that has drawn from them and moved on."""
        width = len(logits)
        rows = self._rows[:width].to(torch.int64)
        position = buffers.draw_positions[:width] - 1
        is_early = position < self._min_num_tokens[:width]
        banned = self._banned_token_ids[:width].where(is_early[:, None], -1)
        params = buffers.sampling(width)
        drawn = self._draw(logits, params, position, rows, banned)
        token_ids = drawn.token_ids.where(self._is_special[:width] != 0, buffers.input_ids[:width])
        buffers.input_ids[:width].copy_(token_ids)
        self._penalties.count(rows, token_ids, self._uses_penalties[:width])
        self._report[:width].copy_(pack_logprobs(logits, drawn))

    def collect(self, buffers: DecodeBuffers, step: int, width: int) -> None:
        """Send the outcome of ``redraw`` to the host; it is there when what was enqueued so far has run."""
        where = step % HISTORY_STEPS
        buffers.history[where, :width].copy_(buffers.input_ids[:width], non_blocking=True)
        self._reports[where, :width].copy_(self._report[:width], non_blocking=True)

    def report(self, step: int, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return what a step reported, ``[len(slots), num_words]``; see ``StepLogprobs``. The caller has waited."""
        report: NDArray[np.float32] = self._reports_read[step % HISTORY_STEPS][slots]
        return report

    def draw(self, logits: torch.Tensor, params: SamplingTensors, rows: Int32Array) -> SampleOutput:
        """Draw the next token of each of ``rows`` from ``logits``, float32 ``[S, V]``, outside a decode step."""
        state = self._state
        self._penalties.admit(rows)
        is_early = state.num_tokens[rows] < state.min_num_tokens[rows]
        banned = np.where(is_early[:, None], state.banned_token_ids[rows], np.int32(-1))
        weights = state.uses_penalties[rows].astype(np.int32)
        to, ids, counted = upload(self._device, rows.astype(np.int64), banned, weights)
        drawn = self._draw(logits, params, params.position, to, ids)
        self._penalties.count(to, drawn.token_ids, counted)
        return drawn

    def _draw(
        self,
        logits: torch.Tensor,
        params: SamplingTensors,
        position: torch.Tensor,
        rows: torch.Tensor,
        banned: torch.Tensor,
    ) -> SampleOutput:
        prompt_mask, output_counts = self._penalties.gather(rows)
        extras = {"prompt_mask": prompt_mask, "output_counts": output_counts, "bias_token_ids": banned}
        bias = self._minus_infinity[: len(logits)]
        return self._sample(
            logits,
            replace(params, position=position, bias=bias, num_logprobs=self._num_logprobs, **extras),
        )
