"""What a replayed step returns to vLLM, and the memory that it is copied to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

from rose_backend.errors import IntegrityError
from rose_backend.vllm_plugin.captured_processors import ReportRecord

NUM_BUFFERS = 8
"""Steps whose tokens are kept at once. vLLM reads a step's tokens before it schedules the second step after it, with
pipeline stages (which have no step graph) somewhat later. Workers that nobody asks for tokens never read them."""


@dataclass(frozen=True)
class ReplayedBatch:
    """The requests that the graphs' rows belong to now."""

    request_ids: list[str]
    end: str
    """The kind that samples it; a batch of decodes with grammars takes ``processed`` instead."""
    draws: bool
    """Whether some request is not greedy."""
    num_logprobs: int | None
    """Most likely tokens that a request wants at most; None if no request wants log-probabilities."""
    desc: Any
    """vLLM's ``BatchExecutionDescriptor``."""
    slots: dict[str, int]
    index_of: dict[str, int]
    num_rows_of_end: int
    rows_without_token: tuple[int, ...] = ()
    """Rows whose prompt is not complete after this step."""


class OutputBuffers:
    """CPU memory for the tokens of the last steps, in turn, and for what they report.

    Args:
        max_num_rows: of a step.
        num_words: of a row's ``ReportRecord``; 0 without reports.
        device: where the tokens are.
        max_num_tokens: of a row: one, or one after all drafts.
    """

    def __init__(
        self, max_num_rows: int, num_words: int, device: torch.device, max_num_tokens: int = 1
    ) -> None:
        is_cuda = device.type == "cuda"
        self._buffers = [
            (
                torch.empty(max_num_rows, max_num_tokens, dtype=torch.int64, pin_memory=is_cuda),
                torch.empty(max_num_rows, dtype=torch.int32, pin_memory=is_cuda),
                torch.empty(max_num_rows, num_words, dtype=torch.int64, pin_memory=is_cuda),
                # As vLLM's: a thread that waits sleeps, rather than holding a lock of the driver.
                torch.cuda.Event(blocking=True) if is_cuda else None,
            )
            for _ in range(NUM_BUFFERS)
        ]
        self._num_steps = 0

    def copy(
        self,
        batch: ReplayedBatch,
        tokens: torch.Tensor,
        record: torch.Tensor | None = None,
        num_sampled: torch.Tensor | None = None,
    ) -> ReplayedOutput:
        """Start to copy the tokens of one step, after what has been launched so far, and its record.

        The copies are on the stream of the steps: the next one overwrites ``tokens`` only after them.

        Args:
            tokens: [R, ``max_num_tokens``] int64.
            num_sampled: [R] int32, of each row's tokens; None: all, or none in rows without a token.
        """
        step, num_rows = self._num_steps, len(batch.request_ids)
        self._num_steps += 1
        on_cpu, counts_on_cpu, record_on_cpu, event = self._buffers[step % NUM_BUFFERS]
        on_cpu[:num_rows].copy_(tokens[:num_rows], non_blocking=True)
        if num_sampled is not None:
            counts_on_cpu[:num_rows].copy_(num_sampled[:num_rows], non_blocking=True)
        if record is not None:
            record_on_cpu[:num_rows].copy_(record[:num_rows], non_blocking=True)
        if event is not None:
            event.record()
        return ReplayedOutput(self, step, batch)

    def read(self, step: int, batch: ReplayedBatch) -> tuple[list[list[int]], NDArray[np.int64] | None]:
        """Wait for a step, counted from 0; return each row's list of tokens, and a copy of what it reports.

        Raises:
            IntegrityError: the tokens were overwritten by those of a later step.
        """
        on_cpu, counts_on_cpu, record_on_cpu, event = self._buffers[step % NUM_BUFFERS]
        num_rows = len(batch.request_ids)
        if event is not None:
            event.synchronize()
        tokens: list[list[int]] = on_cpu[:num_rows].tolist()
        if on_cpu.shape[1] > 1:
            for of_row, count in zip(tokens, counts_on_cpu[:num_rows].tolist(), strict=True):
                del of_row[count:]
        for row in batch.rows_without_token:
            tokens[row] = []
        # A later step writes to this memory, perhaps before the front end has been told.
        record = None if batch.num_logprobs is None else record_on_cpu[:num_rows].numpy().copy()
        if self._num_steps > step + NUM_BUFFERS:
            raise IntegrityError(
                f"step graph: tokens of step {step} were asked for after {self._num_steps} steps, and "
                f"{NUM_BUFFERS} are kept"
            )
        return tokens, record


class ReplayedOutput(AsyncModelRunnerOutput):
    """What a replayed step returns to vLLM: a token of each request whose prompt is complete, and log-probabilities.

    Args:
        buffers: that hold the tokens.
        step: as ``OutputBuffers`` counts.
        batch: of the step; its lists are shared between steps.
    """

    def __init__(self, buffers: OutputBuffers, step: int, batch: ReplayedBatch) -> None:
        self._buffers, self._step, self._batch = buffers, step, batch
        self.kv_connector_output: KVConnectorOutput | None = None

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step, and return its tokens."""
        batch = self._batch
        tokens, record = self._buffers.read(self._step, batch)
        output = ModelRunnerOutput(
            req_ids=batch.request_ids,
            req_id_to_index=batch.index_of,
            sampled_token_ids=tokens,
            kv_connector_output=self.kv_connector_output,
        )
        if record is not None and batch.num_logprobs is not None:
            output.logprobs = ReportRecord.read(record, batch.num_logprobs)
        return output

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Return what the KV connector has reported; vLLM asks from 0.33 on, if ``get_output`` has failed."""
        return self.kv_connector_output
