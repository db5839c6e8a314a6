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
"""Steps whose tokens are kept. vLLM reads a step's tokens before it schedules the second step after it, so fewer would
do. Workers other than the one that returns outputs never read them."""


@dataclass(frozen=True)
class ReplayedBatch:
    """The requests of a replayed step, in the order of the graphs' rows."""

    request_ids: list[str]
    end: str
    """Kind of the end that samples the step; with grammar masks, "processed" takes the place of the other two kinds of
    decodes."""
    draws: bool
    """Whether some request is not greedy."""
    num_logprobs: int | None
    """Largest number of most likely tokens that a request asks for; None if no request wants log-probabilities."""
    desc: Any
    """vLLM's ``BatchExecutionDescriptor`` of the graph of the layers."""
    slots: dict[str, int]
    """vLLM's slot of each request, by request id."""
    index_of: dict[str, int]
    """Row of each request, by request id."""
    num_rows_of_end: int
    """Rows of the captured end, padding included."""
    rows_without_token: tuple[int, ...] = ()
    """Rows whose prompt is not complete after this step."""


class OutputBuffers:
    """A ring of CPU buffers for the tokens and log-probabilities of the last ``NUM_BUFFERS`` steps.

    Args:
        max_num_rows: rows of a step at most.
        num_words: words of a row's ``ReportRecord``; 0 without log-probabilities.
        device: device of the tokens.
        max_num_tokens: tokens that a row gets at most: 1, or with drafts 1 more than there are.
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
        """Enqueue the copy of one step's tokens, and of its log-probabilities.

        The copies are on the stream of the steps, so the next step overwrites ``tokens`` only after them.

        Args:
            tokens: [R, ``max_num_tokens``] int64.
            record: [R, ``num_words``] int64, see ``ReportRecord``; None without log-probabilities.
            num_sampled: [R] int32, how many of each row's tokens count; None: all.
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
        """Wait for step number ``step``; return each row's tokens, and a copy of its ``record``.

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
        buffers: where the tokens are copied to.
        step: number of the step, as ``OutputBuffers`` counts.
        batch: its requests. Steps share its lists, so they must not be changed.
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
