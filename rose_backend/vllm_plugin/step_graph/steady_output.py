"""The tokens of a replayed step on their way to the host."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from rose_backend.errors import IntegrityError

NUM_BUFFERS = 8
"""Steps whose tokens are kept at once. vLLM reads a step's tokens before it schedules the second step behind it, with
pipeline stages (which have no step graph) somewhat later. Workers that nobody asks for tokens never read them."""


class OutputBuffers:
    """Host memory for the tokens of the last steps, in turn.

    Args:
        max_num_rows: of a step.
        device: where the tokens are.
    """

    def __init__(self, max_num_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._tokens = [
            torch.empty(max_num_rows, 1, dtype=torch.int64, pin_memory=is_cuda) for _ in range(NUM_BUFFERS)
        ]
        # As vLLM's: a thread that waits sleeps, rather than holding a lock of the driver.
        self._events: list[Any] = [
            torch.cuda.Event(blocking=True) if is_cuda else None for _ in range(NUM_BUFFERS)
        ]
        self._num_steps = 0

    def copy(self, tokens: torch.Tensor, request_ids: list[str], index_of: dict[str, int]) -> SteadyOutput:
        """Start to copy the tokens of one step, [R] int64, behind what has been launched so far.

        The copy is on the stream of the steps: the next one overwrites ``tokens`` only after it.
        """
        step, num_rows = self._num_steps, len(request_ids)
        self._num_steps += 1
        host = self._tokens[step % NUM_BUFFERS]
        host[:num_rows].copy_(tokens[:num_rows].view(-1, 1), non_blocking=True)
        event = self._events[step % NUM_BUFFERS]
        if event is not None:
            event.record()
        return SteadyOutput(self, step, request_ids, index_of)

    def read(self, step: int, num_rows: int) -> list[list[int]]:
        """Wait for a step, counted from 0, and return the token of each row in a list of its own.

        Raises:
            IntegrityError: the tokens were overwritten by those of a later step.
        """
        event = self._events[step % NUM_BUFFERS]
        if event is not None:
            event.synchronize()
        tokens: list[list[int]] = self._tokens[step % NUM_BUFFERS][:num_rows].tolist()
        if self._num_steps > step + NUM_BUFFERS:
            raise IntegrityError(
                f"step graph: tokens of step {step} were asked for after {self._num_steps} steps, and "
                f"{NUM_BUFFERS} are kept"
            )
        return tokens


class SteadyOutput(AsyncModelRunnerOutput):
    """What a replayed step returns to vLLM: one token per request.

    Args:
        buffers: that hold the tokens.
        step: as ``OutputBuffers`` counts.
        request_ids: in the order of the rows; shared between steps, as ``index_of`` is.
        index_of: request id to row.
    """

    def __init__(
        self, buffers: OutputBuffers, step: int, request_ids: list[str], index_of: dict[str, int]
    ) -> None:
        self._buffers, self._step = buffers, step
        self._request_ids, self._index_of = request_ids, index_of

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step, and return its tokens."""
        tokens = self._buffers.read(self._step, len(self._request_ids))
        return ModelRunnerOutput(
            req_ids=self._request_ids, req_id_to_index=self._index_of, sampled_token_ids=tokens
        )

    def get_kv_connector_output(self) -> None:
        """Return None: steps with a KV connector are vLLM's. Asked for from vLLM 0.33 on."""
        return
