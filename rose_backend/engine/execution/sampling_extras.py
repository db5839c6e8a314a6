"""Draws that need more than logits and a few numbers of their row: penalties, ``min_tokens``, log-probabilities.

A decode step draws for every slot without any of these. Where a row needs one, a second part draws again from the same
logits and replaces the tokens of such rows. Other steps pay nothing, and run-ahead is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.config import MAX_LOGPROBS
from rose_backend.engine.execution.decode_slots import HISTORY_STEPS, DecodeBuffers
from rose_backend.engine.output.logprobs import num_words, pack_logprobs
from rose_backend.engine.sequence_state import Int32Array, SequenceState
from rose_backend.kernels import SampleOutput, SamplingTensors
from rose_backend.kernels.captured_graphs import upload

Sample = Callable[[torch.Tensor, SamplingTensors], SampleOutput]
Rows = NDArray[np.signedinteger[Any]]


class SamplingExtras:
    """What rows with sampling extras need on the device, in fixed tensors: captured graphs hold their addresses.

    Args:
        sample: chooses tokens, as ``rose_backend.kernels.sample``.
        vocab_size: V.
    """

    def __init__(self, state: SequenceState, sample: Sample, vocab_size: int, device: torch.device) -> None:
        num_slots, num_banned = state.banned_token_ids.shape
        self._state = state
        self._sample = sample
        self._device = device
        self._penalties = PenaltyTable(state, vocab_size, device)
        self._num_logprobs = min(MAX_LOGPROBS, vocab_size)
        self._words = torch.zeros((4, num_slots), dtype=torch.int32, device=device)
        self._rows, self._min_num_tokens, self._needs_extras, self._uses_penalties = self._words.unbind(0)
        self._banned_token_ids = torch.full((num_slots, num_banned), -1, dtype=torch.int32, device=device)
        self._minus_infinity = torch.full((num_slots, num_banned), float("-inf"), device=device)
        width = num_words(self._num_logprobs)
        self._report = torch.zeros((num_slots, width), device=device)
        self._reports = torch.zeros((HISTORY_STEPS, num_slots, width), pin_memory=device.type != "cpu")
        self._reports_read = self._reports.numpy()
        self.is_in_use = False
        """Whether some slot has a row with sampling extras; if not, ``write_rows`` is needed for such rows only."""
        self._slot_needs_extras: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)

    def is_needed(self, rows: Rows) -> bool:
        """Whether a step over ``rows``, some of which may need it (``needs_sampling_extras``), has to draw again."""
        state = self._state
        is_short = state.num_planned_tokens(rows) < state.min_num_tokens[rows]
        needs = is_short | state.uses_penalties[rows] | (state.num_logprobs[rows] >= 0)
        return bool(np.count_nonzero(needs & state.needs_sampling_extras[rows]))

    def write_rows(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Write what ``rows`` need into ``slots``, int64 ``[N]``; slots past ``len(rows)`` become empty."""
        state, num_rows = self._state, len(rows)
        needs_sampling_extras = state.needs_sampling_extras[rows]
        self._penalties.admit(rows)
        self._slot_needs_extras[slots] = False
        self._slot_needs_extras[slots[:num_rows]] = needs_sampling_extras
        self.is_in_use = bool(np.count_nonzero(self._slot_needs_extras))
        words = np.zeros((4, len(slots)), np.int32)
        words[:, :num_rows] = (
            rows,
            state.min_num_tokens[rows],
            needs_sampling_extras,
            state.uses_penalties[rows],
        )
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
        is_short = position < self._min_num_tokens[:width]
        banned = self._banned_token_ids[:width].where(is_short[:, None], -1)
        params = buffers.sampling(width)
        drawn = self._draw(logits, params, position, rows, banned)
        token_ids = drawn.token_ids.where(self._needs_extras[:width] != 0, buffers.input_ids[:width])
        buffers.input_ids[:width].copy_(token_ids)
        self._penalties.count(rows, token_ids, self._uses_penalties[:width])
        self._report[:width].copy_(pack_logprobs(logits, drawn))

    def collect(self, buffers: DecodeBuffers, step: int, width: int) -> None:
        """Send the outcome of ``redraw`` to the host; it is there when what was enqueued so far has run."""
        where = step % HISTORY_STEPS
        buffers.history[where, :width].copy_(buffers.input_ids[:width], non_blocking=True)
        self._reports[where, :width].copy_(self._report[:width], non_blocking=True)

    def report(self, step: int, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return what a step reported, ``[len(slots), num_words]``; see ``LogprobWords``. The caller has waited."""
        report: NDArray[np.float32] = self._reports_read[step % HISTORY_STEPS][slots]
        return report

    def draw(self, logits: torch.Tensor, params: SamplingTensors, rows: Int32Array) -> SampleOutput:
        """Draw the next token of each of ``rows`` from ``logits``, float32 ``[S, V]``, outside a decode step."""
        state = self._state
        self._penalties.admit(rows)
        is_short = state.num_tokens[rows] < state.min_num_tokens[rows]
        banned = np.where(is_short[:, None], state.banned_token_ids[rows], np.int32(-1))
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
        extras: dict[str, Any] = {
            "prompt_mask": prompt_mask,
            "output_counts": output_counts,
            "bias_token_ids": banned,
        }
        bias = self._minus_infinity[: len(logits)]
        return self._sample(
            logits,
            replace(params, position=position, bias=bias, num_logprobs=self._num_logprobs, **extras),
        )


class PenaltyTable:
    """A prompt mask and output counts over the vocabulary for each row; used by rows with penalties only.

    The host writes a row's entry before its first draw; then the device counts what it draws, without the host.
    Memory: 5 bytes per row and token of the vocabulary, allocated at the start, because captured graphs refer to it.

    Args:
        state: completion and tokens of each row.
        vocab_size: columns (V).
    """

    def __init__(self, state: SequenceState, vocab_size: int, device: torch.device) -> None:
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
        """Add ``weights`` (int32 ``[S]``, 0 or 1) to the output counts of ``token_ids`` (int64 ``[S]``).

        ``INVALID_TOKEN_ID`` counts as token 0: such a row ends.
        """
        counts = self._output_counts
        counts.view(-1).scatter_add_(0, rows * counts.shape[1] + token_ids.clamp(min=0), weights)
