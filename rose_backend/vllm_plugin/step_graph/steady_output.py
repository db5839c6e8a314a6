"""The tokens of a replayed step on their way to the host."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

Buffer = tuple[torch.Tensor, Any]
"""Pinned memory, [R, 1] int64, and the event behind the copy into it."""


class OutputBuffers:
    """Host memory for the tokens of steps in flight. A buffer is used again once its step's tokens were read.

    Args:
        max_num_rows: of a step.
        device: where the tokens are.
    """

    def __init__(self, max_num_rows: int, device: torch.device) -> None:
        self._max_num_rows = max_num_rows
        self._is_cuda = device.type == "cuda"
        self._free: list[Buffer] = []

    def copy(self, tokens: torch.Tensor, request_ids: list[str], index_of: dict[str, int]) -> SteadyOutput:
        """Start to copy the tokens of one step, [R] int64, behind what has been launched so far.

        The copy is on the stream of the steps: the next one overwrites ``tokens`` only after it.
        """
        buffer = self._free.pop() if self._free else self._make()
        host, event = buffer
        num_rows = len(request_ids)
        host[:num_rows].copy_(tokens[:num_rows].view(-1, 1), non_blocking=True)
        if event is not None:
            event.record()
        return SteadyOutput(request_ids, index_of, buffer, self._free)

    def _make(self) -> Buffer:
        host = torch.empty(self._max_num_rows, 1, dtype=torch.int64, pin_memory=self._is_cuda)
        # As vLLM's: a thread that waits sleeps, rather than holding a lock of the driver.
        return host, torch.cuda.Event(blocking=True) if self._is_cuda else None


class SteadyOutput(AsyncModelRunnerOutput):
    """What a replayed step returns to vLLM: one token per request. To be read once.

    Args:
        request_ids: in the order of the rows; shared between steps, as ``index_of`` is.
        index_of: request id to row.
        buffer: of the tokens.
        free: takes the buffer back.
    """

    def __init__(
        self, request_ids: list[str], index_of: dict[str, int], buffer: Buffer, free: list[Buffer]
    ) -> None:
        self._request_ids, self._index_of = request_ids, index_of
        self._buffer, self._free = buffer, free

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step, and return its tokens."""
        host, event = self._buffer
        if event is not None:
            event.synchronize()
        tokens = host[: len(self._request_ids)].tolist()
        self._free.append(self._buffer)
        return ModelRunnerOutput(
            req_ids=self._request_ids, req_id_to_index=self._index_of, sampled_token_ids=tokens
        )

    def get_kv_connector_output(self) -> None:
        """Return None: steps with a KV connector are vLLM's. Asked for from vLLM 0.33 on."""
        return
