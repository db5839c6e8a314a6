"""Running requests that decode one token each, as lists and arrays, so that a step schedules them without a loop.

The state of a request stays on vLLM's own object and is always up to date; this saves reading it again in each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData

from rose_backend.vllm_plugin.scheduler.output_fast_path import FastOutputs, KnownConstants, RequestConstants

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager

NewBlockIds = list[tuple[list[int], ...] | None]


class DecodeBatch:
    """The leading running requests, as far as they only decode. Steps share it while these stay the same.

    Args:
        running: the requests it stands for, in vLLM's order.
        requests: those of them that get a token.
        constants: of each of these.
        numbers: int64 ``[5, N]``, of each: row in the block manager, tokens that fit into it, computed tokens, tokens
            of the prompt, and computed tokens from which a step may be the last.
        kv_cache_manager: holds their blocks.
    """

    def __init__(
        self,
        running: list[Request],
        requests: list[Request],
        constants: list[RequestConstants],
        numbers: NDArray[np.int64],
        kv_cache_manager: RoseKVCacheManager,
    ) -> None:
        self.running = running
        self.request_ids = [request.request_id for request in requests]
        self.fast_outputs = FastOutputs(requests, constants)
        self._requests, self._constants, self._numbers = requests, constants, numbers
        self._grammar_requests = [r for r, each in zip(requests, constants, strict=True) if each.has_grammar]
        self._kv_cache_manager = kv_cache_manager
        self._rows, self._capacity, self._num_computed_tokens, self._num_prompt_tokens, last_steps = numbers
        # A request that gets no token now may be gone at the next step.
        is_complete = len(requests) == len(running)
        self._num_steps_left = int((last_steps - self._num_computed_tokens).min()) if is_complete else 0

    @classmethod
    def at_head_of(
        cls,
        running: list[Request],
        known_constants: KnownConstants,
        kv_cache_manager: RoseKVCacheManager,
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
        constants, numbers = _read(new_requests, known_constants, kv_cache_manager, is_few=last is not None)
        if last is not None:
            constants = last._constants + constants
            constants = [constants[position] for position in positions]
            numbers = np.concatenate((last._numbers, numbers), 1)[:, positions]
        return cls(running[:num_seen], requests, constants, numbers, kv_cache_manager)

    def _positions_of_next(self) -> dict[Request, int]:
        """Return the positions of the requests that certainly get another token."""
        if not self._has_outputs_or_placeholders():
            return {}
        known = dict(zip(self._requests, range(len(self._requests)), strict=True))
        for position in np.flatnonzero(self._numbers[2] >= self._numbers[4]).tolist():
            del known[self._requests[position]]
        return known

    def _has_outputs_or_placeholders(self) -> bool:
        """Whether the step before has its tokens or placeholders for them; the same for all requests."""
        request = self._requests[0]
        num_known = len(self._constants[0].all_token_ids) + request.num_output_placeholders
        return num_known - request.num_computed_tokens == 1

    def is_at_head_of(self, running: list[Request]) -> bool:
        """Whether it is still the batch of the leading requests: all get a token again, and no other would join."""
        num_requests = len(self.running)
        if (
            self._num_steps_left <= 0
            or running[:num_requests] != self.running
            or not self._has_outputs_or_placeholders()
        ):
            return False
        return len(running) == num_requests or running[num_requests].is_prefill_chunk

    def allocate_slots(self) -> NewBlockIds | None:
        """Make room for one token of each request.

        Returns:
            ``new_block_ids`` of vLLM's ``CachedRequestData``, or None when blocks are short; then nothing has changed.
        """
        new_block_ids: NewBlockIds = [None] * len(self._requests)
        full = np.flatnonzero(self._num_computed_tokens >= self._capacity)
        if len(full):
            full_rows, running = self._rows[full].tolist(), self._kv_cache_manager.running
            blocks = running.allocate_next_blocks(full_rows)
            if blocks is None:
                return None
            self._capacity[full] = [running.capacity[row] for row in full_rows]
            for position, new in zip(full.tolist(), blocks, strict=True):
                new_block_ids[position] = new.get_block_ids(allow_none=True)
        return new_block_ids

    @property
    def has_grammar(self) -> bool:
        """Whether a request has structured output."""
        return bool(self._grammar_requests)

    @property
    def lacks_grammar_tokens(self) -> bool:
        """Whether a grammar needs tokens of a step in flight before it can make its mask."""
        return any(request.num_output_placeholders for request in self._grammar_requests)

    def advance(self, new_block_ids: NewBlockIds, num_placeholders: int) -> CachedRequestData:
        """Count the next token of every request as scheduled.

        Args:
            new_block_ids: from ``allocate_slots``.
            num_placeholders: that the step adds to a request: 1 when the next step is scheduled before its end, else 0.

        Returns:
            The part of the scheduler output that the workers get.
        """
        data = CachedRequestData(
            req_ids=self.request_ids.copy(),
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_block_ids,
            num_computed_tokens=self._num_computed_tokens.tolist(),
            # All tokens but the one that this step computes are computed, placeholders included.
            num_output_tokens=(self._num_computed_tokens - self._num_prompt_tokens + 1).tolist(),
        )
        for request in self._requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += num_placeholders
        self._num_computed_tokens += 1
        self._num_steps_left -= 1
        return data


def _read(
    requests: list[Request],
    known_constants: KnownConstants,
    kv_cache_manager: RoseKVCacheManager,
    *,
    is_few: bool,
) -> tuple[list[RequestConstants], NDArray[np.int64]]:
    """Return the constants and numbers of requests; see ``DecodeBatch``.

    Args:
        is_few: whether there are other requests, whose cached constants are still needed.
    """
    constants = known_constants.read(requests) if is_few else known_constants.of(requests)
    numbers = np.empty((5, len(requests)), np.int64)
    numbers[0] = kv_cache_manager.get_decode_rows(requests)
    numbers[1] = [kv_cache_manager.running.capacity[row] for row in numbers[0].tolist()]
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
