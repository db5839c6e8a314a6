"""Log-probabilities of prompts, made of the hidden states of the pass that computes the prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.config import MAX_LOGPROBS
from rose_backend.engine.decode_runner import pack_words
from rose_backend.engine.output_thread import PromptReport, PromptRows
from rose_backend.engine.sequence_state import Int32Array, SequenceState
from rose_backend.kernels.arguments import LogprobReport
from rose_backend.kernels.captured_graphs import download, upload
from rose_backend.kernels.sampling.ops import report_logprobs
from rose_backend.models.base import CausalLM

LOGITS_BYTES = 128 << 20
"""Of the logits that are there at once: those of a long prompt would take gigabytes. So many rows of the usual
vocabularies are about what a GPU computes while it reads the output layer's weights."""
_ROW_MULTIPLE = 16
"""Parts of inputs start at multiples of 16 bytes then: Triton compiles a kernel again for pointers that do not."""


class ReportedRows(NamedTuple):
    """Rows of a pass that log-probabilities of prompts are made of, prompt after prompt."""

    parts: list[PromptRows]
    rows: NDArray[np.int64]  # [N] in the pass
    token_ids: NDArray[np.int64]  # [N], of the token after each
    num_logprobs: Int32Array  # [N]


@dataclass(frozen=True, slots=True)
class PendingReport:
    """What a step in flight reports of prompts."""

    parts: list[PromptRows]
    words: torch.Tensor
    """``LogprobWords`` in host memory, there when the step is over."""

    def read(self) -> PromptReport:
        """Return the report; the caller has waited."""
        return PromptReport(self.parts, self.words.numpy())


def take_rows(
    state: SequenceState, slots: Int32Array, starts: Int32Array, counts: Int32Array
) -> ReportedRows | None:
    """Return what a pass reports that computes ``counts[i]`` tokens of ``slots[i]`` from ``starts[i]`` on, all ``[R]``.

    The last token of a prompt has none to report after it. A request whose last one is taken asks for no more.

    Returns:
        None for nothing.
    """
    num_logprobs = state.num_prompt_logprobs[slots]
    if not np.count_nonzero(num_logprobs >= 0):
        return None
    parts, rows, token_ids, numbers = [], [], [], []
    first_rows = np.cumsum(counts, dtype=np.int64) - counts
    for index in np.flatnonzero(num_logprobs >= 0).tolist():
        slot, first = int(slots[index]), int(starts[index]) + 1
        end = min(int(starts[index]) + int(counts[index]) + 1, int(state.num_prompt_tokens[slot]))
        request = state.completion(slot).request
        parts.append(PromptRows(request, first, end - first))
        rows.append(first_rows[index] + np.arange(end - first))
        token_ids.append(state.token_ids[slot, first:end].astype(np.int64))
        numbers.append(np.full(end - first, num_logprobs[index], np.int32))
        if end == state.num_prompt_tokens[slot]:
            request.reports_prompt, state.num_prompt_logprobs[slot] = False, -1
    return ReportedRows(parts, *map(np.concatenate, (rows, token_ids, numbers)))


def report_prompts(model: CausalLM, hidden: torch.Tensor, reported: ReportedRows) -> PendingReport:
    """Start to compute what ``reported`` says, without waiting for it.

    Args:
        hidden: ``[T, E]``, of all tokens of the pass.
    """
    vocab_size, device = model.config.vocab_size, hidden.device
    rows, token_ids, num_logprobs = upload(device, *reported[1:])
    size = max(LOGITS_BYTES // (4 * vocab_size) // _ROW_MULTIPLE, 1) * _ROW_MULTIPLE
    shape = len(rows), 1 + min(MAX_LOGPROBS, vocab_size)
    report = LogprobReport(
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(len(rows), dtype=torch.int64, device=device),
    )
    for first in range(0, len(rows), size):
        some = slice(first, first + size)
        logits = model.compute_logits(hidden[rows[some]])
        part = LogprobReport(*(each[some] for each in report))
        report_logprobs(logits, token_ids[some], num_logprobs[some], part)
    logprobs, ids = report.logprobs, report.token_ids
    return PendingReport(
        reported.parts, download(pack_words(logprobs[:, 0], report.ranks, logprobs[:, 1:], ids[:, 1:]))
    )
