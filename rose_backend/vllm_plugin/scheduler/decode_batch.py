"""Running requests that decode one token each, as lists and arrays, so that a step schedules them without a loop.

The state of a request stays on vLLM's own object and is always up to date; this saves reading it again in each step.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData

from rose_backend.vllm_plugin.scheduler.output_fast_path import FastOutputs, KnownConstants, RequestConstants

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from rose_backend.vllm_plugin.kv_cache.running_requests import RunningRequests

NewBlockIds = list[tuple[list[int], ...] | None]


class DecodeRequestData(CachedRequestData):
    """vLLM's ``CachedRequestData`` of decodes, whose numbers of tokens become lists when they are first read.

    Steps that are replayed whole read neither. Other processes get vLLM's own class.
    """

    _batch_numbers: NDArray[np.int64]
    _num_steps: int

    @classmethod
    def of(
        cls, request_ids: list[str], new_block_ids: NewBlockIds, numbers: NDArray[np.int64], num_steps: int
    ) -> DecodeRequestData:
        """Build the data of step ``num_steps``, counted from 0, of a batch with ``numbers``; see ``DecodeBatch``."""
        data = cls.__new__(cls)
        data.req_ids = request_ids
        data.resumed_req_ids = set()
        data.new_token_ids = []
        data.all_token_ids = {}
        data.new_block_ids = new_block_ids
        data._batch_numbers, data._num_steps = numbers, num_steps
        return data

    @cached_property
    def num_computed_tokens(self) -> list[int]:  # type: ignore[override]
        """Of each request, before the step."""
        computed: list[int] = (self._batch_numbers[2] + self._num_steps).tolist()
        return computed

    @cached_property
    def num_output_tokens(self) -> list[int]:  # type: ignore[override]
        """Of each request; all tokens but the one that this step computes are computed, placeholders included."""
        numbers = self._batch_numbers
        outputs: list[int] = (numbers[2] - numbers[3] + (self._num_steps + 1)).tolist()
        return outputs

    def __reduce__(self) -> tuple[type[CachedRequestData], tuple[Any, ...]]:
        fields = dataclasses.fields(CachedRequestData)
        return CachedRequestData, tuple(getattr(self, field.name) for field in fields)


class DecodeBatch:
    """The leading running requests, up to the first that does not decode. Steps share it while these stay the same.

    Args:
        running: these requests, in vLLM's order.
        requests: those of them that get a token.
        constants: of each of these.
        numbers: int64 ``[5, N]``, of each: row in the block manager, tokens that fit into it, computed tokens now,
            tokens of the prompt, and computed tokens from which a step may be the last.
        holders: the requests that hold blocks, these among them.
    """

    def __init__(
        self,
        running: list[Request],
        requests: list[Request],
        constants: list[RequestConstants],
        numbers: NDArray[np.int64],
        holders: RunningRequests,
    ) -> None:
        self.running = running
        self.request_ids = [request.request_id for request in requests]
        """Shared by all steps of the batch, as ``num_scheduled_tokens``: nobody changes them."""
        self.num_scheduled_tokens = dict.fromkeys(self.request_ids, 1)
        self.fast_outputs = FastOutputs(requests, constants)
        self._requests, self._constants, self._numbers = requests, constants, numbers
        self._grammar_requests = [r for r, each in zip(requests, constants, strict=True) if each.has_grammar]
        self._holders = holders
        self._rows, capacity, num_computed_tokens, _, last_steps = numbers
        self._num_steps = 0
        # A request that gets no token now may be gone at the next step.
        is_complete = len(requests) == len(running)
        self._last_step = int((last_steps - num_computed_tokens).min()) if is_complete else 0
        self._num_steps_with_room = capacity - num_computed_tokens
        self._full_at_step = int(self._num_steps_with_room.min())

    @classmethod
    def at_head_of(
        cls,
        running: list[Request],
        known_constants: KnownConstants,
        holders: RunningRequests,
        max_model_len: int,
        last: DecodeBatch | None,
    ) -> DecodeBatch | None:
        """Return the batch of all running requests before the first that needs more than one token, if any.

        Args:
            last: the batch of the step before; requests that it shares are not read again.
        """
        known = {} if last is None else last._positions_of_next()
        requests: list[Request] = []
        positions: list[int] = []
        new_requests: list[Request] = []
        num_known, num_seen = 0 if last is None else len(last._requests), 0
        for request in running:
            position = known.get(request)
            if position is None:
                num_new_tokens = _num_new_tokens(request, max_model_len)
                if num_new_tokens not in (0, 1) or request.is_prefill_chunk:
                    break
                if num_new_tokens == 1:
                    position = num_known + len(new_requests)
                    new_requests.append(request)
            num_seen += 1
            if position is not None:
                requests.append(request)
                positions.append(position)
        if not requests:
            return None
        constants, numbers = _read(new_requests, known_constants, holders, is_few=last is not None)
        if last is not None:
            constants = last._constants + constants
            constants = [constants[position] for position in positions]
            numbers = np.concatenate((last._numbers_now(), numbers), 1)[:, positions]
        return cls(running[:num_seen], requests, constants, numbers, holders)

    def _positions_of_next(self) -> dict[Request, int]:
        """Return the positions of the requests that certainly get another token."""
        if not self._has_outputs_or_placeholders():
            return {}
        known = dict(zip(self._requests, range(len(self._requests)), strict=True))
        for position in np.flatnonzero(self._numbers[2] + self._num_steps >= self._numbers[4]).tolist():
            del known[self._requests[position]]
        return known

    def _numbers_now(self) -> NDArray[np.int64]:
        numbers = self._numbers.copy()
        numbers[1] = numbers[2] + self._num_steps_with_room
        numbers[2] += self._num_steps
        return numbers

    def _has_outputs_or_placeholders(self) -> bool:
        """Whether the step before has its tokens or placeholders for them; the same for all requests."""
        request = self._requests[0]
        num_known = len(self._constants[0].all_token_ids) + request.num_output_placeholders
        return num_known - request.num_computed_tokens == 1

    def is_at_head_of(self, running: list[Request]) -> bool:
        """Whether it is still the batch of the leading requests: all get a token again, and no other would join."""
        num_requests = len(self.running)
        if self._num_steps >= self._last_step or not self._has_outputs_or_placeholders():
            return False
        if len(running) == num_requests:
            return running == self.running
        return running[:num_requests] == self.running and running[num_requests].is_prefill_chunk

    def allocate_slots(self) -> NewBlockIds | None:
        """Make room for one token of each request.

        Returns:
            ``new_block_ids`` of vLLM's ``CachedRequestData``, or None when blocks are short; then nothing has changed.
        """
        new_block_ids: NewBlockIds = [None] * len(self._requests)
        if self._num_steps >= self._full_at_step:
            full = np.flatnonzero(self._num_steps_with_room <= self._num_steps)
            full_rows, holders = self._rows[full].tolist(), self._holders
            blocks = holders.allocate_next_blocks(full_rows, len(self._requests))
            if blocks is None:
                return None
            capacity = np.array([holders.capacity[row] for row in full_rows])
            self._num_steps_with_room[full] = capacity - self._numbers[2][full]
            self._full_at_step = int(self._num_steps_with_room.min())
            for position, new in zip(full.tolist(), blocks, strict=True):
                new_block_ids[position] = new
        return new_block_ids

    @property
    def has_grammar(self) -> bool:
        """Whether a request has structured output."""
        return bool(self._grammar_requests)

    @property
    def lacks_grammar_tokens(self) -> bool:
        """Whether a grammar needs tokens of a step in flight before it can make its mask."""
        return any(request.num_output_placeholders for request in self._grammar_requests)

    def data_of_next_step(self, new_block_ids: NewBlockIds) -> CachedRequestData:
        """Return the part of the next step's scheduler output that the workers get.

        Args:
            new_block_ids: from ``allocate_slots``.
        """
        return DecodeRequestData.of(self.request_ids, new_block_ids, self._numbers, self._num_steps)

    def advance(self, num_placeholders: int, step_seq: int | None) -> None:
        """Count the next token of every request as scheduled.

        Args:
            num_placeholders: that the step adds to a request: 1 when the next step is scheduled before its end, else 0.
            step_seq: number of the step, where blocks may be freed only after the last one that writes them; or None.
        """
        self._num_steps += 1
        for request in self._requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += num_placeholders
        if step_seq is not None:
            for request in self._requests:
                request.last_sched_seq = step_seq


def _read(
    requests: list[Request],
    known_constants: KnownConstants,
    holders: RunningRequests,
    *,
    is_few: bool,
) -> tuple[list[RequestConstants], NDArray[np.int64]]:
    """Return the constants and numbers of requests; see ``DecodeBatch``.

    Args:
        is_few: whether there are other requests, whose cached constants are still needed.
    """
    constants = known_constants.read(requests) if is_few else known_constants.of(requests)
    numbers = np.empty((5, len(requests)), np.int64)
    rows = holders.rows_of(requests)
    numbers[0] = rows
    numbers[1] = [holders.capacity[row] for row in rows]
    numbers[2] = [request.num_computed_tokens for request in requests]
    numbers[3] = [request.num_prompt_tokens for request in requests]
    numbers[4] = [each.last_step for each in constants]
    return constants, numbers


def _num_new_tokens(request: Request, max_model_len: int) -> int:
    """Return how many tokens vLLM would schedule of a running request without limits of the step."""
    computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
    if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
        # A step in flight computes its last token.
        return 0
    return min(request.num_tokens_with_spec + placeholders, max_model_len - 1) - computed
